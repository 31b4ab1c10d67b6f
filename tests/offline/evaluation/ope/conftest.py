"""What these tests share: policies whose actions are a table, so that values are known exactly."""

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Discrete
from replaylake.datastore.lake.policies.package import save_package
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.learning.export import export_onnx
from replaylake.offline.networks.graph import PolicyGraph, TorchPolicy


class _Table(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.rows = nn.Parameter(torch.tensor(rows, dtype=torch.float32))

    def forward(self, observations):
        return (self.rows[observations.long()],)


def _graph(rows, head):
    rows = np.asarray(rows)
    spec = PolicySpec(Discrete(rows.shape[0]), Discrete(rows.shape[1]), head)
    return PolicyGraph(_Table(rows), spec)


@pytest.fixture(scope="session")
def table_policy():
    """Makes a policy of q-values (or logits) [S, A]."""
    return lambda rows, head="q_values": TorchPolicy(_graph(rows, head))


@pytest.fixture
def register_graph(tmp_path):
    """Registers any module as a policy, in a lake and under a name."""

    def register(lake, name, module, spec, **lineage):
        graph = PolicyGraph(module, spec)
        # Made by hand: from no episodes.
        lineage = {"datasets": [], **lineage}
        folder = tmp_path / f"package-{name}-{len(lake.registry.list())}"
        save_package(
            folder, onnx=export_onnx(graph), spec=graph.spec, manifest={}, learner_weights=None
        )
        return lake.registry.register(name, folder, run_id="hand-made", lineage=lineage)

    return register


@pytest.fixture
def register_table(register_graph):
    """Registers a table of q-values (or logits) [S, A]."""

    def register(lake, name, rows, head="q_values", **lineage):
        graph = _graph(rows, head)
        return register_graph(lake, name, graph.module, graph.spec, **lineage)

    return register


class FrozenLake:
    """The transition table of FrozenLake-v1, and values by dynamic programming over it."""

    def __init__(self):
        self.env = gymnasium.make("FrozenLake-v1")
        self.table = self.env.unwrapped.P

    def q(self, value, gamma):
        q = np.zeros((16, 4))
        for state, actions in self.table.items():
            for action, outcomes in actions.items():
                for chance, following, reward, ended in outcomes:
                    q[state, action] += chance * (
                        reward + gamma * (0.0 if ended else value[following])
                    )
        return q

    def optimal(self, gamma=0.99):
        value = np.zeros(16)
        for _ in range(2000):
            value = self.q(value, gamma).max(axis=1)
        return self.q(value, gamma)

    def value(self, probs, gamma, horizon=100):
        value = np.zeros(16)
        for _ in range(horizon):
            value = (probs * self.q(value, gamma)).sum(axis=1)
        return value[0]

    def uniform_episodes(self, num, seed=0):
        """Roll out in numpy by the transition table: as the environment does, in a tenth of it."""
        rng = np.random.default_rng(seed)
        return [self._episode(f"uniform/{i:06d}", rng) for i in range(num)]

    def _episode(self, name, rng):
        states, actions, rewards, ended = [0], [], [], False
        while not ended and len(actions) < 100:
            actions.append(int(rng.integers(4)))
            outcomes = self.table[states[-1]][actions[-1]]
            chances = np.cumsum([outcome[0] for outcome in outcomes])
            _, following, reward, ended = outcomes[int((chances < rng.random()).sum())]
            states.append(following)
            rewards.append(reward)
        return Episode(
            name,
            observations=np.array(states[:-1]),
            actions=np.array(actions),
            rewards=np.array(rewards, float),
            terminated=ended,
            truncated=not ended,
            final_observation=np.array(states[-1]),
            behavior_log_probs=np.full(len(actions), np.log(0.25), np.float32),
        )


@pytest.fixture(scope="session")
def frozen_lake():
    return FrozenLake()


@pytest.fixture
def assert_same_interval():
    """Checks two bootstraps of one statistic by the same draws, beside other statistics or alone.

    The resampled means are one matrix product over all statistics, and BLAS orders a sum by the
    matrices' shapes: a mean over E episodes is off by E / 2^53 of their spread, in units of which
    an interval is wide about E^-1/2. Another draw would move the ends by some 1e-2 of the width.
    """

    def check(found, expected):
        width = expected.high - expected.low
        assert np.isfinite(width)
        assert (found.method, found.note) == (expected.method, expected.note)
        ends = pytest.approx((expected.low, expected.high), rel=0, abs=1e-11 * width)
        assert (found.low, found.high) == ends

    return check
