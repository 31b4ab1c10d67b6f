"""Parquet values: rows of Parquet as values of JSON, as formats of dialogues read them.

Arrow gives all structs of a column the same fields; the nulls of those that a value lacks are left
out.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.generic.parquet import ParquetTables
from replaylake.datastore.interchange.sources.source import SourceFile

_MAX_ROW_BYTES: Final = 64 << 20


def iter_rows(file: SourceFile) -> Iterator[pa.Table]:
    """Yield the rows of a file, a table each. Raises: SourceInvalidError."""
    for chunk in ParquetTables([file]).chunks():
        for i in range(chunk.table.num_rows):
            yield chunk.table.slice(i, 1)


def read_row(row: pa.Table) -> dict[str, Any]:
    """Return the values of a row.

    The size is checked because small files may decode to long lists.

    Raises: SourceInvalidError; pyarrow's error for times beyond Python's.
    """
    if row.nbytes > _MAX_ROW_BYTES:
        raise SourceInvalidError(
            f"found {row.nbytes:,} bytes, expected at most {_MAX_ROW_BYTES:,} in a row"
        )
    value: dict[str, Any] = row.to_pylist()[0]
    return value


def drop_nulls(value: Any) -> Any:
    """Return a value without the fields of objects that are null."""
    if isinstance(value, dict):
        return {k: drop_nulls(v) for k, v in value.items() if v is not None}
    return [drop_nulls(one) for one in value] if isinstance(value, list) else value


def to_json_value(value: Any) -> Any:
    """Return a value as one of JSON: bytes as base64 with their sha256, others as text."""
    if isinstance(value, dict):
        return {str(k): to_json_value(v) for k, v in value.items()}
    if isinstance(value, list):
        return [to_json_value(one) for one in value]
    if isinstance(value, bytes):
        data = base64.b64encode(value).decode()
        return {"sha256": hashlib.sha256(value).hexdigest(), "base64": data}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
