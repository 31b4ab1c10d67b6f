"""LogReader: what each commit of a dataset changes: packed steps that came, steps that went."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from replaylake.datastore.errors import (
    NotFoundError,
    ReplayLakeError,
    SchemaMismatchError,
    ShardCorruptError,
    SpaceUnsupportedError,
)
from replaylake.datastore.query.expressions import select_steps
from replaylake.datastore.replay.layout import RecordLayout
from replaylake.datastore.replay.live.packed_block import PackedBlock, make_block
from replaylake.datastore.replay.live.runs import IntervalSet, StepInterval
from replaylake.datastore.replay.packing.packing import pack
from replaylake.datastore.replay.packing.run_table import make_run_table
from replaylake.datastore.storage.log.state import Change, FileEntry, LogState
from replaylake.datastore.storage.table.shard import blob_of
from replaylake.datastore.storage.table.table import Table, TableSnapshot
from replaylake.datastore.storage.table.table_schema import read_configuration, table_schema

# Rows of one or several commits that are decoded together.
_ROWS_AT_ONCE: Final = 131_072


# What a shard may be refused for, where the next one may be whole.
UNREADABLE: Final = (ShardCorruptError, SchemaMismatchError, SpaceUnsupportedError)


class LogExpiredError(NotFoundError):
    """Commits were dropped from the log before they were read."""


class ShardGoneError(Exception):
    """What a commit removed can no longer be read, as after a purge; what is left can."""


@dataclass(frozen=True)
class LogChange:
    """What brings a reader to `version`.

    added: what is in the shards that came. failure: why some of it could not be read, the first
    reason. removed: what was in the shards that left, some of it in `added` again; None where none
    left.
    """

    version: int
    added: Sequence[PackedBlock] = ()
    failure: ReplayLakeError | None = None
    removed: IntervalSet | None = None


class StageTiming(NamedTuple):
    """Seconds that something took; items (commits, or steps) and bytes that went through it."""

    seconds: float = 0.0
    items: int = 0
    num_bytes: int = 0


class FollowTimings(NamedTuple):
    """tail: looking at the log; items are commits. decode: reading shards; items are steps."""

    tail: StageTiming
    decode: StageTiming


class _Meter:
    """Adds up in one thread, and tells another what came since it was last asked."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.items = self.num_bytes = 0
        self._last_read = StageTiming()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time of the block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started

    def read_since_last(self) -> StageTiming:
        """Return what was added since the last call."""
        before, now = self._last_read, StageTiming(self.seconds, self.items, self.num_bytes)
        self._last_read = now
        return StageTiming(
            now.seconds - before.seconds,
            now.items - before.items,
            now.num_bytes - before.num_bytes,
        )


