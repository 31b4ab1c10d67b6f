"""LogFolder: the files of one table's log: what they are called, which there are, their bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from replaylake.datastore.storage.log.checkpoint import read_checkpoint, write_checkpoint
from replaylake.datastore.storage.log.commit_file import decode
from replaylake.datastore.storage.log.state import Change, LogState
from replaylake.datastore.storage.storage import Storage

# Over a network, commits are read side by side, but not all 10,000 of a log in memory at once.
FETCH_BATCH: Final = 256
_NAME: Final = re.compile(r"(\d{20})\.(json|checkpoint\.parquet)")


@dataclass(frozen=True)
class Listing:
    """The versions that have a commit file, and those that have a checkpoint, each sorted."""

    commits: list[int]
    checkpoints: list[int]

    @property
    def newest(self) -> int:
        """The highest version that has either; -1 if there is none."""
        return max([*self.commits[-1:], *self.checkpoints[-1:]], default=-1)

    @property
    def oldest(self) -> int:
        """The lowest version that can be read, were all of these whole; -1 if there is none.

        Expiry drops commits from the lowest on, and a checkpoint stands where it stopped. One below
        is what a slow writer left there afterwards.
        """
        first = self.commits[0] if self.commits else 1
        if first == 0:
            return 0
        return min((v for v in self.checkpoints if v >= first - 1), default=-1)


class LogFolder:
    """Where a log's files are. Nothing here is remembered."""

    def __init__(self, storage: Storage, root: str) -> None:
        self.storage = storage
        self.path = f"{root}/_delta_log"
        self.pointer_path = f"{self.path}/_last_checkpoint"

    def commit_path(self, version: int) -> str:
        return f"{self.path}/{version:020d}.json"

    def checkpoint_path(self, version: int) -> str:
        return f"{self.path}/{version:020d}.checkpoint.parquet"

    def listing(self, since: int = 0) -> Listing:
        """List the files of versions from `since` on."""
        listing = Listing([], [])
        names = self.storage.names(self.path, after=f"{since:020d}" if since else "")
        for match in map(_NAME.fullmatch, names):
            if match:
                is_commit = match.group(2) == "json"
                versions = listing.commits if is_commit else listing.checkpoints
                versions.append(int(match.group(1)))
        return listing

    def read_changes(self, versions: Sequence[int]) -> list[Change | None]:
        """Return what commits change, None where there is no such file.

        Raises: LogCorruptError.
        """
        paths = [self.commit_path(version) for version in versions]
        blobs = self.storage.get_many(paths)
        return [
            None if data is None else decode(data, path, version)
            for version, path, data in zip(versions, paths, blobs, strict=True)
        ]

    def read_change(self, version: int) -> Change | None:
        """Return what a commit changes, or None if there is none. Raises: LogCorruptError."""
        path = self.commit_path(version)
        data = self.storage.get(path)
        return None if data is None else decode(data, path, version)

    def read_commit_times(self) -> dict[int, int]:
        """Return when each version was committed (ms since 1970), by the storage's clock.

        Never less than for a version before it: a commit that a slow clock stamped came after them
        all the same. A copy of the files is younger than they are. Cost: a listing.
        """
        stamps = {}
        for file in self.storage.files(self.path):
            match = _NAME.fullmatch(file.path.removeprefix(f"{self.path}/"))
            if match and match.group(2) == "json":
                stamps[int(match.group(1))] = file.modified_ms
        committed, latest = {}, 0
        for version in sorted(stamps):
            committed[version] = latest = max(latest, stamps[version])
        return committed

    def is_empty(self) -> bool:
        """Whether there is no file at all, be it one that can be read or not."""
        return not self.storage.names(self.path)

    def has_commit(self, version: int) -> bool:
        return self.storage.get(self.commit_path(version)) is not None

    def read_checkpoint(self, version: int) -> LogState | None:
        """Return the state of a checkpoint. Raises: LogCorruptError, FormatTooNewError."""
        path = self.checkpoint_path(version)
        data = self.storage.get(path)
        if data is None:
            return None
        state = read_checkpoint(data, path, version)
        if state.timestamp_ms == 0:
            # Of another engine: only the commit knows when it was.
            change = self.read_change(version)
            state = replace(state, timestamp_ms=change.timestamp_ms if change is not None else 0)
        return state

    def write_checkpoint(self, state: LogState) -> None:
        """Write a checkpoint, and let `_last_checkpoint` name it unless that names a newer one."""
        self.storage.put(self.checkpoint_path(state.version), write_checkpoint(state))
        pointed = self.read_pointer()
        if pointed is None or pointed < state.version:
            self.write_pointer(state.version, state.num_actions)

    def read_pointer(self) -> int | None:
        """Return the version that `_last_checkpoint` names; None if it is absent or damaged."""
        try:
            version = json.loads(self.storage.get(self.pointer_path) or b"")["version"]
        except (ValueError, TypeError, KeyError):
            return None
        return version if isinstance(version, int) and version >= 0 else None

    def write_pointer(self, version: int, num_actions: int) -> None:
        """Let `_last_checkpoint`, by which other engines start, name a checkpoint."""
        pointer = {"version": version, "size": num_actions}
        self.storage.put(self.pointer_path, json.dumps(pointer).encode())
