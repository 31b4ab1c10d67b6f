"""Table files: what our own code asks DuckDB of them: where rows are, and whether all are there.

Few columns of many files are read faster by DuckDB than shard by shard, in memory that does not
grow with the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from replaylake.datastore.errors import QueryError
from replaylake.datastore.query.connections import connect, session
from replaylake.datastore.query.scan import scan_files
from replaylake.datastore.query.statements import execute
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.shard import blob_of
from replaylake.datastore.storage.table.table import TableSnapshot


@contextmanager
def scan_connection(
    tables: Mapping[str, pa.Table] | None = None, *, is_private: bool = False
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Lend a DuckDB connection, with Arrow tables under names that queries may use.

    Settings of the instance may be changed only if it is private, which costs 13 to 35 ms.
    """
    # The rows of a shard are in no order that these queries need, and keeping it costs memory.
    with connect() if is_private else session(keeps_order=False) as connection:
        for name, table in (tables or {}).items():
            connection.register(name, table)
        yield connection


@contextmanager
def fetch_files(snapshot: TableSnapshot, entries: Sequence[FileEntry]) -> Iterator[list[Path]]:
    """Yield local paths of some of a snapshot's files, which stay there until the block ends."""
    blobs = [blob_of(snapshot.root, entry) for entry in entries]
    paths = snapshot.storage.fetch(blobs)
    try:
        yield paths
    finally:
        snapshot.storage.release(blobs)


def from_clause(snapshot: TableSnapshot, paths: Sequence[Path]) -> str:
    """Return a FROM item over some of a snapshot's files; there has to be one.

    DuckDB adds `file_index`, the place of a row's file in `paths`, and `file_row_number`.
    """
    return scan_files(snapshot, list(map(str, paths)))


def query_rows(connection: duckdb.DuckDBPyConnection, text: str) -> list[tuple[Any, ...]]:
    """Run a query and return its rows. Raises: QueryError."""
    try:
        return connection.execute(text).fetchall()
    except duckdb.Error as error:
        raise QueryError(f"reading a table's files: {error}") from error


def query_arrow(connection: duckdb.DuckDBPyConnection, text: str) -> pa.Table:
    """Run a query and return its rows as Arrow. Raises: QueryError."""
    return execute(connection, text)


def fingerprint(snapshot: TableSnapshot, entries: Sequence[FileEntry]) -> tuple[int, int]:
    """Return how many rows some files hold and the sum of their hashes, whatever their order.

    A sum and not an exclusive or: two rows that are equal must not cancel out. Cost: one scan.
    Raises: QueryError, ShardCorruptError if a file is missing.
    """
    if not entries:
        return 0, 0
    hashed = ", ".join(f'"{name}"' for name in snapshot.schema.names)
    with fetch_files(snapshot, entries) as paths, scan_connection() as connection:
        source = from_clause(snapshot, paths)
        text = f"SELECT count(*), coalesce(sum(hash({hashed})), 0)::HUGEINT FROM {source}"
        ((num_rows, total),) = query_rows(connection, text)
    return int(num_rows), int(total)
