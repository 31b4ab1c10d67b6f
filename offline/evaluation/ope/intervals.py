"""Intervals around a statistic of episodes: bootstrap, Student t, empirical Bernstein.

All take episodes to be drawn independently. The defaults were chosen by measured coverage
(benchmarks/ope_coverage.py). Of percentile, BCa and studentized bootstraps the last kept closest to
its level on skewed weights (click rates of 3% over 500 rows: 89.7%, 91.4% and 93.9% at a nominal
95%, 1,500 repeats). For differences see decision 85.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.offline.evaluation.intervals import student_t_quantile
from replaylake.offline.evaluation.ope.statistic import Bounds, Statistic

METHODS: Final = ("bootstrap", "student_t", "wider", "empirical_bernstein")
# By default, where the episodes allow a bootstrap.
OF_VALUES: Final = "bootstrap"
OF_DIFFERENCES: Final = "wider"
NUM_REPLICATES: Final = 2000
# Resampling 10,000 groups of n / 10,000 episodes gives the spread of resampling n episodes, to the
# sqrt(2 / 10,000) = 1.4% to which any 10,000 values know their own variance.
_MAX_GROUPS: Final = 10_000
# Draws held at once: 2 MB of counts stay in the cache, a quarter faster than 16 MB of them.
_DRAWS: Final = 250_000


@dataclass(frozen=True)
class Interval:
    """low .. high of one method; `note` says what its promise rests on."""

    method: str
    low: float
    high: float
    note: str


def student_t(statistic: Statistic, level: float) -> Interval:
    """Value -+ t * s / sqrt(E), s the standard deviation of the influences.

    For a mean this is Student 1908; for ratios the delta method (jackknife) in its place. Skewed
    weights and rare rewards make s less certain than E normal values would: t has as many degrees
    of freedom as normal values whose s varies as much.
    """
    half = _standard_error(statistic.influence)
    half *= student_t_quantile((1 + level) / 2, _degrees_of_freedom(statistic.influence))
    note = "needs enough episodes that the estimate is normally distributed"
    return Interval("student_t", statistic.value - half, statistic.value + half, note)


def empirical_bernstein(statistic: Statistic, level: float) -> Interval:
    """Value -+ (sqrt(2 V ln(4 / d) / n) + 7 R ln(4 / d) / (3 (n - 1))), d = 1 - level.

    V is the variance and R the range of the n contributions; both sides at d / 2 each. Holds at any
    n where R is known beforehand, and is wide. Source: Maurer & Pontil 2009, theorem 4.
    """
    contributions = statistic.value + statistic.influence
    limits = Bounds(float(contributions.min()), float(contributions.max()), known=False)
    bounds = statistic.bounds or limits
    low, high = bounds.low, bounds.high
    basis = "at most" if bounds.known else "by the largest weights and rewards seen"
    note = f"an episode contributes {low:.4g} to {high:.4g} {basis}"
    log, num = math.log(4 / (1 - level)), len(contributions)
    half = math.sqrt(2 * float(contributions.var(ddof=1)) * log / num)
    half += 7 * (high - low) * log / (3 * (num - 1))
    ends = statistic.value - half, statistic.value + half
    if statistic.bounds is not None:
        # The mean of what stays in bounds stays there too.
        ends = min(max(ends[0], low), statistic.value), max(min(ends[1], high), statistic.value)
    return Interval("empirical_bernstein", *ends, note)


def bootstrap(
    statistics: Sequence[Statistic], level: float, seed: int, replicates: int = NUM_REPLICATES
) -> list[Interval]:
    """Studentized bootstrap over episodes, the same draws for all statistics.

    Each replicate draws E episodes with replacement and asks how many of its own standard errors
    its mean influence is off; those quantiles replace Student's. Where too few episodes carry a
    statistic, replicates without any leave no finite limit, and low or high is infinite. Above
    10,000 episodes, random groups of them are drawn instead. Cost: 2,000 x min(E, 10,000) draws,
    about 0.5 s. Source: Efron & Tibshirani 1993, "An Introduction to the Bootstrap", section 12.5.
    """
    groups = _groups([statistic.influence for statistic in statistics], seed)
    moments = np.concatenate([groups, groups**2], axis=1)
    resamples = _resampled_means(moments, np.random.default_rng(seed), replicates)
    means, squares = resamples[:, : len(statistics)], resamples[:, len(statistics) :]
    # A replicate of equal values has variance 0 but for rounding.
    variances = np.maximum(squares - means**2, 0)
    variances[variances < 1e-12 * squares] = 0
    intervals = []
    for k, statistic in enumerate(statistics):
        scores = _studentize(means[:, k], np.sqrt(variances[:, k] / len(groups)))
        low, high = np.quantile(scores, [(1 - level) / 2, (1 + level) / 2], method="nearest")
        error = _standard_error(groups[:, k])
        intervals.append(_from_scores(statistic.value, error, float(low), float(high)))
    return intervals


def all_intervals(
    statistics: Sequence[Statistic], level: float, seed: int
) -> list[dict[str, Interval]]:
    """Return every method's interval of each statistic, by method."""
    found = []
    for statistic, resampled in zip(statistics, bootstrap(statistics, level, seed), strict=True):
        normal = student_t(statistic, level)
        either = _wider(resampled, normal), empirical_bernstein(statistic, level)
        found.append({one.method: one for one in (resampled, normal, *either)})
    return found


