"""Shard check: one Parquet file against what the log says of it, down to its last page."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import BinaryIO, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from replaylake.datastore.episodes.schema import AGENT_ID, EPISODE_ID, STEP, TERMINATED, TRUNCATED
from replaylake.datastore.errors import ReplayLakeError, SchemaMismatchError
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.storage import Storage
from replaylake.datastore.storage.table.delta_schema import FIELD_ID, field_id
from replaylake.datastore.storage.table.table_schema import conform

_RESTORE: Final = "Restore it from a copy of the lake, or remove it from the dataset with `repair`"
# What Arrow raises on bytes that are no Parquet, or another than it should be.
_UNREADABLE: Final = (pa.ArrowException, OSError, ValueError, KeyError, MemoryError)
_RUNS: Final = pa.schema(
    [
        ("episode", pa.string()),
        ("agent", pa.string()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("ended", pa.bool_()),
        ("shard", pa.int64()),
        ("row", pa.int64()),
    ]
)


@dataclass(frozen=True)
class ShardFault:
    """What is wrong with one file."""

    check: str
    message: str


@dataclass(frozen=True)
class CheckedShard:
    """A file and its faults; `rows` are what the checks across files need, None where it has any.

    Of a shard of steps they are its runs (`run_schema`), of decisions their ids.
    """

    entry: FileEntry
    faults: tuple[ShardFault, ...]
    rows: pa.Table | None = None


def run_schema() -> pa.Schema:
    """Return the columns of runs: consecutive rows of one episode and agent with step + 1 each.

    `first` and `last` step; whether the last row ended the episode; the shard's number and the row
    in it where the run begins.
    """
    return _RUNS


def check_shard(
    storage: Storage, root: str, entry: FileEntry, schema: pa.Schema, number: int, key: str | None
) -> CheckedShard:
    """Check the sha256, the pages' checksums, the footer, the row count and the schema.

    `key` is the column whose values are returned; None stands for runs. Memory: one row group
    where the storage is a folder, else the file and one row group.
    """
    try:
        # Never this machine's copy: the question is what is in the lake.
        with storage.open_original(f"{root}/{entry.path}") as file:
            return _check_file(file, entry, schema, number, key)
    except FileNotFoundError:
        return CheckedShard(
            entry,
            (
                ShardFault(
                    "missing", f"found no file, expected {entry.num_rows:,} rows. {_RESTORE}."
                ),
            ),
        )
    except (OSError, ReplayLakeError) as error:
        return CheckedShard(entry, (ShardFault("unreadable", f"{error}. {_RESTORE}."),))


def _check_file(
    file: BinaryIO, entry: FileEntry, schema: pa.Schema, number: int, key: str | None
) -> CheckedShard:
    digest, size = _hash(file)
    if digest != entry.sha256:
        found = f"found sha256 {digest[:16]} and {size:,} bytes"
        expected = f"expected {entry.sha256[:16] or 'one'} and {entry.size_bytes:,}"
        message = f"{found}, {expected} as committed: its bytes were changed. {_RESTORE}."
        return CheckedShard(entry, (ShardFault("sha256", message),))
    faults: list[ShardFault] = []
    if size != entry.size_bytes:
        message = f"found {size:,} bytes, expected {entry.size_bytes:,} as the log says. {_RESTORE}"
        faults.append(ShardFault("size", f"{message}."))
    try:
        rows = _decode_rows(file, entry, schema, number, key, faults)
    except SchemaMismatchError as error:
        faults.append(ShardFault("schema", f"{error} Its bytes are those committed. {_RESTORE}."))
    except _UNREADABLE as error:
        message = f"{type(error).__name__}: {error}, expected Parquet that can be read. {_RESTORE}."
        faults.append(ShardFault("unreadable", message))
    return CheckedShard(entry, tuple(faults), None if faults else rows)


def _hash(file: BinaryIO) -> tuple[str, int]:
    """Return the sha256 and the size of a file, which is at its start afterwards."""
    digest, size = hashlib.sha256(), 0
    while block := file.read(1 << 22):
        digest.update(block)
        size += len(block)
    file.seek(0)
    return digest.hexdigest(), size


def _decode_rows(
    source: BinaryIO,
    entry: FileEntry,
    schema: pa.Schema,
    number: int,
    key: str | None,
    faults: list[ShardFault],
) -> pa.Table:
    parts = []
    num_rows = 0
    with pq.ParquetFile(source, page_checksum_verification=True) as file:
        _check_columns(file.schema_arrow, schema)
        for group in range(file.num_row_groups):
            table = conform(file.read_row_group(group), schema)
            if key is None:
                parts.append(_runs(table, number, num_rows))
            else:
                parts.append(table.select([key] if key in schema.names else []))
            num_rows += table.num_rows
        in_footer = file.metadata.num_rows
    if not num_rows == in_footer == entry.num_rows:
        found = f"found {num_rows:,} rows and {in_footer:,} in the footer"
        faults.append(ShardFault("num_rows", f"{found}, expected {entry.num_rows:,}. {_RESTORE}."))
    return pa.concat_tables(parts) if parts else _RUNS.empty_table()


def _check_columns(found: pa.Schema, schema: pa.Schema) -> None:
    for field in found:
        if field.name not in schema.names:
            raise SchemaMismatchError(f"column {field.name!r}: is none of the table's.")
        expected = schema.field(field.name)
        if not field.type.equals(expected.type):
            raise SchemaMismatchError(
                f"column {field.name!r}: found {field.type}, expected {expected.type}."
            )
        number = (field.metadata or {}).get(FIELD_ID)
        if number is None or int(number) != field_id(expected):
            raise SchemaMismatchError(
                f"column {field.name!r}: found field id {number and number.decode()}, expected "
                f"{field_id(expected)}."
            )


def _runs(table: pa.Table, number: int, offset: int) -> pa.Table:
    if not table.num_rows:
        return _RUNS.empty_table()
    episodes = table.column(EPISODE_ID).combine_chunks()
    agents = table.column(AGENT_ID).combine_chunks().cast(pa.string())
    steps = table.column(STEP).to_numpy().astype(np.int64)
    ended = table.column(TERMINATED).to_numpy() | table.column(TRUNCATED).to_numpy()
    breaks = (steps[1:] != steps[:-1] + 1) | ended[:-1]
    for column in (episodes, agents):
        differ = pc.not_equal(column[1:], column[:-1])
        breaks |= differ.to_numpy(zero_copy_only=False)
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    ends = np.concatenate([starts[1:], [len(steps)]]) - 1
    return pa.table(
        [
            episodes.take(pa.array(starts)),
            agents.take(pa.array(starts)),
            pa.array(steps[starts]),
            pa.array(steps[ends]),
            pa.array(ended[ends]),
            pa.array(np.full(len(starts), number)),
            pa.array(starts + offset),
        ],
        schema=_RUNS,
    )
