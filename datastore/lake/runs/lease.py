"""Lease: one process at a time goes on with a run, and others see whether it is still at work.

On one machine a lock says it, which the kernel takes back from a process that died. For machines
that share a lake a heartbeat does, a blob that is written every few seconds; after a silence its
owner counts as dead. The silence began at the time in the heartbeat, or when the storage got it if
that is later: the clock of the owner's machine may have been set back. An owner that was only
suspended finds, when it wakes, that the heartbeat is another's, and gives up.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from replaylake.datastore.errors import CommitConflictError, StorageError
from replaylake.datastore.names import LAKE_ROOT, new_ulid
from replaylake.datastore.storage.seals import read_json, seal_json
from replaylake.datastore.storage.storage import Storage, make_folder

HEARTBEAT_S: Final = 15.0
# Several heartbeats, and more than clocks of machines that keep time differ by.
STALE_AFTER_S: Final = 90.0
# Whoever looks whether a run is alive holds its lock for a moment.
_LOCK_WAIT_S: Final = 0.5
_PATH: Final = re.compile(rf"{LAKE_ROOT}/runs/([^/]+)/heartbeat\.json")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Heartbeat:
    """Who goes on with a run, and when it last said so; `lock` identifies the file it locked."""

    owner: str
    host: str
    pid: int
    lock: str
    at_ms: int

    @property
    def age_s(self) -> float:
        """Seconds since, by this machine's clock."""
        return max(0.0, time.time() - self.at_ms / 1000)


class HeartbeatDamagedError(StorageError):
    """A heartbeat is not what was written."""


class RunLease:
    """A context manager around the work on a run."""

    def __init__(self, storage: Storage, run_id: str, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._storage = storage
        self._run_id = run_id
        self._heartbeat_s = heartbeat_s
        self._path = _blob(run_id)
        self._fd = -1
        self._heartbeat = Heartbeat(new_ulid(), socket.gethostname(), os.getpid(), "", 0)
        self._taken_by: Heartbeat | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"lease {run_id}", daemon=True)

    def __enter__(self) -> RunLease:
        """Take the lease.

        Raises: CommitConflictError while another process has it; StorageError.
        """
        lock = _lock_path(self._storage, self._run_id)
        deadline = time.monotonic() + _LOCK_WAIT_S
        while (fd := _try_lock(lock)) is None:
            if time.monotonic() > deadline:
                raise self._lease_held_error(last_heartbeat(self._storage, self._run_id))
            time.sleep(0.02)
        self._fd = fd
        try:
            last = last_heartbeat(self._storage, self._run_id)
            identity = _identity(fd)
            # With the same file locked, a heartbeat of this machine is that of a dead process.
            if (
                last is not None
                and last.lock != identity
                and _is_recent(self._storage, self._run_id, last)
            ):
                raise self._lease_held_error(last)
            mine = asdict(self._heartbeat) | {"lock": identity}
            self._heartbeat = Heartbeat(**mine)
            self._put()
        except BaseException:
            os.close(fd)
            raise
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        with suppress(StorageError, OSError):
            if self._is_mine():
                self._storage.delete([self._path])
            # Still locked: who waits for it looks whether the name still leads to its file.
            _lock_path(self._storage, self._run_id).unlink(missing_ok=True)
        os.close(self._fd)

    def check(self) -> None:
        """Raises: CommitConflictError if another process has taken the run over meanwhile."""
        if self._taken_by is not None:
            raise CommitConflictError(
                f"run {self._run_id}: found that {_describe_owner(self._taken_by)} goes on with "
                f"it, expected "
                "this process alone: it was silent for too long. Leave it to the other."
            )

    def confirm(self) -> None:
        """Look again, and `check`: before what may be done only once. Raises: StorageError."""
        self._is_mine()
        self.check()

    def _beat(self) -> None:
        while not self._ended.wait(self._heartbeat_s):
            # A store that is out of reach for a moment ends no run.
            with suppress(StorageError):
                if not self._is_mine():
                    return
                self._put()

    def _is_mine(self) -> bool:
        try:
            heartbeat = last_heartbeat(self._storage, self._run_id)
        except HeartbeatDamagedError:
            # Written again by whoever is at work on the run; of two, one then finds the other's.
            return self._taken_by is None
        if heartbeat is not None and heartbeat.owner != self._heartbeat.owner:
            self._taken_by = heartbeat
        return self._taken_by is None

    def _put(self) -> None:
        body = asdict(self._heartbeat) | {"at_ms": round(time.time() * 1000)}
        self._storage.put(self._path, seal_json(body))

    def _lease_held_error(self, by: Heartbeat | None) -> CommitConflictError:
        who = "another process of this machine" if by is None else _describe_owner(by)
        heard = "" if by is None else f", last heard of {by.age_s:.0f} s ago"
        return CommitConflictError(
            f"run {self._run_id}: found {who} at work on it{heard}, expected none. Wait until it "
            f"ends, or stop it; a process that was killed counts as dead after "
            f"{STALE_AFTER_S:.0f} s, "
            "on its own machine at once."
        )


