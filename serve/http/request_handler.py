"""Request handler: each request from its first byte to its answer, around its endpoint.

It checks in this order: host and origin, token, declared size, body (its size, its time, and the
bytes of all bodies together), queue, and runs the endpoint within the deadline. Errors become
statuses only here. An endpoint gets a request with its whole body.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Protocol

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from replaylake.datastore.errors import StorageError
from replaylake.serve.http.connections import RECEIVED
from replaylake.serve.http.deadlines import ARRIVALS, ARRIVED, Deadlines, RequestDeadline
from replaylake.serve.messages import (
    JSON,
    RETRY_AFTER_S,
    RETRY_LATER,
    Endpoint,
    Request,
    RequestRefusedError,
    Response,
    error_response,
)
from replaylake.serve.monitoring.link_times import CHECK, SEND, is_measured
from replaylake.serve.monitoring.metrics import Metrics
from replaylake.serve.monitoring.rate_limited_log import RateLimitedLog
from replaylake.serve.safety.access_log import AccessLog, read_trace_id
from replaylake.serve.safety.hosts import AllowedHosts
from replaylake.serve.safety.limits import Limits
from replaylake.serve.safety.tokens import Tokens, role_of

if TYPE_CHECKING:
    from replaylake.serve.monitoring.otlp_export import OtlpExport, RequestSpan

_logger = logging.getLogger(__name__)
Scope = Mapping[str, Any]
_CLIENT_DISCONNECTED: Final = 499  # nobody reads it; it is for the count
_BEFORE_START: Final = Limits()
_CLOSE_HEADER: Final = (b"connection", b"close")
IDENTITY: Final = b"identity"  # a body that is not compressed
GZIP: Final = b"gzip"
_MAX_ID_BYTES: Final = 128
# Probes use any address that a machine has; they reveal and change nothing.
_OF_ANY_HOST: Final = ("/livez", "/readyz", "/v2/health/live", "/v2/health/ready")
# Refusals of requests that a page of another site may have sent, by status and field.
_OF_OTHER_SITES: Final = frozenset(
    {(400, "host"), (421, "host"), (403, "origin"), (415, "content-type")}
)
# Attributes that _take_body, write_response and write_stream_start use, which uvicorn does not
# document: for a version without them, requests are read and answered by ASGI's messages.
_CYCLE_ATTRIBUTES: Final = frozenset(
    {
        "body",
        "chunked_encoding",
        "default_headers",
        "disconnected",
        "flow",
        "keep_alive",
        "message_event",
        "more_body",
        "on_response",
        "response_complete",
        "response_started",
        "transport",
        "waiting_for_100_continue",
    }
)


class Protection(Protocol):
    """What a worker permits: limits, tokens and host names, and where its access log is."""

    limits: Limits
    tokens: Tokens
    hosts: AllowedHosts
    access_log: AccessLog | None

    @property
    def worker(self) -> str:
        """The name of the worker, which no other has."""


class HandlerState:
    """The state that all handlers of one worker share: what is served, and what requests take."""

    def __init__(self, serving: Callable[[], Protection | None], metrics: Metrics) -> None:
        self.serving, self.metrics = serving, metrics
        self.waits = Deadlines()
        self.num_active = 0  # requests that an endpoint works on
        self.buffered_bytes = 0  # of bodies that come in pieces
        self.telemetry: OtlpExport | None = None


@dataclass(frozen=True)
class RouteForm:
    """How a route differs from others.

    encodings: of its bodies, which the endpoint decodes. encode_error: makes the response of an
    error, for the content type of the request. headers: those that the endpoint reads, in lower
    case.
    """

    encodings: frozenset[bytes] = frozenset((IDENTITY,))
    encode_error: Callable[[RequestRefusedError, str], Response] = lambda error, _: error_response(
        error
    )
    headers: frozenset[bytes] = frozenset()


_PLAIN: Final = RouteForm()
_JSON: Final = JSON.encode()


class RequestHandler:
    """An ASGI app around one endpoint."""

    def __init__(
        self,
        route: str,
        endpoint: Endpoint,
        handler_state: HandlerState,
        form: RouteForm = _PLAIN,
    ) -> None:
        self._route, self._endpoint, self._state = route, endpoint, handler_state
        self._form = form
        self._role = role_of(route)
        self._is_of_any_host = route in _OF_ANY_HOST
        self._complaints = RateLimitedLog(_logger, route)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        begin = time.perf_counter()
        arrivals = scope.get(ARRIVALS)
        if RECEIVED.until:
            # One that waited behind another on its connection begins when the loop has idled.
            if arrivals is not None and arrivals.num_waiting:
                RECEIVED.seconds += begin - RECEIVED.until
            RECEIVED.until = 0.0
        start = scope.get(ARRIVED) or begin
        handler_state, serving = self._state, self._state.serving()
        state = _RequestState(scope, start, _BEFORE_START if serving is None else serving.limits)
        state.begin, state.is_measured = begin, is_measured()
        if handler_state.telemetry is not None:
            state.span = handler_state.telemetry.start_span(scope, self._route, start)
        state.num_behind = 0 if arrivals is None else arrivals.start_next()
        handler_state.waits.enter(state)
        answer: Response | None
        try:
            answer = await self._answer(state, receive, serving)
        except _ClientDisconnectedError:
            answer = None
        except Exception as error:
            # Any unexpected error is logged here, and the client gets no internals. This includes
            # answers that cannot be encoded: outside of the app, BentoML would send no response.
            self._complaints.error("unexpected error", error)
            refusal = RequestRefusedError(500, "server", "internal error; see the server's log")
            answer = self._form.encode_error(refusal, state.content_type)
        finally:
            handler_state.waits.leave(state)
            handler_state.buffered_bytes -= state.buffered_bytes
        status = _CLIENT_DISCONNECTED if answer is None else answer.status
        done = time.perf_counter()
        seconds = done - start
        handler_state.metrics.count_request(self._route, status, seconds)
        headers: tuple[tuple[bytes, bytes], ...] = ()
        if serving is not None and serving.access_log is not None:
            headers = self._log(state, answer, status, seconds, serving)
        if state.span is not None:
            num_bytes, describe = (
                (0, None) if answer is None else (len(answer.body), answer.describe)
            )
            state.span.end(status, state.num_bytes, num_bytes, describe)
        if answer is None:
            return
        is_plain = status == 200 and not (headers or answer.headers) and scope["method"] != "HEAD"
        if not (is_plain and write_response(send, answer.content_type, answer.body)):
            await self._send(scope, send, answer, headers)
        if state.is_measured:
            seconds = time.perf_counter() - done
            handler_state.metrics.links.add(SEND, seconds, len(answer.body))

    async def _send(
        self, scope: Scope, send: Any, answer: Response, headers: tuple[tuple[bytes, bytes], ...]
    ) -> None:
        """Send an answer by ASGI's messages, with further headers."""
        headers = (
            (b"content-type", answer.content_type.encode()),
            (b"content-length", b"%d" % len(answer.body)),
            *answer.headers,
            *headers,
        )
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})

    async def _answer(
        self, state: _RequestState, receive: Any, serving: Protection | None
    ) -> Response:
        handler_state = self._state
        try:
            if serving is not None and not self._is_of_any_host:
                # (host, port) of the socket, so far as the server knows.
                address = state.scope.get("server")
                serving.hosts.check(state.host, state.origin, address[0] if address else None)
            if self._role is not None and serving is not None:
                serving.tokens.check(self._role, state.authorization, self._route)
            if state.is_measured:
                handler_state.metrics.links.add(CHECK, time.perf_counter() - state.begin)
            body = _take_body(state, receive)
            if body is None:
                body = await _read_body(state, receive, handler_state)
            if time.perf_counter() >= state.due:
                raise _timeout_error(state)
            if handler_state.num_active >= state.limits.queue and self._role is not None:
                message = (
                    f"{handler_state.num_active} requests in progress, the server's limit; "
                    f"retry in {RETRY_AFTER_S} s"
                )
                raise RequestRefusedError(503, "server", message, headers=RETRY_LATER)
            handler_state.num_active += 1
            try:
                request = state.request(self._route, body, self._form)
                return await self._endpoint(request)
            finally:
                handler_state.num_active -= 1
        except RequestRefusedError as error:
            if (error.status, error.field) in _OF_OTHER_SITES:
                handler_state.metrics.count_refused_header(error.field)
            return self._form.encode_error(error, state.content_type)
        except asyncio.CancelledError:
            if not state.is_overdue or state.task.cancelling() > 1:
                raise
            return self._form.encode_error(_timeout_error(state), state.content_type)
        except StorageError as error:
            self._complaints.error(f"decision log: {error}")
            handler_state.metrics.count_log_failure()
            message = (
                "the log cannot be written, its disk is full or out of reach; "
                f"retry in {RETRY_AFTER_S} s"
            )
            refusal = RequestRefusedError(503, "log", message, headers=RETRY_LATER)
            return self._form.encode_error(refusal, state.content_type)

    def _log(
        self,
        state: _RequestState,
        answer: Response | None,
        status: int,
        seconds: float,
        serving: Protection,
    ) -> tuple[tuple[bytes, bytes], ...]:
        """Write the access log; return the header that names its line."""
        assert serving.access_log is not None
        request_id = state.request_id or f"{serving.worker}-{next(_numbers)}"
        serving.access_log.write(
            route=self._route,
            method=state.scope["method"],
            status=status,
            seconds=round(seconds, 6),
            bytes_in=state.num_bytes,
            bytes_out=0 if answer is None else len(answer.body),
            client=state.client_address,
            request_id=request_id,
            trace_id=state.trace_id,
        )
        return ((b"x-request-id", request_id.encode()),)


