"""One Parquet file: encoded in memory, hashed, written atomically, verified when read."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from replaylake.datastore.errors import ShardCorrupt
from replaylake.datastore.log.state import FileEntry
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage import Storage

FOLDER: Final = "shards"
# DuckDB parallelises over row groups, and a reader's memory grows with them.
_ROW_GROUP_ROWS: Final = 131_072


def write_shard(storage: Storage, root: str, data: pa.Table) -> FileEntry:
    """Write one shard durably below `root` and return its log entry, not yet committed."""
    sink = pa.BufferOutputStream()
    pq.write_table(data, sink, **_settings(data.schema))
    buffer = memoryview(sink.getvalue())
    path = f"{FOLDER}/{new_ulid()}.parquet"
    storage.put(f"{root}/{path}", buffer)
    return FileEntry(
        path=path,
        size_bytes=len(buffer),
        num_rows=data.num_rows,
        sha256=hashlib.sha256(buffer).hexdigest(),
        modified_ms=time.time_ns() // 1_000_000,
    )


def read_shard(path: Path, entry: FileEntry, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a shard after checking its sha256.

    Columns that this shard is too old to have are left out. Raises: ShardCorrupt.
    """
    verify_shard(path, entry)
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        if columns is not None:
            present = set(file.schema_arrow.names)
            columns = [name for name in columns if name in present]
        return file.read(columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise ShardCorrupt(f"{path}: {error}. Restore the file from a copy of the lake.") from error


def verify_shard(path: Path, entry: FileEntry) -> None:
    """Compare a file with the sha256 in the log. Raises: ShardCorrupt."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not entry.sha256:
        raise ShardCorrupt(
            f"{path}: found no sha256 in the log, expected one: another engine wrote this file. "
            "Ingest its rows into a dataset instead."
        )
    if digest.hexdigest() != entry.sha256:
        raise ShardCorrupt(
            f"{path}: found sha256 {digest.hexdigest()[:16]}, expected {entry.sha256[:16]} as "
            "committed. The file was altered or damaged; restore it from a copy of the lake."
        )


def check_present(path: Path) -> None:
    """Look for a shard's file. Raises: ShardCorrupt."""
    try:
        path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ShardCorrupt:
    return ShardCorrupt(
        f"{path}: {error.strerror}, expected the shard that the log names. Restore the file from a "
        "copy of the lake."
    )


def _settings(schema: pa.Schema) -> dict[str, Any]:
    """Return zstd-1, BYTE_STREAM_SPLIT for floats, dictionaries for strings, checksums on pages."""
    leaves = [leaf for field in schema for leaf in _leaves(field.name, field.type)]
    floats = {path: "BYTE_STREAM_SPLIT" for path, kind in leaves if pa.types.is_floating(kind)}
    texts = [path for path, kind in leaves if pa.types.is_string(kind)]
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": texts or False,
        "column_encoding": floats or None,
        "row_group_size": _ROW_GROUP_ROWS,
        "write_page_checksum": True,
        "store_schema": True,
    }


def _leaves(path: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_map(kind):
        yield from _leaves(f"{path}.key_value.key", kind.key_type)
        yield from _leaves(f"{path}.key_value.value", kind.item_type)
    elif (
        pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    ):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    elif pa.types.is_dictionary(kind):
        yield path, kind.value_type
    else:
        yield path, kind
