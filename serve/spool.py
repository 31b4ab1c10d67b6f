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
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.errors import StorageError
from replaylake.datastore.names import new_ulid

_SUFFIX: Final = ".jsonl"
_SENT: Final = "sent"
_CRC_DIGITS: Final = 8


class Spool:
    """The spool file of one process; any thread may append, one thread sends."""

    def __init__(self, folder: Path) -> None:
        """Open a new file, and take over those of processes that ended. Raises: StorageError."""
        self._folder, self._lock = Path(folder), threading.Lock()
        self._pending: deque[dict[str, Any]] = deque()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path = self._folder / f"{new_ulid()}{_SUFFIX}"
            self._fd = _create_locked(self._path)
            self._take_over()
        except OSError as error:
            raise _write_failed_error(self._folder, error) from error

    @property
    def num_pending(self) -> int:
        """How many items are not sent yet."""
        return len(self._pending)

    def append(self, item: Mapping[str, Any]) -> None:
        """Append an item; after this returns, a kill does not lose it. Raises: StorageError."""
        with self._lock:
            self._write([_encode(item)])
            self._pending.append(dict(item))

    def peek(self, num: int) -> list[dict[str, Any]]:
        """Return the first pending items, at most `num`."""
        with self._lock:
            return [self._pending[i] for i in range(min(num, len(self._pending)))]

    def drop(self, num: int) -> None:
        """Remove the first `num` items, which are sent. Raises: StorageError."""
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
        """Close the file; the next process sends what is pending."""
        with self._lock:
            if not self._pending:
                self._path.unlink(missing_ok=True)
            os.close(self._fd)

    def _take_over(self) -> None:
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            if path == self._path:
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # its process is running
                os.close(fd)
                continue
            items = list(_read_pending(path))
            if items:
                self._write([_encode(item) for item in items])
                os.fsync(self._fd)
                self._pending += items
            path.unlink(missing_ok=True)
            os.close(fd)

    def _write(self, lines: Sequence[bytes]) -> None:
        try:
            view = memoryview(b"".join(lines))
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise _write_failed_error(self._path, error) from error


def _create_locked(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def _encode(item: Mapping[str, Any]) -> bytes:
    text = json.dumps(item, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read_pending(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the unsent items of a file; incomplete lines were never acknowledged."""
    items: deque[dict[str, Any]] = deque()
    for line in path.read_bytes().split(b"\n"):
        crc, text = line[:_CRC_DIGITS], line[_CRC_DIGITS + 1 :]
        if not text or b"%08x" % zlib.crc32(text) != crc:
            continue
        item = json.loads(text)
        if _SENT in item:
            for _ in range(min(item[_SENT], len(items))):
                items.popleft()
        else:
            items.append(item)
    yield from items


def _write_failed_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"spool {path}: {error.strerror or error}, expected a directory that can be written to. "
        "Check its space and permissions."
    )
