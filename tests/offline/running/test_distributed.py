"""Runs of several learners: processes of Ray Train that exchange gradients by gloo."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replaylake.datastore.errors import ConfigInvalidError, TrainingError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import check_package, load_learner_weights
from replaylake.datastore.lake.runs.checkpoints import Checkpoints
from replaylake.datastore.lake.runs.metrics import read_curves
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.running.mailbox import LearnerFailure
from replaylake.offline.running.train import TrainConfig, resume, train
from replaylake.offline.running.training.interruption import RunInterrupted

# Ray 2.60 reads settings of its own that it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")


@pytest.fixture
def lake(tmp_path, line_world):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("line").append(line_world(num_episodes=8))
    lake.dataset("box").append(line_world(num_episodes=8, action_space="continuous"))
    return lake


def quick(**changes):
    options = {"updates": 30, "batch_size": 16, "log_updates": 1, "options": {"hidden_sizes": [8]}}
    return TrainConfig(**{**options, **changes})


def weights(result):
    return load_learner_weights(result.policy.path)


def logged(lake, run_id):
    curves = read_curves(lake.storage, run_id)
    return {
        name: (list(c.updates), list(c.values))
        for name, c in curves.items()
        if not name.startswith("profile/")
    }


def the_run(lake):
    return max(lake.registry.runs(), key=lambda run: run["run_id"])


def learner_pids(lake, run_id):
    """The leader's process, as its lease says, and the other learners'."""
    leader = json.loads(lake.storage.get(f"_lake/runs/{run_id}/heartbeat.json"))["pid"]
    parent = Path(f"/proc/{leader}/stat").read_text().rsplit(")", 1)[1].split()[1]
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        pid = int(stat.parent.name)
        try:
            is_sibling = stat.read_text().rsplit(")", 1)[1].split()[1] == parent
            title = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if is_sibling and pid != leader and b"RayTrainWorker" in title:
            pids.append(pid)
    return leader, pids


def test_a_batch_has_to_be_divisible():
    with pytest.raises(
        ConfigInvalidError, match=r"batch_size: found 16, expected a multiple of .* 3"
    ):
        quick(learners=3)
    with pytest.raises(ConfigInvalidError, match="learners: found 0"):
        quick(learners=0)


def test_an_error_of_another_process_has_its_parameter():
    failure = LearnerFailure.of(ConfigInvalidError("batch_size: found 3", parameter="batch_size"))
    error = failure.error(rank=0, size=2)
    assert isinstance(error, ConfigInvalidError)
    assert (str(error), error.parameter) == ("batch_size: found 3", "batch_size")


def test_the_mailbox_starts_without_torch():
    """Its process is there before the learners' are: an import of torch would keep all waiting."""
    code = (
        "import sys, replaylake.offline.running.mailbox\n"
        "print({'torch', 'numpy', 'pyarrow'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_an_algorithm_that_hides_its_gradients_is_refused_before_any_process(lake):
    with pytest.raises(ConfigInvalidError, match="algorithm d3rlpy:bc: found d3rlpy's"):
        train(lake, ["line"], quick(algorithm="d3rlpy:bc", learners=2, policy="p"))
    assert lake.registry.runs() == []


@pytest.mark.parametrize(
    ("dataset", "config"),
    [
        pytest.param(
            "line",
            quick(algorithm="bc", normalize_observations=True),
            id="bc",
            marks=pytest.mark.chaos,
        ),
        # Several networks, each with an optimizer of its own.
        pytest.param(
            "box",
            quick(algorithm="iql", holdout=0.3, selection_fqe_updates=20),
            id="iql",
            marks=pytest.mark.slow,
        ),
        # Priorities are exchanged, too.
        pytest.param(
            "line",
            quick(
                algorithm="dqn",
                prioritized=True,
                evaluate_updates=7,
                holdout=0.3,
                selection_fqe_updates=20,
            ),
            id="dqn-prioritized",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_learners_have_the_weights_of_one(ray, lake, dataset, config):
    alone = train(lake, [dataset], replace(config, policy="alone"))
    told = []
    asked = vars(config) | {"learners": 2, "policy": "both"}
    both = train(
        lake,
        [dataset],
        TrainConfig(**asked),
        callbacks=Callbacks(
            on_start=lambda start: told.append(start.run_id),
            on_progress=lambda progress: told.append(progress.update),
            on_metrics=lambda update, values: told.append((update, *values)),
        ),
    )
    assert told[0] == both.run_id
    assert 30 in told
    assert both.update == alone.update
    expected = weights(alone)
    for name, array in weights(both).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-5, rtol=1e-6, err_msg=name)
    found, wanted = logged(lake, both.run_id), logged(lake, alone.run_id)
    assert found.keys() == wanted.keys()
    for name, (updates, values) in wanted.items():
        assert found[name][0] == updates
        if not name.startswith("selection/"):
            assert found[name][1] == pytest.approx(values, abs=1e-4), name
    body = check_package(both.policy.path).body
    assert (body["config"]["learners"], body["run_id"]) == (2, both.run_id)


@pytest.mark.slow
def test_more_learners_than_ray_has_cpus_are_refused_at_once(ray, lake):
    with pytest.raises(
        ConfigInvalidError, match=r"learners: found 2 CPUs .* for each of 4 learners"
    ):
        train(lake, ["line"], quick(algorithm="dqn", learners=4, policy="p"))


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_the_same_weights(ray, lake):
    config = quick(algorithm="dqn", learners=2, updates=100_000, checkpoint_updates=1000)
    seen = []
    with pytest.raises(RunInterrupted) as found:
        train(
            lake,
            ["line"],
            replace(config, policy="p"),
            callbacks=Callbacks(
                on_metrics=lambda update, values: seen.append(update), should_end=lambda: bool(seen)
            ),
        )
    run, at = the_run(lake), found.value.update
    assert (run["status"], run["run_id"]) == ("interrupted", found.value.run_id)
    assert Checkpoints(lake.storage, run["run_id"]).updates()[-1] == at < 100_000
    shorten(lake, run, at + 10)
    started = []
    again = resume(lake, run["run_id"], callbacks=Callbacks(on_start=started.append))
    assert (started[0].update, started[0].resumed) == (at, True)
    assert the_run(lake)["status"] == "done"
    whole = train(lake, ["line"], replace(vary(config, updates=at + 10), policy="whole"))
    expected = weights(whole)
    for name, array in weights(again).items():
        assert array.tobytes() == expected[name].tobytes(), name


@pytest.mark.slow
def test_all_stop_early_together(ray, lake):
    config = quick(holdout=0.3, patience=1, evaluate_updates=3, updates=3000)
    config = vary(config, options={"hidden_sizes": [8], "learning_rate": 3.0})
    alone = train(lake, ["line"], replace(config, policy="alone"))
    both = train(lake, ["line"], replace(vary(config, learners=2), policy="both"))
    assert both.selection["stopped_early"]
    assert len(both.selection["history"]) == len(alone.selection["history"]) < 1000


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_said_by_one(ray, lake):
    config = quick(learners=2, updates=300, options={"learning_rate": 1e38, "hidden_sizes": [8]})
    with pytest.raises(TrainingError, match="policy_loss is nan at update") as found:
        train(lake, ["line"], replace(config, policy="p"))
    run = the_run(lake)
    assert run["status"] == "failed"
    assert run["failure"]["metric"] == found.value.details["metric"] == "policy_loss"
    assert lake.registry.list() == []


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param("leader", marks=pytest.mark.slow),
        pytest.param("follower", marks=pytest.mark.chaos),
    ],
)
def test_a_learner_that_is_killed_fails_the_run_and_it_can_go_on(ray, lake, killed):
    config = quick(learners=2, updates=20000, checkpoint_updates=10, log_updates=10)
    started, killed_pids = [], []

    def kill(update, values):
        # Told of update 20, the checkpoint of update 10 is there.
        if killed_pids or update < 20:
            return
        leader, others = learner_pids(lake, started[0].run_id)
        killed_pids.extend([leader] if killed == "leader" else others)
        assert len(killed_pids) == 1
        os.kill(killed_pids[0], signal.SIGKILL)

    rank = 0 if killed == "leader" else 1
    with pytest.raises(TrainingError, match=f"learner {rank} of 2: its process ended") as found:
        train(
            lake,
            ["line"],
            replace(config, policy="p"),
            callbacks=Callbacks(on_start=started.append, on_metrics=kill),
        )
    assert "\n" not in str(found.value)
    run = the_run(lake)
    assert run["status"] == "failed"
    at = Checkpoints(lake.storage, run["run_id"]).updates()[-1]
    shorten(lake, run, at + 10)
    assert resume(lake, run["run_id"]).update == at + 10


def shorten(lake, run, updates):
    """Have a run end there, as if it had been asked for no more."""
    run["request"]["config"]["updates"] = run["config"]["updates"] = updates
    lake.registry.record_run(run["run_id"], {k: v for k, v in run.items() if k != "run_id"})


def vary(config, **changes):
    return TrainConfig(**{**vars(config), **changes})
