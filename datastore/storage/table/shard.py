"""One Parquet file: encoded in memory, hashed, written atomically, verified when read.

Readers rely on the sha256 alone: it covers every byte a moment before they are decoded, and page
checksums once more would cost a tenth of the decoding. Those are for other engines, which know no
sha256, and for finding the damaged column.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from replaylake.datastore.errors import ReplayLakeError, ShardCorruptError
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.arrow_values import combine_chunks, is_list, row_numbers
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.remote.shard_cache import discard_copy
from replaylake.datastore.storage.spans import span
from replaylake.datastore.storage.storage import Blob, Storage

FOLDER: Final = "shards"
# DuckDB parallelizes over row groups, and a reader's memory grows with them.
ROW_GROUP_ROWS: Final = 131_072
# Encoding keeps a core busy, and each thread holds an encoded shard.
_WRITING_THREADS: Final = max(2, min(4, os.cpu_count() or 1))
_FOOTER_BYTES: Final = 1 << 18
_BUFFER_BYTES: Final = 1 << 18
_HASHED_BYTES: Final = 1 << 20  # at a time: stays in the processor's cache


def write_shard(storage: Storage, root: str, data: pa.Table) -> FileEntry:
    """Write one shard durably below `root` and return its log entry, not yet committed."""
    with span("compress") as work:
        buffer = _to_buffer(data)
        work.items, work.num_bytes = data.num_rows, len(buffer)
    path = f"{FOLDER}/{new_ulid()}.parquet"
    with span("shard_write") as work:
        storage.put(f"{root}/{path}", buffer)
        work.items, work.num_bytes = data.num_rows, len(buffer)
        return FileEntry(
            path=path,
            size_bytes=len(buffer),
            num_rows=data.num_rows,
            sha256=hashlib.sha256(buffer).hexdigest(),
            modified_ms=time.time_ns() // 1_000_000,
        )


def _to_buffer(data: pa.Table) -> memoryview:
    """Return the bytes of the file.

    Memory is reserved at once and only what is written to gets real: a sink that grows by copying
    itself made two threads wait for each other (1M steps in two shards: 0.30 s against 0.44,
    0.55 s of CPU against 0.84; 2 cores, 2026-11).
    """
    try:
        buffer = pa.allocate_buffer(data.nbytes + _FOOTER_BYTES)
        sink = pa.FixedSizeBufferWriter(buffer)
        _encode(data, sink)
        return memoryview(buffer)[: sink.tell()]
    except (pa.ArrowException, OSError):
        # Dictionaries may weigh more in the file than in memory: it has them once a row group.
        growing = pa.BufferOutputStream()
        _encode(data, growing)
        return memoryview(growing.getvalue())


def _encode(data: pa.Table, sink: pa.NativeFile) -> None:
    """Write row groups, each with dictionaries and statistics of its own rows alone.

    Filtered rows, slices and joined shards share the dictionaries of rows that are elsewhere or
    were deleted, and Parquet writes a dictionary as it is given. Its statistics then say what the
    dictionary holds, too, where a row is null.
    """
    num_rows = _group_rows(data.num_rows)
    with pq.ParquetWriter(sink, data.schema, **write_settings(data.schema)) as writer:
        for start in range(0, max(1, data.num_rows), num_rows):
            rows = _without_unused_values(data.slice(start, num_rows))
            writer.write_table(rows, row_group_size=num_rows)


def _without_unused_values(data: pa.Table) -> pa.Table:
    """Return equal rows whose dictionaries, nested ones too, hold only values that they have.

    Cost: a pass over the indices of dictionary columns; a copy of columns that have them nested.
    """
    for number, field in enumerate(data.schema):
        if _has_dictionary(field.type):
            # In one piece: of chunks with several dictionaries only the first is written as one.
            column = _compact_dictionaries(combine_chunks(data.column(number)))
            data = data.set_column(number, field, column)
    return data


def _has_dictionary(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(place).type) for place in range(kind.num_fields))


def _compact_dictionaries(column: pa.Array) -> pa.Array:
    if not pa.types.is_dictionary(column.type):
        # Taken first: a cast also copies what lies beside a slice, or below a null.
        rows = column.take(row_numbers(np.arange(len(column))))
        return rows.cast(_decoded_type(column.type)).cast(column.type)
    used = pc.unique(column.indices).drop_null()
    if len(used) == len(column.dictionary):
        return column
    # In the order of the dictionary, so that equal rows give equal files.
    used = used.take(pc.array_sort_indices(used))
    return pa.DictionaryArray.from_arrays(
        pc.index_in(column.indices, value_set=used).cast(column.type.index_type),
        column.dictionary.take(used),
        ordered=column.type.ordered,
    )


def _decoded_type(kind: pa.DataType) -> pa.DataType:
    """Return a type with plain values in the place of dictionaries, at any depth."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_decoded_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        parts = (kind.key_field, kind.item_field)
        return pa.map_(*(field.with_type(_decoded_type(field.type)) for field in parts))
    if is_list(kind):
        element = kind.value_field.with_type(_decoded_type(kind.value_type))
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(element, kind.list_size)
        return pa.large_list(element) if pa.types.is_large_list(kind) else pa.list_(element)
    return kind


