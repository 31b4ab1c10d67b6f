"""Text rows: tables as lines of CSV or JSON, column by column and exact.

Every float is written so that it reads as the same number: the shortest digits that name its
float64, and `.0` where it is whole, so that it stays a float. float32 values are written as the
float64 that they are, not as the shorter digits which name them among float32 alone.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.storage.arrow_values import combine_chunks, is_list

# Times as ISO 8601 to the microsecond; Arrow writes the fraction with the seconds.
_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"
_TO_ESCAPE: Final = r'["\\\x00-\x1f\x7f]'
_TO_QUOTE: Final = r'["\n\r,;\t|]|^\s|\s$|^$'


def csv_header(names: list[str]) -> bytes:
    """Return the first line; the names are identifiers."""
    return (",".join(names) + "\n").encode()


def csv_lines(table: pa.Table) -> memoryview:
    """Return the rows as CSV: vectors and structs as JSON, an unknown value as nothing."""
    cells = []
    for column in map(combine_chunks, table.columns):
        text = json_text(column, bare=True)
        kind = column.type
        if not (pa.types.is_primitive(kind) or pa.types.is_null(kind)):
            text = _quote(
                text, always=pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType)
            )
        cells.append(pc.fill_null(text, ""))
    return _lines(cells, ",")


def json_lines(table: pa.Table) -> memoryview:
    """Return the rows as one JSON object a line, every column in each."""
    cells = []
    for number, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        value = pc.fill_null(json_text(combine_chunks(column)), "null")
        opening = "{" if number == 0 else ", "
        cells.append(pc.binary_join_element_wise(f"{opening}{json.dumps(name)}: ", value, ""))
    cells.append(pa.repeat("}", table.num_rows))
    return _lines(cells, "")


def json_text(column: pa.Array, *, bare: bool = False) -> pa.Array:
    """Return each value as JSON, null where it is null; `bare` leaves the quotes off texts."""
    types, kind = pa.types, column.type
    if isinstance(column, pa.FixedShapeTensorArray):
        return _tensor_text(column)
    if isinstance(kind, pa.BaseExtensionType):
        return json_text(column.storage, bare=bare)
    if types.is_null(kind):
        return pa.nulls(len(column), pa.string())
    if types.is_dictionary(kind):
        return json_text(column.dictionary_decode(), bare=bare)
    if types.is_boolean(kind) or types.is_integer(kind):
        return column.cast(pa.string())
    if types.is_floating(kind):
        return _float_text(column.cast(pa.float64()), bare=bare)
    if types.is_struct(kind):
        return _struct_text(column)
    if types.is_map(kind):
        return _map_text(column)
    if is_list(kind):
        return _list_text(column)
    text = _plain_text(column)
    return text if bare else _json_strings(text)


def _lines(cells: list[Any], separator: str) -> memoryview:
    """Join the cells of each row, and the rows, which lie in memory one after the other."""
    joined = pc.binary_join_element_wise(*cells, separator)
    lines = pc.binary_join_element_wise(joined, "", "\n").cast(pa.large_string())
    if not len(lines):
        return memoryview(b"")
    _, offsets, data = lines.buffers()
    bounds = np.frombuffer(offsets, np.int64)
    first, last = int(bounds[lines.offset]), int(bounds[lines.offset + len(lines)])
    return memoryview(data)[first:last]


def _float_text(column: pa.Array, *, bare: bool) -> pa.Array:
    text = column.cast(pa.string())
    if not bare:
        # JSON has no NaN and no infinity.
        text = pc.if_else(pc.is_finite(column), text, pa.scalar(None, pa.string()))
    is_whole = pc.and_(pc.equal(column, pc.trunc(column)), pc.is_finite(column))
    if not pc.any(is_whole).as_py():
        return text
    has_exponent = pc.match_substring(text, "e")
    lacks_point = pc.and_(is_whole, pc.invert(has_exponent))
    return pc.if_else(lacks_point, pc.binary_join_element_wise(text, "0", "."), text)


def _struct_text(column: pa.Array) -> pa.Array:
    parts = []
    for number, field in enumerate(column.type):
        value = pc.fill_null(json_text(pc.struct_field(column, field.name)), "null")
        opening = "{" if number == 0 else ", "
        parts.append(pc.binary_join_element_wise(f"{opening}{json.dumps(field.name)}: ", value, ""))
    text = pc.binary_join_element_wise(*parts, "}", "")
    return pc.if_else(column.is_valid(), text, pa.scalar(None, pa.string()))


def _list_text(column: pa.Array) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    inner = pc.fill_null(json_text(column.flatten()), "null")
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(bounds), inner)
    text = pc.binary_join(lists, ", ")
    framed = pc.binary_join_element_wise("[", text, "]", "")
    return pc.if_else(column.is_valid(), framed, pa.scalar(None, pa.string()))


def _map_text(column: pa.Array) -> pa.Array:
    """Write maps as objects; a key that is no text has its own text as its name."""
    column = column.take(pa.array(np.arange(len(column))))  # so that its items begin at 0
    names = json_text(column.keys)
    is_named = pc.starts_with(names, '"')
    names = pc.if_else(is_named, names, _json_strings(names))
    entries = pc.binary_join_element_wise(
        names, pc.fill_null(json_text(column.items), "null"), ": "
    )
    text = pc.binary_join(pa.ListArray.from_arrays(column.offsets, entries), ", ")
    framed = pc.binary_join_element_wise("{", text, "}", "")
    return pc.if_else(column.is_valid(), framed, pa.scalar(None, pa.string()))


def _tensor_text(column: pa.Array) -> pa.Array:
    """Write tensors as lists of lists."""
    flat = column.storage
    values = flat.flatten()
    for size in reversed(column.type.shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    lengths = np.where(np.asarray(flat.is_valid()), column.type.shape[0], 0)
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    mask = pc.invert(flat.is_valid()) if flat.null_count else None
    return _list_text(pa.ListArray.from_arrays(pa.array(bounds), values, mask=mask))


def _plain_text(column: pa.Array) -> pa.Array:
    types, kind = pa.types, column.type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return column.cast(pa.string())
    if types.is_timestamp(kind):
        return pc.strftime(column, format=_TIME if kind.tz else _TIME.removesuffix("Z"))
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        encoded = [None if v is None else base64.b64encode(v).decode() for v in column.to_pylist()]
        return pa.array(encoded, pa.string())
    try:
        return column.cast(pa.string())
    except pa.ArrowNotImplementedError:
        return pa.array([None if v is None else str(v) for v in column.to_pylist()], pa.string())


def _json_strings(text: pa.Array) -> pa.Array:
    if not pc.any(pc.match_substring_regex(text, _TO_ESCAPE)).as_py():
        return pc.binary_join_element_wise('"', text, '"', "")
    escaped = [None if v is None else json.dumps(v, ensure_ascii=False) for v in text.to_pylist()]
    return pa.array(escaped, pa.string())


def _quote(text: pa.Array, *, always: bool) -> pa.Array:
    if pc.any(pc.match_substring(text, '"')).as_py():
        text, plain = pc.replace_substring(text, '"', '""'), text
    else:
        plain = text
    quoted = pc.binary_join_element_wise('"', text, '"', "")
    if always:
        return quoted
    needs = pc.match_substring_regex(plain, _TO_QUOTE)
    return pc.if_else(needs, quoted, text)