class LogReader:
    """Reads a table's log from some version on. Not for use by several threads at once."""

    def __init__(
        self,
        table: Table,
        layout: RecordLayout,
        where_steps: str | None,
        without_producers: Collection[str] = (),
    ) -> None:
        """without_producers: `next` leaves out what these append; it comes by another way."""
        self._table = table
        self._layout = layout
        self._where_steps = where_steps
        self._without = without_producers
        self._state = LogState()
        self._tail, self._decode = _Meter(), _Meter()

    @property
    def version(self) -> int:
        """The version up to which changes were read; of one that could not be, too."""
        return self._state.version

    def begin(self, version: int | None) -> None:
        """Go on after a version, by default the newest. Raises: NotFoundError, LogCorruptError."""
        log = self._table.log
        state = log.newest() if version is None else log.at(version)
        self._state = replace(state, transactions={})

    def newest_rows(self, num_rows: int) -> list[list[FileEntry]]:
        """Return the shards with so many of the newest rows, to be read a few together."""
        entries = sorted(self._state.files.values(), key=lambda entry: entry.since)
        first = len(entries)
        while first and num_rows > 0:
            first -= 1
            num_rows -= entries[first].num_rows
        groups: list[list[FileEntry]] = []
        size = 0
        for entry in entries[first:]:
            if not groups or size + entry.num_rows > _ROWS_AT_ONCE:
                groups.append([])
                size = 0
            groups[-1].append(entry)
            size += entry.num_rows
        return groups

    def timings(self) -> FollowTimings:
        """Return what looking at the log and decoding took since the last call of this."""
        return FollowTimings(self._tail.read_since_last(), self._decode.read_since_last())

    def read(self, entries: Sequence[FileEntry]) -> PackedBlock:
        """Decode some shards, each checked against its sha256.

        Raises: ShardCorruptError, SchemaMismatchError, SpaceUnsupportedError.
        """
        snapshot = self._snapshot(entries)
        flags = None
        with self._decode.measure():
            if self._where_steps is not None:
                flags = select_steps(snapshot, self._where_steps)
            block = make_block(pack(snapshot, self._layout, start_flags=flags))
        self._decode.items += block.packed.num_steps
        self._decode.num_bytes += sum(entry.size_bytes for entry in entries)
        return block

    def change(self, entries: Sequence[FileEntry], removed: IntervalSet | None = None) -> LogChange:
        """Return what shards bring, as far as they can be read."""
        try:
            return LogChange(self.version, [self.read(entries)] if entries else [], None, removed)
        except UNREADABLE as error:
            if len(entries) == 1:
                return LogChange(self.version, [], error, removed)
        parts = [self.change([entry]) for entry in entries]
        blocks = [block for part in parts for block in part.added]
        failure = next((part.failure for part in parts if part.failure is not None), None)
        return LogChange(self.version, blocks, failure, removed)

    def next(self) -> LogChange | None:
        """Return what the next commits change, several of them where they only append.

        None if there are none. Those that only compact change nothing.

        Raises: LogCorruptError, StorageError and FormatTooNewError, after which the same commits
        are read again; Expired and Gone, after which only `begin` helps; NotFoundError if the
        dataset is gone.
        """
        first = self._state
        try:
            with self._tail.measure():
                newest = self._table.log.newest()
            return self._next(newest)
        except BaseException:
            # A store that does not answer now may do so later: nothing of these commits was taken.
            self._state = first
            raise

    def _next(self, newest: LogState) -> LogChange | None:
        first = self.version
        self._check_same(newest)
        entries: list[FileEntry] = []
        while self._state.version < newest.version:
            with self._tail.measure():
                change = self._read_change(self._state.version + 1)
                # Without who committed: a run's hundred thousand commits would be kept twice.
                after = self._state.apply([replace(change, transactions={})])
            live = self._state.files
            removed = [live[path] for path in change.dropped_paths if path in live]
            added = change.new_files
            if not removed and change.producer in self._without:
                added = []
            num_rows = sum(entry.num_rows for entry in (*entries, *added))
            if entries and (removed or num_rows > _ROWS_AT_ONCE):
                break
            self._state = after
            self._tail.items += 1
            if removed:
                return self.change(added, self._removed_intervals(removed))
            entries += added
        return self.change(entries) if self.version > first else None

    def _removed_intervals(self, entries: Sequence[FileEntry]) -> IntervalSet:
        try:
            return self.intervals(entries)
        except ShardCorruptError as error:
            raise ShardGoneError from error

    def _read_change(self, version: int) -> Change:
        try:
            return self._table.log.read_change(version)
        except NotFoundError as error:
            raise LogExpiredError(
                f"{self._table.root}: found no version {version} in the log, expected it, as "
                f"{version - 1} was the last one followed: it expired. The view begins anew with "
                "the newest version; keep versions for longer (docs/MAINTENANCE.md)."
            ) from error

    def _check_same(self, newest: LogState) -> None:
        known, found = self._state.metadata, newest.metadata
        is_other = known is not None and found is not None and known.id != found.id
        if is_other or newest.version < self._state.version:
            raise NotFoundError(
                f"dataset {self._table.root!r}: found another one of that name at version "
                f"{newest.version}, expected the one that was followed up to "
                f"{self._state.version}: it was deleted and made anew. Follow it again."
            )

    def _snapshot(self, entries: Sequence[FileEntry]) -> TableSnapshot:
        return TableSnapshot(
            version=self._state.version,
            schema=table_schema(self._state),
            files=tuple(entries),
            configuration=read_configuration(self._state),
            storage=self._table.storage,
            root=self._table.root,
        )

    def readable_intervals(self, entries: Sequence[FileEntry]) -> IntervalSet:
        """Read which steps some shards hold, without those that are damaged."""
        try:
            return self.intervals(entries)
        except ShardCorruptError:
            if len(entries) == 1:
                return IntervalSet(())
        return IntervalSet(steps for entry in entries for steps in self.readable_intervals([entry]))

    def intervals(self, entries: Sequence[FileEntry]) -> IntervalSet:
        """Read which steps some shards hold, and nothing else of them."""
        snapshot = self._snapshot(entries)
        blobs = [blob_of(snapshot.root, entry) for entry in entries]
        paths = snapshot.storage.fetch(blobs)
        try:
            table = make_run_table(snapshot, paths, None, 1)
        finally:
            snapshot.storage.release(blobs)
        ranges = table.ranges
        episodes = [digest.tobytes() for digest in table.digests]
        rows = zip(
            ranges.pairs.tolist(), ranges.first_steps.tolist(), ranges.lengths.tolist(), strict=True
        )
        return IntervalSet(StepInterval(episodes[pair], *steps) for pair, *steps in rows)
