import json
import math
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    ConfigInvalidError,
    InvalidNameError,
    NotFoundError,
    ReplayLakeError,
    RolloutError,
    SchemaMismatchError,
)
from replaylake.offline.callbacks import Callbacks
from replaylake.online.collecting.behavior_policy import BehaviorPolicy
from replaylake.online.collecting.worker import RolloutConfig, RolloutWorker
from replaylake.online.rollout import fresh_seed, rollout

_STEPS = """
    select seed, step, observation, final_observation, action, reward, terminated, truncated,
           behavior_log_prob, policy, policy_version
    from toys.steps order by seed, step
"""


def _steps(lake, query=_STEPS):
    return lake.sql(query).to_pylist()


def test_the_lake_holds_exactly_what_the_worker_returns(lake, toys):
    config = RolloutConfig(f"{toys}:Countdown-v0", envs_per_worker=3, seed=4, flush_steps=9)
    receipt = rollout(lake, "toys", "random", replace(config, episodes=10))
    worker = RolloutWorker(config, iter(range(10)), BehaviorPolicy(), producer="test")
    worker.advance(10**9, math.inf)
    episodes = worker.take_episodes(with_open=False)
    expected = [
        {
            "seed": int(e.extras["seed"][t]),
            "step": t,
            "observation": e.observations[t].tolist(),
            "final_observation": e.final_observation.tolist() if t == len(e) - 1 else None,
            "action": int(e.actions[t]),
            "reward": e.rewards[t],
            "terminated": e.terminated and t == len(e) - 1,
            "truncated": e.truncated and t == len(e) - 1,
            "behavior_log_prob": float(np.float32(math.log(1 / 3))),
            "policy": "random",
            "policy_version": 0,
        }
        for e in sorted(episodes, key=lambda e: e.extras["seed"][0])
        for t in range(len(e))
    ]
    assert _steps(lake) == expected
    assert receipt.num_steps == len(expected) == 20  # seeds 4..13: 2, 3, 1, 2, 3, 1, 2, 3, 1, 2
    assert receipt.mean_return == pytest.approx(sum(e.rewards.sum() for e in episodes) / 10)


def test_the_receipt_agrees_with_the_lake(lake, toys):
    progress = []
    config = RolloutConfig(f"{toys}:Countdown-v0", flush_steps=16)
    receipt = rollout(
        lake,
        "toys",
        "random",
        replace(config, episodes=60),
        callbacks=Callbacks(
            on_progress=lambda done: progress.append((done.num_episodes, done.episodes))
        ),
    )
    (found,) = _steps(
        lake,
        'select count(*) as n, sum(num_steps) as steps, avg("return") as mean from toys.episodes',
    )
    assert (receipt.num_episodes, receipt.num_steps) == (60, 120) == (found["n"], found["steps"])
    assert receipt.mean_return == pytest.approx(found["mean"])
    assert receipt.version == lake.dataset("toys").snapshot().version == receipt.num_commits
    assert receipt.num_shards == len(lake.dataset("toys").snapshot().files)
    assert progress == sorted(progress)
    assert progress[-1] == (60, 60)
    (run,) = _steps(lake, "select * from runs")
    assert (run["run_id"], run["kind"], run["status"]) == (receipt.run_id, "rollout", "finished")
    assert json.loads(run["record"])["mean_return"] == receipt.mean_return
    producers = _steps(lake, "select distinct producer from commits where num_steps > 0")
    assert producers == [{"producer": f"rollout/{receipt.run_id}"}]


def test_uniform_actions_on_frozen_lake_return_the_exact_mean(lake):
    config = RolloutConfig("FrozenLake-v1", envs_per_worker=16, seed=0)
    receipt = rollout(lake, "frozen", "random", replace(config, episodes=3000))
    exact = 0.013939795959171424  # dynamic programming over 100 steps, map 4x4, slippery
    error = math.sqrt(exact * (1 - exact) / 3000)
    assert receipt.mean_return == pytest.approx(exact, abs=4 * error)
    (ends,) = _steps(
        lake,
        "select count(*) filter (terminated) as terminated,"
        " count(*) filter (truncated) as truncated, max(num_steps) as longest from frozen.episodes",
    )
    assert ends["terminated"] + ends["truncated"] == 3000
    assert ends["longest"] <= 100


