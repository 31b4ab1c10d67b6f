"""CSV blocks: a stream cut into pieces of whole records, which Arrow parses from memory.

Arrow reads a Python stream from a thread of its own, which outlives a parse error: it then aborts
or blocks the process when the interpreter ends. Here no thread reads, and a record may be longer
than a block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO, Final

import numpy as np

_BOM: Final = b"\xef\xbb\xbf"
# A longer record is refused, as a quote that is never closed makes one of the whole file.
MAX_RECORD_BYTES: Final = 64 << 20
_QUOTE, _NEWLINE, _RETURN = b'"\n\r'


class RecordTooLongError(ValueError):
    """A record that is longer than MAX_RECORD_BYTES; the message shows how it begins."""


def read_blocks(stream: BinaryIO, delimiter: str, block_bytes: int) -> Iterator[bytes]:
    """Yield a stream's bytes: first the first record, then pieces of about `block_bytes`.

    Each piece ends where a record does. A byte order mark is left out. Raises: RecordTooLongError.
    """
    data = stream.read(block_bytes).removeprefix(_BOM)
    is_first = True
    while data:
        end = first_end(data, delimiter) if is_first else _last_end(data, delimiter)
        if end:
            yield data[:end]
            is_first, data = False, data[end:]
            if len(data) >= block_bytes:
                continue
        elif len(data) > MAX_RECORD_BYTES:
            raise RecordTooLongError(
                f"a record of more than {MAX_RECORD_BYTES:,} bytes, which begins with {data[:60]!r}"
            )
        # Twice as much where no record ends, so that each byte is looked at about twice.
        more = stream.read(max(block_bytes, 0 if end else len(data)))
        if not more:
            if data:
                yield data
            return
        data += more


def first_end(data: bytes, delimiter: str) -> int:
    """Return where the first record ends, behind its newline; 0 where it goes on after `data`."""
    length = min(
        (at for at in (data.find(b"\n"), data.find(b"\r")) if at >= 0), default=len(data) - 1
    )
    if data.find(b'"', 0, length) >= 0:
        return next(_scan(data, delimiter), 0)
    if length + 1 >= len(data):
        # Behind a return there may be a newline.
        return len(data) if data.endswith(b"\n") else 0
    return length + (2 if data[length : length + 2] == b"\r\n" else 1)


def _last_end(data: bytes, delimiter: str) -> int:
    """Return where the last record ends that `data` holds whole; 0 where there is none."""
    if b'"' not in data:
        return data.rfind(b"\n") + 1 or data.rfind(b"\r", 0, len(data) - 1) + 1
    codes = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(codes == _QUOTE)
    # A quote opens a cell at its start alone; elsewhere, outside of quotes, it is a character.
    opening = quotes[::2]
    before = codes[np.maximum(opening - 1, 0)]
    is_start = np.isin(before, [ord(delimiter), _NEWLINE, _RETURN, _QUOTE]) | (opening == 0)
    if not is_start.all():
        return max(_scan(data, delimiter), default=0)
    for newline, stop in ((_NEWLINE, len(data)), (_RETURN, len(data) - 1)):
        ends = np.flatnonzero(codes[:stop] == newline)
        outside = ends[np.searchsorted(quotes, ends) % 2 == 0]
        if len(outside):
            return int(outside[-1]) + 1
    return 0


def _scan(data: bytes, delimiter: str) -> Iterator[int]:
    """Yield where each record ends, cell by cell."""
    mark = re.escape(delimiter.encode())
    rest = rb"[^\r\n" + mark + rb"]*+"
    cell = rb'(?:"(?:[^"]++|"")*+(?:"' + rest + rb"|\Z)|" + rest + rb")"
    for match in re.finditer(cell + rb"(?:" + mark + rb"|(\r\n|\n|\r(?!\Z))|\r?\Z)", data):
        if match[1]:
            yield match.end()
