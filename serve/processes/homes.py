"""Homes: a folder for each server and its workers, which goes when the last of them has gone.

A server that is killed removes nothing. The next one on the machine does, once nobody holds the
lock on the folder any more: the server does, and each worker that inherited it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PREFIX: Final = "replaylake-server-"
# A younger one may not have its lock yet.
_YOUNG_S: Final = 60.0


@dataclass(frozen=True)
class Home:
    """A server's folder, and the descriptor that its workers are to inherit."""

    path: Path
    lock_fd: int


@contextmanager
def own_home() -> Iterator[Home]:
    """Make a folder for the time of the block, and remove those that killed servers left."""
    _remove_left()
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
            yield Home(path, lock_fd)
        finally:
            os.close(lock_fd)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_left() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, somebody else's, or gone
            _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(lock_fd)
        if found.st_uid == os.getuid() and time.time() - found.st_mtime > _YOUNG_S:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    finally:
        os.close(lock_fd)
