"""JSON depth: how deep lists and objects stand in one another, found before a parser recurses.

Arrow's parser takes a frame of the stack for each level: 100,000 brackets end the process.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

# Logs have two or three levels, frames of images four, messages with tool calls perhaps ten.
MAX_DEPTH: Final = 64
_SHORT_LINE: Final = 2000
_NEWLINE, _QUOTE, _OPEN, _CLOSE, _RETURN = b'\n"{}\r'
_LEVELS: Final = np.zeros(256, np.int8)
_LEVELS[[*b"[{"]] = 1
_LEVELS[[*b"]}"]] = -1


def is_shallow(data: bytes) -> bool:
    """Whether no value of some JSON lines is too deep for a parser that recurses.

    Exact for JSON; other bytes may be said to be too deep. Cost: little for short lines of an
    object each, else about what parsing takes.
    """
    if _has_short_objects(data):
        return True
    if b"\\" in data:
        data = data.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    codes = np.frombuffer(data, np.uint8)
    in_text = np.bitwise_xor.accumulate((codes == _QUOTE).view(np.uint8)).view(np.bool_)
    levels = _LEVELS[codes]
    levels[in_text] = 0
    return int(np.cumsum(levels, dtype=np.int32).max(initial=0)) <= MAX_DEPTH


def type_depth(kind: pa.DataType) -> int:
    """Return how many lists and structs a type has in one another, without recursing."""
    depth, level = 0, [kind]
    while level := [kind.field(i).type for kind in level for i in range(kind.num_fields)]:
        depth += 1
    return depth


def _has_short_objects(data: bytes) -> bool:
    """Whether each line is short, begins as an object and ends as one.

    Where `}`, a newline and `{` follow one another, JSON is between two objects or none at all.
    """
    codes = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(codes == _NEWLINE)
    if not len(ends) or ends[-1] + 1 < len(codes):
        ends = np.append(ends, len(codes))
    starts = np.append(0, ends[:-1] + 1)
    lengths = ends - starts
    if lengths.min() < 2 or lengths.max() > _SHORT_LINE:
        return False
    lasts = codes[ends - 1]
    lasts = np.where(lasts == _RETURN, codes[ends - 2], lasts)
    return bool((codes[starts] == _OPEN).all() and (lasts == _CLOSE).all())
