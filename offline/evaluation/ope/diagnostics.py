"""Diagnostics: how far a log can speak for another policy, in numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.offline.evaluation.ope.calibration import Calibration, calibration
from replaylake.offline.evaluation.ope.logged_episodes import LoggedEpisodes
from replaylake.offline.evaluation.ope.weights import (
    NotEstimableError,
    Weights,
    importance_weights,
    summary,
)


@dataclass(frozen=True)
class WeightDiagnostics:
    """Importance weights of whole episodes, and of the step at which fewest episodes count.

    Sizes are effective numbers of episodes (Kish). max_weight_share is the largest weight's share
    of their sum. mean_weight is 1 on average where propensities are right and support is full;
    mean_weight_z is its distance in standard errors, none below mean_rounding: by how much float32
    log-probs can have moved the mean (Weights.rounding). mean_skewness is the skewness of the mean
    weight at the worst step: from about 0.2 on, intervals are too short on one side. carrying is
    the effective number of episodes by |weight x return|: how many the value rests on, few where
    rewards are rare. matching is the share of steps whose logged action the policy could have
    taken.
    """

    effective_sample_size: float
    worst_step: int
    worst_step_size: float
    max_weight: float
    max_weight_share: float
    mean_weight: float
    mean_weight_z: float
    mean_rounding: float
    mean_skewness: float
    carrying: float
    matching: float


@dataclass(frozen=True)
class Diagnostics:
    """What to know before believing an estimate.

    log_mean and log_std are of the episodes' discounted returns. unknown_share and zero_share are
    of steps whose behavior probability is unknown or 0. overlap is the mean over steps of the sum
    over actions of min(pi, mu), 1 where the policies agree. unsupported_mass is the target policy's
    mean probability of actions without behavior probability (where that is unknown: never logged),
    unsupported_share the share of steps where it has any. All three are None where unknown.
    weights is None where there are none, and no_weights says why.
    """

    num_episodes: int
    num_steps: int
    horizon: int
    log_mean: float
    log_std: float
    unknown_share: float
    zero_share: float
    overlap: float | None
    unsupported_mass: float | None
    unsupported_share: float | None
    behavior_fitted: bool
    weights: WeightDiagnostics | None
    no_weights: str
    calibration: Calibration | None


def diagnose(episodes: LoggedEpisodes) -> Diagnostics:
    """Diagnose a log for a policy. Cost: a few passes over [M] and [M, A]."""
    weights, no_weights = None, ""
    try:
        weights = _weights(importance_weights(episodes))
    except NotEstimableError as error:
        no_weights = str(error)
    behavior = episodes.behavior_probs
    unsupported = _unsupported_mass(episodes)
    return Diagnostics(
        num_episodes=episodes.num_episodes,
        num_steps=episodes.num_steps,
        horizon=int(episodes.lengths.max()),
        log_mean=float(episodes.returns.mean()),
        log_std=float(episodes.returns.std(ddof=1)) if episodes.num_episodes > 1 else 0.0,
        unknown_share=1.0 if behavior is None else float(np.isnan(behavior).mean()),
        zero_share=0.0 if behavior is None else float((behavior == 0).mean()),
        overlap=_overlap(episodes),
        unsupported_mass=None if unsupported is None else float(unsupported.mean()),
        unsupported_share=None if unsupported is None else float((unsupported > 1e-9).mean()),
        behavior_fitted=episodes.behavior_fitted,
        weights=weights,
        no_weights=no_weights,
        calibration=calibration(episodes),
    )


def _weights(weights: Weights) -> WeightDiagnostics:
    episodes, final = weights.episodes, weights.final
    total, mean = float(final.sum()), float(final.mean())
    rounding = float((final * weights.final_rounding).mean())
    worst = int(np.argmin(weights.per_step))
    return WeightDiagnostics(
        effective_sample_size=weights.whole_episodes.effective_sample_size,
        worst_step=worst,
        worst_step_size=float(weights.per_step[worst]),
        max_weight=weights.whole_episodes.max_weight,
        max_weight_share=weights.whole_episodes.max_weight / total if total else 0.0,
        mean_weight=mean,
        mean_weight_z=(mean - 1) / _standard_error(final, rounding),
        mean_rounding=rounding,
        mean_skewness=_mean_skewness(weights.at_step(worst), rounding, episodes.is_one_step),
        carrying=summary(np.abs(final * episodes.returns)).effective_sample_size,
        matching=float((weights.ratios > 0).mean()),
    )


def _standard_error(final: Array, rounding: float) -> float:
    """Return the standard error of the mean of weights [E], no less than what rounding moved it.

    Weights that are all c but for rounding show nothing of their spread. If their mean is 1, then c
    has a probability of at most 1 / c (Markov's inequality), and reaches it where all others are 0:
    the variance is c - 1. That is what a greedy policy leaves in a log that seldom explores. Below
    1 there is no such bound; the same distance is taken for as telling.
    """
    num, mean = len(final), float(final.mean())
    error = float(final.std(ddof=1)) / math.sqrt(num) if num > 1 else 0.0
    if error <= rounding:
        error = math.sqrt(abs(mean - 1) / num)
    return max(error, rounding)


def _mean_skewness(weights: Array, rounding: float, is_one_step: bool) -> float:
    """Return the skewness of the mean of weights [E], 0 where they vary by rounding alone.

    One-step ratios show theirs in the log. Products of ratios have a tail that no log shows: their
    third moment is taken to be that of a log-normal distribution of the same mean and variance, as
    a sum of many log-ratios is about normal, but 0 in the logged share 1 - p of episodes. With
    r = E w^2 / (E w)^2 it is E w^3 = p r^3 (E w)^3. One end of a t interval fails by about 0.085
    times the skewness too often (Hall 1992, "The Bootstrap and Edgeworth Expansion", section 2.6).
    """
    mean = float(weights.mean())
    variance = float(weights.var())
    if variance <= rounding**2:
        return 0.0
    variance /= mean**2
    if is_one_step:
        third = float(((weights / mean - 1) ** 3).mean())
    else:
        # p r^3 - 3 r + 2, in a form that stays exact where r is hardly above 1.
        ratio = 1 + variance
        third = variance**2 * (ratio + 2) - float((weights == 0).mean()) * ratio**3
    return float(third / variance**1.5 / math.sqrt(len(weights)))


def _overlap(episodes: LoggedEpisodes) -> float | None:
    behavior, target = episodes.behavior_distribution, episodes.target_distribution
    if behavior is None or target is None:
        return None
    return float(np.minimum(behavior, target).sum(axis=1).mean())


def _unsupported_mass(episodes: LoggedEpisodes) -> Array | None:
    """Return each step's target probability of actions without support, float64 [M]."""
    behavior, target = episodes.behavior_distribution, episodes.target_distribution
    if target is None:
        return None
    if behavior is not None:
        return np.asarray(np.where(behavior > 0, 0.0, target).sum(axis=1))
    if episodes.actions is None:
        return None
    never = np.bincount(episodes.actions, minlength=target.shape[1]) == 0
    return np.asarray(target[:, never].sum(axis=1))
