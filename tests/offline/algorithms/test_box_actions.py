"""What every actor-critic of ours does alike, whatever its losses are."""

import math

import numpy as np
import pytest
import torch

from replaylake.datastore.episodes.spaces import Box, Dict, Discrete
from replaylake.datastore.errors import ConfigInvalidError, SpaceUnsupportedError
from replaylake.datastore.lake.policies.package import load_policy, save_package
from replaylake.datastore.lake.policies.policy import HEAD_OUTPUTS
from replaylake.offline.algorithms.awac import AWACConfig, awac
from replaylake.offline.algorithms.cql import CQLConfig, cql
from replaylake.offline.algorithms.iql import IQLConfig, iql
from replaylake.offline.algorithms.sac import SACConfig, sac
from replaylake.offline.algorithms.td3 import TD3Config, td3
from replaylake.offline.algorithms.td3_plus_bc import TD3PlusBCConfig, td3_plus_bc
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.export import export_onnx
from replaylake.offline.learning.learner import GradientLearner
from replaylake.offline.networks.graph import TorchPolicy

OBSERVATION = Box((4,))
ACTION = Box((2,), "float32", [-2.0, 0.0], [2.0, 10.0])
SIZES = (16, 16)
ALGORITHMS = {
    "td3": (td3, TD3Config, "deterministic"),
    "td3_plus_bc": (td3_plus_bc, TD3PlusBCConfig, "deterministic"),
    "iql": (iql, IQLConfig, "gaussian"),
    "awac": (awac, AWACConfig, "gaussian"),
    "sac": (sac, SACConfig, "squashed_gaussian"),
    "cql": (cql, CQLConfig, "squashed_gaussian"),
}
each = pytest.mark.parametrize("name", ALGORITHMS)


def make(name, observation=OBSERVATION, action=ACTION, facts=None, seed=0, sizes=SIZES, **options):
    function, config_class, _ = ALGORITHMS[name]
    config = config_class(hidden_sizes=sizes, **options)
    facts = facts or DatasetStatistics()
    algorithm = function(observation, action, config, facts)
    return GradientLearner(algorithm, seed=seed, facts=facts)


def run(learner, batch, updates, first=0):
    for seed in range(first, first + updates):
        learner.update(batch("box", seed=seed))
    return learner


@each
def test_each_learns_exports_and_acts_within_the_bounds(name, batch, tmp_path):
    learner = run(make(name), batch, 3)
    metrics = learner.update(batch("box")).metrics
    assert {"critics_loss", "policy_loss", "q_mean"} <= set(metrics)
    assert all(np.isfinite(float(value)) for value in metrics.values())
    graph = learner.policy()
    assert graph.spec.head == ALGORITHMS[name][2]
    save_package(
        tmp_path / "p", onnx=export_onnx(graph), spec=graph.spec, manifest={}, learner_weights={}
    )
    observations = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
    packaged = load_policy(tmp_path / "p")
    actions = packaged.act(observations).actions
    np.testing.assert_allclose(actions, TorchPolicy(graph).act(observations).actions, atol=1e-5)
    assert (actions >= [-2, 0]).all()
    assert (actions <= [2, 10]).all()
    assert actions[:, 1].mean() > 2  # in the environment's units: the middle of the second is 5
    if "log_stds" in HEAD_OUTPUTS[graph.spec.head]:
        act = packaged.act(observations, rng=np.random.default_rng(1), deterministic=False)
        assert np.nanmax(np.abs(act.log_probs)) < 30


@each
def test_each_continues_bit_for_bit(name, batch):
    whole = run(make(name), batch, 5).state_dict()
    half = run(make(name), batch, 2).state_dict()
    resumed = make(name, seed=1)
    resumed.load_state_dict(half)
    found = run(resumed, batch, 3, first=2).state_dict()
    assert found.keys() == whole.keys()
    for key, array in whole.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)


