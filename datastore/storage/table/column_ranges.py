"""Column ranges: least and greatest values, and missing ones, from the footers of shards.

No row is read. Parquet's statistics leave NaN out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from replaylake.datastore.errors import ShardCorruptError
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.delta_schema import plain_type
from replaylake.datastore.storage.table.shard import blob_of
from replaylake.datastore.storage.table.table_snapshot import TableSnapshot

# Bytes read at the end of a shard for its footer; a longer footer is read again.
_END_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class ColumnRange:
    """Least and greatest value of a column over all rows and, if it is a list, all elements.

    least, greatest: None if it has no values, and of structs, flags and bytes. missing: the share
    of rows without a value; None of lists of several lengths, whose empty ones look the same.
    """

    least: Any
    greatest: Any
    missing: float | None


@dataclass(frozen=True)
class ShardColumn:
    """A column of one shard: least and greatest value as in ColumnRange, and rows without one."""

    least: Any
    greatest: Any
    num_missing: int


def column_ranges(snapshot: TableSnapshot) -> dict[str, ColumnRange]:
    """Return the range of each column of a version. Raises: ShardCorruptError.

    Cost: reads the footer of each shard.
    """
    shards = []
    for entry in snapshot.files:
        blob = blob_of(snapshot.root, entry)
        (path,) = snapshot.storage.fetch([blob])
        try:
            shards.append(read_shard_columns(path, entry, snapshot.schema))
        finally:
            snapshot.storage.release([blob])
    return merge_ranges(shards, snapshot)


def select_shards(snapshot: TableSnapshot, column: str, least: str, below: str) -> list[FileEntry]:
    """Return the shards that may have strings of a column from `least` to before `below`.

    Cost: reads the end of each shard, also of remote ones. Raises: ShardCorruptError,
    StorageError.
    """
    blobs = [blob_of(snapshot.root, entry) for entry in snapshot.files]
    ends = snapshot.storage.read_ends(blobs, _END_BYTES)
    found = []
    for blob, entry, end in zip(blobs, snapshot.files, ends, strict=True):
        if end is None:
            found.append(entry)  # reading it raises the error
            continue
        num_bytes = 8 + int.from_bytes(end[-8:-4], "little")  # the footer, its length, `PAR1`
        if len(end) < num_bytes < entry.size_bytes:
            (longer,) = snapshot.storage.read_ends([blob], num_bytes)
            end = longer or end
        if _may_hold(_read_footer(pa.BufferReader(end), blob.path), column, least, below):
            found.append(entry)
    return found


def _may_hold(metadata: pq.FileMetaData, column: str, least: str, below: str) -> bool:
    for name, part, _ in _leaves(metadata):
        if name == column:
            known = part.statistics
            if known is None or not known.has_min_max or (known.min < below and known.max >= least):
                return True
    return False


def read_shard_columns(path: Path, entry: FileEntry, schema: pa.Schema) -> dict[str, ShardColumn]:
    """Return what a shard's footer says of each column of a table. Raises: ShardCorruptError.

    A list that is empty, and a struct whose first leaf is null, count as rows without a value.
    """
    metadata = _read_footer(path, path)
    bounds: dict[str, list[Any]] = {name: [] for name in schema.names}
    num_missing = dict.fromkeys(schema.names, 0)
    seen = set()
    for name, part, is_first in _leaves(metadata):
        seen.add(name)
        statistics = part.statistics
        if name not in bounds or statistics is None:
            continue
        if is_first:
            num_missing[name] += statistics.null_count or 0
        if statistics.has_min_max:
            bounds[name] += [statistics.min, statistics.max]
    for name in bounds.keys() - seen:  # older than the column
        num_missing[name] = entry.num_rows
    return {
        field.name: ShardColumn(*_extremes(field.type, bounds[field.name]), num_missing[field.name])
        for field in schema
    }


def merge_ranges(
    shards: Sequence[Mapping[str, ShardColumn]], snapshot: TableSnapshot
) -> dict[str, ColumnRange]:
    """Return the range of each column of a version, made from those of all its shards.

    A column that a shard's lacks has no value there.
    """
    num_rows = snapshot.num_rows
    ranges = {}
    for field in snapshot.schema:
        parts = [shard.get(field.name) for shard in shards]
        known = [part for part in parts if part is not None]
        least = [part.least for part in known if part.least is not None]
        greatest = [part.greatest for part in known if part.greatest is not None]
        num_missing = sum(
            entry.num_rows if part is None else part.num_missing
            for part, entry in zip(parts, snapshot.files, strict=True)
        )
        ranges[field.name] = ColumnRange(
            min(least) if least else None,
            max(greatest) if greatest else None,
            min(num_missing, num_rows) / num_rows
            if num_rows and not pa.types.is_list(field.type) and not pa.types.is_map(field.type)
            else None,
        )
    return ranges


def _read_footer(source: Path | pa.NativeFile, path: Path | str) -> pq.FileMetaData:
    try:
        return pq.read_metadata(source)
    except (pa.ArrowException, OSError) as error:
        raise ShardCorruptError(
            f"{path}: {error}. Restore it from a copy of the lake, or repair the dataset."
        ) from error


def _leaves(metadata: pq.FileMetaData) -> Iterator[tuple[str, pq.ColumnChunkMetaData, bool]]:
    """Yield the column's name, each of its leaves in each row group, and whether it is the first.

    A struct has several, of which each says how many rows lack the struct.
    """
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        last = ""
        for number in range(row_group.num_columns):
            part = row_group.column(number)
            name = part.path_in_schema.partition(".")[0]
            yield name, part, name != last
            last = name


def _extremes(kind: pa.DataType, values: list[Any]) -> tuple[Any, Any]:
    types = pa.types
    kind = plain_type(kind)
    if types.is_fixed_size_list(kind) or types.is_list(kind):
        kind = kind.value_type
    is_ordered = (
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_string(kind)
        or types.is_timestamp(kind)
        or types.is_date(kind)
        or types.is_decimal(kind)
    )
    return (min(values), max(values)) if values and is_ordered else (None, None)
