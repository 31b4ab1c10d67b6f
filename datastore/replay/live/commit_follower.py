"""Follower: the thread that brings commits into a live view."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from typing import Final

from replaylake.datastore.errors import (
    LogCorruptError,
    StorageError,
)
from replaylake.datastore.replay.live.live_contents import LiveContents
from replaylake.datastore.replay.live.log_reader import (
    FollowTimings,
    LogChange,
    LogExpiredError,
    LogReader,
    ShardGoneError,
)
from replaylake.datastore.replay.live.runs import IntervalSet

# A look at the log takes 0.15 ms of this process's time, 2% of a core at this pace; and half of it,
# with 5 ms of decoding, is what a commit waits (2 cores, 2026-11).
_INTERVAL_S: Final = 0.008
# On an object store a look is two requests, which are paid for. While nothing comes, it is looked
# less often.
_METERED_INTERVAL_S: Final = 0.1
_MAX_INTERVAL_S: Final = 2.0
_BACK_OFF: Final = 1.3
# Each time the thread has read a file it waits for the interpreter, which a loop that does nothing
# but sample gives away every 5 ms only; a commit took 42 ms. So while commits are brought in each
# draw pauses, but for no longer than this: 19 ms (2 cores shared with other work, 2026-11).
_YIELDING_S: Final = 0.02
_PAUSE_S: Final = 2e-5
_MAX_FAILURES: Final = 16
# After these the same commits may be readable later.
_RETRIED_ERRORS: Final = (LogCorruptError, StorageError)


class CommitFollower:
    """Looks for commits, decodes them, and takes the lock only to hand them over."""

    def __init__(
        self, reader: LogReader, contents: LiveContents, max_steps: int, *, is_metered: bool
    ) -> None:
        self.lock = threading.RLock()
        self.arrived = threading.Condition(self.lock)
        self.version = -1
        self._reader = reader
        self._contents = contents
        self._max_steps = max_steps
        self._is_metered = is_metered
        # Said one by one; of a thousand that nobody asked for the first ones are enough.
        self._failures: deque[Exception] = deque()
        self._last_reported = ""
        # Whether what is there has to be compared with the newest version.
        self._is_stale = False
        self._busy_until = 0.0
        self._current_at = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replaylake-follow", daemon=True)

    def start(self, since: int | None) -> None:
        """Bring in what there is, or nothing up to a version; then follow in a thread.

        Raises: as LogReader does.
        """
        self._reader.begin(since)
        if since is None:
            for entries in self._reader.newest_rows(self._max_steps):
                self._apply(LogChange(self._reader.version, [self._reader.read(entries)]))
        self.version = self._reader.version
        self._current_at = time.monotonic()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and wait for it."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        with self.arrived:
            self.arrived.notify_all()

    @property
    def is_running(self) -> bool:
        """Whether commits are still looked for."""
        return self._thread.is_alive()

    @property
    def lag_s(self) -> float:
        """Seconds since all commits that there were had been brought in."""
        return time.monotonic() - self._current_at

    def timings(self) -> FollowTimings:
        """Return what the reader has taken since the last call."""
        return self._reader.timings()

    def check(self) -> None:
        """Raise what went wrong in the thread since the last time, once; and let it run."""
        if time.monotonic() < self._busy_until:
            time.sleep(_PAUSE_S)
        if self._failures:
            # Several threads may sample: one of them gets it.
            with suppress(IndexError):
                raise self._failures.popleft()

    def _run(self) -> None:
        interval_s = shortest_s = _METERED_INTERVAL_S if self._is_metered else _INTERVAL_S
        longest_s = _MAX_INTERVAL_S if self._is_metered else shortest_s
        while not self._closing.wait(interval_s):
            try:
                if self._is_stale:
                    self._restart()
                came = self._follow()
                interval_s = shortest_s if came else min(interval_s * _BACK_OFF, longest_s)
                self._last_reported = ""
            except LogExpiredError as error:
                self._report_error(error)
                self._is_stale, interval_s = True, 0.0
            except ShardGoneError:
                self._is_stale, interval_s = True, 0.0
            except _RETRIED_ERRORS as error:
                self._report_error(error)
                interval_s = min(max(interval_s, _METERED_INTERVAL_S) * 2, _MAX_INTERVAL_S)
            except Exception as error:
                self._report_error(error)
                return

    def _follow(self) -> bool:
        """Bring in all commits that there are; return whether there were any."""
        came = False
        while not self._closing.is_set():
            started = time.monotonic()
            self._busy_until = started + _YIELDING_S
            change = self._reader.next()
            if change is None:
                self._current_at = started
                break
            self._apply(change)
            came = True
        self._busy_until = 0.0
        return came

    def _restart(self) -> None:
        """Go on with the newest version: keep what it has, and take in the rest."""
        self._reader.begin(None)
        groups = self._reader.newest_rows(self._max_steps)
        intervals = self._reader.readable_intervals([e for entries in groups for e in entries])
        with self.lock:
            self._contents.retain(intervals)
        for entries in groups:
            change = self._reader.change(entries)
            there = IntervalSet(steps for block in change.added for steps in block.intervals)
            with self.lock:
                self._contents.replace(change.added, there)
            self._apply(change)
        # Not before: a store that does not answer leaves the rest to be taken in the next time.
        self._is_stale = False

    def _apply(self, change: LogChange) -> None:
        with self.arrived:
            try:
                if change.removed is not None:
                    self._contents.replace(change.added, change.removed)
                else:
                    for block in change.added:
                        self._contents.add(block)
            except Exception as error:
                # Before anybody sees what was left half done.
                self._report_error(error)
                raise
            self.version = change.version
            self.arrived.notify_all()
            if change.failure is not None:
                self._report_error(change.failure)

    def _report_error(self, error: Exception) -> None:
        """Keep an error for sample(); the same one again, as it is tried again, is not told."""
        if str(error) != self._last_reported:
            self._last_reported = str(error)
            if len(self._failures) < _MAX_FAILURES:
                self._failures.append(error)
        with self.arrived:
            self.arrived.notify_all()
