"""Vacuum: the files that nobody can need any more are deleted.

Those are shards that no retained version names (retained_files.py), what crashes left in the folder
of temporary files, and policy packages that were copied in but never registered; each older than a
limit, since a younger one may belong to a commit that is being made. And the checkpoints of
training runs that are done, or that nobody was at work on for a month; their metrics stay. And this
machine's cached replay views, of whatever age, once a shard that they were decoded from is gone:
what was deleted is in them, too. Files of other kinds or names are not ours to touch, links are not
followed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from replaylake.datastore.errors import CommitConflictError, ConfigInvalidError, NotFoundError
from replaylake.datastore.lake.key_files import drop_gone_keys
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.profile import shard_statistics
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.maintenance.retained_files import (
    DEFAULT_RETENTION_S,
    VersionPin,
    find_newly_retained,
    find_retained_files,
    needs_checkpoints,
)
from replaylake.datastore.maintenance.retention import MIN_KEEP_S, read_retention
from replaylake.datastore.names import LAKE_ROOT
from replaylake.datastore.query import summaries
from replaylake.datastore.replay.cache.view_cache import FOLDER as VIEWS
from replaylake.datastore.replay.cache.view_cache import ViewCache
from replaylake.datastore.storage.storage import Storage, StoredFile
from replaylake.datastore.storage.table import key_index
from replaylake.datastore.storage.table.shard import FOLDER

_ULID: Final = "[0-9a-hjkmnp-tv-z]{26}"
_SHARD: Final = re.compile(rf"{_ULID}\.parquet")
_TEMPORARY: Final = re.compile(_ULID)
_PACKAGE: Final = re.compile(rf"({LAKE_ROOT}/policies/[^/]+/{_ULID})/.+")
_CHECKPOINT: Final = re.compile(
    rf"{LAKE_ROOT}/runs/([^/]+)/checkpoints/(?:\d{{12}}\.json|{_ULID}\.safetensors)"
)
_AT_ONCE: Final = 1000

# Called with (files deleted, files to delete).
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Garbage:
    """A file that nothing needs: a shard, temporary, policy package's or checkpoint's, a view.

    path: in the lake; of a view of a remote lake, on this machine.
    """

    kind: str
    path: str
    size_bytes: int


@dataclass(frozen=True)
class VacuumReceipt:
    """What vacuum found; `deleted` says whether it is gone.

    `skipped` are folders that are links, which are left alone. `pinned` are old versions that are
    kept, and why.
    """

    deleted: bool
    garbage: tuple[Garbage, ...]
    skipped: tuple[str, ...]
    pinned: tuple[VersionPin, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all that was found."""
        return sum(file.size_bytes for file in self.garbage)

    def to_json(self) -> dict[str, Any]:
        return {
            "deleted": self.deleted,
            "num_files": len(self.garbage),
            "num_bytes": self.num_bytes,
            "files": [asdict(file) for file in self.garbage],
            "skipped": list(self.skipped),
            "pinned": [asdict(pin) for pin in self.pinned],
        }


def vacuum(
    lake: Lake,
    datasets: Sequence[str] = (),
    *,
    older_than_s: float | None = None,
    delete: bool = False,
    force: bool = False,
    now_ms: int | None = None,
    on_progress: OnProgress | None = None,
) -> VacuumReceipt:
    """Find the files that no retained version needs, and with `delete` delete them.

    Args:
        lake: the lake.
        datasets: their names; by default all, and the files that crashes left in the lake itself.
        older_than_s: minimum age (s) of a file, and minimum time since the version that named it
            was replaced; by default each dataset's own `keep_versions_s`.
        delete: delete the files, instead of only listing them.
        force: allow `older_than_s` below an hour; only while nothing is written to the lake and no
            older version is read.
        now_ms: the time for comparing ages (ms since 1970); the clock's by default.
        on_progress: called with (files deleted, files).

    Raises: NotFoundError, ConfigInvalidError for an age below an hour, LogCorruptError,
    StorageError.
    """
    _check_age(older_than_s, force)
    for name in datasets:
        if not lake.dataset(name).exists():
            raise NotFoundError(
                f"dataset {name!r}: not in this lake. `replaylake list` names those that are."
            )
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    run = _Vacuum(lake, now_ms, on_progress if delete else None)
    for name in datasets or lake.datasets():
        retention = read_retention(lake.dataset(name).table.snapshot())
        age_s = retention.keep_versions_s if older_than_s is None else older_than_s
        run.dataset(name, age_s, delete)
    if not datasets:
        run.leftovers(DEFAULT_RETENTION_S if older_than_s is None else older_than_s, delete)
    return run.result(delete)


