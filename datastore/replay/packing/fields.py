"""Fields: decoded values written into one field of many records."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.schema import to_numpy
from replaylake.datastore.episodes.spaces import Array, Space, Values, leaves
from replaylake.datastore.errors import SchemaMismatchError, SpaceUnsupportedError
from replaylake.datastore.replay.layout import RecordLayout
from replaylake.datastore.storage.arrow_values import combine_chunks, numbers, scalar

# What stands for a policy version that is not known.
UNKNOWN_VERSION: Final = -1


def put_space(
    layout: RecordLayout, rows: NDArray[np.void], column: str, space: Space, found: pa.ChunkedArray
) -> None:
    """Write a column of a space's values, without nulls, into `rows` [M]."""
    put_values(layout, rows, column, space, to_numpy(space, combine_chunks(found)))


def put_values(
    layout: RecordLayout, rows: NDArray[np.void], column: str, space: Space, values: Values
) -> None:
    """Write values [M, ...] of a space, nested as it is, into `rows` [M]."""
    for name, _ in leaves(space, column):
        leaf: Any = values
        for key in name.split(".")[1:]:
            leaf = leaf[key]
        put(layout, rows, name, leaf)


def put_masks(rows: NDArray[np.void], column: pa.ChunkedArray) -> None:
    """Write action masks; what is not known to be forbidden is allowed."""
    rows[schema.ACTION_MASK] = True
    known, masks = _split_known(combine_chunks(column))
    rows[schema.ACTION_MASK][known] = numbers(masks).reshape(-1, column.type.list_size)


def put_column(
    layout: RecordLayout, rows: NDArray[np.void], name: str, found: pa.ChunkedArray
) -> None:
    """Write a further column; unknown floats are NaN, an unknown policy version -1.

    Raises: SchemaMismatchError for other nulls; SpaceUnsupportedError.
    """
    field = layout.column_field(name)
    column = combine_chunks(found)
    is_list = pa.types.is_fixed_size_list(column.type)
    known, values = _split_known(column) if is_list else (slice(None), column)
    num_null = column.null_count + (values.null_count if is_list else 0)
    if num_null and name == schema.POLICY_VERSION:
        values = pc.fill_null(values, scalar(UNKNOWN_VERSION, np.int64))
    elif num_null and not pa.types.is_floating(values.type):
        raise SchemaMismatchError(
            f"column {name!r}: found {num_null} nulls in {len(column)} steps, expected a value in "
            f"each, as no {values.type} says that it is not known. Leave the column or the "
            "episodes out of the view, or fill it in with `annotate`."
        )
    array = numbers(values)
    if is_list:
        array = array.reshape(-1, column.type.list_size)
    if is_list and column.null_count:
        every = np.full((len(column), column.type.list_size), np.nan, array.dtype)
        every[known] = array
        array = every
    put(layout, rows, field, array, name=f"column {name!r}")


def put(
    layout: RecordLayout,
    rows: NDArray[np.void],
    field: str,
    values: Array,
    *,
    name: str | None = None,
) -> None:
    """Write `values` [M, ...] into one field of `rows` [M].

    Raises: SpaceUnsupportedError for numbers beyond float32, with the name or else the field's.
    """
    kind = layout.dtype[field]
    if kind.shape and kind.itemsize and values.dtype == kind.base and values.flags.c_contiguous:
        # One item of bytes a record: numpy copies a field of several numbers half as fast.
        items = values.reshape(len(values), -1).view(f"V{kind.itemsize}")
        rows.view(layout.items_dtype)[field] = items[:, 0]
        return
    with np.errstate(over="raise"):
        try:
            rows[field] = values
        except FloatingPointError as error:
            largest = float(np.abs(values[np.isfinite(values)]).max())
            raise SpaceUnsupportedError(
                f"{name or field}: found {largest:g}, expected numbers that float32 holds, as "
                "replay decodes them. Leave the episode out with `where`, or scale the column."
            ) from error


def _split_known(lists: pa.FixedSizeListArray) -> tuple[Any, pa.Array]:
    """Return which rows of fixed-size lists are not null, and the flat values of those."""
    if not lists.null_count:
        return slice(None), lists.flatten()
    known = numbers(pc.is_valid(lists))
    return known, lists.drop_null().flatten()
