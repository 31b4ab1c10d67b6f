"""Starts workers on one listening socket, starts them again when they end, and stops them.

BentoML's own supervisor (circus) looks after its workers every 10 s. With it a killed worker was
back after 9.9 to 10.1 s, and start to ready took 1.7 s; told by SIGCHLD, as here, it is 1.2 s and
1.2 s, and with uvicorn alone 0.6 and 0.6 (2 cores, 2026-11). The socket stays open here, so clients
that come while no worker runs wait instead of being refused.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from replaylake.datastore.errors import ServeError
from replaylake.serve.processes.launch import STOP_TIMEOUT_S, SUPERVISOR

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)
_KILL_AFTER_S: Final = STOP_TIMEOUT_S + 3.0
_SHORT_LIFE_S: Final = 10.0
_MAX_PAUSE_S: Final = 5.0


class Signals:
    """Signals as something to wait for: what they are is read here, and they interrupt nothing."""

    def __init__(self, receiver: socket.socket, stops: set[int]) -> None:
        self._receiver, self._stops = receiver, stops
        self.is_stopping = False

    def wait(self, seconds: float | None) -> None:
        """Return when a signal came (a child's end is one), or after `seconds`."""
        if self.is_stopping:
            return
        ready, _, _ = select.select([self._receiver], [], [], seconds)
        if ready:
            self.is_stopping = bool(self._stops & set(self._receiver.recv(4096)))


@contextmanager
def signal_wakeup() -> Iterator[Signals]:
    """Hear of SIGCHLD and of what is to stop us; under nohup SIGHUP stays ignored, as it came.

    In the main thread alone, as Python has it.
    """
    numbers = {signal.SIGCHLD, *_STOP_SIGNALS}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.discard(signal.SIGHUP)
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    before = {number: signal.signal(number, lambda number, frame: None) for number in numbers}
    wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield Signals(receiver, {int(number) for number in numbers - {signal.SIGCHLD}})
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        receiver.close()
        sender.close()


@dataclass
class _WorkerProcess:
    number: int
    process: subprocess.Popen[bytes]
    began: float
    num_short_lives: int = 0


class Supervisor:
    """Keeps `num` workers running.

    command: of worker `number`, which inherits the descriptors. folder: where it works.
    is_ready: whether some worker was ready once; before, one that ends by itself ends everything.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        num: int,
        *,
        inherited: Sequence[int],
        environment: Mapping[str, str],
        folder: Path,
        is_ready: Callable[[], bool],
    ) -> None:
        self._command, self._num, self._folder = command, num, folder
        self._inherited, self._is_ready = inherited, is_ready
        self._environment = {**environment, SUPERVISOR: str(os.getpid())}
        self._workers: list[_WorkerProcess] = []
        self._due: list[tuple[float, int, int]] = []  # when, number, short lives before

    def run(self, signals: Signals) -> None:
        """Run until a signal says stop. Raises: ServeError if a worker cannot begin."""
        self._due = [(0.0, number, 0) for number in range(1, self._num + 1)]
        try:
            while not signals.is_stopping:
                self._start_due()
                pause = min((when for when, _, _ in self._due), default=None)
                signals.wait(None if pause is None else max(0.0, pause - time.monotonic()))
                self._reap()
        finally:
            self._stop()

    def _start_due(self) -> None:
        now = time.monotonic()
        due = [entry for entry in self._due if entry[0] <= now]
        self._due = [entry for entry in self._due if entry[0] > now]
        for _, number, num_short_lives in due:
            process = subprocess.Popen(
                self._command(number),
                stdin=subprocess.DEVNULL,
                cwd=self._folder,
                env=self._environment,
                pass_fds=self._inherited,
                # Ctrl-C in a terminal goes to us alone: a worker is told once, and finishes.
                start_new_session=True,
            )
            self._workers.append(_WorkerProcess(number, process, now, num_short_lives))

    def _reap(self) -> None:
        """Find the workers that ended, and plan to start them again: the first time at once."""
        now = time.monotonic()
        for worker in list(self._workers):
            status = worker.process.poll()
            if status is None:
                continue
            self._workers.remove(worker)
            how = f"signal {-status}" if status < 0 else f"status {status}"
            if status > 0 and not self._is_ready():
                raise ServeError(
                    f"serve: worker {worker.number} ended with {how} before it was ready. "
                    "The lines above state the cause."
                )
            is_short = now - worker.began < _SHORT_LIFE_S
            num_short_lives = worker.num_short_lives + 1 if is_short else 0
            pause = min(_MAX_PAUSE_S, 0.1 * 2**num_short_lives) if num_short_lives > 1 else 0.0
            self._due.append((now + pause, worker.number, num_short_lives))
            sys.stderr.write(
                f"worker {worker.number} (process {worker.process.pid}) ended with {how} after "
                f"{now - worker.began:.1f} s; starting another"
                f"{f' in {pause:.1f} s' if pause else ''}\n"
            )
            sys.stderr.flush()

    def _stop(self) -> None:
        for worker in self._workers:
            with suppress(ProcessLookupError):
                worker.process.terminate()
        deadline = time.monotonic() + _KILL_AFTER_S
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                sys.stderr.write(f"worker {worker.number} did not stop in time; killed\n")
                worker.process.kill()
                worker.process.wait()
        self._workers.clear()
