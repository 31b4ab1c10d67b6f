"""Column statistics: exact, of a stream of rows, and an even sample of them for pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array

NUM_BINS: Final = 40
_SAMPLE_ROWS: Final = 50_000


@dataclass(frozen=True)
class Histogram:
    """`counts` of the values between neighboring `edges`, of which there is one more."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Dimension:
    """One number of an observation, action or reward, over all rows.

    low, high: its bounds in the space; None where there are none. num_outside: values beyond them.
    share_zero: of all values. histogram: of the sample.
    """

    name: str
    num: int
    minimum: float
    maximum: float
    mean: float
    std: float
    share_zero: float
    low: float | None = None
    high: float | None = None
    num_outside: int = 0
    histogram: Histogram | None = None


class ColumnStatistics:
    """Statistics of D numbers a row, block by block.

    names [D]; low and high [D], infinite where a number has no bound. NaN counts as absent.
    """

    def __init__(self, names: list[str], low: Array, high: Array) -> None:
        self._names, self._low, self._high = names, low, high
        width = len(names)
        self._num = np.zeros(width, np.int64)
        self._zero = np.zeros(width, np.int64)
        self._outside = np.zeros(width, np.int64)
        self._minimum, self._maximum = np.full(width, np.inf), np.full(width, -np.inf)
        self._mean, self._squares = np.zeros(width), np.zeros(width)
        self.sample = EvenSample(width)

    def add(self, rows: Array) -> None:
        """Count rows [n, D] of numbers."""
        if not len(rows):
            return
        known = ~np.isnan(rows)
        num = known.sum(axis=0)
        filled = np.where(known, rows, 0.0)
        self._zero += (filled == 0).sum(axis=0) - (len(rows) - num)
        self._outside += ((filled < self._low) | (filled > self._high)).sum(axis=0)
        self._minimum = np.minimum(self._minimum, np.where(known, rows, np.inf).min(axis=0))
        self._maximum = np.maximum(self._maximum, np.where(known, rows, -np.inf).max(axis=0))
        self._join_moments(filled, known, num)
        self.sample.add(rows)

    def dimensions(self) -> tuple[Dimension, ...]:
        """Return what was counted."""
        rows = self.sample.rows()
        return tuple(self._dimension(i, rows[:, i]) for i in range(len(self._names)))

    def _join_moments(self, filled: Array, known: Array, num: Array) -> None:
        # Chan, Golub and LeVeque (1979): sums of squares would lose what is far from zero.
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            mean = np.where(num > 0, filled.sum(axis=0) / num, 0.0)
            squares = (np.where(known, filled - mean, 0.0) ** 2).sum(axis=0)
            total = self._num + num
            delta = mean - self._mean
            share = np.where(total > 0, num / total, 0.0)
            self._squares += squares + delta**2 * self._num * share
        self._mean += delta * share
        self._num = total

    def _dimension(self, i: int, sample: Array) -> Dimension:
        num = int(self._num[i])
        if not num:
            nan = float("nan")
            return Dimension(self._names[i], 0, nan, nan, nan, nan, nan)
        low, high = float(self._low[i]), float(self._high[i])
        return Dimension(
            name=self._names[i],
            num=num,
            minimum=float(self._minimum[i]),
            maximum=float(self._maximum[i]),
            mean=float(self._mean[i]),
            std=float(np.sqrt(self._squares[i] / num)),
            share_zero=float(self._zero[i] / num),
            low=low if np.isfinite(low) else None,
            high=high if np.isfinite(high) else None,
            num_outside=int(self._outside[i]),
            histogram=histogram(sample),
        )


class EvenSample:
    """Every k-th row of a stream, k doubling as the stream grows: the same for the same stream."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._stride = 1
        self._num_seen = 0
        self._parts: list[Array] = []
        self._num_held = 0

    def add(self, rows: Array) -> None:
        """Offer rows [n, D]."""
        start = -self._num_seen % self._stride
        self._num_seen += len(rows)
        sample = np.array(rows[start :: self._stride], np.float64)
        self._parts.append(sample)
        self._num_held += len(sample)
        while self._num_held > _SAMPLE_ROWS:
            halved = self.rows()[::2].copy()
            self._parts, self._num_held = [halved], len(halved)
            self._stride *= 2

    def rows(self) -> Array:
        """Return the sample, float64 [m, D] in the order of the stream."""
        return np.concatenate(self._parts) if self._parts else np.zeros((0, self._width))


def histogram(values: Array, num_bins: int = NUM_BINS) -> Histogram | None:
    """Return the histogram of the finite values; one bin a value where those are few integers."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    lowest, greatest = float(finite.min()), float(finite.max())
    is_whole = bool((finite == np.round(finite)).all())
    if is_whole and greatest - lowest < num_bins:
        edges = np.arange(lowest, greatest + 2) - 0.5
    elif lowest == greatest or not np.isfinite((greatest - lowest) / num_bins):
        edges = np.array([lowest, np.nextafter(greatest, np.inf)])
    else:
        edges = np.linspace(lowest, greatest, num_bins + 1)
    counts, _ = np.histogram(finite, edges)
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()))
