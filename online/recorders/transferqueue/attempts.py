"""Attempts to run a queue, and files that only processes of the newest one can append to.

<folder>/attempt    the number of the newest attempt, and its checksum

Who begins an attempt holds this file's lock exclusively while it writes the next number; who
appends holds it shared from the comparison of the number to the end of the write. So once an
attempt has begun, files of earlier ones no longer change, and what a process of one of them
tries to write is refused: a controller that was believed dead acknowledges nothing more.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from replaylake.datastore.errors import (
    CommitConflictError,
    StorageError,
    TransientStorageError,
)
from replaylake.datastore.storage.storage import fsync_folder, make_folder

_NAME: Final = "attempt"
_NUM_BYTES: Final = 30  # 20 digits, a space, 8 digits of the checksum, a newline
_LOCK_WAIT_S: Final = 30.0
_NUM_BUFFERS: Final = 512  # of one writev; Linux takes 1,024
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
SYNC_INTERVAL_S: Final = 0.005


class Attempt:
    """One attempt to run the queue in a folder."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.number = number

    @classmethod
    def begin(cls, folder: Path) -> Attempt:
        """Begin the next attempt: from then on, processes of earlier ones write nothing more.

        Raises: StorageError if a process holds the lock for 30 s, which a write never does.
        """
        make_folder(folder)
        path = folder / _NAME
        with _translate(path):
            lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            _lock_exclusively(lock, path)
            with _translate(path):
                number = max(_read_number(lock) or 0, _newest_named(folder)) + 1
                os.pwrite(lock, _encode_number(number), 0)
                os.fsync(lock)
                fsync_folder(folder)
        finally:
            os.close(lock)
        return cls(folder, number)

    def open_lock(self) -> int:
        """Return a descriptor for `hold`: one a thread, since locks of one descriptor are one."""
        path = self.folder / _NAME
        with _translate(path):
            return os.open(path, os.O_RDONLY)

    @contextmanager
    def hold(self, lock: int) -> Iterator[None]:
        """Keep this the newest attempt while the block runs.

        Raises: CommitConflictError if another one has begun.
        """
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            newest = _read_number(lock)
            if newest != self.number:
                found = "cannot be read" if newest is None else f"is {newest}"
                raise CommitConflictError(
                    f"{self.folder}: the newest attempt {found}, and this process belongs to "
                    f"attempt {self.number}, so it writes nothing more. End this process."
                )
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


