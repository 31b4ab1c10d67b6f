"""Purge: episodes leave every version of a dataset, and a scan shows that none is left.

What goes, in this order; killed at any moment, the next purge of the dataset finishes it:
    1. A work list with the ids is written, `_lake/purge/<dataset>/<ulid>.json`, readable by this
       user alone, and `purges` says that the purge is running. Which policies were trained on these
       episodes is found out now, by running their selections.
    2. The episodes, their decisions, rewards and rows in quarantine leave the newest versions, as
       with delete.
    3. Every other shard with a row of theirs is deleted, whole: of an old version, in quarantine,
       left by a crash. Versions that named one can no longer be read; their tags are broken, which
       the record says before the files go. Files derived from the dataset are deleted, all of them.
    4. Every file of the dataset is looked into: columns of ids in Parquet, the bytes of all others.
       Only when no id is found is the work list removed, and the purge done.

A shard that another process has written and not committed may not be deleted: purge then says that
it is not done. What cannot be reached are caches on other machines and copies elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.schema import EPISODE_ID
from replaylake.datastore.errors import StorageError
from replaylake.datastore.feedback.decisions import recover_feedback
from replaylake.datastore.feedback.received_table import recover_received
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.tombstones import merge_subjects
from replaylake.datastore.maintenance.delete import (
    PURGED_COLUMNS,
    find_trained_policies,
    remove_episodes,
)
from replaylake.datastore.maintenance.episode_condition import EpisodeCondition, make_condition
from replaylake.datastore.maintenance.purge.commit_infos import hide_values
from replaylake.datastore.maintenance.purge.dataset_files import (
    JOURNAL,
    LIVE,
    WORK_LISTS,
    DatasetFiles,
    OnFile,
)
from replaylake.datastore.maintenance.purge.past_versions import (
    find_feedback_in_all_versions,
    find_identities_in_all_versions,
    find_returned_in_all_versions,
    find_versions_with,
    select_in_all_versions,
    select_waiting_in_all_versions,
)
from replaylake.datastore.maintenance.purge.traces import IdSearch, Trace
from replaylake.datastore.maintenance.removal import (
    find_subjects,
    plan_removal,
    recover_spans,
    remove_decisions,
    remove_received,
    select_rejected,
)
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.log.purges import DONE, RUNNING, Purge
from replaylake.datastore.storage.seals import read_json, seal_json
from replaylake.datastore.storage.table.table_snapshot import TableSnapshot

# A live server commits its journal every second, a writer may append to an episode that goes.
_TRIES: Final = 5
_PAUSE_S: Final = 1.0

_OPERATION: Final = "PURGE"

# Called with (what is being done, files done, files); without counts where a stage begins.
OnProgress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class PurgeReceipt:
    """What a purge did, or with `dry_run` would do; `resumed` are earlier ones that it finished.

    id and version: of the purge and its commit; None if nothing was there to purge. num_steps: rows
    of the newest version. versions, tags and policies: as in Purge. left: files with a trace of the
    ids, which purge may not delete or cannot look into. named_in: files outside of the dataset in
    which an id stands, such as the SQL that a policy was trained with. is_proven: neither was
    found, by a scan of `num_scanned` files, and nothing is undecided. num_undecided: episodes in
    quarantine of which the condition asks what is not known of them; they stay. num_tombstones:
    values that the dataset refuses from now on.
    """

    dataset: str
    dry_run: bool
    id: str | None
    version: int | None
    num_episodes: int
    num_steps: int
    num_decisions: int
    num_files: int
    versions: tuple[tuple[int, int], ...]
    tags: tuple[str, ...]
    policies: Mapping[str, int | None]
    num_scanned: int
    left: tuple[Trace, ...]
    named_in: tuple[str, ...]
    resumed: tuple[str, ...]
    num_undecided: int
    num_tombstones: int = 0

    @property
    def is_proven(self) -> bool:
        """Whether the scan found no id anywhere, and the condition could be decided everywhere."""
        return not self.left and not self.named_in and not self.num_undecided

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_proven": self.is_proven}


@dataclass(frozen=True)
class _PurgeWork:
    """What a purge has to do: the ids, which are in its file alone, and what was known before.

    subjects: values by column that the dataset refuses from now on.
    """

    id: str
    started_ms: int
    episodes: tuple[str, ...]
    decisions: tuple[str, ...]
    policies: Mapping[str, int | None]
    num_undecided: int = 0
    subjects: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def texts(self) -> set[str]:
        """All ids and values."""
        return {*self.episodes, *self.decisions}.union(*self.subjects.values())

    @property
    def id_search(self) -> IdSearch:
        return IdSearch(self.episodes, self.decisions)


def purge(
    lake: Lake,
    dataset: str,
    where: str | EpisodeCondition | None,
    *,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> PurgeReceipt:
    """Remove the episodes that a condition selects from every version, and verify it.

    Args:
        lake: the lake.
        dataset: its name.
        where: a condition as for `delete`. An episode that was deleted before is selected by its
            values in the last version that had it. None selects what was deleted before and is in
            some version again, for example after a backup was restored.
        dry_run: only report what would be deleted, which tags would break, and which policies were
            trained on the episodes.
        on_progress: called with (what is being done, files done, files), the latter 0 and None
            where a stage is not counted in files.

    The episodes are refused from now on. So are rows with a value that the condition selects, if it
    consists of nothing but comparisons of columns with values. Purges that were killed are finished
    first. Raises: NotFoundError, QueryRefusedError, QueryError, ShardCorruptError for a live shard,
    StorageError. Cost: reads the id columns of every file.
    """
    handle = lake.dataset(dataset)
    handle.snapshot()
    condition = make_condition(lake, dataset, where) if isinstance(where, str) else where
    run = _DatasetPurge(lake, handle, on_progress or (lambda stage, done, total: None))
    if dry_run:
        return run.preview(condition)
    resumed = tuple(run.iter_unfinished())
    results = [run.finish(work) for work in resumed]
    work = run.begin(condition)
    if work is not None:
        results.append(run.finish(work))
    last = results[-1] if results else _empty_receipt(dataset, dry_run=False)
    num_undecided = max([run.num_undecided, *(work.num_undecided for work in resumed)])
    return replace(last, resumed=tuple(work.id for work in resumed), num_undecided=num_undecided)


def _read_work_list(path: str, data: bytes) -> dict[str, Any]:
    try:
        body: dict[str, Any] = read_json(data)
    except (ValueError, RecursionError) as error:
        raise StorageError(
            f"{path}: {error}, expected the episodes of a purge that was not finished. Restore the "
            "file from a copy of the lake; or remove it, and run the purge again."
        ) from error
    return body


class _DatasetPurge:
    """The purges of one dataset."""

    def __init__(self, lake: Lake, handle: Dataset, on_progress: OnProgress) -> None:
        self._lake, self._handle, self._on_progress = lake, handle, on_progress
        self._storage = lake.storage
        self._name = handle.name
        self._files = DatasetFiles(lake, handle)
        self._is_served = handle.decisions.exists() and handle.rewards.exists()
        self.num_undecided = 0

    def iter_unfinished(self) -> Iterator[_PurgeWork]:
        """Read the work lists that were left, oldest first."""
        folder = f"{WORK_LISTS}/{self._name}"
        for name in self._storage.names(folder):
            data = self._storage.get(f"{folder}/{name}")
            if data is not None:
                body = _read_work_list(f"{folder}/{name}", data)
                ids = {name: tuple(body[name]) for name in ("episodes", "decisions")}
                yield _PurgeWork(**{**body, **ids})

    def begin(self, condition: EpisodeCondition | None) -> _PurgeWork | None:
        """Select, and write down what has to be done; None if it is nothing."""
        self._recover()
        work = self._select(condition)
        if work is None:
            return None
        self._storage.put_if_absent(self._path(work), seal_json(asdict(work)), private=True)
        return work

    def preview(self, condition: EpisodeCondition | None) -> PurgeReceipt:
        """Say what would be done."""
        work = self._select(condition)
        if work is None:
            nothing = _empty_receipt(self._name, dry_run=True)
            return replace(nothing, num_undecided=self.num_undecided)
        # The shards that are live now are those of an old version once they are written again.
        paths = [
            file.path
            for file, _ in self._files.find_inside(work.id_search, self._on_file("looked into"))
            if file.path.endswith(".parquet")
        ]
        versions = find_versions_with(self._handle.table, paths)
        num_steps = plan_removal(
            self._handle.table.snapshot(), EPISODE_ID, pa.array(work.episodes, pa.string())
        ).num_rows
        planned = self._purge(work, 0, versions, paths)
        return replace(_make_receipt(planned, work, num_steps), dry_run=True, id=None, version=None)

    def finish(self, work: _PurgeWork) -> PurgeReceipt:
        """Do all that is left of a purge, and look whether it is."""
        version, num_steps = 0, 0
        # Before they go: a source that sends them meanwhile is refused.
        num_tombstones = self._handle.tombstones.add(work.subjects)
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_PAUSE_S)
            self._on_progress("removing from the newest version", 0, None)
            self._record(work, version, [])
            num_steps += self._remove_live(work)
            version = self._version(work)
            for table in self._handle.tables():
                hide_values(table, work.texts)
            doomed = self._files.find_deletable(
                work.id_search, self._on_file("looked for old rows in")
            )
            # Before they go: a version is never unreadable without a word of why.
            self._record(work, version, doomed)
            self._files.delete(doomed)
            self._files.scrub_damaged(work.id_search)
            num_scanned, traces = self._files.find_remaining(
                work.id_search, self._on_file("verified")
            )
            if not any(trace.kind in (JOURNAL, LIVE) for trace in traces):
                break
        recorded = self._record(work, version, [], is_done=not traces)
        if not traces:
            self._storage.delete([self._path(work)])
        receipt = _make_receipt(recorded, work, num_steps)
        named_in = tuple(trace.path for _, trace in self._files.find_outside(work.id_search))
        return replace(
            receipt,
            num_scanned=num_scanned,
            left=tuple(traces),
            named_in=named_in,
            num_tombstones=num_tombstones,
        )

    def _select(self, condition: EpisodeCondition | None) -> _PurgeWork | None:
        self._on_progress("selecting episodes in all versions", 0, None)
        if condition is None:
            episodes, returned = find_returned_in_all_versions(self._handle)
            return self._make_work(episodes, returned, {})
        episodes = select_in_all_versions(self._handle.table, condition)
        if self._handle.rejected.exists():
            others, undecided = (
                select_in_all_versions(self._handle.rejected, condition, select)
                for select in (_select_rejected, _select_undecided)
            )
            episodes = pa.chunked_array([episodes, others]).combine_chunks().unique()
            undecided = undecided.filter(pc.invert(pc.is_in(undecided, value_set=episodes)))
            self.num_undecided = len(undecided)
        if self._handle.received.exists():
            waiting = select_waiting_in_all_versions(self._handle, condition)
            episodes = pa.chunked_array([episodes, waiting]).combine_chunks().unique()
        subjects = find_subjects(self._handle, condition, columns=PURGED_COLUMNS)
        return self._make_work(episodes, pa.array([], pa.string()), subjects)

    def _make_work(
        self, episodes: pa.Array, others: pa.Array, subjects: dict[str, list[str]]
    ) -> _PurgeWork | None:
        """Find all that belongs to some episodes; `others` are decisions beside theirs."""
        if not len(episodes) and not len(others):
            return None
        decisions = find_feedback_in_all_versions(self._handle, episodes)
        decisions = pa.chunked_array([decisions, others]).combine_chunks().unique()
        identities = find_identities_in_all_versions(self._handle, episodes)
        subjects = merge_subjects(subjects, identities)
        policies = find_trained_policies(self._lake, self._name, episodes)
        ids = (tuple(episodes.to_pylist()), tuple(decisions.to_pylist()))
        return _PurgeWork(new_ulid(), _now_ms(), *ids, policies, self.num_undecided, subjects)

    def _on_file(self, stage: str) -> OnFile:
        return lambda done, total: self._on_progress(stage, done, total)

    def _recover(self) -> None:
        if self._is_served:
            recover_feedback(self._handle)
        recover_received(self._handle)
        recover_spans(self._handle)

    def _path(self, work: _PurgeWork) -> str:
        return f"{WORK_LISTS}/{self._name}/{work.id}.json"

    def _remove_live(self, work: _PurgeWork) -> int:
        self._recover()
        episodes = pa.array(work.episodes, pa.string())
        receipt = remove_episodes(
            self._handle, episodes, operation=_OPERATION, producer=f"purge/{work.id}"
        )
        remove_decisions(self._handle, pa.array(work.decisions, pa.string()), _OPERATION)
        remove_received(self._handle, episodes, _OPERATION)  # what came while it ran
        return receipt.num_steps

    def _version(self, work: _PurgeWork) -> int:
        """Return the version of the purge's commit; where no row was live, make one for it."""
        producer = f"purge/{work.id}"
        if (version := self._handle.find_commit(producer, 0)) is not None:
            return version
        info = {"episodes_removed": len(work.episodes)}
        return self._handle.table.commit(
            [], producer=producer, sequence=0, operation=_OPERATION, info=info
        ).version

    def _record(
        self, work: _PurgeWork, version: int, doomed: list[str], *, is_done: bool = False
    ) -> Purge:
        """Write the purge's entry, with what an earlier attempt knew of it."""
        known = [purge for purge in self._lake.purges.list(self._name) if purge.id == work.id]
        versions = [*(known[0].versions if known else ())]
        versions += find_versions_with(self._handle.table, doomed)
        paths = {*doomed, *(known[0].paths if known else ())}
        purge = self._purge(work, version, _merge_ranges(versions), sorted(paths))
        if is_done:
            purge = replace(purge, status=DONE, ended_ms=_now_ms())
        self._lake.purges.record(purge)
        return purge

    def _purge(
        self,
        work: _PurgeWork,
        version: int,
        versions: tuple[tuple[int, int], ...],
        paths: list[str],
    ) -> Purge:
        purge = Purge(
            dataset=self._name,
            id=work.id,
            status=RUNNING,
            started_ms=work.started_ms,
            ended_ms=None,
            version=version,
            num_episodes=len(work.episodes),
            num_decisions=len(work.decisions),
            paths=tuple(paths),
            versions=versions,
            tags=(),
            policies=work.policies,
        )
        tags = (
            tag.name for tag in self._lake.tags.list(self._name) if purge.has_broken(tag.version)
        )
        return replace(purge, tags=tuple(tags))


def _select_rejected(snapshot: TableSnapshot, condition: EpisodeCondition) -> pa.Array:
    return select_rejected(snapshot, condition).selected


def _select_undecided(snapshot: TableSnapshot, condition: EpisodeCondition) -> pa.Array:
    return select_rejected(snapshot, condition).undecided


def _make_receipt(purge: Purge, work: _PurgeWork, num_steps: int) -> PurgeReceipt:
    return PurgeReceipt(
        dataset=purge.dataset,
        dry_run=False,
        id=purge.id,
        version=purge.version,
        num_episodes=purge.num_episodes,
        num_steps=num_steps,
        num_decisions=purge.num_decisions,
        num_files=purge.num_files,
        versions=purge.versions,
        tags=purge.tags,
        policies=work.policies,
        num_scanned=0,
        left=(),
        named_in=(),
        resumed=(),
        num_undecided=work.num_undecided,
    )


def _empty_receipt(dataset: str, *, dry_run: bool) -> PurgeReceipt:
    return PurgeReceipt(dataset, dry_run, None, None, 0, 0, 0, 0, (), (), {}, 0, (), (), (), 0)


def _merge_ranges(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join ranges that overlap or meet."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return tuple(joined)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
