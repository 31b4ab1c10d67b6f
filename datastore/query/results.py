"""Results: the rows of a query, written as CSV, JSON, JSON lines or Parquet."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, get_args
from uuid import UUID

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from replaylake.datastore.errors import ConfigInvalidError, QueryError
from replaylake.datastore.storage.storage import atomic_write

ResultFormat = Literal["csv", "json", "jsonl", "parquet"]
RESULT_FORMATS: Final[tuple[str, ...]] = get_args(ResultFormat)
# Rows turned into Python objects at a time: memory stays flat however large the result is.
_CHUNK_ROWS: Final = 4096


def write_result(
    table: pa.Table,
    form: str,
    target: Path | BinaryIO,
    also: Mapping[str, Any] | None = None,
) -> None:
    """Write a query's result.

    csv: a header line; vectors and structs as JSON text. json: one object with `columns`, what
    `also` has, and `rows` (objects). jsonl: one object a line. In both, bytes are base64, times
    ISO 8601, and numbers that JSON lacks null. parquet: as Arrow has it.

    A path is written beside its name and renamed: it is there whole, or as it was before.

    Raises: ConfigInvalidError for another format, StorageError.
    """
    if form not in RESULT_FORMATS:
        raise ConfigInvalidError(
            f"result format: found {form!r}, expected one of {', '.join(RESULT_FORMATS)}."
        )
    table = _distinct_names(table)
    if not isinstance(target, Path):
        _write(table, form, target, also or {})
        return
    with atomic_write(target) as stream:
        _write(table, form, stream, also or {})


def _write(table: pa.Table, form: str, stream: BinaryIO, also: Mapping[str, Any]) -> None:
    if form == "parquet":
        try:
            pq.write_table(table, stream, compression="zstd")
        except pa.ArrowNotImplementedError as error:
            raise QueryError(
                f"result: found a column whose type Parquet does not have ({error}). Select it as "
                "text, CAST(... AS VARCHAR)."
            ) from error
    elif form == "csv":
        options = pyarrow.csv.WriteOptions(quoting_style="needed")
        pyarrow.csv.write_csv(_flat(table), stream, options)
    elif form == "jsonl":
        for row in _rows(table):
            stream.write(row + b"\n")
    else:
        head = json.dumps({"columns": table.column_names, **also})
        stream.write(f'{head[:-1]}, "rows": ['.encode())
        for index, row in enumerate(_rows(table)):
            stream.write((b", " if index else b"") + row)
        stream.write(b"]}\n")


def python_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield rows as Python objects, few at a time.

    Raises: QueryError for a date or time that Python cannot hold.
    """
    for batch in table.to_batches(max_chunksize=_CHUNK_ROWS):
        with _in_calendar(batch.schema):
            rows = _to_python(batch)
        yield from rows


def _to_python(values: Any) -> list[Any]:
    """Return Arrow values as Python objects: maps as dicts, or pairs if a key is not hashable."""
    try:
        found: list[Any] = values.to_pylist(maps_as_pydicts="lossy")
    except TypeError:
        found = values.to_pylist()
    return found


@contextmanager
def _in_calendar(schema: pa.Schema) -> Iterator[None]:
    try:
        yield
    except (OverflowError, ValueError) as error:
        times = [f.name for f in schema if pa.types.is_temporal(f.type)] or schema.names
        raise QueryError(
            f"result: column {' or '.join(times)}: found a date or time that cannot be written "
            f"({error}), expected the years 1 to 9999 and microseconds. Select it as text, "
            "CAST(... AS VARCHAR), or write Parquet."
        ) from error


def _rows(table: pa.Table) -> Iterator[bytes]:
    for row in python_rows(table):
        yield json.dumps(_plain(row), ensure_ascii=False, allow_nan=False).encode()


def _flat(table: pa.Table) -> pa.Table:
    """Return the table with what CSV cannot hold as text."""
    columns = []
    for field, column in zip(table.schema, table.columns, strict=True):
        kind = column.type
        if pa.types.is_dictionary(kind):
            column = column.cast(kind.value_type)
        elif pa.types.is_nested(kind) or _is_other(kind):
            with _in_calendar(pa.schema([field])):
                values = _to_python(column)
            column = pa.array(map(_cell, values), pa.string())
        columns.append(column)
    return pa.Table.from_arrays(columns, names=table.column_names)


def _is_other(kind: pa.DataType) -> bool:
    plain = (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_boolean,
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_timestamp,
        pa.types.is_date,
        pa.types.is_null,
    )
    return not any(test(kind) for test in plain)


def _cell(value: Any) -> str | None:
    if value is None:
        return None
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return str(value) if isinstance(value, UUID) else repr(value)


def _distinct_names(table: pa.Table) -> pa.Table:
    """Number repeated column names: `select 1 as a, 2 as a` gives a and a_1."""
    names: list[str] = []
    for name in table.column_names:
        candidate, number = name, 1
        while candidate in names:
            candidate, number = f"{name}_{number}", number + 1
        names.append(candidate)
    return table if names == table.column_names else table.rename_columns(names)