class Appender:
    """Appends to one file after another for one process. Safe for threads.

    What is appended survives the end of any process. It is fsynced in groups every 5 ms or, with
    `sync_every`, before `append` returns, and then survives the end of the machine too.
    """

    def __init__(self, attempt: Attempt, *, sync_every: bool) -> None:
        self._attempt = attempt
        self._sync_every = sync_every
        self._lock = attempt.open_lock()
        self._mutex = threading.RLock()  # the file and its length
        self._sync_mutex = threading.Lock()  # no descriptor is closed while it is synced
        self._path: Path | None = None
        self._file = -1
        self._num_bytes = 0
        self._failure: str | None = None
        self._is_closed = False
        self._written = threading.Event()
        self._thread: threading.Thread | None = None
        if not sync_every:
            self._thread = threading.Thread(target=self._sync_loop, name="sync", daemon=True)
            self._thread.start()

    @property
    def num_bytes(self) -> int:
        """The length of the file."""
        return self._num_bytes

    @property
    def path(self) -> Path | None:
        return self._path

    def start_file(self, path: Path) -> None:
        """Append to a new file from now on. Raises: StorageError, CommitConflictError."""
        with self._mutex:
            with self._attempt.hold(self._lock), _translate(path):
                file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_WRONLY, 0o644)
                try:
                    fsync_folder(path.parent)
                except OSError:
                    os.close(file)
                    raise
            with self._sync_mutex:
                if self._file >= 0:
                    self._sync(self._file)
                    os.close(self._file)
                self._path, self._file, self._num_bytes = path, file, 0

    def append(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Append all of the buffers or none, and return the offset of the first.

        Raises: CommitConflictError if another attempt has begun, TransientStorageError if the disk
        is full, StorageError if it refuses otherwise.
        """
        with self._mutex:
            if self._failure or self._path is None or self._is_closed:
                raise StorageError(f"{self._path}: {self._failure or 'the file is closed'}.")
            start = self._num_bytes
            with self._attempt.hold(self._lock):
                # Not before: a next attempt removes files of this one.
                if os.fstat(self._file).st_nlink == 0:
                    self._failure = f"{self._path} was removed while in use, with what was in it"
                    raise StorageError(f"{self._failure}. Restore the folder, then restart.")
                self._write(buffers)
            if self._sync_every:
                self._sync(self._file)
                if self._failure:
                    raise StorageError(f"{self._failure}. Repair the disk, then restart.")
        self._written.set()
        return start

    def refuse(self, reason: str) -> None:
        """Append nothing more, since a restore would not read it."""
        with self._mutex:
            self._failure = reason

    def close(self) -> None:
        with self._mutex, self._sync_mutex:
            if self._is_closed:
                return
            self._is_closed = True
            if self._file >= 0:
                self._sync(self._file)
                os.close(self._file)
            os.close(self._lock)
        self._written.set()
        if self._thread:
            self._thread.join()

    def _write(self, buffers: Sequence[bytes | memoryview]) -> None:
        rest = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        num_bytes = 0
        try:
            while rest:
                written = os.writev(self._file, rest[:_NUM_BUFFERS])
                num_bytes += written
                rest = _skip(rest, written)
        except OSError as error:
            try:
                os.ftruncate(self._file, self._num_bytes)
            except OSError as again:
                self._failure = f"could not undo a torn write: {again}"
            kind = TransientStorageError if error.errno in _FULL else StorageError
            raise kind(
                f"{self._path}: {error.strerror or error} after {num_bytes} bytes, of which none "
                "is kept. Free some space, then repeat it."
            ) from error
        self._num_bytes += num_bytes

    def _sync(self, file: int) -> None:
        try:
            os.fdatasync(file)
        except OSError as error:
            # After a failed fsync the kernel may drop the pages and report success the next time.
            self._failure = f"{self._path} could not be synced: {error.strerror or error}"

    def _sync_loop(self) -> None:
        while True:
            self._written.wait()
            self._written.clear()
            with self._sync_mutex:
                if self._is_closed:
                    return
                if self._file >= 0:
                    self._sync(self._file)
            time.sleep(SYNC_INTERVAL_S)


def _skip(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of buffers after their first bytes."""
    for i, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[i + 1 :]]
        num_bytes -= len(buffer)
    return []


def _lock_exclusively(lock: int, path: Path) -> None:
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{path}: locked for {_LOCK_WAIT_S:.0f} s by a process that stopped amid a "
                    "write. End that process, then begin again."
                ) from error
            time.sleep(0.01)
        else:
            return


def _encode_number(number: int) -> bytes:
    digits = b"%020d" % number
    return b"%b %08x\n" % (digits, zlib.crc32(digits))


def _read_number(lock: int) -> int | None:
    """Return the newest attempt's number, or None if the file does not hold one."""
    text = os.pread(lock, _NUM_BYTES + 1, 0)
    digits = text[:20]
    is_whole = digits.isdigit() and text == b"%b %08x\n" % (digits, zlib.crc32(digits))
    return int(digits) if is_whole else None


def _newest_named(folder: Path) -> int:
    """Return the greatest attempt in the names of files, should its own file be damaged."""
    names = (match for path in folder.glob("*/*") if (match := re.match(r"(\d{8})-", path.name)))
    return max((int(match.group(1)) for match in names), default=0)


@contextmanager
def _translate(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = TransientStorageError if error.errno in _FULL else StorageError
        raise kind(
            f"{path}: {error.strerror or error}. Free disk space or correct the permission."
        ) from error
