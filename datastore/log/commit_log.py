"""The commit log: Delta Lake's open format, written by exclusive creation of the next version.

A commit is one JSON file. It is durable before it is acknowledged, and every one carries a
(producer, sequence) that makes a repeated commit a no-op. They are kept as Delta transaction
identifiers: appId `<producer>#<sequence>`, and as its version the table version that holds the
commit, so that a lost reply is answered with the original version. Named entries (policies,
aliases, runs) are Delta domain metadata: a key and a JSON text, the last writer wins unless
`expected` says what it has to replace.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from replaylake.datastore.errors import (
    CommitConflict,
    FormatTooNew,
    LogCorrupt,
    NotFound,
    ReplayLakeError,
)
from replaylake.datastore.log.checkpoint import read_checkpoint, write_checkpoint
from replaylake.datastore.log.commit_file import Intent, decode, encode
from replaylake.datastore.log.state import LogState
from replaylake.datastore.storage import Storage

CHECKPOINT_INTERVAL: Final = 100
_COMMIT_NAME: Final = re.compile(r"(\d{20})\.json")
_CHECKPOINT_NAME: Final = re.compile(r"(\d{20})\.checkpoint\.parquet")


@dataclass(frozen=True)
class Committed:
    """The version that holds an intent, and whether it was there before this call."""

    version: int
    already_present: bool
    state: LogState


class CommitLog:
    """The log of one table, below `root` in the storage. Safe to share between threads."""

    def __init__(self, storage: Storage, root: str) -> None:
        self._storage = storage
        self._folder = f"{root}/_delta_log"
        self._newest = LogState()
        self._lock = threading.Lock()

    def exists(self) -> bool:
        """Whether version 0 has been committed."""
        return (
            self._newest.version >= 0
            or self._storage.get(self._path(0)) is not None
            # Other engines may drop commits that a checkpoint covers.
            or self._storage.get(self._pointer) is not None
        )

    def newest(self) -> LogState:
        """Return the newest state: one probe when nothing is new. Raises: NotFound, LogCorrupt."""
        with self._lock:
            known = self._newest
            state = self._advance(known, None) if known.version >= 0 else self._opened()
            self._newest = state
        if state.version < 0:
            raise NotFound(f"{self._folder}: found no version 0, expected a table.")
        return state

    def at(self, version: int) -> LogState:
        """Return the state at a version. Raises: NotFound if it lies in the future or below 0."""
        newest = self.newest()
        if not 0 <= version <= newest.version:
            raise NotFound(
                f"version {version}: not in {self._folder}, which has 0..{newest.version}."
            )
        if version == newest.version:
            return newest
        checkpoints = [v for v in self._listed(_CHECKPOINT_NAME) if v <= version]
        return self._advance(self._from_checkpoint(checkpoints), version)

    def commit(self, build: Callable[[LogState], Intent]) -> Committed:
        """Commit what `build` makes of the newest state, rebuilding when another writer was first.

        Durable when it returns. Raises: CommitConflict if the intent no longer applies, and
        whatever `build` raises.
        """
        while True:
            state = self._newest_or_empty()
            intent = build(state)
            original = state.transactions.get(intent.transaction)
            if original is not None:
                return Committed(original, True, state)
            check_applies(intent, state)
            version = state.version + 1
            if not self._storage.put_new(self._path(version), encode(intent, version)):
                continue
            if version and version % CHECKPOINT_INTERVAL == 0:
                self._start_checkpoint(version)
            return Committed(version, False, self._newest_or_empty())

    def checkpoint(self, version: int) -> None:
        """Write a Delta checkpoint of a version and point `_last_checkpoint` at it."""
        state = self.at(version)
        data = write_checkpoint(state)
        self._storage.put(self._checkpoint_path(version), data)
        pointer = {"version": version, "size": state.num_actions}
        self._storage.put(self._pointer, json.dumps(pointer).encode())

    def history(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the commitInfo, with `version` added, of each version from `since` on."""
        return [self._info(version) for version in range(since, self.newest().version + 1)]

    def actions(self, version: int) -> list[dict[str, Any]]:
        """Return the Delta actions of one version's commit. Raises: NotFound, LogCorrupt."""
        actions = self._read_commit(version)
        if actions is None:
            raise NotFound(f"version {version}: its commit is not in {self._folder}.")
        return actions

    def info(self, version: int) -> dict[str, Any]:
        """Return the commitInfo of one version, as `history` does. Raises: NotFound, LogCorrupt."""
        newest = self.newest().version
        if not 0 <= version <= newest:
            raise NotFound(f"version {version}: not in {self._folder}, which has 0..{newest}.")
        return self._info(version)

    def _info(self, version: int) -> dict[str, Any]:
        actions = self._read_commit(version)
        if actions is None:
            raise self._hole(version, self.newest().version)
        found = [action["commitInfo"] for action in actions if "commitInfo" in action]
        return {"version": version, **(found[0] if found else {})}

    def _newest_or_empty(self) -> LogState:
        try:
            return self.newest()
        except NotFound:
            return LogState()

    def _opened(self) -> LogState:
        """Read the log from its newest readable checkpoint, and refuse one with a hole.

        The listing comes first, so every version in it can be read by now: one that is not reached
        lies behind a missing file, which the next writer would fill with something else.
        """
        commits = self._listed(_COMMIT_NAME)
        checkpoints = self._listed(_CHECKPOINT_NAME)
        state = self._advance(self._from_checkpoint(checkpoints), None)
        highest = max([*commits[-1:], *checkpoints[-1:]], default=-1)
        if state.version < highest:
            raise self._hole(state.version + 1, highest)
        return state

    def _from_checkpoint(self, versions: Sequence[int]) -> LogState:
        """Return the newest of these checkpoints that is readable; the empty state if none is.

        `_last_checkpoint` is for other engines: a damaged checkpoint costs us only time.
        """
        failure = None
        for version in reversed(versions):
            path = self._checkpoint_path(version)
            data = self._storage.get(path)
            if data is None:
                continue
            try:
                return replace(read_checkpoint(data, path), version=version)
            except FormatTooNew as error:
                raise FormatTooNew(f"{self._folder}: {error}") from error
            except LogCorrupt as error:
                failure = error
        if failure is not None and self._storage.get(self._path(0)) is None:
            raise failure
        return LogState()

    def _advance(self, state: LogState, until: int | None) -> LogState:
        """Apply the commits after `state`, up to and with `until` (None: as many as there are)."""
        batch: list[list[dict[str, Any]]] = []
        version = state.version
        while until is None or version < until:
            actions = self._read_commit(version + 1)
            if actions is None:
                if until is not None:
                    raise self._hole(version + 1, until)
                break
            batch.append(actions)
            version += 1
        if not batch:
            return state
        try:
            return state.apply(batch)
        except FormatTooNew as error:
            raise FormatTooNew(f"{self._folder}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LogCorrupt(
                f"{self._folder}: versions {state.version + 1}..{version} hold an action without "
                f"what Delta requires ({error!r}). Restore the files from a copy of the lake."
            ) from error

    def _start_checkpoint(self, version: int) -> None:
        def write() -> None:
            # The commit stands without it: the JSON log says the same, and the next follows soon.
            with suppress(ReplayLakeError):
                self.checkpoint(version)

        # Not a daemon: the interpreter waits for it, so short-lived writers checkpoint too. At the
        # interpreter's own end no thread can start any more, which is a RuntimeError.
        with suppress(RuntimeError):
            threading.Thread(target=write, name="replaylake-checkpoint").start()

    def _read_commit(self, version: int) -> list[dict[str, Any]] | None:
        path = self._path(version)
        data = self._storage.get(path)
        return None if data is None else decode(data, path)

    def _listed(self, pattern: re.Pattern[str]) -> list[int]:
        matches = map(pattern.fullmatch, self._storage.names(self._folder))
        return [int(match.group(1)) for match in matches if match]

    def _hole(self, version: int, newest: int) -> LogCorrupt:
        return LogCorrupt(
            f"{self._path(version)}: missing, expected every version up to {newest}. "
            "Restore the file from a copy of the lake."
        )

    @property
    def _pointer(self) -> str:
        return f"{self._folder}/_last_checkpoint"

    def _path(self, version: int) -> str:
        return f"{self._folder}/{version:020d}.json"

    def _checkpoint_path(self, version: int) -> str:
        return f"{self._folder}/{version:020d}.checkpoint.parquet"


def check_applies(intent: Intent, state: LogState) -> None:
    """Refuse an intent that does not fit the state. Raises: CommitConflict."""
    for path in intent.remove:
        if path not in state.files:
            raise CommitConflict(
                f"{intent.operation}: {path} is no longer live at version {state.version}: another "
                "writer replaced or removed it. Run the operation again on the newest version."
            )
    for entry in intent.add:
        if entry.path in state.files:
            raise CommitConflict(f"{intent.operation}: {entry.path} is already in the table.")
    for key, expected in intent.expected.items():
        found = state.entries.get(key)
        if found != expected:
            raise CommitConflict(
                f"{intent.operation} {key}: found {found}, expected {expected}: another writer was "
                "first. Look at the new value and run it again."
            )
