"""Memory: how much a view may take, and where its arrays go when that is less than they need."""

from __future__ import annotations

import math
import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.errors import StorageError
from replaylake.datastore.replay.arguments import check_int
from replaylake.datastore.replay.mapped_arrays import num_bytes, scratch_array

# What a view's arrays are called, and the files that hold them.
RECORDS: Final = "records"
STEPS: Final = "steps"
BOOTSTRAPPABLE_STEPS: Final = "bootstrappable"
# Returns zeroed memory, or a mapped file, given what it is for, its shape and its dtype.
Allocate = Callable[[str, tuple[int, ...], np.dtype[Any]], NDArray[Any]]
_LINE_BYTES: Final = 64  # of the processor's cache
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")
# Left free on a disk by what can be made again.
DISK_RESERVE: Final = 256 << 20
# Of each step, beside its record: its place in `steps` and in `bootstrappable`.
_BYTES_PER_STEP: Final = 16


class FileAllocator(Protocol):
    """Where arrays are files."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array of zeros, mapped from a file of its own."""
        ...


class ArrayAllocator:
    """Gives a view's arrays their place: memory where they fit the budget, else files.

    Decided when the records are asked for, which they are first; `files` is None for memory.
    """

    def __init__(self, budget: int, open_files: Callable[[int], FileAllocator]) -> None:
        """Take the budget (bytes), and what to call with the bytes that files must have room for.

        That may raise StorageError.
        """
        self.files: FileAllocator | None = None
        self._budget = budget
        self._open_files = open_files
        self._is_decided = False

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array of zeros. Raises: StorageError."""
        if not self._is_decided:
            self._is_decided = True
            needed = num_bytes(dtype, shape) + _BYTES_PER_STEP * shape[0]
            if needed > self._budget:
                self.files = self._open_files(needed)
        if self.files is None:
            return allocate_in_memory(name, shape, dtype)
        return self.files.allocate(name, shape, dtype)


class ScratchFiles:
    """Files without names in the system's folder for temporary ones; gone with their arrays."""

    def __init__(self, needed: int) -> None:
        """Look for room. Raises: StorageError."""
        self._folder = Path(tempfile.gettempdir())
        free = shutil.disk_usage(self._folder).free
        if free < needed + DISK_RESERVE:
            raise no_room_error(self._folder, free, needed, "Name a larger disk with TMPDIR")

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array of zeros. Raises: StorageError."""
        try:
            return scratch_array(self._folder, dtype, shape)
        except OSError as error:
            raise no_room_error(
                self._folder, 0, num_bytes(dtype, shape), "Name a larger disk with TMPDIR", error
            ) from error


def allocate_in_memory(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return zeroed memory; of large arrays the kernel gives what is written to, in huge pages."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _LINE_BYTES, np.uint8)
    # numpy aligns to 16 bytes: a record of 128 would touch a third line of the cache, a batch of
    # 256 transitions take 4.5 us to copy where it takes 4.2 (2 cores, 2026-11-21).
    first = -memory.ctypes.data % _LINE_BYTES
    return memory[first : first + size].view(dtype).reshape(shape)


def is_mapped(array: NDArray[Any]) -> bool:
    """Whether an array is a view of a mapped file."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


def no_room_error(
    folder: Path, free: int, needed: int, advice: str, error: OSError | None = None
) -> StorageError:
    """Return the error of a view that fits neither the memory budget nor the disk."""
    found = error.strerror if error else f"{free / 1e9:.2f} GB free"
    return StorageError(
        f"replay: {folder}: found {found}, expected room for {needed / 1e9:.2f} GB: the view "
        f"exceeds its memory budget and goes to disk. {advice}, select less with `where`, or raise "
        "memory_budget_bytes."
    )


def resolve_budget(memory_budget_bytes: int | None) -> int:
    """Return the budget: by default half of what is available. Raises: ConfigInvalidError."""
    if memory_budget_bytes is None:
        return available_bytes() // 2
    return check_int(
        "replay: memory_budget_bytes",
        memory_budget_bytes,
        maximum=sys.maxsize,
        advice="0 always maps from disk; leave it out for half of what is available.",
    )


def available_bytes() -> int:
    """Return the memory that new data may take: the machine's, or less by a control group's limit.

    Of control groups those of version 2 are looked at.
    """
    available = _machine_bytes()
    with suppress(OSError, ValueError):
        own = _OWN_CGROUP.read_text().rpartition("::")[2].strip().lstrip("/")
        folder = _CGROUPS / own
        for group in (folder, *folder.parents):
            if not group.is_relative_to(_CGROUPS):
                break
            with suppress(OSError, ValueError):
                # "max", where there is no limit, is no number.
                limit = int((group / "memory.max").read_text())
                stats = dict(s.split() for s in (group / "memory.stat").read_text().splitlines())
                available = min(available, max(0, limit - int(stats["anon"])))
    return available


def _machine_bytes() -> int:
    with suppress(OSError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
