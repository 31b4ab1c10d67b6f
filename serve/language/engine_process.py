"""Engine processes: each runs one version of a language policy, and is started again if it ends."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from replaylake.datastore.errors import ServeError
from replaylake.serve.http.listener import open_listener
from replaylake.serve.processes.launch import SUPERVISOR
from replaylake.serve.safety.tokens import variable_of

_LOOPBACK: Final = "127.0.0.1"
_SHORT_LIFE_S: Final = 10.0
_MAX_PAUSE_S: Final = 5.0
# An engine ends its generations within 30 s.
_KILL_AFTER_S: Final = 35.0
_logger = logging.getLogger(__name__)

EngineCommand = Callable[[str, int], Sequence[str]]
"""From a policy, as `name:version` or a path, and the descriptor of a socket to a command line.

Its process writes a JSON object with `url` as one line to stdout once it answers.
"""


class EngineProcess:
    """A process that answers on a port of loopback, for as long as it is not stopped.

    The listening socket is held here: calls that come while an engine starts again wait for it.
    """

    def __init__(self, policy: str, command: EngineCommand) -> None:
        """Start it. policy: `name:version`, or the path of a package."""
        self._policy, self._command = policy, command
        self._listener = open_listener(_LOOPBACK, 0)
        self.url = f"http://{_LOOPBACK}:{self._listener.getsockname()[1]}"
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._watch = threading.Thread(target=self._restart, name="engine-watch", daemon=True)
        self._is_ready = False
        self._begun_s = time.monotonic()
        self._process = self._start()

    @property
    def is_ready(self) -> bool:
        """Whether it answers, or did when it was last seen."""
        return self._is_ready

    @property
    def pid(self) -> int:
        """The id of the process that runs now, or ran last."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until it answers; from then on it is started again whenever it ends.

        Raises: ServeError if it ends before.
        """
        if not self._read_ready():
            status = self._process.wait()
            raise ServeError(
                f"serve: the engine of {self._policy} ended with status {status} before it was "
                "ready. The lines above state the cause."
            )
        self._is_ready = True
        self._watch.start()

    def stop(self) -> None:
        """Let it finish what it generates, and end. Cost: until it has ended."""
        self._stopping.set()
        with self._lock:
            process = self._process
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(_KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._watch.is_alive():
            self._watch.join()
        if process.stdout is not None:
            process.stdout.close()
        self._listener.close()

    def _start(self) -> subprocess.Popen[bytes]:
        descriptor = self._listener.fileno()
        # Tokens are for those who call the gateway.
        tokens = {variable_of(role) for role in ("act", "feedback", "admin")}
        environment = {key: text for key, text in os.environ.items() if key not in tokens}
        return subprocess.Popen(
            self._command(self._policy, descriptor),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**environment, SUPERVISOR: str(os.getpid())},
            pass_fds=[descriptor],
            # Ctrl-C in a terminal goes to us alone: an engine is told once, and finishes.
            start_new_session=True,
        )

    def _read_ready(self) -> bool:
        """Wait for the line that an engine writes once it answers; false if it ended before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # An engine that fails says so on stdout as well, `{"error": ...}`, before it ends.
            with suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict) and "url" in said:
                    return True
        return False

    def _restart(self) -> None:
        num_short_lives = 0
        while True:
            status = self._process.wait()
            self._is_ready = False
            if self._stopping.is_set():
                return
            lived_s = time.monotonic() - self._begun_s
            num_short_lives = num_short_lives + 1 if lived_s < _SHORT_LIFE_S else 0
            # The first time at once.
            pause_s = min(_MAX_PAUSE_S, 0.1 * 2**num_short_lives) if num_short_lives > 1 else 0.0
            _logger.warning(
                "the engine of %s (process %d) ended with status %d after %.1f s; starting another",
                self._policy,
                self._process.pid,
                status,
                lived_s,
            )
            if self._stopping.wait(pause_s):
                return
            try:
                with self._lock:
                    # `stop` ends the process that it finds, so none is started after it looked.
                    if self._stopping.is_set():
                        return
                    self._begun_s = time.monotonic()
                    ended, self._process = self._process, self._start()
            except OSError as error:  # such as no memory for a process: it may have some later
                _logger.error("the engine of %s cannot be started: %s", self._policy, error)
                continue
            if ended.stdout is not None:
                ended.stdout.close()
            self._is_ready = self._read_ready()
