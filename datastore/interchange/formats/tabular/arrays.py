"""Columns as arrays: a log's Arrow columns decoded to numpy; rows that do not fit are marked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes.schema import TIMESTAMP_TYPE, widen
from replaylake.datastore.episodes.spaces import Array, Values
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.tabular.fields import column_name
from replaylake.datastore.storage.arrow_values import is_list

Mask = NDArray[np.bool_]

_ARROW_TENSOR: Final = "arrow.fixed_shape_tensor"
_RAY_TENSORS: Final = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2")


@dataclass(frozen=True)
class DecodedColumn:
    """Values [n, ...] and, for each check that some row fails, the failing rows bool [n]."""

    values: Any
    faults: Mapping[str, Mask]


def decode(column: pa.Array, shape: tuple[int, ...] | None = None) -> DecodedColumn:
    """Decode a column to an array [n, ...], or to a mapping of arrays for a struct.

    Rows that are null (`missing`), of another length than most (`shape`) or not finite
    (`not_finite`) are marked and hold zeros or what the log has. `shape` is the shape of one value
    of a tensor column.
    """
    kind = column.type
    if pa.types.is_struct(kind):
        parts = {f.name: decode(pc.struct_field(column, f.name)) for f in kind}
        faults: dict[str, Mask] = {}
        for part in parts.values():
            faults = _either(faults, part.faults)
        return DecodedColumn({name: part.values for name, part in parts.items()}, faults)
    values, missing, uneven = _dense(column)
    if shape is not None and values.ndim > 1:
        values = values.reshape(len(values), *shape)
    faults = {"missing": missing} if missing.any() else {}
    if uneven.any():
        faults["shape"] = uneven
    if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
        bad = ~finite.reshape(len(values), -1).all(axis=1)
        if (bad & ~missing).any():
            faults["not_finite"] = bad & ~missing
    return DecodedColumn(values, faults)


def stack(parts: list[DecodedColumn], names: list[str], what: str) -> DecodedColumn:
    """Join several columns, in order, into one vector a row. Raises: SourceInvalidError."""
    if len(parts) == 1:
        return parts[0]
    faults: dict[str, Mask] = {}
    arrays = []
    for part, name in zip(parts, names, strict=True):
        if isinstance(part.values, Mapping) or part.values.dtype.kind not in "fiub":
            raise SourceInvalidError(
                f"column {name!r}: found text or a struct, expected numbers to build {what} from. "
                "Leave it out of the mapping; a new dataset encodes text beside numbers."
            )
        faults = _either(faults, part.faults)
        arrays.append(part.values.reshape(len(part.values), -1))
    return DecodedColumn(np.concatenate(arrays, axis=1), faults)


def whole_numbers(column: pa.Array) -> DecodedColumn:
    """Decode to int64; rows that are not whole numbers are marked `not_whole`."""
    decoded = decode(column)
    values = decoded.values
    if isinstance(values, Mapping) or values.ndim != 1 or values.dtype.kind not in "fiub":
        return DecodedColumn(
            np.zeros(len(column), np.int64), {"not_whole": np.ones(len(column), bool)}
        )
    with np.errstate(invalid="ignore"):
        cast = values.astype(np.int64)
    # Above 2**53 a float no longer names one integer.
    inexact = (cast != values) | (np.abs(cast) > 2**53 if values.dtype.kind == "f" else False)
    faults = dict(decoded.faults)
    if inexact.any():
        faults["not_whole"] = inexact
    return DecodedColumn(cast, faults)


def flags(column: pa.Array) -> DecodedColumn:
    """Decode to bool; 0 and 1 count, other values are marked `not_a_flag`."""
    decoded = decode(column)
    values = decoded.values
    if isinstance(values, Mapping) or values.ndim != 1 or values.dtype.kind not in "fiub":
        return DecodedColumn(
            np.zeros(len(column), bool), {"not_a_flag": np.ones(len(column), bool)}
        )
    faults = dict(decoded.faults)
    if values.dtype.kind != "b" and (other := (values != 0) & (values != 1)).any():
        faults["not_a_flag"] = other
    return DecodedColumn(values == 1, faults)


def decode_names(column: pa.Array, what: str) -> pa.Array:
    """Return a column of ids or names as text.

    Raises: SourceInvalidError on types that name nothing.
    """
    kind = column.type
    if pa.types.is_floating(kind):
        whole = whole_numbers(column)
        if "not_whole" in whole.faults or "not_finite" in whole.faults:
            raise SourceInvalidError(
                f"{what}: found {kind} values that are not exact whole numbers, expected text or "
                "integers. Write ids as text (floats cannot represent all integers over 2**53)."
            )
        column = pa.array(whole.values, mask=np.asarray(column.is_null()))
    elif not (pa.types.is_integer(kind) or is_text(kind) or pa.types.is_null(kind)):
        raise SourceInvalidError(
            f"{what}: found {kind}, expected text or integers. Map another column."
        )
    return column.cast(pa.string())


def microseconds(column: pa.Array, what: str) -> Array:
    """Decode times to int64 us since 1970, UTC, an absent one to 0.

    Raises: SourceInvalidError on naive or inexact ones.
    """
    kind = column.type
    has_zone = pa.types.is_timestamp(kind) and kind.tz is not None
    if not (has_zone or is_text(kind)):
        raise SourceInvalidError(
            f"{what}: found {kind}, expected times with a zone, such as 2026-01-31T12:00:00Z. Add "
            f"the zone, or keep the column under another name with `mapping` NEW={what}."
        )
    try:
        cast = column.cast(TIMESTAMP_TYPE)
    except pa.ArrowException as error:
        raise SourceInvalidError(
            f"{what}: {error}. Expected times with a zone, such as 2026-01-31T12:00:00Z, exact to "
            f"the microsecond. Or keep the column as it is with `mapping` NEW={what}."
        ) from error
    return np.asarray(cast.cast(pa.int64()).fill_null(0))


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds strings."""
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def to_plain(field: pa.Field, column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, Any]:
    """Return a column without extension and dictionary types and views, and a tensor's shape.

    Ray's tensor columns are read without ray: their storage is a list, their shape in the field's
    metadata. Raises: SourceInvalidError on tensors of varying shape.
    """
    shape = None
    name = (field.metadata or {}).get(b"ARROW:extension:name", b"").decode()
    extension = (field.metadata or {}).get(b"ARROW:extension:metadata", b"").decode()
    if isinstance(column.type, pa.FixedShapeTensorType):
        # Arrow knows this one, and says nothing of it in bytes.
        extension = json.dumps({"shape": column.type.shape})
        name = _ARROW_TENSOR
        column = pa.chunked_array([c.storage for c in column.chunks], column.type.storage_type)
    elif isinstance(column.type, pa.BaseExtensionType):
        name, extension = column.type.extension_name, _serialize_type(column.type)
        chunks = [chunk.storage for chunk in column.chunks]
        column = pa.chunked_array(chunks, column.type.storage_type)
    if name in _RAY_TENSORS:
        shape = tuple(int(size) for size in extension.strip("[] ").split(",") if size.strip())
    elif name == _ARROW_TENSOR:
        shape = tuple(int(size) for size in json.loads(extension)["shape"])
    elif name.startswith("ray.data."):
        raise SourceInvalidError(
            f"column {field.name!r}: found {name}, expected a tensor column of one shape. "
            "Write it as lists of numbers."
        )
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if (kind := replace_views(column.type)) != column.type:
        column = column.cast(kind)
    return column, shape


