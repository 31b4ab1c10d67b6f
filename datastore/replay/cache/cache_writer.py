"""Keeping: a thread that puts a view into the cache, beside whoever samples from it already."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.replay.cache.draft import DraftStoppedError

# The first batches come before it.
_DELAY_S: Final = 0.3
# A process that ends waits so long for all of them together, and then gives up what is not done.
_EXIT_WAIT_S: Final = 5.0
# By then it has seen that it is to stop, unless the disk keeps it: that draft goes another day.
_STOP_WAIT_S: Final = 1.0


class CacheWriter:
    """A view that is being written, and then where it is, or why it could not be kept."""

    def __init__(self, write: Callable[[threading.Event], Path]) -> None:
        """Start. `write` returns the folder; it raises Stopped soon after the event is set."""
        self._write = write
        self._stop, self._hurry = threading.Event(), threading.Event()
        self._folder: Path | None = None
        self._failure = ""
        # Not waited for by the interpreter: `_end` does that, and not for ever.
        thread = threading.Thread(target=self._run, name="replaylake-keep", daemon=True)
        self._thread: threading.Thread | None = thread
        try:
            thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter is about to end
            self._thread, self._failure = None, str(error)
        _running.add(self)

    def wait_folder(self) -> Path | None:
        """Wait for it, and return the view's folder; None where it could not be kept."""
        self._hurry.set()
        self._join(None)
        return self._folder

    @property
    def is_done(self) -> bool:
        """Whether `folder` returns at once."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def failure(self) -> str:
        """Why the view is not kept; empty while that is not known."""
        return self._failure

    def end(self, deadline_s: float) -> None:
        """Wait until then (s of time.monotonic), and stop it if it still goes on."""
        self._hurry.set()
        self._join(max(0.0, deadline_s - time.monotonic()))
        self._stop.set()
        self._join(_STOP_WAIT_S)

    def _join(self, timeout_s: float | None) -> None:
        # In a forked child the thread is not there, and counts as ended.
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        self._hurry.wait(_DELAY_S)
        try:
            self._folder = self._write(self._stop)
        except DraftStoppedError:
            self._failure = "the process ended before it was written"
        except (OSError, ReplayLakeError) as error:
            # A lake that we may only read, a full disk, a purge: the view works all the same.
            self._failure = str(error)
        finally:
            del self._write  # it holds the arrays


_running: weakref.WeakSet[CacheWriter] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    deadline_s = time.monotonic() + _EXIT_WAIT_S
    for keeping in list(_running):
        keeping.end(deadline_s)
