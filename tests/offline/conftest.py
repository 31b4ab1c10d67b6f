"""What the offline tests share: the CartPole log in a lake, and hand-made batches."""

import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import TrainingError
from replaylake.datastore.lake.lake import open_lake

NUM_MEMBERS = 2
CARTPOLE_LOG = (
    Path(__file__).parents[2] / "examples" / "data" / "rllib_cartpole" / "cartpole-v1_large"
)


def cartpole_episodes():
    """The RLlib log, read here with pyarrow: 21 episodes, 4,137 steps."""
    rows = {}
    for file in sorted(CARTPOLE_LOG.glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            rows.setdefault(row["eps_id"], []).append(row)
    return [
        Episode(
            episode_id=f"log/{episode}",
            observations=np.array([step["obs"] for step in steps], np.float32),
            actions=np.array([step["actions"] for step in steps]),
            rewards=np.array([step["rewards"] for step in steps]),
            # The log marks the 200-step limit as an end too.
            terminated=len(steps) < 200,
            truncated=len(steps) == 200,
            final_observation=np.array(steps[-1]["new_obs"], np.float32),
            behavior_log_probs=np.array([step["action_logp"] for step in steps], np.float32),
        )
        for episode, steps in rows.items()
    ]


@pytest.fixture(scope="session")
def cartpole_lake(tmp_path_factory):
    """A lake with the CartPole log as `cartpole`; tests register policies under their own names."""
    lake = open_lake(tmp_path_factory.mktemp("lakes") / "lake", create=True)
    lake.dataset("cartpole").append(cartpole_episodes())
    return lake


@pytest.fixture(scope="session")
def cartpole_observations():
    """1,000 logged observations."""
    return np.concatenate([episode.observations for episode in cartpole_episodes()])[:1000]


def make_batch(kind="discrete", size=32, seed=0, num_actions=3, action_size=2, **changes):
    """A random batch of observations [4]; actions int64 in 0 .. 2 or float32 [2] in [-2, 2]."""
    rng = np.random.default_rng(seed)
    observations = rng.standard_normal((size, 4)).astype(np.float32)
    if kind == "discrete":
        actions = rng.integers(0, num_actions, size)
    else:
        actions = rng.uniform(-2, 2, (size, action_size)).astype(np.float32)
    fields = {
        "observations": observations,
        "actions": actions,
        "rewards": rng.standard_normal(size).astype(np.float32),
        "discounts": np.where(rng.random(size) < 0.1, 0, 0.99).astype(np.float32),
        "next_observations": observations + np.float32(0.1),
        "behavior_log_probs": np.full(size, np.nan, np.float32),
        "weights": np.ones(size, np.float32),
        "keys": np.zeros((size, 2), np.uint64),
    }
    return Batch(**{**fields, **changes})


@pytest.fixture
def batch():
    """The function make_batch, for tests that live in files of their own."""
    return make_batch


def make_line_world(num_episodes=4, length=10, action_space="discrete", reward=1.0, seed=0):
    """Episodes in which the action says the sign of the first observation."""
    rng = np.random.default_rng(seed)
    episodes = []
    for i in range(num_episodes):
        observations = rng.standard_normal((length, 2)).astype(np.float32)
        if action_space == "discrete":
            actions = (observations[:, 0] > 0).astype(np.int64)
        else:
            actions = np.tanh(observations[:, :1]) * 3
        episodes.append(
            Episode(
                f"w/{seed}-{i}",
                observations,
                actions,
                np.full(length, reward),
                terminated=i % 2 == 0,
                truncated=i % 2 == 1,
                final_observation=observations[0],
            )
        )
    return episodes


@pytest.fixture
def line_world():
    """The function make_line_world, for tests that live in files of their own."""
    return make_line_world


@pytest.fixture
def assert_chosen_alike():
    """Checks the greedy actions [N] of one policy computed by two libraries.

    They sum in different orders: between scores [N, A] that differ by less than float32's rounding
    of a sum (1e-5 of their size) either action may be the greater. Nearly all rows must be clear.
    """

    def check(found, expected, scores):
        best = np.sort(scores, axis=1)
        is_clear = best[:, -1] - best[:, -2] > 1e-5 * np.abs(scores).max()
        assert is_clear.mean() > 0.98
        np.testing.assert_array_equal(found[is_clear], expected[is_clear])

    return check


class Exchange:
    """Adds what the threads of a team bring, like an all-reduce."""

    def __init__(self):
        self._barrier = threading.Barrier(NUM_MEMBERS, timeout=60)
        self._brought = [None] * NUM_MEMBERS

    def add(self, rank, values):
        self._brought[rank] = values.clone()
        self._barrier.wait()
        values.copy_(sum(self._brought))
        self._barrier.wait()

    def abort(self):
        self._barrier.abort()


class Member:
    """A process group of threads."""

    size = NUM_MEMBERS

    def __init__(self, exchange, rank):
        self.rank, self._exchange = rank, exchange

    def all_reduce(self, values):
        try:
            self._exchange.add(self.rank, values)
        except threading.BrokenBarrierError as error:
            raise TrainingError("another learner is gone") from error

    def broadcast(self, value):
        values = torch.tensor([0.0 if self.rank else value], dtype=torch.float64)
        self.all_reduce(values)
        return float(values)


def run_together(work):
    """Run work(member) in a thread for each member; return what they return, or raise the first."""
    exchange, results, errors = Exchange(), [None] * NUM_MEMBERS, []

    def run(rank):
        try:
            results[rank] = work(Member(exchange, rank))
        except BaseException as error:
            errors.append(error)
            exchange.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(NUM_MEMBERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.fixture
def together():
    return run_together
