"""Crash and resume: in another process, from a saved position, every sampler goes on bit for bit.

This file is also what that process runs.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Array, Box, Dict, Discrete
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.replay.items.episodes import Episodes
from replaylake.datastore.replay.items.hindsight import Hindsight
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.mixture import mixture
from replaylake.datastore.replay.prefetch import prefetch
from replaylake.datastore.replay.sampler import Sampler
from replaylake.datastore.replay.to_torch import TorchSampler
from replaylake.datastore.replay.view import ReplayView

NUM_BATCHES: Final = 100
# A sampler of a view and a seed.
Make = Callable[[ReplayView, int], Any]


def no_reward(achieved: Array, desired: Array, info: Mapping[str, Any]) -> Array:
    return np.zeros(len(achieved))


def hindsight(view: ReplayView, seed: int) -> Sampler:
    return view.uniform(16, Hindsight(compute_reward=no_reward, seed=seed), seed=seed)


def mixed(view: ReplayView, seed: int) -> Any:
    samplers = [
        view.shuffled(7, seed=seed),
        view.prioritized(5, seed=seed),
        view.weighted(9, weight="1 + step", seed=seed, correct=True),
    ]
    return mixture(samplers, [0.5, 0.3, 0.2], batch_size=13, seed=seed)


# Those of which a state is JSON, and those that hold arrays.
JSON_ABLE: Final[dict[str, Make]] = {
    "uniform": lambda view, seed: view.uniform(16, seed=seed),
    "n_steps": lambda view, seed: view.uniform(16, Transitions(0.9, 5), seed=seed),
    "sequences": lambda view, seed: view.uniform(4, Sequences(5, 2, 1), seed=seed),
    "episodes": lambda view, seed: view.uniform(2, Episodes(), seed=seed),
    "hindsight": hindsight,
    "shuffled": lambda view, seed: view.shuffled(16, seed=seed),
    "dropping": lambda view, seed: view.shuffled(7, seed=seed, drop_last=True),
    "of a rank": lambda view, seed: view.shuffled(7, seed=seed, rank=1, num_ranks=3),
    "weighted": lambda view, seed: view.weighted(16, weight="1 + step", seed=seed, correct=True),
    "recent": lambda view, seed: view.recent(
        16, max_staleness=1, seed=seed, policy_version=np.int64(3)
    ),
    "in order": lambda view, _: view.in_order(3),
    "tensors": lambda view, seed: TorchSampler(view.uniform(16, seed=seed)),
    "tensors in used memory": lambda view, seed: TorchSampler(
        view.weighted(16, Sequences(4), weight="1 + step", seed=seed, correct=True), reuse=3
    ),
}
WITH_ARRAYS: Final[dict[str, Make]] = {
    "prioritized": lambda view, seed: view.prioritized(16, seed=seed, beta_updates=90),
    "prioritized sequences": lambda view, seed: view.prioritized(
        16, Sequences(3), seed=seed, alpha=1.0, uniform_fraction=0.1
    ),
    "mixture": mixed,
    "tensors of a mixture": lambda view, seed: TorchSampler(mixed(view, seed)),
    "ahead": lambda view, seed: prefetch(view.uniform(16, seed=seed)),
    "prioritized ahead": lambda view, seed: prefetch(view.prioritized(16, seed=seed), 3),
    "tensors ahead": lambda view, seed: prefetch(
        TorchSampler(view.shuffled(16, seed=seed), reuse=4)
    ),
}
ALL: Final = JSON_ABLE | WITH_ARRAYS
PRIORITIZED: Final = {name for name in ALL if "prioritized" in name or "mixture" in name}


def digest(value: Any) -> str:
    """Of everything in a batch or a state, with its dtypes and shapes."""
    found = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, sub in value.items():
                add(f"{name}.{key}", sub)
        elif isinstance(value, list):
            for index, sub in enumerate(value):
                add(f"{name}[{index}]", sub)
        elif hasattr(value, "dtype"):
            array = np.asarray(value)
            found.update(f"{name} {array.dtype} {array.shape}".encode())
            found.update(np.ascontiguousarray(array).tobytes())
        elif value is not None:
            found.update(f"{name} {value!r}".encode())

    add("", vars(value) if isinstance(value, Batch) else value)
    return found.hexdigest()


def learn(name: str, sampler: Any, num: int) -> list[str]:
    """Draw batches, and give back priorities that are made of them, where those are taken."""
    digests = []
    for _ in range(num):
        batch = sampler.sample()
        digests.append(digest(batch))
        if name in PRIORITIZED:
            rewards = np.asarray(batch.rewards).reshape(len(batch), -1)[:, 0]
            sampler.update_priorities(batch.indices, np.abs(rewards) + batch.indices % 7)
    return digests


def view_of(lake: Lake) -> ReplayView:
    return lake.snapshot("d@3").replay('"return" < 1000', columns=("policy_version",))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """360 steps of 12 episodes in three pieces each; and a later one that nobody sees."""
    lake = open_lake(tmp_path_factory.mktemp("made") / "lake", create=True)
    goal = Box((2,))
    dataset = lake.dataset("d")
    dataset.create(
        Dict({"observation": goal, "achieved_goal": goal, "desired_goal": goal}), Discrete(3)
    )
    for part in range(3):
        dataset.append([_episode(f"e{number}", part) for number in range(12)])
    assert dataset.snapshot().version == 3
    dataset.append([_episode("later", 0)])
    return lake


def _episode(name: str, part: int) -> Episode:
    at = np.arange(10 * part, 10 * part + 11, dtype=np.float32)
    values = np.stack([at, at * 0 + int(name[1:]) if name != "later" else at], 1)
    observations = {key: values for key in ("observation", "achieved_goal", "desired_goal")}
    return Episode(
        name,
        {key: value[:-1] for key, value in observations.items()},
        np.arange(10) % 3,
        at[:-1] / 7,
        truncated=part == 2,
        final_observation={key: value[-1] for key, value in observations.items()},
        first_step=10 * part,
        policy_versions=np.arange(10) % 5,
    )


def main(lake: str, states: str) -> None:
    """Go on from saved positions, and say what came."""
    view = view_of(open_lake(lake))
    found = {}
    for name, state in pickle.loads(Path(states).read_bytes()).items():
        sampler = ALL[name](view, 99)
        sampler.load_state_dict(json.loads(state) if isinstance(state, str) else state)
        found[name] = learn(name, sampler, NUM_BATCHES)
        if hasattr(sampler, "close"):
            sampler.close()
    json.dump(found, sys.stdout)


@pytest.mark.slow
def test_another_process_goes_on_from_the_middle_of_a_block(made: Lake, tmp_path: Path) -> None:
    view = view_of(made)
    assert view.wait_cached() is not None
    states, expected = {}, {}
    for name, make in ALL.items():
        sampler = make(view, 5)
        # Into the second block or epoch, where blocks are 64 batches of 16 and epochs 23.
        learn(name, sampler, 17 if name == "in order" else 69)
        state = sampler.state_dict()
        states[name] = json.dumps(state) if name in JSON_ABLE else state
        kept = digest(state)
        expected[name] = learn(name, sampler, NUM_BATCHES)
        # What was saved does not change as sampling goes on.
        assert digest(state) == kept, name
        assert len(set(expected[name])) > 60
        if hasattr(sampler, "close"):
            sampler.close()
    (tmp_path / "states").write_bytes(pickle.dumps(states))
    command = [sys.executable, __file__, made.url, str(tmp_path / "states")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == expected.keys()
    for name, digests in expected.items():
        assert found[name] == digests, name


@pytest.mark.parametrize("name", ALL)
def test_samplers_of_one_view_do_not_touch_each_other(made: Lake, name: str) -> None:
    view = view_of(made)
    alone = ALL[name](view, 5)
    expected = learn(name, alone, 20)
    one, other = ALL[name](view, 5), ALL[name](view, 6)
    found = []
    for _ in range(20):
        found += learn(name, one, 1)
        learn(name, other, 1)
    assert found == expected
    for sampler in (alone, one, other):
        if hasattr(sampler, "close"):
            sampler.close()


@pytest.mark.parametrize("num_before", [0, 1, 63, 64, 65])
@pytest.mark.parametrize("name", ["uniform", "shuffled", "hindsight", "tensors"])
def test_a_position_can_be_saved_again_before_it_is_used(
    made: Lake, name: str, num_before: int
) -> None:
    """At the ends of blocks and between, and through several samplers on its way."""
    view = view_of(made)
    sampler = ALL[name](view, 5)
    learn(name, sampler, num_before)
    state = sampler.state_dict()
    expected = learn(name, sampler, 70)
    for seed in (7, 8):
        sampler = ALL[name](view, seed)
        # Whatever it drew before does not matter.
        learn(name, sampler, seed)
        sampler.load_state_dict(state)
        state = json.loads(json.dumps(sampler.state_dict()))
    assert learn(name, sampler, 70) == expected


if __name__ == "__main__":
    main(*sys.argv[1:])
