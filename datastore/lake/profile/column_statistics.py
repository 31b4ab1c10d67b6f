"""Column statistics: of numbers, exact and mergeable, and the histograms of samples of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array

NUM_BINS: Final = 40


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


@dataclass(frozen=True)
class NumberStatistics:
    """Of W numbers a row, over some rows. NaN counts as absent.

    num, num_zero, num_outside: int64 [W]: values, those that are 0, those beyond the space's
    bounds. least, greatest, mean, squares: float64 [W]; squares is the sum of (x - mean)^2. Where
    num is 0, mean and squares are 0, the others infinite.
    """

    num: Array
    num_zero: Array
    num_outside: Array
    least: Array
    greatest: Array
    mean: Array
    squares: Array

    @classmethod
    def from_rows(cls, rows: Array, low: Array, high: Array) -> NumberStatistics:
        """Count rows float64 [n, W]; low and high [W], infinite where a number has no bound."""
        known = ~np.isnan(rows)
        num = known.sum(axis=0)
        is_whole = len(rows) and bool(num.min(initial=len(rows)) == len(rows))
        filled = rows if is_whole else np.where(known, rows, 0.0)
        # Sums of squares would lose what is far from zero.
        with np.errstate(invalid="ignore", over="ignore"):
            mean = filled.sum(axis=0) / np.maximum(num, 1)
            deviations = filled - mean
            if not is_whole:
                deviations[~known] = 0.0
            squares = np.einsum("ij,ij->j", deviations, deviations)
        return cls(
            num=num,
            num_zero=(filled == 0).sum(axis=0) - (len(rows) - num),
            num_outside=((rows < low) | (rows > high)).sum(axis=0),
            least=np.fmin.reduce(rows, axis=0, initial=np.inf),
            greatest=np.fmax.reduce(rows, axis=0, initial=-np.inf),
            mean=mean,
            squares=squares,
        )

    @classmethod
    def merge(cls, parts: Sequence[NumberStatistics]) -> NumberStatistics:
        """Return those of all rows of some parts, one at least (Chan, Golub and LeVeque 1979)."""
        stacked = cls(*(np.stack([getattr(p, f.name) for p in parts]) for f in fields(cls)))
        return stacked.merge_first_axis()

    def merge_first_axis(self) -> NumberStatistics:
        """Return the merge of statistics whose arrays are [parts, W]."""
        num = self.num.sum(axis=0)
        with np.errstate(invalid="ignore", over="ignore"):
            mean = (self.num * self.mean).sum(axis=0) / np.maximum(num, 1)
            # Once more from there: a sum of large means is rounded.
            deviations = np.where(self.num > 0, self.mean - mean, 0.0)
            rounding = (self.num * deviations).sum(axis=0) / np.maximum(num, 1)
            mean = np.where(np.isfinite(rounding), mean + rounding, mean)
            deviations = np.where(self.num > 0, self.mean - mean, 0.0)
            squares = (self.squares + self.num * deviations**2).sum(axis=0)
        return NumberStatistics(
            num=num,
            num_zero=self.num_zero.sum(axis=0),
            num_outside=self.num_outside.sum(axis=0),
            least=self.least.min(axis=0),
            greatest=self.greatest.max(axis=0),
            mean=mean,
            squares=squares,
        )

    def select(self, columns: slice) -> NumberStatistics:
        """Return those of some of the numbers."""
        return NumberStatistics(*(getattr(self, f.name)[columns] for f in fields(self)))

    def dimensions(
        self, names: Sequence[str], low: Array, high: Array, sample: Array
    ) -> tuple[Dimension, ...]:
        """Return each number's; `sample`, float64 [m, W], is what histograms are of."""
        return tuple(
            self._dimension(i, name, float(low[i]), float(high[i]), sample[:, i])
            for i, name in enumerate(names)
        )

    def _dimension(self, i: int, name: str, low: float, high: float, sample: Array) -> Dimension:
        num = int(self.num[i])
        if not num:
            nan = float("nan")
            return Dimension(name, 0, nan, nan, nan, nan, nan)
        return Dimension(
            name=name,
            num=num,
            minimum=float(self.least[i]),
            maximum=float(self.greatest[i]),
            mean=float(self.mean[i]),
            std=float(np.sqrt(self.squares[i] / num)),
            share_zero=float(self.num_zero[i] / num),
            low=low if np.isfinite(low) else None,
            high=high if np.isfinite(high) else None,
            num_outside=int(self.num_outside[i]),
            histogram=histogram(sample),
        )


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
