"""Native rows: journal records as rows of a table, parsed by Arrow rather than by Python.

A server commits its journal once a second on a thread beside its event loop. In Python 10,000
records held the interpreter for 80 ms, and every request waited in between; Arrow's parser takes
15 ms and holds nothing (2 cores, 2026-11). Exact: Arrow reads a JSON number as the same double.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

Encode = Callable[[Sequence[dict[str, Any]]], pa.Table]
"""Turns records into rows of the table."""


class RowEncoder:
    """An Encode whose rows can be had from the records' text as well, where that is plain."""

    def __init__(self, encode: Encode, schema: pa.Schema) -> None:
        self._encode, self.schema = encode, schema
        self._is_plain = can_parse(schema)

    def __call__(self, records: Sequence[dict[str, Any]]) -> pa.Table:
        """Return the records as rows. Raises: EpisodeInvalidError naming what does not fit."""
        return self._encode(records)

    def try_parse(self, records: Sequence[bytes]) -> pa.Table | None:
        """Return the same rows, or None where it takes the other way to tell."""
        return parse_records(records, self.schema) if self._is_plain else None

    def prepare_commit(self, rows: pa.Table) -> pa.Table:
        """Return rows of these records in the form in which they are committed."""
        return rows

    def note_commit(self, rows: pa.Table) -> None:
        """Take note of prepared rows that were committed."""


def can_parse(schema: pa.Schema) -> bool:
    """Whether the columns are texts, numbers, flags, times, or lists of those or their structs."""
    return all(_wire_type(field.type) is not None for field in schema)


def parse_records(records: Sequence[bytes], schema: pa.Schema) -> pa.Table | None:
    """Return records, each one JSON object without newlines, as rows.

    None where one of them does not fit as it is, or is no JSON: a slower reading then says which.
    The schema must be one that `can_parse` takes.
    """
    if not records:
        return schema.empty_table()
    body = b"\n".join(records)
    if body.lstrip().startswith(b"null"):
        return None  # pyarrow 26.0.1 would end the process (segmentation fault)
    wire = pa.schema([pa.field(field.name, _wire_type(field.type)) for field in schema])
    try:
        table = pj.read_json(
            pa.BufferReader(body),
            # One block: a record is never cut.
            read_options=pj.ReadOptions(use_threads=False, block_size=len(body) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=wire, unexpected_field_behavior="error", newlines_in_values=False
            ),
        )
        if table.num_rows != len(records):
            return None
        columns = [_column(field, table.column(field.name)) for field in schema]
    except (pa.ArrowException, ValueError):
        return None
    if any(
        column.null_count and not field.nullable
        for field, column in zip(schema, columns, strict=True)
    ):
        return None
    return pa.Table.from_arrays(columns, schema=schema)


def _wire_type(kind: pa.DataType) -> pa.DataType | None:
    """Return what Arrow is to read from JSON for a column; None where that is not one thing."""
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind):
        element = _wire_type(kind.value_type)
        if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
            element = _struct_wire_type(kind.value_type)
        return None if element is None or pa.types.is_list(element) else pa.list_(element)
    if pa.types.is_dictionary(kind):
        return pa.string() if pa.types.is_string(kind.value_type) else None
    if pa.types.is_string(kind) or pa.types.is_boolean(kind):
        return kind
    if pa.types.is_timestamp(kind) or pa.types.is_integer(kind):
        return pa.int64()
    return pa.float64() if pa.types.is_floating(kind) else None


def _struct_wire_type(kind: pa.DataType) -> pa.DataType | None:
    wires = [(field.name, _wire_type(field.type)) for field in kind]
    is_flat = all(wire is not None and not pa.types.is_list(wire) for _, wire in wires)
    return pa.struct(wires) if is_flat else None


def _column(field: pa.Field, column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    if pa.types.is_dictionary(field.type):
        return array.dictionary_encode().cast(field.type)
    if not pa.types.is_fixed_size_list(field.type):
        return array.cast(field.type)
    present = array.drop_null()
    if not len(present):
        return pa.nulls(len(array), field.type)
    lengths = pc.list_value_length(present)
    if pc.min_max(lengths).as_py() != {"min": field.type.list_size, "max": field.type.list_size}:
        raise ValueError(f"{field.name}: found vectors of other lengths")
    values = present.flatten().cast(field.type.value_type)
    if values.null_count:
        raise ValueError(f"{field.name}: found null in a vector")
    vectors = pa.FixedSizeListArray.from_arrays(values, type=field.type)
    if len(vectors) == len(array):
        return vectors
    # Where it is present, the how many-th it is of those that are.
    counted = pc.subtract(pc.cumulative_sum(array.is_valid().cast(pa.int64())), 1)
    return vectors.take(pc.if_else(array.is_valid(), counted, None))
