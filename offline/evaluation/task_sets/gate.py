"""The gate of a promotion by stored samples: does a candidate solve more tasks than the champion?

Both have samples of the same tasks. The candidate passes where the lower end of the paired
difference is above the margin; without a champion, where that of the measure itself is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.policies.registry import PolicyRef
from replaylake.offline.evaluation.task_sets.estimates import (
    TaskEstimate,
    estimate_difference,
    estimate_mean,
)
from replaylake.offline.evaluation.task_sets.task_set import (
    FEWEST_TASKS,
    MEAN_REWARD,
    PolicyOnTasks,
    SampledPolicy,
    TaskSamples,
    TaskSetReport,
    TaskSetRequest,
    evaluate_task_set,
    pair_tasks,
)

_CHAMPION: Final = "the champion"
_MARGIN: Final = "the margin"
_PASS: Final = re.compile(r"pass@([1-9][0-9]*)")


@dataclass(frozen=True)
class TaskGateRequest:
    """What a gate compares: `pass@K` or `mean reward` of the samples that `samples` selects."""

    samples: TaskSetRequest
    measure: str = "pass@1"

    def __post_init__(self) -> None:
        if self.measure != MEAN_REWARD and not _PASS.fullmatch(self.measure):
            raise ConfigInvalidError(
                f"gate: measure: found {self.measure!r}, expected pass@K, such as pass@1, or "
                f"{MEAN_REWARD!r}.",
                parameter="measure",
            )

    @property
    def dataset(self) -> str:
        return self.samples.dataset


@dataclass(frozen=True)
class TaskComparison:
    """Candidate - against over the tasks that both have; against is None where there was none."""

    estimator: str
    candidate: float
    against: float | None
    difference: float
    low: float
    high: float
    num_tasks: int
    no_interval: str = ""


@dataclass(frozen=True)
class TaskGateResult:
    """What samples say of promoting a candidate; `reasons` say why it passes, or does not.

    comparison and report: None where the samples could not be compared.
    """

    passed: bool
    reasons: tuple[str, ...]
    request: TaskGateRequest
    report: TaskSetReport | None
    comparison: TaskComparison | None
    has_champion: bool
    alpha: float
    margin: float

    @property
    def against(self) -> str:
        """What the candidate is compared with, in words."""
        return _CHAMPION if self.has_champion else _MARGIN

    def to_record(self) -> dict[str, Any]:
        """Return what a promotion keeps of it, JSON-able: about 1 kB."""
        samples, report = self.request.samples, self.report
        policies = () if report is None else report.policies[::-1]
        both = [*map(_summarize, policies), None, None][:2]
        return {
            "passed": self.passed,
            "reasons": list(self.reasons),
            "dataset": samples.dataset,
            "version": None if report is None else report.version,
            "where": samples.where,
            "task": samples.task,
            "success": samples.success,
            "measure": self.request.measure,
            "alpha": self.alpha,
            "margin": self.margin,
            "candidate": both[0],
            "champion": both[1],
            "against": self.against,
            "comparisons": [] if self.comparison is None else [asdict(self.comparison)],
            "refused": {},
        }

    def to_json(self) -> dict[str, Any]:
        """Return the record, and the reports of both, as `evaluate --json` has them."""
        reports: list[dict[str, Any]] = []
        if self.report is not None:
            about = {key: v for key, v in self.report.to_json().items() if key != "policies"}
            reports = [{**about, **one.to_json()} for one in self.report.policies[::-1]]
        return {**self.to_record(), "reports": reports}


def _summarize(one: PolicyOnTasks) -> dict[str, Any]:
    policy = one.samples.policy
    return {
        "policy": policy.name,
        "version": policy.version,
        "verdict": one.verdict,
        "reason": one.reason,
    }


def evaluate_task_gate(
    lake: Lake,
    candidate: PolicyRef,
    champion: PolicyRef | None,
    request: TaskGateRequest,
    *,
    alpha: float = 0.025,
    margin: float = 0.0,
) -> TaskGateResult:
    """Compare a candidate with the champion by stored samples of tasks.

    Args:
        lake: the lake.
        candidate: who would be promoted.
        champion: who is there now; None: the measure itself has to be above the margin.
        request: the samples and the measure. The level of intervals follows from alpha.
        alpha: the chance at which a candidate that is no better may pass, in (0, 0.25].
        margin: by how much it has to be better, in units of the measure; below 0: may be worse.

    Fewer than 20 common tasks do not pass: from there on coverage was measured. Samples with an
    unknown reward are counted against the candidate: it passes only if it also would had all of its
    own failed and all of the champion's passed.
    Raises: as evaluate_task_set, but for EmptyReplayError, which is an answer here;
    ConfigInvalidError for an alpha out of range.
    """
    if not 0 < alpha <= 0.25:
        raise ConfigInvalidError(
            f"gate: alpha: found {alpha:g}, expected more than 0 and at most 0.25; 0.025 is usual.",
            parameter="alpha",
        )
    match = _PASS.fullmatch(request.measure)
    ks = (int(match.group(1)) if match else 1,)
    samples = replace(request.samples, ks=ks, level=1 - 2 * alpha)
    refs = [ref for ref in (champion, candidate) if ref is not None]
    has_champion = champion is not None
    try:
        policies = [SampledPolicy(ref.name, ref.version) for ref in refs]
        report = evaluate_task_set(lake, policies, samples)
        comparison, estimate = _compare(report, request.measure)
    except EmptyReplayError as error:
        return TaskGateResult(
            False, (str(error),), request, None, None, has_champion, alpha, margin
        )
    reasons = tuple(_iter_refusals(report, comparison, estimate, margin, request.measure))
    passed = not reasons
    if passed:
        reasons = (_format_better(comparison, margin, has_champion),)
    return TaskGateResult(passed, reasons, request, report, comparison, has_champion, alpha, margin)


def _compare(report: TaskSetReport, measure: str) -> tuple[TaskComparison, TaskEstimate]:
    """Return the comparison, and the estimate that decides. Raises: EmptyReplayError."""
    found = []
    for one in report.policies:
        named = [known for known in one.measures if known.name == measure]
        if not named:
            raise EmptyReplayError(
                f"gate: {one.samples.policy} has no {measure}: found rewards that are unknown, or "
                "all alike, expected some that differ. Compare by `measure` pass@1."
            )
        found.append(named[0])
    ours = found[-1]
    if len(found) == 1:
        deciding, against = ours.estimate, None
    else:
        assert ours.difference is not None, "without a common task evaluation fails"
        deciding, against = ours.difference, found[0].estimate.value
    return (
        TaskComparison(
            measure,
            ours.estimate.value,
            against,
            deciding.value,
            deciding.low,
            deciding.high,
            deciding.num_tasks,
        ),
        deciding,
    )


def _iter_refusals(
    report: TaskSetReport,
    comparison: TaskComparison,
    estimate: TaskEstimate,
    margin: float,
    measure: str,
) -> Iterator[str]:
    what = f"{measure} of the candidate"
    if comparison.against is not None:
        what = f"the difference of {measure} from {_CHAMPION}"
    if estimate.num_tasks < FEWEST_TASKS:
        yield (
            f"{estimate.num_tasks:,} tasks are compared, {FEWEST_TASKS} needed: how often "
            "intervals contain the truth was measured from there on."
        )
    # Written so that an interval that is not a number does not pass.
    if not estimate.low > margin:
        yield (
            f"{what} is {estimate.value:.4g} ({estimate.low:.4g} to {estimate.high:.4g}) over "
            f"{estimate.num_tasks:,} tasks: its lower end is not above {margin:g}."
            f"{_explain_needed(report, estimate, margin, measure)}"
        )
        return
    if not any(one.samples.num_unknown for one in report.policies):
        return
    worst = _estimate_worst(report, measure)
    if not worst.low > margin:
        yield _explain_unknown(report, what, worst, margin)


def _estimate_worst(report: TaskSetReport, measure: str) -> TaskEstimate:
    """Estimate as if unknown rewards were the candidate's lowest and the champion's highest."""
    ranges = [one.samples.reward_range for one in report.policies]
    known = [one for one in ranges if one is not None]
    low, high = min(one for one, _ in known), max(one for _, one in known)
    ours = report.policies[-1].samples.fill_unknown(passed=False, reward=low)
    values, level = _values(ours, measure), report.request.level
    if len(report.policies) == 1:
        values = values[~np.isnan(values)]
        if measure == MEAN_REWARD:
            return estimate_mean(values, level, low=low, high=high)
        return estimate_mean(values, level)
    theirs = report.policies[0].samples.fill_unknown(passed=True, reward=high)
    pair = pair_tasks(ours, values, theirs, _values(theirs, measure), measure)
    return estimate_difference(*pair, level, width=high - low if measure == MEAN_REWARD else 1.0)


def _values(samples: TaskSamples, measure: str) -> NDArray[np.float64]:
    if measure != MEAN_REWARD:
        return samples.pass_at(int(measure.removeprefix("pass@")))
    assert samples.rewards is not None, "a policy without rewards has no such measure"
    return samples.rewards


def _explain_unknown(report: TaskSetReport, what: str, worst: TaskEstimate, margin: float) -> str:
    shares, outcomes = [], []
    for one, outcome in zip(report.policies[::-1], ("failed", "passed"), strict=False):
        samples = one.samples
        if num := samples.num_unknown:
            shares.append(f"{num:,} of {num + samples.num_samples.sum():,} of {samples.policy}")
            outcomes.append(f"those of {samples.policy} {outcome}")
    return (
        f"samples have an unknown reward, as rollouts that failed do: {' and '.join(shares)}. Had "
        f"{' and '.join(outcomes)}, {what} would be {worst.value:.4g} ({worst.low:.4g} to "
        f"{worst.high:.4g}): its lower end is not above {margin:g}. Name with `success` what "
        "counts as passed, or sample again."
    )


def _explain_needed(
    report: TaskSetReport, estimate: TaskEstimate, margin: float, measure: str
) -> str:
    """Say how many tasks, or samples of each, would do if what they say stays the same."""
    gap = estimate.value - margin
    if gap <= 0:
        return " More tasks or samples of this kind would not change that."
    share = (gap / (estimate.value - estimate.low)) ** 2
    text = f" About {_round_up(estimate.num_tasks / share):,} such tasks would do"
    factor = None
    if measure == "pass@1" and len(report.policies) == 2:
        factor = _sample_factor(report.policies[1].samples, report.policies[0].samples, share)
    return f"{text}." if factor is None else f"{text}, or {factor:.2g} times the samples of each."


def _sample_factor(ours: TaskSamples, theirs: TaskSamples, share: float) -> float | None:
    """Return how many times the samples bring the variance of the difference to a share of it.

    None where it stays above that however many there are: tasks differ by themselves.
    """
    pair = pair_tasks(ours, ours.pass_at(1), theirs, theirs.pass_at(1), "pass@1")
    spread = float(np.var(pair[0] - pair[1], ddof=1)) if len(pair[0]) > 1 else 0.0
    common = set(ours.tasks) & set(theirs.tasks)
    within = sum(_mean_variance(one, common) for one in (ours, theirs))
    left = share * spread - (spread - within)
    return within / left if within < math.inf and left > 0 and within > 0 else None


def _mean_variance(samples: TaskSamples, tasks: set[str]) -> float:
    """Return the mean variance of a task's share of successes, as far as it is due to sampling."""
    among = np.array([name in tasks for name in samples.tasks])
    num, rates = samples.num_samples[among], samples.pass_at(1)[among]
    if (num < 2).any():
        return math.inf
    return float((rates * (1 - rates) / (num - 1)).mean())


def _round_up(number: float) -> int:
    """Return two significant digits, rounded up."""
    digits = int(10 ** max(math.floor(math.log10(number)) - 1, 0))
    return math.ceil(number / digits) * digits


def _format_better(comparison: TaskComparison, margin: float, has_champion: bool) -> str:
    ends = f"({comparison.low:.4g} to {comparison.high:.4g}) over {comparison.num_tasks:,} tasks"
    if has_champion:
        return (
            f"Better than {_CHAMPION}: the difference of {comparison.estimator} is "
            f"{comparison.difference:.4g} {ends}, above {margin:g}."
        )
    return f"{comparison.estimator} is {comparison.candidate:.4g} {ends}, above {margin:g}."
