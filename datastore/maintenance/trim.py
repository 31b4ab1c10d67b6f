"""Trim: the oldest whole episodes leave a dataset, as replay of an online run forgets them.

An episode goes with all its pieces and all its agents. Those that are still open stay. Earlier
versions keep what they had until vacuum.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.schema import (
    AGENT_ID,
    EPISODE_ID,
    TERMINATED,
    TIMESTAMP,
    TRUNCATED,
)
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.compact import OPEN_S
from replaylake.datastore.maintenance.removal import (
    count_decisions,
    count_received,
    count_rejected,
    find_decisions,
    find_written_received,
    plan_removal,
    remove_decisions,
    remove_received,
    remove_rejected,
    remove_spans,
    select_rejected_before,
    set_aside_of,
)
from replaylake.datastore.names import new_ulid
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_arrow,
    scan_connection,
)
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.rewrite import RewritePlan, rewrite
from replaylake.datastore.storage.table.table import Table, TableSnapshot

_OPERATION: Final = "TRIM"


@dataclass(frozen=True)
class TrimReceipt:
    """What trimming one dataset did, or would do; `version` is the newest afterwards.

    Episodes and steps that left, and the steps that are left; shards that went whole and those
    that were written again without some rows; decisions, rewards, received rows and rows of the
    quarantine that left with their episodes, or, those of the quarantine, as too old by themselves.
    """

    dataset: str
    dry_run: bool
    version: int
    num_episodes: int
    num_steps: int
    steps_left: int
    shards_dropped: int
    shards_rewritten: int
    num_decisions: int
    num_rewards: int
    num_rejected: int
    num_received: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _TrimLimits:
    max_steps: int | None
    cutoff_us: int | None
    open_after_ms: int


def trim(
    lake: Lake,
    dataset: str,
    *,
    max_steps: int | None = None,
    older_than_s: float | None = None,
    dry_run: bool = False,
    open_s: float = OPEN_S,
    now_ms: int | None = None,
) -> TrimReceipt:
    """Remove the oldest whole episodes, in one commit.

    Args:
        lake: the lake.
        dataset: its name.
        max_steps: remove episodes until at most this number of steps is left.
        older_than_s: remove episodes whose newest row is older than this (s), by its timestamp, or
            by its first commit if no row of the episode has a timestamp. For a compacted shard,
            only the age of its oldest rows is known, so its episodes without timestamps are removed
            later.
        dry_run: only count.
        open_s: an episode without an end is not removed while its newest row was written less than
            this ago (s), so more than `max_steps` may be left.
        now_ms: the time for comparing ages (ms since 1970); the clock's by default.

    Episodes are removed in the order of their first commits, and within a commit in the order of
    rows. The decisions and rewards that they were joined from are removed just before. Raises:
    NotFoundError, ConfigInvalidError if neither limit is given or one is below 0,
    ShardCorruptError.
    """
    _check(max_steps, older_than_s)
    handle = lake.dataset(dataset)
    if not handle.exists():
        raise NotFoundError(
            f"dataset {dataset!r}: not in this lake. `replaylake list` names those that are."
        )
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    limits = _TrimLimits(
        max_steps,
        None if older_than_s is None else now_ms * 1000 - int(older_than_s * 1e6),
        now_ms - int(open_s * 1000),
    )
    run = _Trim(handle, limits, dry_run)
    producer = f"trim/{new_ulid()}"
    if dry_run:
        run.plan(handle.table.snapshot())
    elif (
        rewrite(handle.table, run.plan, producer=producer, sequence=0, operation=_OPERATION) is None
    ):
        run.num_episodes = run.num_steps = 0
    snapshot = handle.table.snapshot()
    return TrimReceipt(
        dataset=dataset,
        dry_run=dry_run,
        version=snapshot.version,
        num_episodes=run.num_episodes,
        num_steps=run.num_steps,
        steps_left=snapshot.num_rows - (run.num_steps if dry_run else 0),
        shards_dropped=run.shards_dropped,
        shards_rewritten=run.shards_rewritten,
        num_decisions=run.num_decisions,
        num_rewards=run.num_rewards,
        num_rejected=run.num_rejected,
        num_received=run.num_received,
    )


def _check(max_steps: int | None, older_than_s: float | None) -> None:
    if max_steps is None and older_than_s is None:
        raise ConfigInvalidError(
            "trim: found no limit, expected max_steps, older_than_s or both. Say what has to go."
        )
    for name, value in (("max_steps", max_steps), ("older_than_s", older_than_s)):
        if value is not None and not value >= 0:
            raise ConfigInvalidError(f"{name}: found {value}, expected at least 0.", parameter=name)


class _Trim:
    """One trim; planned again when another writer was first."""

    def __init__(self, dataset: Dataset, limits: _TrimLimits, dry_run: bool) -> None:
        self.num_episodes = self.num_steps = self.num_decisions = self.num_rewards = 0
        self.shards_dropped = self.shards_rewritten = 0
        self.num_rejected = self.num_received = 0
        self._dataset = dataset
        self._limits = limits
        self._is_dry = dry_run
        self._leave = count_decisions if dry_run else _remove_decisions

    def plan(self, snapshot: TableSnapshot) -> RewritePlan:
        """Choose episodes, remove the decisions they are made of, and plan that they leave."""
        episodes = _select_episodes(self._dataset.table, snapshot, self._limits)
        ids = pa.chunked_array([episodes, self._select_aged(snapshot, episodes)])
        ids = ids.combine_chunks().unique()
        served = find_decisions(self._dataset, snapshot, episodes)
        aside = set_aside_of(self._dataset, snapshot, ids)
        decisions = pa.chunked_array([served, aside]).combine_chunks().unique()
        counts = self._leave(self._dataset, decisions)
        self.num_decisions += counts[0]
        self.num_rewards += counts[1]
        self.num_received += self._remove_received(ids)
        if not self._is_dry:
            remove_spans(self._dataset, snapshot, episodes, _OPERATION)
        self.num_rejected += self._remove_rejected(ids)
        info = {"episodes_removed": len(episodes)}
        planned = plan_removal(snapshot, EPISODE_ID, episodes, info)
        self.num_episodes, self.num_steps = len(episodes), planned.num_rows
        self.shards_dropped = len(planned.plan.dropped)
        self.shards_rewritten = len(planned.plan.changes)
        return planned.plan

    def _remove_received(self, episodes: pa.Array) -> int:
        if self._is_dry:
            return count_received(self._dataset, episodes)
        return remove_received(self._dataset, episodes, _OPERATION)

    def _remove_rejected(self, episodes: pa.Array) -> int:
        if self._is_dry:
            return count_rejected(self._dataset, episodes)
        return remove_rejected(self._dataset, episodes, _OPERATION)

    def _select_aged(self, steps: TableSnapshot, episodes: pa.Array) -> pa.Array:
        """Return the ids of quarantined episodes that are too old by themselves.

        Not those of which received steps stay, beside steps in the dataset: the next join would put
        the same row into quarantine again.
        """
        if self._limits.cutoff_us is None:
            return pa.array([], pa.string())
        aged = select_rejected_before(self._dataset, self._limits.cutoff_us)
        staying = find_written_received(self._dataset, steps, aged)
        staying = staying.filter(pc.invert(pc.is_in(staying, value_set=episodes)))
        return aged.filter(pc.invert(pc.is_in(aged, value_set=staying)))


def _remove_decisions(dataset: Dataset, decisions: pa.Array) -> tuple[int, int]:
    return remove_decisions(dataset, decisions, _OPERATION)


def _select_episodes(table: Table, snapshot: TableSnapshot, limits: _TrimLimits) -> pa.Array:
    """Return the ids of the episodes that have to go."""
    surplus = 0 if limits.max_steps is None else snapshot.num_rows - limits.max_steps
    nothing = pa.array([], pa.string())
    if not snapshot.files or (surplus <= 0 and limits.cutoff_us is None):
        return nothing
    num_files = len(snapshot.files)
    # Those at the front are looked at first. Where open episodes lie among them, or whole ones have
    # to give way to their other pieces, twice as many are, and in the end all.
    num_oldest = _prefix(snapshot.files, surplus) if limits.cutoff_us is None else num_files
    committed = _read_commit_times(table, snapshot) if limits.cutoff_us is not None else None
    while True:
        ids = _select_oldest(snapshot, num_oldest, surplus, limits, committed)
        if num_oldest == num_files or sum(ids.column("num_steps").to_pylist()) >= surplus:
            return ids.column("key").combine_chunks()
        num_oldest = min(2 * num_oldest, num_files)


def _select_oldest(
    snapshot: TableSnapshot,
    num_oldest: int,
    surplus: int,
    limits: _TrimLimits,
    committed: pa.Table | None,
) -> pa.Table:
    """Return `key` and `num_steps` of episodes that go, of those that begin in the oldest files."""
    written = [entry.modified_ms >= limits.open_after_ms for entry in snapshot.files]
    files = {"file": list(range(len(written))), "is_recent": written}
    tables = {"files": pa.table(files)}
    age = "NULL"
    if committed is not None:
        tables["committed"] = committed
        age = f"coalesce(max(epoch_us({TIMESTAMP})), max(us))"
    with fetch_files(snapshot, snapshot.files) as paths, scan_connection(tables) as connection:
        source = from_clause(snapshot, paths)
        oldest = from_clause(snapshot, paths[:num_oldest])
        joined = "" if committed is None else "JOIN committed ON committed.file = file_index"
        agents = f"""
            SELECT {EPISODE_ID} AS key, count(*) AS num,
                   min(file_index::BIGINT * 4294967296 + file_row_number) AS first,
                   bool_or({TERMINATED} OR {TRUNCATED}) AS has_ended,
                   bool_or(is_recent) AS is_recent, {age} AS newest
            FROM {source} JOIN files ON files.file = file_index {joined}
            WHERE {EPISODE_ID} IN (SELECT {EPISODE_ID} FROM {oldest})
            GROUP BY {EPISODE_ID}, {AGENT_ID}
        """
        episodes = f"""
            SELECT key, sum(num)::BIGINT AS num_steps, min(first) AS first, max(newest) AS newest
            FROM ({agents}) GROUP BY key
            HAVING NOT (bool_or(is_recent) AND bool_or(NOT has_ended))
        """
        too_many = "sum(num_steps) OVER (ORDER BY first) - num_steps < " + str(max(surplus, 0))
        too_old = f"newest < {limits.cutoff_us}" if committed is not None else "false"
        return query_arrow(
            connection,
            f"SELECT key, num_steps FROM ({episodes}) QUALIFY ({too_many}) OR ({too_old})",
        )


def _prefix(files: tuple[FileEntry, ...], surplus: int) -> int:
    """Return how many of the oldest files hold at least this many rows."""
    num_rows = 0
    for number, entry in enumerate(files, 1):
        num_rows += entry.num_rows
        if num_rows >= surplus:
            return number
    return len(files)


def _read_commit_times(table: Table, snapshot: TableSnapshot) -> pa.Table:
    """Return by when all rows of each file were first committed, as `file` and `us`.

    A shard that took the place of others says only when its oldest rows were: the younger ones
    were committed before the shards after it, and before it was written. Where the commit has
    expired from the log, the shard's own time stands in.
    """
    times = {entry.since: 0 for entry in snapshot.files}
    for version in times:
        with suppress(NotFoundError):
            times[version] = table.log.read_change(version).timestamp_ms
    versions = sorted(times)
    following = dict(pairwise(versions))
    stamps = []
    for entry in snapshot.files:
        stamp = times[entry.since]
        if entry.modified_ms > stamp:
            next_ms = times.get(following.get(entry.since, -1), 0)
            stamp = min(entry.modified_ms, next_ms or entry.modified_ms)
        stamps.append(1000 * stamp)
    return pa.table({"file": list(range(len(stamps))), "us": stamps})
