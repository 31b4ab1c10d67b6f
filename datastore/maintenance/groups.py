"""Groups: which small shards are worth writing again as one.

Shards are taken in order of age, and only neighbours go together: what takes their place is as old
as the oldest of them, and would otherwise pass shards in between. A shard near half of what one may
hold is left alone, so compacting again changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from replaylake.datastore.episodes.schema import (
    AGENT_ID,
    EPISODE_ID,
    TERMINATED,
    TRUNCATED,
    holds_steps,
)
from replaylake.datastore.errors import ShardCorrupt
from replaylake.datastore.query.table_files import fetched, located, rows_of, scanning
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.table import TableSnapshot

# A group is decoded whole, and so is the shard that it becomes, by whoever reads it. As appends.
MAX_ROWS: Final = 1_048_576
MAX_DECODED_BYTES: Final = 256 << 20

# Adding little to a large shard, again and again, would write it anew each time: what is added has
# to be half as much as the largest, unless that is small itself.
_WORTH: Final = 1.5
# A shard of this share is left alone. Below a half, as the share is estimated and appends make
# shards of a half; two that are not full may then still be too much for one.
_FULL: Final = 0.4
_SMALL_BYTES: Final = 4 << 20
_ID_BYTES: Final = 48


@dataclass(frozen=True)
class Weighed:
    """A shard, and the share of the largest that it would be (1: as much as a shard may hold)."""

    entry: FileEntry
    share: float


def groups(
    snapshot: TableSnapshot, *, target_bytes: int, written_after_ms: int
) -> list[tuple[FileEntry, ...]]:
    """Return groups of at least two neighbours, oldest first.

    Shards with rows of open episodes are in none: those of which a row was written after
    `written_after_ms` (ms since 1970) and none has ended. Raises: ShardCorrupt.
    """
    small = [entry for entry in snapshot.files if entry.size_bytes < target_bytes // 2]
    held = _with_open_episodes(snapshot, small, written_after_ms)
    chosen: list[tuple[FileEntry, ...]] = []
    group: list[Weighed] = []
    varies = _varies(snapshot.schema)
    for entry in snapshot.files:
        weighed = None
        if entry.size_bytes < target_bytes // 2 and entry.path not in held:
            weighed = _weighed(snapshot, entry, target_bytes, varies)
        if weighed is None or weighed.share >= _FULL:
            chosen += _worth_it(group)
            group = []
            continue
        if sum(other.share for other in group) + weighed.share > 1:
            chosen += _worth_it(group)
            group = []
        group.append(weighed)
    return [*chosen, *_worth_it(group)]


def _worth_it(group: Sequence[Weighed]) -> Iterator[tuple[FileEntry, ...]]:
    """Yield the group, or what is worth it beside its largest shard."""
    if len(group) < 2:
        return
    sizes = [weighed.entry.size_bytes for weighed in group]
    largest = max(sizes)
    if largest < _SMALL_BYTES or sum(sizes) >= _WORTH * largest:
        yield tuple(weighed.entry for weighed in group)
        return
    at = sizes.index(largest)
    yield from _worth_it(group[:at])
    yield from _worth_it(group[at + 1 :])


def _weighed(snapshot: TableSnapshot, entry: FileEntry, target_bytes: int, varies: bool) -> Weighed:
    decoded = entry.num_rows * sum(_width(field.type) for field in snapshot.schema)
    if varies:
        # Frames and texts are as long as they are: the footer knows, before it was compressed.
        decoded += _encoded_bytes(snapshot, entry)
    shares = (
        entry.size_bytes / target_bytes,
        entry.num_rows / MAX_ROWS,
        decoded / MAX_DECODED_BYTES,
    )
    return Weighed(entry, max(shares))


def _encoded_bytes(snapshot: TableSnapshot, entry: FileEntry) -> int:
    with fetched(snapshot, [entry]) as (path,):
        try:
            footer = pq.read_metadata(path)
            return sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups))
        except (pa.ArrowException, OSError) as error:
            raise ShardCorrupt(
                f"{path}: {error}, expected the shard that the log names. `replaylake fsck` looks "
                "at the others; restore the file from a copy of the lake."
            ) from error


def _width(kind: pa.DataType) -> float:
    """Return the bytes of one value in memory, without what differs from value to value."""
    if pa.types.is_struct(kind):
        return sum(_width(field.type) for field in kind)
    if pa.types.is_fixed_size_list(kind):
        return float(kind.list_size * _width(kind.value_type))
    if pa.types.is_dictionary(kind):
        return 4.0
    if _has_lengths(kind):
        return float(_ID_BYTES if pa.types.is_string(kind) else 8)
    return float(kind.bit_width / 8)


def _varies(schema: pa.Schema) -> bool:
    """Whether a column other than ids, which are short, has values of any length."""
    return any(
        _has_lengths(field.type)
        and not (pa.types.is_string(field.type) and field.name.endswith("_id"))
        for field in schema
    )


def _has_lengths(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_has_lengths(field.type) for field in kind)
    if pa.types.is_fixed_size_list(kind):
        return _has_lengths(kind.value_type)
    if pa.types.is_dictionary(kind):
        return False
    try:
        _ = kind.bit_width
    except ValueError:  # as pyarrow says of a type without a fixed width
        return True
    return False


def _with_open_episodes(
    snapshot: TableSnapshot, small: Sequence[FileEntry], written_after_ms: int
) -> set[str]:
    """Return which of these shards hold rows of open episodes; pieces may be in several."""
    recent = [entry for entry in snapshot.files if entry.modified_ms >= written_after_ms]
    if not recent or not small or not holds_steps(snapshot.schema.names):
        return set()
    with (
        fetched(snapshot, recent) as recent_paths,
        fetched(snapshot, small) as small_paths,
        scanning() as connection,
    ):
        unfinished = (
            f"SELECT {EPISODE_ID} FROM {located(snapshot, recent_paths)} "
            f"GROUP BY {EPISODE_ID}, {AGENT_ID} HAVING NOT bool_or({TERMINATED} OR {TRUNCATED})"
        )
        places = (
            f"SELECT DISTINCT file_index FROM {located(snapshot, small_paths)} "
            f"WHERE {EPISODE_ID} IN ({unfinished})"
        )
        return {small[index].path for (index,) in rows_of(connection, places)}
