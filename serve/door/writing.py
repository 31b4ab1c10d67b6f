"""Writing: the usual answer put on the wire at once, where uvicorn alone stands between."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class _Head:
    """The head of an answer that only its length tells from others; written anew with the date."""

    def __init__(self) -> None:
        self._of: list[tuple[bytes, bytes]] | None = None
        self._text = b""

    def __call__(self, default_headers: list[tuple[bytes, bytes]], content_type: str) -> bytes:
        if default_headers is not self._of:
            lines = [b"%s: %s\r\n" % header for header in default_headers]
            self._text = b"HTTP/1.1 200 OK\r\n%scontent-type: " % b"".join(lines)
            self._of = default_headers
        return self._text + content_type.encode()


_head = _Head()


def write_whole(send: Any, content_type: str, body: bytes) -> bool:
    """Write an answer of status 200 at once: ASGI's two messages are two system calls.

    Returns False, and writes nothing, where that is not to be done: `send` is not uvicorn's own
    but of a middleware that has to see what is sent, the client does not read, or leaves.
    """
    if getattr(send, "__func__", None) is not RequestResponseCycle.send:
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
