"""Connections: how many there may be, how long they may idle, and how slowly a client may speak.

uvicorn waits for a request's head for ever and takes one of any size. `limit_connections` puts this
in the place of its protocol, which also reaches the uvicorn that BentoML starts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final
from weakref import WeakKeyDictionary

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from replaylake.datastore.version import VERSION
from replaylake.serve.http.deadlines import ARRIVALS, ARRIVED, ArrivalCounter
from replaylake.serve.messages import (
    RETRY_AFTER_S,
    RETRY_LATER,
    RequestRefusedError,
    error_response,
)
from replaylake.serve.safety.limits import ConnectionLimits

# Key of an ASGI scope: the connection of the request, a LimitedProtocol.
CONNECTION: Final = "replaylake.connection"
_CHECK_INTERVAL_S: Final = 0.5
_SERVER: Final = (b"server", f"replaylake/{VERSION}".encode())
# httptools keeps the places of a URL's parts in 16 bits.
_MAX_PATH_BYTES: Final = 65_535
_REASONS: Final = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}
# Connections of this process that were refused without a request, by status.
NUM_REFUSED: Final[dict[int, int]] = dict.fromkeys(_REASONS, 0)


@dataclass(slots=True)
class ReceivedPackets:
    """Totals of the packets that this process received, over all connections.

    seconds: time of parsing packets, plus the gaps until the next packet is read or the handler of
    a request starts. until: time.perf_counter() at the end of the last packet if a handler had
    still to start then, else 0.
    """

    seconds: float = 0.0
    num: int = 0
    num_bytes: int = 0
    until: float = 0.0


RECEIVED: Final = ReceivedPackets()


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits on what a client may hold."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()
    _arrivals: ClassVar[ArrivalCounter] = ArrivalCounter()
    # Idle connections by uvicorn's ServerState, the longest idle first, so that the next one to be
    # closed is found without a search.
    _idle_of: ClassVar[WeakKeyDictionary[Any, OrderedDict[LimitedProtocol, None]]] = (
        WeakKeyDictionary()
    )

    def __init__(self, config: Any, server_state: Any, *args: Any, **kwargs: Any) -> None:
        """Name the product and its version in every answer, with BentoML's uvicorn too."""
        if _SERVER not in config.encoded_headers:
            # uvicorn makes the default headers of these once a second.
            for headers in (config.encoded_headers, server_state.default_headers):
                headers[:] = [*(field for field in headers if field[0] != b"server"), _SERVER]
        super().__init__(config, server_state, *args, **kwargs)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, unless there are too many."""
        super().connection_made(transport)
        # loop.time() since when it waits for a request, and since when for the rest of a head.
        self._idle_since: float | None = self.loop.time()
        self._head_since: float | None = None
        self._head_bytes = 0
        self._unread_since: float | None = None
        self.on_disconnect: Callable[[], None] | None = None
        idle = self._idle_of.get(self.server_state)
        if idle is None:
            idle = self._idle_of[self.server_state] = OrderedDict()
            self.loop.call_later(_CHECK_INTERVAL_S, self._check_all)
        self._idle = idle
        if len(self.connections) > self.limits.num and not self._close_idle_connection():
            self._refuse(
                503,
                "connections",
                f"{len(self.connections) - 1} open connections, the server's limit; "
                f"retry in {RETRY_AFTER_S} s",
            )
        else:
            idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection; tell whoever answers a request of it."""
        super().connection_lost(exc)
        self._idle.pop(self, None)
        if self.on_disconnect is not None:
            self.on_disconnect()

    def data_received(self, data: bytes) -> None:
        """Take a packet."""
        start = (self._arrivals.num_waiting and RECEIVED.until) or time.perf_counter()
        super().data_received(data)
        end = time.perf_counter()
        RECEIVED.seconds += end - start
        # Without a request that waits to begin, the loop may idle from here on.
        RECEIVED.until = end if self._arrivals.num_waiting else 0.0
        RECEIVED.num += 1
        RECEIVED.num_bytes += len(data)
        if self._head_since is not None:
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.head_bytes:
                limit = self.limits.head_bytes
                self._refuse(431, "head", f"request head exceeds {limit} bytes; send less")

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._head_since = self.loop.time()
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """Start a request."""
        self._idle_since = self._head_since = None
        self._idle.pop(self, None)
        super().on_headers_complete()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[ARRIVED] = time.perf_counter()
        scope[ARRIVALS] = self._arrivals
        scope[CONNECTION] = self
        self._arrivals.record_arrival(self.loop)

    def on_response_complete(self) -> None:
        """End a request."""
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
        else:
            # As there, but that it sets a timer a request to close connections that idle.
            self.server_state.total_requests += 1
            self.flow.resume_reading()
            self._idle_since = self.loop.time()
            self._idle[self] = None

    def pause_writing(self) -> None:
        """Note that the client does not take its answer."""
        self._unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that it does."""
        self._unread_since = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, and a path and query that are too long to be taken apart."""
        num_bytes = len(self.url or b"")
        if num_bytes > _MAX_PATH_BYTES:
            message = (
                f"path and query of {num_bytes} bytes exceed {_MAX_PATH_BYTES}; "
                "send long fields in the body"
            )
            self._refuse(431, "head", message)
            return
        message = "not an HTTP/1.1 request; send a request line, headers and a body"
        self._refuse(400, "request", message)

    def _refuse(self, status: int, field: str, message: str) -> None:
        if self.transport.is_closing():
            return
        NUM_REFUSED[status] += 1
        answer = error_response(RequestRefusedError(status, field, message))
        retry = b"".join(b"%s: %s\r\n" % header for header in RETRY_LATER if status == 503)
        head = (
            b"HTTP/1.1 %d %s\r\n%s: %s\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n%sconnection: close\r\n\r\n"
            % (status, _REASONS[status], *_SERVER, len(answer.body), retry)
        )
        self.transport.write(head + answer.body)
        self.transport.close()

    def _close_idle_connection(self) -> bool:
        while self._idle:
            oldest, _ = self._idle.popitem(last=False)
            if not oldest.transport.is_closing():
                oldest.transport.close()
                return True
        return False

    def _check_all(self) -> None:
        now = self.loop.time()
        for connection in tuple(self.connections):
            if isinstance(connection, LimitedProtocol):
                connection._check_timeouts(now)
        if self.connections:
            self.loop.call_later(_CHECK_INTERVAL_S, self._check_all)
        else:
            self._idle_of.pop(self.server_state, None)

    def _check_timeouts(self, now: float) -> None:
        limits = self.limits
        if self._unread_since is not None and now - self._unread_since > limits.unread_timeout_s:
            self.transport.abort()
        elif self._head_since is not None and now - self._head_since > limits.head_timeout_s:
            message = f"request head not received within {limits.head_timeout_s:g} s"
            self._refuse(408, "head", message)
        elif self._idle_since is not None and now - self._idle_since > limits.idle_timeout_s:
            self.transport.close()


def limit_connections(limits: ConnectionLimits) -> None:
    """Let every uvicorn of this process that is not told its protocol take ours."""
    LimitedProtocol.limits = limits
    # Its warnings are of what clients send: a line each would be theirs to fill a disk with.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    path = f"{LimitedProtocol.__module__}:{LimitedProtocol.__qualname__}"
    uvicorn.config.HTTP_PROTOCOLS["auto"] = path
