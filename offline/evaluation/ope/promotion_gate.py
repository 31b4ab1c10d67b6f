"""The gate of a promotion: is a candidate better than the champion, as far as a log can tell?

Both are evaluated on the same held-out episodes, which neither learned from, and compared episode
by episode. The gate lets a candidate pass only where every estimator that was asked finds the lower
end of the difference above the margin, and the log supports what it says of either. Requiring it of
each estimator keeps the chance that a worse candidate passes below alpha, whichever one is right
(an intersection-union test: Berger 1982, "Multiparameter Hypothesis Testing and Acceptance
Sampling").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from operator import itemgetter
from typing import Any, Final, Literal

from replaylake.datastore.episodes.schema import REWARD
from replaylake.datastore.episodes.spaces import Discrete
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.policies.registry import PolicyRef
from replaylake.offline.evaluation.ope.estimate import estimate_differences
from replaylake.offline.evaluation.ope.evaluate_policy import (
    PolicyEvaluation,
    PreparedEvaluation,
    prepare_evaluation,
)
from replaylake.offline.evaluation.ope.evaluated_policy import (
    EvaluatedPolicy,
    evaluated_reward,
    load_evaluated_policy,
)
from replaylake.offline.evaluation.ope.evaluation_request import (
    EvaluatedReward,
    EvaluationRequest,
    PolicyReport,
    ProgressCallbacks,
)
from replaylake.offline.evaluation.ope.selected_episodes import (
    SelectedEpisodes,
    drop_without_first_step,
    select_episodes,
)

# 95% two-sided intervals, as `ope` has them: their lower ends hold in 97.5 of 100 logs.
DEFAULT_ALPHA: Final = 0.025
# One that trusts the propensities alone, and one that a good model helps where they are thin. The
# plain weighted mean (`ips`, `is`) says the same as the first with a wider interval. Where a policy
# remembers there is the first alone: a model is fitted of a single step of countable actions only.
_OF_ONE_STEP: Final = ("snips", "dr")
_OF_EPISODES: Final = ("wpdis", "dr")
_CHAMPION: Final = "the champion"
_LOG: Final = "the log's mean"
_NOT_FITTED: Final = "not fitted, as the gate refuses without it"


@dataclass(frozen=True)
class EstimatorComparison:
    """What one estimator says: candidate - against, with the interval low .. high.

    Its ends and method are None where it has none, and no_interval says why.
    """

    estimator: str
    candidate: float
    against: float
    difference: float
    low: float | None
    high: float | None
    interval: str | None
    no_interval: str = ""


@dataclass(frozen=True)
class GateResult:
    """What a log says of promoting a candidate; `reasons` say why it does not pass, or why it does.

    champion: None where there was none; the comparison is then with the log's own mean return.
    refused: estimators that have nothing to say, with the reason.
    """

    passed: bool
    reasons: tuple[str, ...]
    candidate: PolicyReport
    champion: PolicyReport | None
    comparisons: tuple[EstimatorComparison, ...]
    refused: Mapping[str, str]
    alpha: float
    margin: float

    @property
    def against(self) -> str:
        """What the candidate is compared with, in words."""
        return _LOG if self.champion is None else _CHAMPION

    def to_record(self) -> dict[str, Any]:
        """Return what a promotion keeps of it, JSON-able: about 1 kB."""
        report, request = self.candidate, self.candidate.request
        return {
            "passed": self.passed,
            "reasons": list(self.reasons),
            **_describe_request(request, self.alpha, self.margin),
            "reward": report.reward.expression,
            "reward_source": report.reward.source,
            "version": report.version,
            "acts": report.policy["acts"],
            "num_episodes": report.num_episodes,
            "num_steps": report.num_steps,
            "candidate": _summarize_report(report),
            "champion": None if self.champion is None else _summarize_report(self.champion),
            "against": self.against,
            "comparisons": [asdict(one) for one in self.comparisons],
            "refused": dict(self.refused),
            "log_mean": report.estimates.log_mean,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the record, and both reports whole, as `ope --json` has them."""
        champion = None if self.champion is None else self.champion.to_json()
        return {**self.to_record(), "reports": [self.candidate.to_json(), champion]}


@dataclass(frozen=True)
class GateNotApplicable:
    """A gate that found nothing to compare: it does not pass, and says why.

    No episodes or one, or two policies that were trained with different rewards.
    """

    reason: str
    request: EvaluationRequest
    alpha: float
    margin: float
    passed: Literal[False] = False

    def to_record(self) -> dict[str, Any]:
        """Return what a promotion against it keeps, JSON-able: what was asked, and the reason."""
        return {
            "passed": False,
            "reasons": [self.reason],
            **_describe_request(self.request, self.alpha, self.margin),
            "comparisons": [],
            "refused": {},
        }

    def to_json(self) -> dict[str, Any]:
        """Return the record: there are no reports."""
        return {**self.to_record(), "reports": []}


