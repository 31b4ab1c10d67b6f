"""Copy: a snapshot into another lake, once however often it is sent, while writers append.

Also how several lakes are brought together in one: a step is the same step by its episode, agent
and number, wherever it comes from, and is never there twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.compatibility import find_spec_mismatch
from replaylake.datastore.episodes.schema import AGENT_ID, EPISODE_ID, STEP
from replaylake.datastore.errors import (
    AlreadyExistsError,
    ConfigInvalidError,
    LogCorruptError,
    NotFoundError,
    SchemaMismatchError,
)
from replaylake.datastore.lake.commit import DropCounts, commit_counts
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.maintenance.copy.shard_copier import ShardCopier
from replaylake.datastore.maintenance.removal import find_returned
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_rows,
    scan_connection,
)
from replaylake.datastore.storage.log.state import Change, FileEntry, LogState
from replaylake.datastore.storage.table.shard import FOLDER, verify_shard
from replaylake.datastore.storage.table.table import Table, TableSnapshot, WrittenRows
from replaylake.datastore.storage.table.table_schema import merge_schemas

_PREFIX: Final = "copy/"
# Those who commit without bringing in rows: a table with no other writers has only copied rows.
_ROWLESS: Final = (
    "annotate/",
    "columns/",
    "compact/",
    "create/",
    "delete/",
    "fsck/",
    "purge/",
    "reference/",
    "retention/",
    "score/",
    "trim/",
    "configure/",
)

# Called with (bytes moved, bytes) after each shard.
OnProgress = Callable[[int, int], None]
_KEY: Final = (EPISODE_ID, AGENT_ID, STEP)
# Changes of which every row was in a shard that they took out.
_REWRITES: Final = frozenset(
    (
        "ANNOTATE",
        "COMPACT",
        "DELETE",
        "DROP COLUMN",
        "LATE REWARDS",
        "PURGE",
        "RENAME COLUMN",
        "REPAIR",
        "SCORE",
        "TRIM",
    )
)


@dataclass(frozen=True)
class CopyReceipt:
    """What a copy added to its target. `version` is the target's, None if nothing was added.

    num_deleted_before_steps: left out, as they are of what the source or the target has deleted.
    """

    source: str
    source_version: int
    target: str
    dataset: str
    version: int | None
    num_episodes: int
    num_steps: int
    num_shards: int
    num_bytes: int
    num_already_present_steps: int
    num_deleted_before_steps: int = 0
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "notes": list(self.notes)}


def copy(
    lake: Lake,
    name: str,
    target: Lake,
    *,
    as_name: str | None = None,
    on_progress: OnProgress | None = None,
    readmit: bool = False,
) -> CopyReceipt:
    """Copy the steps of `NAME`, `NAME@VERSION` or `NAME@TAG` into a dataset of another lake.

    If the target does not exist, it is created with the same spaces and columns. Otherwise the rows
    that it lacks are added in one commit. The target's log records earlier copies: only later rows
    are copied, and shards that the source has rewritten since are compared row by row. A killed
    copy continues when it is called again. Later deletions and changes in the source do not change
    the copied rows. The source's tombstones are copied first; rows that
    were deleted in the source or the target are left out.

    Args:
        lake: the source lake.
        name: the snapshot.
        target: the target lake; it may be the same lake if `as_name` is given.
        as_name: the name of the copy, by default that of the dataset.
        on_progress: called after each shard.
        readmit: also copy what was deleted; it counts as deleted no more in the target.

    Raises: NotFoundError, InvalidNameError; ConfigInvalidError for a copy onto itself;
    SchemaMismatchError, before anything is written, if the target has other spaces or column types;
    ShardCorruptError if bytes of the source differ from those committed; StorageError.
    """
    snapshot = lake.snapshot(name)
    dataset = target.dataset(as_name or snapshot.dataset)
    if target.url == lake.url and dataset.name == snapshot.dataset:
        raise ConfigInvalidError(
            f"copy {name}: found the source itself as the target, expected another lake or another "
            "name. Name it with `as_name`."
        )
    source = lake.dataset(snapshot.dataset).table
    _ensure_target(dataset, snapshot)
    has_new = dataset.tombstones.copy_from(lake.dataset(snapshot.dataset).tombstones)
    job = _Copy(lake, source, snapshot, target, dataset, on_progress, readmit=readmit)
    while True:
        try:
            receipt = job.run()
        except _RaceLostError:
            continue
        num_returned = len(find_returned(dataset).episodes) if has_new else 0
        if not num_returned:
            return receipt
        note = (
            f"the source deleted {num_returned:,} episodes that the target still has: "
            f"`replaylake datasets delete {dataset.name} --again` deletes them there"
        )
        return replace(receipt, notes=(*receipt.notes, note))


def _ensure_target(dataset: Dataset, snapshot: Snapshot) -> None:
    """Create the target, or check that it can take these rows. Raises: SchemaMismatchError."""
    if not dataset.exists():
        try:
            configuration = snapshot.spec.configuration()
            dataset.create_table(snapshot.table.schema, configuration)
        except AlreadyExistsError:
            pass  # another copy was first
        else:
            return
    if mismatch := find_spec_mismatch(dataset.spec, snapshot.spec):
        raise SchemaMismatchError(
            f"copy {snapshot.dataset} into {dataset.name}: {mismatch}, expected one. Copy it into "
            "another dataset with `as_name`."
        )
    if snapshot.spec.rewards_optional and not dataset.spec.rewards_optional:
        raise SchemaMismatchError(
            f"copy {snapshot.dataset} into {dataset.name}: rewards may be unknown in "
            f"{snapshot.dataset}, expected all known as in {dataset.name}. Copy it into another "
            "dataset with `as_name`."
        )
    if snapshot.spec.tokenizer is not None:
        dataset.set_tokenizer(snapshot.spec.tokenizer)
    try:
        merge_schemas(dataset.snapshot().table.schema, snapshot.table.schema)
    except SchemaMismatchError as error:
        raise SchemaMismatchError(
            f"copy {snapshot.dataset} into {dataset.name}: {error}"
        ) from error


class _RaceLostError(Exception):
    """Another copy into the target, or a deletion there, was first: look again at what is there."""


class _Copy:
    def __init__(
        self,
        lake: Lake,
        source: Table,
        snapshot: Snapshot,
        target: Lake,
        dataset: Dataset,
        on_progress: OnProgress | None,
        *,
        readmit: bool,
    ) -> None:
        self._lake = lake
        self._source = source
        self._snapshot = snapshot
        self._target = target
        self._dataset = dataset
        self._table = dataset.table
        self._on_progress = on_progress
        self._readmit = readmit
        metadata = source.log.newest().metadata
        assert metadata is not None  # there is a snapshot of it
        self._producer = f"{_PREFIX}{metadata.id}"

    def run(self) -> CopyReceipt:
        version = self._snapshot.version
        if self._table.find_commit(self._producer, version) is not None:
            return self._receipt(None, notes=("already copied: nothing was added",))
        state = self._table.log.newest()
        present = self._table.snapshot()
        newest = self._table.next_sequence(self._producer) - 1
        base = _base(newest, version)
        plan = plan_copy(self._source, self._snapshot.table, base)
        compared = plan.mixed
        is_alone = not present.files or self._is_alone(state, plan, newest)
        if not is_alone:
            compared = (*plan.fresh, *plan.mixed)
        total = sum(entry.size_bytes for entry in (*plan.fresh, *plan.mixed))
        mover = ShardCopier(self._snapshot.table, self._table)
        before = self._previous_copy(plan)
        written: list[WrittenRows] = []
        num_episodes = num_present = num_deleted = moved = 0
        with PresentRows(self._snapshot.table, present, before) as known:
            doubled = known.find_present(compared)
            mark = self._dataset.tombstones.mark
            deleted = self._find_deleted((*plan.fresh, *plan.mixed))
            if self._readmit:  # which may have changed them
                mark = self._dataset.tombstones.mark
            whole = [e for e in (*plan.fresh, *plan.mixed) if e.path not in {*doubled, *deleted}]
            for entry in (*plan.fresh, *plan.mixed):
                present_rows = doubled.get(entry.path, [])
                gone = set(deleted.get(entry.path, ())).difference(present_rows)
                if entry.path not in doubled and not gone:
                    written.append(mover.copy_whole(entry))
                else:
                    rows = [*present_rows, *gone]
                    num_present += len(present_rows)
                    num_deleted += len(gone)
                    if part := mover.copy_missing(entry, rows):
                        num_episodes += part[0]
                        written.append(part[1])
                moved += entry.size_bytes
                if self._on_progress is not None:
                    self._on_progress(moved, total)
            # Last, because their bytes were checked as they were moved.
            num_episodes += known.num_episodes(whole)
        drops = DropCounts(num_already_present_steps=num_present)
        notes = make_notes(plan, newest if base is not None and plan.mixed and not before else None)
        is_alone = is_alone and self._snapshot.spec.unique == self._dataset.spec.unique
        receipt = self._commit_written(written, num_episodes, drops, state, notes, is_alone, mark)
        return replace(receipt, num_deleted_before_steps=num_deleted)

    def _find_deleted(self, entries: Sequence[FileEntry]) -> dict[str, list[int]]:
        """Return the rows of each shard that are of what was deleted. Cost: reads those columns."""
        tombstones, snapshot = self._dataset.tombstones, self._snapshot.table
        found: dict[str, list[int]] = {}
        names = {EPISODE_ID, *tombstones.columns} & set(snapshot.schema.names)
        for entry in entries if len(tombstones) else ():
            rows = replace(snapshot, files=(entry,)).read(sorted(names))
            if self._readmit:
                tombstones.lift(tombstones.find_subjects(rows))
            elif (deleted := tombstones.find(rows)).any():
                found[entry.path] = np.flatnonzero(deleted).tolist()
        return found

    def _commit_written(
        self,
        written: Sequence[WrittenRows],
        num_episodes: int,
        drops: DropCounts,
        state: LogState,
        notes: tuple[str, ...],
        is_alone: bool,
        mark: str,
    ) -> CopyReceipt:
        # Without shards too: the next copy starts from this version, and what the target removes
        # from here on does not come back with it.
        if not written:
            notes = ("nothing to add", *notes)
            if self._snapshot.version <= self._table.next_sequence(self._producer) - 1:
                return self._receipt(None, drops=drops, notes=notes)
        num_steps = sum(part.num_rows for part in written)
        keys = {key for key in state.transactions if key.startswith(_PREFIX)}
        # Shards that are moved as they are have to find the rows that they were compared with.
        paths = {*state.files} if is_alone and self._dataset.spec.unique is not None else None

        def check(state: LogState) -> None:
            if any(key.startswith(_PREFIX) and key not in keys for key in state.transactions):
                raise _RaceLostError
            if paths is not None and not paths.issuperset(state.files):
                raise _RaceLostError
            if self._dataset.tombstones.mark != mark:
                raise _RaceLostError

        source = {
            "source": {
                "lake": self._lake.url,
                "dataset": self._snapshot.dataset,
                "version": self._snapshot.version,
            },
        }
        if written and self._dataset.spec.unique is not None and not is_alone:
            # Their keys may be there, of rows that came another way.
            kept = self._dataset.commit_shards(
                written,
                num_episodes,
                producer=self._producer,
                sequence=self._snapshot.version,
                operation="COPY",
                info=source,
                drops=drops,
                check=check,
            )
            if kept.already_present:
                return self._receipt(None, notes=("already copied: nothing was added",))
            drops += DropCounts(num_already_present_steps=kept.keys.present)
            if kept.keys.conflicts:
                found = f"{kept.keys.conflicts:,} steps have keys that the target has with other"
                notes = (*notes, f"{found} values: they are in its quarantine")
            return replace(
                self._receipt(kept.version, drops=drops, notes=notes),
                num_episodes=kept.num_episodes,
                num_steps=kept.num_steps,
                num_shards=kept.num_shards,
                num_bytes=kept.num_bytes,
            )
        info = {**commit_counts(num_episodes, num_steps, drops), **source}
        commit = self._table.commit(
            written,
            producer=self._producer,
            sequence=self._snapshot.version,
            operation="COPY",
            info=info,
            check=check,
        )
        if commit.already_present:
            return self._receipt(None, notes=("already copied: nothing was added",))
        return replace(
            self._receipt(commit.version, drops=drops, notes=notes),
            num_episodes=num_episodes,
            num_steps=num_steps,
            num_shards=commit.num_shards,
            num_bytes=commit.num_bytes,
        )

    def _is_alone(self, state: LogState, plan: CopyPlan, newest: int) -> bool:
        """Whether all rows of the target are of earlier copies of this very table.

        Then what came since the last of them is new there, and nothing need be compared.
        """
        own = (f"{self._producer}#", *_ROWLESS)
        return plan.base == newest >= 0 and all(key.startswith(own) for key in state.transactions)

    def _previous_copy(self, plan: CopyPlan) -> TableSnapshot | None:
        """Return the source as it was copied, if rows have to be compared and it can be read.

        Rows that the target has deleted since must not come back with a rewritten shard.
        """
        if plan.base is None or not plan.mixed:
            return None
        try:
            before = self._source.snapshot(plan.base)
        except NotFoundError:
            return None
        there = set(self._source.storage.names(f"{self._source.root}/{FOLDER}"))
        is_whole = all(entry.path.rpartition("/")[2] in there for entry in before.files)
        return before if is_whole else None

    def _receipt(
        self,
        version: int | None,
        *,
        drops: DropCounts | None = None,
        notes: tuple[str, ...] = (),
    ) -> CopyReceipt:
        return CopyReceipt(
            source=f"{self._snapshot.dataset}@{self._snapshot.version}",
            source_version=self._snapshot.version,
            target=self._target.url,
            dataset=self._dataset.name,
            version=version,
            num_episodes=0,
            num_steps=0,
            num_shards=0,
            num_bytes=0,
            num_already_present_steps=(drops or DropCounts()).num_already_present_steps,
            notes=notes,
        )


def _base(newest: int, version: int) -> int | None:
    """Return the version copied last; None also where that is newer than the one to copy."""
    return newest if 0 <= newest <= version else None


class PresentRows:
    """The keys of a target's rows, and of those that an earlier copy had. A context manager.

    Cost: a scan of three columns of them for each question. Nothing is held in memory.
    """

    def __init__(
        self, source: TableSnapshot, target: TableSnapshot, before: TableSnapshot | None
    ) -> None:
        self._source = source
        self._known = [one for one in (target, before) if one is not None and one.files]
        self._stack = ExitStack()

    def __enter__(self) -> PresentRows:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def find_present(self, entries: Sequence[FileEntry]) -> dict[str, list[int]]:
        """Return the rows that are known, for each shard that shares an episode with them.

        Raises: ShardCorruptError.
        """
        if not entries or not self._known:
            return {}
        with ExitStack() as stack:
            paths = stack.enter_context(fetch_files(self._source, entries))
            for path, entry in zip(paths, entries, strict=True):
                verify_shard(path, entry)  # DuckDB reads flipped bits as other ids
            sources = []
            for one in self._known:
                files = stack.enter_context(fetch_files(one, one.files))
                sources.append(f"SELECT {', '.join(_KEY)} FROM {from_clause(one, files)}")
            known = " UNION ALL ".join(sources)
            connection = stack.enter_context(scan_connection())
            shared = query_rows(
                connection,
                f"SELECT DISTINCT file_index FROM {from_clause(self._source, paths)} "
                f"SEMI JOIN ({known}) USING ({EPISODE_ID}, {AGENT_ID})",
            )
            present = {}
            for (index,) in sorted(shared):
                rows = query_rows(
                    connection,
                    f"SELECT file_row_number FROM {from_clause(self._source, [paths[index]])} "
                    f"SEMI JOIN ({known}) USING ({', '.join(_KEY)}) ORDER BY 1",
                )
                present[entries[index].path] = [row for (row,) in rows]
            return present

    def num_episodes(self, entries: Sequence[FileEntry]) -> int:
        """Count the episodes and agents of shards."""
        if not entries:
            return 0
        columns = (EPISODE_ID, AGENT_ID)
        with fetch_files(self._source, entries) as paths, scan_connection() as connection:
            ((num,),) = query_rows(
                connection,
                f"SELECT count(*) FROM (SELECT DISTINCT {', '.join(columns)} "
                f"FROM {from_clause(self._source, paths)})",
            )
        return int(num)


_OLD, _MIXED, _FRESH = range(3)


@dataclass(frozen=True)
class CopyPlan:
    """What is live at the version to copy and was not, or perhaps not all, copied before.

    `fresh` shards hold only rows that came after `base`, the version copied before (None: nothing
    was); of `mixed` ones that is not known. `changed_at` are the versions since that changed or
    removed rows which were copied.
    """

    base: int | None
    fresh: tuple[FileEntry, ...]
    mixed: tuple[FileEntry, ...] = ()
    changed_at: tuple[int, ...] = ()


def plan_copy(source: Table, snapshot: TableSnapshot, base: int | None) -> CopyPlan:
    """Sort the shards of a snapshot by what was copied at `base`. Cost: reads the commits since."""
    if base is None:
        return CopyPlan(None, snapshot.files)
    kinds: dict[str, int] = {}
    changed: list[int] = []
    for version in range(base + 1, snapshot.version + 1):
        try:
            change = source.log.read_change(version)
        except (NotFoundError, LogCorruptError):
            # Expired since: nothing is known, so everything is compared.
            return CopyPlan(None, (), snapshot.files)
        if _note_commit(kinds, change):
            changed.append(version)
    return CopyPlan(
        base,
        fresh=tuple(e for e in snapshot.files if kinds.get(e.path, _OLD) == _FRESH),
        mixed=tuple(e for e in snapshot.files if kinds.get(e.path, _OLD) == _MIXED),
        changed_at=tuple(changed),
    )


def make_notes(plan: CopyPlan, forgotten: int | None) -> tuple[str, ...]:
    """Say what may surprise; `forgotten` is the version copied last where it is not there now."""
    notes = []
    if plan.changed_at:
        versions = ", ".join(map(str, plan.changed_at[:5]))
        notes.append(
            f"the source changed or removed rows since they were copied (version {versions}): the "
            "target keeps them as they were; copy into a new dataset for the newest values"
        )
    if forgotten is not None:
        notes.append(
            f"the source no longer retains version {forgotten}, the last one copied: steps of "
            "it that the target removed may have been copied again; copy more often than `keep "
            "versions` of `replaylake maintain retention`"
        )
    return tuple(notes)


def _note_commit(kinds: dict[str, int], change: Change) -> bool:
    """Note what a commit's shards hold; return whether it changed rows that were copied."""
    sources = {kinds.get(path, _OLD) for path in change.removed}
    if sources <= {_FRESH}:  # or nothing was removed: rows that are new
        kind = _FRESH
    elif sources == {_OLD} and (not change.changes_rows or change.operation in _REWRITES):
        kind = _OLD
    else:
        kind = _MIXED
    kinds |= {entry.path: kind for entry in change.added}
    return change.changes_rows and bool(sources - {_FRESH})