def replace_views(kind: pa.DataType) -> pa.DataType:
    """Return a type with texts and bytes in place of views of them, which pyarrow 26 cannot take.

    The same type if it has none, at any depth of lists and structs.
    """
    types = pa.types
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    if types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([field.with_type(replace_views(field.type)) for field in fields])
    if types.is_list(kind):
        return pa.list_(kind.value_field.with_type(replace_views(kind.value_type)))
    if types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(replace_views(kind.value_type)))
    if types.is_fixed_size_list(kind):
        item = kind.value_field.with_type(replace_views(kind.value_type))
        return pa.list_(item, kind.list_size)
    return kind


def to_storable(column: pa.Array, name: str) -> pa.Array | None:
    """Return a further column as it can be stored, or None where nothing is in it (nulls, {}).

    Struct members are renamed and pruned by the same rules as columns. Raises: SchemaMismatchError,
    SourceInvalidError if two members would have one name.
    """
    kind = column.type
    if pa.types.is_null(kind):
        return None
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
    if pa.types.is_struct(kind):
        members = {
            column_name(f.name, i): to_storable(pc.struct_field(column, f.name), f"{name}.{f.name}")
            for i, f in enumerate(kind)
        }
        if len(members) < kind.num_fields:
            raise SourceInvalidError(
                f"column {name!r}: found members {[f.name for f in kind]}, expected names that "
                "remain distinct after characters outside [A-Za-z0-9_] are replaced. Rename one."
            )
        storable = {key: member for key, member in members.items() if member is not None}
        if not storable:
            return None
        mask = column.is_null() if column.null_count else None
        return pa.StructArray.from_arrays(list(storable.values()), names=list(storable), mask=mask)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        column = column.cast(pa.list_(kind.value_field)) if pa.types.is_large_list(kind) else column
        start, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
        inner = to_storable(column.values.slice(start, end - start), name)
        if inner is None:
            return None
        mask = column.is_null() if column.null_count else None
        return pa.ListArray.from_arrays(pc.subtract(column.offsets, start), inner, mask=mask)
    return widen(column, name)


