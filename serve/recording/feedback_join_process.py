"""Feedback join: decisions joined with their rewards beside a server, in a process of its own.

The join holds the interpreter for seconds where much was served, and takes memory that DuckDB does
not give back; neither is for a process that answers requests. One worker of a machine has the
process, by a lock; if it dies, the process ends and another worker begins one. Several machines may
do it at once: what one was first with the others find done.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from replaylake.datastore.feedback.join import JoinReceipt
from replaylake.datastore.feedback.joiner import FeedbackJoiner, join_every
from replaylake.datastore.feedback.segments import journal_folder
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.storage.locations import absolute_lake

_POLL_S: Final = 1.0
_STOP_TIMEOUT_S: Final = 2.0
_NICE: Final = 10
_logger = logging.getLogger(__name__)


class FeedbackJoinProcess:
    """Keeps the process going, if this worker is the one that has it."""

    def __init__(self, dataset: Dataset, lake: str | Path, every_s: float, window_s: float) -> None:
        """Begin nothing yet. `on_round` is told of each: decisions, joined, orphaned, set aside.

        `on_failure` is told of a round that failed, or a process that ended; `has_failed` says
        whether the last one did.
        """
        self.on_round: Callable[[int, int, int, int], None] = _ignore_counts
        self.on_failure: Callable[[], None] = _ignore_failure
        self.has_failed = False
        self._lock_path = journal_folder(dataset.decisions) / "sessionise.lock"
        self._arguments = [absolute_lake(lake), dataset.name, repr(every_s), repr(window_s)]
        self._stopping = threading.Event()
        self._lock_fd: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name="feedback-join", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End it: a round that is under way is let finish for a moment, and loses nothing else."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._process is not None:
            _end(self._process)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _watch(self) -> None:
        while True:
            try:
                self._check_process()
            except OSError as error:
                _logger.error("feedback join: %s; trying again", error)
            if self._stopping.wait(_POLL_S):
                return

    def _check_process(self) -> None:
        if self._lock_fd is None and not self._take_lock():
            return
        if self._process is not None and self._process.poll() is not None:
            _logger.error("feedback join: ended with %d, restarting", self._process.returncode)
            self._process = None
            self._fail()
        if self._process is None:
            command = [
                sys.executable,
                "-m",
                "replaylake.serve.recording.feedback_join_process",
                *self._arguments,
            ]
            # Its stdin ends when this process does, however that ends.
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            reader = threading.Thread(
                target=self._report_output, args=(self._process,), daemon=True
            )
            reader.start()

    def _report_output(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None, "it was started with a pipe"
        with process.stdout as lines:
            for line in lines:
                counts = json.loads(line)
                if counts is None:
                    self._fail()
                    continue
                self.has_failed = False
                self.on_round(*counts)

    def _fail(self) -> None:
        self.has_failed = True
        self.on_failure()

    def _take_lock(self) -> bool:
        fd = os.open(self._lock_path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._lock_fd = fd
        return True


def _ignore_counts(decisions: int, joined: int, orphaned: int, set_aside: int) -> None:
    pass


def _ignore_failure() -> None:
    pass


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(arguments: list[str]) -> None:
    """Run rounds until stdin ends: LAKE DATASET EVERY_S WINDOW_S.

    Prints a line for each round that did something: its counts as JSON, or null if it failed.
    """
    lake, dataset, every_s, window_s = arguments
    # Ctrl-C is for the server, which then ends this; what it answers goes first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICE)
    stop = threading.Event()

    def wait_for_the_end() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        stop.set()

    def say(text: str) -> None:
        sys.stderr.write(f"feedback join {text}\n")
        sys.stderr.flush()

    def on_round(receipt: JoinReceipt) -> None:
        set_aside = receipt.set_aside + receipt.received.set_aside
        counts = [receipt.decisions, receipt.joined, receipt.orphaned, set_aside]
        print(json.dumps(counts), flush=True)
        if receipt.has_changed:
            say(receipt.to_line())

    def on_failure(error: Exception) -> None:
        print("null", flush=True)
        say(f"{dataset}: {error}; the next round tries again")

    threading.Thread(target=wait_for_the_end, name="stdin", daemon=True).start()
    rounds = FeedbackJoiner(open_lake(lake), dataset, window_s=float(window_s))
    join_every(
        rounds,
        float(every_s),
        stop=stop,
        on_round=on_round,
        on_failure=on_failure,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
