"""Temporary files: what has to lie on the disk for a while, and never outlives the process by much.

Each process has a folder of its own, made when it is first needed, locked as long as the process
lives and removed when it ends. A process that was killed leaves its folder, which the next one that
makes a folder finds unlocked and removes.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final

_PREFIX: Final = "replaylake-unpacked-"
_LOCK: Final = "lock"


def new_file(suffix: str) -> tuple[int, Path]:
    """Make an empty file; return it open for writing, and its path. Raises: OSError."""
    descriptor, path = tempfile.mkstemp(suffix, dir=_folder(os.getpid()))
    return descriptor, Path(path)


@lru_cache(maxsize=1)  # a forked child has another number, and so a folder of its own
def _folder(pid: int) -> Path:
    parent = Path(tempfile.gettempdir())
    _sweep(parent)
    # Under another name until it is locked: a sweep in between would take it for one left behind.
    new = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}", dir=parent))
    descriptor = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    folder = parent / f"{_PREFIX}{pid}-{new.name.rpartition('-')[2]}"
    new.rename(folder)
    atexit.register(_remove, folder, pid)
    return folder


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove the folders of this user's processes that are gone."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