def _describe_request(request: EvaluationRequest, alpha: float, margin: float) -> dict[str, Any]:
    """Return what a gate was asked, JSON-able, as every record of one has it."""
    return {
        "dataset": request.dataset,
        "where": request.where,
        "reward": request.reward,
        "gamma": request.discount,
        "ignore_masks": request.ignore_masks,
        "seed": request.seed,
        "alpha": alpha,
        "margin": margin,
    }


def evaluate_gate(
    lake: Lake,
    candidate: PolicyRef,
    champion: PolicyRef | None,
    request: EvaluationRequest,
    *,
    alpha: float = DEFAULT_ALPHA,
    margin: float = 0.0,
    callbacks: ProgressCallbacks | None = None,
) -> GateResult | GateNotApplicable:
    """Compare a candidate with the champion on a log.

    Args:
        lake: where the log and both policies are.
        candidate: who would be promoted.
        champion: who is there now; None: the candidate is compared with the log's own mean.
        request: dataset, episodes, reward, estimators and how both are to act; which policy it
            names does not matter. Without a reward it is the one that both were trained with, and
            where they were trained with different ones the gate does not pass. Without estimators:
            snips or wpdis, and dr; the first alone where a policy remembers and no model can be
            fitted.
        alpha: the chance at which a candidate that is no better may pass, in (0, 0.25].
        margin: by how much it has to be better, in units of the return; below 0: may be worse.
        callbacks: told how far it is.

    Raises: as evaluate_policy, but for EmptyReplayError, which is an answer here;
    ConfigInvalidError for an alpha out of range. Cost: that of two evaluations. No model is fitted
    where the weights alone show that the log does not support one of the policies.
    """
    if not 0 < alpha <= 0.25:
        raise ConfigInvalidError(
            f"gate: alpha: found {alpha:g}, expected more than 0 and at most 0.25; 0.025 is usual."
        )
    request = replace(request, policy=str(candidate), level=1 - 2 * alpha)
    try:
        ours, theirs = _evaluate_both(lake, request, champion, callbacks or ProgressCallbacks())
    except (EmptyReplayError, _DifferentRewards) as error:
        return GateNotApplicable(str(error), request, alpha, margin)
    comparisons, refusals = _compare_reports(ours, theirs)
    reports = [ours.report] if theirs is None else [ours.report, theirs.report]
    against = _LOG if theirs is None else _CHAMPION
    reasons = [
        *_iter_unsupported(reports),
        *_iter_not_better(comparisons, margin, against, refusals),
    ]
    passed = not reasons
    if passed:
        reasons = [_format_better(comparisons, margin, against)]
    return GateResult(
        passed,
        tuple(reasons),
        ours.report,
        None if theirs is None else theirs.report,
        comparisons,
        refusals,
        alpha,
        margin,
    )


class _DifferentRewards(Exception):
    """Candidate and champion were trained with different rewards, and none was asked for."""


def _evaluate_both(
    lake: Lake, request: EvaluationRequest, champion: PolicyRef | None, callbacks: ProgressCallbacks
) -> tuple[PolicyEvaluation, PolicyEvaluation | None]:
    """Evaluate both on the episodes that neither learned from, where there are any."""
    snapshot = lake.snapshot(request.dataset)
    policy = load_evaluated_policy(lake, request, snapshot.spec)
    holdout = request.holdout or policy.training.holdout_of(snapshot.dataset)
    other, reward = None, evaluated_reward(policy, request, snapshot)
    against = reward
    if champion is not None:
        other = load_evaluated_policy(lake, replace(request, policy=str(champion)), snapshot.spec)
        against = evaluated_reward(other, request, snapshot)
    if reward.expression != against.expression:
        raise _DifferentRewards(
            f"{request.policy} {_reward_text(reward)}, {_CHAMPION} {champion} "
            f"{_reward_text(against)}: returns of different rewards cannot be compared. Select one "
            f"reward with `reward`; `reward` {REWARD} is the stored one."
        )
    selection = select_episodes(snapshot, request, reward, holdout, callbacks)
    both = [one for one in (policy, other) if one is not None]
    if any(one.is_stateful for one in both):
        selection = drop_without_first_step(selection)
    if request.estimators is None:
        request = replace(request, estimators=_default_estimators(selection, both))
    if other is None:
        ours = prepare_evaluation(lake, policy, request, selection, callbacks)
        return ours.evaluate(callbacks, without_model=_why_no_model(ours, None)), None
    of_champion = replace(request, policy=str(champion))
    theirs = prepare_evaluation(
        lake, other, of_champion, replace(selection, reward=against), callbacks
    )
    fewer = replace(selection, steps=theirs.steps, left_out=_label_champion_drops(theirs.left_out))
    ours = prepare_evaluation(lake, policy, request, fewer, callbacks)
    if ours.steps.num_episodes < theirs.steps.num_episodes:
        fewer = replace(selection, reward=against, steps=ours.steps, left_out=ours.left_out)
        theirs = prepare_evaluation(lake, other, of_champion, fewer, callbacks, theirs.caveats)
    reason = _why_no_model(ours, theirs)
    return (
        ours.evaluate(callbacks, without_model=reason),
        theirs.evaluate(callbacks, without_model=reason),
    )


