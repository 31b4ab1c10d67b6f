"""The verdict: may a log's answer be believed, and the one reason that matters most."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from replaylake.offline.evaluation.ope.diagnostics import Diagnostics
from replaylake.offline.evaluation.ope.estimate import Estimate, Estimates
from replaylake.offline.evaluation.ope.estimators import ESTIMATORS
from replaylake.offline.evaluation.ope.intervals import Interval

SUPPORTED: Final = "supported"
WEAK: Final = "weak"
NOT_SUPPORTED: Final = "not_supported"

# Effective episodes. Below 30 neither resampling nor a normal approximation knows an estimate's
# spread (intervals of wis with 50 effective of 100 episodes covered 91% at a nominal 95%, with 120
# of 300 but twenty steps 90%); from 100 on no single weight is more than a tenth of all, as
# share^2 <= 1 / size.
MIN_EFFECTIVE: Final = 30.0
FEW_EFFECTIVE: Final = 100.0
# From so many effective episodes on, their share says how many a longer log would have.
_FEWEST_TO_SCALE: Final = 2.0
# Effective episodes that bring the value: with 15 clicks a t interval covered 89.5% and a
# studentized bootstrap 93.9%; below about 4 the latter has no finite limit.
FEW_CARRYING: Final = 10.0
# The target policy's probability of what was never done: importance sampling leaves it out of the
# value altogether, so its share of the answer is a guess.
MUCH_UNSUPPORTED: Final = 0.1
SOME_UNSUPPORTED: Final = 0.01
# The mean weight is off by chance in 3 of 1,000 right logs.
MEAN_WEIGHT_Z: Final = 3.0
# Propensities disagree with the actions by chance in 1 of 1,000 right logs.
CALIBRATION_P: Final = 0.001
# Skewness of the mean weight. At 0.2 one end of an interval fails in 4 of 100 logs, where 2.5 are
# promised.
MOST_SKEWED: Final = 0.2
# An interval wider than one standard deviation of the log's own returns tells little more than that
# the policy's episodes are like some of the log's.
WIDEST_IN_STDS: Final = 1.0


@dataclass(frozen=True)
class Verdict:
    """`supported`, `weak` or `not_supported`, and a sentence with the numbers that decided it."""

    verdict: str
    reason: str


def verdict(estimates: Estimates, diagnostics: Diagnostics, *, trained_on: int = 0) -> Verdict:
    """Judge what a log says of a policy.

    trained_on: how many of the evaluated episodes were in the policy's training set. Reasons are
    checked from the most severe down; the first that applies is given.
    """
    if trained_on > 0:
        return Verdict(NOT_SUPPORTED, _explain_trained_on(trained_on, diagnostics))
    for check in _NOT_SUPPORTED_CHECKS:
        reason = check(estimates, diagnostics)
        if reason:
            return Verdict(NOT_SUPPORTED, reason)
    for check in _WEAK_CHECKS:
        reason = check(estimates, diagnostics)
        if reason:
            return Verdict(WEAK, reason)
    return Verdict(SUPPORTED, _explain_support(estimates, diagnostics))


def find_lack_of_support(diagnostics: Diagnostics, *, trained_on: int = 0) -> str:
    """Return why no estimate can make the verdict `supported`, "" if one may.

    That is known from the weights, before a model is fitted. trained_on: as for `verdict`.
    """
    if trained_on > 0:
        return _explain_trained_on(trained_on, diagnostics)
    return _explain_no_support(diagnostics) or _explain_size(diagnostics, FEW_EFFECTIVE)


def _explain_trained_on(trained_on: int, diagnostics: Diagnostics) -> str:
    return (
        f"{trained_on:,} of the {diagnostics.num_episodes:,} evaluated episodes were in the "
        "policy's training set: the estimate may be overfitted. Train with `holdout`, or "
        "evaluate on episodes that were added later."
    )


def _explain_no_estimates(estimates: Estimates, diagnostics: Diagnostics) -> str:
    if estimates.estimates:
        return ""
    reasons = "; ".join(dict.fromkeys(why.rstrip(".") for why in estimates.refused.values()))
    return f"No estimator applies: {reasons}."


def _explain_no_support(diagnostics: Diagnostics) -> str:
    mass = diagnostics.unsupported_mass or 0.0
    return _format_unsupported(mass) if mass > MUCH_UNSUPPORTED else ""


def _format_unsupported(mass: float) -> str:
    return (
        f"{mass:.1%} of the policy's probability is on actions that the log never contains in "
        "those situations."
    )


def _explain_size(diagnostics: Diagnostics, bar: float) -> str:
    """Say that fewer effective episodes than `bar` are left, and how many episodes would do."""
    weights = diagnostics.weights
    # Of 100 episodes whose weights are 1 but for rounding, 99.9999999 are effective.
    if weights is None or round(weights.worst_step_size, 1) >= bar:
        return ""
    at = f" at step {weights.worst_step}" if diagnostics.horizon > 1 else ""
    return (
        f"Importance weights leave an effective {weights.worst_step_size:,.1f} of "
        f"{diagnostics.num_episodes:,} episodes{at} ({bar:.0f} needed); the policy could have "
        f"taken the logged action in {weights.matching:.1%} of the steps."
        f"{_format_needed(weights.worst_step_size, diagnostics.num_episodes, bar)}"
    )


def _format_needed(size: float, num_episodes: int, bar: float) -> str:
    """Say how many episodes have enough effective ones, if so large a share of them is again."""
    # One weight alone is an effective episode, and says nothing of the others.
    if size < _FEWEST_TO_SCALE:
        return ""
    needed = bar / size * num_episodes
    digits = 10 ** max(math.floor(math.log10(needed)) - 1, 0)
    return f" About {math.ceil(needed / digits) * digits:,} such episodes would do."


def _explain_unchecked_model(estimates: Estimates, diagnostics: Diagnostics) -> str:
    if any(ESTIMATORS[e.estimator].uses_weights for e in estimates.estimates):
        return ""
    why = diagnostics.no_weights or "no estimator with importance weights was asked for"
    why = why.rstrip(".")
    return f"The estimate comes only from a model of values, and no log data checks it: {why}."


def _explain_some_unsupported(estimates: Estimates, diagnostics: Diagnostics) -> str:
    mass = diagnostics.unsupported_mass or 0.0
    return _format_unsupported(mass) if mass > SOME_UNSUPPORTED else ""


def _explain_few_carrying(estimates: Estimates, diagnostics: Diagnostics) -> str:
    weights = diagnostics.weights
    if weights is None or weights.carrying >= FEW_CARRYING:
        return ""
    return (
        f"The value rests on an effective {weights.carrying:.1f} episodes with a return other than "
        f"0 ({FEW_CARRYING:.0f} needed)."
    )


def _explain_mean_weight(estimates: Estimates, diagnostics: Diagnostics) -> str:
    weights = diagnostics.weights
    if weights is None or abs(weights.mean_weight_z) <= MEAN_WEIGHT_Z:
        return ""
    return (
        f"The mean importance weight is {weights.mean_weight:.6g}, "
        f"{abs(weights.mean_weight_z):.1f} standard errors from 1: propensities are wrong, or the "
        "policy takes actions that the log lacks."
    )


def has_skewed_weights(diagnostics: Diagnostics) -> bool:
    """Whether weights are too uneven for intervals to hold the truth as often as they say."""
    return diagnostics.weights is not None and diagnostics.weights.mean_skewness > MOST_SKEWED


def _explain_skewed_weights(estimates: Estimates, diagnostics: Diagnostics) -> str:
    weights = diagnostics.weights
    if weights is None or not has_skewed_weights(diagnostics):
        return ""
    at = f" at step {weights.worst_step}" if diagnostics.horizon > 1 else ""
    return (
        f"Intervals may contain the true value less often than stated: the weights of "
        f"{diagnostics.num_episodes:,} episodes are so uneven{at} that their mean has a skewness "
        f"of {weights.mean_skewness:.2g} ({MOST_SKEWED:g} at most)."
    )


def _explain_calibration(estimates: Estimates, diagnostics: Diagnostics) -> str:
    calibration = diagnostics.calibration
    if calibration is None or calibration.p_value >= CALIBRATION_P:
        return ""
    return (
        f"The log's propensities do not fit its actions (p = {calibration.p_value:.1g}): action "
        f"{calibration.worst_action} was logged {calibration.observed:,.0f} times where they say "
        f"{calibration.expected:,.0f}."
    )


def _explain_wide_interval(estimates: Estimates, diagnostics: Diagnostics) -> str:
    widths = {one.estimator: end.high - end.low for one, end in _with_intervals(estimates)}
    narrowest = min(widths, key=widths.__getitem__, default=None)
    if narrowest is None or widths[narrowest] <= WIDEST_IN_STDS * diagnostics.log_std:
        return ""
    return (
        f"The narrowest interval, {narrowest}'s, is {widths[narrowest]:.4g} wide; returns in the "
        f"log have a standard deviation of {diagnostics.log_std:.4g}."
    )


def _explain_disagreement(estimates: Estimates, diagnostics: Diagnostics) -> str:
    for (first, one), (second, other) in itertools.combinations(_with_intervals(estimates), 2):
        gap = max(one.low - other.high, other.low - one.high)
        # Intervals are as wide as float32 log-probs make them; sums of float64 are off by less.
        if gap > 1e-12 * max(abs(first.value), abs(second.value)):
            return (
                f"Estimators disagree: {first.estimator} gives {_range(first, one)}, "
                f"{second.estimator} {_range(second, other)}."
            )
    return ""


def _range(estimate: Estimate, interval: Interval) -> str:
    return f"{estimate.value:.4g} ({interval.low:.4g} to {interval.high:.4g})"


def _with_intervals(estimates: Estimates) -> list[tuple[Estimate, Interval]]:
    """Return the estimates that have an interval, with it; a model alone has none to compare."""
    return [
        (one, one.intervals[one.interval])
        for one in estimates.estimates
        if one.interval is not None
    ]


def _explain_support(estimates: Estimates, diagnostics: Diagnostics) -> str:
    weights = diagnostics.weights
    assert weights is not None, "without weights nothing checks the model: weak"
    fitted = ""
    if diagnostics.behavior_fitted:
        fitted = (
            " Propensities were fitted, not logged: this holds only if nothing that is not in the "
            "log decided which actions were taken."
        )
    agree = ", and the estimators agree" if len(_with_intervals(estimates)) > 1 else ""
    return (
        f"An effective {weights.worst_step_size:,.0f} of {diagnostics.num_episodes:,} episodes "
        f"count, the largest weight is {weights.max_weight_share:.1%} of all, the mean weight "
        f"{weights.mean_weight:.3f}{agree}.{fitted}"
    )


_Check = Callable[[Estimates, Diagnostics], str]
_NOT_SUPPORTED_CHECKS: Final[tuple[_Check, ...]] = (
    lambda estimates, diagnostics: _explain_no_support(diagnostics),
    lambda estimates, diagnostics: _explain_size(diagnostics, MIN_EFFECTIVE),
    _explain_no_estimates,
)
_WEAK_CHECKS: Final[tuple[_Check, ...]] = (
    _explain_unchecked_model,
    lambda estimates, diagnostics: _explain_size(diagnostics, FEW_EFFECTIVE),
    _explain_some_unsupported,
    _explain_few_carrying,
    _explain_mean_weight,
    _explain_calibration,
    _explain_skewed_weights,
    _explain_disagreement,
    _explain_wide_interval,
)
