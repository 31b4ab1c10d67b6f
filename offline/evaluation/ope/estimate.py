"""estimate: what every estimator that suits a log says, with intervals, and why others do not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError
from replaylake.offline.evaluation.ope.estimators import ESTIMATORS, Estimator, default_estimators
from replaylake.offline.evaluation.ope.intervals import (
    METHODS,
    OF_DIFFERENCES,
    OF_VALUES,
    Interval,
    all_intervals,
    clip_to_range,
    widen_to_rounding,
)
from replaylake.offline.evaluation.ope.logged_episodes import LoggedEpisodes
from replaylake.offline.evaluation.ope.statistic import (
    Bounds,
    Statistic,
    cluster_by,
    difference_of,
    mean_of,
)
from replaylake.offline.evaluation.ope.weights import EstimatorInputs, NotEstimableError
from replaylake.offline.learning.options import near_matches

_FITTED_PROPENSITIES_NOTE: Final = (
    "behavior probabilities were fitted, not logged, and the interval takes them as right; "
)


@dataclass(frozen=True)
class Estimate:
    """What one estimator says the policy is worth, in units of the discounted return.

    value has the interval ci_low .. ci_high by the method `interval`; difference is value minus the
    log's own mean return, paired by episode, with difference_low .. difference_high by the method
    `difference_interval`. All ends and methods are None where there is no interval, and no_interval
    says why. effective_sample_size is Kish's, of the weights as
    applied (per-step ones: at the worst step), and the number of episodes where there are none;
    max_weight is the largest applied, None where there are none. intervals and differences hold
    every method's interval, by method. propensities: `logged` or `fitted` ones made its weights,
    None where it has none.
    """

    estimator: str
    value: float
    ci_low: float | None
    ci_high: float | None
    difference: float
    difference_low: float | None
    difference_high: float | None
    effective_sample_size: float
    max_weight: float | None
    assumptions: str
    paper: str
    interval: str | None
    difference_interval: str | None
    propensities: str | None
    no_interval: str = ""
    intervals: Mapping[str, Interval] = field(default_factory=dict, repr=False)
    differences: Mapping[str, Interval] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Estimates:
    """The estimates, by name why others are not there, and the log's own mean with its interval."""

    estimates: tuple[Estimate, ...]
    refused: Mapping[str, str]
    log_mean: float
    log_interval: Interval


def estimate(
    episodes: LoggedEpisodes,
    names: Sequence[str] | None = None,
    *,
    level: float = 0.95,
    seed: int = 0,
    clip: float | None = None,
    interval: str | None = None,
) -> Estimates:
    """Estimate the target policy's value by each estimator named; None: all that suit the log.

    clip is the largest weight that clipped estimators apply; by default sqrt(E), at which what is
    clipped off vanishes as the log grows (Ionides 2008). interval: a method of intervals.METHODS
    for values and differences; by default the studentized bootstrap for values and the wider of it
    and Student's t for differences, and empirical Bernstein where the bootstrap has no finite
    limit. A model alone has none.
    Cost: a few passes over the steps, and 2,000 resamples of the episodes.
    Raises: ConfigInvalidError on a name, level, clip or interval that there is not;
    EmptyReplayError for a single episode.
    """
    _check_options(names, level, clip, interval)
    selection = (
        default_estimators(episodes.is_one_step) if names is None else list(dict.fromkeys(names))
    )
    statistics, reasons = _statistics(episodes, selection, clip or math.sqrt(episodes.num_episodes))
    log = _log_statistic(episodes)
    differences = [difference_of(statistic, log) for statistic in statistics.values()]
    split = 1 + len(statistics)
    bounds = all_intervals([log, *statistics.values(), *differences], level, seed)
    of_log, of_values, of_differences = bounds[0], bounds[1:split], bounds[split:]
    estimates = tuple(
        _estimate(ESTIMATORS[name], episodes, statistic, values, paired, intervals, interval, level)
        for (name, statistic), values, paired, intervals in zip(
            statistics.items(), of_values, differences, of_differences, strict=True
        )
    )
    of_log = clip_to_range(of_log, *episodes.value_range())
    return Estimates(estimates, reasons, log.value, _choose_interval(of_log, OF_VALUES))


