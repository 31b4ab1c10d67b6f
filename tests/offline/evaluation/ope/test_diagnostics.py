import numpy as np
import pytest

from replaylake.offline.evaluation.ope.diagnostics import diagnose
from replaylake.offline.evaluation.ope.estimate import estimate
from replaylake.offline.evaluation.ope.logged_episodes import LoggedEpisodes, one_step_episodes
from replaylake.offline.evaluation.ope.verdict import verdict


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
    # 5 / 4 is the mean of squares of weights of mean 1: that of log-normal ones of skewness
    # (5 / 4 + 2) sqrt(5 / 4 - 1), whose mean of two has 1 / sqrt(2) of it.
    assert weights.mean_skewness == pytest.approx(3.25 * 0.5 / np.sqrt(2))


@pytest.mark.parametrize("longest", [1, 2])
def test_skewness_of_weights_that_are_0_or_4(longest):
    """In one episode of four: (1 - 2 p) / sqrt(p (1 - p)), on one-step logs and on longer ones."""
    target = np.ones((8, longest))
    target[2:, -1] = 0
    log = LoggedEpisodes(
        np.arange(9) * longest,
        np.ones(8 * longest),
        behavior_probs=np.tile([1.0, 0.25][-longest:], 8),
        target_probs=target.ravel(),
    )
    found = diagnose(log).weights.mean_skewness
    assert found == pytest.approx(0.5 / np.sqrt(0.25 * 0.75) / np.sqrt(8))


