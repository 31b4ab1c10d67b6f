"""Promotions: aliases that are moved through the gate, one at a time, and the result of each.

A gate takes seconds to minutes, so it is evaluated in a thread that reports its stage and can be
cancelled. How to evaluate it is passed in: serve imports no code that evaluates policies. The
thread is started with the explorer, before that lowers its priority: on Linux, a thread has the
priority of the one that started it at that moment, and a gate that a person waits for takes as long
as one of the command `promote`, also beside a trainer.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from replaylake.datastore.errors import CommitConflictError, NotFoundError, ReplayLakeError
from replaylake.datastore.lake.lake import Lake

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromotionRequest:
    """What a reader asks for: the arguments of the command `promote`, by its names.

    It has no SQL: the gate would run it in this process, without the limits of the sandbox.
    estimators: empty for those that the gate takes by default. holdout: the share of the episodes
    to evaluate on; None for those that training held out.
    """

    policy: str
    version: int
    alias: str
    dataset: str
    by: str
    note: str | None = None
    explore: str | None = None
    estimators: tuple[str, ...] = ()
    holdout: float | None = None
    gamma: float = 1.0
    alpha: float = 0.025
    margin: float = 0.0
    ignore_masks: bool = False
    unseen: bool = False


# Evaluates the gate, saves its report, moves the alias if it passes, and returns what `promote
# --json` prints. It calls the function with each stage of its work, and with None in between; what
# that raises ends it, and no alias moves then. Raises: ReplayLakeError.
Promote = Callable[[Lake, PromotionRequest, Callable[[str | None], None]], Mapping[str, Any]]


class _CancelledError(Exception):
    """Ends a promotion in its thread; no ReplayLakeError, some of which are results of a gate."""


@dataclass(frozen=True)
class Promotion:
    """The state of a promotion at one moment.

    stage: what it does now. result: None while it runs and where it failed with `error`.
    cancelled_by: who asked for its end, which comes with the next stage.
    """

    request: PromotionRequest
    started_at: datetime
    stage: str = ""
    result: Mapping[str, Any] | None = None
    error: str | None = None
    cancelled_by: str | None = None

    @property
    def is_running(self) -> bool:
        return self.result is None and self.error is None

    def to_json(self) -> dict[str, Any]:
        """Return it without the gate's report, which is saved in the lake."""
        result = self.result or {}
        return {
            "request": asdict(self.request),
            "started_at": self.started_at,
            "is_running": self.is_running,
            "stage": self.stage,
            "promoted": result.get("promoted"),
            "reasons": result["gate"]["reasons"] if result else [],
            "evaluation_id": result.get("evaluation_id"),
            "error": self.error,
            "cancelled_by": self.cancelled_by,
        }


class Promotions:
    """The promotions of one explorer, one at a time. Safe from several threads."""

    def __init__(self, lake: Lake, promote: Promote) -> None:
        self._lake = lake
        self._promote = promote
        self._lock = threading.Lock()
        # The last of each policy.
        self._known: dict[str, Promotion] = {}
        self._requests: queue.SimpleQueue[PromotionRequest] = queue.SimpleQueue()
        threading.Thread(target=self._run_all, name="promotions", daemon=True).start()

    def find(self, policy: str) -> tuple[Promotion | None, Promotion | None]:
        """Return the last promotion of a policy, and the one that is running, both of one moment.

        The former is None if this explorer had none.
        """
        with self._lock:
            return self._known.get(policy), self._find_running()

    def start(self, request: PromotionRequest) -> None:
        """Start a promotion. Raises: CommitConflictError while another one runs."""
        with self._lock:
            one = self._find_running()
            if one is not None:
                raise CommitConflictError(
                    f"promotion: found the gate of {one.request.policy}:{one.request.version} "
                    f"running, asked for by {one.request.by}, expected none: one is evaluated "
                    "at a time. Wait until it has ended, or cancel it on its policy's page."
                )
            self._known[request.policy] = Promotion(request, datetime.now(UTC))
        self._requests.put(request)

    def cancel(self, policy: str, by: str) -> None:
        """End the promotion of a policy at the next stage of its gate, so that no alias moves.

        Where the gate has passed already, the alias moves nevertheless.
        Raises: NotFoundError if none of this policy is running.
        """
        with self._lock:
            promotion = self._known.get(policy)
            if promotion is None or not promotion.is_running:
                raise NotFoundError(
                    f"promotion of {policy}: found none that is running. It has ended already: "
                    "read the policy's page again."
                )
            self._known[policy] = replace(promotion, cancelled_by=by)

    def _find_running(self) -> Promotion | None:
        return next((one for one in self._known.values() if one.is_running), None)

    def _update(self, policy: str, **changes: Any) -> None:
        with self._lock:
            self._known[policy] = replace(self._known[policy], **changes)

    def _run_all(self) -> None:
        while True:
            self._run(self._requests.get())

    def _run(self, request: PromotionRequest) -> None:
        def note_stage(stage: str | None) -> None:
            with self._lock:
                promotion = self._known[request.policy]
                if promotion.cancelled_by is not None:
                    raise _CancelledError(promotion.cancelled_by)
                if stage is not None:
                    self._known[request.policy] = replace(promotion, stage=stage)

        try:
            changes: dict[str, Any] = {"result": self._promote(self._lake, request, note_stage)}
        except _CancelledError as error:
            changes = {"error": f"cancelled by {error}"}
        except ReplayLakeError as error:
            changes = {"error": str(error)}
        except (Exception, SystemExit):  # what would end the thread ends this gate alone
            number = secrets.token_hex(4)
            _logger.exception("error %s in a promotion", number)
            changes = {"error": f"a fault in ReplayLake, number {number} in the explorer's log"}
        self._update(request.policy, **changes)
