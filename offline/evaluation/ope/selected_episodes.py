"""Chosen episodes: those of a log that off-policy evaluation is asked of and that can tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.schema import ACTION_FEATURES, PDROP
from replaylake.datastore.errors import EmptyReplayError, QueryRefusedError
from replaylake.datastore.feedback.decisions import DECIDED_BY_CLIENT
from replaylake.datastore.lake.holdout import Holdout
from replaylake.datastore.lake.logged_steps import LoggedSteps, read_logged_steps
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.offline.evaluation.ope.evaluation_request import (
    EvaluatedReward,
    EvaluationRequest,
    ProgressCallbacks,
)
from replaylake.offline.evaluation.ope.probabilities import BEHAVIOR, TARGET


@dataclass(frozen=True, eq=False)
class SelectedEpisodes:
    """The episodes that a question is asked of, as far as they can tell of anything.

    reward: what the rewards of `steps` are. left_out: how many more were selected, by why they do
    not count.
    """

    snapshot: Snapshot
    reward: EvaluatedReward
    holdout: Holdout | None
    steps: LoggedSteps
    left_out: Mapping[str, int]


def select_episodes(
    snapshot: Snapshot,
    request: EvaluationRequest,
    reward: EvaluatedReward,
    holdout: Holdout | None,
    callbacks: ProgressCallbacks,
) -> SelectedEpisodes:
    """Read the episodes that a question is asked of, with `reward`. Raises: as evaluate_policy."""
    callbacks.stage("reading the steps")
    steps, left_out = _drop_unusable(_read(snapshot, request, reward, holdout), request)
    _refuse_uneven_drops(steps)
    return SelectedEpisodes(snapshot, reward, holdout, steps, left_out)


def drop_without_first_step(selection: SelectedEpisodes) -> SelectedEpisodes:
    """Leave out episodes whose first step is not there: a policy that remembers needs it.

    Steps count from 0, or from 1 where no step of the whole snapshot is a 0. Raises:
    EmptyReplayError where no episode is left.
    """
    snapshot, steps = selection.snapshot, selection.steps
    begins = steps.step_numbers[steps.offsets[:-1]]
    if not begins.any():
        return selection
    (first,) = snapshot.sql("SELECT min(first_step) FROM episodes").column(0).to_pylist()
    late = begins > min(1, int(first))
    if not late.any():
        return selection
    if late.all():
        raise EmptyReplayError(
            f"off-policy evaluation of {snapshot.dataset}@{snapshot.version}: found "
            f"{steps.num_episodes:,} episodes that begin at step {begins.min()} or later, expected "
            "some with their first step: a stateful policy is evaluated from there. Widen `where`, "
            "or ingest the earlier steps."
        )
    reason = "without the first step, for a stateful policy"
    left_out = {**selection.left_out, reason: int(late.sum())}
    return replace(selection, steps=steps.select(~late), left_out=left_out)


def _read(
    snapshot: Snapshot,
    request: EvaluationRequest,
    reward: EvaluatedReward,
    holdout: Holdout | None,
) -> LoggedSteps:
    where = request.where
    if holdout is not None:
        holdout.check(snapshot, where)
        where = holdout.within(where, True)
    expressions = {TARGET: request.target_prob, BEHAVIOR: request.behavior_prob}
    columns = {name: sql for name, sql in expressions.items() if sql is not None}
    schema = snapshot.table.schema
    # A log from elsewhere may have a column of this name with another meaning.
    if DECIDED_BY_CLIENT in schema.names and str(schema.field(DECIDED_BY_CLIENT).type) == "bool":
        columns[DECIDED_BY_CLIENT] = f"coalesce({DECIDED_BY_CLIENT}, false)::DOUBLE"
    if {ACTION_FEATURES, PDROP} <= snapshot.spec.extras.keys():
        columns[PDROP] = f"coalesce({PDROP}, 0)"
    expression = None if reward.is_stored else reward.expression
    steps = read_logged_steps(snapshot, where, reward=expression, columns=columns)
    if not steps.num_episodes:
        raise EmptyReplayError(
            f"off-policy evaluation of {snapshot.dataset}@{snapshot.version}: found no episode "
            f"where {where or 'true'}, expected at least two. Widen the condition."
        )
    return steps


def _refuse_uneven_drops(steps: LoggedSteps) -> None:
    """Refuse events of which not the same share was logged: a mean would weight them alike.

    Raises: QueryRefusedError.
    """
    if PDROP not in steps.columns:
        return
    lowest, highest = float(steps.columns[PDROP].min()), float(steps.columns[PDROP].max())
    if highest > lowest:
        raise QueryRefusedError(
            f"{PDROP}: found {lowest!r} to {highest!r} among the selected events, expected one "
            f"value: an event stands for 1 / (1 - {PDROP}) events, and the estimators weight all "
            f"events alike. Evaluate those of one value, with `where` such as 'coalesce({PDROP}, "
            f"0) = {highest!r}'.",
            parameter="where",
        )


def _drop_unusable(
    steps: LoggedSteps, request: EvaluationRequest
) -> tuple[LoggedSteps, dict[str, int]]:
    """Leave out episodes whose return is not known, each counted by its first fault.

    Raises: EmptyReplayError where none is left.
    """
    faults: dict[str, NDArray[np.bool_]] = {}
    if not request.with_incomplete:
        faults["not seen to end"] = ~(steps.terminated | steps.truncated)
    faults["with a step missing"] = steps.has_gaps()
    faults["with an unknown reward"] = steps.any_step(~np.isfinite(steps.rewards))
    keep = np.ones(steps.num_episodes, np.bool_)
    left_out = {}
    for reason, flags in faults.items():
        if num := int((keep & flags).sum()):
            left_out[reason] = num
        keep &= ~flags
    if not keep.any():
        drops = ", ".join(f"{num:,} {reason}" for reason, num in left_out.items())
        raise EmptyReplayError(
            f"off-policy evaluation: found {steps.num_episodes:,} episodes, none usable ({drops}), "
            "expected at least two with an end and all rewards. `incomplete` includes episodes "
            "without an end; `reward` 'coalesce(reward, 0)' counts unknown rewards as 0."
        )
    return steps.select(keep), left_out
