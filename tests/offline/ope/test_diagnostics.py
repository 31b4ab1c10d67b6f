import numpy as np
import pytest

from replaylake.offline.ope.diagnostics import diagnose
from replaylake.offline.ope.logged import LoggedEpisodes, one_step


def test_weights_by_hand():
    """Weights 2, 1 | 3, 3 of whole episodes 1, 3; returns 5, 2."""
    episodes = LoggedEpisodes(
        np.array([0, 2, 4]),
        np.array([1.0, 4.0, 2.0, 0.0]),
        behavior_probs=np.array([0.25, 0.5, 0.25, 0.5]),
        target_probs=np.array([0.5, 0.25, 0.75, 0.5]),
    )
    found = diagnose(episodes)
    weights = found.weights
    assert (found.num_episodes, found.num_steps, found.horizon) == (2, 4, 2)
    assert (found.log_mean, found.log_std) == (3.5, pytest.approx(1.5 * np.sqrt(2)))
    assert weights.effective_sample_size == pytest.approx(16 / 10)
    assert (weights.worst_step, weights.worst_step_size) == (1, pytest.approx(16 / 10))
    assert (weights.max_weight, weights.max_weight_share) == (3, 0.75)
    assert (weights.mean_weight, weights.mean_weight_z) == (2, pytest.approx(1.0))
    assert weights.carrying == pytest.approx((5 + 6) ** 2 / (25 + 36))
    assert weights.matching == 1


def test_agreement_of_policies_by_hand():
    behavior = np.array([[0.5, 0.5, 0.0], [0.2, 0.8, 0.0]])
    target = np.array([[0.4, 0.2, 0.4], [0.2, 0.8, 0.0]])
    log = one_step(
        np.zeros(2),
        behavior_distribution=behavior,
        target_distribution=target,
        actions=np.ones(2, int),
    )
    found = diagnose(log)
    assert found.overlap == pytest.approx((0.4 + 0.2 + 1) / 2)
    assert found.unsupported_mass == pytest.approx(0.2)
    assert found.unsupported_share == 0.5
    # Without the behavior policy's, an action that was never logged has no support.
    found = diagnose(one_step(np.zeros(2), target_distribution=target, actions=np.ones(2, int)))
    assert found.overlap is None
    assert found.unsupported_mass == pytest.approx((0.8 + 0.2) / 2)


def test_unknown_and_zero_probabilities_are_counted_and_leave_no_weights():
    log = one_step(
        np.zeros(4), behavior_probs=np.array([0.5, np.nan, 0.0, 0.5]), target_probs=np.ones(4)
    )
    found = diagnose(log)
    assert (found.unknown_share, found.zero_share) == (0.25, 0.25)
    assert found.weights is None
    assert "2 of 4 steps have no behavior probability" in found.no_weights
    assert diagnose(one_step(np.zeros(4))).unknown_share == 1


def test_on_policy_weights_are_one_without_doubt():
    log = one_step(np.arange(5.0), behavior_probs=np.full(5, 0.3), target_probs=np.full(5, 0.3))
    weights = diagnose(log).weights
    assert (weights.mean_weight, weights.mean_weight_z) == (1, 0)
    assert weights.effective_sample_size == pytest.approx(5)


def test_few_rewards_carry_the_value():
    rewards = np.zeros(1000)
    rewards[:3] = 1
    log = one_step(rewards, behavior_probs=np.full(1000, 0.5), target_probs=np.full(1000, 0.5))
    assert diagnose(log).weights.carrying == pytest.approx(3)
