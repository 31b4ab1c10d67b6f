"""Sweeps on Ray Tune: every trial a run in the lake, and none of them lost."""

import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from replaylake.datastore.errors import (
    CommitConflictError,
    ConfigInvalidError,
    NotFoundError,
    TrainingError,
)
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import load_learner_weights
from replaylake.datastore.lake.runs.lease import RunLease, last_heartbeat
from replaylake.datastore.lake.runs.metrics import read_curves
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.evaluation.intervals import student_t_interval
from replaylake.offline.running.train import resume, train
from replaylake.offline.running.training.interruption import RunInterrupted
from replaylake.offline.running.tune import resume_sweep, tune
from replaylake.offline.running.tuning.config import Sweep, tune_config
from replaylake.offline.running.tuning.ray_trials import to_comparable
from replaylake.offline.running.tuning.trial import Trial, TrialEnd, TrialMeasurement, TrialSpec

# Ray 2.60 reads settings of its own that it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")


@pytest.fixture
def lake(tmp_path, line_world):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("line").append(line_world(num_episodes=8))
    return lake


def asked(vary=None, seeds=(0, 1), **changes):
    table = {
        key: changes.pop(key)
        for key in ("asha", "grace_updates", "concurrency", "measure", "mode")
        if key in changes
    }
    given = {
        "datasets": "line",
        "policy": "p",
        "algorithm": "bc",
        "updates": 20,
        "batch_size": 8,
        "holdout": 0.3,
        "hidden_sizes": [8],
        "tune": {"seeds": list(seeds), "vary": vary or {}, "concurrency": 2, **table},
    }
    return {**given, **changes}


def sweep_record(lake):
    (record,) = [run for run in lake.registry.runs() if run["kind"] == "tune"]
    return record


def trial_runs(lake):
    return {run["sweep"]["trial"]: run for run in lake.registry.runs() if "sweep" in run}


def work(lake, given, number=0, run_id=None):
    sweep = Sweep.of(*tune_config(given)).pin(lake)
    options = sweep.tune.combinations()[0]
    label = {"id": "s", "trial": number, "options": options}
    return TrialSpec(
        lake.url, number, sweep.trial_request(options, 0), run_id, label, "selection/loss", "min"
    )


def test_a_trial_waits_at_each_measurement(lake):
    trial = Trial(work(lake, asked(evaluate_updates=8)))
    first = trial.next()
    (run,) = lake.registry.runs()
    time.sleep(0.2)
    assert (run["status"], run["sweep"]) == ("running", {"id": "s", "trial": 0, "options": {}})
    # What it logs after the measurement's update is not there: it is waiting.
    assert max(read_curves(lake.storage, run["run_id"]).get("policy_loss", _Empty).updates) <= 8
    points = [first, trial.next(), trial.next()]
    assert [point.update for point in points] == [8, 16, 20]
    assert trial.next() == TrialEnd()
    (run,) = lake.registry.runs()
    history = run["selection"]["history"]
    assert points == [TrialMeasurement(point["update"], point["value"]) for point in history]
    trial.stop()


class _Empty:
    updates = (0,)


def test_a_trial_that_is_stopped_saves_and_can_go_on(lake):
    whole = train(lake, ["line"], replace(work(lake, asked()).request.config, policy="whole"))
    trial = Trial(work(lake, asked()))
    assert [trial.next().update for _ in range(3)] == [2, 4, 6]
    trial.stop()
    (run,) = [run for run in lake.registry.runs() if "sweep" in run]
    assert run["status"] == "interrupted"
    again = Trial(work(lake, asked(), run_id=run["run_id"]))
    assert again.next().update == 8
    while isinstance(again.next(), TrialMeasurement):
        pass
    (run,) = [run for run in lake.registry.runs() if "sweep" in run]
    assert (run["status"], run["resumed"][0]["update"]) == ("done", 7)
    made = lake.registry.resolve(f"p:{run['policy_version']}")
    expected = load_learner_weights(whole.policy.path)
    for name, array in load_learner_weights(made.path).items():
        assert array.tobytes() == expected[name].tobytes(), name


def test_a_trial_that_fails_says_why(lake):
    trial = Trial(work(lake, asked(learning_rate=1e38, updates=100, evaluate_updates=100)))
    told = trial.next()
    assert told.error.startswith("NotFiniteError: training: policy_loss is nan")
    trial.stop()


