"""Dataset check: every shard of a dataset, its steps across shards, its log and stray files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import pyarrow as pa

from replaylake.datastore.episodes.schema import EPISODE_ID
from replaylake.datastore.errors import LogCorrupt, NotFound, StorageFailed
from replaylake.datastore.feedback.decisions import DECISION_ID
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.fsck.finding import ERROR, NOTE, Finding, Findings
from replaylake.datastore.maintenance.fsck.log_check import CheckedLog, check_log, mend_log
from replaylake.datastore.maintenance.fsck.quarantine import (
    Damage,
    Orphan,
    Repair,
    quarantine_orphans,
    take_out,
)
from replaylake.datastore.maintenance.fsck.row_check import RowCheck, faults_of
from replaylake.datastore.maintenance.fsck.shard_check import CheckedShard, check_shard
from replaylake.datastore.maintenance.kept import kept_files
from replaylake.datastore.query import summaries
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.shard import FOLDER
from replaylake.datastore.storage.table.table import Table
from replaylake.datastore.storage.table.table_schema import table_schema

_THREADS: Final = 2

# Called with (shards checked, shards, dataset) after each.
OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class CheckedDataset:
    """What was looked at of one dataset, its decisions and rewards among it."""

    dataset: str
    version: int | None
    num_shards: int
    num_steps: int
    num_bytes: int


@dataclass
class _Plan:
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
        self.findings = Findings()
        self.datasets: list[CheckedDataset] = []
        self.repairs: list[Repair] = []

    def run(self, name: str) -> None:
        """Check a dataset and the tables of what was served into it."""
        self._name = name
        handle = self._lake.dataset(name)
        if not self._lake.storage.names(f"{handle.table.root}/_delta_log"):
            raise NotFound(
                f"dataset {name!r}: not in this lake. `replaylake list` names those that are."
            )
        plans = [self._planned(table) for table in self._tables(handle)]
        total = sum(len(plan.live) + len(plan.older) for plan in plans)
        done = 0
        for plan in plans:
            is_steps = plan.table is handle.table
            with RowCheck() as rows:
                for checked, number in self._checked(plan, _key(plan, handle)):
                    done += 1
                    if self._on_progress is not None:
                        self._on_progress(done, total, name)
                    self._take(plan, checked, rows, number, is_steps)
                if is_steps:
                    self._find_row_faults(plan, rows)
                elif plan.table is handle.decisions:
                    self._find_doubled_decisions(plan, rows)
                orphans = list(self._orphans(plan))
                if self._repair:
                    self._mend(plan, rows if is_steps else None, orphans)
                if is_steps and (plan.damages or self._repair):
                    self._forget_summaries(plan.table)
        steps = plans[0]
        self.datasets.append(
            CheckedDataset(
                name,
                None if steps.log.state is None else steps.log.state.version,
                total,
                sum(entry.num_rows for entry in steps.live),
                sum(e.size_bytes for plan in plans for e in (*plan.live, *plan.older)),
            )
        )

    def log_of(self, root: str) -> CheckedLog:
        """Check the log of the lake itself; with repair, mend it."""
        self._name = ""
        log = check_log(self._lake.storage, root)
        self._note_log(log)
        if self._repair and log.state is not None:
            self._mend_log(root, log)
        return log

    def _tables(self, handle: Dataset) -> Iterator[Table]:
        yield handle.table
        for table in (handle.decisions, handle.rewards, handle.received, handle.rejected):
            if self._lake.storage.names(f"{table.root}/_delta_log"):
                yield table

    def _planned(self, table: Table) -> _Plan:
        log = check_log(table.storage, table.root)
        self._note_log(log)
        if log.state is None:
            return _Plan(table, log, None, ())
        try:
            schema = table_schema(log.state)
        except LogCorrupt as error:
            self.add(ERROR, "log", f"{table.root}/_delta_log", str(error))
            return _Plan(table, log, None, ())
        live = tuple(sorted(log.state.files.values(), key=lambda entry: entry.since))
        older: tuple[FileEntry, ...] = ()
        if self._all_versions:
            purges = self._lake.purges.list(self._name)
            # What a purge deleted is gone for good, which is no fault.
            kept = kept_files(self._lake, self._name).paths - {
                p for one in purges for p in one.paths
            }
            older = tuple(
                entry
                for path, (entry, _) in log.named.items()
                if path not in log.state.files and f"{table.root}/{path}" in kept
            )
        return _Plan(table, log, schema, live, older)

    def _forget_summaries(self, table: Table) -> None:
        """Drop what was derived from damaged bytes, perhaps before the file was restored."""
        try:
            summaries.forget(table.storage, table.root)
        except StorageFailed:
            if self._repair:
                raise
            # A lake that we may only read: what is wrong is said all the same.

    def _note_log(self, log: CheckedLog) -> None:
        for fault in log.faults:
            check = "checkpoint" if fault.is_derived else "log"
            self.add(ERROR, check, fault.path, fault.message, fault.version)

    def _checked(self, plan: _Plan, key: str | None) -> Iterator[tuple[CheckedShard, int]]:
        """Check the shards on two threads, a few ahead of who takes the results."""
        schema = plan.schema
        if schema is None:
            return
        jobs = iter(enumerate((*plan.live, *plan.older)))
        with ThreadPoolExecutor(_THREADS) as pool:

            def started(num: int) -> Iterable[tuple[int, Future[CheckedShard]]]:
                for number, entry in islice(jobs, num):
                    arguments = (plan.table.storage, plan.table.root, entry, schema, number, key)
                    yield number, pool.submit(check_shard, *arguments)

            ahead = list(started(_THREADS + 1))
            while ahead:
                number, future = ahead.pop(0)
                yield future.result(), number
                ahead += started(1)

    def _take(
        self, plan: _Plan, checked: CheckedShard, rows: RowCheck, number: int, is_steps: bool
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

    def _find_row_faults(self, plan: _Plan, rows: RowCheck) -> None:
        for run in rows.problems():
            for severity, check, message in faults_of(run):
                shard = plan.live[run["shard"]]
                version = plan.log.named.get(shard.path, (shard, None))[1]
                agent = f" of agent {run['agent']!r}" if run["agent"] else ""
                text = f"episode {run['episode']}{agent}: {message}"
                path = f"{plan.table.root}/{shard.path}"
                self.add(severity, check, path, text, version)

    def _find_doubled_decisions(self, plan: _Plan, rows: RowCheck) -> None:
        for decision_id, num in rows.duplicate_ids():
            message = (
                f"decision {decision_id}: found {num} rows, expected one. Restore the table from a "
                "copy of the lake: `sessionise` would make a step of each."
            )
            self.add(ERROR, "decision", plan.table.root, message)

    def _orphans(self, plan: _Plan) -> Iterator[Orphan]:
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
        kept = kept_files(self._lake, self._name).paths if old else ()
        for file in old:
            if file.path not in kept:
                message = (
                    f"no version names it: {file.size_bytes:,} bytes, "
                    f"{age_text(file.modified_ms)}, of a writer that did not commit. `vacuum` "
                    "removes it."
                )
                self.add(NOTE, "orphan", file.path, message)
                yield Orphan(file.path, message)

    def _mend(self, plan: _Plan, rows: RowCheck | None, orphans: Sequence[Orphan]) -> None:
        if plan.log.state is None:
            return
        self._mend_log(plan.table.root, plan.log)
        doubled = {} if rows is None else rows.doubled_rows()
        twice = {plan.live[number].path: numbers for number, numbers in doubled.items()}
        done = take_out(plan.table, self._name, plan.damages, twice)
        done += quarantine_orphans(plan.table, self._name, orphans)
        self.repairs += done

    def _mend_log(self, root: str, log: CheckedLog) -> None:
        for path in mend_log(self._lake.storage, root, log):
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
        self.findings.add(Finding(severity, check, self._name, path, message, version, num_steps))


def _key(plan: _Plan, handle: Dataset) -> str | None:
    """Return the column of ids that the checks across shards need; None for steps: their runs."""
    if plan.table is handle.table:
        return None
    return EPISODE_ID if plan.table in (handle.received, handle.rejected) else DECISION_ID


def age_text(modified_ms: int) -> str:
    """Return how old a file is, as people say it."""
    days = (time.time_ns() // 1_000_000 - modified_ms) / 86_400_000
    return f"{days:.1f} days old" if days >= 1 else f"{days * 24:.1f} hours old"
