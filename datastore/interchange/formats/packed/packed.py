"""Packed values: base64 of LZ4 of a pickled array, and msgpack with numpy's arrays in it.

Both are what RLlib writes. Nothing in them is executed: pickle_vm.py reads the one, and of the
other an array of Python objects (a pickle again) comes out as `Unread`.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import numpy as np

from replaylake.datastore.episodes.spaces import Array, num_bytes
from replaylake.datastore.errors import ExtraMissingError, SourceInvalidError
from replaylake.datastore.interchange.formats.packed.pickle_vm import (
    NUMBERS,
    NotAnArrayError,
    PendingArray,
    PickleRefusedError,
    PickleVM,
)
from replaylake.datastore.interchange.sources.compression import refuse_bomb

# Base64 of an LZ4 frame's magic number.
PACKED_MAGIC: Final = "BCJNGG"
# LZ4 makes no more than 255 bytes of one; a frame that declares more is no frame.
_LZ4_RATIO: Final = 256
_MAX_DEPTH: Final = 8
_MAX_PARTS: Final = 10_000
# An array may be in a dict twice; without a bound one would be in it ten thousand times.
_MAX_SHARING: Final = 4


@dataclass(frozen=True)
class UnreadPart:
    """A part of a message that is not read, such as a pickled one; `what` says what it is."""

    what: str


class NoArraysError(SourceInvalidError):
    """A packed value that holds no arrays, such as infos; nothing in it would be run either."""


def is_packed(value: Any) -> bool:
    """Whether a cell is a text as RLlib packs arrays into."""
    return isinstance(value, str) and value.startswith(PACKED_MAGIC)


class Unpacker:
    """Unpacks the cells of one column: base64 of an LZ4 frame of a pickled array."""

    def __init__(self) -> None:
        self._pickles = ArrayUnpickler()

    def __call__(self, text: str, where: str) -> Any:
        """Return an array, or a mapping of arrays for a pickled dict or tuple of them.

        `where` is the place for messages. Raises: SourceInvalidError for anything else, of which
        nothing is run; ExtraMissingError without lz4. Cost: 6 us for a small array that is like the
        last one, else 40 us (2 cores, 2026-11).
        """
        lz4 = _lz4()
        try:
            raw = base64.b64decode(text, validate=True)
            declared = lz4.get_frame_info(raw)["content_size"]
            refuse_bomb(where, declared, len(raw))
            if declared > _LZ4_RATIO * len(raw):
                raise PickleRefusedError(f"{len(raw)} bytes of LZ4 that declare {declared:,}")
            return self._pickles.read(lz4.decompress(raw))
        except (ValueError, RuntimeError, MemoryError) as error:
            refusal = NoArraysError if isinstance(error, NotAnArrayError) else SourceInvalidError
            raise refusal(
                f"{where}: found {_one_line(error)}, expected a packed numpy array (base64 of LZ4 "
                "of its pickle). Write the log again, with packed columns off "
                '("output_compress_columns": []), or leave the file out.'
            ) from error


def decode_message(data: bytes, where: str) -> Any:
    """Decode msgpack, with arrays as msgpack_numpy writes them, and `Unread` in place of pickles.

    Arrays are views of `data`. Raises: SourceInvalidError naming `where`; ExtraMissingError without
    msgpack.
    """
    msgpack = _msgpack()
    try:
        return msgpack.unpackb(data, object_hook=_array, raw=False, strict_map_key=False)
    except (ValueError, TypeError, KeyError, OverflowError, msgpack.UnpackException) as error:
        raise SourceInvalidError(
            f"{where}: found {_one_line(error)}, expected one whole msgpack value. It may be "
            "damaged: write the log again, or leave the file out."
        ) from error


def _array(body: dict[Any, Any]) -> Any:
    """Build an array where msgpack_numpy wrote one: {nd, type, kind, shape, data}."""
    if b"nd" not in body and "nd" not in body:
        return body
    parts: Mapping[str, Any] = {_text(key): value for key, value in body.items()}
    if not {"nd", "type", "data"} <= set(parts):
        return body
    kind = _text(parts.get("kind", ""))
    if kind == "O":
        return UnreadPart("a pickled array of Python objects")
    code = _text(parts["type"]) if isinstance(parts["type"], str | bytes) else "a structure"
    if kind == "V" or not NUMBERS.match(code):
        return UnreadPart(f"an array of dtype {code[:20]}")
    if not isinstance(parts["data"], bytes):
        raise ValueError("an array without its bytes")
    flat = np.frombuffer(parts["data"], code) if parts["data"] else np.empty(0, code)
    if parts["nd"] is not True:
        return flat[0]
    shape = parts.get("shape")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("an array whose shape is not a list of sizes")
    native = flat.astype(flat.dtype.newbyteorder("="), copy=False)
    return native.reshape(shape)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


@cache
def _lz4() -> Any:
    try:
        import lz4.frame
    except ImportError as error:
        raise ExtraMissingError(
            "packed columns (base64 of LZ4) need the Python package lz4, which is not installed. "
            "Run: pip install 'replaylake[formats]'"
        ) from error
    return lz4.frame


@cache
def _msgpack() -> Any:
    try:
        import msgpack
    except ImportError as error:
        raise ExtraMissingError(
            "RLlib's episode files need the Python package msgpack, which is not installed. "
            "Run: pip install 'replaylake[formats]'"
        ) from error
    return msgpack


class ArrayUnpickler:
    """Reads pickled arrays, one after the other.

    A column's pickles mostly differ in their numbers alone: one that has the same bytes around them
    as the last is read without being run, 10 times faster.
    """

    def __init__(self) -> None:
        self._last: _PickleLayout | None = None

    def read(self, data: bytes) -> Any:
        """Read an array, or dicts and tuples of arrays, as mappings of arrays.

        Members of tuples are called `_0`, `_1` and so on; a list of values that are alike is an
        array of them, one an entry, and else as a tuple is. Arrays may be views of `data`,
        not to be written to. Raises: PickleRefusedError; nothing is called or imported, whatever
        the bytes are.
        """
        if self._last is not None and self._last.can_read(data):
            return self._last.array(data)
        machine = PickleVM(data)
        try:
            value = machine.run()
            arrays = _arrays(value, [0], 0)
            if isinstance(value, PendingArray):
                value = value.array
            if isinstance(value, np.ndarray):
                of_size = [b for b in machine.buffers if b[1] - b[0] == value.nbytes]
                if len(of_size) == 1:  # else it is not known which of them holds the numbers
                    self._last = _PickleLayout.from_pickle(data, of_size[0], value)
            if num_bytes(arrays) > _MAX_SHARING * len(data):
                raise PickleRefusedError(f"{num_bytes(arrays):,} bytes of arrays in {len(data):,}")
            return arrays
        except (IndexError, KeyError, TypeError, ValueError, OverflowError, struct.error) as error:
            if isinstance(error, PickleRefusedError):
                raise
            raise PickleRefusedError(
                f"a damaged pickle ({type(error).__name__}: {error})"
            ) from error


@dataclass(frozen=True)
class _PickleLayout:
    """The bytes of a pickle around its one array's numbers, and what array those are."""

    before: bytes
    after: bytes
    num_bytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: Literal["C", "F"]

    @classmethod
    def from_pickle(cls, data: bytes, buffer: tuple[int, int], value: Array) -> _PickleLayout:
        start, end = buffer
        order: Literal["C", "F"] = "C" if value.flags.c_contiguous else "F"
        return cls(data[:start], data[end:], end - start, value.dtype, value.shape, order)

    def can_read(self, data: bytes) -> bool:
        return (
            self.num_bytes > 0
            and len(data) == len(self.before) + self.num_bytes + len(self.after)
            and data.startswith(self.before)
            and data.endswith(self.after)
        )

    def array(self, data: bytes) -> Array:
        raw = memoryview(data)[len(self.before) : len(self.before) + self.num_bytes]
        shaped: Array = np.frombuffer(raw, self.dtype).reshape(self.shape, order=self.order)
        return _native(shaped)


