"""Leases: which copies of a cache live processes may still read, so that a trim leaves them."""

from __future__ import annotations

import fcntl
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from replaylake.datastore.names import new_ulid


@contextmanager
def locked(home: Path, *, exclusive: bool) -> Iterator[None]:
    """Hold the cache's lock: shared to look copies up, exclusive to choose some to remove."""
    fd = os.open(home / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


class Lease:
    """The names that this process may still read, in a file that it holds while it lives."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        path = home / "leases" / new_ulid()
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_RDWR, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def add(self, paths: Iterable[Path]) -> None:
        with self._lock:
            names = [str(path.relative_to(self._home)) for path in paths]
            self._write("+", [name for name in dict.fromkeys(names) if not self._counts[name]])
            self._counts.update(names)

    def remove(self, paths: Iterable[Path]) -> None:
        with self._lock:
            gone = []
            for path in paths:
                name = str(path.relative_to(self._home))
                if name in self._counts:
                    self._counts[name] -= 1
                    if self._counts[name] <= 0:
                        del self._counts[name]
                        gone.append(name)
            if self._counts:
                self._write("-", gone)
            elif gone:
                # Or the file would grow for as long as the process lives.
                os.ftruncate(self._fd, 0)

    def _write(self, sign: str, names: list[str]) -> None:
        if names:
            os.write(self._fd, "".join(f"{sign}{name}\n" for name in names).encode())


_leases: dict[tuple[Path, int], Lease] = {}
_leases_lock = threading.Lock()


def own_lease(home: Path) -> Lease:
    """Return this process's lease; call it with the cache locked, since the first call makes it."""
    # A forked child has a lease of its own: what it lets go of, its parent may still read.
    key = (home, os.getpid())
    with _leases_lock:
        if (lease := _leases.get(key)) is None:
            lease = _leases[key] = Lease(home)
        return lease


def leased(home: Path) -> set[str]:
    """Return the names that live processes hold; the leases of dead ones go."""
    names: set[str] = set()
    for path in (home / "leases").iterdir():
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                mine: set[str] = set()
                for line in file.read().decode().splitlines():
                    (mine.add if line[0] == "+" else mine.discard)(line[1:])
                names |= mine
                continue
        path.unlink(missing_ok=True)
    return names
