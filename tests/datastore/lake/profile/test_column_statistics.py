from __future__ import annotations

import numpy as np
import pytest

from replaylake.datastore.lake.profile.column_statistics import (
    Histogram,
    NumberStatistics,
    histogram,
)


def test_statistics_are_those_of_all_rows_however_they_are_cut() -> None:
    rng = np.random.default_rng(0)
    # Far from zero, where a difference of sums of squares would lose every digit.
    rows = np.stack([1e8 + rng.normal(size=5_000), rng.integers(0, 3, 5_000).astype(float)], axis=1)
    rows[::10, 0] = np.nan
    low, high = np.array([-np.inf, 0.0]), np.array([np.inf, 1.0])
    for size in (5_000, 617, 1):
        parts = [
            NumberStatistics.from_rows(rows[start : start + size], low, high)
            for start in range(0, 5_000, size)
        ]
        a, b = NumberStatistics.merge(parts).dimensions(["a", "b"], low, high, rows)
        known = rows[~np.isnan(rows[:, 0]), 0]
        assert (a.num, b.num) == (4_500, 5_000)
        assert a.mean == pytest.approx(known.mean(), rel=1e-14)
        assert a.std == pytest.approx(known.std(), rel=1e-9)
        assert (a.minimum, a.maximum) == (known.min(), known.max())
        assert (a.low, a.high, a.num_outside) == (None, None, 0)
        assert (b.low, b.high) == (0.0, 1.0)
        assert b.num_outside == (rows[:, 1] == 2).sum()
        assert b.share_zero == pytest.approx((rows[:, 1] == 0).mean())
        assert b.histogram == histogram(rows[:, 1])


def test_columns_without_a_value_say_so() -> None:
    low, high = np.array([1.0]), np.array([np.inf])
    unknown = NumberStatistics.from_rows(np.full((3, 1), np.nan), low, high)
    (a,) = unknown.dimensions(["a"], low, high, np.full((3, 1), np.nan))
    assert a.num == a.num_outside == 0
    assert np.isnan(a.mean)
    assert a.histogram is None
    # Beside what has values it adds nothing.
    known = NumberStatistics.from_rows(np.array([[2.0], [4.0]]), low, high)
    for parts in ([unknown, known], [known, unknown]):
        (a,) = NumberStatistics.merge(parts).dimensions(["a"], low, high, np.zeros((0, 1)))
        assert (a.num, a.mean, a.std, a.minimum, a.maximum) == (2, 3.0, 1.0, 2.0, 4.0)


def test_what_is_infinite_has_no_spread_and_raises_nothing() -> None:
    low, high = np.array([-1.0]), np.array([1.0])
    part = NumberStatistics.from_rows(np.array([[np.inf], [0.0]]), low, high)
    (a,) = NumberStatistics.merge([part, part]).dimensions(["a"], low, high, np.zeros((0, 1)))
    assert (a.num, a.maximum, a.num_outside, a.share_zero) == (4, np.inf, 2, 0.5)
    assert np.isinf(a.mean)
    assert np.isnan(a.std)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 1, 1, 3], Histogram((-0.5, 0.5, 1.5, 2.5, 3.5), (1, 2, 0, 1))),
        ([2.5, 2.5], Histogram((2.5, float(np.nextafter(2.5, np.inf))), (2,))),
        ([7.0], Histogram((6.5, 7.5), (1,))),
        ([np.nan, np.inf], None),
        ([], None),
    ],
)
def test_histograms(values: list[float], expected: Histogram | None) -> None:
    assert histogram(np.asarray(values, np.float64)) == expected


def test_a_histogram_of_fractions_has_even_bins_and_loses_nothing() -> None:
    found = histogram(np.linspace(-1, 1, 1_001))
    assert found is not None
    assert len(found.counts) == 40
    assert sum(found.counts) == 1_001
    np.testing.assert_allclose(np.diff(found.edges), 0.05)
    # Nearly the whole range of a float: the width of a bin is still one.
    assert sum(histogram(np.array([-1.7e308, 0.1, 1.7e308])).counts) == 3  # type: ignore[union-attr]