def test_a_registered_policy_acts_under_its_version(lake, toys, loaded_die):
    for _ in range(2):
        lake.registry.register("die", loaded_die, run_id="test", lineage={})
    config = RolloutConfig(f"{toys}:Countdown-v0")
    receipt = rollout(lake, "toys", "die:2", replace(config, episodes=5))
    assert (receipt.policy, receipt.policy_version) == ("die", 2)
    found = _steps(lake, "select distinct policy, policy_version from toys.steps")
    assert found == [{"policy": "die", "policy_version": 2}]


def test_a_second_run_appends(lake, toys):
    config = RolloutConfig(f"{toys}:Countdown-v0")
    for seed in (0, 100):
        rollout(lake, "toys", "random", RolloutConfig(config.env, seed=seed, episodes=6))
    assert _steps(lake, "select count(distinct episode_id) as n from toys.steps") == [{"n": 12}]


def test_a_failure_leaves_whole_episodes_and_says_how_many(lake, toys):
    config = RolloutConfig(f"{toys}:Broken-v0", envs_per_worker=1, flush_steps=2)
    with pytest.raises(RolloutError) as caught:
        rollout(lake, "toys", "random", replace(config, episodes=20))
    message = str(caught.value)
    assert "ValueError: the gripper" in message
    assert "Committed to 'toys' before: 6 of 20 episodes" in message
    episodes = _steps(lake, "select num_steps, complete from toys.episodes order by 1")
    # Seeds 0 to 5; that of seed 6 ended in the two steps that failed, and was not handed over.
    assert [row["num_steps"] for row in episodes] == [1, 1, 2, 2, 3, 3]
    assert all(row["complete"] for row in episodes)
    (run,) = _steps(lake, "select status, record from runs")
    assert run["status"] == "failed"
    assert json.loads(run["record"])["num_episodes"] == 6


def test_what_cannot_work_changes_nothing(lake, toys, loaded_die):
    toy = RolloutConfig(f"{toys}:Countdown-v0")
    lake.registry.register("die", loaded_die, run_id="test", lineage={})
    refused = [
        (NotFoundError, "toys", "random", RolloutConfig("CartPol-v1"), 1),
        (NotFoundError, "toys", "nobody", toy, 1),
        (NotFoundError, "toys", "die:9", toy, 1),
        (InvalidNameError, "Toys", "random", toy, 1),
        (ConfigInvalidError, "toys", "random", toy, 0),
        (SchemaMismatchError, "toys", "die", RolloutConfig("CartPole-v1"), 1),
        (RolloutError, "toys", "random", RolloutConfig(f"{toys}:BrokenAtOnce-v0"), 1),
    ]
    for kind, dataset, policy, config, num_episodes in refused:
        with pytest.raises(kind):
            rollout(lake, dataset, policy, replace(config, episodes=num_episodes))
    assert issubclass(kind, ReplayLakeError)
    assert lake.datasets() == []
    assert lake.registry.runs() == []


def test_a_dataset_with_other_spaces_is_left_alone(lake, toys):
    dataset = lake.dataset("toys")
    dataset.create(Box((4,)), Discrete(3))
    with pytest.raises(
        SchemaMismatchError, match=r"^dataset toys: .* Box float32\[2\].* new dataset"
    ):
        rollout(lake, "toys", "random", RolloutConfig(f"{toys}:Countdown-v0", episodes=1))
    assert dataset.snapshot().version == 0


def test_a_dataset_without_masks_refuses_an_environment_with_them(lake, toys):
    rollout(lake, "toys", "random", RolloutConfig(f"{toys}:Countdown-v0", episodes=1))
    masked = RolloutConfig(f"{toys}:Masked-v0")
    with pytest.raises(SchemaMismatchError, match=r"masks of width 3 .* expected none"):
        rollout(lake, "toys", "random", replace(masked, episodes=1))
    rollout(lake, "masked", "random", replace(masked, episodes=2))
    assert lake.dataset("masked").spec.mask_size == 3


@pytest.mark.slow
def test_a_full_disk_makes_a_pause(lake, toys, nearly_full_disk):
    config = RolloutConfig("CartPole-v1", flush_steps=2000)
    said = []
    with ExitStack() as full:

        def on_progress(done):
            if not said and done.num_episodes:
                # Room for what a commit says, and not for a shard of 40 kB.
                full.enter_context(nearly_full_disk(16_384))

        def on_remark(remark):
            said.append(remark)
            if len(said) == 1:
                # Refused a second time, of which nothing is said again.
                threading.Timer(0.7, full.close).start()

        receipt = rollout(
            lake,
            "poles",
            "random",
            replace(config, episodes=300),
            callbacks=Callbacks(on_progress=on_progress, on_remark=on_remark),
        )
    assert len(said) == 2
    assert "No space left" in said[0]
    assert "the run goes on" in said[1]
    (found,) = _steps(
        lake,
        "select count(*) as n, sum(num_steps)::bigint as steps, bool_and(complete) as whole"
        " from poles.episodes",
    )
    assert found == {"n": 300, "steps": receipt.num_steps, "whole": True}


