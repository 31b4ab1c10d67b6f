"""Retained files: what the versions of a dataset that someone may still read consist of.

Retained are: the newest version; every tagged one; every one that a policy was trained on, or a run
reads that goes on or was interrupted; and every one whose successor was committed less than the
retention ago. Vacuum deletes no file of these, fsck calls none of them an orphan, and maintain
drops none of these versions from the log.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, Final

from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.runs.lease import is_active, last_heartbeat
from replaylake.datastore.storage.log.folder import FETCH_BATCH
from replaylake.datastore.storage.table.table import Table

# Seven days: longer than any query, training run or long weekend away from a failed job.
DEFAULT_RETENTION_S: Final = 7 * 86_400.0

# A run that was killed stays `running` for good: so long after it was last alive it pins nothing
# any more, and is not expected to go on.
_RUN_MS: Final = 30 * 86_400_000
_RESUMABLE: Final = ("running", "interrupted")


@dataclass(frozen=True, order=True)
class VersionPin:
    """A version of a table that is kept, and why.

    `root` is the table's folder in the lake; `reason` is one of newest, tag, policy, run, recent;
    `name` is the tag, `policy:version` or run id, "" for newest and recent.
    """

    root: str
    version: int
    reason: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.root}@{self.version} ({' '.join(filter(None, [self.reason, self.name]))})"


@dataclass(frozen=True)
class RetainedFiles:
    """Files that have to stay, as paths below the lake's root, and the versions that name them.

    `broken` are pins on versions that can no longer be read, such as after an expiry of the log.
    """

    paths: frozenset[str]
    pins: tuple[VersionPin, ...]
    broken: tuple[VersionPin, ...] = ()


def find_retained_files(
    lake: Lake,
    dataset_name: str,
    *,
    retention_s: float = DEFAULT_RETENTION_S,
    now_ms: int | None = None,
) -> RetainedFiles:
    """Return what is kept of a dataset: its table of steps, and the two of what was served.

    Tags, policies and runs pin versions of the steps; what was served and received is kept by
    the retention alone. Cost: one listing of each log, and one read of every commit that is younger
    than the retention. Raises: NotFoundError if there is no such dataset, LogCorruptError.
    """
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    horizon_ms = now_ms - int(retention_s * 1000)
    handle = lake.dataset(dataset_name)
    all_pins = list_pins(lake, dataset_name, now_ms)
    paths: set[str] = set()
    pins: list[VersionPin] = []
    broken: list[VersionPin] = []
    for table in handle.tables():
        recent, live = _recent(table, horizon_ms)
        paths |= live
        pins += recent
        for pin in all_pins if table is handle.table else ():
            try:
                state = table.log.at(pin.version)
            except NotFoundError:
                broken.append(pin)
                continue
            pins.append(pin)
            paths |= _below(table, state.files)
    return RetainedFiles(frozenset(paths), tuple(pins), tuple(broken))


def list_pins(lake: Lake, dataset: str, now_ms: int) -> list[VersionPin]:
    """Return the versions of a dataset that tags, policies and runs name, readable or not."""
    return sorted({*_iter_tag_pins(lake, dataset), *_iter_training_pins(lake, dataset, now_ms)})


def find_newly_retained(
    lake: Lake, dataset_name: str, before: RetainedFiles, now_ms: int
) -> set[str]:
    """Return the files of what is live now, and of what was named since `before` was found.

    Cost: a look at each log where neither changed.
    """
    handle = lake.dataset(dataset_name)
    paths: set[str] = set()
    for table in handle.tables():
        if table.exists():
            paths |= _below(table, table.log.newest().files)
    for pin in set(list_pins(lake, dataset_name, now_ms)).difference(before.pins, before.broken):
        with suppress(NotFoundError):  # as broken as those in `before`
            paths |= _below(handle.table, handle.table.log.at(pin.version).files)
    return paths


def _iter_tag_pins(lake: Lake, dataset: str) -> Iterator[VersionPin]:
    for tag in lake.tags.list(dataset):
        yield VersionPin(dataset, tag.version, "tag", tag.name)


def _iter_training_pins(lake: Lake, dataset: str, now_ms: int) -> Iterator[VersionPin]:
    """Yield the versions that policies name, and runs whose policy is still to come."""
    # Runs first: one that ends in between has its policy in the same commit, which is then listed.
    for run in lake.registry.runs():
        if run.get("status") in _RESUMABLE and not _is_abandoned(lake, run, now_ms):
            for selection in run.get("datasets") or ():
                if selection["dataset"] == dataset:
                    yield VersionPin(dataset, int(selection["version"]), "run", run["run_id"])
    for (policy, version), lineage in lake.registry.lineages().items():
        for selection in lineage.get("datasets", ()):
            if selection["dataset"] == dataset:
                yield VersionPin(
                    dataset, int(selection["version"]), "policy", f"{policy}:{version}"
                )


def needs_checkpoints(lake: Lake, run: Mapping[str, Any], now_ms: int) -> bool:
    """Return whether someone may go on with a run, by its record. Cost: a look at its heartbeat."""
    return run.get("status") != "done" and not _is_abandoned(lake, run, now_ms)


def _is_abandoned(lake: Lake, run: Mapping[str, Any], now_ms: int) -> bool:
    """Return whether nobody is at work on a run, nor was for long."""
    times_ms = [run.get("started_ms"), run.get("ended_ms")]
    times_ms += [again.get("at_ms") for again in run.get("resumed") or ()]
    if max((at_ms or 0 for at_ms in times_ms), default=0) > now_ms - _RUN_MS:
        return False
    # One that goes on for longer says so elsewhere.
    heartbeat = last_heartbeat(lake.storage, run["run_id"])
    if heartbeat is not None and heartbeat.at_ms > now_ms - _RUN_MS:
        return False
    return not is_active(lake.storage, run["run_id"])


def _recent(table: Table, horizon_ms: int) -> tuple[list[VersionPin], set[str]]:
    """Return the newest version and those whose successor is younger, and all their files."""
    state = table.log.newest()
    # Only now: of a version that is committed after the listing, nothing would say how old it is.
    # A copy of the files is younger than they are, and so kept longer.
    committed = table.log.folder.read_commit_times()
    paths = {*state.files}
    pins = [VersionPin(table.root, state.version, "newest")]
    replaced = takewhile(
        lambda version: committed.get(version, 0) >= horizon_ms, range(state.version, 0, -1)
    )
    while successors := list(islice(replaced, FETCH_BATCH)):
        for change in table.log.folder.read_changes(successors):
            if change is None:  # dropped from the log since it was listed
                return pins, _below(table, paths)
            # What is live at a version is live at its successor or was removed by it.
            paths.update(change.removed)
            pins.append(VersionPin(table.root, change.version - 1, "recent"))
    return pins, _below(table, paths)


def _below(table: Table, paths: Iterable[str]) -> set[str]:
    """Return paths below the lake's root."""
    return {f"{table.root}/{path}" for path in paths}
