"""`train offline`: what it says, what is held out, and runs that go on."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from replaylake.cli.main import main
from replaylake.datastore.lake.lake import open_lake

TRAIN = ("train", "offline", "cartpole", "--policy", "clone", "--set", "hidden_sizes=[8]")
BC = (*TRAIN, "--algorithm", "bc")


@pytest.fixture(autouse=True)
def ingested(lake: Path, cartpole: Path) -> None:
    source = str(cartpole / "small.json")
    assert main(["ingest", source, "--dataset", "cartpole", "--lake", str(lake)]) == 0


def test_it_names_the_run_and_says_how_the_policy_was_chosen(run: Any) -> None:
    ran = run(*BC, "--updates", "20", "--holdout", "0.3", "--json")
    assert ran.code == 0, ran.err
    assert re.search(r"^run \w{26}$", ran.err, re.MULTILINE)
    body = ran.json
    selection = body["selection"]
    assert (selection["measure"], selection["higher_is_better"]) == ("loss", False)
    assert len(selection["history"]) == 10
    assert min(point["value"] for point in selection["history"]) == selection["value"]
    assert body["update"] == selection["update"]
    lines = run(*BC, "--updates", "20", "--holdout", "0.3").out.splitlines()
    assert lines[1].startswith("20 updates  ")
    assert re.match(
        r"took the policy of update \d+, the best of 10 by loss on the held-out episodes: ",
        lines[2],
    )


def test_held_out_episodes_are_in_the_lineage(run: Any) -> None:
    body = run(*BC, "--updates", "5", "--holdout", "0.3", "--json").json
    (dataset,) = body["datasets"]
    assert "md5" in dataset["where"]
    assert dataset["num_episodes"] < 3
    shown = run("policies", "show", "clone", "--json").json
    assert shown["manifest"]["holdout"] == {"fraction": 0.3, "salt": ""}
    assert shown["lineage"]["holdout"] == {"fraction": 0.3, "salt": ""}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*BC, "--holdout", "0.0001"), "found 0 of 3 episodes held out"),
        ((*BC, "--holdout-after", "2026-01-01"), "timestamp"),
        ((*BC, "--set", "select=fqe"), "no held-out"),
        ((*BC, "--set", "select=environment"), "no environment"),
        ((*BC, "--set", "select=best"), "auto"),
        ((*BC, "--set", "patience=0"), "patience"),
        ((*BC, "--set", "learning_rate=inf"), "learning_rate: found inf, expected a finite number"),
        ((*BC, "--set", f"batch_size={10**12}"), "a whole number from 1 to 2147483647"),
        ((*BC, "--set", "holdout_after=2026-01-01"), "timestamp"),
        ((*BC, "--set", "normalize_rewards=all"), "return_range"),
        (("train", "offline", "--resume", "01x"), "run '01x'"),
    ],
)
def test_what_is_refused_is_one_line_and_no_run(
    run: Any, lake: Path, arguments: tuple[str, ...], said: str
) -> None:
    ran = run(*arguments)
    assert ran.code == 1, ran
    (line,) = [line for line in ran.err.splitlines() if not line.startswith("snapshot ")]
    assert line.startswith("error: ")
    assert said in line
    assert open_lake(lake).registry.runs() == []


@pytest.mark.parametrize(
    ("arguments", "option", "said"),
    [
        (("--holdout", "1.5"), "--holdout", "above 0 and below 1"),
        (("--holdout", "0.2", "--holdout-after", "2026-01-01"), "--holdout", "one of both"),
        (("--holdout-after", "soon"), "--holdout-after", "found 'soon', expected an ISO time"),
        (("--seed", str(2**63)), "--seed", "0 to 2^63 - 1"),
        (("--updates", "0"), "--updates", "found 0, expected 1 or more"),
    ],
)
def test_a_value_that_the_library_refuses_is_wrong_usage(
    run: Any, lake: Path, arguments: tuple[str, ...], option: str, said: str
) -> None:
    ran = run(*BC, *arguments)
    assert ran.code == 2
    assert f"Invalid value for {option}: " in ran.err
    assert said in " ".join(ran.err.split())
    assert open_lake(lake).registry.runs() == []


def test_prioritized_is_refused_by_name(run: Any, lake: Path) -> None:
    ran = run(*BC, "--set", "prioritized=true")
    assert ran.code == 1
    assert "algorithm bc: found that it returns no priorities" in ran.err
    assert open_lake(lake).registry.list() == []


def test_what_is_not_finite_names_the_rows_in_json(run: Any) -> None:
    ran = run(*BC, "--set", "learning_rate=1e30", "--updates", "50", "--json")
    assert ran.code == 1
    error = ran.json["error"]
    assert "at update" in error["message"]
    assert (error["metric"], len(error["row_keys"])) == ("policy_loss", 256)


def test_the_refused_parameter_is_in_json(run: Any) -> None:
    ran = run(*BC, "--set", "learning_rate='fast'", "--json")
    assert ran.code == 1
    assert ran.json["error"]["kind"] == "ConfigInvalidError"
    assert ran.json["error"]["parameter"] == "learning_rate"


@pytest.mark.parametrize(
    "beside",
    [
        ("cartpole",),
        ("--policy", "p"),
        ("--updates", "5"),
        ("--set", "seed=1"),
        ("--env", "CartPole-v1"),
        ("--where", "true"),
    ],
)
def test_resuming_takes_nothing_else(run: Any, beside: tuple[str, ...]) -> None:
    ran = run("train", "offline", "--resume", "01x", *beside)
    assert ran.code == 2
    assert "--resume" in ran.err


def test_without_resume_it_needs_a_dataset_and_a_name(run: Any) -> None:
    assert run("train", "offline", "--algorithm", "bc", "--policy", "p").code == 2
    assert run("train", "offline", "cartpole", "--algorithm", "bc").code == 2


def test_no_project_of_weights_and_biases_is_wrong_usage(run: Any, lake: Path) -> None:
    ran = run(*BC, "--wandb", " ")
    assert (ran.code, open_lake(lake).registry.runs()) == (2, [])
    assert "--wandb" in ran.err


def test_a_run_is_resumed_by_how_only_its_id_begins(run: Any) -> None:
    ids = [run(*BC, "--updates", "2", "--json").json["run_id"] for _ in range(2)]
    differs = [one != other for one, other in zip(*ids, strict=True)].index(True)
    shared = ids[0][:differs]
    ran = run("train", "offline", "--resume", ids[1][: differs + 1], "--json")
    assert (ran.json["run_id"], ran.json["was_done"]) == (ids[1], True)
    ran = run("train", "offline", "--resume", shared)
    assert ran.code == 1
    assert "found 2 runs that begin so" in ran.err


def test_a_run_that_is_done_says_so(run: Any) -> None:
    run_id = run(*BC, "--updates", "5", "--json").json["run_id"]
    ran = run("train", "offline", "--resume", run_id)
    assert ran.code == 0
    assert ran.out.startswith(f"run {run_id} is done already: nothing was changed\n")
    assert ran.out.endswith("saved policy clone:1\n")
    assert run("train", "offline", "--resume", run_id, "--json").json["was_done"] is True


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_says_how_to_go_on(
    run: Any, lake: Path, tmp_path: Path, number: signal.Signals
) -> None:
    said = tmp_path / "said"
    command = [sys.executable, "-m", "replaylake.cli.main", *BC, "--updates", "1000000"]
    with said.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--lake", str(lake)], stdout=subprocess.DEVNULL, stderr=stderr,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 60
            while "update " not in said.read_text():
                assert time.monotonic() < deadline, said.read_text()
                assert process.poll() is None, said.read_text()
                time.sleep(0.05)
            process.send_signal(number)
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()
            process.wait()
    lines = said.read_text().splitlines()
    assert lines[-1] == "interrupted"
    match = re.fullmatch(
        r"`replaylake train offline --resume (\w{26})` goes on after update ([\d,]+)", lines[-2]
    )
    assert match, lines
    # The bar's last line does not come in between.
    assert lines[-3].startswith("update ")
    (record,) = open_lake(lake).registry.runs()
    assert (record["run_id"], record["status"]) == (match[1], "interrupted")