def test_fresh_seeds_differ():
    assert len({fresh_seed() for _ in range(10)}) == 10
    assert 0 <= fresh_seed() < 2**30


@pytest.mark.slow
def test_a_local_rollout_imports_neither_ray_nor_torch(tmp_path):
    program = f"""
import sys
from replaylake.datastore.lake.lake import open_lake
from replaylake.online.collecting.behavior_policy import BehaviorPolicy
from replaylake.online.rollout import rollout
from replaylake.online.collecting.worker import RolloutConfig
lake = open_lake({str(tmp_path / "lake")!r}, create=True)
rollout(lake, "c", "random", RolloutConfig("CartPole-v1", episodes=2))
print([name for name in ("ray", "torch", "d3rlpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.fixture
def new_processes():
    """Returns the command lines of this process's descendants that began during the test.

    Those of killed processes may take a moment to go.
    """
    # Servers that other tests' fixtures keep for the session are running before it.
    before = {*_descendants()}

    def find():
        until = time.monotonic() + 60
        while True:
            found = [line for process, line in _descendants().items() if process not in before]
            if not found or time.monotonic() > until:
                return found
            time.sleep(0.05)

    return find


def _descendants():
    """Return the command line of each process that descends from this one, by id."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = (
                int(fields[1]),
                fields[0],
                (folder / "cmdline").read_text(),
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
    family = {os.getpid()}
    while grown := {pid for pid, (parent, *_) in parents.items() if parent in family} - family:
        family |= grown
    others = {pid: parents[pid] for pid in family - {os.getpid()}}
    # Python's own tracker lives as long as this process, whichever test began it.
    return {
        pid: line
        for pid, (_, state, line) in others.items()
        if state != "Z" and "resource_tracker" not in line
    }


@pytest.mark.slow
def test_two_ray_workers_collect_what_one_process_does(lake, toys, loaded_die, new_processes):
    lake.registry.register("die", loaded_die, run_id="test", lineage={})
    config = RolloutConfig(f"{toys}:Countdown-v0", envs_per_worker=3, seed=2, flush_steps=20)
    rollout(lake, "toys", "die", replace(config, episodes=100))
    receipt = rollout(lake, "with_ray", "die", replace(config, episodes=100, workers=2))
    assert _steps(lake, _STEPS.replace("toys", "with_ray")) == _steps(lake)
    workers = _steps(lake, "select distinct worker from with_ray.steps order by 1")
    assert (receipt.num_workers, [row["worker"] for row in workers]) == (2, [0, 1])
    assert _steps(lake, "select count(*) as n from with_ray.episodes") == [{"n": 100}]
    assert new_processes() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Broken", "rollout worker 1: step of .* raised ValueError: the gripper.*seed 7"),
        ("Deadly", "rollout worker 1: its process died 4 times in a row"),
    ],
)
def test_a_ray_worker_that_fails_gives_one_error(lake, toys, new_processes, name, expected):
    config = RolloutConfig(f"{toys}:{name}-v0", envs_per_worker=1, flush_steps=1)
    with pytest.raises(RolloutError, match=f"(?s){expected}.*Committed to 'toys'") as caught:
        rollout(lake, "toys", "random", replace(config, episodes=20, workers=2))
    assert "Traceback" not in str(caught.value)
    (run,) = lake.registry.runs()
    (found,) = _steps(
        lake, "select count(*) as n, bool_and(complete) as all_complete from toys.episodes"
    )
    assert found == {"n": run["num_episodes"], "all_complete": True}
    assert new_processes() == []


@pytest.mark.parametrize("cpus", [0, 1.5])
def test_cpus_that_ray_does_not_give_are_refused(lake, toys, cpus):
    config = RolloutConfig(f"{toys}:Countdown-v0")
    with pytest.raises(ConfigInvalidError, match="worker_cpus: found"):
        rollout(lake, "toys", "random", replace(config, episodes=2, workers=1, worker_cpus=cpus))
    assert "replaylake-record" not in [thread.name for thread in threading.enumerate()]
    assert lake.registry.runs()[0]["status"] == "failed"
