"""Encoded columns: dictionaries and runs, counted before they are decoded, and decoded in parts.

A dictionary of one long text, or one run, takes a few bytes in a file and any number in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.interchange.formats.tabular.arrays import replace_views
from replaylake.datastore.interchange.sources.compression import refuse_bomb
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.storage.arrow_values import is_list

_PART_BYTES: Final = 16 << 20
_PART_ROWS: Final = 131_072
# What the lists of a small file may decode to: a row's list is decoded as a whole, several times.
MAX_LIST_BYTES: Final = 128 << 20


class ColumnDecoder:
    """Decodes the batches of one file, and counts what they decode to."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._num_bytes = self._num_item_bytes = 0

    def parts(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield a valid batch in parts of about 16 MiB, its columns without dictionaries and runs.

        Raises: SourceInvalidError where the file's batches decode to too much.
        """
        rows_at_least = sum(map(_least_bytes, batch.columns))
        refuse_bomb(self._file.name, self._num_bytes + rows_at_least, self._file.num_bytes)
        self._num_item_bytes += sum(map(_item_bytes, batch.columns))
        refuse_bomb(self._file.name, self._num_item_bytes, self._file.num_bytes, MAX_LIST_BYTES)
        is_encoded = any(_is_encoded(field.type) for field in batch.schema)
        for start in range(0, batch.num_rows, _PART_ROWS):
            rows = batch.slice(start, _PART_ROWS)
            if not is_encoded:
                self._count(rows.nbytes)
                size = max(1, rows.num_rows * _PART_BYTES // max(rows.nbytes, 1))
                for first in range(0, rows.num_rows, size):
                    yield rows.slice(first, size)
                continue
            ends = np.cumsum(sum(map(_sizes, rows.columns), np.zeros(rows.num_rows, np.int64)))
            self._count(int(ends[-1]))
            first = 0
            while first < rows.num_rows:
                before = int(ends[first - 1]) if first else 0
                last = int(np.searchsorted(ends, before + _PART_BYTES, side="right"))
                last = max(first + 1, last)
                part = rows.slice(first, last - first)
                columns = [_decode(column) for column in part.columns]
                fields = [
                    field.with_type(column.type)
                    for field, column in zip(batch.schema, columns, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
                first = last

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        refuse_bomb(self._file.name, self._num_bytes, self._file.num_bytes)


def min_width(kind: pa.DataType) -> int:
    """Return the bytes that a value takes in memory at the least, whatever it is."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return min_width(kind.storage_type)
    if types.is_struct(kind):
        return sum(min_width(field.type) for field in kind)
    if types.is_fixed_size_list(kind):
        return int(kind.list_size) * min_width(kind.value_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return min_width(kind.value_type)  # ingest decodes them
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:  # lists and texts: an offset each
        return 4


def _is_encoded(kind: pa.DataType) -> bool:
    if replace_views(kind) != kind:
        return True
    if isinstance(kind, pa.BaseExtensionType):
        return _is_encoded(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return True
    return any(_is_encoded(kind.field(i).type) for i in range(kind.num_fields))


def _least_bytes(array: pa.Array) -> int:
    """Return what an array decodes to at the least, by its length and its type alone."""
    if isinstance(array, pa.ExtensionArray):
        return _least_bytes(array.storage)
    total = len(array) * min_width(array.type)
    if is_list(array.type) and not pa.types.is_fixed_size_list(array.type):
        total += _least_bytes(array.values)
    elif pa.types.is_struct(array.type):
        total += sum(_least_bytes(array.field(i)) for i in range(array.type.num_fields))
    return total


def _item_bytes(array: pa.Array) -> int:
    """Return what the items of all lists of an array decode to at the least."""
    if isinstance(array, pa.ExtensionArray):
        return _item_bytes(array.storage)
    if is_list(array.type) and not pa.types.is_fixed_size_list(array.type):
        return _least_bytes(array.values)
    if pa.types.is_struct(array.type):
        return sum(_item_bytes(array.field(i)) for i in range(array.type.num_fields))
    return 0


def _sizes(array: pa.Array) -> Any:
    """Return the bytes that each value takes once it is decoded, int64 [n]."""
    kind, num = array.type, len(array)
    if isinstance(array, pa.ExtensionArray):
        return _sizes(array.storage)
    if not _is_encoded(kind):
        if pa.types.is_string(kind) or pa.types.is_binary(kind):
            lengths = pc.fill_null(pc.binary_length(array), 0)
            return np.asarray(lengths).astype(np.int64) + 4
        return np.full(num, -(-array.nbytes // max(num, 1)), np.int64)
    if pa.types.is_dictionary(kind):
        of_value = np.append(_sizes(array.dictionary), 0)
        return of_value[np.asarray(pc.fill_null(array.indices.cast(pa.int64()), -1))]
    if pa.types.is_run_end_encoded(kind):
        first, count = array.find_physical_offset(), array.find_physical_length()
        ends = np.asarray(array.run_ends).astype(np.int64)[first : first + count] - array.offset
        ends = np.clip(ends, 0, num)
        return np.repeat(_sizes(array.values.slice(first, count)), np.diff(ends, prepend=0))
    if pa.types.is_struct(kind):
        parts = [_sizes(array.field(i)) for i in range(kind.num_fields)]
        return sum(parts, np.zeros(num, np.int64))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        ends = np.append(0, np.cumsum(_sizes(array.values)))
        return 4 + np.diff(ends[np.asarray(array.offsets)])
    inner = sum(_sizes(array.values).tolist()) if hasattr(array, "values") else array.nbytes
    return np.full(num, -(-int(inner) // max(num, 1)), np.int64)


def _decode(array: pa.Array) -> pa.Array:
    # Those within lists and structs are decoded where their values are read.
    if pa.types.is_dictionary(array.type):
        return _decode(array.dictionary_decode())
    if pa.types.is_run_end_encoded(array.type):
        return _decode(pc.run_end_decode(array))
    kind = replace_views(array.type)
    return array if kind == array.type else array.cast(kind)
