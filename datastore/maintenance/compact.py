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

from replaylake.datastore.episodes.schema import AGENT_ID, EPISODE_ID, STEP, holds_steps
from replaylake.datastore.errors import (
    CommitConflict,
    ConfigInvalid,
    NotFound,
    ShardCorrupt,
    StorageFailed,
)
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.groups import MAX_DECODED_BYTES, groups
from replaylake.datastore.names import new_ulid
from replaylake.datastore.query.table_files import fetched, fingerprint
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


@dataclass(frozen=True)
class Compacted:
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
        """Return a JSON object."""
        return asdict(self)


def compact(
    lake: Lake,
    dataset: str,
    *,
    target_bytes: int = DEFAULT_TARGET_BYTES,
    open_s: float = OPEN_S,
    now_ms: int | None = None,
    once: bool = False,
    on_progress: OnProgress | None = None,
) -> list[Compacted]:
    """Compact a dataset's steps, and the tables of what was served into it.

    Args:
        lake: the lake.
        dataset: its name.
        target_bytes: how large a shard becomes, 64 to 256 MiB.
        open_s: an episode without an end is left where it is while its newest row is younger (s).
        now_ms: the time to judge that by (ms since 1970); the clock's by default.
        once: plan once, and leave what others append meanwhile, as a run that goes on for hours;
            by default it goes on until there is nothing to do.
        on_progress: called with (shards done, shards) as it goes on.

    Raises: NotFound, ConfigInvalid, ShardCorrupt (nothing of that shard is rewritten then),
    StorageFailed. Memory: below 1 GiB, whatever the size of the dataset.
    """
    handle = lake.dataset(dataset)
    if not handle.exists():
        raise NotFound(
            f"dataset {dataset!r}: not in this lake. `replaylake list` names those that are."
        )
    return [
        compact_table(
            table,
            target_bytes=target_bytes,
            open_s=open_s,
            now_ms=now_ms,
            once=once,
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
    once: bool = False,
    on_progress: OnProgress | None = None,
) -> Compacted:
    """Compact one table, as `compact` does."""
    check_target(target_bytes)
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    run = _Run(table, on_progress)
    before = table.snapshot()
    while True:
        snapshot = table.snapshot()
        found = groups(
            snapshot, target_bytes=target_bytes, written_after_ms=now_ms - int(open_s * 1000)
        )
        left = [group for group in found if group not in run.settled]
        if not left:
            break
        if run.num_conflicts:
            # Two compactors that both begin with the oldest would meet at every group.
            random.shuffle(left)
        run.merge_all(snapshot, left)
        if once:
            snapshot = table.snapshot()
            break
    return Compacted(
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
    """Refuse a size that shards should not have. Raises: ConfigInvalid."""
    if not MIN_TARGET_BYTES <= target_bytes <= MAX_TARGET_BYTES:
        raise ConfigInvalid(
            f"target_bytes: found {target_bytes:,}, expected {MIN_TARGET_BYTES:,} (64 MiB) to "
            f"{MAX_TARGET_BYTES:,} (256 MiB): scans of smaller shards are slow, and reading one "
            "takes several times its size in memory."
        )


class _Run:
    """One compaction of one table: its counts, and the groups that came to nothing."""

    def __init__(self, table: Table, on_progress: OnProgress | None) -> None:
        self.settled: set[tuple[FileEntry, ...]] = set()
        self.num_rewritten = self.num_rows = self.num_commits = self.num_conflicts = 0
        self._table = table
        self._on_progress = on_progress

    def merge_all(self, snapshot: TableSnapshot, chosen: Sequence[tuple[FileEntry, ...]]) -> None:
        """Merge group by group; ends early, to be planned again, if another writer was first."""
        total = self.num_rewritten + sum(map(len, chosen))
        for group in chosen:
            self.settled.add(group)
            try:
                for entries, tables in self._parts(snapshot, group):
                    if len(entries) > 1:
                        self._merge(snapshot, entries, tables)
            except CommitConflict:
                self.num_conflicts += 1
                return
            except ShardCorrupt:
                # Of a shard that is gone from the newest version as well, the rows are elsewhere.
                live = self._table.log.newest().files
                if all(entry.path in live for entry in group):
                    raise
                self.num_conflicts += 1
                return
            if self._on_progress is not None:
                self._on_progress(self.num_rewritten, total)

    def _parts(
        self, snapshot: TableSnapshot, group: Sequence[FileEntry]
    ) -> Iterator[tuple[list[FileEntry], list[pa.Table]]]:
        """Read and verify a group: whole, or in parts where it is larger than was foreseen."""
        entries: list[FileEntry] = []
        tables: list[pa.Table] = []
        held = 0
        for entry in group:
            with fetched(snapshot, [entry]) as (path,):
                rows = conform(read_shard(path, entry), snapshot.schema)
            if tables and held + rows.nbytes > 1.5 * MAX_DECODED_BYTES:
                yield entries, tables
                entries, tables, held = [], [], 0
            entries.append(entry)
            tables.append(rows)
            held += rows.nbytes
            del rows
        yield entries, tables

    def _merge(
        self, snapshot: TableSnapshot, entries: Sequence[FileEntry], tables: list[pa.Table]
    ) -> None:
        """Write shards again as one and commit it; empties `tables`, their rows."""
        rows = _side_by_side(tables)
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
            raise StorageFailed(
                f"{self._table.root}: compacting {len(entries)} shards made {after[0]:,} rows of "
                f"fingerprint {after[1]:x}, expected {before[0]:,} of {before[1]:x}. Nothing was "
                "committed. Check the disk and memory of this machine, then run "
                "`replaylake fsck`."
            )


def _side_by_side(tables: list[pa.Table]) -> pa.Table:
    """Return the rows with each episode's together, by agent and step; first seen, first kept.

    Rows of a table without steps stay in the order they came in. Empties the list, so that the rows
    are in memory once.
    """
    rows = pa.concat_tables(tables).unify_dictionaries()
    tables.clear()
    if not holds_steps(rows.column_names):
        return rows
    keys = (
        rows.column(STEP).to_numpy(),
        _codes(rows.column(AGENT_ID)),
        _codes(rows.column(EPISODE_ID)),
    )
    order = np.lexsort(keys)  # stable: rows of the same step keep their order
    if np.array_equal(order, np.arange(len(order))):
        return rows
    taken, schema, columns = pa.array(order), rows.schema, rows.columns
    del rows
    for place, column in enumerate(columns):
        # In the place of the other, which is then free: both orders are never there as a whole.
        columns[place] = column.combine_chunks().take(taken)
        del column
    return pa.Table.from_arrays(columns, schema=schema)


def _codes(column: pa.ChunkedArray) -> Any:
    """Return numbers for texts, in the order in which each is first met."""
    return column.cast(pa.string()).combine_chunks().dictionary_encode().indices.to_numpy()