@each
def test_weights_multiply_every_loss(name, batch):
    # At threshold 0, as CQL holds its gap against a constant that no row has a part in.
    options = {"alpha_threshold": 0.0} if name == "cql" else {}
    if "td3" in name:
        options = {"update_actor_interval": 1}
    plain = make(name, **options).update(batch("box")).metrics
    tripled = make(name, **options).update(batch("box", weights=np.full(32, 3, np.float32))).metrics
    losses = [metric for metric in plain if metric.endswith("_loss")]
    assert {"critics_loss", "policy_loss"} <= set(losses)
    for metric in losses:
        assert float(tripled[metric]) == pytest.approx(3 * float(plain[metric]), rel=1e-5), metric


@each
def test_a_row_of_weight_0_does_not_count(name, batch):
    weights = np.repeat(np.array([2.0, 0.0], np.float32), 16)
    given = batch("box", weights=weights)
    rewards = np.where(weights > 0, given.rewards, 1e6).astype(np.float32)
    other = batch("box", weights=weights, rewards=rewards)
    found, expected = (make(name).update(b).metrics for b in (other, given))
    assert float(found["critics_loss"]) == pytest.approx(float(expected["critics_loss"]), rel=1e-5)


@each
def test_priorities_are_mean_td_errors(name, batch):
    # Where every next value is dropped and rewards are 1,000, errors are about 1,000 less q.
    given = batch("box", rewards=np.full(32, 1e3, np.float32), discounts=np.zeros(32, np.float32))
    learner = make(name)
    center, scale = torch.tensor([0.0, 5.0]), torch.tensor([2.0, 5.0])
    normalized = (torch.from_numpy(given.actions) - center) / scale
    q = learner._networks["critics"](torch.from_numpy(given.observations), normalized).detach()
    priorities = learner.update(given).priorities
    assert priorities.shape == (32,)
    np.testing.assert_allclose(priorities, (1e3 - q).abs().mean(dim=0).numpy(), rtol=1e-6)


@each
def test_an_end_is_not_seen_beyond(name, batch):
    """Where the discount is 0, the next observation changes no target."""
    ends = np.zeros(32, np.float32)
    given = batch("box", discounts=ends)
    far = batch("box", discounts=ends, next_observations=given.next_observations + 5)
    found, expected = (make(name).update(b) for b in (far, given))
    np.testing.assert_allclose(found.priorities, expected.priorities, rtol=1e-5)


def optimum(observations):
    """Where the reward is greatest: within the bounds of ACTION, and not their middle."""
    first = np.tanh(observations[:, 0])
    return np.stack([first, 5 + 2.5 * np.tanh(observations[:, 1])], axis=1)


@pytest.mark.slow
@each
def test_each_finds_the_better_of_random_actions(name, batch):
    """One step, reward falling with the distance to the best action; actions logged at random."""
    rng = np.random.default_rng(0)

    def better(seed):
        observations = rng.standard_normal((128, 4)).astype(np.float32)
        actions = rng.uniform([-2, 0], [2, 10], (128, 2)).astype(np.float32)
        away = (actions - optimum(observations)) / [2, 5]
        return batch(
            "box",
            size=128,
            observations=observations,
            next_observations=observations,
            actions=actions,
            rewards=-4 * (away**2).sum(axis=1).astype(np.float32),
            discounts=np.zeros(128, np.float32),
        )

    options = {
        "td3_plus_bc": {"alpha": 20.0},
        "awac": {"lam": 0.1},
        "cql": {"conservative_weight": 0.1, "num_action_samples": 3},
        "iql": {"weight_temp": 10.0},
    }.get(name, {})
    rates = {"actor_learning_rate": 3e-3, "critic_learning_rate": 3e-3}
    learner = make(name, sizes=(32, 32), **rates, **options)
    for seed in range(300):
        learner.update(better(seed))
    observations = rng.standard_normal((500, 4)).astype(np.float32)
    actions = TorchPolicy(learner.policy()).act(observations).actions
    errors = (np.abs(actions - optimum(observations)) / [2, 5]).mean()
    middle = (np.abs([0, 5] - optimum(observations)) / [2, 5]).mean()
    assert errors < 0.6 * middle