def write_shards(storage: Storage, root: str, parts: Sequence[pa.Table]) -> list[FileEntry]:
    """Write shards side by side: all of them, durably, or none.

    While one is encoded, another is hashed, written and fsynced: all of that releases the
    interpreter. An append of 1M steps (obs 17, act 6) took 0.48 s in two shards and 0.87 in one
    (2 cores, 2026-11).
    """
    if len(parts) < 2:
        return [write_shard(storage, root, part) for part in parts]
    with ThreadPoolExecutor(_WRITING_THREADS, "replaylake-write") as pool:
        writing = [pool.submit(write_shard, storage, root, part) for part in parts]
        try:
            with span("write_wait"):
                return [future.result() for future in writing]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            futures = [future for future in writing if not future.cancelled()]
            written = [future.result() for future in futures if future.exception() is None]
            # What cannot be deleted is in no version, so that vacuum finds it.
            with suppress(ReplayLakeError):
                storage.delete([f"{root}/{entry.path}" for entry in written])
            raise


def blob_of(root: str, entry: FileEntry) -> Blob:
    """Return what the log says of a shard of the table at `root`, for Storage.fetch."""
    return Blob(f"{root}/{entry.path}", entry.size_bytes, entry.sha256)


def read_shard(path: Path, entry: FileEntry, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a shard after checking its sha256.

    Columns that this shard is too old to have are left out. Raises: ShardCorruptError.
    """
    verify_shard(path, entry)
    return decode_shard(path, columns)


def decode_shard(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a shard that `verify_shard` has just passed. Raises: ShardCorruptError."""
    with _decoding(path), pq.ParquetFile(path, pre_buffer=False) as file:
        return file.read(columns=_present_columns(file, columns))


def verify_row_groups(path: Path, entry: FileEntry) -> list[int]:
    """Check a shard's sha256; return the rows of each of its row groups.

    Raises: ShardCorruptError.
    """
    verify_shard(path, entry)
    with _decoding(path):
        metadata = pq.read_metadata(path)
    sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    if sum(sizes) != entry.num_rows:
        raise ShardCorruptError(
            f"{path}: found {sum(sizes)} rows, expected {entry.num_rows} as committed. Restore the "
            "log and the file from a copy of the lake."
        )
    return sizes


def num_row_groups(path: Path) -> int:
    """Return how many row groups a shard has. Raises: ShardCorruptError."""
    with _decoding(path):
        return int(pq.read_metadata(path).num_row_groups)


def decode_row_group(
    path: Path,
    group: int,
    columns: Sequence[str] | None = None,
    *,
    as_dictionaries: Sequence[str] = (),
) -> pa.Table:
    """Read one row group of a shard that `verify_shard` has passed, in the calling thread alone.

    Strings of the columns `as_dictionaries` come as dictionaries. Raises: ShardCorruptError.
    """
    with _row_groups(path, as_dictionaries) as file, _decoding(path):
        return file.read_row_group(
            group, columns=_present_columns(file, columns), use_threads=False
        )


def row_group_batches(
    path: Path,
    group: int,
    columns: Sequence[str],
    num_rows: int,
    *,
    as_dictionaries: Sequence[str] = (),
) -> Iterator[pa.Table]:
    """Read one row group of such a shard as decode_row_group does, `num_rows` rows at a time.

    columns: names, or paths of leaves such as `smallest_leaf` gives. Decoding as many rows as
    the processor's cache holds takes no longer than all at once (2 cores, 2026-11). Memory: those
    rows, and a page and a buffer of 256 KiB of each column. Raises: ShardCorruptError.
    """
    with _row_groups(path, as_dictionaries) as file:
        batches = file.iter_batches(
            num_rows, row_groups=[group], columns=_present_columns(file, columns), use_threads=False
        )
        while True:
            with _decoding(path):
                batch = next(batches, None)
            if batch is None:
                return
            yield pa.Table.from_batches([batch])


def smallest_leaf(path: Path, group: int, column: str) -> tuple[str, int | None]:
    """Return the path of a column's smallest leaf in a row group, and in how many rows it is null.

    It tells in which rows the column is null without decoding all of it. None: not known.
    Raises: ShardCorruptError.
    """
    with _decoding(path):
        metadata = pq.read_metadata(path).row_group(group)
    chunks = [metadata.column(number) for number in range(metadata.num_columns)]
    own = [c for c in chunks if c.path_in_schema.split(".", 1)[0] == column]
    leaf = min(own, key=lambda chunk: chunk.total_uncompressed_size)
    statistics = leaf.statistics
    known = statistics is not None and statistics.has_null_count
    return leaf.path_in_schema, statistics.null_count if known else None


@contextmanager
def _row_groups(path: Path, as_dictionaries: Sequence[str]) -> Iterator[pq.ParquetFile]:
    """Open a shard for reading some row groups in one thread."""
    with _decoding(path):
        metadata = pq.read_metadata(path)
        texts = None
        if as_dictionaries:
            present = set(metadata.schema.to_arrow_schema().names)
            texts = [name for name in as_dictionaries if name in present]
        file = pq.ParquetFile(
            path,
            metadata=metadata,
            read_dictionary=texts,
            pre_buffer=False,
            # Encoded columns are read piece by piece as they are decoded: it takes no longer.
            buffer_size=_BUFFER_BYTES,
        )
    with file:
        yield file


def verify_shard(path: Path, entry: FileEntry) -> None:
    """Compare a file with the sha256 in the log. Raises: ShardCorruptError."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(_HASHED_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while num := file.readinto(block):
                digest.update(block[:num])
    except OSError as error:
        raise _unreadable_shard_error(path, error) from error
    if not entry.sha256:
        raise ShardCorruptError(
            f"{path}: found no sha256 in the log, expected one: another engine wrote this file. "
            "Ingest its rows into a dataset instead."
        )
    if digest.hexdigest() != entry.sha256:
        advice = "The file was altered or damaged; restore it from a copy of the lake."
        if discard_copy(path):
            advice = "This machine's copy of it was damaged and is removed now; run it again."
        raise ShardCorruptError(
            f"{path}: found sha256 {digest.hexdigest()[:16]}, expected {entry.sha256[:16]} as "
            f"committed. {advice}"
        )


def check_shard_present(path: Path) -> None:
    """Look for a shard's file. Raises: ShardCorruptError."""
    try:
        path.stat()
    except OSError as error:
        raise _unreadable_shard_error(path, error) from error


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ShardCorruptError(
            f"{path}: {error}. Restore the file from a copy of the lake."
        ) from error


def _present_columns(file: pq.ParquetFile, columns: Sequence[str] | None) -> list[str] | None:
    if columns is None:
        return None
    present = set(file.schema_arrow.names)
    return [name for name in columns if name.split(".", 1)[0] in present]


def _unreadable_shard_error(path: Path, error: OSError) -> ShardCorruptError:
    return ShardCorruptError(
        f"{path}: {error.strerror}, expected the shard that the log names. Restore the file from a "
        "copy of the lake."
    )


def _group_rows(num_rows: int) -> int:
    """Return the size of equal row groups, none larger than ROW_GROUP_ROWS."""
    num_groups = max(1, -(-num_rows // ROW_GROUP_ROWS))
    return max(1, -(-num_rows // num_groups))


@lru_cache(maxsize=256)
def write_settings(schema: pa.Schema) -> Mapping[str, Any]:
    """Return zstd-1, an encoding for each type, checksums on pages.

    Bytes a value, plain against DELTA_BINARY_PACKED: steps 0.107 and 0.014, timestamps 2.06 and
    1.01, sorted versions 0.37 and 0.007; and read 2 to 6 times faster but for steps (2026-11).
    """
    leaves = [leaf for field in schema for leaf in _leaves(field.name, field.type)]
    encodings = {path: name for path, kind in leaves if (name := _encoding(kind))}
    texts = [path for path, kind in leaves if pa.types.is_string(kind)]
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": texts or False,
        "column_encoding": encodings or None,
        "write_page_checksum": True,
        "store_schema": True,
    }


def _encoding(kind: pa.DataType) -> str | None:
    types = pa.types
    if types.is_floating(kind):
        return "BYTE_STREAM_SPLIT"
    is_packed = types.is_integer(kind) or types.is_timestamp(kind) or types.is_date(kind)
    return "DELTA_BINARY_PACKED" if is_packed else None


def _leaves(path: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_map(kind):
        yield from _leaves(f"{path}.key_value.key", kind.key_type)
        yield from _leaves(f"{path}.key_value.value", kind.item_type)
    elif is_list(kind):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    elif pa.types.is_dictionary(kind):
        yield path, kind.value_type
    else:
        yield path, kind