def test_what_is_no_number_is_worse_than_all_others():
    assert to_comparable(float("nan"), "max") < -1e299 < 1e299 < to_comparable(float("inf"), "min")
    assert to_comparable(2.5, "max") == 2.5


@pytest.mark.slow
def test_gpus_that_the_machine_does_not_have_are_refused_at_once(lake):
    given = asked()
    given["tune"]["gpus_per_trial"] = torch.cuda.device_count() + 1
    with pytest.raises(
        ConfigInvalidError, match=r"trials: found .* GPUs on 1 nodes of the Ray cluster, expected"
    ):
        tune(lake, *tune_config(given))


def test_a_sweep_that_cannot_be_is_refused_before_it_is_recorded(lake):
    with pytest.raises(ConfigInvalidError, match="found option 'learning_rat'"):
        tune(lake, *tune_config(asked(learning_rat=1)))
    assert lake.registry.runs() == []
    with pytest.raises(NotFoundError, match="tune '01x': not in this lake"):
        resume_sweep(lake, "01x")


@pytest.mark.slow
def test_every_trial_is_a_run_and_the_best_mean_is_named(ray, lake):
    started, told, processes = [], [], {}

    def on_progress(progress):
        told.append(progress)
        for number, run in trial_runs(lake).items():
            if heartbeat := last_heartbeat(lake.storage, run["run_id"]):
                processes[number] = heartbeat.pid

    result = tune(
        lake,
        *tune_config(asked({"learning_rate": [1e-5, 0.1]}, seeds=[3, 4])),
        callbacks=Callbacks(on_start=started.append, on_progress=on_progress),
    )
    # Two at once: the processes of the first two do the others, or one process does all of them
    # before the second has started.
    assert len(processes) == 4
    assert len(set(processes.values())) <= 2
    (start,) = started
    assert (start.num_combinations, start.num_seeds, start.num_trials) == (2, 2, 4)
    runs = trial_runs(lake)
    assert {run["status"] for run in runs.values()} == {"done"}
    assert {run["sweep"]["id"] for run in runs.values()} == {result.sweep_id}
    assert [(runs[n]["config"]["options"]["learning_rate"], runs[n]["seed"]) for n in range(4)] == [
        (1e-5, 3),
        (0.1, 3),
        (1e-5, 4),
        (0.1, 4),
    ]
    best = result.best
    assert (best.options, result.measure, result.mode) == (
        {"learning_rate": 0.1},
        "selection/loss",
        "min",
    )
    values = [runs[n]["selection"]["value"] for n in (1, 3)]
    assert (best.mean, best.ci_low, best.ci_high) == student_t_interval(values)
    winner = runs[1 if values[0] <= values[1] else 3]
    assert best.policy == f"p:{winner['policy_version']}"
    assert lake.registry.resolve(best.policy).version == winner["policy_version"]
    # Trained as by itself: the same request gives the same weights.
    alone = train(
        lake,
        ["line"],
        replace(
            Sweep.of(*tune_config(asked()))
            .trial_request({"learning_rate": 0.1}, winner["seed"])
            .config,
            policy="alone",
        ),
    )
    expected = load_learner_weights(alone.policy.path)
    for name, array in load_learner_weights(lake.registry.resolve(best.policy).path).items():
        assert array.tobytes() == expected[name].tobytes(), name
    ended = [t.trial for t in told if t.trial.status == "done"]
    assert sorted(trial.number for trial in ended) == [0, 1, 2, 3]
    assert sum(t.trial.status == "running" for t in told) == 40
    record = sweep_record(lake)
    assert (record["status"], record["best"]["policy"]) == ("done", best.policy)
    assert record["results"] == list(result.to_json()["combinations"])
    others = [runs[n]["selection"]["value"] for n in (0, 2)]
    differences = [other - value for other, value in zip(others, values, strict=True)]
    worse = result.combinations[1]
    assert (worse.difference, worse.difference_low, worse.difference_high) == (
        student_t_interval(differences)
    )
    again = resume_sweep(lake, result.sweep_id)
    assert again.to_json() == result.to_json()
    assert len(lake.registry.runs()) == 6


