from __future__ import annotations

import numpy as np
import pytest

from replaylake.datastore.lake.profile.column_statistics import (
    ColumnStatistics,
    EvenSample,
    Histogram,
    histogram,
)


def test_statistics_are_those_of_all_rows_however_they_are_cut() -> None:
    rng = np.random.default_rng(0)
    # Far from zero, where a difference of sums of squares would lose every digit.
    rows = np.stack([1e8 + rng.normal(size=5_000), rng.integers(0, 3, 5_000).astype(float)], axis=1)
    rows[::10, 0] = np.nan
    for size in (5_000, 617, 1):
        columns = ColumnStatistics(["a", "b"], np.array([-np.inf, 0.0]), np.array([np.inf, 1.0]))
        for start in range(0, 5_000, size):
            columns.add(rows[start : start + size])
        a, b = columns.dimensions()
        known = rows[~np.isnan(rows[:, 0]), 0]
        assert (a.num, b.num) == (4_500, 5_000)
        assert a.mean == pytest.approx(known.mean(), rel=1e-14)
        assert a.std == pytest.approx(known.std(), rel=1e-6)
        assert (a.minimum, a.maximum) == (known.min(), known.max())
        assert (a.low, a.high, a.num_outside) == (None, None, 0)
        assert (b.low, b.high) == (0.0, 1.0)
        assert b.num_outside == (rows[:, 1] == 2).sum()
        assert b.share_zero == pytest.approx((rows[:, 1] == 0).mean())


def test_columns_without_a_value_say_so() -> None:
    columns = ColumnStatistics(["a"], np.array([-np.inf]), np.array([np.inf]))
    columns.add(np.full((3, 1), np.nan))
    (a,) = columns.dimensions()
    assert a.num == 0
    assert np.isnan(a.mean)
    assert a.histogram is None


def test_the_sample_is_even_and_the_same_however_the_stream_is_cut() -> None:
    rows = np.arange(200_000.0)[:, None]
    samples = []
    for size in (200_000, 7_919):
        sample = EvenSample(1)
        for start in range(0, len(rows), size):
            sample.add(rows[start : start + size])
        samples.append(sample.rows()[:, 0])
    np.testing.assert_array_equal(samples[0], samples[1])
    assert len(samples[0]) == 50_000
    assert set(np.diff(samples[0])) == {4.0}


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
