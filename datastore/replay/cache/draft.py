"""Draft: a cached view that is being written, in a folder whose name nobody looks for."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.names import new_ulid
from replaylake.datastore.replay.array_allocator import no_room_error
from replaylake.datastore.replay.cache.cached_view import write_metadata
from replaylake.datastore.replay.mapped_arrays import create_array, num_bytes
from replaylake.datastore.storage.storage import fsync_folder

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_DRAFTS: Final = "tmp"
# Written between two looks at whether to go on.
_BLOCK_BYTES: Final = 8 << 20
# Between making the folder and locking it, nobody takes it for one that was left behind.
_ABANDONED_S: Final = 60.0


class DraftStoppedError(Exception):
    """The process ends, or nobody wants the draft any more."""


class Draft:
    """A folder, locked (flock) while it is written to: what a crash leaves is not."""

    def __init__(self, home: Path) -> None:
        """Make it. Raises: OSError."""
        self.folder = home / _DRAFTS / new_ulid()
        self.folder.mkdir(parents=True)
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array of zeros, mapped from a new file. Raises: StorageError."""
        path = self.folder / name
        try:
            return create_array(path, dtype, shape)
        except OSError as error:
            needed = num_bytes(dtype, shape)
            raise no_room_error(self.folder, 0, needed, "Free disk space", error) from error

    def write_missing(self, arrays: Mapping[str, NDArray[Any]], stop: threading.Event) -> None:
        """Write those arrays that are no files of it yet. Raises: OSError, Stopped."""
        for name, array in arrays.items():
            path = self.folder / name
            if path.exists():
                continue
            with path.open("xb") as file:
                for block in _blocks(array):
                    _check_not_stopped(stop)
                    file.write(block)

    def complete(
        self,
        names: Iterable[str],
        about: DataclassInstance,
        shards: Sequence[str],
        stop: threading.Event,
    ) -> None:
        """Make the arrays of these names durable, and then say what they are.

        Raises: OSError, Stopped.
        """
        for name in names:
            _check_not_stopped(stop)
            with (self.folder / name).open("r+b") as file:
                os.fsync(file.fileno())
        write_metadata(self.folder, about, shards)
        fsync_folder(self.folder)

    def discard(self) -> None:
        """Remove what was written; what is mapped stays readable."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def find_abandoned_drafts(home: Path) -> list[Path]:
    """Return the folders of drafts that crashes left behind."""
    drafts = []
    with suppress(OSError):
        for folder in sorted((home / _DRAFTS).iterdir()):
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime > _ABANDONED_S and not _is_locked(folder):
                    drafts.append(folder)
    return drafts


def _is_locked(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _blocks(array: NDArray[Any]) -> Iterator[memoryview]:
    if array.size:
        data = np.ascontiguousarray(array).data.cast("B")
        for start in range(0, len(data), _BLOCK_BYTES):
            yield data[start : start + _BLOCK_BYTES]


def _check_not_stopped(stop: threading.Event) -> None:
    if stop.is_set():
        raise DraftStoppedError
