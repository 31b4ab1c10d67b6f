import numpy as np
import pytest
import torch
from torch import nn

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError, TrainingError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.policies.uniform import UniformPolicy
from replaylake.offline.dataset_statistics import DatasetStatistics, Moments
from replaylake.offline.evaluation.ope.d3rlpy_fqe import d3rlpy_fqe
from replaylake.offline.evaluation.ope.fqe_config import FQEConfig
from replaylake.offline.networks.graph import PolicyGraph, TorchPolicy

QUICK = FQEConfig(updates=400, batch_size=64, learning_rate=3e-3, hidden_sizes=(16,))
GAMMA = 0.5


class Constant(nn.Module):
    """The same output at each observation."""

    def __init__(self, output):
        super().__init__()
        self.output = torch.tensor([output])

    def forward(self, observations):
        return (self.output.expand(len(observations), -1),)


def constant(head, action_space, output):
    spec = PolicySpec(Box((2,)), action_space, head)
    return TorchPolicy(PolicyGraph(Constant(output), spec))


def logged(folder, actions, space):
    """Two steps: at [1, 0] the reward is the action, at [0, 1] it is 1, and then it terminates."""
    lake = open_lake(folder / "lake", create=True)
    episodes = [
        Episode(
            episode_id=f"e{number}",
            observations=np.eye(2, dtype=np.float32),
            actions=pair,
            rewards=np.array([float(np.ravel(pair[0])[0]), 1.0]),
            terminated=True,
            truncated=False,
        )
        for number, pair in enumerate(actions)
    ]
    lake.dataset("two_steps").append(episodes)
    view = lake.dataset("two_steps").snapshot().replay()
    assert view.spec.action_space.__class__ is space
    return view


@pytest.fixture(scope="module")
def discrete_view(tmp_path_factory):
    rng = np.random.default_rng(0)
    return logged(tmp_path_factory.mktemp("discrete"), rng.integers(0, 3, (60, 2)), Discrete)


@pytest.mark.parametrize(
    ("output", "exploration", "expected"),
    [
        # reward 2, then gamma * 1
        ([0.0, 0.0, 1.0], None, 2 + GAMMA),
        ([1.0, 0.0, 0.0], None, 0 + GAMMA),
        ([0.0, 0.0, 0.0], Exploration(temperature=1.0), 1 + GAMMA),
    ],
)
def test_the_value_is_that_of_the_policys_actions(output, exploration, expected, discrete_view):
    policy = constant("categorical", discrete_view.spec.action_space, output)
    told = []
    fitted = d3rlpy_fqe(
        policy,
        discrete_view,
        discount=GAMMA,
        config=QUICK,
        exploration=exploration,
        on_progress=lambda done, of: told.append((done, of)),
    )
    assert fitted.value == pytest.approx(expected, abs=0.1)
    assert told == [(250, 400), (400, 400)]
    assert fitted.num_updates == 400
    first = np.array([[1.0, 0.0]] * 3, np.float32)
    np.testing.assert_allclose(
        fitted.q(first, np.array([0, 1, 2])), np.arange(3) + GAMMA, atol=0.15
    )
    last = np.array([[0.0, 1.0]], np.float32)
    np.testing.assert_allclose(fitted.v(last), [1.0], atol=0.1)


def test_box_policies_that_draw_and_that_do_not(tmp_path):
    rng = np.random.default_rng(0)
    view = logged(tmp_path, rng.uniform(-1, 1, (200, 2, 1)).astype(np.float32), Box)
    space = Box((1,), "float32", -1.0, 1.0)
    policy = constant("deterministic", space, [0.5])
    fitted = d3rlpy_fqe(policy, view, discount=GAMMA, config=QUICK)
    assert fitted.value == pytest.approx(0.5 + GAMMA, abs=0.15)
    drawing = UniformPolicy(Box((2,)), space)
    fitted = d3rlpy_fqe(drawing, view, discount=GAMMA, config=QUICK)
    assert fitted.value == pytest.approx(0.0 + GAMMA, abs=0.15)


def test_the_same_seed_gives_the_same_value_and_leaves_the_global_state(discrete_view):
    policy = constant("categorical", discrete_view.spec.action_space, [0.0, 0.0, 0.0])
    few = FQEConfig(updates=20, batch_size=8, hidden_sizes=(8,))
    moments = Moments(np.array([0.5, 0.5], np.float32), np.array([0.5, 0.5], np.float32))
    explored = Exploration(temperature=1.0)

    def value(seed, facts=None):
        fitted = d3rlpy_fqe(
            policy,
            discrete_view,
            discount=GAMMA,
            config=few,
            seed=seed,
            exploration=explored,
            facts=facts or DatasetStatistics(),
        )
        return fitted.value

    before = torch.get_rng_state()
    assert value(0) == value(0)
    torch.testing.assert_close(torch.get_rng_state(), before)
    assert value(0) != value(1)
    assert value(0) != value(0, DatasetStatistics(observations={"": moments}))


def test_what_it_cannot_do_is_refused(discrete_view):
    policy = constant("categorical", discrete_view.spec.action_space, [0.0, 0.0, 0.0])
    with pytest.raises(ConfigInvalidError, match=r"tolerance 0\.1, expected 0"):
        d3rlpy_fqe(policy, discrete_view, discount=GAMMA, config=FQEConfig(tolerance=0.1))
    wild = FQEConfig(updates=300, batch_size=8, learning_rate=1e30, hidden_sizes=(8,))
    with pytest.raises(TrainingError, match=r"FQE, update 250: found a loss of (nan|inf)"):
        d3rlpy_fqe(policy, discrete_view, discount=GAMMA, config=wild)
