"""Transport: requests of the client on kept connections, sent again until they are answered."""

from __future__ import annotations

import http.client
import json
import os
import random
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from replaylake.datastore.errors import ConfigInvalidError, ReplayLakeError

JSON: Final = "application/json"
_MIN_BACKOFF_S: Final = 0.05
_MAX_BACKOFF_S: Final = 2.0


class RequestFailedError(ReplayLakeError):
    """The server refused: the `field` at fault and a `message`.

    `found` and `expected` are those of a wrong value, else None.
    """

    def __init__(
        self,
        status: int,
        field: str,
        message: str,
        found: str | None = None,
        expected: str | None = None,
    ) -> None:
        super().__init__(f"HTTP {status}: {field}: {message}.")
        self.status, self.field, self.message = status, field, message
        self.found, self.expected = found, expected


class ServerUnreachableError(ReplayLakeError):
    """No answer came, however often the request was sent."""


class Transport:
    """The way to one server. Threads share it: each has a connection of its own."""

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout_s: float,
        retry_s: float,
        context: ssl.SSLContext | None,
    ) -> None:
        """Connect with the first request.

        Raises: ConfigInvalidError if the URL is none of http(s).
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigInvalidError(
                f"client: found the URL {url!r}, expected a URL such as http://127.0.0.1:3000."
            )
        self.url = url.rstrip("/")
        self._parts, self._context = parts, context
        self._timeout_s, self._retry_s = timeout_s, retry_s
        self._headers = {"Accept": JSON}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._local = threading.local()
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()

    def close(self) -> None:
        """Close the connections of all threads; another request opens one anew."""
        with self._lock:
            connections, self._open = self._open, set()
        for connection in connections:
            connection.close()

    def status(self, path: str) -> int | None:
        """Return the status of one GET, None where nobody answers."""
        try:
            return self._once("GET", path, None, self._headers)[0]
        except (OSError, http.client.HTTPException):
            self._drop()
            return None

    def request(
        self, method: str, path: str, body: bytes | None = None, content_type: str = JSON
    ) -> dict[str, Any]:
        """Send a request until it is answered, and return the answer's JSON.

        Raises: RequestFailedError, ServerUnreachableError.
        """
        headers = self._headers
        if body is not None:
            headers = {**headers, "Content-Type": content_type}
        until, pause_s = time.monotonic() + self._retry_s, _MIN_BACKOFF_S
        while True:
            was_used = self._is_used()
            failure: Exception
            try:
                status, retry_after, data = self._once(method, path, body, headers)
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                if was_used and not isinstance(error, TimeoutError):
                    continue  # the server had closed a connection that was idle
                wait_s, failure = pause_s, error
            else:
                if status < 400:
                    answer: dict[str, Any] = json.loads(data)
                    return answer
                refusal = _request_failed_error(status, data)
                if status != 503:
                    raise refusal
                wait_s, failure = _seconds(retry_after, pause_s), refusal
            if time.monotonic() + wait_s > until:
                if isinstance(failure, RequestFailedError):
                    raise failure
                raise ServerUnreachableError(
                    f"{self.url}{path.partition('?')[0]}: {failure!r}, no response after "
                    f"{self._retry_s:g} s of retries. Check that the server runs and "
                    "that this is its URL."
                ) from failure
            # Not all at once: many clients wait for one server. Nor before it asked to be.
            time.sleep(wait_s * random.uniform(1.0, 1.25))
            pause_s = min(2 * pause_s, _MAX_BACKOFF_S)

    def _once(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, str | None, bytes]:
        connection = self._connection()
        connection.request(method, f"{self._parts.path.rstrip('/')}{path}", body, dict(headers))
        response = connection.getresponse()
        data = response.read()
        self._local.is_used = True
        if response.will_close:
            self._drop()
        return response.status, response.getheader("Retry-After"), data

    def _connection(self) -> http.client.HTTPConnection:
        """Return this thread's connection, in this process: a fork may not share a socket."""
        local = self._local
        if getattr(local, "pid", None) != os.getpid():
            local.connection, local.pid, local.is_used = None, os.getpid(), False
        if local.connection is None:
            host, port = self._parts.hostname or "", self._parts.port
            if self._parts.scheme == "https":
                local.connection = http.client.HTTPSConnection(
                    host, port, timeout=self._timeout_s, context=self._context
                )
            else:
                local.connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
            local.is_used = False
            with self._lock:
                self._open.add(local.connection)
        connection: http.client.HTTPConnection = local.connection
        return connection

    def _is_used(self) -> bool:
        return bool(getattr(self._local, "is_used", False))

    def _drop(self) -> None:
        connection = getattr(self._local, "connection", None)
        self._local.connection, self._local.is_used = None, False
        if connection is not None:
            connection.close()
            with self._lock:
                self._open.discard(connection)


def to_json(content: Any) -> bytes:
    """Return JSON. Raises: ValueError for NaN and infinity, which JSON does not have."""
    return json.dumps(content, default=_plain, allow_nan=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"found {type(value).__name__}, expected numbers, texts, arrays or lists")


def _seconds(retry_after: str | None, otherwise_s: float) -> float:
    return float(retry_after) if retry_after is not None and retry_after.isdigit() else otherwise_s


def _request_failed_error(status: int, data: bytes) -> RequestFailedError:
    try:
        error = json.loads(data)["error"]
        found, expected = error.get("found"), error.get("expected")
        return RequestFailedError(status, error["field"], error["message"], found, expected)
    except (ValueError, KeyError, TypeError, AttributeError):
        answer = data[:120].decode("utf-8", "replace") or "an empty body"
        message = f"not an answer of a ReplayLake server: {answer}. Check the URL"
        return RequestFailedError(status, "answer", message)