_numbers = count(1)


class _ClientDisconnectedError(Exception):
    """The client hung up before its request was whole."""


class _RequestState(RequestDeadline):
    """One request while it is handled."""

    __slots__ = (
        "accept",
        "authorization",
        "begin",
        "buffered_bytes",
        "content_encoding",
        "content_type",
        "deadline",
        "declared_bytes",
        "host",
        "is_measured",
        "is_read",
        "limits",
        "num_behind",
        "num_bytes",
        "origin",
        "request_id",
        "scope",
        "span",
        "traceparent",
    )
    num_behind: int
    begin: float
    is_measured: bool

    def __init__(self, scope: Scope, start: float, limits: Limits) -> None:
        self.deadline = start + limits.deadline_s
        super().__init__(self.deadline)
        self.scope, self.limits = scope, limits
        self.buffered_bytes = self.num_bytes = self.declared_bytes = 0
        self.is_read = False
        self.content_type, self.accept, self.content_encoding = "", JSON, IDENTITY
        self.authorization = self.request_id = self.host = self.origin = None
        self.span: RequestSpan | None = None
        self.traceparent: bytes | None = None
        for name, value in scope["headers"]:
            if name == b"content-type":
                self.content_type = JSON if value == _JSON else _read_type(value)
            elif name == b"host":
                # Joined, two values are no valid host: neither can be taken for the right one.
                self.host = value if self.host is None else self.host + b"," + value
            elif name == b"accept":
                self.accept = value.decode("latin-1")
            elif name == b"content-length":
                self.declared_bytes = int(value) if value.isdigit() else 0
            elif name == b"content-encoding":
                self.content_encoding = value.strip().lower()
            elif name == b"origin":
                self.origin = value if self.origin is None else self.origin + b"," + value
            elif name == b"authorization":
                self.authorization = value
            elif name == b"x-request-id" and len(value) <= _MAX_ID_BYTES:
                text = value.decode("latin-1")
                self.request_id = text if text.isascii() and text.isprintable() else None
            elif name == b"traceparent":
                self.traceparent = value

    @property
    def client_address(self) -> str | None:
        """The address of the connection's peer, which may be a proxy."""
        client = self.scope.get("client")
        return None if client is None else client[0]

    @property
    def trace_id(self) -> str | None:
        """The trace id of the request's span, or of its traceparent."""
        ours = None if self.span is None else self.span.trace_id
        return ours or read_trace_id(self.traceparent)

    def request(self, route: str, body: bytes, form: RouteForm) -> Request:
        """Return the whole request. Raises: RequestRefusedError for a body in another encoding."""
        encodings = form.encodings
        if self.content_encoding not in encodings:
            known = b", ".join(sorted(encodings))
            raise RequestRefusedError(
                415,
                "content-encoding",
                found=self.content_encoding.decode("latin-1")[:_MAX_ID_BYTES],
                expected="none: send the body as it is"
                if GZIP not in encodings
                else known.decode(),
                headers=((b"accept-encoding", known),),
            )
        scope = self.scope
        return Request(
            route,
            scope["method"],
            scope["path"],
            scope["query_string"],
            body,
            self.content_type,
            self.accept,
            self.num_behind,
            self.is_measured,
            self.content_encoding,
            self._find_headers(form.headers) if form.headers else (),
        )

    def _find_headers(self, names: frozenset[bytes]) -> tuple[tuple[bytes, bytes], ...]:
        found: dict[bytes, bytes] = {}
        for name, value in self.scope["headers"]:
            if name in names:
                found[name] = found[name] + b"," + value if name in found else value
        return tuple(found.items())


