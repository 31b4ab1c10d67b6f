"""`replaylake runs`: lists, shows and compares what training left in the lake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.runs.checkpoints import Checkpoints
from replaylake.datastore.lake.runs.metrics import MetricsLog

FIRST, SECOND, KILLED, FAILED = "01aa11", "01ab22", "01ac33", "02dd44"


def _record(lake: Lake, run_id: str, status: str, seed: int, **fields: Any) -> None:
    body = {
        "kind": "train offline",
        "status": status,
        "algorithm": "iql",
        "seed": seed,
        "policy": "pend",
        "started_ms": 1_800_000_000_000 + seed,
        "datasets": [{"dataset": "pendulum", "version": seed}],
        "config": {"updates": 300, "seed": seed, "options": {"hidden_sizes": [8, 8]}},
    }
    lake.registry.record_run(run_id, {**body, **fields})


@pytest.fixture(autouse=True)
def filled(lake: Path) -> Lake:
    """Two runs that are done, one that was killed after 200 updates, one that failed at once."""
    opened = open_lake(lake, create=True)
    for seed, (run_id, status) in enumerate(
        [(FIRST, "done"), (SECOND, "done"), (KILLED, "running"), (FAILED, "failed")], 1
    ):
        history = [{"update": u, "value": seed * u / 10} for u in (100, 200, 300)]
        ended: dict[str, Any] = {}
        if status == "done":
            ended = {
                "ended_ms": 1_800_000_090_000,
                "policy_version": seed,
                "update": 300,
                "selection": {
                    "measure": "environment",
                    "update": 300,
                    "value": seed * 30.0,
                    "history": history,
                },
                "evaluation": {"mean_return": 12.5},
            }
        if status == "failed":
            ended = {"ended_ms": 1_800_000_001_000, "error": "TrainingError: a loss is NaN"}
        _record(opened, run_id, status, seed, **ended)
        if status == "failed":
            continue
        with MetricsLog(opened.storage, run_id) as log:
            for entry in history[: 2 if status == "running" else 3]:
                update = entry["update"]
                log.add(update, {"critic_loss": 100 / update, "q_mean": update}, 0.0)
                log.add(update, {"selection/environment": entry["value"]}, 0.0)
    Checkpoints(opened.storage, KILLED).save(200, {}, {})
    return opened


def test_list(run: Any) -> None:
    ran = run("runs", "list")
    header, *rows = [line.split("  ") for line in ran.out.splitlines()]
    assert header[0] == "run_id"
    assert [row[0] for row in rows] == [FIRST, SECOND, KILLED, FAILED]
    body = run("runs", "list", "--json").json["runs"]
    assert [one["status"] for one in body] == ["done", "done", "killed", "failed"]
    assert [one["update"] for one in body] == [300, 300, 200, None]
    assert [one["best"] for one in body] == [30.0, 60.0, 60.0, None]
    assert [one["policy"] for one in body] == ["pend:1", "pend:2", None, None]
    assert body[0]["started_at"] == "2027-01-15T08:00:00+00:00"
    assert body[0]["datasets"] == ["pendulum@1"]


def test_list_is_filtered(run: Any) -> None:
    def ids(*arguments: str) -> list[str]:
        return [one["run_id"] for one in run("runs", "list", "--json", *arguments).json["runs"]]

    assert ids("--status", "killed") == [KILLED]
    assert ids("--status", "done", "--dataset", "pendulum") == [FIRST, SECOND]
    assert ids("--dataset", "pend") == []
    assert run("runs", "list", "--dataset", "pend").err.startswith("no matching runs")
    ran = run("runs", "list", "--status", "dead")
    assert (ran.code, "expected one of running, killed" in " ".join(ran.err.split())) == (2, True)


def test_show(run: Any) -> None:
    lines = run("runs", "show", "01aa").out.splitlines()
    assert lines[0] == f"{FIRST}  done"
    assert "  best        30 by environment after update 300" in lines
    assert "  evaluation  12.5" in lines
    assert "        hidden_sizes  [8, 8]" in lines
    at = lines.index("selection/environment")
    assert lines[at + 1].startswith("30 ")
    assert lines[at + 10].startswith("10 ")
    assert "▲" in lines[at + 11]
    table = [line.split() for line in lines[at + 14 :]]
    assert table[0] == ["metric", "curve", "last", "best", "best_update"]
    assert table[1] == ["selection/environment", "▁▅█", "30", "30", "300"]
    # Losses are best where they are least; of the others no best is known.
    assert table[2][0] == "critic_loss"
    assert table[2][2:] == ["0.333333", "0.333333", "300"]
    assert table[3] == ["q_mean", "▁▅█", "300"]


def test_show_a_run_that_was_killed_or_failed(run: Any) -> None:
    lines = run("runs", "show", KILLED).out.splitlines()
    assert lines[0] == f"{KILLED}  killed"
    assert "  checkpoints 200" in lines
    assert run("runs", "show", KILLED, "--json").json["checkpoints"] == [200]
    lines = run("runs", "show", FAILED).out.splitlines()
    assert "  error       TrainingError: a loss is NaN" in lines
    assert "selection/environment" not in lines


def test_show_one_metric(run: Any) -> None:
    out = run("runs", "show", FIRST, "--metric", "critic_loss", "--metric", "q_mean").out
    lines = out.splitlines()
    assert [line for line in lines if line in ("critic_loss", "q_mean")] == [
        "critic_loss",
        "q_mean",
    ]
    assert "selection/environment" not in lines
    body = run("runs", "show", FIRST, "--metric", "q_mean", "--json").json
    assert body["metrics"] == {"q_mean": {"updates": [100, 200, 300], "values": [100, 200, 300]}}
    assert body["record"]["seed"] == 1


def test_compare(run: Any) -> None:
    out = run("runs", "diff", FIRST, SECOND, KILLED).out
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines() if line}
    assert rows["A"][:3] == ["A", FIRST, "done"]
    assert rows["seed"] == ["seed", "1", "2", "3"]
    assert rows["datasets.0.dataset"][1:] == ["pendulum@1", "pendulum@2", "pendulum@3"]
    assert "updates" not in rows
    assert rows["selection/environment (best)"][2:] == ["30", "60", "60"]
    assert rows["critic_loss (last)"][2:] == ["0.333333", "0.333333", "0.5"]
    drawn = out.split("\nselection/environment\n")[1]
    assert {"A", "B", "C"} <= set(drawn)
    body = run("runs", "diff", FIRST, SECOND, "--json").json
    assert body["options"]["seed"] == [1, 2]
    assert [one["run_id"] for one in body["runs"]] == [FIRST, SECOND]
    assert body["metrics"]["q_mean"][1]["last"] == 300.0


def test_runs_of_the_same_options_say_so(run: Any, filled: Lake) -> None:
    for run_id in ("03ee", "03ff"):
        _record(filled, run_id, "done", 9)
    out = run("runs", "diff", "03ee", "03ff").out
    assert out.splitlines()[-1] == "asked for the same"


@pytest.mark.slow
def test_pictures(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    ran = run("runs", "show", FIRST, "--plot", path)
    assert ran.err == f"wrote {path}\n"
    with Image.open(path) as image:
        assert min(image.size) > 300
        # Something is drawn on the white: lines in the first color.
        colors = {color for _, color in image.convert("RGB").getcolors(1 << 20) or ()}
        assert (0, 114, 178) in colors
    path = tmp_path / "both.svg"
    assert run("runs", "diff", FIRST, SECOND, "--plot", path).code == 0
    text = path.read_text()
    for said in (FIRST, SECOND, "selection/environment", "critic_loss", "q_mean"):
        assert said in text
    assert run("runs", "diff", FIRST, SECOND, "--metric", "q_mean", "--plot", path).code == 0
    assert "critic_loss" not in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "09"), "found no run or policy of that name in this lake"),
        (("show", "01"), "found 3 runs that begin so"),
        (("show", FIRST, "--metric", "critc_loss"), "expected critic_loss"),
        (("diff", FIRST, "09"), "found no run or policy of that name"),
        (("show", FIRST, "--plot", "x.gif"), "expected .png, .svg, .pdf"),
        (("show", FAILED, "--plot", "x.png"), "no metrics of 02dd44 yet"),
    ],
)
def test_what_is_refused(run: Any, arguments: tuple[str, ...], said: str) -> None:
    run("runs", *arguments).failed(said)


def test_one_run_is_no_comparison(run: Any) -> None:
    assert run("runs", "diff", FIRST, FIRST).code == 2


@pytest.mark.slow
def test_runs_are_named_by_the_policies_that_they_trained(
    run: Any, log: Path, tmp_path: Path
) -> None:
    assert run("ingest", log, "--dataset", "log", "--map", "observation=x,y").code == 0
    small = ("--algorithm", "bc", "--set", "batch_size=4", "--set", "hidden_sizes=[8]")
    for updates in ("10", "20"):
        trained = ("log", "--policy", "cart", "--updates", updates, *small)
        assert run("train", "offline", *trained).code == 0
    assert run("promote", "cart:1", "--to", "champion").code == 0
    path = tmp_path / "both.svg"
    compared = run("runs", "diff", "cart:2", "cart@champion", "--plot", path, "--json").json
    assert [one["policy"] for one in compared["runs"]] == ["cart:2", "cart:1"]
    assert compared["options"]["updates"] == [20, 10]
    text = path.read_text()
    assert all(label in text for label in ("cart:2", "cart@champion"))
    # Its champion, as everywhere that a policy is named.
    assert run("runs", "show", "cart", "--json").json["policy"] == "cart:1"
    run("runs", "show", "pend").failed("policy 'pend'")
    run("runs", "show", "cart:3").failed("version 3 is not there")
    # The same run twice is one.
    assert run("runs", "diff", "cart", "cart:1").code == 2