def last_heartbeat(storage: Storage, run_id: str) -> Heartbeat | None:
    """Return the newest heartbeat of a run that did not end by itself.

    Raises: HeartbeatDamagedError, StorageError.
    """
    path = _blob(run_id)
    data = storage.get(path)
    try:
        body: Any = read_json(data or b"null")
    except (ValueError, RecursionError) as error:
        raise HeartbeatDamagedError(
            f"{path}: {error}, expected the heartbeat of a run. A process at work on the run "
            f"writes it again within {HEARTBEAT_S:.0f} s; where none is, remove the file."
        ) from error
    if not isinstance(body, dict):
        return None
    try:
        # A member with another name is a checksum with a damaged one.
        known = {name: body[name] for name in Heartbeat.__dataclass_fields__}
        return Heartbeat(**known)
    except KeyError:
        # Written by another version: as good as none.
        return None


def find_damaged_heartbeats(storage: Storage) -> Iterator[tuple[str, str]]:
    """Yield (path, what is wrong) for each heartbeat that cannot be read. Raises: StorageError."""
    for file in storage.files(f"{LAKE_ROOT}/runs"):
        if match := _PATH.fullmatch(file.path):
            try:
                last_heartbeat(storage, match.group(1))
            except HeartbeatDamagedError as error:
                yield file.path, str(error)


def is_active(storage: Storage, run_id: str) -> bool:
    """Whether a process is at work on the run, as far as can be seen. Raises: StorageError."""
    heartbeat = last_heartbeat(storage, run_id)
    if heartbeat is None:
        return False
    path = _lock_path(storage, run_id)
    if path.exists():
        fd = _try_lock(path)
        if fd is None:
            return True
        try:
            if heartbeat.lock == _identity(fd):
                return False
        finally:
            os.close(fd)
    return _is_recent(storage, run_id, heartbeat)


def _is_recent(storage: Storage, run_id: str, heartbeat: Heartbeat) -> bool:
    """Whether a heartbeat is so young that its owner may be alive."""
    if heartbeat.age_s < STALE_AFTER_S:
        return True
    folder, _, _ = _blob(run_id).rpartition("/")
    stored_ms = [f.modified_ms for f in storage.files(folder) if f.path == _blob(run_id)]
    return any(time.time() - at_ms / 1000 < STALE_AFTER_S for at_ms in stored_ms)


def _blob(run_id: str) -> str:
    return f"{LAKE_ROOT}/runs/{run_id}/heartbeat.json"


def _lock_path(storage: Storage, run_id: str) -> Path:
    return storage.state_folder(f"{LAKE_ROOT}/runs/{run_id}") / "lock"


def _try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock; None if another has it."""
    try:
        make_folder(path.parent)
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        is_read_only = error.errno == errno.EROFS
        cure = "Mount the file system for writing" if is_read_only else "Correct the permission"
        raise StorageError(
            f"{path}: {error.strerror or error} while locking it. {cure}."
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def _identity(fd: int) -> str:
    stat = os.fstat(fd)
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = socket.gethostname()
    return f"{boot}/{stat.st_dev}/{stat.st_ino}"


def _describe_owner(heartbeat: Heartbeat) -> str:
    return f"process {heartbeat.pid} of {heartbeat.host}"
