import math

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, Text
from replaylake.datastore.errors import ConfigInvalidError, SpaceUnsupportedError
from replaylake.offline.algorithms.bc import BCConfig, bc
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.learner import GradientLearner
from replaylake.offline.networks.graph import TorchPolicy, run_graph

SMALL = {"hidden_sizes": (32,), "learning_rate": 1e-2}


def learned(algorithm, batches, updates=300):
    learner = GradientLearner(algorithm, seed=0)
    for seed in range(updates):
        update = learner.update(batches(seed))
    return learner, update


def test_discrete_cloning_learns_a_rule(batch):
    def rule(observations):
        return (observations[:, 0] > 0).astype(np.int64) + 5

    def batches(seed):
        made = batch(seed=seed, size=64)
        return batch(seed=seed, size=64, actions=rule(made.observations))

    learner, _ = learned(bc(Box((4,)), Discrete(2, 5), BCConfig(**SMALL)), batches)
    observations = batch(seed=10_000, size=500).observations
    actions = TorchPolicy(learner.policy()).act(observations).actions
    assert (actions == rule(observations)).mean() > 0.95


def test_the_first_loss_of_equal_logits_is_ln_of_the_number_of_actions(batch):
    learner = GradientLearner(bc(Box((4,)), Discrete(3), BCConfig()), seed=0)
    loss = float(learner.update(batch(size=512)).metrics["policy_loss"])
    assert loss == pytest.approx(math.log(3), abs=0.05)


def test_masked_actions_are_never_learned_nor_weighed(batch):
    # Action 2 is logged only where 0 is forbidden; where it is allowed, 0 is taken.
    def batches(seed):
        made = batch(seed=seed, size=64)
        forbidden = made.observations[:, 1] > 0
        mask = np.ones((64, 3), bool)
        mask[:, 0] = ~forbidden
        actions = np.where(forbidden, 2, 0)
        return batch(seed=seed, size=64, actions=actions, action_masks=mask)

    learner, update = learned(bc(Box((4,)), Discrete(3), BCConfig(**SMALL)), batches)
    assert float(update.metrics["policy_loss"]) < 0.05
    made = batches(123)
    act = TorchPolicy(learner.policy()).act(made.observations, action_mask=made.action_masks)
    np.testing.assert_array_equal(act.actions, made.actions)


def test_weights_of_the_sampler_count(batch):
    algorithm = bc(Box((4,)), Discrete(3), BCConfig())
    plain = GradientLearner(algorithm, seed=0).update(batch(size=8)).metrics["policy_loss"]
    doubled = GradientLearner(algorithm, seed=0).update(
        batch(size=8, weights=np.full(8, 2.0, np.float32))
    )
    assert float(doubled.metrics["policy_loss"]) == pytest.approx(2 * float(plain), rel=1e-6)


def linear_actions(observations, noise):
    """Actions in [-2, 10]-ish: 4 + 2 * o_0, and a constant 1, with noise on the first."""
    first = 4 + 2 * np.clip(observations[:, 0], -2, 2) + noise
    return np.stack([first, np.ones(len(first))], axis=1).astype(np.float32)


@pytest.mark.parametrize("head", ["gaussian", "deterministic"])
@pytest.mark.parametrize("bounded", [True, False])
def test_continuous_cloning_learns_means_in_the_environments_units(batch, head, bounded):
    low, high = (-2.0, 10.0) if bounded else (-math.inf, math.inf)
    logged = None if bounded else (np.array([-2.0, 1.0]), np.array([10.0, 1.0]))
    rng = np.random.default_rng(0)

    def batches(seed):
        observations = batch(seed=seed, size=128).observations
        noise = rng.normal(0, 0.5, 128)
        return batch(seed=seed, size=128, actions=linear_actions(observations, noise))

    space = Box((2,), "float32", low, high)
    algorithm = bc(Box((4,)), space, BCConfig(head=head, **SMALL), DatasetStatistics(logged))
    learner, _ = learned(algorithm, batches, updates=500)
    observations = batch(seed=9_999, size=500).observations
    actions = TorchPolicy(learner.policy()).act(observations).actions
    errors = np.abs(actions - linear_actions(observations, np.zeros(500))).mean(axis=0)
    assert errors[0] < 0.25
    assert errors[1] < 0.1
    assert learner.policy().spec.head == head
    assert learner.normalization["actions"]["source"] == ["space" if bounded else "dataset"] * 2


def test_the_gaussian_learns_the_spread_in_the_environments_units(batch):
    rng = np.random.default_rng(1)

    def batches(seed):
        actions = rng.normal(3.0, 0.5, (128, 1)).astype(np.float32)
        return batch(seed=seed, size=128, actions=actions)

    algorithm = bc(Box((4,)), Box((1,), "float32", -7, 13), BCConfig(**SMALL))
    learner, _ = learned(algorithm, batches, updates=500)
    observations = batch(size=100).observations
    outputs = run_graph(learner.policy(), {"observations": observations})
    assert np.exp(outputs["log_stds"]).mean() == pytest.approx(0.5, rel=0.15)
    assert outputs["means"].mean() == pytest.approx(3.0, abs=0.15)


def test_cloning_needs_no_next_observation():
    assert not bc(Box((4,)), Discrete(2), BCConfig()).needs_bootstrap


def test_dict_observations_are_cloned(batch):
    space = Dict({"a": Box((2,)), "room": Discrete(3)})

    def batches(seed):
        rng = np.random.default_rng(seed)
        rooms = rng.integers(0, 3, 64)
        observations = {"a": rng.standard_normal((64, 2)).astype(np.float32), "room": rooms}
        return batch(
            seed=seed,
            size=64,
            observations=observations,
            next_observations=observations,
            actions=rooms,
        )

    learner, _ = learned(bc(space, Discrete(3), BCConfig(**SMALL)), batches)
    made = batches(777)
    actions = TorchPolicy(learner.policy()).act(made.observations).actions
    assert (actions == made.actions).mean() > 0.95


def test_other_actions_are_refused():
    with pytest.raises(
        SpaceUnsupportedError, match="found action space Text, expected Discrete, Multi"
    ):
        bc(Box((4,)), Text(), BCConfig())


@pytest.mark.parametrize("options", [{"learning_rate": 0.0}, {"hidden_sizes": (0,)}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigInvalidError, match=next(iter(options))):
        BCConfig(**options)
