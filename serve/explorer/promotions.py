"""Promotions: aliases that are moved through the gate, one at a time, and what became of each.

A gate takes seconds to minutes, so it is evaluated in a thread, and says how far it is. How to
evaluate it is passed in: serve imports no code that evaluates policies.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from replaylake.datastore.errors import CommitConflictError, ReplayLakeError
from replaylake.datastore.lake.lake import Lake

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromotionRequest:
    """What a reader asks for: the arguments of the command `promote`, by its names.

    estimators: empty for those that the gate takes by default. holdout: the share of the episodes
    to evaluate on; None for those that training held out.
    """

    policy: str
    version: int
    alias: str
    dataset: str
    by: str
    note: str | None = None
    where: str | None = None
    explore: str | None = None
    estimators: tuple[str, ...] = ()
    holdout: float | None = None
    gamma: float = 1.0
    alpha: float = 0.025
    margin: float = 0.0
    ignore_masks: bool = False
    unseen: bool = False


# Evaluates the gate, saves its report, moves the alias if it passes, and returns what `promote
# --json` prints. It calls the function with each stage of its work. Raises: ReplayLakeError.
Promote = Callable[[Lake, PromotionRequest, Callable[[str], None]], Mapping[str, Any]]


@dataclass
class Promotion:
    """A promotion that was asked for. result: None while it runs and where it failed with `error`.

    stage: what it does now.
    """

    request: PromotionRequest
    started_at: datetime
    stage: str = ""
    result: Mapping[str, Any] | None = None
    error: str | None = None

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
        }


class Promotions:
    """The promotions of one explorer, one at a time. Safe from several threads."""

    def __init__(self, lake: Lake, promote: Promote) -> None:
        self._lake = lake
        self._promote = promote
        self._lock = threading.Lock()
        # The last of each policy.
        self._known: dict[str, Promotion] = {}

    def find(self, policy: str) -> Promotion | None:
        """Return the last promotion of a policy; None if this explorer had none."""
        with self._lock:
            return self._known.get(policy)

    def find_running(self) -> Promotion | None:
        """Return the promotion that is running now."""
        with self._lock:
            return next((one for one in self._known.values() if one.is_running), None)

    def start(self, request: PromotionRequest) -> None:
        """Start a promotion in a thread. Raises: CommitConflictError while another one runs."""
        with self._lock:
            for one in self._known.values():
                if one.is_running:
                    raise CommitConflictError(
                        f"promotion: found the gate of {one.request.policy}:{one.request.version} "
                        f"running, asked for by {one.request.by}, expected none: one is evaluated "
                        "at a time. Wait until it has ended."
                    )
            promotion = Promotion(request, datetime.now(UTC))
            self._known[request.policy] = promotion
        threading.Thread(target=self._run, args=(promotion,), daemon=True).start()

    def _run(self, promotion: Promotion) -> None:
        def note_stage(stage: str) -> None:
            promotion.stage = stage

        try:
            promotion.result = self._promote(self._lake, promotion.request, note_stage)
        except ReplayLakeError as error:
            promotion.error = str(error)
        except Exception:
            number = secrets.token_hex(4)
            _logger.exception("error %s in a promotion", number)
            promotion.error = f"a fault in ReplayLake, number {number} in the explorer's log"
