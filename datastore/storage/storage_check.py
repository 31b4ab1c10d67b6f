"""Check that a storage does what the store relies on, and inspect the disks below it."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from replaylake.datastore.errors import StorageError
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.storage import Storage

_FOLDER: Final = "_lake/check"
# Commits are dated by the clock of who writes them; retention and time travel go by these dates.
MAX_CLOCK_OFFSET_S: Final = 5.0
_IN_MEMORY: Final = ("tmpfs", "ramfs")
_OVER_NETWORK: Final = ("9p", "afs", "ceph", "cifs", "glusterfs", "lustre", "nfs", "nfs4", "smb3")


@dataclass(frozen=True)
class StorageCheck:
    """What was found of a storage.

    problem           why it cannot hold a lake; empty if it can
    write_s           seconds that one durable write of 64 bytes took
    clock_offset_s    by how many seconds the storage's clock is ahead of this machine's
    """

    problem: str
    write_s: float
    clock_offset_s: float


@dataclass(frozen=True)
class Disk:
    """The file system of a folder, or of its nearest parent that exists; bytes."""

    folder: Path
    file_system: str
    free_bytes: int
    total_bytes: int

    @property
    def is_in_memory(self) -> bool:
        return self.file_system in _IN_MEMORY

    @property
    def is_over_network(self) -> bool:
        return self.file_system in _OVER_NETWORK or self.file_system.startswith("fuse.")


def check_storage(storage: Storage) -> StorageCheck:
    """Write, read, list and delete one small file below `_lake/check`.

    What the store relies on is tested by doing it: a name that is taken cannot be taken again, a
    blob is read back as it was written, and a listing names it. Does not raise for a storage that
    fails: `problem` says how.
    """
    path = f"{_FOLDER}/{new_ulid()}"
    data = os.urandom(32).hex().encode()
    begun = time.time()
    clock = time.monotonic()
    try:
        is_new = storage.put_if_absent(path, data)
        write_s = time.monotonic() - clock
        try:
            problem = "" if is_new else "a name that was free was said to be taken"
            if not problem and storage.put_if_absent(path, data[::-1]):
                problem = (
                    "a name was taken twice, so that two writers would replace each other's commits"
                )
            if not problem and storage.get(path) != data:
                problem = "a file was read back with other bytes than were written"
            found = {file.path: file for file in storage.files(_FOLDER)}.get(path)
            if not problem and found is None:
                problem = "a listing does not name a file that was just written"
        finally:
            storage.delete([path])
    except StorageError as error:
        return StorageCheck(str(error), 0.0, 0.0)
    offset = 0.0
    if found is not None:
        # The file's time lies between the two clock readings if both clocks agree.
        written, ended = found.modified_ms / 1000, begun + write_s
        offset = min(written - begun, 0.0) if written < begun else max(written - ended, 0.0)
    return StorageCheck(problem, write_s, offset)


def inspect_disk(folder: Path) -> Disk:
    """Return the file system that holds a folder, or that would hold it. Raises: OSError."""
    existing = folder.absolute()
    while not existing.is_dir():
        existing = existing.parent
    usage = shutil.disk_usage(existing)
    return Disk(existing, _file_system(existing), usage.free, usage.total)


def _file_system(folder: Path) -> str:
    """Return the type of the file system that a folder lies on, empty where it is not known."""
    mounts: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            # proc(5): fields, the fifth the mount point, then " - ", then the type.
            fields, _, kind = line.partition(" - ")
            mounts[fields.split()[4].replace("\\040", " ")] = kind.split()[0]
    real = folder.resolve()
    return next((mounts[str(p)] for p in (real, *real.parents) if str(p) in mounts), "")
