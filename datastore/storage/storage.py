"""Storage: the few file operations that the store is built on, durable before they return.

Paths are relative to the lake's root, with `/`. A folder is one storage (here), a prefix of an
object store another (object_storage.py); locations.py tells them apart by the lake's URL.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from replaylake.datastore.errors import InvalidNameError, StorageError, TransientStorageError
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.spans import span

# Of a full disk, or a quota that is used up: it may have room again.
_DISK_FULL_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class StoredFile:
    """A blob as a listing names it: its path from the lake's root, bytes, last change (ms)."""

    path: str
    size_bytes: int
    modified_ms: int


@dataclass(frozen=True)
class Blob:
    """A blob that is never written again, as the log describes it.

    size_bytes is -1 and sha256 empty where they are not known; a copy is checked against what is.
    """

    path: str
    size_bytes: int = -1
    sha256: str = ""


class Storage(Protocol):
    """Named blobs."""

    @property
    def url(self) -> str:
        """What people call the root: a folder, or such as s3://bucket/prefix."""
        ...

    @property
    def is_metered(self) -> bool:
        """Whether each operation is a request: slow, paid for, and best made many at once."""
        ...

    @property
    def shares_state(self) -> bool:
        """Whether all who open the lake have one `state_folder`; else each machine has its own."""
        ...

    def put(self, path: str, data: bytes | memoryview) -> None:
        """Write the whole blob durably; readers see all of it or none. Replaces an older one."""
        ...

    def put_if_absent(self, path: str, data: bytes, *, private: bool = False) -> bool:
        """Write the blob durably only if the name is free; False if it was taken.

        The bytes are such as no other writer would put there (a commit says who made it), so that
        those of a call whose reply was lost are known again. `private` keeps the blob from other
        users of the machine; who may read a bucket reads all of it.
        """
        ...

    def get(self, path: str) -> bytes | None:
        """Return the blob, or None if there is none."""
        ...

    def get_many(self, paths: Sequence[str]) -> list[bytes | None]:
        """Return blobs as `get` does, in the order of `paths`, read at the same time."""
        ...

    def read_ends(self, blobs: Sequence[Blob], num_bytes: int) -> list[bytes | None]:
        """Return the last bytes of blobs, or all of a shorter one; None if one is missing.

        Blobs are not cached and their sha256 is not checked.
        """
        ...

    def names(self, folder: str, *, after: str = "") -> list[str]:
        """Return the names directly under a folder, sorted; empty if it does not exist.

        With `after` only those that sort after it, which is all that an object store then lists.
        """
        ...

    def files(self, folder: str) -> Iterator[StoredFile]:
        """Yield every blob below a folder, at any depth; nothing if it does not exist."""
        ...

    def delete(self, paths: Iterable[str]) -> None:
        """Remove blobs durably; those that are not there are passed over."""
        ...

    def local(self, path: str) -> Path:
        """Return a local file that holds the blob, which is never written again."""
        ...

    def local_folder(self, path: str) -> Path | None:
        """Return the folder of this machine that is the lake's at `path`, "" for the whole lake.

        None where the lake is no folder of this machine.
        """
        ...

    def open_original(self, path: str) -> BinaryIO:
        """Open the blob as the lake has it, never a copy of this machine's.

        Raises: FileNotFoundError, OSError, StorageError.
        """
        ...

    def is_link(self, path: str) -> bool:
        """Whether a blob or folder is a symbolic link, which may lead out of the lake."""
        ...

    def fetch(self, blobs: Sequence[Blob]) -> list[Path]:
        """Return local files that hold the blobs, in their order; copies are made side by side.

        A copy is checked when it is made and stays while this process may need it. Raises:
        ShardCorruptError where there is no such blob to copy or its bytes are others.
        """
        ...

    def release(self, blobs: Sequence[Blob]) -> None:
        """Say that files which `fetch` returned are no longer needed; each as often as fetched."""
        ...

    def forget(self, paths: Iterable[str]) -> None:
        """Remove this machine's copies of blobs, even those in use; the blobs stay."""
        ...

    def trim_copies(self, max_bytes: int | None = None) -> None:
        """Remove the copies that were not used for longest until those of all lakes fit.

        By default into the cap that the environment names. Raises: StorageError.
        """
        ...

    def state_folder(self, path: str) -> Path:
        """Return where this machine keeps what cannot be a blob, such as a growing journal.

        It need not exist. In a lake that is a folder it is a folder of the lake.
        """
        ...


