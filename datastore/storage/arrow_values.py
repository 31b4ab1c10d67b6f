"""Arrow values: numbers between Arrow and numpy by their memory.

pyarrow's own `to_numpy`, `array` and `scalar` import pandas, where it is installed, when the first
of them is called: 0.4 s, more than decoding 1M steps takes (2 cores, 2026-11).
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.errors import SchemaMismatchError

Array = NDArray[Any]

# Number of texts that fit the processor's cache.
_HASHED_AT_ONCE: Final = 1 << 15


def keep_pandas_unloaded() -> None:
    """Make pyarrow treat pandas as absent, unless it is loaded already: pyarrow looks only once.

    Only for processes of our own: from then on, pyarrow treats a pandas object as a plain sequence,
    until something calls `to_pandas`, which looks for pandas again.
    """
    if "pandas" in sys.modules:
        return
    finder = _PandasRefuser()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([True]).to_numpy(zero_copy_only=False)
    finally:
        sys.meta_path.remove(finder)


# A parameter of glibc's mallopt (malloc.h).
_M_ARENA_MAX: Final = -8


def return_freed_memory() -> None:
    """Let Arrow take memory from the system's allocator, which gives freed blocks back at once.

    Only for processes of our own that are to be small rather than fast: Arrow's default keeps what
    it frees, 80 to 100 MiB after the pages of a million episodes (2026-11). glibc would keep as
    much again in an arena for each thread; with one arena, threads wait for each other a little.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    # Another C library has no such function.
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def release_unused_memory() -> None:
    """Return unused memory of Arrow's pool to the operating system."""
    pa.default_memory_pool().release_unused()


class _PandasRefuser(MetaPathFinder):
    """A finder that reports pandas as not installed."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def numbers(column: pa.Array | pa.ChunkedArray) -> Array:
    """Return the values of numbers or flags [N]; unknown floats are NaN, unknown flags False.

    A view of the column's memory where it is numbers in one piece, all known: not to be written to.
    Raises: SchemaMismatchError for unknown integers.
    """
    column = combine_chunks(column)
    if pa.types.is_boolean(column.type):
        known = pc.fill_null(column, scalar(False, np.bool_)) if column.null_count else column
        flags: Array = np.from_dlpack(known.cast(pa.uint8())).view(np.bool_)
        return flags
    if column.null_count and pa.types.is_floating(column.type):
        column = pc.fill_null(column, scalar(np.nan, column.type.to_pandas_dtype()))
    if column.null_count:
        raise SchemaMismatchError(
            f"column of {column.type}: found {column.null_count} nulls in {len(column)} rows, "
            "expected a value in each. Read it as Arrow, or with SQL."
        )
    values: Array = np.from_dlpack(column)
    return values


def is_list(kind: pa.DataType) -> bool:
    """Whether the values are lists, of any kind of list."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_numeric(kind: pa.DataType) -> bool:
    """Whether the values are numbers or flags, or lists of them."""
    if is_list(kind):
        return is_numeric(kind.value_type)
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def combine_chunks(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column in one piece: the column's memory where it is in one already."""
    if isinstance(column, pa.Array):
        return column
    # Combining copies also where there is nothing to combine.
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def scalar(value: float, dtype: Any) -> pa.Scalar:
    """Return a number or flag as Arrow's scalar of a numpy dtype."""
    kind = pa.from_numpy_dtype(dtype)
    memory = np.array([value], dtype)
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(memory)])[0]


def hash_texts(texts: pa.Array) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each text, uint64 [N]; a null has the hash of an empty text.

    The hash is not keyed, so distinct texts may collide: callers that need certainty compare the
    texts of equal hashes. Cost: 1M ids of 20 bytes in 0.05 s (2 cores, 2026-11).
    """
    if not pa.types.is_large_string(texts.type):
        texts = texts.cast(pa.large_string())
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    # The eight bytes that begin at each byte, padded with zeros at the end.
    codes = np.append(np.frombuffer(data or b"", np.uint8), np.zeros(8, np.uint8))
    words = np.ndarray((len(codes) - 7,), "<u8", codes, strides=(1,))
    starts, lengths = ends[:-1], np.diff(ends)
    hashes = np.empty(len(texts), np.uint64)
    # Texts of one length are hashed together, word by word; ids have few lengths.
    for length in np.flatnonzero(np.bincount(lengths, minlength=1)).tolist():
        rows = np.flatnonzero(lengths == length)
        for first in range(0, len(rows), _HASHED_AT_ONCE):
            some = rows[first : first + _HASHED_AT_ONCE]
            hashes[some] = _mix_words(words, starts[some], length)
    return hashes


def _mix_words(
    words: NDArray[np.uint64], starts: NDArray[np.int64], length: int
) -> NDArray[np.uint64]:
    """Return the hashes of texts of one length, which begin at `starts`."""
    seed = length * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    hashes = np.full(len(starts), seed, np.uint64)
    for at in range(0, length, 8):
        word = words[starts + at]
        if at + 8 > length:
            word &= np.uint64((1 << 8 * (length - at)) - 1)
        # Increment and finalizer of SplitMix64: Steele, Lea & Flood 2014, "Fast Splittable
        # Pseudorandom Number Generators", section 4.
        hashes ^= word
        hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashes ^= hashes >> np.uint64(31)
    return hashes


def row_numbers(rows: NDArray[np.int64]) -> pa.Int64Array:
    """Return row numbers [N] for `take`, as a view of them."""
    buffer = pa.py_buffer(np.ascontiguousarray(rows, np.int64))
    return pa.Array.from_buffers(pa.int64(), len(rows), [None, buffer])
