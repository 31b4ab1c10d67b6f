"""Server-sent events: a byte stream cut into whole events, which stay as they came."""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

_BLANK_LINE: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_MAX_EVENT_BYTES: Final = 64 << 20
DONE: Final = b"[DONE]"


class EventTooLongError(ValueError):
    """A stream has no blank line for so long that the gateway stops to buffer it."""


class EventSplitter:
    """Cuts a stream at the blank lines between its events (WHATWG HTML, section 9.2)."""

    def __init__(self) -> None:
        # The pieces of an incomplete event: each byte is searched and copied once or twice, however
        # many pieces there are.
        self._pieces: list[bytes] = []
        self._tail = b""
        self._num_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that are complete now, each with its blank line.

        Raises: EventTooLongError above 64 MiB.
        """
        if self._pieces:
            first, *others = _split(self._tail + data)
            if not others:
                self._retain(data)
                return []
            first = b"".join((*self._pieces, first[len(self._tail) :]))
            whole, rest = [first, *others[:-1]], others[-1]
            self._pieces, self._tail, self._num_bytes = [], b"", 0
        else:
            *whole, rest = _split(data)
        if rest:
            self._retain(rest)
        return whole

    def _retain(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._tail = (self._tail + piece)[-3:]  # where the beginning of a blank line can be
        self._num_bytes += len(piece)
        if self._num_bytes > _MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event of more than {_MAX_EVENT_BYTES} bytes")

    @property
    def rest(self) -> bytes:
        """The bytes of an incomplete event."""
        return b"".join(self._pieces)


def _split(text: bytes) -> list[bytes]:
    """Return the complete events of a text, and last the bytes after them."""
    if b"\r" not in text:
        *parts, rest = text.split(b"\n\n")
        return [*(part + b"\n\n" for part in parts), rest]
    parts, begin = [], 0
    for match in _BLANK_LINE.finditer(text):
        parts.append(text[begin : match.end()])
        begin = match.end()
    return [*parts, text[begin:]]


def parse_event(event: bytes) -> dict[str, Any] | None:
    """Return an event's data if it is a JSON object, else None."""
    if event[:7] != b"data: {" or event.find(b"\n") != len(event) - 2:
        return parse_data(data_of(event))
    # Most events are one line; its end is white space to the JSON parser.
    try:
        body: dict[str, Any] = orjson.loads(event[6:])
    except orjson.JSONDecodeError:
        return None
    return body


def data_of(event: bytes) -> bytes:
    """Return an event's data; nothing for a comment."""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return lines[0] if len(lines) == 1 else b"\n".join(lines)


def parse_data(data: bytes) -> dict[str, Any] | None:
    """Return data if it is a JSON object, else None."""
    if data[:1] != b"{":
        return None
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def with_data(event: bytes, body: dict[str, Any]) -> bytes:
    """Return an event with other data, its other lines as they are."""
    if event[:5] == b"data:" and event.find(b"\n") == len(event) - 2:
        return b"data: %b\n\n" % orjson.dumps(body)
    lines = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    return b"\n".join([*lines, b"data: " + orjson.dumps(body)]) + b"\n\n"
