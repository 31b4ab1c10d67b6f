"""Rounds of the feedback join, beside a server, at little cost while nothing is new."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.feedback.decisions import DEFAULT_WINDOW_S, recover_feedback
from replaylake.datastore.feedback.join import JoinReceipt, join_once
from replaylake.datastore.feedback.segments import NOTHING_RECOVERED
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.storage.table.table import Table


class FeedbackJoiner:
    """Joins the feedback of one dataset; a round reads nothing where no other could come of it.

    That is: no new version of a table that is read, and no window that has closed since.
    """

    def __init__(self, lake: Lake, dataset: str, *, window_s: float = DEFAULT_WINDOW_S) -> None:
        self._lake, self._dataset, self._window_s = lake, dataset, window_s
        self._handle = lake.dataset(dataset)
        self._state: tuple[int, ...] | None = None
        self._due: int | None = None

    def run(self, now_s: float | None = None) -> JoinReceipt | None:
        """Run a round at `now_s` (s since 1970; now); None if it was spared.

        Raises: as join_feedback. Cost of a round that is spared: a few looks into the log.
        """
        now = time.time() if now_s is None else now_s
        recovered = NOTHING_RECOVERED
        if self._handle.decisions.exists() and self._handle.rewards.exists():
            recovered = recover_feedback(self._handle)  # what it commits is a new version
        seen = _versions(self._handle)
        if seen == self._state and (self._due is None or now * 1e6 < self._due):
            return None
        done = join_once(self._lake, self._dataset, window_s=self._window_s, now_s=now)
        receipt = done.receipt
        # Of what waits for missing steps it is not known for how long.
        self._due = int(now * 1e6) if receipt.received.waiting else done.due
        self._state = seen
        return replace(
            receipt,
            recovered=receipt.recovered + recovered.num_rows,
            damaged=receipt.damaged + recovered.num_damaged,
        )


def join_every(
    rounds: FeedbackJoiner,
    every_s: float,
    *,
    stop: threading.Event,
    on_round: Callable[[JoinReceipt], None],
    on_failure: Callable[[Exception], None],
) -> None:
    """Run rounds until `stop` is set, each beginning `every_s` after the one before began.

    A round that fails is told to `on_failure`, and is tried again when the next is due.
    """
    while not stop.is_set():
        start = time.monotonic()
        try:
            receipt = rounds.run()
        except ReplayLakeError as error:
            on_failure(error)
        except Exception as error:
            # A fault must not end what nobody watches: the next round may do without it.
            on_failure(error)
        else:
            if receipt is not None:
                on_round(receipt)
        stop.wait(max(0.0, every_s - (time.monotonic() - start)))


def _versions(dataset: Dataset) -> tuple[int, ...]:
    """Return the versions of the tables that are read, -1 where there is none."""
    return tuple(map(_version, (dataset.decisions, dataset.rewards, dataset.received)))


def _version(table: Table) -> int:
    return table.log.newest().version if table.exists() else -1