def _read_type(value: bytes) -> str:
    """Return a content type in lower case, without its parameters."""
    return value.split(b";", 1)[0].strip().lower().decode("latin-1")


def _take_body(state: _RequestState, receive: Any) -> bytes | None:
    """Return the body if it was received completely and the client is connected; else None.

    Also None if `receive` is not uvicorn's, or the body exceeds the limit. It does what `receive`
    would do, without a coroutine and a message (saves 1.5 us a request).
    """
    if (
        not _IS_KNOWN_CYCLE
        or getattr(receive, "__func__", None) is not RequestResponseCycle.receive
    ):
        return None
    cycle: RequestResponseCycle = receive.__self__
    if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
        return None
    num_bytes = len(cycle.body)
    if num_bytes > state.limits.body_bytes or cycle.response_complete:
        return None
    body, cycle.body = bytes(cycle.body), bytearray()
    cycle.message_event.clear()
    cycle.flow.resume_reading()
    state.num_bytes, state.is_read = num_bytes, True
    return body


async def _read_body(state: _RequestState, receive: Any, handler_state: HandlerState) -> bytes:
    """Read the body without ever holding more than the limits.

    Raises: RequestRefusedError: 413, or 503 where all bodies together are too large;
    _ClientDisconnectedError.
    """
    max_bytes = state.limits.body_bytes
    if state.declared_bytes > max_bytes:
        raise _too_large_error(f"{state.declared_bytes} bytes", max_bytes)
    state.due = min(state.due, state.due - state.limits.deadline_s + state.limits.body_timeout_s)
    message = await receive()
    body: bytes = message.get("body", b"")
    if message.get("more_body", False):
        body = await _read_pieces(body, state, receive, handler_state)
    elif message["type"] == "http.disconnect":
        raise _ClientDisconnectedError
    elif len(body) > max_bytes:
        raise _too_large_error(f"more than {max_bytes} bytes", max_bytes)
    state.num_bytes = len(body)
    state.is_read = True
    state.due = state.deadline
    return body


