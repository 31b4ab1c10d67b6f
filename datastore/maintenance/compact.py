"""Compact: small shards written again as large ones, with exactly the same rows.

Scans open fewer files then, and an episode that was written in pieces lies in one place. Safe
beside writers, readers and other compactors: earlier versions keep their shards, and of two that
rewrite the same shard the later one plans again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from replaylake.datastore.episodes.schema import (
    AGENT_ID,
    EPISODE_ID,
    STEP,
    TERMINATED,
    TRUNCATED,
    has_steps,
)
from replaylake.datastore.errors import (
    CommitConflictError,
    ConfigInvalidError,
    NotFoundError,
    ShardCorruptError,
    StorageError,
)
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.names import new_ulid
from replaylake.datastore.query.table_files import (
    fetch_files,
    fingerprint,
    from_clause,
    query_rows,
    scan_connection,
)
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.shard import read_shard
from replaylake.datastore.storage.table.table import Table, TableSnapshot, WrittenRows
from replaylake.datastore.storage.table.table_schema import conform

MIN_TARGET_BYTES: Final = 64 << 20
MAX_TARGET_BYTES: Final = 256 << 20
DEFAULT_TARGET_BYTES: Final = 128 << 20

# An episode that has not ended and got no row for this long counts as abandoned. A row may come
# later all the same: it then lies in another shard, as if the episode had been long.
OPEN_S: Final = 3600.0

# Called with (shards done, shards there are).
OnProgress = Callable[[int, int], None]
# A group is decoded whole, and so is the shard that it becomes, by whoever reads it. As appends.
MAX_ROWS: Final = 1_048_576
MAX_DECODED_BYTES: Final = 256 << 20
# Adding little to a large shard, again and again, would write it anew each time: what is added has
# to be half as much as the largest, unless that is small itself.
_MIN_GAIN: Final = 1.5
# A shard of this share is left alone. Below a half, as the share is estimated and appends make
# shards of a half; two that are not full may then still be too much for one.
_FULL: Final = 0.4
_SMALL_BYTES: Final = 4 << 20
# What one commit replaces: a larger one takes longer to write than a fast writer needs for its
# next, and would be late each time.
_MAX_SHARDS: Final = 1000
# After so many conflicts in a row with writers that replace shards, compaction stops.
_MAX_CONFLICTS: Final = 10
_ID_BYTES: Final = 48


@dataclass(frozen=True)
class CompactReceipt:
    """What compacting one table did.

    Shards and bytes are those live before and after; `num_rewritten` shards and `num_rows` rows
    were written again, in `num_commits` commits; `num_conflicts` times another writer was first.
    """

    table: str
    version: int
    shards_before: int
    shards_after: int
    bytes_before: int
    bytes_after: int
    num_rewritten: int
    num_rows: int
    num_commits: int
    num_conflicts: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compact(
    lake: Lake,
    dataset: str,
    *,
    target_bytes: int = DEFAULT_TARGET_BYTES,
    open_s: float = OPEN_S,
    now_ms: int | None = None,
    on_progress: OnProgress | None = None,
) -> list[CompactReceipt]:
    """Compact a dataset's steps, and the decisions and rewards that were served into it.

    It terminates, however fast other processes write: shards that they append in the meantime, and
    shards that another writer repeatedly replaces first, are left to the next compaction.

    Args:
        lake: the lake.
        dataset: its name.
        target_bytes: target size of a shard, 64 to 256 MiB.
        open_s: an episode without an end is not moved while its newest row is younger than this
            (s).
        now_ms: the time for this comparison (ms since 1970); the clock's by default.
        on_progress: called with (shards done, shards).

    Raises: NotFoundError, ConfigInvalidError, ShardCorruptError (that shard is then not rewritten),
    StorageError. Memory: below 1 GiB, whatever the size of the dataset.
    """
    handle = lake.dataset(dataset)
    if not handle.exists():
        raise NotFoundError(
            f"dataset {dataset!r}: not in this lake. `replaylake list` names those that are."
        )
    return [
        compact_table(
            table,
            target_bytes=target_bytes,
            open_s=open_s,
            now_ms=now_ms,
            on_progress=on_progress,
        )
        for table in handle.tables()
    ]


def compact_table(
    table: Table,
    *,
    target_bytes: int = DEFAULT_TARGET_BYTES,
    open_s: float = OPEN_S,
    now_ms: int | None = None,
    on_progress: OnProgress | None = None,
) -> CompactReceipt:
    """Compact one table, as `compact` does."""
    check_target(target_bytes)
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    run = _Compaction(table, on_progress)
    before = table.snapshot()
    while True:
        snapshot = table.snapshot()
        groups = plan_groups(
            snapshot,
            target_bytes=target_bytes,
            written_after_ms=now_ms - int(open_s * 1000),
            newest=before.version,
        )
        rest = [group for group in groups if group not in run.settled]
        if not rest or run.num_conflicts_in_a_row == _MAX_CONFLICTS:
            break
        if run.num_conflicts:
            # Two compactors that both begin with the oldest would meet at every group.
            random.shuffle(rest)
        run.merge_all(snapshot, rest)
    return CompactReceipt(
        table=table.root,
        version=snapshot.version,
        shards_before=len(before.files),
        shards_after=len(snapshot.files),
        bytes_before=sum(entry.size_bytes for entry in before.files),
        bytes_after=sum(entry.size_bytes for entry in snapshot.files),
        num_rewritten=run.num_rewritten,
        num_rows=run.num_rows,
        num_commits=run.num_commits,
        num_conflicts=run.num_conflicts,
    )


def check_target(target_bytes: int) -> None:
    """Refuse a size that shards should not have. Raises: ConfigInvalidError."""
    if not MIN_TARGET_BYTES <= target_bytes <= MAX_TARGET_BYTES:
        raise ConfigInvalidError(
            f"target_bytes: found {target_bytes:,}, expected {MIN_TARGET_BYTES:,} (64 MiB) to "
            f"{MAX_TARGET_BYTES:,} (256 MiB): scans of smaller shards are slow, and reading one "
            "takes several times its size in memory.",
            parameter="target_bytes",
        )


class _Compaction:
    """One compaction of one table: its counts, and the groups that came to nothing."""

    def __init__(self, table: Table, on_progress: OnProgress | None) -> None:
        self.settled: set[tuple[FileEntry, ...]] = set()
        self.num_rewritten = self.num_rows = self.num_commits = self.num_conflicts = 0
        self.num_conflicts_in_a_row = 0
        self._table = table
        self._on_progress = on_progress

    def merge_all(self, snapshot: TableSnapshot, groups: Sequence[tuple[FileEntry, ...]]) -> None:
        """Merge group by group; ends early, to be planned again, if another writer was first."""
        total = self.num_rewritten + sum(map(len, groups))
        for group in groups:
            self.settled.add(group)
            try:
                for entries, tables in self._parts(snapshot, group):
                    if len(entries) > 1:
                        self._merge(snapshot, entries, tables)
            except CommitConflictError:
                self._count_conflict()
                return
            except ShardCorruptError:
                # Of a shard that is gone from the newest version as well, the rows are elsewhere.
                live = self._table.log.newest().files
                if all(entry.path in live for entry in group):
                    raise
                self._count_conflict()
                return
            self.num_conflicts_in_a_row = 0
            if self._on_progress is not None:
                self._on_progress(self.num_rewritten, total)

    def _count_conflict(self) -> None:
        self.num_conflicts += 1
        self.num_conflicts_in_a_row += 1

    def _parts(
        self, snapshot: TableSnapshot, group: Sequence[FileEntry]
    ) -> Iterator[tuple[list[FileEntry], list[pa.Table]]]:
        """Read and verify a group: whole, or in parts where it is larger than was foreseen."""
        entries: list[FileEntry] = []
        tables: list[pa.Table] = []
        num_bytes = 0
        for entry in group:
            with fetch_files(snapshot, [entry]) as (path,):
                rows = conform(read_shard(path, entry), snapshot.schema)
            if tables and num_bytes + rows.nbytes > 1.5 * MAX_DECODED_BYTES:
                yield entries, tables
                entries, tables, num_bytes = [], [], 0
            entries.append(entry)
            tables.append(rows)
            num_bytes += rows.nbytes
            del rows
        yield entries, tables

    def _merge(
        self, snapshot: TableSnapshot, entries: Sequence[FileEntry], tables: list[pa.Table]
    ) -> None:
        """Write shards again as one and commit it; empties `tables`, their rows."""
        rows = _cluster_episodes(tables)
        num_rows = rows.num_rows
        written = self._table.write(rows, since=min(entry.since for entry in entries))
        del rows
        # Comparing needs memory, too, and Arrow would keep what it had.
        pa.default_memory_pool().release_unused()
        if len(written.entries) >= len(entries):
            # Nothing was won; no commit has named them, so they can go at once.
            root = self._table.root
            self._table.storage.delete([f"{root}/{entry.path}" for entry in written.entries])
            return
        self._check_same(snapshot, entries, written)
        self._table.commit(
            [written],
            producer=f"compact/{new_ulid()}",
            sequence=0,
            operation="COMPACT",
            info={
                "shards_before": len(entries),
                "shards_after": len(written.entries),
                "num_rows": num_rows,
            },
            removed=[entry.path for entry in entries],
            data_change=False,
        )
        self.num_commits += 1
        self.num_rewritten += len(entries)
        self.num_rows += num_rows

    def _check_same(
        self, snapshot: TableSnapshot, entries: Sequence[FileEntry], written: WrittenRows
    ) -> None:
        """Compare the rows in the files by another reader than the one that copied them."""
        before, after = fingerprint(snapshot, entries), fingerprint(snapshot, written.entries)
        if before != after:
            raise StorageError(
                f"{self._table.root}: compacting {len(entries)} shards made {after[0]:,} rows of "
                f"fingerprint {after[1]:x}, expected {before[0]:,} of {before[1]:x}. Nothing was "
                "committed. Check the disk and memory of this machine, then run "
                "`replaylake fsck`."
            )


def _cluster_episodes(tables: list[pa.Table]) -> pa.Table:
    """Return the rows with each episode's together, by agent and step; first seen, first kept.

    Rows of a table without steps stay in the order they came in. Empties the list, so that the rows
    are in memory once.
    """
    rows = pa.concat_tables(tables).unify_dictionaries()
    tables.clear()
    if not has_steps(rows.column_names):
        return rows
    keys = (
        rows.column(STEP).to_numpy(),
        _codes(rows.column(AGENT_ID)),
        _codes(rows.column(EPISODE_ID)),
    )
    order = np.lexsort(keys)  # stable: rows of the same step keep their order
    if np.array_equal(order, np.arange(len(order))):
        return rows
    indices, schema, columns = pa.array(order), rows.schema, rows.columns
    del rows
    for place, column in enumerate(columns):
        # In the place of the other, which is then free: both orders are never there as a whole.
        columns[place] = column.combine_chunks().take(indices)
        del column
    return pa.Table.from_arrays(columns, schema=schema)


def _codes(column: pa.ChunkedArray) -> Any:
    """Return numbers for texts, in the order in which each is first met."""
    return column.cast(pa.string()).combine_chunks().dictionary_encode().indices.to_numpy()


@dataclass(frozen=True)
class WeighedShard:
    """A shard, and the share of the largest that it would be (1: as much as a shard may hold)."""

    entry: FileEntry
    share: float


def plan_groups(
    snapshot: TableSnapshot,
    *,
    target_bytes: int,
    written_after_ms: int,
    newest: int | None = None,
) -> list[tuple[FileEntry, ...]]:
    """Return groups of at least two neighbors, oldest first.

    Shards with rows of open episodes are in none: those of which a row was written after
    `written_after_ms` (ms since 1970) and none has ended. With `newest`, neither are those whose
    oldest rows came after this version. Raises: ShardCorruptError.
    """
    small = [
        entry
        for entry in snapshot.files
        if entry.size_bytes < target_bytes // 2 and (newest is None or entry.since <= newest)
    ]
    small_paths = {entry.path for entry in small}
    open_entries = _with_open_episodes(snapshot, small, written_after_ms)
    groups: list[tuple[FileEntry, ...]] = []
    group: list[WeighedShard] = []
    varies = _has_variable_width(snapshot.schema)
    for entry in snapshot.files:
        weighed = None
        if entry.path in small_paths and entry.path not in open_entries:
            weighed = _weigh(snapshot, entry, target_bytes, varies)
        if weighed is None or weighed.share >= _FULL:
            groups += _worthwhile_parts(group)
            group = []
            continue
        if len(group) == _MAX_SHARDS or sum(other.share for other in group) + weighed.share > 1:
            groups += _worthwhile_parts(group)
            group = []
        group.append(weighed)
    return [*groups, *_worthwhile_parts(group)]


def _worthwhile_parts(group: Sequence[WeighedShard]) -> Iterator[tuple[FileEntry, ...]]:
    """Yield the group, or what is worth it beside its largest shard."""
    if len(group) < 2:
        return
    sizes = [weighed.entry.size_bytes for weighed in group]
    largest = max(sizes)
    if largest < _SMALL_BYTES or sum(sizes) >= _MIN_GAIN * largest:
        yield tuple(weighed.entry for weighed in group)
        return
    at = sizes.index(largest)
    yield from _worthwhile_parts(group[:at])
    yield from _worthwhile_parts(group[at + 1 :])


def _weigh(
    snapshot: TableSnapshot, entry: FileEntry, target_bytes: int, varies: bool
) -> WeighedShard:
    decoded = entry.num_rows * sum(_width(field.type) for field in snapshot.schema)
    if varies:
        # Frames and texts are as long as they are: the footer knows, before it was compressed.
        decoded += _count_encoded_bytes(snapshot, entry)
    shares = (
        entry.size_bytes / target_bytes,
        entry.num_rows / MAX_ROWS,
        decoded / MAX_DECODED_BYTES,
    )
    return WeighedShard(entry, max(shares))


def _count_encoded_bytes(snapshot: TableSnapshot, entry: FileEntry) -> int:
    with fetch_files(snapshot, [entry]) as (path,):
        try:
            footer = pq.read_metadata(path)
            return sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups))
        except (pa.ArrowException, OSError) as error:
            raise ShardCorruptError(
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


def _has_variable_width(schema: pa.Schema) -> bool:
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
    if not recent or not small or not has_steps(snapshot.schema.names):
        return set()
    with (
        fetch_files(snapshot, recent) as recent_paths,
        fetch_files(snapshot, small) as small_paths,
        scan_connection() as connection,
    ):
        unfinished = (
            f"SELECT {EPISODE_ID} FROM {from_clause(snapshot, recent_paths)} "
            f"GROUP BY {EPISODE_ID}, {AGENT_ID} HAVING NOT bool_or({TERMINATED} OR {TRUNCATED})"
        )
        places = (
            f"SELECT DISTINCT file_index FROM {from_clause(snapshot, small_paths)} "
            f"WHERE {EPISODE_ID} IN ({unfinished})"
        )
        return {small[index].path for (index,) in query_rows(connection, places)}