@pytest.mark.slow
def test_asha_stops_options_that_are_behind_and_trains_the_others_under_all_seeds(ray, lake):
    rates = [0.1, 1e-7, 2e-7, 3e-7]
    given = asked({"learning_rate": rates}, asha=True, grace_updates=4, concurrency=1)
    result = tune(lake, *tune_config(given))
    statuses = {trial.number: trial.status for trial in result.trials}
    assert statuses[0] == statuses[4] == "done"
    assert [statuses[n] for n in (1, 2, 3)] == ["stopped"] * 3
    assert [statuses[n] for n in (5, 6, 7)] == ["skipped"] * 3
    assert result.best.options == {"learning_rate": 0.1}
    runs = trial_runs(lake)
    assert sorted(runs) == [0, 1, 2, 3, 4]
    assert {runs[n]["status"] for n in (1, 2, 3)} == {"interrupted"}
    # Of one that was stopped nothing is lost.
    assert resume(lake, runs[2]["run_id"]).update == 20
    again = resume_sweep(lake, result.sweep_id)
    assert [trial.status for trial in again.trials].count("stopped") == 2


@pytest.mark.slow
def test_failed_trials_are_told_of_and_tried_again(ray, lake):
    given = asked({"learning_rate": [1e-3, 1e38]}, updates=60)
    result = tune(lake, *tune_config(given))
    assert [trial.status for trial in result.trials] == ["done", "failed", "done", "failed"]
    assert "policy_loss is nan" in result.trials[1].error
    assert result.best.options == {"learning_rate": 1e-3}
    assert sweep_record(lake)["num_failed"] == 2
    with pytest.raises(TrainingError, match=r"no trial of 2 that finished \(.*policy_loss"):
        tune(lake, *tune_config(asked({"learning_rate": [1e38]}, updates=60)))


@pytest.mark.slow
def test_a_measure_that_no_run_has(ray, lake):
    with pytest.raises(
        ConfigInvalidError, match=r"found no number of 'policy_los' in .* policy_loss"
    ):
        tune(lake, *tune_config(asked(measure="policy_los", seeds=[0])))


@pytest.mark.slow
def test_returns_in_an_environment_are_compared_by_the_closing_evaluation(ray, cartpole_lake):
    given = asked(
        datasets="cartpole",
        env="CartPole-v1",
        updates=40,
        evaluation_episodes=2,
        selection_episodes=1,
        evaluate_updates=20,
        holdout=None,
    )
    result = tune(
        cartpole_lake,
        *tune_config({key: value for key, value in given.items() if value is not None}),
    )
    assert (result.measure, result.value) == ("selection/environment", "evaluation/return")
    runs = trial_runs(cartpole_lake)
    returns = [runs[n]["evaluation"]["mean_return"] for n in (0, 1)]
    assert result.best.mean == pytest.approx(np.mean(returns))


_DRIVER = """
import sys
from replaylake.datastore.lake.lake import open_lake
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.running.tune import tune
from replaylake.offline.running.tuning.config import tune_config
given = {
    "datasets": "line", "policy": "p", "algorithm": "bc", "batch_size": 8, "holdout": 0.3,
    "updates": int(sys.argv[2]), "evaluate_updates": 300, "hidden_sizes": [8],
    "tune": {"seeds": [0, 1, 2], "concurrency": 2, "vary": {}},
}
def told(progress):
    print(progress.trial.number, progress.trial.status, progress.trial.update, flush=True)
    if progress.trial.status == "done":
        sys.stdin.read()  # until it is killed: the others wait for it at their measurements
if __name__ == "__main__":
    tune(open_lake(sys.argv[1]), *tune_config(given), callbacks=Callbacks(on_progress=told))
"""


def driver(lake, tmp_path, is_enough, num_updates=12_000):
    """Start a sweep in a process of its own, and return it once it has told enough."""
    script = tmp_path / "driver.py"
    script.write_text(_DRIVER)
    command = [sys.executable, str(script), lake.url, str(num_updates)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line.split())
        if is_enough(lines):
            return process, lines
    raise AssertionError((lines, process.stderr.read()))


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_its_trials_were(lake, tmp_path):
    def enough(lines):
        return any(status == "done" for _, status, _ in lines)

    process, lines = driver(lake, tmp_path, enough)
    process.kill()
    process.communicate()
    (over,) = {number for number, status, _ in lines if status == "done"}
    before = {n: run for n, run in trial_runs(lake).items()}
    sweep_id = sweep_record(lake)["run_id"]
    assert sweep_record(lake)["status"] == "running"
    told = []
    result = resume_sweep(lake, sweep_id, callbacks=Callbacks(on_progress=told.append))
    assert [trial.status for trial in result.trials] == ["done"] * 3
    after = trial_runs(lake)
    assert after[int(over)] == before[int(over)]
    assert not [one for one in told if one.trial.number == int(over)]
    for number, run in before.items():
        assert after[number]["run_id"] == run["run_id"]
    # Each has the weights of one that was never killed.
    config = Sweep.from_json(sweep_record(lake)["asked"]).trial_request({}, 1).config
    alone = train(lake, ["line"], replace(config, policy="alone"))
    expected = load_learner_weights(alone.policy.path)
    made = lake.registry.resolve(f"p:{after[1]['policy_version']}")
    for name, array in load_learner_weights(made.path).items():
        assert array.tobytes() == expected[name].tobytes(), name