def _arrays(value: Any, seen: list[int], depth: int) -> Any:
    """Return arrays and mappings of them; shared parts count each time they are met."""
    seen[0] += 1
    if seen[0] > _MAX_PARTS or depth > _MAX_DEPTH:
        raise PickleRefusedError(f"over {_MAX_PARTS} parts or {_MAX_DEPTH} levels")
    if isinstance(value, PendingArray):
        value = value.array
    if isinstance(value, np.ndarray):
        return _native(value)
    if isinstance(value, list) and value and all(isinstance(one, int | float) for one in value):
        return np.asarray(value)
    if isinstance(value, list | tuple):
        parts = {f"_{i}": _arrays(part, seen, depth + 1) for i, part in enumerate(value)}
        if isinstance(value, list) and parts and len({*map(_kind, parts.values())}) == 1:
            return _stack([*parts.values()])
        value = parts
    elif isinstance(value, dict):
        value = {key: _arrays(part, seen, depth + 1) for key, part in value.items()}
    if isinstance(value, dict) and value:
        return value
    raise NotAnArrayError(f"a pickled {type(value).__name__}")


def _kind(values: Any) -> Any:
    if isinstance(values, dict):
        return tuple((key, _kind(part)) for key, part in values.items())
    return values.dtype, values.shape


def _stack(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: _stack([one[key] for one in values]) for key in values[0]}
    return np.stack(values)


def _native(array: Array) -> Array:
    """Arrow takes no numbers in another machine's byte order."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