def _why_no_model(ours: PreparedEvaluation, theirs: PreparedEvaluation | None) -> str:
    """Return why the gate refuses whatever a model says, which may take minutes to fit, or ""."""
    if ours.find_lack_of_support():
        return f"{_NOT_FITTED}: the log does not support the candidate"
    if theirs is not None and theirs.find_lack_of_support():
        return f"{_NOT_FITTED}: the log does not support {_CHAMPION}"
    return ""


def _reward_text(reward: EvaluatedReward) -> str:
    if reward.training is None:
        return "would be evaluated by the stored reward, as its lineage names none"
    return f"was trained with the reward {reward.training}"


def _default_estimators(
    selection: SelectedEpisodes, both: Sequence[EvaluatedPolicy]
) -> tuple[str, ...]:
    is_one_step = selection.steps.num_steps == selection.steps.num_episodes
    is_listed = isinstance(selection.steps.spec.action_space, Discrete)
    if any(one.is_stateful for one in both) and not (is_one_step and is_listed):
        return _OF_ONE_STEP[:1] if is_one_step else _OF_EPISODES[:1]
    return _OF_ONE_STEP if is_one_step else _OF_EPISODES


def _label_champion_drops(left_out: Mapping[str, int]) -> dict[str, int]:
    """Say whose training set it was, as the candidate's comes beside it."""
    return {reason.replace("the policy's", f"{_CHAMPION}'s"): n for reason, n in left_out.items()}


def _compare_reports(
    ours: PolicyEvaluation, theirs: PolicyEvaluation | None
) -> tuple[tuple[EstimatorComparison, ...], Mapping[str, str]]:
    estimates, request = ours.report.estimates, ours.report.request
    if theirs is None:
        comparisons = [
            EstimatorComparison(
                one.estimator,
                one.value,
                estimates.log_mean,
                one.difference,
                one.difference_low,
                one.difference_high,
                one.difference_interval,
                one.no_interval,
            )
            for one in estimates.estimates
        ]
        return tuple(comparisons), estimates.refused
    differences, refusals = estimate_differences(
        ours.episodes,
        theirs.episodes,
        request.estimators or (),
        level=request.level,
        seed=request.seed,
        clip=request.clip,
    )
    return tuple(EstimatorComparison(*astuple(one)) for one in differences), refusals


def _iter_unsupported(reports: list[PolicyReport]) -> Iterator[str]:
    for who, report in zip(("the candidate", _CHAMPION), reports, strict=False):
        if report.verdict != "supported":
            yield f"{report.verdict} of {who}, {_report_name(report)}: {report.assessment.reason}"


def _iter_not_better(
    comparisons: tuple[EstimatorComparison, ...],
    margin: float,
    against: str,
    refusals: Mapping[str, str],
) -> Iterator[str]:
    if not comparisons:
        why = "; ".join(dict.fromkeys(reason.rstrip(".") for reason in refusals.values()))
        yield f"No estimator can compare it with {against}: {why}."
    else:
        # One that says nothing does not say that the candidate is better.
        for name, reason in refusals.items():
            yield f"{name} cannot compare it with {against}: {reason.rstrip('.')}."
    for one in comparisons:
        if one.low is None:
            yield (
                f"{one.estimator} puts the difference from {against} at {one.difference:.4g}, with "
                f"{one.no_interval}. Use estimators that have an interval."
            )
    # Written so that an interval that is not a number does not pass.
    failing = [
        (one.low, one) for one in comparisons if one.low is not None and not one.low > margin
    ]
    low, worst = min(failing, key=itemgetter(0), default=(math.nan, None))
    if worst is not None:
        yield (
            f"{worst.estimator} puts the difference from {against} at {worst.difference:.4g} "
            f"({low:.4g} to {worst.high:.4g}): its lower end is not above {margin:g}."
        )


def _format_better(
    comparisons: tuple[EstimatorComparison, ...], margin: float, against: str
) -> str:
    low, worst = min(
        ((one.low, one) for one in comparisons if one.low is not None), key=itemgetter(0)
    )
    all_of = "" if len(comparisons) == 1 else f" of {len(comparisons)} estimators the least:"
    return (
        f"Better than {against}:{all_of} {worst.estimator} puts the difference at "
        f"{worst.difference:.4g} ({low:.4g} to {worst.high:.4g}), above {margin:g}."
    )


def _report_name(report: PolicyReport) -> str:
    return f"{report.policy['policy']}:{report.policy['policy_version']}"


def _summarize_report(report: PolicyReport) -> dict[str, Any]:
    return {
        "policy": report.policy["policy"],
        "version": report.policy["policy_version"],
        "verdict": report.verdict,
        "reason": report.assessment.reason,
        "trained_on": report.trained_on,
        "training_reward": report.reward.training,
    }
