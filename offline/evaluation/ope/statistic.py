"""Statistic: an estimate and what each episode did to it, which is all that intervals ask."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.offline.evaluation.ope.logged_episodes import LoggedEpisodes
from replaylake.offline.evaluation.ope.weights import NotEstimableError, WeightSummary, sum_by_step


@dataclass(frozen=True)
class Bounds:
    """What one episode contributes at least and at most; known, or taken from the largest seen."""

    low: float
    high: float
    known: bool


@dataclass(frozen=True, eq=False)
class Statistic:
    """An estimate from E episodes.

    influence   float64 [E], E times by how much each episode moves the value, to first order:
                its mean is about 0 and var(influence) / E the value's variance
    spread      of the weights as the estimator applied them; None: it uses none
    bounds      of value + influence, whatever episodes are drawn; None: those of the values seen
    rounding    by how much float32 log-probs can have moved the value, to first order: the same
                for all episodes, so that no number of them averages it out (see Weights.rounding)

    Influences here are the jackknife's: a ratio's episode with share h of the weight has the
    linearization's divided by 1 - h. Plain linearization calls an estimate that rests on a single
    episode certain; with few effective episodes it also covers about one point less.
    Source: Efron & Stein 1981, "The Jackknife Estimate of Variance".
    """

    value: float
    influence: Array
    spread: WeightSummary | None = None
    bounds: Bounds | None = None
    rounding: float = 0.0


def mean_of(
    values: Array,
    spread: WeightSummary | None = None,
    bounds: Bounds | None = None,
    rounding: float = 0.0,
) -> Statistic:
    """The mean of values [E]. Raises: NotEstimableError for a single episode."""
    return replace(ratio_of(values, np.ones(len(values)), spread, bounds), rounding=rounding)


def ratio_of(
    numerators: Array,
    weights: Array,
    spread: WeightSummary | None = None,
    bounds: Bounds | None = None,
    rounding: Array | float = 0.0,
) -> Statistic:
    """Sum of numerators [E] / sum of weights [E], each weight known to the share `rounding` [E].

    Raises: NotEstimableError where all weights are 0, or all but one.
    """
    mean = float(weights.mean())
    if mean <= 0:
        raise NotEstimableError(
            "no episode has any weight: the policy takes the logged actions of none of them"
        )
    jackknife = mean - weights / len(weights)
    if jackknife.min() <= 1e-12 * mean:
        raise NotEstimableError(
            "a single episode has all the weight, so the error cannot be estimated"
        )
    ratio = float(numerators.mean()) / mean
    errors = numerators - ratio * weights
    moved = float(np.mean(rounding * np.abs(errors))) / mean
    return Statistic(ratio, errors / jackknife, spread, bounds, moved)


def cluster_by(statistic: Statistic, clusters: Array | None) -> Statistic:
    """The same statistic as one of independent clusters: int64 [E] says which an episode is in.

    Source: Liang & Zeger 1986, eq. 2, the variance of sums within clusters. Raises:
    NotEstimableError for a single cluster.
    """
    if clusters is None:
        return statistic
    sums = np.bincount(clusters, statistic.influence)
    if len(sums) < 2:
        raise NotEstimableError(
            "all agents are of a single episode, so the error cannot be estimated"
        )
    # What one episode contributes at most does not bound what several do.
    return replace(statistic, influence=sums * (len(sums) / len(statistic.influence)), bounds=None)


def total_of(first: Statistic, second: Statistic) -> Statistic:
    """The sum of two statistics of the same episodes."""
    spread = first.spread or second.spread
    return Statistic(
        first.value + second.value,
        first.influence + second.influence,
        spread,
        rounding=first.rounding + second.rounding,
    )


def difference_of(first: Statistic, second: Statistic) -> Statistic:
    """First - second, paired episode by episode."""
    bounds = None
    if first.bounds and second.bounds:
        bounds = Bounds(
            first.bounds.low - second.bounds.high,
            first.bounds.high - second.bounds.low,
            known=first.bounds.known and second.bounds.known,
        )
    return Statistic(
        first.value - second.value,
        first.influence - second.influence,
        None,
        bounds,
        first.rounding + second.rounding,
    )


def ratio_per_step(
    episodes: LoggedEpisodes,
    numerators: Array,
    weights: Array,
    spread: WeightSummary,
    rounding: Array,
) -> Statistic:
    """The sum over steps of (sum of numerators at the step) / (sum of weights at the step).

    numerators [M] and weights [M], the latter products that an ended episode keeps, each known to
    the share `rounding` [M]. Its influence past its end is plainly linearized. Cost: a few passes
    over M.
    Some episode has weight at every step. Raises: NotEstimableError where a single one has.
    """
    horizon = int(episodes.lengths.max())
    tops = np.bincount(episodes.steps, numerators, horizon) / episodes.num_episodes
    means = sum_by_step(episodes, weights) / episodes.num_episodes
    ratios, steps = tops / means, episodes.steps
    jackknife = means[steps] - weights / episodes.num_episodes
    alone = np.flatnonzero(jackknife <= 1e-12 * means[steps])
    if len(alone):
        step = steps[alone].min()
        raise NotEstimableError(f"at step {step} a single episode has all the weight")
    errors, lasts = numerators - ratios[steps] * weights, episodes.offsets[1:] - 1
    influence = episodes.sum_by_episode(errors / jackknife)
    # Past its end an episode's last weight still lowers every later ratio.
    later = np.append((ratios / means)[::-1].cumsum()[::-1], 0.0)[episodes.lengths]
    influence -= weights[lasts] * later
    moved = float((rounding * np.abs(errors) / means[steps]).sum())
    moved += float((rounding * weights)[lasts] @ np.abs(later))
    return Statistic(float(ratios.sum()), influence, spread, rounding=moved / episodes.num_episodes)
