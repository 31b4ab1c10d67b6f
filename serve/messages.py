"""Messages between the request handler and an endpoint: a request, its response, and errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

JSON: Final = "application/json"
RETRY_AFTER_S: Final = 1  # what every 503 names, in its text and in Retry-After
RETRY_LATER: Final = ((b"retry-after", b"%d" % RETRY_AFTER_S),)
# Decision ids in a span's attribute; OpenTelemetry's default limit of attributes is as large.
_MAX_SPAN_IDS: Final = 128


# Not frozen: that costs a microsecond a request, here and below.
@dataclass(slots=True)
class Request:
    """A request with its whole body. content_type is without parameters, in lower case.

    num_behind: how many came with it and have not begun yet, as far as is known. is_measured:
    whether its times are added up. content_encoding: of the body, where a route takes any but its
    own. headers: those that the route's form names, in lower case; a repeated one is joined with
    commas.
    """

    route: str
    method: str
    path: str
    query: bytes = b""
    body: bytes = b""
    content_type: str = JSON
    accept: str = JSON
    num_behind: int = 0
    is_measured: bool = False
    content_encoding: bytes = b"identity"
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(slots=True)
class Response:
    """A response with its whole body.

    describe: returns the attributes of the request's span, such as decision ids; called only if
    spans are exported.
    """

    status: int
    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()
    describe: Callable[[], Mapping[str, Any]] | None = None


Endpoint = Callable[[Request], Awaitable[Response]]


class RequestRefusedError(Exception):
    """A request that gets an error status, made by serve/http/request_handler.py alone.

    field: the place in the request, or the part of the server, that is at fault. message: the
    cause, then the fix. Where a value is wrong `found` and `expected` take its place.
    """

    def __init__(
        self,
        status: int,
        field: str,
        message: str | None = None,
        *,
        found: str | None = None,
        expected: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        self.message = message or f"found {found}, expected {expected}"
        super().__init__(f"{field}: {self.message}")
        self.status, self.field, self.found, self.expected = status, field, found, expected
        self.headers = headers


def json_response(
    content: Any, status: int = 200, describe: Callable[[], Mapping[str, Any]] | None = None
) -> Response:
    return Response(status, orjson.dumps(content), describe=describe)


def span_attributes(
    decision_ids: Sequence[str], versions: Iterable[tuple[str, int]]
) -> dict[str, Any]:
    """Return the attributes of the span of a request about decisions of (policy, version) pairs."""
    return {
        "replaylake.decision.ids": list(decision_ids[:_MAX_SPAN_IDS]),
        "replaylake.decision.count": len(decision_ids),
        "replaylake.policy.versions": [f"{name}:{number}" for name, number in sorted({*versions})],
    }


def error_response(error: RequestRefusedError) -> Response:
    """Return `{"error": {"field", "message"}}`, with `found` and `expected` of a wrong value."""
    body = {"field": error.field, "message": error.message}
    if error.found is not None:
        body["found"] = error.found
    if error.expected is not None:
        body["expected"] = error.expected
    return Response(error.status, orjson.dumps({"error": body}), JSON, error.headers)
