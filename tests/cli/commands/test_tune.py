"""`replaylake tune`, and `train offline --learners`."""

import signal
import subprocess
import sys
import time

import pytest

from replaylake.datastore.lake.lake import open_lake

# Ray 2.60 reads settings of its own that it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")

SWEEP = """
datasets = ["log"]
policy = "swept"
algorithm = "bc"
updates = 10
batch_size = 4
hidden_sizes = [8]

[tune]
seeds = 2
measure = "policy_loss"
concurrency = 1

[tune.vary]
learning_rate = [1e-4, 0.1]
"""


@pytest.fixture
def filled(run, log):
    assert run("ingest", log, "--dataset", "log", "--map", "observation=x,y").code == 0
    return run


@pytest.fixture
def sweep(tmp_path):
    def write(*changes):
        text = SWEEP
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "sweep.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("arguments", [[], ["a.toml", "--resume", "01x"]])
def test_it_takes_a_file_or_a_sweep(run, arguments):
    found = run("tune", *arguments)
    assert (found.code, "expected CONFIG.toml, or --resume SWEEP alone" in found.err) == (2, True)


def test_a_file_that_is_not_there(run, tmp_path):
    run("tune", tmp_path / "none.toml").failed("none.toml: could not be read")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("hidden_sizes", "hidden_size"), "found option 'hidden_size', expected hidden_sizes"),
        (("datasets", "dataset"), "found 'dataset' but no datasets"),
        (("[tune.vary]", "[tune.vari]"), "tune: found option 'vari', expected vary"),
        (('measure = "policy_loss"\n', ""), "found no measure to compare trials by"),
        (("1e-4", "-1.0"), "learning_rate: found -1.0"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_nothing_is_written(
    filled, sweep, tree, change, said
):
    before = tree()
    filled("tune", sweep(change)).failed(said)
    assert {name for name in tree() if "_lake/runs" in name} == set()
    assert {n: b for n, b in tree().items() if "_log" in n} == {
        n: b for n, b in before.items() if "_log" in n
    }


def test_a_picture_that_cannot_be_drawn_is_refused_at_once(filled, sweep):
    filled("tune", sweep(), "--plot", "sweep.txt").failed("found .txt, expected .png, .svg, .pdf")
    assert filled("runs", "list", "--json").json["runs"] == []


def test_a_sweep_that_is_not_there(filled):
    filled("tune", "--resume", "01x").failed("tune '01x': not in this lake")


def test_learners_that_do_not_divide_the_batch(filled):
    given = ["--algorithm", "bc", "--policy", "p", "--learners", 3]
    filled("train", "offline", "log", *given).failed("batch_size: found 256, expected a multiple")


@pytest.mark.slow
def test_a_sweep_answers_with_a_table_and_goes_on_with_what_is_left(filled, sweep, tmp_path):
    found = filled("tune", sweep())
    assert found.code == 0, found.err
    said = found.err.splitlines()
    assert said[0].endswith(
        ": 2 combinations of options under 2 seeds: 4 trials, 1 at once, by policy_loss"
    )
    assert sum("saved policy swept:" in line for line in said) == 4
    lines = found.out.splitlines()
    assert lines[0] == "policy_loss, less is better:"
    columns = ["learning_rate", "mean", "ci_low", "ci_high", "difference", "seeds", "policy"]
    assert lines[1].split() == columns
    assert [line.split()[0] for line in lines[2:4]] == ["0.1", "0.0001"]
    assert lines[4].startswith("best: learning_rate=0.1  mean ")
    sweep_id = said[0].split()[1].rstrip(":")
    picture = tmp_path / "sweep.svg"
    drawn = filled("tune", "--resume", sweep_id, "--json", "--plot", picture)
    assert f"drew {picture}" in drawn.err
    assert "difference from the best," in picture.read_text()
    again = drawn.json
    assert again["sweep_id"] == sweep_id
    best, other = again["combinations"]
    assert best["difference"] is None
    assert (
        other["difference_low"] < other["difference"] == pytest.approx(other["mean"] - best["mean"])
    )
    assert again["best"]["options"] == {"learning_rate": 0.1}
    assert {trial["status"] for trial in again["trials"]} == {"done"}
    assert lines[4].endswith(f"policy {again['best']['policy']}")
    listed = filled("runs", "list", "--json").json["runs"]
    assert {row["run_id"] for row in listed} >= {trial["run_id"] for trial in again["trials"]}
    shown = filled("runs", "show", again["trials"][0]["run_id"], "--json").json
    assert shown["record"]["sweep"]["id"] == sweep_id


@pytest.mark.chaos
def test_two_learners_answer_as_one_does(filled):
    given = ["--algorithm", "bc", "--updates", 20, "--set", "batch_size=4", "--json"]
    one = filled("train", "offline", "log", "--policy", "one", *given).json
    both = filled("train", "offline", "log", "--policy", "both", "--learners", 2, *given)
    assert "update 20/20" in both.err
    assert both.json.keys() == one.keys()
    assert both.json["metrics"] == pytest.approx(one["metrics"], abs=1e-5)


@pytest.mark.parametrize(
    "when",
    [
        pytest.param("Ray starts", marks=pytest.mark.slow),
        pytest.param("trials are far from a measurement", marks=pytest.mark.chaos),
    ],
)
def test_sigterm_ends_a_sweep_within_seconds(filled, sweep, tmp_path, when):
    updates = "updates = 100_000_000\nevaluate_updates = 100_000_000"
    file = sweep(("updates = 10", updates))
    command = [sys.executable, "-m", "replaylake.cli.main", "tune", str(file)]
    command += ["--lake", str(tmp_path / "lake")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    first = process.stderr.readline()
    lake = open_lake(tmp_path / "lake")
    running = [when == "Ray starts"]
    while not any(running):
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
        running = [run["status"] == "running" and "sweep" in run for run in lake.registry.runs()]
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    # 2 to 4 s on 2 idle cores; a run goes on for hours to its first measurement.
    out, err = process.communicate(timeout=60)
    sweep_id = first.split()[1].rstrip(":")
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-2:] == [
        f"`replaylake tune --resume {sweep_id}` goes on",
        "interrupted",
    ]
    statuses = {run["run_id"]: run["status"] for run in lake.registry.runs()}
    assert set(statuses.values()) == {"interrupted"}
