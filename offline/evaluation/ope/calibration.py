"""Are a log's propensities the probabilities that its actions were drawn with?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.offline.evaluation.ope.logged_episodes import LoggedEpisodes
from replaylake.offline.evaluation.ope.weights import rounding_of

# Finer where probabilities of many actions crowd.
_EDGES: Final = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
# The normal and chi-square approximations need about this many; Cochran 1954.
_MIN_COUNT: Final = 5
# Sums of 1 / p are skewed where p is small: fewer occurrences tell nothing of their spread.
_MIN_INVERSE_COUNT: Final = 20


@dataclass(frozen=True)
class Bin:
    """(row, action) pairs with probability in [low, high): its mean, and the share logged."""

    low: float
    high: float
    predicted: float
    observed: float
    count: int


@dataclass(frozen=True)
class Calibration:
    """How logged actions agree with their propensities.

    p_value: of seeing action counts as far off as these, were the propensities right. worst_action
    is the one furthest off, logged `observed` times where `expected` was right. inverse_mean is the
    mean of 1 / p, whose expectation is the number of possible actions, inverse_expected; inverse_z
    their distance in standard errors. Without whole distributions it is not known where an action
    is possible, so that inverse_expected is the most it can be, and inverse_z at least 0. bins and
    error (the mean distance between predicted and observed over all pairs) need whole
    distributions: () and None without.
    """

    p_value: float
    worst_action: int
    observed: float
    expected: float
    inverse_mean: float
    inverse_expected: float
    inverse_z: float
    bins: tuple[Bin, ...] = ()
    error: float | None = None


def calibration(episodes: LoggedEpisodes) -> Calibration | None:
    """Check a log's propensities against its actions; None without actions or with unknown ones.

    Cost: a pass over [M, A], and A^3 for the chi-square of A actions.
    """
    probs, actions = episodes.behavior_probs, episodes.actions
    if actions is None or probs is None or not (probs > 0).all():
        return None
    distribution = episodes.behavior_distribution
    if distribution is None:
        worst = _by_inverse_probability(probs, actions)
        support = np.full(len(actions), float(len(np.unique(actions))))
        bins: tuple[Bin, ...] = ()
    else:
        worst = _by_count(distribution, actions)
        support = (distribution > 0).sum(axis=1).astype(np.float64)
        bins = reliability(distribution, actions)
    rounding = float((rounding_of(probs) / probs).mean())
    inverse_z = _z(1 / probs - support, rounding)
    if distribution is None:
        inverse_z = max(inverse_z, 0.0)
    return Calibration(
        *worst,
        inverse_mean=float((1 / probs).mean()),
        inverse_expected=float(support.mean()),
        inverse_z=inverse_z,
        bins=bins,
        error=calibration_error(bins) if bins else None,
    )


def reliability(distribution: Array, actions: Array) -> tuple[Bin, ...]:
    """Compare probabilities [M, A] with how often such actions were logged, by size.

    Empty bins are left out. Source: DeGroot & Fienberg 1983, "The Comparison and Evaluation of
    Forecasters".
    """
    places = np.clip(np.searchsorted(_EDGES, distribution, side="right") - 1, 0, len(_EDGES) - 2)
    num = len(_EDGES) - 1
    counts = np.bincount(places.ravel(), minlength=num)
    sums = np.bincount(places.ravel(), distribution.ravel(), num)
    logged = np.bincount(places[np.arange(len(actions)), actions], minlength=num)
    return tuple(
        Bin(_EDGES[k], _EDGES[k + 1], sums[k] / counts[k], logged[k] / counts[k], int(counts[k]))
        for k in np.flatnonzero(counts)
    )


def calibration_error(bins: tuple[Bin, ...]) -> float:
    """The mean of |predicted - observed| over all pairs: the expected calibration error."""
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.predicted - b.observed) for b in bins) / total


def _by_count(distribution: Array, actions: Array) -> tuple[float, int, float, float]:
    """Return (p, worst action, observed, expected) by Pearson's chi-square.

    Its covariance is the exact one of draws from differing distributions: sum of diag(p) - p p'.
    Actions expected less than five times are taken together.
    """
    width = distribution.shape[1]
    observed = np.bincount(actions, minlength=width).astype(np.float64)
    expected = distribution.sum(axis=0)
    often = expected >= _MIN_COUNT
    columns = distribution[:, often]
    if not often.all():
        columns = np.c_[columns, 1 - columns.sum(axis=1)]
    covariance = np.diag(columns.sum(axis=0)) - columns.T @ columns
    tallies = np.append(observed[often], observed[~often].sum())[: columns.shape[1]]
    distances = tallies - columns.sum(axis=0)
    # Counts sum to M, so one direction has no variance, but for rounding.
    sizes, directions = np.linalg.eigh(covariance)
    free = sizes > 1e-9 * max(sizes[-1], 1.0)
    degrees = int(free.sum())
    square = float(((distances @ directions[:, free]) ** 2 / sizes[free]).sum())
    deviations = np.sqrt(np.maximum((distribution * (1 - distribution)).sum(axis=0), 1e-12))
    worst = int(np.argmax(np.where(often, np.abs(observed - expected) / deviations, -1.0)))
    p_value = _chi_square_tail(square, degrees) if degrees else 1.0
    return p_value, worst, float(observed[worst]), float(expected[worst])


def _by_inverse_probability(probs: Array, actions: Array) -> tuple[float, int, float, float]:
    """Return (p, worst action, observed, expected) from logged actions' probabilities alone.

    The sum of 1 / p over the rows of one action is expected to be the number of rows in which it is
    possible, at most M; the largest excess counts, times the number of actions (Bonferroni). Less
    than M tells nothing: where masks or a policy that is nearly sure rule an action out, it is M in
    rows that are not there, or that come once in a million. The variance is that of the sum where
    the propensities are right (Horvitz & Thompson 1952, section 3.2).
    """
    num = len(actions)
    inverse = 1 / probs
    sums = np.bincount(actions, inverse)
    variances = np.bincount(actions, inverse * (inverse - 1))
    rounding = np.bincount(actions, inverse * rounding_of(probs))
    counts = np.bincount(actions)
    known = counts >= _MIN_INVERSE_COUNT
    if not known.any():
        return 1.0, int(np.argmax(counts)), float(counts.max()), float(counts.max())
    deviations = np.maximum(np.sqrt(np.maximum(variances, 0)), rounding)
    scores = np.full(len(sums), -np.inf)
    np.divide(sums - num, deviations, out=scores, where=known)
    worst = int(np.argmax(scores))
    p_value = min(1.0, NormalDist().cdf(-float(scores[worst])) * int(known.sum()))
    # As many as would give the right sum, at the mean of 1 / p that the action has.
    return p_value, worst, float(counts[worst]), float(num * counts[worst] / sums[worst])


def _z(values: Array, rounding: float) -> float:
    """Return the mean of values in its standard errors, none below what rounding moved it."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    mean = float(values.mean())
    return mean / max(error, rounding)


def _chi_square_tail(value: float, degrees: int) -> float:
    """Return P(chi-square > value), to about 1e-3 (Wilson & Hilferty 1931)."""
    spread = 2 / (9 * degrees)
    return NormalDist().cdf(-((value / degrees) ** (1 / 3) - 1 + spread) / math.sqrt(spread))
