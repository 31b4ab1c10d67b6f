"""Reported outcomes into the lake: written before they are acknowledged, applied soon after.

They are rewards and ends of stored steps, which are changed in a thread beside the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import orjson
from starlette.concurrency import run_in_threadpool

from replaylake.datastore.episodes.episode import MAX_STEP
from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.feedback.call_outcomes import (
    OutcomeResult,
    apply_outcomes,
    ensure_outcomes_table,
)
from replaylake.datastore.feedback.decisions import LAST, SUM, rewards_encoder
from replaylake.datastore.feedback.journal import Journal, JournalConfig
from replaylake.datastore.feedback.reports import MAX_REWARD
from replaylake.datastore.lake.dataset import Dataset
from replaylake.serve.messages import RequestRefusedError
from replaylake.serve.recording.decision_log import Clock

_FIELDS: Final = ("step", "reward", "terminated", "truncated", "mode", "feedback_id")
# By what a report names its step or episode, and the column of its row that holds it.
COMPLETION_ID: Final = "completion_id"
NAMES: Final[Mapping[str, str]] = {
    COMPLETION_ID: "decision_id",
    "span_id": "decision_id",
    "episode_id": "episode_id",
    "session_id": "episode_id",
    "trace_id": "episode_id",
}
_MAX_CHARS: Final = 1000
_UNKNOWN: Final = (
    "kept, but this gateway has no open episode or answer of this name. A report of an answer or a "
    "step is applied once that is recorded; one of an episode to the calls that the dataset had "
    "before it, such as those of an episode that has ended, and not to later ones"
)
_APPLY_S: Final = 0.5  # reports that come together are applied together
# Reports are compared with all steps: at most a quarter of the time, as the collector moves steps.
_PAUSE_FACTOR: Final = 3.0
_MAX_PAUSE_S: Final = 10.0
_logger = logging.getLogger(__name__)


class OutcomeLog:
    """One server's way into the reports of a dataset whose steps get them directly."""

    def __init__(
        self,
        dataset: Dataset,
        worker: str,
        clock: Clock,
        *,
        names: Sequence[str],
        other_clocks: bool = False,
        flush: Callable[[], None],
        config: JournalConfig | None = None,
        on_report: Callable[[Mapping[str, Any]], str | None] | None = None,
    ) -> None:
        """Create the table of reports if it is absent, and open a journal into it.

        names: the names, of NAMES, by which steps and episodes may be named. other_clocks: whether
        the times of steps are by other clocks than `clock`. flush: commits what
        the reports are of, before they are applied. on_report: is called with the fields of each
        report once it is written, and returns the id of its episode, or None if it is not known.
        """
        ensure_outcomes_table(dataset)
        self._dataset, self._clock = dataset, clock
        self._other_clocks, self.last_result = other_clocks, OutcomeResult()
        self._names, self._flush, self._on_report = tuple(names), flush, on_report
        self.journal = Journal(
            dataset.rewards, rewards_encoder(dataset), worker=worker, config=config
        )
        self._reported = asyncio.Event()
        self._reported.set()  # what a killed server left
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to apply reports; in the event loop."""
        self._task = asyncio.create_task(self._apply_loop())

    def accept(self, fields: Any) -> dict[str, Any]:
        """Write one report; on return a killed process does not lose it. Return the answer.

        Raises: RequestRefusedError, StorageError.
        """
        record = _read_report(fields, self._names)
        record["timestamp"] = self._clock.now()
        self.journal.append([orjson.dumps(record)])
        self.apply_soon()
        if self._on_report is None:
            return {"accepted": True, "episode_id": None}
        episode_id = self._on_report(fields)
        more = {"message": _UNKNOWN} if episode_id is None else {}
        return {"accepted": True, "episode_id": episode_id, **more}

    def apply_soon(self) -> None:
        """Apply reports once more, as there is a new one, or new steps; in the event loop."""
        self._reported.set()

    async def stop(self) -> None:
        """Apply no more; what is under way is let finish. Before the calls' journal closes."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def close(self) -> None:
        """Apply everything and let go. Raises: ReplayLakeError; the next start does the rest."""
        self.journal.close()
        self._apply()

    def _apply(self) -> None:
        self.last_result = apply_outcomes(self._dataset, other_clocks=self._other_clocks)

    async def _apply_loop(self) -> None:
        next_s = 0.0
        while True:
            await self._reported.wait()
            await asyncio.sleep(max(_APPLY_S, next_s - time.monotonic()))
            self._reported.clear()
            begun_s = time.monotonic()
            try:
                await run_in_threadpool(self._flush)
                await run_in_threadpool(self.journal.flush)
                await run_in_threadpool(self._apply)
            except ReplayLakeError as error:
                _logger.error("feedback not applied, will retry: %s", error)
                self._reported.set()
                await asyncio.sleep(_APPLY_S)
            except Exception:  # a fault must not end what nobody watches
                _logger.exception("feedback not applied; the next report tries again")
            ended_s = time.monotonic()
            next_s = ended_s + min(_PAUSE_FACTOR * (ended_s - begun_s), _MAX_PAUSE_S)


