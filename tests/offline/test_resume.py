"""Runs that end before they are done, and go on: with the weights of a run that never ended."""

import dataclasses
import json
import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, MultiDiscrete
from replaylake.datastore.errors import (
    CommitConflictError,
    NotFoundError,
    SchemaMismatchError,
    StorageError,
    TrainingError,
)
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import check_package, load_learner_weights
from replaylake.datastore.lake.runs.checkpoints import Checkpoints
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.lake.runs.metrics import read_curves
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.vacuum import vacuum
from replaylake.offline.algorithms.catalog import algorithms
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.running.train import TrainConfig, resume, train
from replaylake.offline.running.training.interruption import RunInterrupted

SMALL = {"hidden_sizes": [8]}
# One of each kind of d3rlpy's state: plain, target networks, several critics and actors, none.
FAST_D3RLPY = {
    ("bc", "discrete"),
    ("dqn", "discrete"),
    ("iql", "continuous"),
    ("sac", "continuous"),
}


class Killed(Exception):
    """Stands for kill -9: nothing of the run's own is done after it."""


def quick(**changes):
    defaults = {"updates": 12, "batch_size": 8, "log_updates": 1, "options": SMALL}
    return TrainConfig(**{**defaults, **changes})


def stop_at(update, how):
    def on_metrics(at, values):
        if at == update:
            how()

    return on_metrics


def killed():
    raise Killed


def interrupted():
    os.kill(os.getpid(), signal.SIGINT)


def weights(result):
    return load_learner_weights(result.policy.path)


def same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


def logged(lake, run_id):
    """What the metrics say but for times."""
    curves = read_curves(lake.storage, run_id)
    return {
        name: (list(c.updates), list(c.values))
        for name, c in curves.items()
        if not name.startswith("profile/")
    }


def the_run(lake, run_id=None):
    runs = {run["run_id"]: run for run in lake.registry.runs()}
    return runs[run_id] if run_id else runs[max(runs)]


def ended_at(lake, update, how, config=None, **given):
    """Train until the metrics of an update, and return the run's id."""
    with pytest.raises((Killed, RunInterrupted)):
        train(
            lake,
            ["line"],
            replace(config or quick(), policy="p", **given),
            callbacks=Callbacks(on_metrics=stop_at(update, how)),
        )
    return the_run(lake)["run_id"]


@pytest.fixture
def lake(tmp_path, line_world):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("line").append(line_world(num_episodes=8))
    return lake


def families():
    for info in algorithms():
        if info.consumes_once:  # they take no log
            continue
        name = f"d3rlpy:{info.name}" if info.provider == "d3rlpy" else info.name
        is_fast = info.provider != "d3rlpy" or (info.name, info.actions) in FAST_D3RLPY
        marks = () if is_fast else (pytest.mark.slow,)
        yield pytest.param(name, info.actions, info.kind, marks=marks, id=f"{name}-{info.actions}")


def log_for(actions, kind, line_world):
    """Episodes whose actions an algorithm of this kind takes."""
    if kind == "bandit":
        rng = np.random.default_rng(0)
        return [
            Episode(
                f"b/{i}",
                rng.standard_normal((1, 2)).astype(np.float32),
                rng.integers(0, 2, 1),
                rng.random(1),
                terminated=True,
                behavior_log_probs=np.log([0.5]).astype(np.float32),
            )
            for i in range(40)
        ]
    if actions == "multi_discrete":
        return [
            dataclasses.replace(episode, actions=(episode.observations > 0).astype(np.int64))
            for episode in line_world(num_episodes=8)
        ]
    return line_world(num_episodes=8, action_space=actions)