@each
def test_dict_observations_and_logged_ranges(name, batch):
    space = Dict({"a": Box((2,)), "room": Discrete(3)})
    rng = np.random.default_rng(0)
    observations = {
        "a": rng.standard_normal((32, 2)).astype(np.float32),
        "room": rng.integers(0, 3, 32),
    }
    facts = DatasetStatistics(action_range=(np.array([-2.0, 1.0]), np.array([10.0, 1.0])))
    learner = make(name, space, Box((2,), "float32", -math.inf, math.inf), facts)
    given = batch("box", observations=observations, next_observations=observations)
    for _ in range(2):
        metrics = learner.update(given).metrics
    assert all(np.isfinite(float(value)) for value in metrics.values())
    assert learner.normalization["actions"]["source"] == ["dataset"] * 2
    assert np.isfinite(TorchPolicy(learner.policy()).act(observations).actions).all()


@each
def test_each_says_what_its_batches_hold(name):
    assert make(name, n_step=3).item.n_step == 3
    assert make(name).item.only_bootstrappable
    assert make(name, n_step=3).config["n_step"] == 3


@each
def test_other_actions_are_refused(name):
    with pytest.raises(SpaceUnsupportedError, match=f"{name}: found action space Discrete"):
        make(name, action=Discrete(3))


@each
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("actor_learning_rate", 0.0),
        ("critic_learning_rate", -1.0),
        ("tau", 0.0),
        ("tau", 1.5),
        ("num_critics", 0),
        ("n_step", 0),
    ],
)
def test_common_options_out_of_range_are_refused(name, option, value):
    with pytest.raises(ConfigInvalidError, match=f"{name}: {option}"):
        ALGORITHMS[name][1](**{option: value})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("td3", {"target_smoothing_sigma": -0.1}),
        ("td3", {"target_smoothing_clip": -0.1}),
        ("td3_plus_bc", {"update_actor_interval": 0}),
        ("td3_plus_bc", {"alpha": -1.0}),
        ("iql", {"expectile": 1.0}),
        ("iql", {"weight_temp": -1.0}),
        ("iql", {"max_weight": 0.0}),
        ("awac", {"lam": 0.0}),
        ("awac", {"temperature": -1.0}),
        ("awac", {"num_action_samples": 0}),
        ("sac", {"initial_temperature": 0.0}),
        ("cql", {"temperature_learning_rate": -1.0}),
        ("cql", {"alpha_learning_rate": -1.0}),
        ("cql", {"initial_alpha": 0.0}),
        ("cql", {"conservative_weight": -1.0}),
        ("cql", {"num_action_samples": 0}),
        ("cql", {"soft_q_backup": True, "max_q_backup": True}),
    ],
)
def test_own_options_out_of_range_are_refused(name, options):
    with pytest.raises(ConfigInvalidError, match=f"{name}: {next(iter(options))}"):
        ALGORITHMS[name][1](**options)


def test_td3s_actor_and_targets_wait(batch):
    learner = make("td3", update_actor_interval=3)
    start = learner.state_dict()

    def moved(prefix):
        state = learner.state_dict()
        return any((state[key] != start[key]).any() for key in start if key.startswith(prefix))

    for number in range(1, 4):
        learner.update(batch("box", seed=number))
        assert moved("state.networks.critics")
        assert moved("state.networks.policy") is moved("state.targets.critics") is (number == 3)


def test_a_temperature_of_rate_0_stays(batch):
    learner = run(make("sac", temperature_learning_rate=0.0, initial_temperature=0.5), batch, 3)
    state = learner.state_dict()
    (key,) = [key for key in state if key.startswith("state.networks.temperature")]
    assert state[key] == pytest.approx(math.log(0.5))
