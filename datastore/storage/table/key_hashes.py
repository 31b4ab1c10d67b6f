"""Key hashes: 64 bits for the values that a row has in some columns, the same in every process.

Equal keys have equal hashes, whether a column is a dictionary or plain, of 32 or 64 bits; so have,
once in 2**64 pairs, keys that differ: whoever finds an equal hash compares the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.storage.arrow_values import combine_chunks, numbers

Hashes = NDArray[np.uint64]

# Part of every index file: files of other rules are made anew.
HASH_RULES: Final = 1
_NUMBER, _FLOAT, _TEXT = (np.uint64(tag) for tag in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 1))
_WORD_BYTES: Final = 8
# Hashed at once: what numpy makes on the way stays in the processor's cache.
_ROWS_AT_ONCE: Final = 65_536


def is_hashable(kind: pa.DataType) -> bool:
    """Whether a column of this type may be part of a key: one number, time, flag or text a row."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    types = pa.types
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or types.is_temporal(kind)
        or types.is_decimal(kind)
        or _is_bytes(kind)
    )


def hash_keys(columns: Sequence[pa.Array | pa.ChunkedArray]) -> Hashes:
    """Return the hash [N] of each row's values, none of which is null."""
    arrays = [combine_chunks(column) for column in columns]
    num = len(arrays[0])
    hashes = np.full(num, len(arrays), np.uint64)
    for start in range(0, num, _ROWS_AT_ONCE):
        part = hashes[start : start + _ROWS_AT_ONCE]
        for array in arrays:
            part ^= _hash_column(array.slice(start, _ROWS_AT_ONCE))
            _mix(part)
    return hashes


def canonical_bits(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return floats as bits that are equal where the numbers are: one zero, one NaN."""
    floats = values.astype(np.float64) + 0.0
    floats[np.isnan(floats)] = np.nan
    return floats.view(np.int64)


def _hash_column(array: pa.Array) -> Hashes:
    kind = array.type
    if pa.types.is_dictionary(kind):
        if len(array.dictionary) > len(array):
            return _hash_column(array.dictionary_decode())
        return _hash_column(array.dictionary)[numbers(array.indices)]
    if _is_bytes(kind):
        return _hash_bytes(array)
    if pa.types.is_decimal(kind):
        return _hash_bytes(array.cast(pa.string()))
    if pa.types.is_floating(kind):
        words = canonical_bits(numbers(array)).view(np.uint64) ^ _FLOAT
    else:
        words = as_integers(array).view(np.uint64) ^ _NUMBER
    _mix(words)
    return words


def as_integers(array: pa.Array) -> NDArray[np.int64]:
    """Return numbers, times and flags without nulls as int64 [N], which may be written to."""
    kind = array.type
    if pa.types.is_date32(kind) or pa.types.is_time32(kind):
        array = array.cast(pa.int32())
    elif pa.types.is_temporal(kind):
        array = array.cast(pa.int64())
    return numbers(array).astype(np.int64)


def _hash_bytes(array: pa.Array) -> Hashes:
    array = array.cast(pa.large_binary()) if not pa.types.is_large_binary(array.type) else array
    num = len(array)
    _, offset_buffer, data = array.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[array.offset : array.offset + num + 1]
    lengths = np.diff(offsets)
    start, end = int(offsets[0]), int(offsets[-1])
    padded = np.zeros(end - start + _WORD_BYTES, np.uint8)
    if end > start:
        padded[: end - start] = np.frombuffer(data, np.uint8)[start:end]
    # The eight bytes from each byte on, as a number.
    words = np.ndarray((end - start + 1,), "<u8", padded, strides=(1,))
    hashes: Hashes = lengths.astype(np.uint64) ^ _TEXT
    _mix(hashes)
    rest, at = lengths, offsets[:-1] - start
    rows: NDArray[np.int64] | None = None
    while True:
        taken = words[at]
        short = rest < _WORD_BYTES
        if short.any():
            # What follows in the buffer belongs to the next row.
            bits = (np.minimum(rest, _WORD_BYTES - 1) * 8).astype(np.uint64)
            taken = np.where(short, taken & ((np.uint64(1) << bits) - np.uint64(1)), taken)
        mixed = (hashes if rows is None else hashes[rows]) ^ taken
        # Half of `_mix`: it is a word of several, and the whole is mixed in the end.
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(32)
        if rows is None:
            hashes = mixed
        else:
            hashes[rows] = mixed
        longer = np.flatnonzero(rest > _WORD_BYTES)
        if not len(longer):
            return hashes
        if len(longer) < len(rest):
            rows = longer if rows is None else rows[longer]
            rest, at = rest[longer], at[longer]
        rest, at = rest - _WORD_BYTES, at + _WORD_BYTES


def _mix(words: Hashes) -> None:
    """Spread each bit over all others, in place (the finalizer of SplitMix64)."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


def find_nulls(columns: Sequence[pa.Array | pa.ChunkedArray]) -> NDArray[np.bool_] | None:
    """Return in which rows [N] a value of the key is missing; None if in none."""
    missing = None
    for column in columns:
        if column.null_count:
            own = numbers(pc.is_null(column)).copy()
            missing = own if missing is None else missing | own
    return missing
