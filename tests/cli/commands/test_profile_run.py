"""`replaylake runs profile` and `runs`, of an online run that goes on and of one that is done."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.lake.runs.metrics import MetricsLog
from replaylake.datastore.lake.runs.timings import WALL_SECONDS, Timings
from replaylake.online.training.config import OnlineConfig, OnlineRequest

GOES_ON, DONE, OFFLINE, NEW = "01aa11", "01ab22", "02ac33", "03ad44"
STARTED_S = 1_800_000_000


def _record(lake: Lake, run_id: str, **fields: Any) -> None:
    config = OnlineConfig("dqn", steps=60_000, workers=2)
    request = OnlineRequest("live", replace(config, env="CartPole-v1", policy="pole")).to_json()
    body = {
        "kind": "train online",
        "status": "running",
        "algorithm": "dqn",
        "env_id": "CartPole-v1",
        "dataset": "live",
        "policy": "pole",
        "started_ms": STARTED_S * 1000,
        "config": request["config"],
    }
    lake.registry.record_run(run_id, {**body, **fields})


def _log(lake: Lake, run_id: str) -> None:
    """After 10 and 20 seconds: first the learner waits, then the workers."""
    worker, trainer = Timings("workers"), Timings("trainer")
    with MetricsLog(lake.storage, run_id) as log:
        for update, seconds in (
            (100, {"env_step": 16.0, "worker_wait": 1.0, "update": 2.0, "learner_wait": 7.0}),
            (900, {"env_step": 4.0, "worker_wait": 15.0, "update": 9.0}),
        ):
            for link, one in seconds.items():
                times = worker if link in {"env_step", "worker_wait"} else trainer
                times.add(link, one, round(1000 * one), round(5e6 * one))  # type: ignore[arg-type]
            values = {"env_steps": 10.0 * update, "return": update / 5, "staleness": 2.5}
            passed_s = 10.0 if update == 100 else 20.0
            log.add(update, {**values, "critic_loss": 0.5}, STARTED_S + passed_s)
            profile = {**worker.to_metrics(), **trainer.to_metrics(), WALL_SECONDS: passed_s}
            log.add(update, profile, STARTED_S + passed_s)
        log.add(900, {"selection/environment": 190.0}, STARTED_S + 21)


@pytest.fixture
def filled(lake: Path) -> Lake:
    opened = open_lake(lake, create=True)
    _record(opened, GOES_ON)
    _log(opened, GOES_ON)
    _record(
        opened,
        DONE,
        status="done",
        ended_ms=(STARTED_S + 30) * 1000,
        num_steps=9000,
        num_updates=900,
        num_episodes=80,
        policy_version=1,
        mean_return=180.0,
        staleness=2.5,
        selection={"measure": "environment", "update": 900, "value": 190.0},
    )
    _log(opened, DONE)
    _record(opened, OFFLINE, kind="train offline", datasets=[{"dataset": "live", "version": 3}])
    _record(opened, NEW)
    return opened


def test_the_table_and_the_bottleneck(run: Any, filled: Lake) -> None:
    with RunLease(filled.storage, GOES_ON):
        lines = run("runs", "profile", GOES_ON).out.splitlines()
    head = f"run {GOES_ON}  running  20 s of the trainer and 2 workers, until update 900"
    assert lines[0] == head
    assert re.split("  +", lines[1].strip()) == [
        *("link", "of", "seconds", "share %", "items", "items/s", "MB", "MB/s")
    ]
    rows = [line.split() for line in lines[2:-1]]
    assert rows == [
        ["env_step", "workers", "20", "33.3", "20000", "1000", "100", "5"],
        ["worker_wait", "workers", "16", "26.7", "16000", "80", "5"],
        ["other", "workers", "4", "6.7"],
        ["update", "trainer", "11", "18.3", "11000", "1000", "55", "5"],
        ["learner_wait", "trainer", "7", "11.7", "7000", "35", "5"],
        ["other", "trainer", "2", "3.3"],
    ]
    assert lines[-1].startswith("bottleneck: rate limiter: neither may run further ahead; the ")


def test_the_last_interval_alone(run: Any, filled: Lake) -> None:
    body = run("runs", "profile", "01aa", "--last", "--json").json
    assert (body["run_id"], body["status"], body["only_last"]) == (GOES_ON, "killed", True)
    assert (body["wall_s"], body["processes"]) == (10.0, 3)
    assert body["links"][0]["seconds"] == 4.0
    assert body["bottleneck"] == {
        "cause": "learner",
        "link": "update",
        "reason": "update takes 90% of the trainer's time; the learner waits 0% of its time, the "
        "workers 75%",
    }
    lines = run("runs", "profile", "01aa", "--last").out.splitlines()
    assert "  killed  the last 10 s of the trainer and 2 workers, until update 900" in lines[0]


def test_two_runs_beside_each_other(run: Any, filled: Lake) -> None:
    lines = run("runs", "profile", GOES_ON, DONE).out.splitlines()
    assert lines[0].startswith(f"A: run {GOES_ON}  killed  20 s of the trainer and 2 workers")
    assert lines[1].startswith(f"B: run {DONE}  done  20 s of the trainer and 2 workers")
    assert lines[3].split() == ["env_step", "workers", "20", "20", "33.3", "33.3", "1", "1", "1"]
    assert [line[:13] for line in lines[-2:]] == ["A: bottleneck", "B: bottleneck"]
    body = run("runs", "profile", GOES_ON, DONE, "--json").json
    assert [one["run_id"] for one in body["runs"]] == [GOES_ON, DONE]
    assert run("runs", "profile", GOES_ON, DONE, GOES_ON).code == 2


def test_the_bounds_of_what_moves_bytes(run: Any, filled: Lake, tree: Any) -> None:
    log = Timings("trainer")
    log.add("sample", 1.0, 10, 10 * 4096)
    log.add("update", 1.0, 10)
    background = Timings("background")
    background.add("shard_write", 2.0, 4, 4 * 4096)
    background.add("commit", 2.0, 4, 4 * 4096)
    with MetricsLog(filled.storage, OFFLINE) as metrics:
        values = {**log.to_metrics(), **background.to_metrics(), WALL_SECONDS: 4.0}
        metrics.add(10, values, STARTED_S + 4)
    before = tree()
    links = {
        one["link"]: one
        for one in run("runs", "profile", OFFLINE, "--bounds", "--json").json["links"]
    }
    assert tree() == before
    # No machine copies as slowly, nor writes files as slowly.
    for link in ("sample", "shard_write"):
        assert links[link]["bound_mb_per_s"] > links[link]["mb_per_s"]
        ratio = links[link]["bound_mb_per_s"] / links[link]["mb_per_s"]
        assert links[link]["bound_ratio"] == pytest.approx(ratio)
    for link in ("update", "commit", "other"):
        assert links[link]["bound_mb_per_s"] is links[link]["bound_ratio"] is None
    lines = run("runs", "profile", OFFLINE, "--bounds").out.splitlines()
    assert lines[1].split("  ")[-2:] == ["bound MB/s", "bound/rate"]
    assert "bound" not in run("runs", "profile", OFFLINE).out.splitlines()[1]
    assert run("runs", "profile", GOES_ON, DONE, "--bounds").code == 2


@pytest.mark.parametrize(
    ("run_id", "said"),
    [
        (OFFLINE, "no totals of its links yet"),
        (NEW, "no totals of its links yet"),
        ("09", "found no run or policy of that name in this lake"),
    ],
)
def test_what_has_no_profile(run: Any, filled: Lake, run_id: str, said: str) -> None:
    run("runs", "profile", run_id).failed(said)


def test_options_of_runs_and_of_servers_are_told_apart(run: Any, filled: Lake) -> None:
    for arguments in (
        ("http://127.0.0.1:9", "--last"),
        ("http://127.0.0.1:9", GOES_ON),
        (GOES_ON, "--seconds", "3"),
        (GOES_ON, "--token-file", "admin"),
    ):
        assert run("runs", "profile", *arguments).code == 2, arguments
    run("runs", "profile", "http://127.0.0.1:9", "--bounds").failed("no response")


def test_they_are_listed_with_what_they_collected(run: Any, filled: Lake) -> None:
    header, *rows = [re.split("  +", line) for line in run("runs", "list").out.splitlines()]
    assert header[:8] == [
        *("run_id", "status", "algorithm", "datasets", "env_steps", "updates", "return"),
        "staleness",
    ]
    assert rows[0][:10] == [
        *(
            GOES_ON,
            "killed",
            "dqn",
            "live",
            "9,000/60,000",
            "900",
            "180",
            "2.5",
            "environment",
            "190",
        )
    ]
    assert rows[1][1:5] == ["done", "dqn", "live", "9,000/60,000"]
    body = run("runs", "list", "--dataset", "live", "--json").json["runs"]
    assert [one["run_id"] for one in body] == [GOES_ON, DONE, OFFLINE, NEW]
    for one in body[:2]:
        got = {key: one[key] for key in ("env", "env_steps", "steps", "mean_return", "staleness")}
        assert got == {
            "env": "CartPole-v1",
            "env_steps": 9000,
            "steps": 60_000,
            "mean_return": 180.0,
            "staleness": 2.5,
        }
        assert (one["update"], one["best"], one["datasets"]) == (900, 190.0, ["live"])
    # An offline run collects nothing, though its config has such names.
    assert (body[2]["env_steps"], body[2]["steps"], body[2]["mean_return"]) == (None, None, None)


def test_one_is_shown_without_the_times_of_its_links(run: Any, filled: Lake) -> None:
    out = run("runs", "show", GOES_ON).out
    lines = out.splitlines()
    for line in (
        "  env         CartPole-v1",
        "  datasets    live",
        "  env_steps   9,000/60,000",
        "  return      180 of its last episodes",
        "  staleness   2.5 versions",
        "  best        190 by environment after update 900",
    ):
        assert line in lines
    assert "profile/" not in out
    # The measure that it is chosen by first, then the return as it was collected.
    table = [line.split()[0] for line in lines[lines.index("") :] if line[:1].isalpha()]
    assert table[-5:] == [
        "selection/environment",
        "return",
        "env_steps",
        "staleness",
        "critic_loss",
    ]
    one = run("runs", "show", GOES_ON, "--metric", "profile/trainer/update/seconds", "--json").json
    assert one["metrics"] == {
        "profile/trainer/update/seconds": {"updates": [100, 900], "values": [2.0, 11.0]}
    }


def test_two_are_compared(run: Any, filled: Lake) -> None:
    out = run("runs", "diff", GOES_ON, DONE).out
    assert "asked for the same" in out
    assert "profile/" not in out
    assert re.search(r"^return \(best\) +180 +180$", out, re.M)