@dataclass(frozen=True)
class Difference:
    """What one estimator says two policies are worth, and their difference with its interval.

    difference is first - second, paired by episode: low .. high by the method `interval`; all three
    None where there is no interval, and no_interval says why.
    """

    estimator: str
    first: float
    second: float
    difference: float
    low: float | None
    high: float | None
    interval: str | None
    no_interval: str = ""


def estimate_differences(
    first: LoggedEpisodes,
    second: LoggedEpisodes,
    names: Sequence[str],
    *,
    level: float = 0.95,
    seed: int = 0,
    clip: float | None = None,
) -> tuple[tuple[Difference, ...], dict[str, str]]:
    """Compare two policies on the same episodes by each estimator named; and why not by others.

    As `estimate` compares one with the log: the same resamples of the episodes serve both
    policies, so what they have in common falls out. Cost: as estimate's. Raises: ConfigInvalidError
    as estimate does, and where the episodes are not the same.
    """
    _check_options(names, level, clip, None)
    if not np.array_equal(first.offsets, second.offsets) or not np.array_equal(
        first.rewards, second.rewards
    ):
        raise ConfigInvalidError(
            f"comparison of two policies: found {first.num_episodes:,} and {second.num_episodes:,} "
            "episodes that differ, expected the same ones. Evaluate both on the same."
        )
    selection = list(dict.fromkeys(names))
    clip = clip or math.sqrt(first.num_episodes)
    of_first, refusals = _statistics(first, selection, clip)
    of_second, also_refused = _statistics(second, selection, clip)
    both = [name for name in selection if name in of_first and name in of_second]
    paired = [difference_of(of_first[name], of_second[name]) for name in both]
    bounds = all_intervals(paired, level, seed) if paired else []
    differences = []
    for name, statistic, intervals in zip(both, paired, bounds, strict=True):
        values = of_first[name].value, of_second[name].value, statistic.value
        if why := ESTIMATORS[name].no_interval:
            differences.append(Difference(name, *values, None, None, None, why))
            continue
        interval = _choose_interval(intervals, OF_DIFFERENCES)
        if interval.low == interval.high != 0 and np.ptp(first.returns) > 0:
            interval = intervals["empirical_bernstein"]
        low, high = first.value_range()
        intervals = widen_to_rounding(intervals, statistic, level)
        interval = clip_to_range(intervals, low - high, high - low)[interval.method]
        differences.append(Difference(name, *values, interval.low, interval.high, interval.method))
    return tuple(differences), {**also_refused, **refusals}


def _log_statistic(episodes: LoggedEpisodes) -> Statistic:
    returns = episodes.returns
    bounds = Bounds(float(returns.min()), float(returns.max()), known=False)
    try:
        return cluster_by(mean_of(returns, None, bounds), episodes.clusters)
    except NotEstimableError as error:
        raise EmptyReplayError(
            "off-policy evaluation: found 1 episode, expected 2 or more: the error of a mean "
            "cannot be estimated from a single return. Evaluate more episodes."
        ) from error


def _check_options(
    names: Sequence[str] | None, level: float, clip: float | None, interval: str | None
) -> None:
    for name in names or ():
        if name not in ESTIMATORS:
            raise ConfigInvalidError(
                f"estimator: found {name!r}, expected {near_matches(name, ESTIMATORS)}."
            )
    if names is not None and not names:
        raise ConfigInvalidError(f"estimator: found none, expected some of {list(ESTIMATORS)}.")
    if not 0.5 <= level < 1:
        raise ConfigInvalidError(
            f"level: found {level}, expected a number in [0.5, 1), such as 0.95."
        )
    if clip is not None and not 0 < clip < math.inf:
        raise ConfigInvalidError(f"clip: found {clip}, expected a finite weight above 0.")
    if interval is not None and interval not in METHODS:
        raise ConfigInvalidError(f"interval: found {interval!r}, expected one of {list(METHODS)}.")


