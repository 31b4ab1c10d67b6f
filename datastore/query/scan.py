"""Scan: exactly the files of a version as something to select FROM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from replaylake.datastore.query.statements import literal
from replaylake.datastore.storage.table.delta_schema import field_id, to_duckdb
from replaylake.datastore.storage.table.presence import check_shards_present
from replaylake.datastore.storage.table.table import TableSnapshot


def scan(snapshot: TableSnapshot, paths: Sequence[Path | str] | None = None) -> str:
    """Return a FROM item over exactly the snapshot's files, columns matched by field id.

    Args:
        snapshot: the version.
        paths: its files, where the caller has found that they are there and fetched them.

    Raises: NotFoundError, ShardCorruptError if a file is not there.
    """
    source = scan_files(snapshot, paths)
    # DuckDB 2.0 fails on a field of a struct that some file lacks (its issue 24253), unless an
    # expression keeps it from reading that field alone. Only nullable columns may be absent.
    structs = [f.name for f in snapshot.schema if f.nullable and pa.types.is_struct(f.type)]
    if not structs or not snapshot.files:
        return source
    columns = ", ".join(f'coalesce("{name}", NULL) AS "{name}"' for name in structs)
    return f"(SELECT * REPLACE ({columns}) FROM {source})"


def scan_files(snapshot: TableSnapshot, paths: Sequence[Path | str] | None = None) -> str:
    """Return the same with DuckDB's column `file_index`: which of the files a row is in.

    For columns that are no structs. Raises: as scan.
    """
    if not snapshot.files:
        nulls = ", ".join(
            f'CAST(NULL AS {to_duckdb(field.type)}) AS "{field.name}"' for field in snapshot.schema
        )
        return f"(SELECT {nulls} WHERE false)"
    # Inferring columns from the first file would hide those that later appends added.
    columns = ", ".join(
        f"{field_id(field)}: {{name: {literal(field.name)}, "
        f"type: {literal(to_duckdb(field.type))}, default_value: NULL}}"
        for field in snapshot.schema
    )
    if paths is None:
        check_shards_present(snapshot)
        paths = snapshot.paths()
    files = ", ".join(literal(str(path)) for path in paths)
    return f"read_parquet([{files}], schema = map {{{columns}}})"
