"""Table: shards plus a commit log, for any Arrow schema, be it of steps, decisions or rewards.

The same (producer, sequence) is committed once, however often it is sent. Columns are fixed at
creation; nullable ones may come with a later append.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.errors import (
    AlreadyExistsError,
    CommitConflictError,
    NotFoundError,
    ProducerEndedError,
)
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.log.commit_file import Intent, transaction_id
from replaylake.datastore.storage.log.commit_log import CommitLog
from replaylake.datastore.storage.log.state import FileEntry, LogState
from replaylake.datastore.storage.storage import Storage
from replaylake.datastore.storage.table.delta_schema import with_field_ids
from replaylake.datastore.storage.table.shard import FOLDER, blob_of, read_shard, write_shards
from replaylake.datastore.storage.table.table_schema import (
    conform,
    extend_schema,
    has_other_ids,
    merge_schemas,
    new_metadata,
    read_configuration,
    table_schema,
    with_schema,
)
from replaylake.datastore.storage.table.table_snapshot import TableSnapshot as TableSnapshot

# A new shard is at most this many rows and, before compression, bytes: one frame may weigh as much
# as a hundred rows of numbers. That is half of what one that replaces others may hold: small enough
# for a large append to be encoded by several threads, large enough for compaction to let it be.
_SHARD_ROWS: Final = 524_288
_SHARD_BYTES: Final = 128 << 20
# Vacuum takes shards that waited an hour or more for their commit for what a crash left behind.
# Half of that: an upload may be dated when it began.
_VACUUM_SAFE_MS: Final = 1_800_000
# The sequence that ends a producer; others begin at 0.
_END: Final = -1


@dataclass(frozen=True)
class TableCommit:
    """What an append did; rows, shards and bytes are 0 when it was already present."""

    version: int
    already_present: bool
    num_rows: int
    num_shards: int
    num_bytes: int


@dataclass(frozen=True)
class WrittenRows:
    """Shards that are durable but not committed yet; may be sent to another process."""

    schema: pa.Schema
    entries: tuple[FileEntry, ...]

    @property
    def num_rows(self) -> int:
        """Rows in all shards."""
        return sum(entry.num_rows for entry in self.entries)


@dataclass(frozen=True)
class _CommitOptions:
    """What a commit says beside the shards that it adds."""

    operation: str
    info: Mapping[str, Any]
    removed: tuple[str, ...]
    data_change: bool
    check: Callable[[LogState], None] | None = None
    schema: pa.Schema | None = None
    configuration: Mapping[str, str] = field(default_factory=dict)


class Table:
    """A table at `root` in the storage; a handle, which need not exist yet."""

    def __init__(self, storage: Storage, root: str) -> None:
        self.storage = storage
        self.root = root
        self.log = CommitLog(storage, root)

    def exists(self) -> bool:
        """Whether the table has been created."""
        return self.log.exists()

    def create(self, schema: pa.Schema, configuration: Mapping[str, str] | None = None) -> None:
        """Commit version 0.

        Raises: AlreadyExistsError, SchemaMismatchError on a type that Delta lacks.
        """
        metadata = new_metadata(with_field_ids(schema), configuration or {})

        def build(state: LogState) -> Intent:
            if state.version >= 0:
                raise AlreadyExistsError(
                    f"{self.root}: the table exists at version {state.version}."
                )
            return Intent(f"create/{new_ulid()}", 0, "CREATE TABLE", metadata=metadata)

        self.log.commit(build)

    def extend(self, schema: pa.Schema) -> None:
        """Give a table that is older than its schema the columns it lacks, nullable.

        A column that must not be null, and may be in `schema`, may be from then on. Commits nothing
        where nothing differs. Raises: NotFoundError, SchemaMismatchError if a column's type
        differs.
        """
        current = table_schema(self.log.newest())
        if extend_schema(current, schema) is current:
            return

        def build(state: LogState) -> Intent:
            extended = extend_schema(table_schema(state), schema)
            metadata = with_schema(state, extended)
            return Intent(f"extend/{new_ulid()}", 0, "ADD COLUMNS", metadata=metadata)

        self.log.commit(build)

    def configure(
        self, values: Mapping[str, str], *, operation: str, check: Callable[[LogState], None]
    ) -> None:
        """Set entries of the configuration. `check` is called with the state that is built on.

        Raises: NotFoundError, and what `check` raises.
        """

        def build(state: LogState) -> Intent:
            check(state)
            configuration = {**read_configuration(state), **values}
            assert state.metadata is not None  # it has a configuration
            metadata = replace(state.metadata, configuration=configuration)
            return Intent(f"configure/{new_ulid()}", 0, operation, metadata=metadata)

        self.log.commit(build)

    def append(
        self,
        data: pa.Table,
        *,
        producer: str,
        sequence: int,
        operation: str = "WRITE",
        info: Mapping[str, Any] | None = None,
    ) -> TableCommit:
        """Write shards and commit them as one version, durably.

        Columns are matched by name; new nullable ones extend the schema. Raises: NotFoundError if
        the table does not exist, SchemaMismatchError if a column's type differs or a required one
        is absent; ProducerEndedError after `end_producer`.
        """
        if self.exists():
            state = self.log.newest()
            if (commit := state.transactions.get(transaction_id(producer, sequence))) is not None:
                return TableCommit(commit, True, 0, 0, 0)
            self._check_not_ended(producer, state)  # before a shard is written for nothing
        return self.commit(
            [self.write(data)], producer=producer, sequence=sequence, operation=operation, info=info
        )

    def write(
        self,
        data: pa.Table,
        *,
        since: int = -1,
        schema: pa.Schema | None = None,
        shard_bytes: int | None = None,
    ) -> WrittenRows:
        """Write shards durably, for `commit` to make readable, here or in another process.

        `since` is for rows that take the place of others: the version that first had them. `schema`
        is for those that are committed with another one, or to a table that is created only once
        its first rows are on the disk. `shard_bytes` is how much of `data` a shard has at most, as
        Arrow counts it, where that is to be less than usual. Raises: as append.
        """
        if schema is None:
            schema = merge_schemas(table_schema(self.log.newest()), data.schema)
        data = conform(data, schema)
        scale = 1 if since < 0 else 2
        in_bytes = (shard_bytes or scale * _SHARD_BYTES) * data.num_rows // max(data.nbytes, 1)
        num_rows = max(1, min(scale * _SHARD_ROWS, in_bytes))
        parts = [data.slice(start, num_rows) for start in range(0, data.num_rows, num_rows)]
        entries = write_shards(self.storage, self.root, parts)
        return WrittenRows(data.schema, tuple(replace(entry, since=since) for entry in entries))

    def commit(
        self,
        written: Sequence[WrittenRows],
        *,
        producer: str,
        sequence: int,
        operation: str = "WRITE",
        info: Mapping[str, Any] | None = None,
        removed: Sequence[str] = (),
        data_change: bool = True,
        check: Callable[[LogState], None] | None = None,
        schema: pa.Schema | None = None,
        configuration: Mapping[str, str] | None = None,
    ) -> TableCommit:
        """Commit written shards as one version: all of them, durably, or none.

        Shards that hold the field id of a column that another writer added since are written again.

        Args:
            written: what `write` returned.
            producer: who commits; with `sequence`, what makes a repeated commit add nothing.
            sequence: the producer's count.
            operation: what `history` calls it.
            info: further entries of the commit's info.
            removed: paths of live shards whose place the written ones take, in the same moment.
            data_change: False where the rows stay what they were, as in compaction: readers that
                follow the table pass over such a commit.
            check: called with the state that is committed onto, whenever another writer was first;
                what it raises is raised, and nothing is committed.
            schema: what takes the place of the table's; `check` has to refuse states of which a
                shard that stays has a column that it lacks.
            configuration: entries to set in the table's.

        Raises: SchemaMismatchError if that column has another type, ShardCorruptError;
        CommitConflictError if a removed shard is no longer live, because another writer was first,
        or if a written one waited so long for its commit that it was deleted meanwhile;
        ProducerEndedError after `end_producer`.
        """
        parts = tuple(written)
        change = _CommitOptions(
            operation,
            info or {},
            tuple(removed),
            data_change,
            check,
            schema,
            configuration or {},
        )
        while True:
            try:
                return self._commit(parts, producer, sequence, change)
            except _FieldIdTakenError:
                parts = tuple(map(self._rewrite_part, parts))

    def _commit(
        self,
        written: Sequence[WrittenRows],
        producer: str,
        sequence: int,
        change: _CommitOptions,
    ) -> TableCommit:
        entries = tuple(entry for part in written for entry in part.entries)

        def build(state: LogState) -> Intent:
            if (
                change.check is not None
                and transaction_id(producer, sequence) not in state.transactions
            ):
                change.check(state)
            current = table_schema(state)
            merged = change.schema or current
            for part in written:
                merged = merge_schemas(merged, part.schema)
                if has_other_ids(merged, part.schema):
                    raise _FieldIdTakenError
            metadata = None if merged is current else with_schema(state, merged)
            if change.configuration:
                metadata = metadata or with_schema(state, merged)
                configuration = {**metadata.configuration, **change.configuration}
                metadata = replace(metadata, configuration=configuration)
            if transaction_id(producer, sequence) not in state.transactions:
                self._check_not_ended(producer, state)
                self._check_not_vacuumed(entries)
            return Intent(
                producer,
                sequence,
                change.operation,
                add=entries,
                remove=change.removed,
                metadata=metadata,
                data_change=change.data_change,
                info=change.info,
            )

        commit = self.log.commit(build)
        if commit.already_present:
            return TableCommit(commit.version, True, 0, 0, 0)
        num_rows = sum(entry.num_rows for entry in entries)
        num_bytes = sum(entry.size_bytes for entry in entries)
        return TableCommit(commit.version, False, num_rows, len(entries), num_bytes)

    def _check_not_ended(self, producer: str, state: LogState) -> None:
        end = state.transactions.get(transaction_id(producer, _END))
        if end is not None:
            raise ProducerEndedError(
                f"{self.root}: found that version {end} ended the producer {producer}, expected "
                "one that may commit: another process has taken over, and may have recorded the "
                "same. Nothing was committed. Use another producer."
            )

    def _check_not_vacuumed(self, entries: Sequence[FileEntry]) -> None:
        """Look for shards that were written long before their commit: vacuum may have been here."""
        now_ms = time.time_ns() // 1_000_000
        # Either way: the clock may have been moved between.
        old = [e for e in entries if abs(now_ms - e.modified_ms) > _VACUUM_SAFE_MS]
        if not old:
            return
        present = set(self.storage.names(f"{self.root}/{FOLDER}"))
        lost = [entry.path for entry in old if entry.path.removeprefix(f"{FOLDER}/") not in present]
        if lost:
            raise CommitConflictError(
                f"{self.root}: found no {', '.join(lost[:3])} ({len(lost)} of {len(entries)} "
                "shards), expected what was written for this commit over half an hour ago: it was "
                "vacuumed meanwhile. Write the rows again."
            )

    def _rewrite_part(self, part: WrittenRows) -> WrittenRows:
        """Write rows again from their shards, with the field ids that the table has now."""
        merged = merge_schemas(table_schema(self.log.newest()), part.schema)
        if not has_other_ids(merged, part.schema):
            return part
        again = [
            self.write(
                read_shard(self.storage.fetch([blob_of(self.root, entry)])[0], entry),
                since=entry.since,
            )
            for entry in part.entries
        ]
        entries = tuple(entry for rows in again for entry in rows.entries)
        return WrittenRows(again[0].schema if again else merged, entries)

    def end_producer(self, producer: str) -> None:
        """Refuse all further commits of a producer; what it has committed stays.

        A repeated commit still returns its version, any other raises ProducerEndedError. Ending it
        again changes nothing. Raises: NotFoundError, StorageError.
        """

        def build(state: LogState) -> Intent:
            if state.version < 0:
                raise NotFoundError(f"{self.root}: found no table, expected one.")
            return Intent(producer, _END, "END PRODUCER", data_change=False)

        self.log.commit(build)

    def find_commit(self, producer: str, sequence: int) -> int | None:
        """Return the version that holds a (producer, sequence), or None."""
        if not self.exists():
            return None
        return self.log.newest().transactions.get(transaction_id(producer, sequence))

    def next_sequence(self, producer: str) -> int:
        """Return the sequence after the highest that this producer has committed; 0 if none."""
        if not self.exists():
            return 0
        prefix = transaction_id(producer, 0)[:-1]
        sequences = (
            key.removeprefix(prefix)
            for key in self.log.newest().transactions
            if key.startswith(prefix)
        )
        return max((int(text) for text in sequences if text.isdecimal()), default=-1) + 1

    def snapshot(self, version: int | None = None) -> TableSnapshot:
        """Pin a version, the newest by default. Raises: NotFoundError."""
        if not self.exists():
            raise NotFoundError(f"{self.root}: found no table, expected one.")
        state = self.log.newest() if version is None else self.log.at(version)
        return TableSnapshot(
            version=state.version,
            schema=table_schema(state),
            files=tuple(sorted(state.files.values(), key=lambda entry: entry.since)),
            configuration=read_configuration(state),
            storage=self.storage,
            root=self.root,
        )

    def history(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the commitInfo of each version from `since` on, oldest first."""
        return self.log.history(since)

    def commit_info(self, version: int) -> dict[str, Any]:
        """Return one version's commitInfo. Raises: NotFoundError."""
        return self.log.info(version)


class _FieldIdTakenError(Exception):
    """Another writer gave a new column's field id, which shards hold, to a column of its own."""
