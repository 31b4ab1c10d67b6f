"""The commit log: Delta Lake's open format, written by exclusive creation of the next version.

A commit is one JSON file. It is durable before it is acknowledged, and every one carries a
(producer, sequence) that makes a repeated commit a no-op. They are kept as Delta transaction
identifiers: appId `<producer>#<sequence>`, and as its version the table version that holds the
commit, so that a lost reply is answered with the original version. Named entries (policies,
aliases, runs) are Delta domain metadata: a key and a JSON text, the last writer wins unless
`expected` says what it has to replace.

Times of commits never go back: each is the clock's, or one millisecond after the commit before it
where the clock is behind that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.errors import (
    FormatTooNewError,
    LogCorruptError,
    NotFoundError,
    ReplayLakeError,
)
from replaylake.datastore.storage.log.checkpoint import prepare
from replaylake.datastore.storage.log.commit_file import (
    CommitEncoder,
    Intent,
    check_applies,
    decode,
    is_whole,
    rewrite_info,
)
from replaylake.datastore.storage.log.folder import FETCH_BATCH, Listing, LogFolder
from replaylake.datastore.storage.log.state import Change, LogState
from replaylake.datastore.storage.spans import SpanWork, span
from replaylake.datastore.storage.storage import Storage

CHECKPOINT_INTERVAL: Final = 100
# A checkpoint has a row for each commit there ever was, as what makes a repeated one a no-op: every
# 100 commits, those of a run's million commits would take 26 GB. So from here on they are written
# as much more seldom as they are larger.
_ROWS_PER_INTERVAL: Final = 10_000
# In the info of an expiry's commit: the infos of commits that were dropped and are not forgotten.
EARLIER: Final = "earlier"


@dataclass(frozen=True)
class CommitResult:
    """The version that holds an intent, and whether it was there before this call."""

    version: int
    already_present: bool


class CommitLog:
    """The log of one table, below `root` in the storage. Safe to share between threads."""

    def __init__(self, storage: Storage, root: str) -> None:
        self.folder = LogFolder(storage, root)
        self._newest = LogState()
        self._lock = threading.Lock()
        self._checkpointer = Checkpointer(self.folder)

    def exists(self) -> bool:
        """Whether version 0 has been committed."""
        return (
            self._newest.version >= 0
            or self.folder.has_commit(0)
            # Expiry drops commits that a checkpoint covers, and so do other engines.
            or self.folder.listing().newest >= 0
        )

    def newest(self) -> LogState:
        """Return the newest state: two probes if nothing is new.

        Raises: NotFoundError, LogCorruptError.
        """
        with self._lock:
            known = self._newest
            state = self._catch_up(known) if known.version >= 0 else self._load()
            self._newest = state
        if state.version < 0:
            raise NotFoundError(f"{self.folder.path}: found no version 0, expected a table.")
        return state

    def at(self, version: int) -> LogState:
        """Return the state at a version.

        Raises: NotFoundError if it lies in the future or before the oldest that is kept,
        LogCorruptError.
        """
        newest = self.newest()
        if version == newest.version:
            return newest
        listing = self.folder.listing()
        self._check_not_expired(version, listing)
        try:
            return self._replay(listing, version)
        except LogCorruptError:
            # Damaged, or expired in this moment: a new listing tells.
            self._check_not_expired(version, self.folder.listing())
            raise

    def oldest(self) -> int:
        """Return the lowest version that can be read. Raises: NotFoundError, LogCorruptError."""
        self.newest()
        return self.folder.listing().oldest

    def commit(self, build: Callable[[LogState], Intent]) -> CommitResult:
        """Commit what `build` makes of the newest state, rebuilding when another writer was first.

        Durable when it returns. Raises: CommitConflictError if the intent no longer applies, and
        whatever `build` raises.
        """
        with span("commit") as work:
            result = self._commit(build, work)
            work.items = int(not result.already_present)
            return result

    def _commit(self, build: Callable[[LogState], Intent], work: SpanWork) -> CommitResult:
        encoder = CommitEncoder()
        while True:
            state = self._newest_or_empty()
            intent = build(state)
            original = state.transactions.get(intent.transaction)
            if original is not None:
                return CommitResult(original, True)
            check_applies(intent, state)
            version = state.version + 1
            path = self.folder.commit_path(version)
            data = encoder.encode(intent, version, _next_timestamp_ms(state))
            if not self.folder.storage.put_if_absent(path, data):
                continue
            work.num_bytes += len(data)
            if self._is_name_expired(version, intent):
                self.folder.storage.delete([path])
                continue
            new_state = state.apply([decode(data, path, version)])
            with self._lock:
                if self._newest.version == state.version:
                    self._newest = new_state
            if _is_checkpoint_due(new_state):
                self._checkpointer.start(new_state)
            return CommitResult(version, False)

    def rewrite_infos(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[int]:
        """Change what commits say of themselves, and nothing of what they did; return which.

        For what a log must not keep: files are replaced that else are written once. Cost: reads all
        commits. Raises: StorageError.
        """
        folder, changed = self.folder, []
        versions = folder.listing().commits
        for start in range(0, len(versions), FETCH_BATCH):
            some = versions[start : start + FETCH_BATCH]
            paths = [folder.commit_path(version) for version in some]
            blobs = folder.storage.get_many(paths)
            for version, path, data in zip(some, paths, blobs, strict=True):
                # One that is damaged is left to fsck: another sha256 would hide it.
                if data is None or not is_whole(data):
                    continue
                if (rewritten := rewrite_info(data, change)) is not None:
                    folder.storage.put(path, rewritten)
                    changed.append(version)
        return changed

    def checkpoint(self, version: int) -> None:
        """Write a Delta checkpoint of a version; `_last_checkpoint` names it or a newer one."""
        self.folder.write_checkpoint(self.at(version))

    def history(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the commitInfo, with `version` added, of each version from `since` on.

        It is without gaps from the oldest version that is kept; of those before, it has what their
        expiry remembered.
        """
        newest = self.newest().version
        listing = self.folder.listing()
        # Other engines drop the commit of a checkpoint, too.
        first = max(since, listing.oldest, *listing.commits[:1])
        infos = [change.info for change in self._changes(first, newest)]
        remembered = [info.pop(EARLIER) for info in infos if EARLIER in info][-1:]
        dropped = [info for info in chain(*remembered) if since <= info["version"] < first]
        return dropped + infos

    def read_change(self, version: int) -> Change:
        """Return what one version's commit changed. Raises: NotFoundError, LogCorruptError."""
        change = self.folder.read_change(version) if version >= 0 else None
        if change is None:
            self._check_not_expired(version, self.folder.listing())
            raise self._missing_version_error(version, self.newest().version)
        return change

    def info(self, version: int) -> dict[str, Any]:
        """Return the commitInfo of one version, as `history` does.

        Raises: NotFoundError, LogCorruptError.
        """
        return self.read_change(version).info

    def _newest_or_empty(self) -> LogState:
        try:
            return self.newest()
        except NotFoundError:
            return LogState()

    def _load(self) -> LogState:
        """Read the log from its newest readable checkpoint, and refuse one with a hole.

        The listing comes first, so every version in it can be read by now: one that is not reached
        lies behind a missing file, which the next writer would fill with something else.
        """
        # `_last_checkpoint` spares us most of a long listing, and decides nothing.
        pointed = self.folder.read_pointer()
        listing = self.folder.listing(since=pointed or 0)
        if pointed is not None and pointed not in listing.checkpoints:
            listing = self.folder.listing()
        while True:
            try:
                state = self._replay(listing, listing.newest)
                return self._apply(state, self._probe(state.version + 1))
            except LogCorruptError:
                # Files have expired since, or an older checkpoint serves, or it is damage.
                whole = self.folder.listing()
                if whole.oldest == listing.oldest:
                    raise
                listing = whole

    def _catch_up(self, known: LogState) -> LogState:
        """Return the state after the commits that came since.

        While `known`'s own commit stands, none after it has expired: expiry goes upwards, file by
        file. Without it, that there is no next commit says nothing.
        """
        paths = [self.folder.commit_path(known.version + ahead) for ahead in (1, 0)]
        following, own = self.folder.storage.get_many(paths)
        if own is None:
            return self._load()
        if following is None:
            return known
        first = decode(following, paths[0], known.version + 1)
        return self._apply(known, [first, *self._probe(known.version + 2)])

    def _is_name_expired(self, version: int, intent: Intent) -> bool:
        """Whether a commit just made took the name of an expired one, where nobody reads it.

        Only a writer that slept for the whole retention between its look at the log and this
        commit can do that.
        """
        if version and self.folder.has_commit(version - 1):
            return False
        if not version and not self.folder.listing().checkpoints:
            return False
        with self._lock:
            self._newest = self._load()
        return intent.transaction not in self._newest.transactions

    def _replay(self, listing: Listing, version: int) -> LogState:
        """Return the state at a version, from its nearest readable checkpoint."""
        failure = None
        base = LogState()
        for at in reversed([v for v in listing.checkpoints if listing.oldest <= v <= version]):
            try:
                base = self.folder.read_checkpoint(at) or base
            except FormatTooNewError as error:
                raise FormatTooNewError(f"{self.folder.path}: {error}") from error
            except LogCorruptError as error:
                # Costs only time, while an older one or all commits are there.
                failure = error
            if base.version >= 0:
                break
        try:
            return self._apply(base, self._changes(base.version + 1, version))
        except LogCorruptError as error:
            if failure is not None and base.version < 0:
                raise failure from error
            raise

    def _changes(self, first: int, last: int) -> list[Change]:
        """Return what a range of commits changed, each of which has to be there."""
        changes: list[Change] = []
        while (start := first + len(changes)) <= last:
            versions = range(start, min(start + FETCH_BATCH, last + 1))
            for version, change in zip(versions, self.folder.read_changes(versions), strict=True):
                if change is None:
                    raise self._missing_version_error(version, last)
                changes.append(change)
        return changes

    def _probe(self, first: int) -> list[Change]:
        """Return what the commits from `first` on change, as many as there are."""
        changes: list[Change] = []
        while (change := self.folder.read_change(first + len(changes))) is not None:
            changes.append(change)
        return changes

    def _apply(self, state: LogState, changes: Sequence[Change]) -> LogState:
        if not changes:
            return state
        try:
            return state.apply(changes)
        except FormatTooNewError as error:
            raise FormatTooNewError(f"{self.folder.path}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LogCorruptError(
                f"{self.folder.path}: versions {state.version + 1}..{state.version + len(changes)} "
                f"hold an action without what Delta requires ({error!r}). Restore the files from a "
                "copy of the lake."
            ) from error

    def _check_not_expired(self, version: int, listing: Listing) -> None:
        newest = self.newest().version
        if not listing.oldest <= version <= newest:
            dropped = "" if listing.oldest <= 0 else "; those before were dropped from the log"
            raise NotFoundError(
                f"version {version}: not in {self.folder.path}, which has "
                f"{max(listing.oldest, 0)}..{newest}{dropped}."
            )

    def _missing_version_error(self, version: int, newest: int) -> LogCorruptError:
        return LogCorruptError(
            f"{self.folder.commit_path(version)}: missing, expected every version up to {newest}. "
            "Restore the file from a copy of the lake."
        )


