"""The server of `replaylake serve`: checks first, runs BentoML, and leaves nothing behind."""

from __future__ import annotations

import errno
import http.client
import ipaddress
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import Final

from replaylake.datastore.errors import ExtraMissing, ServeFailed
from replaylake.datastore.remote.shard_cache import is_copy
from replaylake.serve.config import ServeConfig
from replaylake.serve.loading import check_servable

__all__ = ["ServeConfig", "serve"]

_SERVICE: Final = "replaylake.serve.service:PolicyService"
_START_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 5
_POLL_S: Final = 0.02
_INSIST_S: Final = 1.0
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)


def serve(config: ServeConfig, on_ready: Callable[[ServeConfig], None] | None = None) -> int:
    """Serve in the foreground until SIGINT, SIGTERM or SIGHUP, then return 0 with no process left.

    One line on stderr says when it is ready, and where; `on_ready` is then called, in a thread of
    its own, with the config and the port that it listens on. Raises: ServeFailed if the port is in
    use or no worker became ready; before anything is started, whatever `check_servable` finds.
    """
    began = time.monotonic()
    address = _resolve(config.host)
    config = replace(config, port=_free_port(address, config.port))
    # Last: it creates the tables that are logged to, and a port in use changes nothing.
    check_servable(config)
    # BentoML cleans a folder of its home when it starts, so each server gets a home of its own; an
    # empty folder to work in, because it puts that first on sys.path.
    home = Path(tempfile.mkdtemp(prefix="replaylake-serve-"))
    if is_copy(config.package):
        # The cache may let it go, and a worker that is started again has to find it.
        package = shutil.copytree(config.package, home / "package")
        config = replace(config, package=package)
    variables = {
        **config.to_environment(),
        "BENTOML_HOME": str(home / "bentoml"),
        "BENTOML_DO_NOT_TRACK": "True",
    }
    watch = _ReadyWatch(config, address, began, on_ready or (lambda config: None))
    try:
        (home / "work").mkdir()
        with _environment(variables), _stop_on_signals(), suppress(_Stopped):
            watch.start()
            _run_bentoml(address, config.port, home / "work")
    finally:
        watch.stop()
        shutil.rmtree(home, ignore_errors=True)
    if watch.failure is not None:
        raise ServeFailed(watch.failure)
    return 0


def _run_bentoml(address: str, port: int, folder: Path) -> None:
    """Run BentoML's supervisor and workers until a signal ends them."""
    try:
        # Imported here: both read the environment set above, and take a second.
        from _bentoml_impl.server.serving import serve_http  # type: ignore[import-untyped]

        from replaylake.serve.service import PolicyService
    except ModuleNotFoundError as error:
        raise ExtraMissing(
            f"serve: found no module {error.name}, expected BentoML. Install replaylake[serve]."
        ) from error
    PolicyService.inject_config()  # type: ignore[attr-defined]
    serve_http(
        _SERVICE,
        working_dir=str(folder),
        host=address,
        port=port,
        timeout_graceful_shutdown=_STOP_TIMEOUT_S,
    )


class _Stopped(BaseException):
    """A signal came before BentoML's supervisor took signals over."""


@contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Make SIGINT, SIGTERM and a closed terminal (SIGHUP) end the server whenever they come.

    Before the supervisor has handlers of its own, ours raise. While it starts its workers it drops
    what it is told, so a thread that hears of every signal tells it again until it is gone.
    """
    heard, told = socket.socketpair()
    told.setblocking(False)
    done = threading.Event()

    def raise_stopped(number: int, frame: object) -> None:
        raise _Stopped

    # The supervisor takes SIGHUP for "reload"; under nohup it is to be ignored, as it came.
    stops = {signal.SIGINT, signal.SIGTERM, 0}
    numbers = set(_STOP_SIGNALS)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.discard(signal.SIGHUP)
    else:
        stops.add(signal.SIGHUP)

    def insist() -> None:
        while not set(heard.recv(64)) & stops:
            pass
        while not done.wait(_INSIST_S):
            os.kill(os.getpid(), signal.SIGQUIT)

    before = {number: signal.signal(number, raise_stopped) for number in numbers}
    wakeup = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=insist, name="signal-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        told.send(b"\0")
        thread.join()
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        heard.close()
        told.close()


class _ReadyWatch(threading.Thread):
    """Says when the server is ready, or stops it when it does not become so."""

    def __init__(
        self,
        config: ServeConfig,
        address: str,
        began: float,
        on_ready: Callable[[ServeConfig], None],
    ) -> None:
        super().__init__(name="ready-watch", daemon=True)
        self.failure: str | None = None
        self._config = config
        # In the caller's context: what it has set there, such as where answers go, is not ours.
        self._on_ready, self._context = on_ready, copy_context()
        self._began = began  # time.monotonic() when serve() was called
        self._address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
        self._stopping = threading.Event()

    def run(self) -> None:
        """Poll /readyz."""
        while not self._stopping.wait(_POLL_S):
            is_ready = self._is_ready()  # waits while the socket listens and no worker accepts
            elapsed_s = time.monotonic() - self._began
            if is_ready:
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
        """Stop polling."""
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


def _resolve(host: str) -> str:
    """Return the address of a host name. Raises: ServeFailed."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ServeFailed(
            f"serve: host {host!r} has no address ({error}), expected one of this machine. "
            "Try --host 127.0.0.1."
        ) from error


def _free_port(address: str, port: int) -> int:
    """Return a port that can be bound now, `port` itself unless that is 0. Raises: ServeFailed."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen()
        except OSError as error:
            found = "in use" if error.errno == errno.EADDRINUSE else error.strerror
            raise ServeFailed(
                f"serve: port {port} on {address}: found it {found}, expected a free one. "
                "Stop what listens there, or choose another with --port."
            ) from error
        chosen: int = probe.getsockname()[1]
        return chosen


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
