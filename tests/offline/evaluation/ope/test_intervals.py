import math

import numpy as np
import pytest

from replaylake.offline.evaluation.intervals import student_t_interval
from replaylake.offline.evaluation.ope import intervals
from replaylake.offline.evaluation.ope.statistic import Bounds, mean_of, ratio_of


def test_student_t_of_a_mean_is_student_s():
    # No value is far off, so that s is no less certain than that of normal values.
    values = np.random.default_rng(0).uniform(3, 5, 20)
    found = intervals.student_t(mean_of(values), 0.9)
    mean, low, high = student_t_interval(values, 0.9)
    # Influences are n / (n - 1) times the deviations: 5% wider with 20 values.
    assert (found.low + found.high) / 2 == pytest.approx(mean)
    assert found.high - found.low == pytest.approx((high - low) * 20 / 19)


def test_rare_values_leave_few_degrees_of_freedom():
    """One 1 in ten: kurtosis (1 - 3 p q) / (p q) = 8.11, 2 / (8.11 / 10 - 7 / 90) = 2.7."""
    values = np.append(np.zeros(9), 1.0)
    found = intervals.student_t(mean_of(values), 0.95)
    error = values.std(ddof=1) / np.sqrt(10) * 10 / 9
    # t with 2 degrees of freedom, from a table.
    assert found.high - 0.1 == pytest.approx(4.3027 * error, rel=1e-4)


def test_a_difference_takes_the_wider_end_of_two():
    values = np.append(np.zeros(60), np.ones(12))
    (found,) = intervals.all_intervals([mean_of(values)], 0.95, 0)
    ends = found["bootstrap"], found["student_t"]
    # Skewed to the right: resampling finds a higher upper end, Student's t is symmetric.
    assert found["bootstrap"].low > found["student_t"].low
    assert found["bootstrap"].high > found["student_t"].high
    assert (found["wider"].low, found["wider"].high) == (
        min(end.low for end in ends),
        max(end.high for end in ends),
    )


def test_empirical_bernstein_by_hand():
    values = np.array([0.0, 1.0, 1.0, 0.0] * 50)
    statistic = mean_of(values, bounds=Bounds(-10.0, 12.0, known=True))
    found = intervals.empirical_bernstein(statistic, 0.95)
    # Contributions are the values, 200 / 199 as far from their mean of 0.5.
    variance = 0.25 * 200 / 199 * (200 / 199) ** 2
    half = math.sqrt(2 * variance * math.log(80) / 200) + 7 * 22 * math.log(80) / (3 * 199)
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half))
    assert found.note == "an episode contributes -10 to 12 at most"


def test_empirical_bernstein_stays_in_bounds_and_says_whose_they_are():
    values = np.array([0.0, 1.0] * 5)
    found = intervals.empirical_bernstein(mean_of(values, bounds=Bounds(0.0, 1.0, False)), 0.95)
    assert (found.low, found.high) == (0, 1)
    assert "seen" in found.note
    unbounded = intervals.empirical_bernstein(mean_of(values), 0.95)
    assert unbounded.low < 0
    assert "seen" in unbounded.note


def test_bootstrap_of_many_even_values_is_near_student_t():
    values = np.random.default_rng(1).normal(5, 1, 3000)
    statistic = mean_of(values)
    (drawn,), student = (
        intervals.bootstrap([statistic], 0.95, 0),
        intervals.student_t(statistic, 0.95),
    )
    width = student.high - student.low
    assert abs(drawn.low - student.low) < 0.08 * width
    assert abs(drawn.high - student.high) < 0.08 * width


def test_bootstrap_leans_to_the_long_tail():
    values = np.random.default_rng(2).exponential(1, 60)
    statistic = mean_of(values)
    (drawn,) = intervals.bootstrap([statistic], 0.95, 0)
    assert drawn.high - statistic.value > 1.2 * (statistic.value - drawn.low)


def test_bootstrap_is_of_its_seed_and_of_no_other_statistic(assert_same_interval):
    rng = np.random.default_rng(3)
    one, other = mean_of(rng.normal(size=50)), ratio_of(rng.normal(size=50), rng.uniform(1, 2, 50))
    alone, beside = intervals.bootstrap([one], 0.9, 7), intervals.bootstrap([other, one], 0.9, 7)
    assert_same_interval(alone[0], beside[1])
    other_draws = intervals.bootstrap([one], 0.9, 8)[0]
    assert abs(other_draws.low - alone[0].low) > 1e-4 * (alone[0].high - alone[0].low)


def test_many_episodes_are_resampled_in_groups():
    values = np.random.default_rng(4).exponential(1, 45_000)
    statistic = mean_of(values)
    (drawn,), student = (
        intervals.bootstrap([statistic], 0.95, 0),
        intervals.student_t(statistic, 0.95),
    )
    width = student.high - student.low
    assert abs(drawn.low - student.low) < 0.08 * width
    assert abs(drawn.high - student.high) < 0.08 * width


def test_too_few_that_count_leave_no_limit():
    values = np.zeros(1000)
    values[:2] = 1
    (drawn,) = intervals.bootstrap([mean_of(values)], 0.95, 0)
    assert drawn.high == math.inf
    assert math.isfinite(drawn.low)


def test_values_that_do_not_vary_have_no_width():
    (drawn,) = intervals.bootstrap([mean_of(np.full(10, 2.0))], 0.95, 0)
    assert (drawn.low, drawn.high) == (2, 2)


@pytest.mark.parametrize(
    ("ends", "bounds", "expected"),
    [
        ((-0.1, 0.4), (0.0, 1.0), (0.0, 0.4)),
        ((0.2, 1.4), (0.0, 1.0), (0.2, 1.0)),
        ((0.2, 0.4), (0.0, np.inf), (0.2, 0.4)),
        ((-0.1, 0.4), (0.0, np.inf), (0.0, 0.4)),
        # Outside of what is possible, or at its end alone: nothing is known.
        ((1.2, 1.4), (0.0, 1.0), (0.0, 1.0)),
        ((-0.2, 0.0), (0.0, 1.0), (0.0, 1.0)),
        ((-0.4, -0.2), (0.0, np.inf), (-0.4, -0.2)),
        # Certain before.
        ((0.5, 0.5), (0.0, 1.0), (0.5, 0.5)),
    ],
)
def test_intervals_are_cut_off_at_what_is_possible(ends, bounds, expected):
    one = intervals.Interval("bootstrap", *ends, "")
    (found,) = intervals.clip_to_range({"bootstrap": one}, *bounds).values()
    assert (found.low, found.high) == expected
