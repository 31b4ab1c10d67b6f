"""Source files: found, put in order, and known by the sha256 of their bytes.

A packed file (a member of a zip; gz, bz2, zst) is the file that it unpacks to: hash, size and bytes
are those of what is inside, so the same logs packed and unpacked are one source.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Final

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.sources.search import FileSearch, FoundFile, short_names
from replaylake.datastore.interchange.sources.source_bytes import SourceBytes
from replaylake.datastore.interchange.sources.source_errors import unreadable_error

_READ_BYTES: Final = 1 << 20
OnBytes = Callable[[int, int | None], None]


@dataclass(frozen=True)
class SourceFile:
    """One file as it was when its sha256 was taken.

    `open` is for readers that go from start to end, `path` for those that jump about in a file.
    `name` is how messages call it, `relative` where it lies in the folder that was named, with `/`;
    a file that was named itself has its name there, and a packed one is without the packing's
    suffix. `num_bytes` and `sha256` are of the unpacked bytes.
    """

    stored: SourceBytes
    name: str
    relative: str
    num_bytes: int
    sha256: str

    @property
    def base_name(self) -> str:
        """The file's name without its folders."""
        return self.relative.rpartition("/")[2]

    @cached_property
    def path(self) -> Path:
        """Where the bytes lie on this machine.

        A packed file is unpacked on first use, to a temporary file that is there as long as this
        object is. Raises: SourceInvalidError, StorageError.
        """
        if not self.stored.is_packed:
            return self.stored.path
        path = self.stored.unpack(self.name)
        weakref.finalize(self, path.unlink, missing_ok=True)
        return path

    def head(self, num_bytes: int) -> bytes:
        """Return the first bytes. Raises: SourceInvalidError if the file cannot be read."""
        try:
            with self.open() as stream:
                return stream.read(num_bytes)
        except OSError as error:
            raise unreadable_error(self.name, error) from error

    def open(self) -> BinaryIO:
        """Open the bytes for reading in order, unpacked as they are read; nothing is written.

        Only a file that is not packed can be read from elsewhere than its start. Raises:
        SourceInvalidError, here or while it is read.
        """
        return self.stored.open(self.name)

    def check_unchanged(self) -> None:
        """Refuse a file that was written to after it was hashed. Raises: SourceInvalidError."""
        self.stored.check_unchanged(self.name)


OnRows = Callable[[SourceFile, int, int], None]


@dataclass(frozen=True)
class Source:
    """Distinct files in reading order; `content_hash` covers their bytes and order, no names.

    `repeated` are further files of the same bytes as one of them, under the first one's path.
    `references` are the relative paths of video files, which are neither read nor hashed.
    """

    files: tuple[SourceFile, ...]
    content_hash: str
    notes: tuple[str, ...] = ()
    repeated: tuple[SourceFile, ...] = ()
    references: tuple[str, ...] = ()


def find_source(given: Sequence[Path | str], on_bytes: OnBytes | None = None) -> Source:
    """Collect files in the natural order of their paths, and hash them.

    `given` are files, folders (walked), patterns such as `logs/**/*.csv`, zips, which count as
    folders, and `-` for standard input. Any file may be packed as gz, bz2 or zst. A file given
    twice is one file; a second file of the same bytes is `repeated`. `on_bytes` is called with how
    much of the files was hashed, of how much; the latter is None where one is packed. Cost: one
    pass over the bytes.

    Raises: NotFoundError if a path does not exist, SourceInvalidError if there is no file, one is
    empty, unreadable or not safe to unpack, StorageError if standard input does not fit on the
    disk.
    """
    search = FileSearch()
    for path in given:
        search.add(path)
    files = list(search.iter_ordered())
    if not files:
        videos = f" (but {len(search.references)} video files)" if search.references else ""
        raise SourceInvalidError(
            f"{', '.join(map(str, given))}: found no data file{videos}, expected at least one. "
            "Pass files, or a folder of them."
        )
    return _hash_files(files, search, on_bytes)


def _hash_files(found: Sequence[FoundFile], search: FileSearch, on_bytes: OnBytes | None) -> Source:
    files: dict[str, SourceFile] = {}
    notes, repeated = [], []
    is_packed = any(one.stored.is_packed for one in found)
    total = None if is_packed else sum(one.stored.num_bytes for one in found)
    num_hashed = 0

    def told(num_bytes: int) -> None:
        nonlocal num_hashed
        num_hashed += num_bytes
        if on_bytes is not None:
            on_bytes(num_hashed, total)

    if search.skipped:
        notes.append(f"skipped by name: {', '.join(sorted(set(search.skipped))[:10])}")
    if search.references:
        notes.append(f"{len(search.references)} video files kept as references: not read")
    for one, name in zip(found, short_names(found), strict=True):
        file = _hash(one, name, told)
        if file.num_bytes == 0:
            raise SourceInvalidError(f"{name}: found 0 bytes, expected data. Leave the file out.")
        if (first := files.setdefault(file.sha256, file)) is not file:
            repeated.append(first)
            notes.append(f"{name} holds the same bytes as {first.name}: committed once")
    joined = hashlib.sha256("".join(files).encode()).hexdigest()
    return Source(
        tuple(files.values()), joined, tuple(notes), tuple(repeated), tuple(search.references)
    )


def _hash(found: FoundFile, name: str, on_bytes: Callable[[int], None]) -> SourceFile:
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with found.stored.open(name) as stream:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
                num_bytes += len(block)
                on_bytes(len(block))
    except OSError as error:
        raise unreadable_error(name, error) from error
    return SourceFile(found.stored, name, found.relative, num_bytes, digest.hexdigest())