def _statistics(
    episodes: LoggedEpisodes, names: Sequence[str], clip: float
) -> tuple[dict[str, Statistic], dict[str, str]]:
    """Return what each estimator found, and for those that could not, why."""
    inputs = EstimatorInputs(episodes, clip)
    statistics: dict[str, Statistic] = {}
    refusals: dict[str, str] = {}
    for name in names:
        estimator = ESTIMATORS[name]
        try:
            if estimator.one_step not in (None, episodes.is_one_step):
                raise NotEstimableError(_unsuitable_log_reason(estimator))
            statistics[name] = cluster_by(estimator.function(inputs), episodes.clusters)
        except NotEstimableError as error:
            refusals[name] = str(error)
    return statistics, refusals


def _unsuitable_log_reason(estimator: Estimator) -> str:
    kinds = ("one-step logs", "episodes of several steps")
    expected, actual = kinds if estimator.one_step else kinds[::-1]
    instead = f": use {estimator.counterpart!r}" if estimator.counterpart else ""
    return f"for {expected}, found {actual}{instead}"


def _estimate(
    estimator: Estimator,
    episodes: LoggedEpisodes,
    statistic: Statistic,
    intervals: Mapping[str, Interval],
    difference: Statistic,
    differences: Mapping[str, Interval],
    method: str | None,
    level: float,
) -> Estimate:
    headline = paired = None
    if estimator.no_interval:
        intervals, differences = {}, {}
    else:
        headline = _choose_interval(intervals, method or OF_VALUES)
        paired = _choose_interval(differences, method or OF_DIFFERENCES)
        if headline.low == headline.high and np.ptp(episodes.returns) > 0:
            # Not one episode that counts has a reward, though some in the log have: no certainty.
            headline, paired = (some["empirical_bernstein"] for some in (intervals, differences))
        low, high = episodes.value_range()
        intervals = widen_to_rounding(intervals, statistic, level)
        intervals = clip_to_range(intervals, low, high)
        differences = widen_to_rounding(differences, difference, level)
        differences = clip_to_range(differences, low - high, high - low)
        headline, paired = intervals[headline.method], differences[paired.method]
    size, largest = float(episodes.num_episodes), None
    if statistic.spread is not None:
        size, largest = statistic.spread.effective_sample_size, statistic.spread.max_weight
    fitted = (
        _FITTED_PROPENSITIES_NOTE if estimator.uses_weights and episodes.behavior_fitted else ""
    )
    return Estimate(
        estimator=estimator.name,
        value=statistic.value,
        ci_low=None if headline is None else headline.low,
        ci_high=None if headline is None else headline.high,
        difference=difference.value,
        difference_low=None if paired is None else paired.low,
        difference_high=None if paired is None else paired.high,
        effective_sample_size=size,
        max_weight=largest,
        assumptions=fitted + estimator.assumptions,
        paper=estimator.paper,
        interval=None if headline is None else headline.method,
        difference_interval=None if paired is None else paired.method,
        propensities=_propensities(estimator, episodes),
        no_interval=estimator.no_interval,
        intervals=intervals,
        differences=differences,
    )


def _propensities(estimator: Estimator, episodes: LoggedEpisodes) -> str | None:
    if not estimator.uses_weights:
        return None
    return "fitted" if episodes.behavior_fitted else "logged"


def _choose_interval(intervals: Mapping[str, Interval], method: str) -> Interval:
    """The method's interval; the empirical Bernstein one where that is not finite."""
    interval = intervals[method]
    if math.isfinite(interval.low) and math.isfinite(interval.high):
        return interval
    return intervals["empirical_bernstein"]