async def _read_pieces(
    piece: bytes, state: _RequestState, receive: Any, handler_state: HandlerState
) -> bytes:
    limits, body = state.limits, bytearray()
    is_last = False
    while True:
        if len(body) + len(piece) > limits.body_bytes:
            raise _too_large_error(f"more than {limits.body_bytes} bytes", limits.body_bytes)
        if handler_state.buffered_bytes + len(piece) > limits.buffered_bytes:
            message = (
                f"the bodies of concurrent requests exceed {limits.buffered_bytes} bytes; "
                f"retry in {RETRY_AFTER_S} s"
            )
            raise RequestRefusedError(503, "body", message, headers=(*RETRY_LATER, _CLOSE_HEADER))
        state.buffered_bytes += len(piece)
        handler_state.buffered_bytes += len(piece)
        body += piece
        if is_last:
            return bytes(body)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientDisconnectedError
        piece, is_last = message.get("body", b""), not message.get("more_body", False)


def _too_large_error(found: str, max_bytes: int) -> RequestRefusedError:
    return RequestRefusedError(413, "body", found=found, expected=f"at most {max_bytes} bytes")


def _timeout_error(state: _RequestState) -> RequestRefusedError:
    limits = state.limits
    if not state.is_read:
        seconds = min(limits.body_timeout_s, limits.deadline_s)
        message = f"request body not received within {seconds:g} s"
        return RequestRefusedError(408, "body", message, headers=(_CLOSE_HEADER,))
    message = f"not answered within {limits.deadline_s:g} s; retry, or send a smaller request"
    return RequestRefusedError(504, "server", message)


