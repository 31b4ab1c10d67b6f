"""Fitted Q evaluation beside d3rlpy's FQE and DiscreteFQE, which are of the same paper."""

import numpy as np
import pytest
import torch
from torch import nn

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.policies.uniform import UniformPolicy
from replaylake.offline.d3rlpy.library import load_d3rlpy
from replaylake.offline.evaluation.ope.fqe import fitted_q_evaluation
from replaylake.offline.evaluation.ope.fqe_config import FQEConfig
from replaylake.offline.evaluation.ope.target_policy import TargetPolicy
from replaylake.offline.evaluation.ope.transition_arrays import from_view
from replaylake.offline.networks.graph import PolicyGraph, TorchPolicy

GAMMA = 0.5
CONFIG = FQEConfig(updates=400, batch_size=64, learning_rate=3e-3, hidden_sizes=(16,))
UNIT = Box((1,), "float32", -1.0, 1.0)


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


@pytest.fixture(scope="module")
def view_of(tmp_path_factory):
    """Two steps an episode: at [1, 0] the reward is the action, at [0, 1] it is 1, then the end."""
    rng = np.random.default_rng(0)
    lake = open_lake(tmp_path_factory.mktemp("lakes") / "lake", create=True)
    for name, actions in (
        ("discrete", rng.integers(0, 3, (60, 2))),
        ("box", rng.uniform(-1, 1, (200, 2, 1)).astype(np.float32)),
    ):
        lake.dataset(name).append(
            Episode(
                episode_id=f"{name}/{number}",
                observations=np.eye(2, dtype=np.float32),
                actions=pair,
                rewards=np.array([float(np.ravel(pair[0])[0]), 1.0]),
                terminated=True,
                truncated=False,
            )
            for number, pair in enumerate(actions)
        )
    return lambda name: lake.dataset(name).snapshot().replay()


class _NextActions:
    """Stands where d3rlpy's FQE expects an algorithm: it says what the policy does next."""

    def __init__(self):
        self.impl = self
        self.actions = None

    def predict_best_action(self, observations):
        return self.actions


def value_by_d3rlpy(policy, view, exploration):
    """Return the mean value of first observations as d3rlpy's FQE learns it."""
    d3rlpy = load_d3rlpy()
    target, arrays = TargetPolicy(policy, exploration), from_view(view, GAMMA)
    rng = np.random.default_rng(0)

    def draw(observations):
        drawn = target.actions(observations, rng)
        return torch.from_numpy(drawn.reshape(len(observations), -1)).float()

    is_discrete = isinstance(view.spec.action_space, Discrete)
    answers = _NextActions()
    encoder = d3rlpy.models.VectorEncoderFactory(hidden_units=list(CONFIG.hidden_sizes))
    config = d3rlpy.ope.FQEConfig(
        learning_rate=CONFIG.learning_rate,
        gamma=GAMMA,
        target_update_interval=50,
        encoder_factory=encoder,
    )
    model = (d3rlpy.ope.DiscreteFQE if is_discrete else d3rlpy.ope.FQE)(answers, config, "cpu:0")
    model.create_impl((2,), view.spec.action_space.n if is_discrete else 1)
    for update in range(CONFIG.updates):
        rows = rng.integers(len(arrays), size=CONFIG.batch_size)
        rewards = torch.from_numpy(arrays.rewards[rows]).float()[:, None]
        actions = torch.from_numpy(arrays.actions[rows].reshape(len(rows), -1)).float()
        answers.actions = draw(arrays.next_observations[rows])
        batch = d3rlpy.TorchMiniBatch(
            observations=torch.from_numpy(arrays.observations[rows]),
            actions=actions,
            rewards=rewards,
            next_observations=torch.from_numpy(arrays.next_observations[rows]),
            next_actions=torch.zeros_like(actions),
            returns_to_go=torch.zeros_like(rewards),
            terminals=torch.from_numpy(arrays.discounts[rows] == 0).float()[:, None],
            intervals=torch.ones_like(rewards),
            device="cpu:0",
        )
        model.impl.update(batch, update)
    first = arrays.initial_observations
    drawn = [draw(first) for _ in range(16)]
    if is_discrete:
        drawn = [actions.long() for actions in drawn]
    with torch.no_grad():
        values = [model.impl.predict_value(torch.from_numpy(first), actions) for actions in drawn]
    return float(torch.stack(values).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy", "exploration", "expected"),
    [
        # The first reward, then gamma * 1.
        ("discrete", constant("categorical", Discrete(3), [0.0, 0.0, 1.0]), {}, 2 + GAMMA),
        ("discrete", constant("categorical", Discrete(3), [1.0, 0.0, 0.0]), {}, 0 + GAMMA),
        (
            "discrete",
            constant("categorical", Discrete(3), [0.0, 0.0, 0.0]),
            {"temperature": 1.0},
            1 + GAMMA,
        ),
        ("box", constant("deterministic", UNIT, [0.5]), {}, 0.5 + GAMMA),
        ("box", UniformPolicy(Box((2,)), UNIT), {}, 0.0 + GAMMA),
    ],
)
def test_both_find_the_value_of_the_policys_actions(view_of, name, policy, exploration, expected):
    view, exploration = view_of(name), Exploration(**exploration)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = value_by_d3rlpy(policy, view, exploration)
    ours = fitted_q_evaluation(
        policy, view, discount=GAMMA, config=CONFIG, exploration=exploration
    ).value
    assert theirs == pytest.approx(expected, abs=0.15)
    assert ours == pytest.approx(expected, abs=0.1)
    assert ours == pytest.approx(theirs, abs=0.15)