def _read_report(fields: Any, known: Sequence[str]) -> dict[str, Any]:
    """Return a row of the table of reports. Raises: RequestRefusedError."""
    allowed = (*known, *_FIELDS)
    if not isinstance(fields, dict):
        raise RequestRefusedError(422, "body", found=_show(fields), expected="an object")
    if unknown := sorted(set(fields) - {*allowed}):
        expected = f"one of {', '.join(allowed)}"
        raise RequestRefusedError(422, unknown[0][:80], found="an unknown field", expected=expected)
    names = [name for name in known if fields.get(name) is not None]
    if len(names) != 1 and {*names} != {"span_id", "trace_id"}:
        message = f"send one of {', '.join(known[:-1])} and {known[-1]}"
        raise RequestRefusedError(422, known[0], message)
    for name in (*known, "feedback_id"):
        value = fields.get(name)
        if value is not None and not (isinstance(value, str) and 0 < len(value) <= _MAX_CHARS):
            expected = f"a string of 1 to {_MAX_CHARS} characters"
            raise RequestRefusedError(422, name, found=_show(value), expected=expected)
    step = fields.get("step")
    if step is not None and (type(step) is not int or not 0 <= step <= MAX_STEP):
        expected = f"a whole number from 0 to {MAX_STEP}"
        raise RequestRefusedError(422, "step", found=_show(step), expected=expected)
    of_step = next((name for name in names if NAMES[name] == "decision_id"), None)
    if step is not None and of_step is not None:
        message = f"a {of_step} names a step already; leave step out"
        raise RequestRefusedError(422, "step", message)
    for name in ("terminated", "truncated"):
        if fields.get(name) not in (None, True, False):
            raise RequestRefusedError(
                422, name, found=_show(fields[name]), expected="true or false"
            )
    if (mode := fields.get("mode", LAST)) not in (LAST, SUM):
        raise RequestRefusedError(422, "mode", found=_show(mode), expected=f"{LAST} or {SUM}")
    # Ids of OpenTelemetry are hex, and stored in lower case.
    named = {
        NAMES[name]: fields[name].lower() if name in ("span_id", "trace_id") else fields[name]
        for name in names
    }
    return {
        "decision_id": None,
        "episode_id": None,
        **named,
        "step": step,
        "feedback_id": fields.get("feedback_id"),
        "mode": mode,
        "reward": _read_reward(fields.get("reward")),
        "terminated": bool(fields.get("terminated")),
        "truncated": bool(fields.get("truncated")),
    }


def _read_reward(value: Any) -> float:
    is_number = type(value) in (int, float) and abs(value) <= MAX_REWARD and math.isfinite(value)
    if not is_number:
        raise RequestRefusedError(
            422, "reward", found=_show(value), expected=f"a number up to {MAX_REWARD:g}"
        )
    return float(value)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