class LocalStorage:
    """A folder on a local file system that has atomic rename and hard links."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        # On the same file system as the data, so that rename and link are atomic.
        self._temporary = self.root / "_lake" / "tmp"
        self._inside: set[str] = set()

    @property
    def url(self) -> str:
        """The folder's absolute path."""
        return str(self.root)

    @property
    def is_metered(self) -> bool:
        return False

    @property
    def shares_state(self) -> bool:
        return True

    def put(self, path: str, data: bytes | memoryview) -> None:
        """Write a temporary, fsync it, rename it, fsync the folder."""
        target = self.local(path)
        with _translate_os_errors(target), self._write_temporary(data, 0o644) as temporary:
            make_folder(target.parent)
            os.replace(temporary, target)
            fsync_folder(target.parent)

    def put_if_absent(self, path: str, data: bytes, *, private: bool = False) -> bool:
        """Write a temporary, fsync it, link it to the name (fails if taken), fsync the folder."""
        target = self.local(path)
        with (
            _translate_os_errors(target),
            self._write_temporary(data, 0o600 if private else 0o644) as temporary,
        ):
            make_folder(target.parent)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            fsync_folder(target.parent)
        return True

    def get(self, path: str) -> bytes | None:
        """Return the bytes of the file, or None if there is none."""
        target = self.local(path)
        with _translate_os_errors(target):
            try:
                return target.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def get_many(self, paths: Sequence[str]) -> list[bytes | None]:
        """Read one after the other."""
        return [self.get(path) for path in paths]

    def read_ends(self, blobs: Sequence[Blob], num_bytes: int) -> list[bytes | None]:
        """Read the ends of files, one after the other."""
        return [self._read_end(blob, num_bytes) for blob in blobs]

    def _read_end(self, blob: Blob, num_bytes: int) -> bytes | None:
        target = self.local(blob.path)
        with _translate_os_errors(target):
            try:
                with target.open("rb") as file:
                    file.seek(max(0, blob.size_bytes - num_bytes))
                    return file.read(num_bytes)
            except FileNotFoundError:
                return None

    def names(self, folder: str, *, after: str = "") -> list[str]:
        """List a folder."""
        target = self.root / folder
        self._check_inside(str(target))
        with _translate_os_errors(target):
            try:
                return sorted(name for name in os.listdir(target) if name > after)
            except (FileNotFoundError, NotADirectoryError):
                return []

    def files(self, folder: str) -> Iterator[StoredFile]:
        """Walk a folder; links are not followed, and files that go meanwhile are passed over."""
        target = self.root / folder
        self._check_inside(str(target))
        with _translate_os_errors(target):
            for parent, _, names in os.walk(target):
                for name in sorted(names):
                    path = os.path.join(parent, name)
                    with suppress(FileNotFoundError):
                        stat = os.lstat(path)
                        where = os.path.relpath(path, self.root)
                        yield StoredFile(where, stat.st_size, stat.st_mtime_ns // 1_000_000)

    def delete(self, paths: Iterable[str]) -> None:
        """Unlink files and fsync the folders they were in."""
        folders = set()
        for path in paths:
            target = self.local(path)
            with _translate_os_errors(target):
                try:
                    target.unlink()
                except (FileNotFoundError, NotADirectoryError):
                    continue
                folders.add(target.parent)
        for parent in sorted(folders):
            with _translate_os_errors(parent):
                fsync_folder(parent)

    def local(self, path: str) -> Path:
        """Return the file itself. Raises: InvalidNameError if the path leads out of the lake."""
        # Texts, not Paths: 11 ms for a thousand shards in place of 13 (2 busy cores, 2026-11).
        target = os.path.join(self.root, path)
        self._check_inside(os.path.dirname(target))
        if os.path.islink(target):
            self._check_inside(target)
        return Path(target)

    def local_folder(self, path: str) -> Path | None:
        """Return the folder. Raises: InvalidNameError if the path leads out of the lake."""
        return self.local(path)

    def open_original(self, path: str) -> BinaryIO:
        """Open the file. Raises: FileNotFoundError, OSError, InvalidNameError."""
        return self.local(path).open("rb")

    def is_link(self, path: str) -> bool:
        return os.path.islink(self.root / path)

    def fetch(self, blobs: Sequence[Blob]) -> list[Path]:
        """Return the files themselves, unchecked: readers check what they read."""
        return [self.local(blob.path) for blob in blobs]

    def release(self, blobs: Sequence[Blob]) -> None:
        """Do nothing: there are no copies."""

    def forget(self, paths: Iterable[str]) -> None:
        """Do nothing: there are no copies."""

    def trim_copies(self, max_bytes: int | None = None) -> None:
        """Do nothing: there are no copies."""

    def state_folder(self, path: str) -> Path:
        """Return the folder of that name in the lake."""
        return self.local(path)

    def _check_inside(self, folder: str) -> None:
        if folder in self._inside:
            return
        root, real = os.path.realpath(self.root), os.path.realpath(folder)
        if os.path.commonpath([root, real]) != root:
            raise InvalidNameError(
                f"{folder}: leads to {real}, expected a folder inside of the lake {root}. Remove "
                "the link, and copy what it points at into the lake instead."
            )
        # Remembered once it exists: resolving costs a system call for every part of the path.
        if os.path.isdir(real):
            self._inside.add(folder)

    @contextmanager
    def _write_temporary(self, data: bytes | memoryview, mode: int) -> Iterator[Path]:
        make_folder(self._temporary)
        temporary = self._temporary / new_ulid()
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                with span("fsync"):
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            yield temporary
        finally:
            # What is left of it is in no reader's way, and must not hide how the write ended.
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextmanager
def _translate_os_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"{target}: {error.strerror or error}, expected to read or write it."
        if error.errno in _DISK_FULL_ERRNOS:
            raise TransientStorageError(
                f"{message} Free disk space; what was committed before stays, and is recognized."
            ) from error
        cure = (
            "Mount the file system for writing"
            if error.errno == errno.EROFS
            else "Free disk space or correct the permission"
        )
        raise StorageError(
            f"{message} {cure}, then run it again: what was committed before is recognized."
        ) from error


def make_folder(folder: Path) -> None:
    """Create a folder and make its name durable, those of new parents first."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_folder(folder.parent)


@contextmanager
def atomic_write(target: Path) -> Iterator[BinaryIO]:
    """Write a file of the user's beside its name and rename it: it is there whole, or as it was.

    Raises: StorageError.
    """
    temporary = target.with_name(f".{target.name}.{new_ulid()}")
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise StorageError(
            f"{target}: {error.strerror or error}. Nothing was written there; choose a path in "
            "a folder that exists, or make room."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with span("fsync"):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
