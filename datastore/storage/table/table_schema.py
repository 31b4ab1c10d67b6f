"""A table's Arrow schema: kept in its metadata, extended by later appends, imposed on rows."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final

import pyarrow as pa

from replaylake.datastore.errors import LogCorruptError, NotFoundError, SchemaMismatchError
from replaylake.datastore.storage.log.state import LogState, TableMetadata, format_configuration
from replaylake.datastore.storage.table.delta_schema import field_id, to_delta, with_field_ids
from replaylake.datastore.version import VERSION

# Arrow types that Delta's schema lacks (fixed-size lists, dictionaries) survive here, exactly.
_ARROW_SCHEMA_KEY: Final = "replaylake.arrow_schema"


def new_metadata(
    schema: pa.Schema, configuration: Mapping[str, str], *, has_entries: bool = False
) -> TableMetadata:
    """Return the metadata of a new table."""
    return TableMetadata(
        id=str(uuid.uuid4()),
        schema_string=to_delta(schema),
        configuration={
            **format_configuration(VERSION, schema.names),
            _ARROW_SCHEMA_KEY: _encode_schema(schema),
            **configuration,
        },
        created_ms=time.time_ns() // 1_000_000,
        has_entries=has_entries,
    )


def table_schema(state: LogState) -> pa.Schema:
    """Return the Arrow schema, with field ids."""
    encoded = read_configuration(state).get(_ARROW_SCHEMA_KEY)
    if encoded is None:
        raise LogCorruptError(
            f"table: found no {_ARROW_SCHEMA_KEY} in its configuration, expected one: another "
            "engine made it. Ingest its rows into a dataset instead."
        )
    return _decode_schema(encoded)


@lru_cache(maxsize=256)
def _decode_schema(encoded: str) -> pa.Schema:
    """Remembered: a small append asks four times, and it seldom changes."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(encoded)))


def read_configuration(state: LogState) -> Mapping[str, str]:
    """Return the table's configuration. Raises: NotFoundError before the table exists."""
    if state.metadata is None:
        raise NotFoundError("found no table, expected one.")
    return state.metadata.configuration


def merge_schemas(current: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return `current` and the columns that only `other` has, nullable.

    Raises: SchemaMismatchError.
    """
    extra = []
    by_lower = {name.lower(): name for name in current.names}
    for field in other:
        if field.name not in current.names:
            # Delta and SQL tell no case apart.
            if (same := by_lower.setdefault(field.name.lower(), field.name)) != field.name:
                raise SchemaMismatchError(
                    f"column {field.name!r}: found beside {same!r}, expected names that differ "
                    "without regard to case. Rename it."
                )
            extra.append(pa.field(field.name, field.type))
        elif not field.type.equals(current.field(field.name).type):
            raise SchemaMismatchError(
                f"column {field.name!r}: found {field.type}, expected "
                f"{current.field(field.name).type} as the table has it. Cast it, or rename it."
            )
    if not extra:
        return current
    return with_field_ids(pa.schema([*current, *extra]))


def extend_schema(current: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return `merge_schemas`, where a column may also be null if it may in `other`."""
    merged = merge_schemas(current, other)
    relaxed = [
        field.with_nullable(True)
        if not field.nullable and field.name in other.names and other.field(field.name).nullable
        else field
        for field in merged
    ]
    extended = pa.schema(relaxed)
    return current if extended.equals(current) else extended


def conform(data: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of `schema` in its order, absent ones as nulls.

    Raises: SchemaMismatchError.
    """
    columns = []
    for field in schema:
        if field.name in data.schema.names:
            column = data.column(field.name)
            if not field.nullable and column.null_count:
                raise SchemaMismatchError(
                    f"column {field.name!r}: found {column.null_count} nulls, expected "
                    f"{field.type} in each row."
                )
            columns.append(column if column.type.equals(field.type) else _cast(column, field))
        elif field.nullable:
            columns.append(pa.nulls(data.num_rows, field.type))
        else:
            raise SchemaMismatchError(
                f"column {field.name!r}: absent, expected {field.type} in each row."
            )
    return pa.Table.from_arrays(columns, schema=schema)


def _cast(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise SchemaMismatchError(
            f"column {field.name!r}: found {column.type}, expected {field.type}: {error}."
        ) from error


def has_other_ids(current: pa.Schema, written: pa.Schema) -> bool:
    """Whether a column that was written has another field id in the current schema."""
    return any(field_id(field) != field_id(current.field(field.name)) for field in written)


def with_schema(state: LogState, schema: pa.Schema) -> TableMetadata:
    if state.metadata is None:
        raise NotFoundError("found no table, expected one.")
    current = state.metadata.configuration
    configuration = {
        **current,
        **format_configuration(VERSION, schema.names, current),
        _ARROW_SCHEMA_KEY: _encode_schema(schema),
    }
    return replace(state.metadata, schema_string=to_delta(schema), configuration=configuration)


def _encode_schema(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()
