"""Spool: items that a client could not send, in order, in files that outlive its process.

    <folder>/<ulid>.jsonl      lines of `crc32 JSON`, locked (flock) while its process runs
    <folder>/<ulid>.refused    items that the server rejected permanently, with the reason

A line is either an item or `{"sent": N}`: the first N items that were pending are sent. A process
that starts takes over the files of processes that ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.errors import StorageError
from replaylake.datastore.names import new_ulid

_SUFFIX: Final = ".jsonl"
_SENT: Final = "sent"
_CRC_DIGITS: Final = 8
_CLOSED: Final = -1


class Spool:
    """The spool file of one process; any thread may append, one thread sends."""

    def __init__(self, folder: Path) -> None:
        """Open a new file, and take over those of processes that ended. Raises: StorageError."""
        self._folder, self._lock = Path(folder), threading.Lock()
        self._pending: deque[dict[str, Any]] = deque()
        self._process_id, self._fd, self._is_torn = os.getpid(), _CLOSED, False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path, self._fd = _create_locked(self._folder)
            self._take_over()
        except OSError as error:
            self._discard()
            raise _write_failed_error(self._folder, error) from error
        except StorageError:
            self._discard()
            raise
        _open_spools.add(self)

    @property
    def num_pending(self) -> int:
        """How many items are not sent yet."""
        return len(self._pending)

    @property
    def is_own(self) -> bool:
        """Whether this process opened it, and not one that it was forked from."""
        return os.getpid() == self._process_id

    def check_usable(self) -> None:
        """Raise StorageError where it is closed, or was opened before this process was forked."""
        if not self.is_own:
            raise StorageError(
                f"spool {self._folder}: opened by process {self._process_id}, used by its fork "
                f"{os.getpid()}. Open the fallback and its client in each process, after the fork."
            )
        if self._fd == _CLOSED:
            raise StorageError(f"spool {self._folder}: closed. Open another fallback and client.")

    def append(self, item: Mapping[str, Any]) -> None:
        """Add an item; on return a killed process does not lose it. Raises: StorageError."""
        self.check_usable()
        with self._lock:
            self._write([_encode(item)])
            self._pending.append(dict(item))

    def peek(self, num: int) -> list[dict[str, Any]]:
        """Return the first pending items, at most `num`."""
        with self._lock:
            return [self._pending[i] for i in range(min(num, len(self._pending)))]

    def drop(self, num: int) -> None:
        """Take out the first `num` items, which are sent. Raises: StorageError."""
        self.check_usable()
        with self._lock:
            if num >= len(self._pending):
                # Nothing is pending: truncate, so that the file stays small.
                try:
                    os.ftruncate(self._fd, 0)
                except OSError as error:
                    raise _write_failed_error(self._path, error) from error
            else:
                self._write([_encode({_SENT: num})])
            for _ in range(num):
                self._pending.popleft()

    def refuse(self, item: Mapping[str, Any], reason: str) -> None:
        """Store an item that the server rejected, with the reason. Raises: StorageError."""
        path = self._path.with_suffix(".refused")
        try:
            with path.open("ab") as file:
                file.write(_encode({"reason": reason, "item": dict(item)}))
        except OSError as error:
            raise _write_failed_error(path, error) from error

    def close(self) -> None:
        """Leave what is not sent to the next process; a fork closes nothing of its parent's."""
        if not self.is_own:
            return
        with self._lock:
            if self._fd == _CLOSED:
                return
            if not self._pending:
                self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = _CLOSED

    def close_inherited(self) -> None:
        """Close the file in a fork: the lock would otherwise outlive the process that has it."""
        if self._fd != _CLOSED:
            os.close(self._fd)
            self._fd = _CLOSED

    def _discard(self) -> None:
        """Remove the file of a spool that could not be opened."""
        if self._fd != _CLOSED:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = _CLOSED

    def _take_over(self) -> None:
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            if path == self._path:
                continue
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:  # its process sent the rest, or another took it over
                continue
            try:
                self._take_over_file(path, fd)
            finally:
                os.close(fd)

    def _take_over_file(self, path: Path, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # its process lives
            return
        if not os.fstat(fd).st_nlink:  # another process took it over before this one locked it
            return
        items = _read_pending(fd)
        if items:
            self._write([_encode(item) for item in items])
            os.fsync(self._fd)
            self._pending += items
        path.unlink(missing_ok=True)

    def _write(self, lines: Sequence[bytes]) -> None:
        size = os.fstat(self._fd).st_size
        try:
            view = memoryview((b"\n" if self._is_torn else b"") + b"".join(lines))
            while view:
                view = view[os.write(self._fd, view) :]
            self._is_torn = False
        except OSError as error:
            # Half a line would spoil the next one, which is written once there is space again.
            with suppress(OSError):
                os.ftruncate(self._fd, size)
            self._is_torn = self._is_torn or os.fstat(self._fd).st_size != size
            raise _write_failed_error(self._path, error) from error


_open_spools: weakref.WeakSet[Spool] = weakref.WeakSet()


def _close_inherited_spools() -> None:
    for spool in list(_open_spools):
        spool.close_inherited()


os.register_at_fork(after_in_child=_close_inherited_spools)


def _create_locked(folder: Path) -> tuple[Path, int]:
    """Create a file of this process, and return its path and descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    while True:
        path = folder / f"{new_ulid()}{_SUFFIX}"
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # A process that starts can lock it first, and removes what looks like a dead one's.
            if os.fstat(fd).st_nlink:
                return path, fd
        except OSError:
            os.close(fd)
            raise
        os.close(fd)


def _encode(item: Mapping[str, Any]) -> bytes:
    text = json.dumps(item, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read_pending(fd: int) -> list[dict[str, Any]]:
    """Return what was not sent of a file; a line that is not whole was acknowledged to nobody."""
    items: deque[dict[str, Any]] = deque()
    with os.fdopen(os.dup(fd), "rb") as file:
        data = file.read()
    for line in data.split(b"\n"):
        crc, text = line[:_CRC_DIGITS], line[_CRC_DIGITS + 1 :]
        if not text or b"%08x" % zlib.crc32(text) != crc:
            continue
        item = json.loads(text)
        if _SENT in item:
            for _ in range(min(item[_SENT], len(items))):
                items.popleft()
        else:
            items.append(item)
    return list(items)


def _write_failed_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"spool {path}: {error.strerror or error}, expected a directory that can be written to. "
        "Check its space and permissions."
    )
