"""Upstream: requests to the engine over persistent HTTP/1.1 connections, answers as they arrive.

Not a general client: no redirects, no compression, no cookies, no proxies. A call takes 31 us of
processor time, with aiohttp 167 and with httpx 2,320 (docs/decisions/094; 2 cores, 2026-11-27).
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections import deque
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import httptools

from replaylake.datastore.errors import ConfigInvalidError

Headers = Sequence[tuple[bytes, bytes]]

_MAX_QUEUED_BYTES: Final = 1 << 20
# Servers close connections that idle for 5 s and more; one that is about to close is not reused.
_MAX_IDLE_S: Final = 4.0
_MAX_IDLE: Final = 256
_CONNECT_TIMEOUT_S: Final = 10.0
# Besides two round trips: how soon after a request a closed connection was closed before it.
_STALE_S: Final = 0.05
_SAFE_METHODS: Final = ("GET", "HEAD", "OPTIONS")


class UpstreamError(Exception):
    """The engine could not be reached, or did not finish its answer; the text says why."""


class UpstreamAnswer:
    """An answer whose head has come; `read` returns its body as it comes."""

    def __init__(self, connection: _Connection, silence_s: float) -> None:
        self.status = connection.status
        self.headers: Headers = tuple(connection.headers)
        self._connection, self._silence_s = connection, silence_s

    async def read(self) -> bytes:
        """Return the next bytes of the body; nothing at its end. Raises: UpstreamError."""
        return await self._connection.read(self._silence_s)

    @property
    def has_body(self) -> bool:
        """Whether `read` returns bytes at once."""
        return self._connection.has_body

    @property
    def is_complete(self) -> bool:
        """Whether the whole body was received, even if it was not read yet."""
        return self._connection.is_complete

    async def read_all(self) -> bytes:
        """Return the whole body, or what is left of it. Raises: UpstreamError."""
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        """Release the connection: for reuse if the answer is complete, else it is closed."""
        self._connection.release()


class Upstream:
    """The engine at one base URL; for one event loop."""

    def __init__(self, url: str, *, silence_s: float = 600.0) -> None:
        """Connect with the first request.

        silence_s: how long it may take until the answer's head, and between two of its pieces.
        Raises: ConfigInvalidError if the URL is none of http(s).
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), -1
        if "@" in url or parts.query or parts.fragment:
            # Not shown: it would be in the log.
            raise ConfigInvalidError(
                "upstream: found a URL with a user, a password, a query or a fragment, expected "
                "scheme, host and path alone. The engine's key comes from the callers, or from the "
                "variable that upstream_key_env names.",
                parameter="upstream",
            )
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigInvalidError(
                f"upstream: found {url!r}, expected a URL such as http://127.0.0.1:8000 or "
                "https://api.example.com/v1.",
                parameter="upstream",
            )
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        authority = parts.netloc.rpartition("@")[2]
        name = authority.encode("ascii" if authority.isascii() else "idna")
        self._head = b"host: %s\r\naccept-encoding: identity\r\n" % name
        # Clients send /v1/...: a base URL may name it as well.
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._silence_s = silence_s
        self._idle: deque[_Connection] = deque()
        self._open: set[_Connection] = set()
        self._check_s, self._is_watching = min(1.0, silence_s / 20), False

    async def request(
        self, method: str, target: str, headers: Headers, body: bytes = b""
    ) -> UpstreamAnswer:
        """Send a request and return the answer once its head has come.

        target: path and query. headers: without host, length and those of the connection.
        A connection that was closed since the request before is replaced by a new one.
        Raises: UpstreamError.
        """
        lines = b"".join(b"%s: %s\r\n" % header for header in headers)
        length = b"content-length: %d\r\n" % len(body) if body or method != "GET" else b""
        line = f"{method} {self._prefix}{target} HTTP/1.1\r\n".encode("latin-1")
        data = b"".join((line, self._head, lines, length, b"\r\n", body))
        has_body = method != "HEAD"
        connection = self._take_idle()
        if connection is not None:
            sent_s = time.monotonic()
            try:
                await connection.send(data, self._silence_s, has_body=has_body)
            except _StaleConnectionError:
                # It was closed while the request was on its way, if that is seen within a round
                # trip. Later, the engine may have begun with it, and it is not for us to repeat.
                waited_s = time.monotonic() - sent_s
                is_safe = method in _SAFE_METHODS
                if not is_safe and waited_s > _STALE_S + 2 * connection.connect_s:
                    raise UpstreamError("the connection was closed without an answer") from None
                connection = None
        if connection is None:
            connection = await self._connect()
            try:
                await connection.send(data, self._silence_s, has_body=has_body)
            except _StaleConnectionError:
                raise UpstreamError("the connection was closed without an answer") from None
        return UpstreamAnswer(connection, self._silence_s)

    def close(self) -> None:
        """Close every connection."""
        for connection in tuple(self._open):
            connection.abort()

    def retain(self, connection: _Connection) -> None:
        """Retain a connection for the next request."""
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)
        if len(self._idle) > _MAX_IDLE:
            self._idle.popleft().abort()

    def watch(self, connection: _Connection) -> asyncio.Future[None]:
        """Return a future to wait for; `check_due` is called meanwhile.

        One timer serves all connections, as in serve/http/deadlines.py.
        """
        loop = asyncio.get_running_loop()
        if not self._is_watching:
            self._is_watching = True
            loop.call_later(self._check_s, self._check_all, loop)
        return loop.create_future()

    def _check_all(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = time.monotonic()
        for connection in tuple(self._open):
            connection.check_due(now_s)
        self._is_watching = bool(self._open)
        if self._is_watching:
            loop.call_later(self._check_s, self._check_all, loop)

    def forget(self, connection: _Connection) -> None:
        """Note that a connection is closed."""
        self._open.discard(connection)

    def _take_idle(self) -> _Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()  # the youngest: the others may go
            if connection.is_open and now - connection.idle_since < _MAX_IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        begun_s = time.monotonic()
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise UpstreamError(f"not connected within {_CONNECT_TIMEOUT_S:.0f} s") from None
        except OSError as error:
            raise UpstreamError(error.strerror or str(error)) from error
        self._open.add(connection)
        connection.connect_s = time.monotonic() - begun_s
        return connection


class _StaleConnectionError(Exception):
    """A reused connection was closed before the first byte of an answer."""


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._parts: deque[bytes] = deque()
        self._num_queued, self._is_paused = 0, False
        self.idle_since = self.connect_s = 0.0
        self.is_open = False
        self._due_s, self._awaited = math.inf, ("", 0.0)
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._has_head = self.is_complete = self._is_persistent = self._has_length = False
        self._has_bytes = False
        self._has_body = True
        self._failure: str | None = None
        self._parts.clear()
        self._num_queued = 0

    async def send(self, data: bytes, timeout_s: float, *, has_body: bool) -> None:
        """Send a request; return when the head of its answer is there.

        has_body: whether its answer can have a body. Raises: _StaleConnectionError, UpstreamError.
        """
        assert self._transport is not None
        self._reset()
        self._has_body = has_body
        self._transport.write(data)
        try:
            while not self._has_head:
                if self._failure is not None:
                    if not self._has_bytes:
                        raise _StaleConnectionError
                    raise UpstreamError(self._failure)
                await self._wait(timeout_s, "no answer")
        except BaseException:
            self.abort()
            raise

    async def read(self, timeout_s: float) -> bytes:
        """Return what has come of the body since; nothing at its end. Raises: UpstreamError."""
        while not self._parts:
            if self.is_complete:
                return b""
            if self._failure is not None:
                raise UpstreamError(self._failure)
            await self._wait(timeout_s, "nothing more of the answer")
        data = self._parts.popleft() if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._num_queued = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    @property
    def has_body(self) -> bool:
        """Whether bytes of the body have come."""
        return bool(self._parts)

    def release(self) -> None:
        """Give the connection back if it may be used again, else close it."""
        if self.is_complete and self._is_persistent and self.is_open and not self._is_paused:
            self._upstream.retain(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close it at once: the engine sees that nobody reads any more."""
        self.is_open = False
        self._upstream.forget(self)
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self, timeout_s: float, what: str) -> None:
        self._waiter = self._upstream.watch(self)
        self._due_s, self._awaited = time.monotonic() + timeout_s, (what, timeout_s)
        try:
            await self._waiter
        finally:
            self._due_s = math.inf
            self._waiter = None

    def check_due(self, now_s: float) -> None:
        """Fail a request whose engine has been silent for too long."""
        if now_s >= self._due_s:
            self._has_bytes = True  # it is not for another connection
            self._fail("{} within {:g} s".format(*self._awaited))

    def _fail(self, failure: str) -> None:
        if self._failure is None:
            self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._has_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not an HTTP/1.1 answer ({error})")
            self.abort()
            return
        if self._num_queued > _MAX_QUEUED_BYTES and not self._is_paused:
            assert self._transport is not None
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._upstream.forget(self)
        if self._has_head and not self._has_length and error is None:
            self.is_complete = True  # its end is the connection's
        if not self.is_complete:
            self._fail("the connection was closed" + (f" ({error})" if error else ""))
        self._wake()

    # Called by httptools.

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._has_length |= name in (b"content-length", b"transfer-encoding")
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._is_persistent = self._parser.should_keep_alive()
        if self.status >= 200:
            self._has_head = True
            self._has_length |= self.status in (204, 304)
            self.is_complete |= not self._has_body

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._num_queued += len(body)

    def on_message_complete(self) -> None:
        if self._has_head:
            self.is_complete = True
        else:  # 100 Continue and its kin
            self.headers.clear()
            self._has_length = False