def _wider(first: Interval, second: Interval) -> Interval:
    """Return the lower of two lower ends and the higher of two higher ends.

    Student's t is too narrow on the side to which an estimate is skewed, the studentized bootstrap
    where few episodes have a reward.
    """
    low, high = min(first.low, second.low), max(first.high, second.high)
    return Interval("wider", low, high, f"the wider of {first.method} and {second.method}")


def widen_to_rounding(
    intervals: Mapping[str, Interval], statistic: Statistic, level: float
) -> dict[str, Interval]:
    """Return intervals as if no standard error were smaller than the statistic's rounding.

    Where a policy is evaluated on its own log the resampled differences are nothing but rounding,
    the same in each: an interval of them would find a difference.
    """
    num = len(statistic.influence)
    half = statistic.rounding * student_t_quantile((1 + level) / 2, num - 1)
    low, high = statistic.value - half, statistic.value + half
    return {
        method: replace(one, low=min(one.low, low), high=max(one.high, high))
        for method, one in intervals.items()
    }


def clip_to_range(
    intervals: Mapping[str, Interval], low: float, high: float
) -> dict[str, Interval]:
    """Return intervals cut off at the ends of low .. high, between which the truth lies.

    One that lies outside, or touches an end alone, tells nothing of the truth: it becomes
    low .. high, and stays as it is if that is not finite.
    """
    clipped = {}
    for method, one in intervals.items():
        ends = max(one.low, low), min(one.high, high)
        if ends[0] > ends[1] or (ends[0] == ends[1] and one.low < one.high):
            ends = (low, high) if math.isfinite(high - low) else (one.low, one.high)
        clipped[method] = replace(one, low=ends[0], high=ends[1])
    return clipped


def _standard_error(influence: Array) -> float:
    return float(influence.std(ddof=1)) / math.sqrt(len(influence))


def _degrees_of_freedom(values: Array) -> int:
    """Return 2 / (k / n - (n - 3) / (n (n - 1))), k the kurtosis of values [n]; n - 1 at most.

    The variance of s^2 is that share of s^4, times two of a chi-square's with so many degrees of
    freedom. Source: Satterthwaite 1946, "An Approximate Distribution of Estimates of Variance
    Components", with Cramer 1946, eq. 27.4.2, for the variance of s^2.
    """
    num, squares = len(values), np.square(values - values.mean())
    variance = float(squares.mean())
    if num < 4 or variance == 0:
        return num - 1
    kurtosis = float(np.square(squares / variance).mean())
    share = kurtosis / num - (num - 3) / (num * (num - 1))
    return num - 1 if share <= 2 / (num - 1) else max(int(2 / share), 1)


def _groups(influences: Sequence[Array], seed: int) -> Array:
    """Return centered influences [G, K], averaged within random groups where there are many."""
    num = len(influences[0])
    if num <= _MAX_GROUPS:
        return np.stack([influence - influence.mean() for influence in influences], axis=1)
    groups = np.random.default_rng([seed, num]).permutation(num) % _MAX_GROUPS
    # One after another: all centered influences together take as much memory as the episodes.
    sums = [
        np.bincount(groups, influence - influence.mean(), _MAX_GROUPS) for influence in influences
    ]
    means: Array = np.stack(sums, axis=1) * (_MAX_GROUPS / num)
    return means


def _resampled_means(columns: Array, rng: np.random.Generator, replicates: int) -> Array:
    """Return the column means [replicates, K] of as many rows as there are, with replacement."""
    num = len(columns)
    at_once = max(_DRAWS // num, 1)
    means = np.empty((replicates, columns.shape[1]))
    for start in range(0, replicates, at_once):
        size = min(at_once, replicates - start)
        rows = rng.integers(0, num, (size, num))
        rows += np.arange(size)[:, None] * num
        counts = np.bincount(rows.ravel(), minlength=size * num).reshape(size, num)
        means[start : start + size] = counts.astype(np.float64) @ columns / num
    return means


def _studentize(means: Array, errors: Array) -> Array:
    """Return means / errors; infinite with the mean's sign where errors are 0, 0 where both."""
    scores = np.where(means == 0, 0.0, np.copysign(np.inf, means))
    np.divide(means, errors, out=scores, where=errors > 0)
    return scores


def _from_scores(value: float, error: float, low: float, high: float) -> Interval:
    note = "needs enough episodes that resampling them shows how the estimate varies"
    if error == 0:
        return Interval("bootstrap", value, value, note)
    return Interval("bootstrap", value - high * error, value - low * error, note)
