"""Shard cache: this machine's copies of a remote lake's immutable files, for DuckDB and Arrow.

    <home>/lock                 held (flock) while copies are looked up, or chosen for removal
    <home>/leases/<ulid>        one a process: names it may still read; held (flock) while it lives
    <home>/tmp/<ulid>           copies being made; renamed once their sha256 is right
    <home>/<lake>/<path>        the copies; their time of change is that of their last use

A query opens its files whenever it gets to them, so a copy that a live process asked for stays, at
most a day after it last did, even where that exceeds the cap. Anything here may be deleted while no
process runs.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from replaylake.datastore.errors import ConfigInvalidError, StorageError
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.storage import Blob

# A request to an object store waits for the network most of its time; more than this were no faster
# against S3's limit of a connection, and each one holds a chunk in memory.
PARALLEL_REQUESTS: Final = 16
_IN_USE_S: Final = 86_400.0
_ABANDONED_S: Final = 86_400.0
_UNITS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_RESERVED_NAMES: Final = ("leases", "tmp", "lock")
_cache_folders: set[Path] = set()  # caches in use by this process


@dataclass(frozen=True)
class CacheConfig:
    """Where copies are kept, and how many bytes of them.

    max_bytes: the least recently used go when there are more, but for those in use.
    """

    folder: Path
    max_bytes: int = 20 * 10**9

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> CacheConfig:
        """Read REPLAYLAKE_CACHE, else XDG_CACHE_HOME; and REPLAYLAKE_CACHE_BYTES, such as 50GB.

        Raises: ConfigInvalidError.
        """
        home = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        folder = Path(environment.get("REPLAYLAKE_CACHE") or Path(home) / "replaylake").absolute()
        text = environment.get("REPLAYLAKE_CACHE_BYTES")
        return cls(folder, parse_bytes(text)) if text else cls(folder)


@dataclass(frozen=True)
class CacheTrimResult:
    """What a trim removed, and what is left."""

    num_files: int
    num_bytes: int
    bytes_left: int
    bytes_in_use: int


def parse_bytes(text: str) -> int:
    """Return the bytes that `20GB`, `500 MB` or `1000` stand for. Raises: ConfigInvalidError."""
    number = text.strip().upper()
    unit = next((u for u in ("KB", "MB", "GB", "TB") if number.endswith(u)), "")
    digits = number.removesuffix(unit).strip()
    if not (digits.isascii() and digits.isdecimal()):
        raise ConfigInvalidError(
            f"REPLAYLAKE_CACHE_BYTES: found {text!r}, expected a number of bytes such as 20GB."
        )
    return int(digits) * _UNITS[unit]


def is_copy(path: Path) -> bool:
    """Whether a path lies in a cache that this process uses, and may so be gone another day."""
    return any(path.is_relative_to(home) for home in _cache_folders)


def discard_copy(path: Path) -> bool:
    """Remove a file that was found damaged, if it is a copy; returns whether it is one."""
    if is_copy(path):
        path.unlink(missing_ok=True)
        return True
    return False


def trim_cache(max_bytes: int | None = None) -> CacheTrimResult:
    """Remove the least recently used copies of all lakes until they fit into `max_bytes`.

    By default into the cap that the environment names. Raises: StorageError.
    """
    config = CacheConfig.from_environment(os.environ)
    return _trim(config.folder, config.max_bytes if max_bytes is None else max_bytes)


class ShardCache:
    """The copies of one lake. Safe for threads, and for several processes at once."""

    def __init__(self, config: CacheConfig, lake: str) -> None:
        """Use the folder `lake`, a plain name, in the cache."""
        self.config = config
        self.folder = config.folder / lake
        _cache_folders.add(config.folder)
        self._lock = threading.Lock()
        self._unseen_bytes = config.max_bytes  # copied since the cache was measured; at first: do

    def fetch(self, blobs: Sequence[Blob], copy: Callable[[Blob, Path], None]) -> list[Path]:
        """Return files that hold the blobs, those that are not here copied side by side.

        `copy` writes a blob to a new file and raises where it is not what was asked for. Raises:
        what it raises, StorageError; no half of a copy is ever found by its name.
        """
        paths = [self.folder / blob.path for blob in blobs]
        home = self.config.folder
        with _translate_os_errors(home):
            _make_folders(home)
            with lock_cache(home, exclusive=False):
                lease = get_process_lease(home)
                lease.add(paths)
                # A set: the same blob may be asked for twice.
                missing = {
                    b.path: b
                    for b, p in zip(blobs, paths, strict=True)
                    if not _touch_if_present(p, b)
                }
        try:
            self._copy_all(list(missing.values()), copy)
        except BaseException:
            lease.remove(paths)
            raise
        return paths

    def release(self, blobs: Iterable[Blob]) -> None:
        """Let go of what `fetch` returned."""
        home = self.config.folder
        if not home.is_dir():
            return
        with _translate_os_errors(home), lock_cache(home, exclusive=False):
            get_process_lease(home).remove([self.folder / blob.path for blob in blobs])

    def forget(self, paths: Iterable[str]) -> None:
        """Remove copies, even those in use."""
        home = self.config.folder
        if not home.is_dir():
            return
        with _translate_os_errors(home), lock_cache(home, exclusive=True):
            for path in paths:
                (self.folder / path).unlink(missing_ok=True)

    def _copy_all(self, blobs: list[Blob], copy: Callable[[Blob, Path], None]) -> None:
        if not blobs:
            return
        if len(blobs) == 1:
            num_bytes = self._copy(blobs[0], copy)
        else:
            with ThreadPoolExecutor(min(len(blobs), PARALLEL_REQUESTS)) as pool:
                running = [pool.submit(self._copy, blob, copy) for blob in blobs]
                try:
                    num_bytes = sum(future.result() for future in running)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
        # Measuring takes a walk over all copies, so not after every one.
        with self._lock:
            self._unseen_bytes += num_bytes
            is_due = self._unseen_bytes >= self.config.max_bytes // 50
            self._unseen_bytes = 0 if is_due else self._unseen_bytes
        if is_due:
            _trim(self.config.folder, self.config.max_bytes)

    def _copy(self, blob: Blob, copy: Callable[[Blob, Path], None]) -> int:
        temporary = self.config.folder / "tmp" / new_ulid()
        target = self.folder / blob.path
        try:
            with _translate_os_errors(self.config.folder):
                copy(blob, temporary)
                target.parent.mkdir(parents=True, exist_ok=True)
                num_bytes = temporary.stat().st_size
                os.replace(temporary, target)
                return num_bytes
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _trim(home: Path, max_bytes: int) -> CacheTrimResult:
    if not home.is_dir():
        return CacheTrimResult(0, 0, 0, 0)
    now = time.time()
    with _translate_os_errors(home):
        _make_folders(home)
        with lock_cache(home, exclusive=True):
            leased = collect_leased_names(home)
            copies = sorted(_copies(home))
            total = sum(size for _, size, _ in copies)
            num_files = num_bytes = in_use = 0
            for used_s, size, name in copies:
                if name in leased and now - used_s < _IN_USE_S:
                    in_use += size
                elif total - num_bytes > max_bytes:
                    (home / name).unlink(missing_ok=True)
                    num_files, num_bytes = num_files + 1, num_bytes + size
            for path in (home / "tmp").iterdir():
                with suppress(FileNotFoundError):
                    if now - path.stat().st_mtime > _ABANDONED_S:
                        path.unlink()
    return CacheTrimResult(num_files, num_bytes, total - num_bytes, in_use)


def _copies(home: Path) -> Iterator[tuple[float, int, str]]:
    """Yield (time of last use, bytes, name) of each copy."""
    for parent, folders, files in os.walk(home):
        if parent == str(home):
            folders[:] = [name for name in folders if name not in _RESERVED_NAMES]
            continue
        for file in files:
            path = os.path.join(parent, file)
            with suppress(FileNotFoundError):
                stat = os.stat(path)
                yield stat.st_mtime, stat.st_size, os.path.relpath(path, home)


def _touch_if_present(path: Path, blob: Blob) -> bool:
    """Whether the copy is here, as long as it should be; marks it as used now."""
    try:
        if blob.size_bytes not in (-1, path.stat().st_size):
            return False
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _make_folders(home: Path) -> None:
    for name in ("leases", "tmp"):
        (home / name).mkdir(parents=True, exist_ok=True, mode=0o700)


@contextmanager
def _translate_os_errors(home: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cache {home}: {error.strerror or error}, expected to keep copies of a remote lake's "
            "files there. Free disk space, or name another folder with REPLAYLAKE_CACHE."
        ) from error


@contextmanager
def lock_cache(home: Path, *, exclusive: bool) -> Iterator[None]:
    """Hold the cache's lock: shared to look copies up, exclusive to choose some to remove."""
    fd = os.open(home / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


class CacheLease:
    """The names that this process may still read, in a file that it holds while it lives."""

    def __init__(self, home: Path) -> None:
        self._folder = home
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        path = home / "leases" / new_ulid()
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_RDWR, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def add(self, paths: Iterable[Path]) -> None:
        with self._lock:
            names = [str(path.relative_to(self._folder)) for path in paths]
            self._write("+", [name for name in dict.fromkeys(names) if not self._counts[name]])
            self._counts.update(names)

    def remove(self, paths: Iterable[Path]) -> None:
        with self._lock:
            removed = []
            for path in paths:
                name = str(path.relative_to(self._folder))
                if name in self._counts:
                    self._counts[name] -= 1
                    if self._counts[name] <= 0:
                        del self._counts[name]
                        removed.append(name)
            if self._counts:
                self._write("-", removed)
            elif removed:
                # Or the file would grow for as long as the process lives.
                os.ftruncate(self._fd, 0)

    def _write(self, sign: str, names: list[str]) -> None:
        if names:
            os.write(self._fd, "".join(f"{sign}{name}\n" for name in names).encode())


_leases: dict[tuple[Path, int], CacheLease] = {}
_leases_lock = threading.Lock()


def get_process_lease(home: Path) -> CacheLease:
    """Return this process's lease; call it with the cache locked, since the first call makes it."""
    # A forked child has a lease of its own: what it lets go of, its parent may still read.
    key = (home, os.getpid())
    with _leases_lock:
        if (lease := _leases.get(key)) is None:
            lease = _leases[key] = CacheLease(home)
        return lease


def collect_leased_names(home: Path) -> set[str]:
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
