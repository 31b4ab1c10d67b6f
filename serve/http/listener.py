"""Listener: the socket that a server accepts connections on, its host, and uvicorn run on it."""

from __future__ import annotations

import errno
import ipaddress
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, replace
from types import FrameType
from typing import Any, ClassVar, Final, Generic, Literal, Protocol, TypeVar

from replaylake.datastore.errors import ServeError

# Connections that wait to be accepted, in the kernel.
BACKLOG: Final = 2048
_POLL_S: Final = 0.02
# The workers of a server that was killed hold its port for 0.1 s more, on a busy machine longer.
_PORT_WAIT_S: Final = 2.0
# How long the thread that commits a journal may block the event loop (Python's default is 5 ms):
# p99 at 16 connections is 2.3 ms instead of 3.8 ms, at equal throughput (2 cores, 2026-11).
_SWITCH_S: Final = 0.0005


class ServerAddress(Protocol):
    """The part of a server's config, a dataclass, that has the address to listen on."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def host(self) -> str:
        """Host name or address to listen on."""

    @property
    def port(self) -> int:
        """Port to listen on; 0: any free port."""


_Config = TypeVar("_Config", bound=ServerAddress)


@dataclass(frozen=True)
class ListeningServer(Generic[_Config]):
    """A single-process server whose port is open, and which does not answer yet.

    config: with the actual port. begun_s: time.monotonic() at its start.
    """

    config: _Config
    listener: socket.socket
    on_ready: Callable[[_Config], None] | None = None
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.begun_s

    def announce(self, text: str) -> None:
        """Write one line to stderr, and call `on_ready`."""
        sys.stderr.write(f"{text}; stop with Ctrl-C\n")
        sys.stderr.flush()
        if self.on_ready is not None:
            self.on_ready(self.config)


@contextmanager
def open_server(
    name: str,
    config: _Config,
    on_ready: Callable[[_Config], None] | None,
    *,
    check_exposure: Callable[[str], object],
    listener: socket.socket | None = None,
) -> Iterator[ListeningServer[_Config]]:
    """Open the port of a single-process server, and configure its log.

    name: the server's name in each line of its log. check_exposure: called with the address before
    it is opened; raises if other machines must not reach it. listener: a listening socket to use
    instead of the host and port of the config.
    Raises: ServeError if the host has no address or the port is in use; whatever `check_exposure`
    raises.
    """
    begun_s = time.monotonic()
    if listener is not None:
        address = listener.getsockname()[0]
        config = replace(config, host=address)
    else:
        address = resolve_host(config.host)
    check_exposure(address)
    with listener or open_listener(address, config.port) as listener:
        log_format = f"%(asctime)s [%(levelname)s] [{name}] %(message)s"
        logging.basicConfig(format=log_format, datefmt="%Y-%m-%dT%H:%M:%S%z")
        port = listener.getsockname()[1]
        yield ListeningServer(replace(config, port=port), listener, on_ready, begun_s)


def shorten_thread_turns() -> None:
    """Limit the time that another thread may block the event loop to 0.5 ms."""
    sys.setswitchinterval(_SWITCH_S)


def resolve_host(host: str) -> str:
    """Return the address of a host name. Raises: ServeError."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ServeError(
            f"serve: `host`: found no address of {host!r} ({error}), expected a name or address "
            "of this machine. To accept connections from this machine only, use 127.0.0.1.",
            parameter="host",
        ) from error


def open_listener(address: str, port: int) -> socket.socket:
    """Return a listening socket, on any free port if that is 0. Raises: ServeError."""
    deadline = time.monotonic() + _PORT_WAIT_S
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    while True:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            # Only now does a port that another server listens on say so, if both came at once.
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            is_in_use = error.errno == errno.EADDRINUSE
            if is_in_use and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
            reason = "in use" if is_in_use else error.strerror
            raise ServeError(
                f"serve: port {port} on {address}: {reason}, expected a free port. Stop the "
                "process that listens on it, or choose another `port`.",
                parameter="port",
            ) from error
        return listener


def run_app(
    app: Any,
    listener: socket.socket,
    *,
    lifespan: Literal["on", "off"],
    drain_s: int,
    stopping: threading.Event | None = None,
) -> None:
    """Run an ASGI app in this process under uvicorn until SIGINT or SIGTERM.

    drain_s: how many seconds the requests in progress have to end then. stopping: set when that
    time begins, for responses that would not end.
    """
    # Not on top: the process that supervises workers runs no app.
    import uvicorn

    settings = uvicorn.Config(
        app,
        loop="uvloop",
        lifespan=lifespan,
        ws="none",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=drain_s,
    )
    # uvicorn raises what stopped it again once it is done, for handlers that were there before.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if stopping is not None:
                stopping.set()
            super().handle_exit(sig, frame)

    Server(settings).run(sockets=[listener])


def _ignore(number: int, frame: Any) -> None:
    pass
