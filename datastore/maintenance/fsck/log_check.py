"""Log check: every commit and checkpoint of one log, against its own sha256 and each other."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Final

from replaylake.datastore.errors import FormatTooNewError, LogCorruptError
from replaylake.datastore.storage.log.checkpoint import write_checkpoint
from replaylake.datastore.storage.log.commit_file import ENGINE
from replaylake.datastore.storage.log.folder import Listing, LogFolder
from replaylake.datastore.storage.log.state import Change, FileEntry, LogState
from replaylake.datastore.storage.storage import Storage

# Versions applied at once: every application copies what changes.
_BATCH: Final = 100


@dataclass(frozen=True)
class LogFault:
    """What is wrong with one file of a log; `is_derived` if the commits say the same."""

    path: str
    version: int | None
    message: str
    is_derived: bool = False


@dataclass
class CheckedLog:
    """The newest state that the log adds up to, None where it does not, and what is wrong with it.

    `named` has every file that a commit or checkpoint added, with the version that did. `repairs`
    are checkpoints that are damaged, with the state that their commits add up to.
    """

    state: LogState | None = None
    faults: list[LogFault] = field(default_factory=list)
    named: dict[str, tuple[FileEntry, int]] = field(default_factory=dict)
    repairs: dict[int, LogState] = field(default_factory=dict)
    points_wrong: bool = False


def check_log(storage: Storage, root: str) -> CheckedLog:
    """Read every file of the log at `root`. Memory: its state, and the paths of all its files."""
    return _LogCheck(LogFolder(storage, root)).run()


def repair_log(storage: Storage, root: str, checked: CheckedLog) -> list[str]:
    """Write damaged checkpoints again from the commits; return the paths. Raises: StorageError.

    Nothing else of a log can be repaired without guessing.
    """
    folder = LogFolder(storage, root)
    repaired = []
    for version, state in checked.repairs.items():
        storage.put(folder.checkpoint_path(version), write_checkpoint(state))
        repaired.append(folder.checkpoint_path(version))
    if checked.points_wrong:
        versions = folder.listing().checkpoints
        whole = [version for version in versions if folder.read_checkpoint(version) is not None]
        if whole and (newest := folder.read_checkpoint(whole[-1])) is not None:
            folder.write_pointer(newest.version, newest.num_actions)
            repaired.append(folder.pointer_path)
    return repaired


class _LogCheck:
    def __init__(self, folder: LogFolder) -> None:
        self._folder = folder
        self._log = CheckedLog()
        self._live: set[str] = set()

    def run(self) -> CheckedLog:
        listing = self._folder.listing()
        state = self._base(listing)
        if state is not None:
            self._walk(state, listing)
        self._check_pointer(listing)
        return self._log

    def _base(self, listing: Listing) -> LogState | None:
        """Return what the first readable commit is applied to."""
        oldest = listing.oldest
        if oldest < 0:
            self._fault("", None, "found no version that can be read, expected version 0")
            return None
        if oldest == 0:
            return LogState()
        try:
            state = self._folder.read_checkpoint(oldest)
        except (LogCorruptError, FormatTooNewError) as error:
            self._fault(self._folder.checkpoint_path(oldest), oldest, str(error))
            return None
        if state is not None:
            self._live = set(state.files)
            self._log.named |= {path: (entry, oldest) for path, entry in state.files.items()}
        return state

    def _walk(self, state: LogState, listing: Listing) -> None:
        """Apply the commits to the newest, comparing the checkpoints on the way."""
        checkpoints = {version for version in listing.checkpoints if version > state.version}
        batch: list[Change] = []
        for version in range(state.version + 1, listing.newest + 1):
            change = self._read_change(version)
            if change is None:
                self._verify_remaining(checkpoints, version)
                return
            batch.append(change)
            if version in checkpoints or len(batch) == _BATCH or version == listing.newest:
                applied = self._apply(state, batch)
                if applied is None:
                    return
                state, batch = applied, []
            if version in checkpoints:
                self._compare(version, state)
        self._log.state = state

    def _read_change(self, version: int) -> Change | None:
        path = self._folder.commit_path(version)
        try:
            change = self._folder.read_change(version)
        except LogCorruptError as error:
            self._fault(path, version, str(error))
            return None
        if change is None:
            message = "missing, expected every version up to the newest. Restore the file"
            self._fault(path, version, f"{message} from a copy of the lake.")
            return None
        if change.info.get("engineInfo") == ENGINE and "sha256" not in change.info:
            self._fault(path, version, "its first line was changed: it has no sha256 any more.")
            return None
        self._track_files(change, path)
        return change

    def _track_files(self, change: Change, path: str) -> None:
        """Note the files that a commit adds and removes, and where they contradict the log."""
        version = change.version
        for removed in change.removed:
            if removed not in self._live:
                self._fault(path, version, f"removes {removed}, which was not live before it.")
            self._live.discard(removed)
        for entry in change.added:
            if entry.path in self._live:
                self._fault(path, version, f"adds {entry.path}, which was live before it.")
            self._live.add(entry.path)
            self._log.named[entry.path] = (entry, version)

    def _apply(self, state: LogState, batch: list[Change]) -> LogState | None:
        try:
            return state.apply(batch)
        except (FormatTooNewError, KeyError, TypeError, ValueError, AttributeError) as error:
            versions = f"versions {state.version + 1}..{state.version + len(batch)}"
            self._fault(self._folder.path, None, f"{versions} do not add up: {error!r}.")
            return None

    def _compare(self, version: int, state: LogState) -> None:
        path = self._folder.checkpoint_path(version)
        try:
            stored_state = self._folder.read_checkpoint(version)
        except (LogCorruptError, FormatTooNewError) as error:
            message = str(error).partition(", expected")[0].removeprefix(f"{path}: ")
            stored_state = None
        else:
            message = _describe_difference(stored_state, state, self._folder.storage.get(path))
        if message:
            self._fault(
                path,
                version,
                f"{message}; the commits that it summarizes are intact. `repair` rewrites it from "
                "them.",
                is_derived=True,
            )
            self._log.repairs[version] = state

    def _verify_remaining(self, checkpoints: set[int], broken: int) -> None:
        """Check on their own the checkpoints behind a commit that cannot be read."""
        for version in sorted(v for v in checkpoints if v >= broken):
            try:
                self._folder.read_checkpoint(version)
            except (LogCorruptError, FormatTooNewError) as error:
                self._fault(self._folder.checkpoint_path(version), version, str(error))

    def _check_pointer(self, listing: Listing) -> None:
        data = self._folder.storage.get(self._folder.pointer_path)
        if data is None and not listing.checkpoints:
            return
        version = self._folder.read_pointer()
        state = None
        if version in listing.checkpoints:
            try:
                state = self._folder.read_checkpoint(version)
            except (LogCorruptError, FormatTooNewError):
                return  # said of the checkpoint itself
        try:
            body = json.loads(data or b"")
        except ValueError:
            body = None
        if state is None or body != {"version": version, "size": state.num_actions}:
            self._log.points_wrong = True
            self._fault(
                self._folder.pointer_path,
                None,
                f"found {(data or b'nothing')[:80]!r}, expected the newest checkpoint's version "
                "and size: other engines start from it. `repair` writes it again.",
                is_derived=True,
            )

    def _fault(
        self, path: str, version: int | None, message: str, *, is_derived: bool = False
    ) -> None:
        message = message.removeprefix(f"{path}: ")
        self._log.faults.append(LogFault(path or self._folder.path, version, message, is_derived))


def _describe_difference(stored_state: LogState | None, state: LogState, data: bytes | None) -> str:
    """Say what a checkpoint has otherwise than its commits; "" if nothing."""
    if stored_state is None or data is None:
        return "cannot be read"
    for what, one, other in (
        ("protocol", stored_state.protocol, state.protocol),
        ("metadata", stored_state.metadata, state.metadata),
        ("files", _files(stored_state), _files(state)),
        ("transactions", dict(stored_state.transactions), dict(state.transactions)),
        ("entries", dict(stored_state.entries), dict(state.entries)),
    ):
        # The commit's metaData does not say whether the table takes entries; its protocol does.
        if what == "metadata" and stored_state.metadata is not None and state.metadata is not None:
            one, other = stored_state.metadata.to_action(), state.metadata.to_action()
        if one != other:
            return f"its {what} are not those of the commits"
    # Only one from before checkpoints had a sha256 may be without: or that word was changed.
    expected = bytes(write_checkpoint(state))
    is_unsealed = b"replaylake.sha256\x18@" not in data and len(data) == len(expected)
    return "its bytes were changed" if is_unsealed and data != expected else ""


def _files(state: LogState) -> dict[str, tuple[FileEntry, int]]:
    return {path: (entry, entry.since) for path, entry in state.files.items()}
