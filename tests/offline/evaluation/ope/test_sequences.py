"""Off-policy evaluation over token sequences: weights by hand, and a model against itself."""

import math

import numpy as np
import pytest

from replaylake.offline.evaluation.ope.sequences import WeightedEpisodes, estimate_sequences


def weighted(weights, returns, tasks=None, tokens=1):
    num = len(weights)
    return WeightedEpisodes(
        np.log(np.array(weights, float)),
        np.full(num, tokens),
        np.array(returns, float),
        np.arange(num) if tasks is None else np.array(tasks),
    )


def test_the_estimate_by_hand():
    # 20 episodes each of weight 1/2, 1 and 3/2; returns 0, 1 and 2.
    weights, returns = np.repeat([0.5, 1.0, 1.5], 20), np.repeat([0.0, 1.0, 2.0], 20)
    one = estimate_sequences(weighted(weights, returns, tokens=10))
    # (20 + 60) / 60; (60)^2 / (20 * 3.5).
    assert one.value == pytest.approx(4 / 3)
    assert one.effective_size == pytest.approx(3600 / 70)
    assert one.difference == pytest.approx(1 / 3)
    assert (one.mean_weight, one.mean_weight_z) == pytest.approx((1.0, 0.0))
    assert one.max_weight_share == pytest.approx(1.5 / 60)
    assert one.kl == pytest.approx(-(math.log(0.5) + math.log(1.5)) / 3 / 10)
    # Influences w (r - 4/3): -2/3, -1/3 and 1; their squares have the mean 14 / 27.
    half = 2.000995 * math.sqrt(14 / 27 * 60 / 59 / 60)
    assert (one.low, one.high) == pytest.approx((4 / 3 - half, 4 / 3 + half), abs=1e-5)
    assert one.assessment.verdict == "weak"
    assert "an effective 51.4 of 60 episodes" in one.assessment.reason


def test_a_policy_on_its_own_log_is_the_log():
    returns = np.tile([0.0, 1.0, 1.0, 0.0], 40)
    one = estimate_sequences(weighted(np.ones(160), returns))
    assert (one.value, one.effective_size, one.kl) == pytest.approx((0.5, 160.0, 0.0))
    assert (one.difference_low, one.difference_high) == pytest.approx((0.0, 0.0))
    assert one.assessment.verdict == "supported"


def test_samples_of_one_task_are_not_independent():
    rng = np.random.default_rng(0)
    returns = np.repeat(rng.integers(0, 2, 40), 4)
    apart = estimate_sequences(weighted(np.ones(160), returns))
    together = estimate_sequences(weighted(np.ones(160), returns, np.repeat(np.arange(40), 4)))
    # All four samples of a task are alike: a quarter of the episodes.
    ratio = (together.high - together.low) / (apart.high - apart.low)
    assert ratio == pytest.approx(2.0, abs=0.1)
    assert (together.num_tasks, apart.num_tasks) == (40, 160)


def test_long_sequences_are_refused_with_the_reason():
    rng = np.random.default_rng(0)
    returns = rng.integers(0, 2, 500)
    short, long = (
        WeightedEpisodes(
            rng.normal(-0.005 * tokens, 0.1 * math.sqrt(tokens), 500),
            np.full(500, tokens),
            returns,
            np.arange(500),
        )
        for tokens in (20, 2000)
    )
    assert estimate_sequences(short).assessment.verdict == "supported"
    one = estimate_sequences(long)
    assert one.assessment.verdict == "not_supported"
    assert one.value is None
    assert one.low is None
    assert one.effective_size < 30
    assert "of 2,000.0 sampled tokens on average (30 needed)" in one.assessment.reason


def test_weights_whose_mean_is_not_one_are_told():
    rng = np.random.default_rng(0)
    one = estimate_sequences(weighted(rng.uniform(0.4, 0.8, 400), rng.integers(0, 2, 400)))
    assert one.assessment.verdict == "weak"
    assert "standard errors from 1" in one.assessment.reason


def test_all_reasons_are_told_a_wrong_mean_weight_first():
    rng = np.random.default_rng(0)
    weights, returns = rng.uniform(0.001, 0.004, 64), rng.integers(0, 2, 64)
    one = estimate_sequences(weighted(weights, returns, np.arange(64) % 16))
    reason = one.assessment.reason
    assert reason.startswith("The mean weight is 0.00")
    assert "of 64 episodes" in reason
    assert reason.endswith("16 tasks are few (30 needed).")
    one = estimate_sequences(weighted(np.ones(160), np.tile([0.0, 1.0], 80), np.zeros(160)))
    assert one.low is None
    assert one.assessment.reason.startswith("All episodes are of one task: an interval needs 2")


def test_weights_that_overflow_are_still_compared():
    one = estimate_sequences(
        WeightedEpisodes(
            np.full(200, 800.0), np.full(200, 5), np.tile([0.0, 1.0], 100), np.arange(200)
        )
    )
    assert one.value == pytest.approx(0.5)
    assert one.effective_size == pytest.approx(200)
    assert one.assessment.verdict == "weak"


def test_intervals_hold_the_truth():
    """Weights are log-normal with mean 1; the return is 1 with a probability that they raise."""
    rng, inside, trials = np.random.default_rng(3), 0, 400
    spread = 0.5
    # E[w r] with r ~ sigmoid(log w), by quadrature.
    grid = np.linspace(-8, 8, 4001)
    density = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi)
    logs = spread * grid - spread**2 / 2
    truth = float((density * np.exp(logs) / (1 + np.exp(-logs))).sum() * (grid[1] - grid[0]))
    for _ in range(trials):
        logs = rng.normal(-(spread**2) / 2, spread, 300)
        returns = (rng.random(300) < 1 / (1 + np.exp(-logs))).astype(float)
        one = estimate_sequences(WeightedEpisodes(logs, np.full(300, 8), returns, np.arange(300)))
        inside += one.low <= truth <= one.high
    assert 0.92 <= inside / trials <= 0.98
