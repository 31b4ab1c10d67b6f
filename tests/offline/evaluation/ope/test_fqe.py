"""Fitted Q evaluation against values worked out by hand and by dynamic programming."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import SpaceUnsupportedError, TrainingError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.logged_steps import read_logged_steps
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.graph_policy import GraphPolicy
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.evaluation.ope.fqe import FQEConfig, fit, fitted_q_evaluation
from replaylake.offline.evaluation.ope.target_policy import TargetPolicy
from replaylake.offline.evaluation.ope.transition_arrays import from_steps, from_view, returns_to_go
from replaylake.offline.networks.graph import PolicyGraph, TorchPolicy

NETWORK = FQEConfig(table_cells=0, updates=1000, hidden_sizes=(32,), batch_size=64, target_tau=0.05)


def chain(rng, name):
    """Two states: action 1 ends with 1 from the first and 5 from the second; 0 changes state."""
    states, actions = [0], []
    while True:
        actions.append(int(rng.integers(2)))
        if actions[-1] or len(actions) == 20:
            break
        states.append(1 - states[-1])
    ended = bool(actions[-1])
    rewards = np.zeros(len(actions))
    rewards[-1] = (1.0, 5.0)[states[-1]] if ended else 0.0
    return Episode(
        name,
        observations=np.array(states),
        actions=np.array(actions),
        rewards=rewards,
        terminated=ended,
        truncated=not ended,
        final_observation=np.array(1 - states[-1]),
    )


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    lake = open_lake(tmp_path_factory.mktemp("fqe") / "lake", create=True)
    rng = np.random.default_rng(0)
    lake.dataset("chain").create(Discrete(2), Discrete(2))
    lake.dataset("chain").append([chain(rng, f"chain/{i}") for i in range(300)])
    return lake


# q-values whose mode changes state first and then takes 5: worth gamma * 5.
PATIENT = [[1.0, 0.0], [0.0, 1.0]]
HASTY = [[0.0, 1.0], [0.0, 1.0]]


@pytest.mark.slow
@pytest.mark.parametrize("config", [FQEConfig(), NETWORK], ids=["table", "network"])
@pytest.mark.parametrize(("rows", "value"), [(PATIENT, 4.5), (HASTY, 1.0)])
def test_greedy_policies_of_two_states(lake, table_policy, config, rows, value):
    view = lake.snapshot("chain").replay()
    found = fitted_q_evaluation(table_policy(rows), view, discount=0.9, config=config)
    # Discounts of a view are float32.
    tolerance = 1e-6 if config.table_cells else 0.1
    assert found.value == pytest.approx(value, abs=tolerance)
    # What is after the other action, with 0.9 a step: q(0, 1) = 1, q(1, 1) = 5.
    q = found.q(np.array([0, 1, 0, 1]), np.array([1, 1, 0, 0]))
    expected = [1, 5, 0.9 * 5, 0.9 * value]
    np.testing.assert_allclose(q, expected, atol=tolerance * 2)
    np.testing.assert_allclose(found.v(np.array([0, 1])), [value, 5], atol=tolerance * 2)
    assert found.num_updates == (0 if config.table_cells else 1000)


@pytest.mark.slow
@pytest.mark.parametrize("config", [FQEConfig(), NETWORK], ids=["table", "network"])
def test_a_policy_that_draws(lake, table_policy, config):
    view = lake.snapshot("chain").replay()
    exploration = Exploration(epsilon=0.5)
    found = fitted_q_evaluation(
        table_policy(PATIENT), view, discount=0.9, config=config, exploration=exploration
    )
    # v0 = 0.25 * 1 + 0.75 * 0.9 * v1 and v1 = 0.75 * 5 + 0.25 * 0.9 * v0.
    value = (0.25 + 0.75 * 0.9 * 0.75 * 5) / (1 - 0.75 * 0.25 * 0.81)
    assert found.value == pytest.approx(value, abs=1e-6 if config.table_cells else 0.1)


def test_the_same_seed_gives_the_same_model(lake, table_policy):
    view = lake.snapshot("chain").replay()
    config = FQEConfig(table_cells=0, updates=50, hidden_sizes=(8,))
    first, second, other = (
        fitted_q_evaluation(table_policy(HASTY), view, discount=0.9, config=config, seed=seed).value
        for seed in (1, 1, 2)
    )
    assert first == second != other


@pytest.mark.slow
def test_updates_end_where_the_value_no_longer_moves(lake, table_policy):
    view = lake.snapshot("chain").replay()
    told = []
    found = fitted_q_evaluation(
        table_policy(HASTY),
        view,
        discount=0.0,
        config=FQEConfig(table_cells=0, updates=5000, hidden_sizes=(16,), tolerance=0.01),
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert 250 < found.num_updates < 5000
    assert told[-1] == (found.num_updates, 5000)
    assert found.value == pytest.approx(1.0, abs=0.05)


def test_without_an_end_and_a_discount_there_is_no_value(tmp_path, table_policy):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("loop").create(Discrete(2), Discrete(2))
    episode = Episode(
        "loop/0",
        observations=np.array([0, 1, 0, 1]),
        actions=np.zeros(4, np.int64),
        rewards=np.ones(4),
        truncated=True,
        final_observation=np.array(0),
    )
    lake.dataset("loop").append([episode])
    view = lake.snapshot("loop").replay()
    policy = table_policy([[1.0, 0.0], [1.0, 0.0]])
    with pytest.raises(TrainingError, match="lower discount"):
        fitted_q_evaluation(policy, view, discount=1.0)
    # 1 for ever, discounted.
    assert fitted_q_evaluation(policy, view, discount=0.9).value == pytest.approx(10)


def test_frozen_lake_by_dynamic_programming(tmp_path, table_policy, frozen_lake):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("frozen").create(Discrete(16), Discrete(4))
    lake.dataset("frozen").append(frozen_lake.uniform_episodes(5000))
    view = lake.snapshot("frozen").replay()
    best = frozen_lake.optimal()
    for epsilon, tolerance in ((0.95, 0.2), (0.5, 0.25), (0.0, 0.25)):
        probs = np.eye(4)[best.argmax(1)] * (1 - epsilon) + epsilon / 4
        exact = frozen_lake.value(probs, 0.99, 5000)
        found = fitted_q_evaluation(
            table_policy(best), view, discount=0.99, exploration=Exploration(epsilon=epsilon)
        )
        # About 70 of the episodes have the one reward: their luck is a tenth or two.
        assert found.value == pytest.approx(exact, rel=tolerance)


class _Constant(nn.Module):
    def __init__(self, value, std=None):
        super().__init__()
        self.register_buffer("value", torch.tensor([value]))
        self.std = std

    def forward(self, observations):
        means = self.value.expand(len(observations), 1)
        return (means,) if self.std is None else (means, torch.full_like(means, np.log(self.std)))


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    """One step of reward x + 2a: linear, and so exactly learnable."""
    lake = open_lake(tmp_path_factory.mktemp("line") / "lake", create=True)
    rng = np.random.default_rng(1)
    xs, actions = rng.uniform(-1, 1, (400, 1)), rng.uniform(-1, 1, (400, 1))
    lake.dataset("line").create(Box((1,)), Box((1,), low=-1.0, high=1.0))
    lake.dataset("line").append(
        Episode(
            f"line/{i:03d}",
            observations=xs[i : i + 1].astype(np.float32),
            actions=actions[i : i + 1].astype(np.float32),
            rewards=(xs[i] + 2 * actions[i]).astype(np.float64),
            terminated=True,
        )
        for i in range(400)
    )
    return lake, float(xs.mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "std", "draws"),
    [("deterministic", None, False), ("gaussian", 0.1, True), ("gaussian", 0.1, False)],
)
def test_continuous_actions(line, head, std, draws):
    lake, mean = line
    view = lake.snapshot("line").replay()
    spec = PolicySpec(view.spec.observation_space, view.spec.action_space, head)
    policy = TorchPolicy(PolicyGraph(_Constant(0.5, std), spec))
    exploration = Exploration(temperature=1.0) if draws else Exploration()
    found = fitted_q_evaluation(policy, view, discount=0.9, config=NETWORK, exploration=exploration)
    assert found.value == pytest.approx(mean + 1.0, abs=0.1)
    q = found.q(np.array([[0.2]], np.float32), np.array([[-0.5]], np.float32))
    assert q[0] == pytest.approx(0.2 - 1.0, abs=0.15)


def test_steps_and_a_view_are_the_same_transitions(lake):
    snapshot = lake.snapshot("chain")
    view, steps = from_view(snapshot.replay(), 0.9), from_steps(read_logged_steps(snapshot), 0.9)
    for arrays in (view, steps):
        assert len(arrays) == snapshot.num_steps
    for name in ("observations", "actions", "rewards", "discounts", "next_observations", "returns"):
        one, other = (np.sort(np.asarray(getattr(a, name), float)) for a in (view, steps))
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert len(view.initial_observations) == len(steps.initial_observations) == 300
    some = np.arange(300) % 3 == 0
    assert len(from_steps(read_logged_steps(snapshot), 0.9, some).initial_observations) == 100


def test_what_follows_the_last_step(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    ends = {"a": (True, None), "b": (False, 9), "c": (False, None)}
    lake.dataset("log").append(
        Episode(
            f"e/{name}",
            observations=np.array([0, 1]) + 10 * i,
            actions=np.array([0, 1]),
            rewards=np.array([1.0, 2.0]),
            terminated=terminated,
            truncated=not terminated,
            final_observation=None if final is None else np.array(final),
        )
        for i, (name, (terminated, final)) in enumerate(ends.items())
    )
    steps = read_logged_steps(lake.snapshot("log"))
    arrays = from_steps(steps, 0.5)
    # The last step of c has no successor, and is no transition.
    assert arrays.observations.tolist() == [0, 1, 10, 11, 20]
    assert arrays.next_observations.tolist() == [1, 1, 11, 9, 21]
    assert arrays.discounts.tolist() == [0.5, 0, 0.5, 0.5, 0.5]
    assert returns_to_go(steps, 0.5).tolist() == [2, 2, 2, 2, 2, 2]


def test_a_policy_that_remembers_is_refused(lake, table_policy):
    spec = replace(table_policy(HASTY).spec, state_size=3)
    policy = GraphPolicy(spec, lambda inputs: {})
    view = lake.snapshot("chain").replay()
    with pytest.raises(
        SpaceUnsupportedError, match=r"q_values: found a policy with a state.*along who"
    ):
        fitted_q_evaluation(policy, view, discount=0.9)
    with pytest.raises(SpaceUnsupportedError, match="with a state"):
        TargetPolicy(policy).action_probs(np.zeros(1, np.int64))


@pytest.mark.slow
def test_masks_of_next_steps_hold(tmp_path, table_policy):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("masked").create(Discrete(2), Discrete(2), mask_size=2)
    rng = np.random.default_rng(3)
    episodes = []
    for i in range(200):
        last = int(rng.integers(2))
        only_first = i % 2 == 0
        last = 0 if only_first else last
        episodes.append(
            Episode(
                f"m/{i:03d}",
                observations=np.array([0, 1]),
                actions=np.array([0, last]),
                rewards=np.array([0.0, 10.0 * last]),
                terminated=True,
                action_masks=np.array([[True, True], [True, not only_first]]),
            )
        )
    lake.dataset("masked").append(episodes)
    view = lake.snapshot("masked").replay()
    # It would take the second action, but in half of the episodes it may not.
    policy = table_policy([[1.0, 0.0], [0.0, 1.0]])
    assert fitted_q_evaluation(policy, view, discount=1.0).value == pytest.approx(5)
    network = fitted_q_evaluation(policy, view, discount=1.0, config=NETWORK)
    assert network.value == pytest.approx(5, abs=0.4)


def test_fit_on_some_of_the_episodes(lake, table_policy):
    steps = read_logged_steps(lake.snapshot("chain"))
    arrays = from_steps(steps, 0.9, np.arange(300) < 150)
    found = fit(TargetPolicy(table_policy(PATIENT)), arrays, FQEConfig())
    assert found.value == pytest.approx(4.5)
