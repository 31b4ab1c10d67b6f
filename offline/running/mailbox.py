"""Mailbox: what learners in other processes tell whoever waits for them, and how they failed.

Apart from what the learners do, because Ray imports this module in a process of its own, before any
of them starts: without torch that takes a second, with torch four.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from replaylake.datastore import errors
from replaylake.datastore.errors import ReplayLakeError, TrainingError
from replaylake.offline.running.training.interruption import RunInterrupted


class LearnerLostError(TrainingError):
    """An exchange with another learner, whose process is gone or failed."""


@dataclass(frozen=True)
class LearnerFailure:
    """An error as it crosses processes: by name, as not every one can be pickled."""

    kind: str
    message: str
    details: Mapping[str, Any] | None
    parameter: str | None
    is_lost: bool
    interrupted: tuple[str, int | None] | None = None

    @staticmethod
    def of(error: BaseException) -> LearnerFailure:
        names = [one.__name__ for one in type(error).__mro__]
        kind = next((name for name in names if hasattr(errors, name)), type(error).__name__)
        ended = (error.run_id, error.update) if isinstance(error, RunInterrupted) else None
        details, parameter = getattr(error, "details", None), getattr(error, "parameter", None)
        is_lost = isinstance(error, LearnerLostError)
        return LearnerFailure(kind, str(error), details, parameter, is_lost, ended)

    def error(self, rank: int, size: int) -> BaseException:
        if self.interrupted is not None:
            return RunInterrupted(*self.interrupted)
        kind = getattr(errors, self.kind, None)
        if kind is None:
            return TrainingError(
                f"learner {rank} of {size}: found {self.kind}: {self.message}, expected updates. "
                "Train with one learner for the traceback."
            )
        error: ReplayLakeError = kind(self.message, parameter=self.parameter)
        if self.details is not None:
            vars(error)["details"] = self.details
        return error


@dataclass
class Mailbox:
    """A Ray actor: what the learners tell whoever waits for them, and what that asks of them."""

    _events: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    _failures: dict[int, LearnerFailure] = field(default_factory=dict)
    _is_stopping: bool = False
    _has_leader_ended: bool = False
    _has_started: bool = False

    def record_start(self) -> None:
        """Take that a learner's process runs."""
        self._has_started = True

    def has_started(self) -> bool:
        """Whether there is a learner that can be asked to end."""
        return self._has_started

    def post_event(self, name: str, arguments: tuple[Any, ...]) -> bool:
        """Take a call of the callback of this name; return whether the run is to end."""
        self._events.append((name, arguments))
        return self._is_stopping

    def record_end(self, rank: int, failure: LearnerFailure | None) -> None:
        """Take how a learner ended."""
        self._has_leader_ended |= rank == 0
        if failure is not None:
            self._failures[rank] = failure

    def has_leader_ended(self) -> bool:
        """Whether there is nothing more to come from it."""
        return self._has_leader_ended

    def request_stop(self) -> None:
        """Have the leader save and end."""
        self._is_stopping = True

    def take_events(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Return what was told since the last time."""
        events, self._events = self._events, []
        return events

    def failures(self) -> dict[int, LearnerFailure]:
        """Return what learners failed of, by number."""
        return self._failures
