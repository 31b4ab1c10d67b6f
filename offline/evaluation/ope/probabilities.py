"""What the behavior policy and the target policy gave to each logged action."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import EmptyReplayError, QueryRefusedError, SpaceUnsupportedError
from replaylake.datastore.lake.logged_steps import LoggedSteps
from replaylake.offline.evaluation.ope.behavior import fit_behavior
from replaylake.offline.evaluation.ope.evaluated_policy import EvaluatedPolicy
from replaylake.offline.evaluation.ope.evaluation_request import (
    EvaluationRequest,
    ProgressCallbacks,
)

# What `read_logged_steps` calls what the question's SQL gave.
TARGET: Final = "target-prob"
BEHAVIOR: Final = "behavior-prob"
# A softmax in float32 may pass 1 by this.
_SLACK: Final = 1e-6


@dataclass(frozen=True, eq=False)
class Probabilities:
    """Those of logged actions, float64 [M], and of all Discrete ones [M, A]; None: unknown.

    The distribution is float32 if a policy without a state computed it, because it is the largest
    array. A logged action's probability is NaN if only that one is unknown. unknown_reason: why
    none is known.
    """

    logged: NDArray[np.float64] | None
    distribution: NDArray[np.floating[Any]] | None = None
    unknown_reason: str = ""


@dataclass(frozen=True, eq=False)
class BehaviorProbabilities(Probabilities):
    """Those of the policy that wrote the log. about: where they are from, as a report says it."""

    about: Mapping[str, Any] = field(default_factory=dict)
    is_fitted: bool = False


def target_probabilities(policy: EvaluatedPolicy, steps: LoggedSteps) -> Probabilities:
    """Ask the target policy, or take what SQL gave.

    One that remembers is followed along each episode, whose first step has to be there (see
    chosen_episodes.drop_without_first_step). Raises: QueryRefusedError, SpaceUnsupportedError.
    """
    if policy.target is None:
        return _from_sql(steps, TARGET)
    target, masks = policy.target, steps.action_masks
    observations = policy.get_observations(steps)
    if target.is_discrete:
        if target.is_stateful:
            along = target.action_probs_along(steps.offsets, observations, masks)
            return Probabilities(_pick_logged(steps, along), along)
        return Probabilities(*target.logged_action_probs(observations, steps.action_numbers, masks))
    if target.no_density:
        return Probabilities(None, None, target.no_density)
    if target.is_stateful:
        log_probs = target.log_probs_along(steps.offsets, observations, steps.actions, masks)
        return Probabilities(np.exp(log_probs))
    return Probabilities(np.exp(target.log_probs(observations, steps.actions, masks)))


def _from_sql(steps: LoggedSteps, name: str) -> Probabilities:
    """Return what an expression gave: a probability a step, or a list of all actions'."""
    values, parameter = steps.columns[name], name.replace("-", "_")
    space = steps.spec.action_space
    limit = np.inf if isinstance(space, Box) else 1 + _SLACK
    wrong = values[(values < 0) | (values > limit) | np.isinf(values)]
    if len(wrong):
        kind = "densities of 0 or more" if isinstance(space, Box) else "probabilities from 0 to 1"
        raise QueryRefusedError(
            f"`{parameter}`: found {wrong[0]:g} among {values.size} values, expected {kind}. "
            "Correct the expression; it gives NULL where a probability is unknown.",
            parameter=parameter,
        )
    if values.ndim == 1:
        return Probabilities(values)
    if not isinstance(space, Discrete) or values.shape[1] != space.n:
        text = f"{space.n} actions" if isinstance(space, Discrete) else "other actions"
        raise QueryRefusedError(
            f"`{parameter}`: found lists of {values.shape[1]} numbers, but the dataset has "
            f"{text}, expected a probability for each. Give only the probability of the logged "
            "action.",
            parameter=parameter,
        )
    return Probabilities(_pick_logged(steps, values), values)


def _pick_logged(steps: LoggedSteps, every: NDArray[np.float64]) -> NDArray[np.float64]:
    probs: NDArray[np.float64] = every[np.arange(len(every)), steps.action_numbers]
    return probs


def drop_unknown_target(
    steps: LoggedSteps, target: Probabilities, left_out: dict[str, int]
) -> tuple[LoggedSteps, Probabilities]:
    """Leave out episodes with an action whose probability under the policy is not known.

    Where that is each of them, a continuous policy goes without weights. Raises: EmptyReplayError
    where SQL said nothing.
    """
    if target.logged is None:
        return steps, target
    unknown = steps.any_step(np.isnan(target.logged))
    if not unknown.any():
        return steps, target
    if unknown.all() and TARGET in steps.columns:
        raise EmptyReplayError(
            f"off-policy evaluation: in each of {steps.num_episodes:,} episodes, `target_prob` is "
            "NULL for at least one action, expected a probability in every row. Correct "
            "`target_prob`."
        )
    if unknown.all():
        why = "each episode has an action on a bound, where a clipped gaussian has no density"
        return steps, Probabilities(None, None, why)
    left_out["with an action of unknown target probability"] = int(unknown.sum())
    rows = np.repeat(~unknown, steps.lengths)
    every = None if target.distribution is None else target.distribution[rows]
    return steps.select(~unknown), Probabilities(target.logged[rows], every)


def behavior_probabilities(
    steps: LoggedSteps,
    target: Probabilities,
    request: EvaluationRequest,
    callbacks: ProgressCallbacks,
) -> BehaviorProbabilities:
    """Return what the log says of its own probabilities, fitted where it says nothing."""
    source = "logged"
    if BEHAVIOR in steps.columns:
        from_sql = _from_sql(steps, BEHAVIOR)
        logged, every, source = from_sql.logged, from_sql.distribution, "given in SQL"
        assert logged is not None
    else:
        logged, every = np.exp(steps.behavior_log_probs), None
    unknown = np.isnan(logged)
    about: dict[str, Any] = {"source": source, "fitted_steps": 0}
    if target.logged is None:
        # No weight can be made, with or without them.
        if unknown.any():
            about |= _describe_unfitted(source, unknown)
            return BehaviorProbabilities(None, about=about)
        return BehaviorProbabilities(logged, every, about=about)
    if not unknown.any():
        return BehaviorProbabilities(logged, every, about=about)
    callbacks.stage("fitting the behavior policy")
    try:
        fitted = fit_behavior(
            steps, request.behavior, seed=request.seed, on_progress=callbacks.progress
        )
    except SpaceUnsupportedError as error:
        return BehaviorProbabilities(None, about={**about, "source": "unknown", "why": str(error)})
    is_all = bool(unknown.all())
    about = {
        "source": "fitted" if is_all else f"{source}, and fitted where missing",
        "fitted_steps": int(unknown.sum()),
        **fitted.to_json(),
    }
    return BehaviorProbabilities(
        np.where(unknown, fitted.probs, logged),
        fitted.distribution if is_all else None,
        about=about,
        is_fitted=True,
    )


def _describe_unfitted(source: str, unknown: NDArray[np.bool_]) -> dict[str, str]:
    why = "not fitted, because the policy gives logged actions no probability to compare with"
    if unknown.all():
        return {"source": "unknown", "why": why}
    return {"source": f"{source} in {1 - unknown.mean():.1%} of the steps", "why": why}