def find_unfilled(kind: pa.DataType, name: str) -> list[str]:
    """Return the members of a column's structs that `stored` leaves out, as they hold nothing."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return find_unfilled(kind.value_type, name)
    if not pa.types.is_struct(kind):
        return []
    unfilled = []
    for f in kind:
        member = f"{name}.{f.name}"
        is_empty = pa.types.is_null(f.type) or (
            pa.types.is_struct(f.type) and not f.type.num_fields
        )
        unfilled += [member] if is_empty else find_unfilled(f.type, member)
    return unfilled


def _serialize_type(kind: Any) -> str:
    raw = kind.__arrow_ext_serialize__() if hasattr(kind, "__arrow_ext_serialize__") else b""
    return bytes(raw).decode(errors="replace")


def _dense(column: pa.Array) -> tuple[Array, Mask, Mask]:
    """Return values [n, ...], null rows, and rows of another length than most."""
    num, kind = len(column), column.type
    none = np.zeros(num, dtype=bool)
    if (values := _dense_tensors(column)) is not None:
        return values, none, none
    if pa.types.is_null(kind):
        return np.zeros(num), ~none, none
    if is_list(kind):
        return _dense_lists(column)
    missing = np.asarray(column.is_null()) if column.null_count else none
    if pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    elif not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return column.to_numpy(zero_copy_only=False), missing, none
    if column.null_count:
        column = column.fill_null(False if pa.types.is_boolean(kind) else 0)
    return column.to_numpy(zero_copy_only=False), missing, none


def _dense_tensors(column: pa.Array) -> Array | None:
    """Return fixed-size lists, also of such lists, that lack nothing: as they lie in memory."""
    inner, shape = column, []
    while pa.types.is_fixed_size_list(inner.type) and not inner.null_count:
        shape.append(inner.type.list_size)
        inner = inner.flatten()
    is_number = pa.types.is_integer(inner.type) or pa.types.is_floating(inner.type)
    if not shape or not is_number or inner.null_count:
        return None
    values: Array = inner.to_numpy(zero_copy_only=False)
    return values.reshape(len(column), *shape)


def _dense_lists(column: pa.Array) -> tuple[Array, Mask, Mask]:
    num = len(column)
    lengths = np.asarray(pc.list_value_length(column).fill_null(-1)).astype(np.int64)
    known = lengths[lengths >= 0]
    width = int(np.bincount(known).argmax()) if len(known) else 0
    missing, fits = lengths < 0, lengths == width
    if num and not len(known):
        size = column.type.list_size if pa.types.is_fixed_size_list(column.type) else 0
        return np.zeros((num, size)), missing, np.zeros(num, dtype=bool)
    lists = column if fits.all() else column.filter(pa.array(fits))
    inner, null_inside, uneven_inside = _dense(lists.flatten())
    rows = int(fits.sum())
    inner = inner.reshape(rows, width, *inner.shape[1:])
    if fits.all():
        null_rows = np.asarray(null_inside.reshape(rows, width).any(axis=1))
        return inner, null_rows, np.asarray(uneven_inside.reshape(rows, width).any(axis=1))
    values = np.zeros((num, *inner.shape[1:]), inner.dtype)
    values[fits] = inner
    missing[fits] |= null_inside.reshape(rows, width).any(axis=1)
    uneven = ~fits & (lengths >= 0)
    uneven[fits] |= uneven_inside.reshape(rows, width).any(axis=1)
    return values, missing, uneven


def _either(first: Mapping[str, Mask], second: Mapping[str, Mask]) -> dict[str, Mask]:
    joined = dict(first)
    for check, rows in second.items():
        joined[check] = joined[check] | rows if check in joined else rows
    return joined


def as_vectors(values: Values) -> Values:
    """Give scalar floats a dim of 1: learners and gymnasium know vectors, not lone floats."""
    if isinstance(values, Mapping):
        return values
    return values[:, None] if values.ndim == 1 and values.dtype.kind == "f" else values
