"""Arrow values: numbers between Arrow and numpy by their memory.

pyarrow's own `to_numpy`, `array` and `scalar` import pandas, where it is installed, when the first
of them is called: 0.3 s, more than decoding 1M steps takes (2 cores, 2026-11).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.errors import SchemaMismatchError

Array = NDArray[Any]


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


def row_numbers(rows: NDArray[np.int64]) -> pa.Int64Array:
    """Return row numbers [N] for `take`, as a view of them."""
    buffer = pa.py_buffer(np.ascontiguousarray(rows, np.int64))
    return pa.Array.from_buffers(pa.int64(), len(rows), [None, buffer])