def test_agreement_of_policies_by_hand():
    behavior = np.array([[0.5, 0.5, 0.0], [0.2, 0.8, 0.0]])
    target = np.array([[0.4, 0.2, 0.4], [0.2, 0.8, 0.0]])
    log = one_step_episodes(
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
    found = diagnose(
        one_step_episodes(np.zeros(2), target_distribution=target, actions=np.ones(2, int))
    )
    assert found.overlap is None
    assert found.unsupported_mass == pytest.approx((0.8 + 0.2) / 2)


def test_unknown_and_zero_probabilities_are_counted_and_leave_no_weights():
    log = one_step_episodes(
        np.zeros(4), behavior_probs=np.array([0.5, np.nan, 0.0, 0.5]), target_probs=np.ones(4)
    )
    found = diagnose(log)
    assert (found.unknown_share, found.zero_share) == (0.25, 0.25)
    assert found.weights is None
    assert "2 of 4 steps have no behavior probability" in found.no_weights
    assert diagnose(one_step_episodes(np.zeros(4))).unknown_share == 1


def test_weights_that_are_equal_have_no_skewness():
    probs = np.full(30, 0.1)
    log = one_step_episodes(np.ones(30), behavior_probs=probs, target_probs=probs * (1 + 1e-8))
    assert diagnose(log).weights.mean_skewness == 0
    never = one_step_episodes(np.ones(30), behavior_probs=probs, target_probs=0 * probs)
    assert diagnose(never).weights.mean_skewness == 0


def test_on_policy_weights_are_one_without_doubt():
    log = one_step_episodes(
        np.arange(5.0), behavior_probs=np.full(5, 0.3), target_probs=np.full(5, 0.3)
    )
    weights = diagnose(log).weights
    assert (weights.mean_weight, weights.mean_weight_z) == (1, 0)
    assert weights.effective_sample_size == pytest.approx(5)


def test_few_rewards_carry_the_value():
    rewards = np.zeros(1000)
    rewards[:3] = 1
    log = one_step_episodes(
        rewards, behavior_probs=np.full(1000, 0.5), target_probs=np.full(1000, 0.5)
    )
    assert diagnose(log).weights.carrying == pytest.approx(3)


# A policy of two states, which the log's own tells to other probabilities where it is wrong.
OWN = np.array([[0.6, 0.3, 0.1], [1 / 7, 2 / 7, 4 / 7]])


def float32_log(said, *, drawn=OWN, target=OWN, num=300, length=300):
    """Episodes of `drawn`, of about `length` steps, with the log-probs of `said` as float32."""
    rng = np.random.default_rng(3)
    offsets = np.append(0, rng.integers(length - 50, length + 50, num).cumsum())
    states = rng.integers(0, 2, offsets[-1])
    actions = (rng.random(len(states))[:, None] > drawn[states].cumsum(1)).sum(1).clip(0, 2)
    log_probs = np.log(said[states, actions]).astype(np.float32)
    return LoggedEpisodes(
        offsets,
        1.0 * (actions == states) + 0.5,
        behavior_probs=np.exp(log_probs.astype(np.float64)),
        target_probs=target[states, actions],
        actions=actions,
        target_distribution=target[states],
    )


@pytest.mark.parametrize("num", [100, 300])
def test_a_policy_on_its_own_log_of_hundreds_of_steps_is_supported(num):
    log = float32_log(OWN, num=num)
    found, diagnostics = estimate(log), diagnose(log)
    weights = diagnostics.weights
    # The rounding is no chance: every episode's weight is off by about as much.
    final = np.exp(log.sum_by_episode(np.log(log.target_probs / log.behavior_probs)))
    assert abs(final.mean() - 1) > 5 * final.std(ddof=1) / np.sqrt(num)
    assert abs(weights.mean_weight - 1) < weights.mean_rounding < 1e-4
    assert abs(weights.mean_weight_z) < 1
    for one in found.estimates:
        assert one.difference_low < 0 < one.difference_high
    judged = verdict(found, diagnostics)
    assert judged.verdict == "supported", judged.reason


def test_rounding_by_hand():
    """Steps of 1/2 and 1/4 under both: 2^-24 times 2 + 2 ln 2, then 2 + 2 ln 4 on top."""
    probs = np.array([0.5, 0.25, 0.5])
    log = LoggedEpisodes(np.array([0, 2, 3]), np.ones(3), behavior_probs=probs, target_probs=probs)
    episodes = np.array([4 + 2 * np.log(8), 2 + 2 * np.log(2)]) / 2**24
    assert diagnose(log).weights.mean_rounding == pytest.approx(episodes.mean())


def test_log_probs_that_are_off_by_a_thousandth_a_step_are_seen():
    for factor in (np.exp(1e-3), np.exp(-1e-3)):
        log = float32_log(OWN * factor)
        weights = diagnose(log).weights
        assert abs(weights.mean_weight - 1) > 0.2
        judged = verdict(estimate(log), diagnose(log))
        assert (judged.verdict, "mean importance weight" in judged.reason) == ("weak", True)


def test_log_probs_that_are_all_off_alike_are_seen():
    """Two actions of 1/2 each over episodes of one length: all weights are the same, and not 1."""
    half = np.full(300 * 200, 0.5)
    offsets = np.arange(0, len(half) + 1, 200)
    log = LoggedEpisodes(
        offsets, np.ones(len(half)), behavior_probs=half * np.exp(-1e-3), target_probs=half
    )
    weights = diagnose(log).weights
    assert weights.mean_weight == pytest.approx(np.exp(0.2))
    # Weights of e^0.2 with probability e^-0.2, else 0, have a variance of e^0.2 - 1.
    assert weights.mean_weight_z == pytest.approx(np.sqrt(300 * (np.exp(0.2) - 1)))


def test_a_greedy_policy_in_a_log_that_seldom_explores_is_no_error():
    """100 rows of 0.999 for what the policy always does: 0.1 of them should have explored."""
    log = one_step_episodes(
        np.ones(100), behavior_probs=np.full(100, 0.999), target_probs=np.ones(100)
    )
    weights = diagnose(log).weights
    assert weights.mean_weight == pytest.approx(1 / 0.999)
    assert weights.mean_weight_z == pytest.approx(np.sqrt(100 * (1 / 0.999 - 1)))


def sharpened(probs, temperature):
    powers = probs ** (1 / temperature)
    return powers / powers.sum(axis=1, keepdims=True)


def test_log_probs_of_another_temperature_or_policy_are_seen():
    for said in (sharpened(OWN, 1.1), sharpened(OWN, 0.9), OWN[::-1]):
        log = float32_log(said, length=100)
        judged = verdict(estimate(log), diagnose(log))
        assert judged.verdict != "supported", said
    # The log's actions are of another temperature than it says, and the policy says the same.
    log = float32_log(OWN, drawn=sharpened(OWN, 1.1), length=100)
    judged = verdict(estimate(log), diagnose(log))
    assert "propensities do not fit its actions" in judged.reason