@pytest.mark.parametrize(("algorithm", "actions", "kind"), [*families()])
def test_every_algorithm_goes_on_to_the_bit(tmp_path, line_world, algorithm, actions, kind):
    lake = open_lake(tmp_path / "lake", create=True)
    if actions == "multi_discrete":
        lake.dataset("line").create(Box((2,), "float32", -9, 9), MultiDiscrete((2, 2)))
    lake.dataset("line").append(log_for(actions, kind, line_world))
    options = {} if algorithm.startswith("d3rlpy:") and "nfq" in algorithm else SMALL
    config = quick(algorithm=algorithm, checkpoint_updates=4, options=options)
    whole = train(lake, ["line"], replace(config, policy="whole"))
    run_id = ended_at(lake, 7, killed, config)
    assert Checkpoints(lake.storage, run_id).updates() == [4]
    again = resume(lake, run_id)
    same_bits(weights(again), weights(whole))
    assert again.metrics == whole.metrics
    assert logged(lake, run_id) == logged(lake, whole.run_id)


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 6, 12])
def test_killed_at_any_update_it_goes_on_to_the_bit(lake, at):
    config = quick(algorithm="dqn", holdout=0.3, selection_fqe_updates=20, checkpoint_updates=5)
    whole = train(lake, ["line"], replace(config, policy="whole"))
    run_id = ended_at(lake, at, killed, config)
    assert the_run(lake, run_id)["status"] == "failed"
    again = resume(lake, run_id)
    same_bits(weights(again), weights(whole))
    assert again.selection == whole.selection
    assert logged(lake, run_id) == logged(lake, whole.run_id)
    assert the_run(lake, run_id)["status"] == "done"
    assert Checkpoints(lake.storage, run_id).updates() == []


@pytest.mark.parametrize(
    "given",
    [
        {"weight": "step + 1"},
        {"where": "num_steps > 2", "where_steps": "step < 8", "reward": "reward * 2"},
        {"config": quick(algorithm="dqn", prioritized=True)},
        {"config": quick(algorithm="dqn", normalize_observations=True, normalize_rewards="std")},
        {"config": quick(batch_size=500)},
    ],
)
def test_every_way_to_draw_goes_on_to_the_bit(lake, given):
    config = given.pop("config", quick())
    whole = train(lake, ["line"], replace(config, policy="whole", **given))
    again = resume(lake, ended_at(lake, 7, killed, config, **given))
    same_bits(weights(again), weights(whole))
    bodies = [check_package(result.policy.path).body for result in (again, whole)]
    for key in ("datasets", "sampling", "config", "normalization"):
        assert bodies[0][key] == bodies[1][key]


@pytest.mark.parametrize("offset_s", [-3600, 3600])
def test_a_clock_that_is_set_changes_no_run(lake, monkeypatch, offset_s):
    whole = train(lake, ["line"], quick(policy="whole", checkpoint_updates=3))
    real, real_ns = time.time, time.time_ns

    def set_clock(by_s):
        monkeypatch.setattr(time, "time", lambda: real() + by_s)
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + by_s * 10**9)

    def killed_later():
        set_clock(2 * offset_s)
        raise Killed

    set_clock(offset_s)
    ended_at(lake, 7, killed_later, quick(checkpoint_updates=3))
    (run_id,) = {run["run_id"] for run in lake.registry.runs()} - {whole.run_id}
    assert Checkpoints(lake.storage, run_id).load().update == 6
    assert vacuum(lake, delete=True).garbage == ()
    again = resume(lake, run_id)
    same_bits(weights(again), weights(whole))
    assert logged(lake, run_id) == logged(lake, whole.run_id)
    run = the_run(lake, run_id)
    assert (run["status"], [entry["update"] for entry in run["resumed"]]) == ("done", [6])
    assert [entry["version"] for entry in lake.registry.list()] == [1, 1]
    assert fsck(lake).is_clean


def test_an_interrupt_saves_first_and_says_how_to_go_on(lake):
    config = quick(updates=1000, checkpoint_updates=1000)
    with pytest.raises(RunInterrupted) as found:
        train(
            lake,
            ["line"],
            replace(config, policy="p"),
            callbacks=Callbacks(on_metrics=stop_at(123, interrupted)),
        )
    run = the_run(lake)
    assert (found.value.run_id, found.value.update) == (run["run_id"], 124)
    assert (run["status"], "error" in run) == ("interrupted", False)
    assert Checkpoints(lake.storage, run["run_id"]).updates()[-1] == 124
    assert lake.registry.list() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    started = []
    result = resume(lake, run["run_id"], callbacks=Callbacks(on_start=started.append))
    assert [(start.run_id, start.update) for start in started] == [(run["run_id"], 124)]
    assert result.update == 1000
    run = the_run(lake)
    assert (run["status"], [entry["update"] for entry in run["resumed"]]) == ("done", [124])


