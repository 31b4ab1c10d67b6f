"""Promotion through a gate: evaluates it, saves its report, and moves the alias if it passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from replaylake.datastore.errors import StorageError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.policies.aliases import Move
from replaylake.datastore.lake.policies.registry import PolicyRef
from replaylake.offline.evaluation.ope.evaluation_request import (
    EvaluationRequest,
    ProgressCallbacks,
)
from replaylake.offline.evaluation.ope.promotion_gate import (
    DEFAULT_ALPHA,
    GateNotApplicable,
    GateResult,
    evaluate_gate,
)
from replaylake.offline.evaluation.task_sets.gate import (
    TaskGateRequest,
    TaskGateResult,
    evaluate_task_gate,
)

_CHAMPION: Final = "champion"


@dataclass(frozen=True)
class GatedPromotion:
    """What became of a promotion.

    move: None if the gate refused. evaluation_id: that of the saved report; None if the lake could
    not be written, and then `unsaved` says why.
    """

    candidate: PolicyRef
    alias: str
    gate: GateResult | GateNotApplicable | TaskGateResult
    move: Move | None
    evaluation_id: str | None
    unsaved: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as `promote --json` prints it."""
        return {
            "promoted": self.move is not None,
            "policy": self.candidate.name,
            "version": self.candidate.version,
            "alias": self.alias,
            "move": None if self.move is None else self.move.to_json(),
            "gate": self.gate.to_json(),
            "evaluation_id": self.evaluation_id,
        }


def promote_through_gate(
    lake: Lake,
    candidate: PolicyRef,
    alias: str,
    request: EvaluationRequest | TaskGateRequest,
    *,
    alpha: float = DEFAULT_ALPHA,
    margin: float = 0.0,
    force: bool = False,
    by: str | None = None,
    note: str | None = None,
    callbacks: ProgressCallbacks | None = None,
) -> GatedPromotion:
    """Point an alias at a version if the gate finds it better than the champion.

    The gate's report is saved, whether it passes or refuses. A move is recorded with it.

    Args:
        lake: the lake.
        candidate: the version.
        alias: the alias to move.
        request: as that of `evaluate_gate`, which evaluates off policy; or that of
            `evaluate_task_gate`, which compares stored samples of tasks.
        alpha: as that of `evaluate_gate`.
        margin: as that of `evaluate_gate`.
        force: move the alias although the gate refuses, and record that.
        by: who promotes.
        note: why, for the record of the move.
        callbacks: told how far the gate is. What they raise ends it, and the alias stays.

    Raises: as evaluate_gate or evaluate_task_gate; CommitConflictError if somebody moved the alias
    or the champion while the gate was evaluated; StorageError if the move cannot be recorded. Cost:
    that of the gate.
    """
    callbacks = callbacks or ProgressCallbacks()
    registry = lake.registry
    before = registry.alias_version(candidate.name, alias)
    champion = registry.alias_version(candidate.name, _CHAMPION)
    against = None if champion is None else registry.resolve(f"{candidate.name}:{champion}")
    gate: GateResult | GateNotApplicable | TaskGateResult
    if isinstance(request, TaskGateRequest):
        callbacks.stage("reading the samples")
        gate = evaluate_task_gate(lake, candidate, against, request, alpha=alpha, margin=margin)
    else:
        gate = evaluate_gate(
            lake, candidate, against, request, alpha=alpha, margin=margin, callbacks=callbacks
        )
    # The last moment at which a caller can prevent the move.
    callbacks.stage("saving the report")
    evaluation_id, unsaved = None, None
    report = {**gate.to_json(), "alias": alias}
    try:
        evaluation_id = registry.evaluations.save(
            "gate",
            report,
            policy=candidate.name,
            policy_version=candidate.version,
            dataset=request.dataset.partition("@")[0],
            dataset_version=report.get("version"),
            verdict="passed" if gate.passed else "refused",
            by=by,
        )
    except StorageError as error:
        unsaved = str(error)
    move = None
    if gate.passed or force:
        move = registry.aliases.move(
            candidate.name,
            alias,
            candidate.version,
            kind="promote",
            expected=before or 0,
            # What the gate compared with is the champion still.
            unmoved={_CHAMPION: champion},
            by=by,
            note=note,
            forced=not gate.passed,
            gate=gate.to_record(),
        )
    return GatedPromotion(candidate, alias, gate, move, evaluation_id, unsaved)
