"""Pickled arrays, read without pickle (packed_machine.py), and again without the machine."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from replaylake.datastore.episodes.spaces import Array, num_bytes
from replaylake.datastore.interchange.formats.packed.pickle_machine import (
    NoArray,
    PendingArray,
    PickleMachine,
    PickleRefused,
)

_MAX_DEPTH: Final = 8
_MAX_PARTS: Final = 10_000
# An array may be in a dict twice; without a bound one would be in it ten thousand times.
_MAX_SHARING: Final = 4


class ArrayUnpickler:
    """Reads pickled arrays, one after the other.

    A column's pickles mostly differ in their numbers alone: one that has the same bytes around them
    as the last is read without being run, 10 times faster.
    """

    def __init__(self) -> None:
        self._last: _Layout | None = None

    def read(self, data: bytes) -> Any:
        """Read an array, or dicts and tuples of arrays, as mappings of arrays.

        Members of tuples are called `_0`, `_1` and so on; a list of values that are alike is an
        array of them, one an entry, and else as a tuple is. Arrays may be views of `data`,
        not to be written to. Raises: PickleRefused; nothing is called or imported, whatever the
        bytes are.
        """
        if self._last is not None and self._last.fits(data):
            return self._last.array(data)
        machine = PickleMachine(data)
        try:
            value = machine.run()
            arrays = _arrays(value, [0], 0)
            if isinstance(value, PendingArray):
                value = value.array
            if isinstance(value, np.ndarray):
                of_size = [b for b in machine.buffers if b[1] - b[0] == value.nbytes]
                if len(of_size) == 1:  # else it is not known which of them holds the numbers
                    self._last = _Layout.of(data, of_size[0], value)
            if num_bytes(arrays) > _MAX_SHARING * len(data):
                raise PickleRefused(f"{num_bytes(arrays):,} bytes of arrays in {len(data):,}")
            return arrays
        except (IndexError, KeyError, TypeError, ValueError, OverflowError, struct.error) as error:
            if isinstance(error, PickleRefused):
                raise
            raise PickleRefused(f"a torn pickle ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class _Layout:
    """The bytes of a pickle around its one array's numbers, and what array those are."""

    before: bytes
    after: bytes
    num_bytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: Literal["C", "F"]

    @classmethod
    def of(cls, data: bytes, buffer: tuple[int, int], value: Array) -> _Layout:
        start, end = buffer
        order: Literal["C", "F"] = "C" if value.flags.c_contiguous else "F"
        return cls(data[:start], data[end:], end - start, value.dtype, value.shape, order)

    def fits(self, data: bytes) -> bool:
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
        raise PickleRefused(f"over {_MAX_PARTS} parts or {_MAX_DEPTH} levels")
    if isinstance(value, PendingArray):
        value = value.array
    if isinstance(value, np.ndarray):
        return _native(value)
    if isinstance(value, list) and value and all(isinstance(one, int | float) for one in value):
        return np.asarray(value)
    if isinstance(value, list | tuple):
        parts = {f"_{i}": _arrays(part, seen, depth + 1) for i, part in enumerate(value)}
        if isinstance(value, list) and parts and len({*map(_kind, parts.values())}) == 1:
            return _stacked([*parts.values()])
        value = parts
    elif isinstance(value, dict):
        value = {key: _arrays(part, seen, depth + 1) for key, part in value.items()}
    if isinstance(value, dict) and value:
        return value
    raise NoArray(f"a pickled {type(value).__name__}")


def _kind(values: Any) -> Any:
    if isinstance(values, dict):
        return tuple((key, _kind(part)) for key, part in values.items())
    return values.dtype, values.shape


def _stacked(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: _stacked([one[key] for one in values]) for key in values[0]}
    return np.stack(values)


def _native(array: Array) -> Array:
    """Arrow takes no numbers in another machine's byte order."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