def test_a_handler_of_the_programs_own_is_left_alone(lake):
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        train(
            lake,
            ["line"],
            quick(policy="p"),
            callbacks=Callbacks(on_metrics=stop_at(3, interrupted)),
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [1]


def test_before_the_first_checkpoint_it_begins_anew(lake):
    whole = train(lake, ["line"], quick(checkpoint_updates=12, policy="whole"))
    run_id = ended_at(lake, 1, killed, quick(checkpoint_updates=12))
    same_bits(weights(resume(lake, run_id)), weights(whole))
    assert logged(lake, run_id) == logged(lake, whole.run_id)


def test_a_run_that_died_before_it_was_registered(lake):
    """Killed after the last update: the checkpoint of the end is there, and only that is left."""
    whole = train(lake, ["line"], quick(policy="whole"))
    with pytest.raises(Killed):
        train(
            lake,
            ["line"],
            quick(policy="p"),
            callbacks=Callbacks(on_progress=lambda done: killed() if done.update == 12 else None),
        )
    run_id = the_run(lake)["run_id"]
    steps = []
    again = resume(lake, run_id, callbacks=Callbacks(on_progress=steps.append))
    same_bits(weights(again), weights(whole))


def test_a_run_that_is_done_stays_as_it_is(lake):
    result = train(lake, ["line"], quick(policy="p"))
    # As a crash between registering and tidying up leaves it.
    left = Checkpoints(lake.storage, result.run_id)
    left.save(12, {}, {})
    before = lake.registry.runs()
    again = resume(lake, result.run_id)
    assert again.already_finished
    assert (again.policy, again.metrics, again.selection) == (
        result.policy,
        result.metrics,
        result.selection,
    )
    assert lake.registry.runs() == before
    assert left.updates() == []


def test_a_run_that_is_not_there(lake):
    result = train(lake, ["line"], quick(policy="p"))
    with pytest.raises(NotFoundError, match=rf"run '01x'.*{result.run_id} \(done\)"):
        resume(lake, "01x")


def test_a_run_that_is_alive_is_left_alone(lake):
    run_id = ended_at(lake, 5, killed)
    with (
        RunLease(lake.storage, run_id),
        pytest.raises(CommitConflictError, match="at work on it"),
    ):
        resume(lake, run_id)
    assert resume(lake, run_id).update == 12


def test_a_run_that_was_taken_over_registers_nothing(lake):
    def taken_over():
        path = f"_lake/runs/{the_run(lake)['run_id']}/heartbeat.json"
        body = json.loads(lake.storage.get(path))
        body.pop("checksum")
        lake.storage.put(path, json.dumps({**body, "owner": "another", "host": "far"}).encode())

    with pytest.raises(CommitConflictError, match="goes on with it"):
        train(
            lake,
            ["line"],
            quick(policy="p"),
            callbacks=Callbacks(on_metrics=stop_at(5, taken_over)),
        )
    assert lake.registry.list() == []
    # Nor does it say how the run ended: the other may have read its record, and replaces that.
    assert the_run(lake)["status"] == "running"


def test_a_run_whose_record_another_changed_registers_nothing(lake):
    """Taken over after it looked for the last time whether it was."""

    def changed():
        run = the_run(lake)
        lake.registry.record_run(run.pop("run_id"), {**run, "resumed": [{"update": 3}]})

    with pytest.raises(CommitConflictError, match=r"another process has changed its record"):
        train(
            lake, ["line"], quick(policy="p"), callbacks=Callbacks(on_metrics=stop_at(12, changed))
        )
    assert lake.registry.list() == []
    assert the_run(lake)["resumed"] == [{"update": 3}]


def test_other_numbers_to_normalize_by_are_refused(lake):
    run_id = ended_at(lake, 5, killed, quick(normalize_observations=True))
    run = the_run(lake, run_id)
    run["normalization"]["observations"][""]["mean"][0] += 0.5
    lake.registry.record_run(run_id, {k: v for k, v in run.items() if k != "run_id"})
    with pytest.raises(
        SchemaMismatchError, match="other normalization statistics than it began with"
    ):
        resume(lake, run_id)


def test_other_steps_are_refused(lake):
    run_id = ended_at(lake, 5, killed)
    run = the_run(lake, run_id)
    run["datasets"][0]["content_hash"] = "0" * 64
    lake.registry.record_run(run_id, {k: v for k, v in run.items() if k != "run_id"})
    with pytest.raises(
        SchemaMismatchError, match=r"line@1: found content hash .*expected 000000000000"
    ):
        resume(lake, run_id)
    assert lake.registry.list() == []


def test_new_steps_do_not_change_a_run(lake, line_world):
    whole = train(lake, ["line"], quick(policy="whole"))
    run_id = ended_at(lake, 5, killed)
    lake.dataset("line").append(line_world(num_episodes=3, seed=9))
    again = resume(lake, run_id)
    same_bits(weights(again), weights(whole))
    assert (again.datasets[0]["version"], again.datasets[0]["named"]) == (1, "line")


def test_a_damaged_newest_checkpoint_is_passed_over(lake):
    config = quick(checkpoint_updates=3)
    whole = train(lake, ["line"], replace(config, policy="whole"))
    run_id = ended_at(lake, 8, killed, config)
    saved = Checkpoints(lake.storage, run_id).updates()
    assert len(saved) == 2
    (lake.path / f"_lake/runs/{run_id}/checkpoints/{saved[-1]:012d}.json").write_text("{")
    started = []
    again = resume(lake, run_id, callbacks=Callbacks(on_start=started.append))
    assert started[0].update == saved[0]
    same_bits(weights(again), weights(whole))


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_one_does_not_stand_for_the_newest(lake, keep):
    """It goes on from the one before, and is interrupted before it comes to the damaged one."""
    config = quick(checkpoint_updates=3, select="last", keep_checkpoints=2)
    whole = train(lake, ["line"], replace(config, policy="whole"))
    run_id = ended_at(lake, 8, killed, config)
    run = the_run(lake, run_id)
    run["request"]["config"]["keep_checkpoints"] = keep
    lake.registry.record_run(run_id, {k: v for k, v in run.items() if k != "run_id"})
    (lake.path / f"_lake/runs/{run_id}/checkpoints/{6:012d}.json").write_text("{")
    with pytest.raises(RunInterrupted) as found:
        resume(lake, run_id, callbacks=Callbacks(on_metrics=stop_at(4, interrupted)))
    assert found.value.update == 5
    assert Checkpoints(lake.storage, run_id).updates() == [3, 5][-keep:]
    started = []
    again = resume(lake, run_id, callbacks=Callbacks(on_start=started.append))
    assert started[0].update == 5
    same_bits(weights(again), weights(whole))


def test_a_disk_that_is_full_ends_the_run_in_one_line(lake, monkeypatch):
    put = type(lake.storage).put

    def full(self, path, data):
        if path.endswith(".safetensors") and "checkpoints" in path:
            raise StorageError(f"{path}: No space left on device")
        put(self, path, data)

    monkeypatch.setattr(type(lake.storage), "put", full)
    with pytest.raises(StorageError, match="No space left"):
        train(lake, ["line"], quick(policy="p"))
    run = the_run(lake)
    assert (run["status"], run["error"].split(":")[0]) == ("failed", "StorageError")
    assert lake.registry.list() == []
    monkeypatch.undo()
    assert resume(lake, run["run_id"]).update == 12


def test_what_is_not_finite_fails_again_when_it_is_resumed(lake):
    config = quick(updates=200, options={**SMALL, "learning_rate": 1e30})
    with pytest.raises(TrainingError, match="at update 2"):
        train(lake, ["line"], replace(config, policy="p"))
    with pytest.raises(TrainingError, match="at update 2"):
        resume(lake, the_run(lake)["run_id"])
    assert the_run(lake)["status"] == "failed"
    assert lake.registry.list() == []


@pytest.mark.slow
def test_in_a_lake_on_an_object_store(bucket, line_world):
    lake = open_lake(f"s3://{bucket}/lake", create=True)
    lake.dataset("line").append(line_world(num_episodes=8))
    whole = train(lake, ["line"], quick(policy="whole"))
    again = resume(open_lake(lake.url), ended_at(lake, 7, killed))
    same_bits(weights(again), weights(whole))
    assert lake.storage.names(f"_lake/runs/{again.run_id}/checkpoints") == []
