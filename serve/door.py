"""The door: each request from its first byte to its answer, around the endpoint that makes it.

Errors become statuses only here. What an endpoint is given has its whole body, within the limit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from replaylake.datastore.errors import StorageFailed
from replaylake.serve.exchange import (
    JSON,
    Answer,
    Endpoint,
    Request,
    RequestRefused,
    error_answer,
)
from replaylake.serve.metrics import Metrics
from replaylake.serve.serving import Limits

_logger = logging.getLogger(__name__)
Scope = Mapping[str, Any]
_CLIENT_GONE: Final = 499  # nobody reads it; it is for the count


class Door:
    """An ASGI app around one endpoint; `limits` is asked anew for each request."""

    def __init__(
        self, route: str, endpoint: Endpoint, metrics: Metrics, limits: Callable[[], Limits]
    ) -> None:
        self._route, self._endpoint = route, endpoint
        self._metrics, self._limits = metrics, limits

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer one request."""
        began = time.perf_counter()
        try:
            answer = await self._answer(scope, receive)
        except _ClientGone:
            self._metrics.count_request(self._route, _CLIENT_GONE, time.perf_counter() - began)
            return
        self._metrics.count_request(self._route, answer.status, time.perf_counter() - began)
        headers = [
            (b"content-type", answer.content_type.encode()),
            (b"content-length", b"%d" % len(answer.body)),
            *answer.headers,
        ]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Any) -> Answer:
        try:
            body = await _read_body(receive, self._limits().body_bytes)
            return await self._endpoint(_request(self._route, scope, body))
        except RequestRefused as error:
            return error_answer(error)
        except StorageFailed as error:
            _logger.error("%s: decision log: %s", self._route, error)
            self._metrics.count_log_failure()
            refused = ("log", "a disk that refuses", "room to log; try again later")
            return error_answer(RequestRefused(503, *refused))
        except _ClientGone:
            raise
        except Exception:
            # Whatever we did not foresee is logged here, and the client learns no internals.
            _logger.exception("%s: unexpected error", self._route)
            return error_answer(
                RequestRefused(500, "server", "an internal error", "an answer; see its log")
            )


class _ClientGone(Exception):
    """The client hung up before its request was whole."""


async def _read_body(receive: Any, max_bytes: int) -> bytes:
    """Read the body without ever holding more than the limit. Raises: RequestRefused (413)."""
    message = await receive()
    if not message.get("more_body", False) and len(message.get("body", b"")) <= max_bytes:
        if message["type"] == "http.disconnect":
            raise _ClientGone
        return message.get("body", b"")  # type: ignore[no-any-return]
    chunks, size = [], 0
    while True:
        if message["type"] == "http.disconnect":
            raise _ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise RequestRefused(413, "body", f"more than {max_bytes} bytes", "a smaller request")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)
        message = await receive()


def _request(route: str, scope: Scope, body: bytes) -> Request:
    content_type, accept = JSON, JSON
    for name, value in scope["headers"]:
        if name == b"content-type":
            content_type = value.split(b";", 1)[0].strip().lower().decode("latin-1")
        elif name == b"accept":
            accept = value.decode("latin-1")
    path, query = scope["path"], scope["query_string"]
    return Request(route, scope["method"], path, query, body, content_type, accept)