class _ResponseHead:
    """The head of a response up to its length; made again when the date changes."""

    def __init__(self) -> None:
        self._of: list[tuple[bytes, bytes]] | None = None
        self._text = b""

    def __call__(self, default_headers: list[tuple[bytes, bytes]], content_type: str) -> bytes:
        if default_headers is not self._of:
            lines = [b"%s: %s\r\n" % header for header in default_headers]
            self._text = b"HTTP/1.1 200 OK\r\n%scontent-type: " % b"".join(lines)
            self._of = default_headers
        return self._text + content_type.encode()


_head = _ResponseHead()


def is_known_cycle(cycle_class: type) -> bool:
    """Whether a class of uvicorn's makes itself of what write_response uses."""
    return frozenset(cycle_class.__init__.__code__.co_names) >= _CYCLE_ATTRIBUTES  # type: ignore[misc]


_IS_KNOWN_CYCLE: Final = is_known_cycle(RequestResponseCycle)


def write_response(send: Any, content_type: str, body: bytes) -> bool:
    """Write a response of status 200 in one system call: ASGI's two messages are two.

    Returns False, and writes nothing, where `send` is not uvicorn's own but that of a middleware,
    which has to see the response, or where the client does not read or is gone.
    """
    if not _IS_KNOWN_CYCLE or getattr(send, "__func__", None) is not RequestResponseCycle.send:
        return False
    cycle: RequestResponseCycle = send.__self__
    if cycle.disconnected or not cycle.keep_alive or cycle.flow.write_paused:
        return False
    cycle.response_started = cycle.response_complete = True
    cycle.message_event.set()
    head = _head(cycle.default_headers, content_type)
    cycle.transport.write(b"%s\r\ncontent-length: %d\r\n\r\n%s" % (head, len(body), body))
    cycle.on_response()
    return True


def write_stream_start(send: Any, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
    """Write the head of a stream of status 200 and its first bytes in one system call.

    headers: as a parser of HTTP returned them. Further bytes and the end are sent as ASGI's
    messages. Returns False, and writes nothing, where `write_response` would do the same.
    """
    if not _IS_KNOWN_CYCLE or getattr(send, "__func__", None) is not RequestResponseCycle.send:
        return False
    cycle: RequestResponseCycle = send.__self__
    is_plain = cycle.keep_alive and cycle.scope["http_version"] == "1.1"
    if cycle.disconnected or not is_plain or cycle.flow.write_paused:
        return False
    cycle.response_started = cycle.chunked_encoding = True
    cycle.waiting_for_100_continue = False
    lines = b"".join([b"%s: %s\r\n" % header for header in (*cycle.default_headers, *headers)])
    cycle.transport.write(
        b"HTTP/1.1 200 OK\r\n%stransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n"
        % (lines, len(body), body)
    )
    return True
