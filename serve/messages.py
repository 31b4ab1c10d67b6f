"""What passes between the door and an endpoint: a request that was let in, and its answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson

JSON: Final = "application/json"


# Not frozen: that costs a microsecond a request, here and below.
@dataclass(slots=True)
class Request:
    """A request with its whole body. content_type is without parameters, in lower case.

    num_behind: how many came with it and have not begun yet, as far as is known.
    """

    route: str
    method: str
    path: str
    query: bytes = b""
    body: bytes = b""
    content_type: str = JSON
    accept: str = JSON
    num_behind: int = 0


@dataclass(slots=True)
class Response:
    """What is sent back."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


Endpoint = Callable[[Request], Awaitable[Response]]


class RequestRefusedError(Exception):
    """A request that gets an error status, made by serve/http/request_handler.py alone."""

    def __init__(
        self,
        status: int,
        field: str,
        found: str,
        expected: str,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(f"{field}: found {found}, expected {expected}")
        self.status, self.field, self.found, self.expected = status, field, found, expected
        self.headers = headers


def json_response(content: Any, status: int = 200) -> Response:
    return Response(status, orjson.dumps(content))


def error_response(error: RequestRefusedError) -> Response:
    """Return `{"error": {"field", "found", "expected"}}`, as all errors are."""
    body = {"field": error.field, "found": error.found, "expected": error.expected}
    return Response(error.status, orjson.dumps({"error": body}), JSON, error.headers)
