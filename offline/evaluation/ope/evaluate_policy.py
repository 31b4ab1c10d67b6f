"""Evaluate a policy on episodes that others made: from the lake to a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from replaylake.datastore.episodes.spaces import Array, Discrete
from replaylake.datastore.errors import (
    EmptyReplayError,
    SpaceUnsupportedError,
    TrainingError,
)
from replaylake.datastore.feedback.decisions import DECIDED_BY_CLIENT
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.logged_steps import LoggedSteps
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.offline.evaluation.ope.diagnostics import diagnose
from replaylake.offline.evaluation.ope.direct import (
    PredictedValues,
    predict_rewards,
    predict_values,
)
from replaylake.offline.evaluation.ope.estimate import Estimate, Estimates, estimate
from replaylake.offline.evaluation.ope.estimators import ESTIMATORS
from replaylake.offline.evaluation.ope.evaluated_policy import (
    EvaluatedPolicy,
    evaluated_reward,
    load_evaluated_policy,
)
from replaylake.offline.evaluation.ope.evaluation_request import (
    EvaluationRequest,
    PolicyReport,
    ProgressCallbacks,
)
from replaylake.offline.evaluation.ope.logged_episodes import LoggedEpisodes
from replaylake.offline.evaluation.ope.probabilities import (
    BehaviorProbabilities,
    Probabilities,
    behavior_probabilities,
    drop_unknown_target,
    target_probabilities,
)
from replaylake.offline.evaluation.ope.selected_episodes import (
    SelectedEpisodes,
    drop_without_first_step,
    select_episodes,
)
from replaylake.offline.evaluation.ope.training_set import find_training_episodes
from replaylake.offline.evaluation.ope.value_table import has_table
from replaylake.offline.evaluation.ope.verdict import (
    SUPPORTED,
    WEAK,
    Verdict,
    find_lack_of_support,
)
from replaylake.offline.evaluation.ope.verdict import verdict as judge
from replaylake.offline.evaluation.ope.weights import NotEstimableError, importance_weights

_USE_FITTED_VALUES: Final = frozenset(e.name for e in ESTIMATORS.values() if e.uses_model)

_LOGGED_OBSERVATIONS_ONLY: Final = "what the policy does is known at logged observations alone"
_STATEFUL: Final = "the policy remembers, and its value is no function of one observation"
_FITTED_WITHOUT_MEMORY: Final = (
    "The policy remembers, and the log's propensities are fitted to single observations: where who "
    "wrote it remembered too, they are wrong. Log the probabilities of actions."
)
_NO_BOUND: Final = (
    "with gamma 1, values of truncated episodes are unbounded; set `discount` below 1, for example "
    "to 0.99, or request estimators without a model, such as wpdis, by `estimators`"
)
_MASKS_APPLY: Final = (
    "the policy takes only actions that the log's action masks allow; `ignore_masks` evaluates it "
    "without them"
)
_MASKS_IGNORED: Final = "the log's action masks are ignored: the policy may take any action"
# Below this share of a first reward, what comes behind a cut changes no value by much.
_SMALL_SHARE: Final = 0.01
_LIMIT_IGNORED: Final = (
    "dr, wdr: their model also values rewards after the truncation, so it cannot compensate for "
    "wrong propensities; with correct propensities, dr and wdr estimate the logged return"
)
_MODEL_GOES_ON: Final = "for truncated episodes the model is wrong, however well it is fitted"


@dataclass(frozen=True, eq=False)
class PolicyEvaluation:
    """A report, and what it rests on.

    steps: of the episodes that were evaluated; episodes: what is known of those and of the policy.
    caveats: why the verdict is `weak` at best, of what the policy learned from.
    """

    report: PolicyReport
    steps: LoggedSteps
    episodes: LoggedEpisodes
    caveats: tuple[str, ...]


def evaluate_policy(
    lake: Lake, request: EvaluationRequest, callbacks: ProgressCallbacks | None = None
) -> PolicyReport:
    """Evaluate a policy on a log.

    Episodes that were not seen to end, lack a reward or a step are left out and counted, and, where
    the policy remembers, those that lack their beginning. So are those that the policy was trained
    on, unless nothing else is left: then they are evaluated, and the verdict is `not supported`.
    Where behavior probabilities are missing they are fitted. The reward is the question's, else
    that of the policy's training, else the stored one; the report says which. Deterministic on the
    CPU: the same question gives the same answer.

    Raises: NotFoundError, InvalidNameError, QueryRefusedError, QueryError, ConfigInvalidError;
    EmptyReplayError where no episode is left, or one; SchemaMismatchError for a policy of other
    spaces, or a holdout by a time that the episodes do not have; SpaceUnsupportedError for
    observations or actions that the policy's head does not take; ShardCorruptError.
    Memory: the snapshot's steps, and the probabilities of all Discrete actions of those evaluated.
    """
    callbacks = callbacks or ProgressCallbacks()
    snapshot = lake.snapshot(request.dataset)
    policy = load_evaluated_policy(lake, request, snapshot.spec)
    holdout = request.holdout or policy.training.holdout_of(snapshot.dataset)
    reward = evaluated_reward(policy, request, snapshot)
    selection = select_episodes(snapshot, request, reward, holdout, callbacks)
    if policy.is_stateful:
        selection = drop_without_first_step(selection)
    return (
        prepare_evaluation(lake, policy, request, selection, callbacks).evaluate(callbacks).report
    )


@dataclass(frozen=True, eq=False)
class PreparedEvaluation:
    """All that is known of a policy on a log before a model is fitted.

    left_out: what `steps` lack, with the reason. caveats: as for PolicyEvaluation. trained_on: how
    many of the episodes the policy learned from.
    """

    policy: EvaluatedPolicy
    request: EvaluationRequest
    selection: SelectedEpisodes
    steps: LoggedSteps
    target: Probabilities
    behavior: BehaviorProbabilities
    left_out: Mapping[str, int]
    notes: tuple[str, ...]
    caveats: tuple[str, ...]
    trained_on: int

    def find_lack_of_support(self) -> str:
        """Return why no estimate can be supported, as the weights alone show, else ""."""
        weighted = _make_logged_episodes(
            self.steps, self.request, self.target, self.behavior, None, ""
        )
        return find_lack_of_support(diagnose(weighted), trained_on=self.trained_on)

    def evaluate(
        self, callbacks: ProgressCallbacks, *, without_model: str = ""
    ) -> PolicyEvaluation:
        """Fit a model where an estimator needs one, and estimate.

        without_model: why none is to be fitted, else "".
        """
        steps, request, notes = self.steps, self.request, self.notes
        values, no_model = None, without_model
        if not without_model:
            acting = _without_masks(steps, request)
            values, no_model = _values(self.policy, acting, self.target, request, callbacks)
        episodes = _make_logged_episodes(
            steps, request, self.target, self.behavior, values, no_model
        )
        callbacks.stage("estimating")
        cut_off = _CutOff(steps, request.discount)
        estimates = _estimates(episodes, request, values, cut_off)
        if not episodes.is_one_step:
            # What follows a single decision is in no estimate: its model is one of the reward.
            notes = (*notes, *cut_off.notes(_names(estimates)))
        without = [one for one in estimates.estimates if one.no_interval]
        if without:
            names = ", ".join(one.estimator for one in without)
            notes = (*notes, f"{names}: {without[0].no_interval}")
        diagnostics = diagnose(episodes)
        verdict = judge(estimates, diagnostics, trained_on=self.trained_on)
        if self.caveats and verdict.verdict == SUPPORTED:
            verdict = Verdict(WEAK, self.caveats[0])
        selection, snapshot = self.selection, self.selection.snapshot
        report = PolicyReport(
            dataset=snapshot.dataset,
            version=snapshot.version,
            policy=self.policy.reference,
            request=request,
            reward=selection.reward,
            training_discount=self.policy.discount,
            holdout=None if selection.holdout is None else selection.holdout.to_json(),
            num_episodes=steps.num_episodes,
            num_steps=steps.num_steps,
            left_out=dict(self.left_out),
            trained_on=self.trained_on,
            propensities=self.behavior.about,
            model=f"none: {no_model}" if values is None else values.model,
            notes=notes,
            estimates=estimates,
            diagnostics=diagnostics,
            assessment=verdict,
            weights=_weights(episodes),
            # It is of undiscounted returns in the environment's own reward.
            score_reference=snapshot.spec.score_reference
            if selection.reward.is_stored and request.discount == 1
            else None,
        )
        return PolicyEvaluation(report, steps, episodes, self.caveats)


def prepare_evaluation(
    lake: Lake,
    policy: EvaluatedPolicy,
    request: EvaluationRequest,
    selection: SelectedEpisodes,
    callbacks: ProgressCallbacks,
    doubts: Sequence[str] = (),
) -> PreparedEvaluation:
    """Compute probabilities and weights of a policy on episodes that were read.

    selection: of a policy that remembers each with its first step (drop_without_first_step).
    doubts: those of an evaluation on more episodes, from which these were taken.
    Raises: as evaluate_policy.
    """
    snapshot, steps, left_out = selection.snapshot, selection.steps, dict(selection.left_out)
    callbacks.stage("looking up what the policy was trained on")
    training = find_training_episodes(lake, policy.training, snapshot, steps)
    is_trained_on, notes = training.episodes, policy.notes
    is_seen = bool(is_trained_on.all())
    doubts = list(doubts)
    if training.unknown:
        notes = (*notes, training.unknown)
        if not request.unseen:
            doubts.append(_unknown_training_note(training.unknown))
    if is_trained_on.any() and not is_seen:
        steps = steps.select(~is_trained_on)
        left_out["in the policy's training set"] = int(is_trained_on.sum())
        doubts += _list_selection_bias_notes(policy)
    callbacks.stage("asking the policy")
    is_masked = steps.action_masks is not None and not steps.action_masks.all()
    if policy.target is not None and is_masked:
        notes = (*notes, _MASKS_IGNORED if request.ignore_masks else _MASKS_APPLY)
    target = target_probabilities(policy, _without_masks(steps, request))
    steps, target = drop_unknown_target(steps, target, left_out)
    _check_enough(snapshot, steps, left_out)
    behavior = behavior_probabilities(steps, target, request, callbacks)
    if policy.is_stateful and behavior.is_fitted and steps.num_steps > steps.num_episodes:
        doubts.append(_FITTED_WITHOUT_MEMORY)
    notes = (*notes, *_list_client_notes(steps))
    trained_on = steps.num_episodes if is_seen else 0
    return PreparedEvaluation(
        policy=policy,
        request=request,
        selection=selection,
        steps=steps,
        target=target,
        behavior=behavior,
        left_out=left_out,
        notes=notes,
        caveats=tuple(doubts),
        trained_on=trained_on,
    )


def _list_client_notes(steps: LoggedSteps) -> list[str]:
    """Report how many steps clients decided themselves, by a fallback while no server answered.

    They are included: each has the propensity of the policy that took it, which is all that
    importance weights need. Excluding them would select the times at which a server answered.
    """
    flags = steps.columns.get(DECIDED_BY_CLIENT)
    if flags is None or not flags.any():
        return []
    by_client = flags > 0
    num_episodes = int(steps.any_step(by_client).sum())
    return [
        f"clients decided {int(by_client.sum()):,} of {steps.num_steps:,} steps themselves, in "
        f"{num_episodes:,} of {steps.num_episodes:,} episodes ({DECIDED_BY_CLIENT}): they count, "
        "with the propensities that the clients logged"
    ]


def _without_masks(steps: LoggedSteps, request: EvaluationRequest) -> LoggedSteps:
    """Return the steps as the policy is to see them; who wrote the log had its masks."""
    return replace(steps, action_masks=None) if request.ignore_masks else steps


def _check_enough(snapshot: Snapshot, steps: LoggedSteps, left_out: Mapping[str, int]) -> None:
    """Refuse a single episode, with how many were left out. Raises: EmptyReplayError."""
    num = steps.num_distinct_episodes
    if num > 1:
        return
    drops = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
    drops = f" (left out: {drops})" if drops else ""
    remedy = "Evaluate more episodes."
    if any("training set" in reason for reason in left_out):
        remedy = (
            "Train with `holdout`, which holds out a share of the episodes for this, or evaluate "
            "on episodes that were added later."
        )
    raise EmptyReplayError(
        f"off-policy evaluation of {snapshot.dataset}@{snapshot.version}: found {num} episode"
        f"{drops}, expected 2 or more: the error of a mean cannot be estimated from a single "
        f"return. {remedy}"
    )


def _unknown_training_note(unknown: str) -> str:
    return (
        f"It is not known whether the policy learned from the evaluated episodes ({unknown}): "
        "it may have memorized them. `unseen` declares that it did not."
    )


def _list_selection_bias_notes(policy: EvaluatedPolicy) -> list[str]:
    """Say why the episodes that the policy was not trained on may not be like the others."""
    return [
        f"The policy was trained on the episodes where {where}; the remaining episodes "
        "were selected by it too, and are representative only if the condition has nothing to do "
        "with outcomes. Train with `holdout`."
        for where in policy.training.choices()
    ]


def _values(
    policy: EvaluatedPolicy,
    steps: LoggedSteps,
    target: Probabilities,
    request: EvaluationRequest,
    callbacks: ProgressCallbacks,
) -> tuple[PredictedValues | None, str]:
    """Fit a model of values where an estimator needs one; returns it, and why there is none."""
    names = request.estimators
    if names is not None and not _USE_FITTED_VALUES & set(names):
        return None, "no estimator that was asked for uses one"
    actor = target.distribution if policy.target is None or policy.is_stateful else policy.target
    if actor is None and policy.is_stateful:
        return None, _STATEFUL
    if actor is None:
        return None, "of the policy only the probability of the logged action is known"
    options: dict[str, Any] = {"seed": request.seed, "on_progress": callbacks.progress}
    is_listed = has_table(steps.spec, request.fqe)
    try:
        if steps.num_steps == steps.num_episodes:
            callbacks.stage("fitting a model of the reward")
            model = predict_rewards(
                policy.cast_observations(steps), actor, config=request.reward_model, **options
            )
        elif policy.target is None:
            return None, _LOGGED_OBSERVATIONS_ONLY
        elif policy.is_stateful:
            return None, _STATEFUL
        elif _CutOff(steps, request.discount).is_whole and not is_listed:
            return None, _NO_BOUND
        else:
            callbacks.stage("fitted Q evaluation")
            model = predict_values(
                policy.cast_observations(steps),
                policy.target,
                request.discount,
                config=request.fqe,
                **options,
            )
    except (SpaceUnsupportedError, TrainingError, EmptyReplayError) as error:
        return None, str(error)
    return model, ""


class _CutOff:
    """Episodes that did not end by themselves: by a time limit, mostly.

    What is logged of them is all that importance sampling values, and doubly robust estimators
    with it: whatever their model says, its expectations cancel step by step up to the last one. A
    model fitted by bootstrapping does not know the limit, which observations do not tell: it values
    a world that goes on.
    """

    def __init__(self, steps: LoggedSteps, discount: float) -> None:
        cut = ~steps.terminated
        self._num, self._num_episodes, self._discount = int(cut.sum()), len(cut), discount
        # How much of a reward behind the cut counts, on average over all episodes.
        self._share = float((discount ** steps.lengths[cut]).sum()) / len(cut)

    @property
    def is_whole(self) -> bool:
        """Whether what would have come after counts in full."""
        return self._num > 0 and self._discount == 1

    def why_no_fqe(self) -> str:
        return (
            f"{self._number}; with gamma 1 fitted Q evaluation estimates the return without that "
            "limit, not the logged return. dr and wpdis estimate the logged return; a `discount` "
            "below 1, such as 0.99, bounds the rewards after the truncation"
        )

    def notes(self, names: set[str]) -> Iterator[str]:
        """Yield what a reader of these estimators has to know."""
        if self._share < _SMALL_SHARE:
            return
        if "fqe" in names:
            yield (
                f"fqe: {self._number}; averaged over all episodes, a reward after the truncation "
                f"has {self._share:.2g} of the weight of a first reward. fqe estimates the value "
                "without the limit, importance sampling the logged return"
            )
        if {"dr", "wdr"} & names:
            yield _LIMIT_IGNORED

    def qualify(self, one: Estimate) -> Estimate:
        """Return the estimate with what is assumed where episodes were cut off."""
        if self._share < _SMALL_SHARE or one.estimator not in ("dr", "wdr"):
            return one
        return replace(one, assumptions=f"{one.assumptions}; {_MODEL_GOES_ON}")

    @property
    def _number(self) -> str:
        return f"{self._num:,} of {self._num_episodes:,} episodes were truncated"


def _make_logged_episodes(
    steps: LoggedSteps,
    request: EvaluationRequest,
    target: Probabilities,
    behavior: BehaviorProbabilities,
    values: PredictedValues | None,
    no_model: str,
) -> LoggedEpisodes:
    is_discrete = isinstance(steps.spec.action_space, Discrete)
    return LoggedEpisodes(
        offsets=steps.offsets,
        rewards=steps.rewards,
        discount=request.discount,
        behavior_probs=behavior.logged,
        target_probs=target.logged,
        q_logged=None if values is None else values.q_logged,
        v_target=None if values is None else values.v_target,
        actions=steps.action_numbers if is_discrete else None,
        behavior_distribution=behavior.distribution,
        target_distribution=target.distribution,
        clusters=steps.number_joint_episodes(),
        behavior_fitted=behavior.is_fitted,
        no_density=target.unknown_reason,
        no_model=no_model,
    )


def _estimates(
    episodes: LoggedEpisodes,
    request: EvaluationRequest,
    values: PredictedValues | None,
    cut_off: _CutOff,
) -> Estimates:
    """Estimate, but for the direct method where its model does not value the policy on this log.

    It would say the log's mean of any policy, or values a world without the log's time limit.
    Doubly robust estimators lose nothing by such a model.
    """
    result = estimate(
        episodes, request.estimators, level=request.level, seed=request.seed, clip=request.clip
    )
    refusals = {}
    if values is not None and values.is_empty and "dm" in _names(result):
        refusals["dm"] = "its model found nothing that tells one action from another"
    if not episodes.is_one_step and cut_off.is_whole and "fqe" in _names(result):
        refusals["fqe"] = cut_off.why_no_fqe()
    estimates = [one for one in result.estimates if one.estimator not in refusals]
    if not episodes.is_one_step:
        estimates = [cut_off.qualify(one) for one in estimates]
    return replace(result, estimates=tuple(estimates), refused={**result.refused, **refusals})


def _names(estimates: Estimates) -> set[str]:
    return {one.estimator for one in estimates.estimates}


def _weights(episodes: LoggedEpisodes) -> Array | None:
    try:
        return importance_weights(episodes).final
    except NotEstimableError:
        return None
