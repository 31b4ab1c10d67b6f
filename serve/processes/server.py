"""The server of `replaylake serve`: checks first, runs workers, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import http.client
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from replaylake.datastore.errors import ExtraMissingError, ServeError
from replaylake.datastore.storage.remote.shard_cache import is_copy
from replaylake.serve.config import ServeConfig
from replaylake.serve.http.listener import BACKLOG, open_listener, resolve_host
from replaylake.serve.loading import check_servable
from replaylake.serve.processes.launch import STOP_TIMEOUT_S
from replaylake.serve.processes.supervisor import Supervisor, signal_wakeup
from replaylake.serve.safety.limits import check_exposure

__all__ = ["ServeConfig", "serve"]

_LAUNCH: Final = (sys.executable, "-m", "replaylake.serve.processes.launch")
_SERVICE: Final = "replaylake.serve.service:PolicyService"
_START_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.02
_PREFIX: Final = "replaylake-server-"


def serve(config: ServeConfig, on_ready: Callable[[ServeConfig], None] | None = None) -> int:
    """Serve in the foreground until SIGINT, SIGTERM or SIGHUP, then return 0 with no process left.

    One line on stderr says when it is ready, and where; `on_ready` is then called, in a thread of
    its own, with the config and the port that it listens on. A worker that ends is started again.
    Raises: ServeError if the port is in use or no worker became ready; before anything is
    started, ConfigInvalidError if other machines could reach it without a token, and whatever
    `check_servable` finds.
    """
    start = time.monotonic()
    address = resolve_host(config.host)
    check_exposure(address, config.safety)
    with open_listener(address, config.port) as listener:
        config = replace(config, port=listener.getsockname()[1])
        # Last: it creates the tables that are logged to, and a port in use changes nothing.
        check_servable(config)
        check_installed(config.server)
        # BentoML keeps files in its home, so each server gets one of its own; and an empty folder
        # to work in, because Python puts that first on sys.path.
        with make_runtime_dir() as home:
            for name in ("work", "metrics"):
                (home.path / name).mkdir()
            if is_copy(config.package):
                # The cache may let it go, and a worker that is started again has to find it.
                package = shutil.copytree(config.package, home.path / "package")
                config = replace(config, package=package)
            _run(config, address, listener, home, start, on_ready or (lambda config: None))
    return 0


def _run(
    config: ServeConfig,
    address: str,
    listener: socket.socket,
    home: RuntimeDir,
    start: float,
    on_ready: Callable[[ServeConfig], None],
) -> None:
    watch = _ReadinessWatch(config, address, start, on_ready)
    descriptor = listener.fileno()
    supervisor = Supervisor(
        lambda number: _command(config, descriptor, number),
        config.workers,
        inherited=[descriptor, home.lock_fd],
        environment={**os.environ, **_variables(config, home.path)},
        folder=home.path / "work",
        is_ready=lambda: watch.was_ready,
    )
    try:
        with signal_wakeup() as signals:
            watch.start()
            supervisor.run(signals)
    finally:
        watch.stop()
    if watch.failure is not None:
        raise ServeError(watch.failure)


def _variables(config: ServeConfig, home: Path) -> dict[str, str]:
    variables = {
        **config.to_environment(),
        "BENTOML_HOME": str(home / "bentoml"),
        "BENTOML_DO_NOT_TRACK": "True",
    }
    if config.workers > 1:  # one worker counts in memory, which costs less
        variables["PROMETHEUS_MULTIPROC_DIR"] = str(home / "metrics")
    return variables


def _command(config: ServeConfig, descriptor: int, number: int) -> list[str]:
    """Return what starts worker `number`; BentoML's is the line its own supervisor runs."""
    if config.server == "uvicorn":
        return [*_LAUNCH, "replaylake.serve.processes.worker", str(descriptor)]
    options = {
        "--fd": descriptor,
        "--service-name": "replaylake_policy",
        "--worker-id": number,
        "--args": "{}",
        "--backlog": BACKLOG,
        "--timeout-keep-alive": int(config.safety.idle_timeout_s),
        "--timeout-graceful-shutdown": STOP_TIMEOUT_S,
    }
    words = [str(word) for option in options.items() for word in option]
    return [*_LAUNCH, "_bentoml_impl.worker.service", _SERVICE, *words]


def check_installed(server: str) -> None:
    """Refuse a server whose modules are absent, before anything starts.

    Raises: ExtraMissingError.
    """
    for module in ("uvicorn", "starlette", *(("bentoml",) if server == "bentoml" else ())):
        if find_spec(module) is None:
            raise ExtraMissingError(
                f"serve: found no module {module}, expected {server}. "
                "Run: pip install 'replaylake[serve]'."
            )


class _ReadinessWatch(threading.Thread):
    """Says when the server is ready, or stops it when it does not become so."""

    def __init__(
        self,
        config: ServeConfig,
        address: str,
        start: float,
        on_ready: Callable[[ServeConfig], None],
    ) -> None:
        super().__init__(name="ready-watch", daemon=True)
        self.failure: str | None = None
        self.was_ready = False
        self._config = config
        # In the caller's context: what it has set there, such as where answers go, is not ours.
        self._on_ready, self._context = on_ready, copy_context()
        self._start = start  # time.monotonic() when serve() was called
        self._address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
        self._stopping = threading.Event()

    def run(self) -> None:
        """Poll /readyz."""
        while not self._stopping.wait(_POLL_S):
            is_ready = self._is_ready()  # waits while the socket listens and no worker accepts
            elapsed_s = time.monotonic() - self._start
            if is_ready:
                self.was_ready = True
                log_to = self._config.log_to
                sys.stderr.write(
                    f"serving {self._config.policy}:{self._config.version} on {self._config.url}, "
                    f"{f'logging to {log_to}' if log_to else 'logging nothing'}, "
                    f"ready after {elapsed_s:.1f} s; stop with Ctrl-C\n"
                )
                sys.stderr.flush()
                self._context.run(self._on_ready, self._config)
                return
            if elapsed_s > _START_TIMEOUT_S:
                self.failure = (
                    f"serve: found no ready worker after {_START_TIMEOUT_S:.0f} s, expected one. "
                    "The lines above say why."
                )
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def stop(self) -> None:
        self._stopping.set()
        if self.is_alive():
            self.join()

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self._address, self._config.port, timeout=5)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


@dataclass(frozen=True)
class RuntimeDir:
    """A server's folder, and the descriptor that its workers are to inherit."""

    path: Path
    lock_fd: int


@contextmanager
def make_runtime_dir() -> Iterator[RuntimeDir]:
    """Make a folder for the time of the block, and remove those that killed servers left."""
    _remove_stale_dirs()
    # It gets the name by which others find it once it is locked: without a lock it is stale.
    path = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    try:
        lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
            path = path.rename(path.with_name(path.name.removeprefix(".")))
            yield RuntimeDir(path, lock_fd)
        finally:
            os.close(lock_fd)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_stale_dirs() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, somebody else's, or gone
            _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(lock_fd).st_uid == os.getuid():
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    finally:
        os.close(lock_fd)