def _is_checkpoint_due(state: LogState) -> bool:
    if not state.version or state.version % CHECKPOINT_INTERVAL:
        return False
    # Counted at a hundredth of all versions only: it merges what the state shares.
    times = max(1, state.num_actions // _ROWS_PER_INTERVAL)
    return state.version % (times * CHECKPOINT_INTERVAL) == 0


def _next_timestamp_ms(state: LogState) -> int:
    return max(time.time_ns() // 1_000_000, state.timestamp_ms + 1)


class Checkpointer:
    """Has one thread at most: where commits come faster than it writes, the newest state is next.

    A thread each would pile up behind a slow disk, every one with a checkpoint in memory.
    """

    def __init__(self, folder: LogFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._due: LogState | None = None
        self._thread: threading.Thread | None = None

    def start(self, state: LogState) -> None:
        """Write a checkpoint of a state soon, unless a newer one comes before."""
        prepare()
        with self._lock:
            self._due = state
            if self._thread is not None and self._thread.is_alive():
                return
            # Not a daemon: the interpreter waits for it, so short-lived writers checkpoint too. At
            # the interpreter's own end no thread can start any more, which is a RuntimeError.
            thread = threading.Thread(target=self._write, name="replaylake-checkpoint")
            with suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def _write(self) -> None:
        while (state := self._next()) is not None:
            # The commit stands without it: the JSON log says the same, and the next follows soon.
            with suppress(ReplayLakeError):
                self._folder.write_checkpoint(state)
            # Each of these threads has memory of its own from Arrow, which otherwise keeps it: 90
            # MiB after 300 checkpoints of 30,000 rows (2026-11).
            pa.default_memory_pool().release_unused()

    def _next(self) -> LogState | None:
        with self._lock:
            state, self._due = self._due, None
            if state is None:
                self._thread = None
            return state
