"""Arrow schemas in the two other languages that a table speaks: Delta's JSON and DuckDB's SQL."""

from __future__ import annotations

import json
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.errors import SchemaMismatchError

FIELD_ID: Final = b"PARQUET:field_id"
_PRIMITIVES: Final[list[tuple[pa.DataType, str, str]]] = [
    (pa.bool_(), "boolean", "BOOLEAN"),
    (pa.int8(), "byte", "TINYINT"),
    (pa.int16(), "short", "SMALLINT"),
    (pa.int32(), "integer", "INTEGER"),
    (pa.int64(), "long", "BIGINT"),
    (pa.float32(), "float", "FLOAT"),
    (pa.float64(), "double", "DOUBLE"),
    (pa.string(), "string", "VARCHAR"),
    (pa.binary(), "binary", "BLOB"),
    (pa.large_binary(), "binary", "BLOB"),
    (pa.date32(), "date", "DATE"),
    (pa.timestamp("us", tz="UTC"), "timestamp", "TIMESTAMPTZ"),
]


def field_id(field: pa.Field) -> int:
    """Return the Parquet field id that a column keeps for life."""
    return int(field.metadata[FIELD_ID])


def with_field_ids(schema: pa.Schema) -> pa.Schema:
    """Give every column without a field id the next one above those in the schema."""
    ids = [field_id(field) for field in schema if FIELD_ID in (field.metadata or {})]
    following = max(ids, default=0) + 1
    fields = []
    for field in schema:
        if FIELD_ID not in (field.metadata or {}):
            field = field.with_metadata({FIELD_ID: str(following).encode()})
            following += 1
        fields.append(field)
    return pa.schema(fields)


def to_delta(schema: pa.Schema) -> str:
    """Return Delta's schemaString. Raises: SchemaMismatchError on a type that Delta lacks."""
    return json.dumps(_struct_to_delta(schema))


def to_duckdb(kind: pa.DataType) -> str:
    """Return the DuckDB type that reads a column of this Arrow type.

    Raises: SchemaMismatchError.
    """
    kind = plain_type(kind)
    for arrow, _, sql in _PRIMITIVES:
        if kind.equals(arrow):
            return sql
    if pa.types.is_decimal(kind):
        return f"DECIMAL({kind.precision}, {kind.scale})"
    if _is_list(kind):
        return f"{to_duckdb(kind.value_type)}[]"
    if pa.types.is_map(kind):
        return f"MAP({to_duckdb(kind.key_type)}, {to_duckdb(kind.item_type)})"
    if pa.types.is_struct(kind):
        inner = ", ".join(f'"{field.name}" {to_duckdb(field.type)}' for field in kind)
        return f"STRUCT({inner})"
    raise SchemaMismatchError(f"column type {kind}: no Delta or SQL type holds it. Cast it first.")


def _struct_to_delta(fields: Any, parent: str = "") -> dict[str, Any]:
    return {
        "type": "struct",
        "fields": [
            {
                "name": field.name,
                "type": _to_delta(field.type, f"{parent}{field.name}"),
                "nullable": field.nullable,
                "metadata": {},
            }
            for field in fields
        ],
    }


def _to_delta(kind: pa.DataType, name: str) -> Any:
    kind = plain_type(kind)
    for arrow, delta, _ in _PRIMITIVES:
        if kind.equals(arrow):
            return delta
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if _is_list(kind):
        return {
            "type": "array",
            "elementType": _to_delta(kind.value_type, name),
            "containsNull": kind.value_field.nullable,
        }
    if pa.types.is_map(kind):
        return {
            "type": "map",
            "keyType": _to_delta(kind.key_type, name),
            "valueType": _to_delta(kind.item_type, name),
            "valueContainsNull": True,
        }
    if pa.types.is_struct(kind):
        return _struct_to_delta(kind, f"{name}.")
    raise SchemaMismatchError(
        f"column {name!r}: found {kind}, expected a type that Delta and SQL have. Cast it first."
    )


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column's values, whether it is dictionary-encoded or not."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind))
