"""Dataset check: every shard of a dataset, its steps across shards, its log and stray files."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from types import TracebackType
from typing import Any, Final

import duckdb
import pyarrow as pa

from replaylake.datastore.episodes.message_media import MESSAGE_MEDIA, is_media_column
from replaylake.datastore.episodes.schema import EPISODE_ID, TRACE_ID
from replaylake.datastore.errors import LogCorruptError, NotFoundError, StorageError
from replaylake.datastore.feedback.decisions import DECISION_ID
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.key_files import check_keys
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.profile.shard_statistics import delete_statistics
from replaylake.datastore.maintenance.fsck.finding import ERROR, NOTE, FsckFinding, FsckFindings
from replaylake.datastore.maintenance.fsck.log_check import CheckedLog, check_log, repair_log
from replaylake.datastore.maintenance.fsck.quarantine import (
    Damage,
    Orphan,
    Repair,
    quarantine_damage,
    quarantine_orphans,
)
from replaylake.datastore.maintenance.fsck.shard_check import CheckedShard, check_shard, run_schema
from replaylake.datastore.maintenance.retained_files import find_retained_files
from replaylake.datastore.query import summaries
from replaylake.datastore.query.connections import connect
from replaylake.datastore.replay.cache.view_cache import FOLDER as VIEWS
from replaylake.datastore.replay.cache.view_cache import ViewCache
from replaylake.datastore.replay.selectors.saved_priorities import PriorityFolder
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.shard import FOLDER
from replaylake.datastore.storage.table.table import Table
from replaylake.datastore.storage.table.table_schema import table_schema

_THREADS: Final = 2

# Called with (shards checked, shards, dataset) after each.
OnProgress = Callable[[int, int, str], None]
# DuckDB spills to disk above it. A run is a few dozen bytes; most episodes have one.
_MEMORY: Final = "512MB"
_FETCH_ROWS: Final = 4096
# Rows of one episode and agent by step: `reached` is the highest step before a run, `ended_at` the
# lowest step at which the episode ended before it.
_PROBLEMS: Final = """
SELECT episode, agent, first, last, shard, reached, ended_at
FROM (
    SELECT *,
           max(last) OVER earlier AS reached,
           min(CASE WHEN ended THEN last END) OVER earlier AS ended_at
    FROM runs
    WINDOW earlier AS (
        PARTITION BY episode, agent ORDER BY first, shard, row
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    )
)
WHERE first <> coalesce(reached, -1) + 1 OR last > ended_at
"""


@dataclass(frozen=True)
class CheckedDataset:
    """What was looked at of one dataset, its decisions and rewards among it."""

    dataset: str
    version: int | None
    num_shards: int
    num_steps: int
    num_bytes: int


@dataclass
class _CheckPlan:
    """The shards of one table to look at; `live` are those of the newest version."""

    table: Table
    log: CheckedLog
    schema: pa.Schema | None
    live: tuple[FileEntry, ...]
    older: tuple[FileEntry, ...] = ()
    damages: list[Damage] = field(default_factory=list)


class DatasetCheck:
    def __init__(
        self,
        lake: Lake,
        all_versions: bool,
        repair: bool,
        horizon_ms: int,
        on_progress: OnProgress | None,
    ) -> None:
        self._lake = lake
        self._all_versions = all_versions
        self._repair = repair
        self._horizon_ms = horizon_ms
        self._on_progress = on_progress
        self._name = ""
        self.findings = FsckFindings()
        self.datasets: list[CheckedDataset] = []
        self.repairs: list[Repair] = []

    def run(self, name: str) -> None:
        """Check a dataset and the tables of what was served into it."""
        self._name = name
        handle = self._lake.dataset(name)
        if handle.table.log.folder.is_empty():
            raise NotFoundError(
                f"dataset {name!r}: not in this lake. `replaylake list` names those that are."
            )
        plans = [self._plan_table(table) for table in self._tables(handle)]
        total = sum(len(plan.live) + len(plan.older) for plan in plans)
        num_done = 0
        for plan in plans:
            is_steps = plan.table is handle.table
            with RowCheck() as rows:
                for checked, number in self._check_shards(plan, _key(plan, handle)):
                    num_done += 1
                    if self._on_progress is not None:
                        self._on_progress(num_done, total, name)
                    self._take_shard(plan, checked, rows, number, is_steps)
                if is_steps:
                    self._find_row_faults(plan, rows)
                elif plan.table is handle.decisions:
                    self._find_doubled_decisions(plan, rows)
                orphans = list(self._orphans(plan))
                if self._repair:
                    self._repair_table(plan, rows if is_steps else None, orphans)
                if is_steps and (plan.damages or self._repair):
                    self._forget_derived(plan.table)
        for path, fault in PriorityFolder(handle.table.storage, handle.table.root).find_damaged():
            self.add(ERROR, "priorities", path, fault)
        self._check_views(handle)
        steps = plans[0]
        if steps.log.state is not None and steps.schema is not None and not steps.damages:
            self._check_keys(handle)
            self._check_media(handle)
        self.datasets.append(
            CheckedDataset(
                name,
                None if steps.log.state is None else steps.log.state.version,
                total,
                sum(entry.num_rows for entry in steps.live),
                sum(e.size_bytes for plan in plans for e in (*plan.live, *plan.older)),
            )
        )

    def _check_views(self, handle: Dataset) -> None:
        """Compare the replay views of this machine with their checksums; repair deletes damage."""
        views = ViewCache(handle.table.storage, handle.table.root)
        damaged = []
        for fault, view in views.iter_damaged():
            path = f"{handle.name}/{VIEWS}/{view.name}"
            advice = "`repair` deletes the view; it is decoded again when it is next used"
            self.add(ERROR, "replay view", path, f"{fault}. {advice}.")
            damaged.append(view)
        if self._repair and damaged:
            views.remove(damaged)
            self.repairs += [
                Repair("deleted", self._name, f"{handle.name}/{VIEWS}/{v.name}", "", None, 0, 0)
                for v in damaged
            ]

    def _check_keys(self, handle: Dataset) -> None:
        """Compare the index of unique keys with the shards; with repair, delete what is damaged."""
        damaged = []
        for path, fault in check_keys(handle):
            is_file = path != handle.name
            advice = (
                "`repair` deletes it; the next writer makes it anew"
                if is_file
                else "Delete the episodes that are there twice with `replaylake datasets delete`"
            )
            self.add(ERROR, "key", path, f"{fault}. {advice}.")
            damaged += [path] if is_file else []
        if self._repair and damaged:
            handle.table.storage.delete(damaged)
            handle.table.storage.forget(damaged)
            self.repairs += [
                Repair("deleted", self._name, path, "", None, 0, 0) for path in damaged
            ]

    def _check_media(self, handle: Dataset) -> None:
        """Find references of messages to media whose bytes no step of the episode has."""
        snapshot = handle.snapshot()
        if not any(is_media_column(*one) for one in snapshot.spec.extras.items()):
            return
        lost = snapshot.sql(
            f"SELECT {EPISODE_ID}, m.sha256 AS digest, count(*) AS n FROM (SELECT {EPISODE_ID}, "
            f"unnest({MESSAGE_MEDIA}) AS m FROM steps) GROUP BY {EPISODE_ID}, m.sha256 "
            "HAVING count(m.bytes) = 0 ORDER BY ALL"
        )
        for row in lost.to_pylist():
            message = (
                f"episode {row[EPISODE_ID]}: {row['n']} steps refer to media with the sha256 "
                f"{row['digest']}, whose bytes no step of the episode has. Restore the episode "
                "from a copy, or delete it with `replaylake datasets delete`."
            )
            self.add(ERROR, "media", handle.name, message, snapshot.version)

    def check_lake_log(self, root: str) -> CheckedLog:
        """Check the log of the lake itself; with repair, repair it."""
        self._name = ""
        log = check_log(self._lake.storage, root)
        self._note_log(log)
        if self._repair and log.state is not None:
            self._repair_log(root, log)
        return log

    def _tables(self, handle: Dataset) -> Iterator[Table]:
        yield handle.table
        others = (handle.decisions, handle.rewards, handle.received, handle.rejected, handle.spans)
        for table in others:
            if not table.log.folder.is_empty():
                yield table

    def _plan_table(self, table: Table) -> _CheckPlan:
        log = check_log(table.storage, table.root)
        self._note_log(log)
        if log.state is None:
            return _CheckPlan(table, log, None, ())
        try:
            schema = table_schema(log.state)
        except LogCorruptError as error:
            self.add(ERROR, "log", table.log.folder.path, str(error))
            return _CheckPlan(table, log, None, ())
        live = tuple(sorted(log.state.files.values(), key=lambda entry: entry.since))
        older: tuple[FileEntry, ...] = ()
        if self._all_versions:
            purges = self._lake.purges.list(self._name)
            # What a purge deleted is gone for good, which is no fault.
            retained_paths = find_retained_files(self._lake, self._name).paths - {
                p for one in purges for p in one.paths
            }
            older = tuple(
                entry
                for path, (entry, _) in log.named.items()
                if path not in log.state.files and f"{table.root}/{path}" in retained_paths
            )
        return _CheckPlan(table, log, schema, live, older)

    def _forget_derived(self, table: Table) -> None:
        """Drop what was derived from damaged bytes, perhaps before the file was restored."""
        try:
            summaries.delete_summaries(table.storage, table.root)
            delete_statistics(table.storage, table.root)
        except StorageError:
            if self._repair:
                raise
            # A lake that we may only read: what is wrong is said all the same.

    def _note_log(self, log: CheckedLog) -> None:
        for fault in log.faults:
            check = "checkpoint" if fault.is_derived else "log"
            self.add(ERROR, check, fault.path, fault.message, fault.version)

    def _check_shards(
        self, plan: _CheckPlan, key: str | None
    ) -> Iterator[tuple[CheckedShard, int]]:
        """Check the shards on two threads, a few ahead of who takes the results."""
        schema = plan.schema
        if schema is None:
            return
        jobs = iter(enumerate((*plan.live, *plan.older)))
        with ThreadPoolExecutor(_THREADS) as pool:

            def submit(num: int) -> Iterable[tuple[int, Future[CheckedShard]]]:
                for number, entry in islice(jobs, num):
                    arguments = (plan.table.storage, plan.table.root, entry, schema, number, key)
                    yield number, pool.submit(check_shard, *arguments)

            ahead = list(submit(_THREADS + 1))
            while ahead:
                number, future = ahead.pop(0)
                yield future.result(), number
                ahead += submit(1)

    def _take_shard(
        self, plan: _CheckPlan, checked: CheckedShard, rows: RowCheck, number: int, is_steps: bool
    ) -> None:
        entry, is_live = checked.entry, number < len(plan.live)
        version = plan.log.named.get(entry.path, (entry, None))[1]
        for fault in checked.faults:
            self.add(
                ERROR,
                fault.check,
                f"{plan.table.root}/{entry.path}",
                fault.message,
                version,
                entry.num_rows,
            )
        if checked.faults and is_live:
            plan.damages.append(Damage(entry, "; ".join(f.message for f in checked.faults)))
        if checked.rows is not None and is_live:
            if is_steps:
                rows.add_runs(checked.rows)
            elif checked.rows.num_columns:
                rows.add_ids(checked.rows)

    def _find_row_faults(self, plan: _CheckPlan, rows: RowCheck) -> None:
        for run in rows.problems():
            for severity, check, message in iter_faults(run):
                shard = plan.live[run["shard"]]
                version = plan.log.named.get(shard.path, (shard, None))[1]
                agent = f" of agent {run['agent']!r}" if run["agent"] else ""
                text = f"episode {run['episode']}{agent}: {message}"
                path = f"{plan.table.root}/{shard.path}"
                self.add(severity, check, path, text, version)

    def _find_doubled_decisions(self, plan: _CheckPlan, rows: RowCheck) -> None:
        for decision_id, num in rows.duplicate_ids():
            message = (
                f"decision {decision_id}: found {num} rows, expected one. Restore the table from a "
                "copy of the lake: `feedback join` would make a step of each."
            )
            self.add(ERROR, "decision", plan.table.root, message)

    def _orphans(self, plan: _CheckPlan) -> Iterator[Orphan]:
        if plan.log.state is None:
            return  # which files have a name is not known
        root = plan.table.root
        old = [
            file
            for file in plan.table.storage.files(f"{root}/{FOLDER}")
            if file.path.removeprefix(f"{root}/") not in plan.log.named
            and file.modified_ms < self._horizon_ms
        ]
        # Of an old version that is kept, the commit that named the file may have expired.
        retained_paths = find_retained_files(self._lake, self._name).paths if old else ()
        for file in old:
            if file.path not in retained_paths:
                message = (
                    f"no version names it: {file.size_bytes:,} bytes, "
                    f"{age_text(file.modified_ms)}, of a writer that did not commit. "
                    "`replaylake maintain vacuum` removes it."
                )
                self.add(NOTE, "orphan", file.path, message)
                yield Orphan(file.path, message)

    def _repair_table(
        self, plan: _CheckPlan, rows: RowCheck | None, orphans: Sequence[Orphan]
    ) -> None:
        if plan.log.state is None:
            return
        self._repair_log(plan.table.root, plan.log)
        doubled = {} if rows is None else rows.find_doubled_rows()
        twice = {plan.live[number].path: numbers for number, numbers in doubled.items()}
        num_repairs = quarantine_damage(plan.table, self._name, plan.damages, twice)
        num_repairs += quarantine_orphans(plan.table, self._name, orphans)
        self.repairs += num_repairs

    def _repair_log(self, root: str, log: CheckedLog) -> None:
        for path in repair_log(self._lake.storage, root, log):
            self.repairs.append(Repair("rewritten", self._name, path, "", None, 0, 0))

    def add(
        self,
        severity: str,
        check: str,
        path: str,
        message: str,
        version: int | None = None,
        num_steps: int = 0,
    ) -> None:
        """Note a finding of the dataset that is looked at."""
        self.findings.add(
            FsckFinding(severity, check, self._name, path, message, version, num_steps)
        )


def _key(plan: _CheckPlan, handle: Dataset) -> str | None:
    """Return the column of ids that the checks across shards need; None for steps: their runs."""
    if plan.table is handle.table:
        return None
    if plan.table is handle.spans:
        return TRACE_ID
    return EPISODE_ID if plan.table in (handle.received, handle.rejected) else DECISION_ID


def age_text(modified_ms: int) -> str:
    """Return how old a file is, as people say it."""
    days = (time.time_ns() // 1_000_000 - modified_ms) / 86_400_000
    return f"{days:.1f} days old" if days >= 1 else f"{days * 24:.1f} hours old"


class RowCheck:
    """Collects the runs of all shards of a table, or the ids of decisions. A context manager."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="replaylake-fsck-")
        self._connection: duckdb.DuckDBPyConnection | None = None

    def __enter__(self) -> RowCheck:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._connection is not None:
            self._connection.close()
        self._folder.cleanup()

    def add_runs(self, runs: pa.Table) -> None:
        """Take the runs of one shard."""
        self._insert("runs", runs)

    def add_ids(self, ids: pa.Table) -> None:
        """Take the ids of one shard."""
        self._insert("ids", ids)

    def problems(self) -> Iterator[dict[str, Any]]:
        """Yield the runs that do not follow what comes before them in their episode."""
        for batch in self._batches(_PROBLEMS):
            yield from batch.to_pylist()

    def duplicate_ids(self) -> Iterator[tuple[str, int]]:
        """Yield ids that more than one row has, and how many rows."""
        query = "SELECT id, count(*) AS n FROM ids GROUP BY id HAVING n > 1 ORDER BY id"
        for batch in self._batches(query):
            for row in batch.to_pylist():
                yield row["id"], row["n"]

    def find_doubled_rows(self) -> dict[int, list[int]]:
        """Return by shard the rows whose step an earlier row has too, shards in number order."""
        overlapping = f"SELECT DISTINCT episode, agent FROM ({_PROBLEMS}) WHERE first <= reached"
        query = (
            f"SELECT episode, agent, first, last, shard, row FROM runs SEMI JOIN ({overlapping}) "
            "USING (episode, agent) ORDER BY episode, agent, shard, row"
        )
        doubled: dict[int, list[int]] = {}
        steps: set[int] = set()
        current = None
        for batch in self._batches(query):
            for run in batch.to_pylist():
                if (run["episode"], run["agent"]) != current:
                    current, steps = (run["episode"], run["agent"]), set()
                for i, step in enumerate(range(run["first"], run["last"] + 1)):
                    if step in steps:
                        doubled.setdefault(run["shard"], []).append(run["row"] + i)
                    steps.add(step)
        return doubled

    def _batches(self, query: str) -> Iterator[pa.RecordBatch]:
        if self._connection is not None:
            relation = self._connection.sql(query)
            yield from relation.to_arrow_reader(_FETCH_ROWS) if relation is not None else ()

    def _insert(self, table: str, rows: pa.Table) -> None:
        if rows.num_rows:
            if self._connection is None:
                self._connection = self._connect()
            self._connection.register("incoming", rows)
            self._connection.execute(f"INSERT INTO {table} SELECT * FROM incoming")
            self._connection.unregister("incoming")

    def _connect(self) -> duckdb.DuckDBPyConnection:
        """Start a DuckDB whose memory is bounded: not before there are rows, as it takes 30 ms."""
        connection = connect()
        connection.execute(f"SET memory_limit = '{_MEMORY}'")
        connection.execute("SET threads = 2")
        connection.execute("SET temp_directory = $1", [self._folder.name])
        connection.register("nothing", run_schema().empty_table())
        connection.execute("CREATE TABLE runs AS SELECT * FROM nothing")
        connection.execute("CREATE TABLE ids (id VARCHAR)")
        return connection


def iter_faults(run: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield severity, check and message of what is wrong with one of the `problems`."""
    first, last, reached, ended_at = (
        run[name] for name in ("first", "last", "reached", "ended_at")
    )
    if reached is None and first > 0:
        yield (
            NOTE,
            "gap",
            f"begins at step {first}, steps 0..{first - 1} are missing. Nothing bootstraps across.",
        )
    elif reached is not None and first > reached + 1:
        missing = f"steps {reached + 1}..{first - 1} are missing after step {reached}"
        yield NOTE, "gap", f"{missing}. Step {reached} has no next observation, or its own."
    elif reached is not None and first <= reached:
        twice = f"found steps {first}..{min(last, reached)} a second time, expected each once"
        yield ERROR, "duplicate", f"{twice}. `repair` keeps those that came first."
    if ended_at is not None and last > ended_at:
        after = f"found steps {max(first, ended_at + 1)}..{last} after step {ended_at}, the end"
        advice = "Delete the episode with `replaylake datasets delete`, or restore it from a copy"
        yield ERROR, "after_end", f"{after}, expected none. {advice}."
