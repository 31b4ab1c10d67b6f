"""pass@k, means over tasks and paired differences, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from replaylake.offline.evaluation.task_sets.estimates import (
    estimate_difference,
    estimate_mean,
    pass_at_k,
)

Z2 = 1.959963985**2


def test_pass_at_k_by_hand():
    # 1 - C(n - c, k) / C(n, k).
    samples, passed = np.array([4, 4, 4, 3, 1]), np.array([0, 1, 4, 2, 1])
    assert pass_at_k(samples, passed, 1).tolist() == pytest.approx([0, 1 / 4, 1, 2 / 3, 1])
    two = pass_at_k(samples, passed, 2)
    # 1 - 3 / 6; 1 - 0 / 3.
    assert two[:4].tolist() == pytest.approx([0, 0.5, 1, 1])
    # A single sample tells nothing of two.
    assert math.isnan(two[4])


def test_pass_at_k_is_exact_for_many_samples():
    n, c, k = 1000, 3, 100
    exact = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert pass_at_k(np.array([n]), np.array([c]), k)[0] == pytest.approx(exact, abs=1e-12)


def test_pass_at_k_is_unbiased():
    rng = np.random.default_rng(0)
    passed = rng.binomial(8, 0.2, 200_000)
    mean = pass_at_k(np.full(200_000, 8), passed, 3).mean()
    # Its standard deviation is below 0.5: four standard errors.
    assert mean == pytest.approx(1 - 0.8**3, abs=4 * 0.5 / math.sqrt(200_000))


def test_of_tasks_that_pass_or_fail_it_is_wilsons_interval():
    # 8 of 20; 8 tasks carry it, so a share 1 / 17 of a spread that is the largest already.
    estimate = estimate_mean(np.repeat([1.0, 0.0], [8, 12]))
    center = (0.4 * 19 + Z2 / 2) / (19 + Z2)
    half = math.sqrt(Z2) * math.sqrt(19) / (19 + Z2) * math.sqrt(0.24 + Z2 / 76)
    assert estimate.value == pytest.approx(0.4)
    assert (estimate.low, estimate.high) == pytest.approx((center - half, center + half))
    assert estimate.num_carrying == pytest.approx(8)
    assert estimate.num_tasks == 20


def test_equal_tasks_leave_a_narrower_interval():
    # Rates of 0.4 and 0.6: variance 0.01 of at most 0.25. The failures are spread over
    # (20 * 0.5)^2 / (10 * 0.16 + 10 * 0.36) = 19.2 tasks.
    estimate = estimate_mean(np.repeat([0.4, 0.6], 10))
    doubt = 1 / (1 + (100 / 5.2 / 2) ** 2)
    effective = 19 / (0.04 + doubt * 0.96)
    half = math.sqrt(Z2 * effective) / (effective + Z2) * math.sqrt(0.25 + Z2 / (4 * effective))
    assert (estimate.low, estimate.high) == pytest.approx((0.5 - half, 0.5 + half))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_alike_says_no_more_than_the_number_of_tasks(value):
    estimate = estimate_mean(np.full(20, value))
    reach = Z2 / (19 + Z2)
    expected = (0.0, reach) if value == 0 else (1 - reach, 1.0)
    assert (estimate.low, estimate.high) == pytest.approx(expected)
    assert estimate.num_carrying == 0


def test_one_task_says_little():
    estimate = estimate_mean(np.array([1.0]))
    assert (estimate.low, estimate.high) == pytest.approx((1 / (1 + Z2), 1.0))


def test_rewards_are_scaled_to_their_range():
    plain = estimate_mean(np.repeat([0.25, 0.75], 6))
    scaled = estimate_mean(np.repeat([-1.0, 1.0], 6) * 5, low=-10.0, high=10.0)
    assert (scaled.value, scaled.low, scaled.high) == pytest.approx(
        (0.0, 20 * plain.low - 10, 20 * plain.high - 10)
    )


def test_a_paired_difference_by_hand():
    # 6 tasks better, 2 worse, 12 equal. Bonett & Price: 7 and 3 of 22.
    differences = np.repeat([1.0, -1.0, 0.0], [6, 2, 12])
    estimate = estimate_difference(differences, np.zeros(20))
    mean = 4 / 22
    half = math.sqrt(Z2) * math.sqrt(((7 + 3) / 22 - mean**2) / 22)
    assert estimate.value == pytest.approx(0.2)
    assert (estimate.low, estimate.high) == pytest.approx((mean - half, mean + half))
    assert estimate.num_carrying == pytest.approx(8)


def test_equal_policies_may_differ_where_they_were_not_asked():
    estimate = estimate_difference(np.full(30, 0.5), np.full(30, 0.5))
    half = math.sqrt(Z2 * 2 / 32 / 32)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.0, -half, half))
    assert estimate.num_carrying == 0


def test_swapping_the_policies_swaps_the_ends():
    rng = np.random.default_rng(1)
    ours, theirs = rng.random((2, 40))
    one, other = estimate_difference(ours, theirs), estimate_difference(theirs, ours)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))


def test_a_wider_level_is_a_wider_interval():
    values = np.linspace(0.1, 0.9, 15)
    narrow, wide = estimate_mean(values, 0.8), estimate_mean(values, 0.99)
    assert wide.low < narrow.low < narrow.high < wide.high