@pytest.mark.slow
def test_an_interrupt_saves_every_trial(lake, tmp_path):
    def enough(lines):
        return len({number for number, *_ in lines}) == 2

    process, _ = driver(lake, tmp_path, enough, num_updates=10**8)
    sweep_id = sweep_record(lake)["run_id"]
    with pytest.raises(CommitConflictError):
        resume_sweep(lake, sweep_id)
    os.kill(process.pid, signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    assert RunInterrupted.__name__ in errors
    assert sweep_record(lake)["status"] == "interrupted"
    assert {run["status"] for run in trial_runs(lake).values()} == {"interrupted"}
    with RunLease(lake.storage, sweep_id):
        pass


_LONG_DRIVER = """
import sys
from replaylake.datastore.lake.lake import open_lake
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.running.tune import resume_sweep, tune
from replaylake.offline.running.tuning.config import tune_config
given = {
    "datasets": "line", "policy": "p", "algorithm": "bc", "batch_size": 8, "holdout": 0.3,
    "updates": 600, "hidden_sizes": [8],
    "tune": {"seeds": list(range(10)), "concurrency": 2,
             "vary": {"learning_rate": [10 ** -(1 + k / 3) for k in range(int(sys.argv[2]))]}},
}
def told(progress):
    print(progress.trial.number, progress.trial.status, flush=True)
if __name__ == "__main__":
    lake, callbacks = open_lake(sys.argv[1]), Callbacks(on_progress=told)
    sweeps = [run["run_id"] for run in lake.registry.runs() if run["kind"] == "tune"]
    if sweeps:
        resume_sweep(lake, sweeps[0], callbacks=callbacks)
    else:
        tune(lake, *tune_config(given), callbacks=callbacks)
"""


@pytest.mark.chaos
def test_a_sweep_killed_again_and_again_loses_and_repeats_no_trial(lake, tmp_path):
    # A kill for each ten trials.
    num_trials = int(os.environ.get("REPLAYLAKE_TRIALS", "100"))
    script = tmp_path / "driver.py"
    script.write_text(_LONG_DRIVER)
    rng = np.random.default_rng(0)
    num_kills, done = 0, {}
    command = [sys.executable, str(script), lake.url, str(num_trials // 10)]
    while num_kills < num_trials // 10:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            for line in itertools.islice(process.stdout, int(rng.integers(5, 60))):
                number, _ = line.split()
                assert int(number) not in done, "run twice"
            time.sleep(float(rng.uniform(0, 0.5)))
            assert process.poll() is None, "it ended before it was killed"
        finally:
            process.kill()
            process.communicate()
        num_kills += 1
        runs = trial_runs(lake)
        # What was done stays as it was.
        assert {number: runs[number] for number in done} == done
        done = {number: run for number, run in runs.items() if run["status"] == "done"}
        print(f"kill {num_kills}: {len(done)} of {num_trials} trials done")
    result = resume_sweep(lake, sweep_record(lake)["run_id"])
    assert [trial.status for trial in result.trials] == ["done"] * num_trials
    runs = [run for run in lake.registry.runs() if "sweep" in run]
    assert sorted(run["sweep"]["trial"] for run in runs) == list(range(num_trials))
    assert {run["status"] for run in runs} == {"done"}
    versions = sorted(run["policy_version"] for run in runs)
    assert (
        versions
        == [entry["version"] for entry in lake.registry.list()]
        == [*range(1, num_trials + 1)]
    )
    assert {number: trial_runs(lake)[number] for number in done} == done
