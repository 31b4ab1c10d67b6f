import numpy as np
import pytest

from replaylake.offline.evaluation.intervals import student_t_interval, student_t_quantile


@pytest.mark.parametrize(
    ("probability", "degrees", "quantile"),
    [
        # Printed tables of Student's t.
        (0.975, 1, 12.706205),
        (0.95, 2, 2.919986),
        (0.975, 4, 2.776445),
        (0.975, 19, 2.093024),
        (0.995, 100, 2.625891),
        (0.975, 1000, 1.962339),
    ],
)
def test_quantiles_are_those_of_the_tables(probability, degrees, quantile):
    assert student_t_quantile(probability, degrees) == pytest.approx(quantile, abs=1e-5)


def test_an_interval_by_hand():
    # Mean 3, s^2 = 10 / 4, standard error sqrt(2.5 / 5) = 0.7071, t(0.975, 4) = 2.776445.
    mean, low, high = student_t_interval([1, 2, 3, 4, 5])
    assert (mean, low, high) == (
        3.0,
        pytest.approx(3 - 1.963243, abs=1e-5),
        pytest.approx(3 + 1.963243, abs=1e-5),
    )


def test_one_value_has_no_interval():
    assert student_t_interval([7.0]) == (7.0, None, None)


def test_equal_values_have_an_interval_of_no_width():
    assert student_t_interval([2.0, 2.0, 2.0]) == (2.0, 2.0, 2.0)


def test_it_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(500):
        _, low, high = student_t_interval(rng.normal(1.0, 3.0, 8).tolist())
        covered += low <= 1.0 <= high
    assert 0.93 <= covered / 500 <= 0.97
