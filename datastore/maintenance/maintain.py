"""Maintain: each dataset's own retention applied, once or again and again.

In this order: trim, compact, summarize episodes, count steps for profiles, drop old commits from
the log, write a checkpoint, vacuum; at the end this machine's copies of remote shards are cut to
their cap. Every step is a commit of its own, or writes or deletes what nothing depends on, so it
may be killed at any moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from replaylake.datastore.errors import CommitConflictError, ReplayLakeError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.profile.shard_statistics import refresh_statistics
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.retained_files import (
    RetainedFiles,
    find_retained_files,
    list_pins,
)
from replaylake.datastore.maintenance.retention import Retention, read_retention
from replaylake.datastore.maintenance.trim import trim
from replaylake.datastore.maintenance.vacuum import vacuum, vacuum_leftovers
from replaylake.datastore.query.summaries import refresh
from replaylake.datastore.storage.log.expiry import expire
from replaylake.datastore.storage.table.table import Table

# Called with (the dataset or "", what is done to it).
OnStep = Callable[[str, str], None]


@dataclass(frozen=True)
class MaintainReceipt:
    """What one round did to one dataset; `error` is what stopped it, if anything did.

    Trimmed are episodes; compacted, shards that became fewer; dropped, files of the log; vacuumed,
    files and bytes. The dataset "" is the lake itself: temporary files, packages, copies.
    """

    dataset: str
    version: int | None = None
    trimmed: int = 0
    compacted: int = 0
    summarized: bool = False
    counted: bool = False
    dropped: int = 0
    checkpointed: bool = False
    vacuumed: int = 0
    vacuumed_bytes: int = 0
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class MaintenanceStoppedError(Exception):
    """Someone asked to stop; raised between two commits, never within one."""


def maintain(
    lake: Lake,
    datasets: Sequence[str] = (),
    *,
    now_ms: int | None = None,
    stop: threading.Event | None = None,
    on_step: OnStep | None = None,
) -> list[MaintainReceipt]:
    """Apply each dataset's retention once; return one entry per dataset, and one for the lake.

    If a dataset fails, its entry has the error, and the others are still processed. If `stop` is
    set, the round ends at the next point between two commits, and the remaining datasets have no
    entry. Raises: no error of a dataset; LogCorruptError and similar errors if the lake itself
    cannot be read.
    """
    run = _Round(lake, now_ms, stop or threading.Event(), on_step or (lambda dataset, what: None))
    return list(run.run(list(datasets) or [*lake.datasets(), ""]))


def maintain_every(
    lake: Lake,
    every_s: float,
    datasets: Sequence[str] = (),
    *,
    stop: threading.Event,
    on_round: Callable[[list[MaintainReceipt]], None],
    on_step: OnStep | None = None,
) -> None:
    """Maintain until `stop` is set, each round beginning `every_s` after the one before began."""
    while not stop.is_set():
        start = time.monotonic()
        on_round(maintain(lake, datasets, stop=stop, on_step=on_step))
        stop.wait(max(0.0, every_s - (time.monotonic() - start)))


class _Round:
    def __init__(
        self, lake: Lake, now_ms: int | None, stop: threading.Event, on_step: OnStep
    ) -> None:
        self._lake = lake
        self._now_ms = now_ms
        self._stop = stop
        self._on_step = on_step
        self._caps: list[int] = []
        self._steps = (
            self._trim,
            self._compact,
            self._summarize,
            self._count,
            self._drop,
            self._checkpoint,
            self._vacuum,
        )

    def run(self, names: Sequence[str]) -> Iterator[MaintainReceipt]:
        for name in names:
            try:
                yield self._dataset(name) if name else self._maintain_lake()
            except MaintenanceStoppedError:
                return

    def _dataset(self, name: str) -> MaintainReceipt:
        receipt = MaintainReceipt(name)
        try:
            handle = self._lake.dataset(name)
            retention = read_retention(handle.snapshot().table)
            if retention.cache_max_bytes is not None:
                self._caps.append(retention.cache_max_bytes)
            for step in self._steps:
                self._check_not_stopped()
                receipt = step(handle, retention, receipt)
            return replace(receipt, version=handle.table.snapshot().version)
        except ReplayLakeError as error:
            return replace(receipt, error=f"{type(error).__name__}: {error}")

    def _trim(
        self, handle: Dataset, retention: Retention, receipt: MaintainReceipt
    ) -> MaintainReceipt:
        if retention.max_steps is None and retention.max_age_s is None:
            return receipt
        self._on_step(handle.name, "trimming")
        trimmed = trim(
            self._lake,
            handle.name,
            max_steps=retention.max_steps,
            older_than_s=retention.max_age_s,
            now_ms=self._now_ms,
        )
        return replace(receipt, trimmed=trimmed.num_episodes)

    def _compact(
        self, handle: Dataset, retention: Retention, receipt: MaintainReceipt
    ) -> MaintainReceipt:
        self._on_step(handle.name, "compacting")
        tables = compact(
            self._lake,
            handle.name,
            target_bytes=retention.target_shard_bytes,
            now_ms=self._now_ms,
            on_progress=lambda receipt, total: self._check_not_stopped(),
        )
        won = sum(table.shards_before - table.shards_after for table in tables)
        return replace(receipt, compacted=max(0, won))

    def _summarize(
        self, handle: Dataset, retention: Retention, receipt: MaintainReceipt
    ) -> MaintainReceipt:
        self._on_step(handle.name, "summarizing episodes")
        return replace(receipt, summarized=refresh(handle.table.snapshot()))

    def _count(
        self, handle: Dataset, retention: Retention, receipt: MaintainReceipt
    ) -> MaintainReceipt:
        self._on_step(handle.name, "counting steps")
        counted = refresh_statistics(
            handle.snapshot(), lambda num, total: self._check_not_stopped()
        )
        return replace(receipt, counted=counted)

    def _drop(
        self, handle: Dataset, retention: Retention, receipt: MaintainReceipt
    ) -> MaintainReceipt:
        self._on_step(handle.name, "dropping old commits from the log")
        retained = find_retained_files(
            self._lake, handle.name, retention_s=retention.keep_versions_s, now_ms=self._now_ms
        )
        dropped = 0
        for table in handle.tables():
            oldest = min(pin.version for pin in retained.pins if pin.root == table.root)
            check = partial(self._check_not_named, retained, table.root, oldest)
            dropped += len(expire(table.log, oldest, check=check).paths)
        return replace(receipt, dropped=dropped)

    def _check_not_named(self, retained: RetainedFiles, root: str, oldest: int) -> None:
        """Refuse to drop a version that was named since. Raises: CommitConflictError."""
        now_ms = time.time_ns() // 1_000_000 if self._now_ms is None else self._now_ms
        known = {*retained.pins, *retained.broken}
        for pin in list_pins(self._lake, root, now_ms):
            if pin.version < oldest and pin not in known:
                raise CommitConflictError(
                    f"{pin}: named while versions before {oldest} were about to be dropped from "
                    "the log, expected none. Nothing was dropped; the next round keeps it."
                )

    def _checkpoint(
        self, handle: Dataset, retention: Retention, receipt: MaintainReceipt
    ) -> MaintainReceipt:
        self._on_step(handle.name, "writing a checkpoint")
        written = [_checkpoint(table) for table in handle.tables()]
        return replace(receipt, checkpointed=any(written))

    def _vacuum(
        self, handle: Dataset, retention: Retention, receipt: MaintainReceipt
    ) -> MaintainReceipt:
        self._on_step(handle.name, "vacuuming")
        result = vacuum(self._lake, [handle.name], delete=True, now_ms=self._now_ms)
        return replace(receipt, vacuumed=len(result.garbage), vacuumed_bytes=result.num_bytes)

    def _maintain_lake(self) -> MaintainReceipt:
        self._check_not_stopped()
        self._on_step("", "removing leftovers")
        try:
            result = vacuum_leftovers(self._lake, now_ms=self._now_ms)
            # Copies of all lakes share one folder: the least of what their datasets ask for.
            self._lake.storage.trim_copies(min(self._caps, default=None))
            return MaintainReceipt(
                "", vacuumed=len(result.garbage), vacuumed_bytes=result.num_bytes
            )
        except ReplayLakeError as error:
            return MaintainReceipt("", error=f"{type(error).__name__}: {error}")

    def _check_not_stopped(self) -> None:
        if self._stop.is_set():
            raise MaintenanceStoppedError


def _checkpoint(table: Table) -> bool:
    """Write a checkpoint of the newest version, if it has none."""
    version = table.log.newest().version
    if version in table.log.folder.listing(since=version).checkpoints:
        return False
    table.log.checkpoint(version)
    return True