def vacuum_leftovers(lake: Lake, *, now_ms: int | None = None) -> VacuumReceipt:
    """Delete what is left of the lake itself: temporary files, packages, runs' checkpoints."""
    run = _Vacuum(lake, time.time_ns() // 1_000_000 if now_ms is None else now_ms, None)
    run.leftovers(DEFAULT_RETENTION_S, delete=True)
    return run.result(deleted=True)


def _check_age(older_than_s: float | None, force: bool) -> None:
    if older_than_s is None:
        return
    if not older_than_s >= 0 or (older_than_s < MIN_KEEP_S and not force):
        raise ConfigInvalidError(
            f"older_than_s: found {older_than_s:g}, expected at least {MIN_KEEP_S:g} (an "
            "hour): a younger file may belong to a commit in progress. If nothing is written or "
            "read meanwhile, force it.",
            parameter="older_than_s",
        )


class _Vacuum:
    """One vacuum: what it found so far."""

    def __init__(self, lake: Lake, now_ms: int, on_progress: OnProgress | None) -> None:
        self.garbage: list[Garbage] = []
        self.skipped: list[str] = []
        self.pinned: list[VersionPin] = []
        self._lake = lake
        self._storage = lake.storage
        self._now_ms = now_ms
        self._on_progress = on_progress

    def result(self, deleted: bool) -> VacuumReceipt:
        """Return what was found."""
        return VacuumReceipt(deleted, tuple(self.garbage), tuple(self.skipped), tuple(self.pinned))

    def dataset(self, name: str, age_s: float, delete: bool) -> None:
        """Go through a dataset's shards, and those of what was served into it."""
        handle = self._lake.dataset(name)
        tables = handle.tables()
        # Listed before it is asked what is kept: a file that is committed in between is kept.
        files = [
            file
            for table in tables
            for file in self._iter_older(f"{table.root}/{FOLDER}", _SHARD, age_s)
        ]
        retained = find_retained_files(self._lake, name, retention_s=age_s, now_ms=self._now_ms)
        self.pinned += [pin for pin in retained.pins if pin.reason not in ("newest", "recent")]
        # While thousands are deleted, a tag may be set, or a shard that waited be committed.
        self._take(
            "shard",
            [file for file in files if file.path not in retained.paths],
            delete,
            lambda: find_newly_retained(self._lake, name, retained, self._now_ms),
        )
        if delete and not self._is_below_link(f"{name}/{summaries.FOLDER}"):
            # What is derived from a shard leaves with it.
            summaries.forget_gone(self._storage, name)
        if delete and not self._is_below_link(f"{name}/{shard_statistics.FOLDER}"):
            shard_statistics.delete_gone_statistics(self._storage, name)
        if delete and not self._is_below_link(f"{name}/{key_index.FOLDER}"):
            drop_gone_keys(handle)
        self._views(name, delete)

    def _views(self, name: str, delete: bool) -> None:
        """Go through the cached views of a dataset, once its shards were gone through."""
        if self._is_below_link(f"{name}/{VIEWS}"):
            return
        there = {f"{name}/{FOLDER}/{file}" for file in self._storage.names(f"{name}/{FOLDER}")}
        there.difference_update(file.path for file in self.garbage)
        views = ViewCache(self._storage, name)
        stale = list(views.iter_stale(lambda path: f"{name}/{path}" not in there))
        if delete:
            views.remove(stale)
        for view in stale:
            path = f"{name}/{VIEWS}/{view.name}" if self._storage.shares_state else str(view.folder)
            self.garbage.append(Garbage("view", path, view.size_bytes))

    def leftovers(self, age_s: float, delete: bool) -> None:
        """Go through temporary files, and packages that no version of a policy names."""
        self._take(
            "temporary", list(self._iter_older(f"{LAKE_ROOT}/tmp", _TEMPORARY, age_s)), delete
        )
        packages: dict[str, list[StoredFile]] = {}
        for file in self._files(f"{LAKE_ROOT}/policies"):
            if match := _PACKAGE.fullmatch(file.path):
                packages.setdefault(match.group(1), []).append(file)
        registered = {row["path"] for row in self._lake.registry.list()}
        for folder, files in packages.items():
            if folder not in registered and all(self._is_older(file, age_s) for file in files):
                self._take("policy", files, delete)

        self._checkpoints(delete)

    def _checkpoints(self, delete: bool) -> None:
        """Go through the checkpoints of runs that nobody goes on with."""
        by_run: dict[str, list[StoredFile]] = {}
        for file in self._files(f"{LAKE_ROOT}/runs"):
            if match := _CHECKPOINT.fullmatch(file.path):
                by_run.setdefault(match.group(1), []).append(file)
        for run in self._lake.registry.runs() if by_run else ():
            run_id = run["run_id"]
            if run_id not in by_run or needs_checkpoints(self._lake, run, self._now_ms):
                continue
            if not delete:
                self._take("checkpoint", by_run[run_id], delete)
                continue
            # Whoever has just begun to go on with it keeps them.
            with suppress(CommitConflictError), RunLease(self._storage, run_id):
                self._take("checkpoint", by_run[run_id], delete)

    def _take(
        self,
        kind: str,
        files: Sequence[StoredFile],
        delete: bool,
        spared: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        for start in range(0, len(files), _AT_ONCE):
            part = files[start : start + _AT_ONCE]
            if delete:
                retained = spared()
                part = [file for file in part if file.path not in retained]
                self._storage.delete([file.path for file in part])
                self._storage.forget([file.path for file in part])
            self.garbage += [Garbage(kind, file.path, file.size_bytes) for file in part]
            if self._on_progress is not None:
                self._on_progress(min(start + _AT_ONCE, len(files)), len(files))

    def _iter_older(
        self, folder: str, pattern: re.Pattern[str], age_s: float
    ) -> Iterator[StoredFile]:
        for file in self._files(folder):
            # Right in the folder and of a name that we give; all else is somebody's own.
            is_ours = pattern.fullmatch(file.path.removeprefix(f"{folder}/"))
            if is_ours and self._is_older(file, age_s):
                yield file

    def _files(self, folder: str) -> Iterator[StoredFile]:
        if self._is_below_link(folder):
            return
        for file in self._storage.files(folder):
            if not self._storage.is_link(file.path):
                yield file

    def _is_below_link(self, folder: str) -> bool:
        """Whether a folder is reached through a link; then it is named as skipped."""
        if (link := _link_above(self._storage, folder)) is None:
            return False
        self.skipped.append(f"{folder}: {link} is a link, and what it leads to is not vacuumed")
        return True

    def _is_older(self, file: StoredFile, age_s: float) -> bool:
        return file.modified_ms < self._now_ms - int(age_s * 1000)


def _link_above(storage: Storage, folder: str) -> str | None:
    """Return the part of a folder's path that is a link; None if there is none."""
    parts = folder.split("/")
    paths = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    return next((path for path in paths if storage.is_link(path)), None)
