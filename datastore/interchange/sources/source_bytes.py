"""Stored: where a source file's bytes lie, and how to read them from there."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, Final

from replaylake.datastore.errors import SourceInvalidError, StorageError
from replaylake.datastore.interchange.sources.archive import Archive, is_zip
from replaylake.datastore.interchange.sources.compression import (
    HEAD_BYTES,
    detect_compression,
    open_unpacked,
    strip_suffix,
)
from replaylake.datastore.interchange.sources.source_errors import changed_error, unreadable_error
from replaylake.datastore.interchange.sources.temporary_files import new_file

_COPY_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class SourceBytes:
    """A file on this machine, or a member of a zip; either may be packed on its own besides.

    path: of the file that is on the disk. num_bytes, modified_ns: its own, when it was looked at.
    """

    path: Path
    num_bytes: int
    modified_ns: int
    archive: Archive | None = field(default=None, compare=False, repr=False)
    member: str | None = None
    packing: str | None = None

    @property
    def is_packed(self) -> bool:
        """Whether the bytes are not those of the file on the disk."""
        return self.archive is not None or self.packing is not None

    def open(self, name: str) -> BinaryIO:
        """Open the unpacked bytes for reading in order; messages call the file `name`.

        Raises: SourceInvalidError, here or while it is read.
        """
        if self.archive is None or self.member is None:
            stored, num_stored = self._open_file(name), None
        else:
            num_stored = self.archive.num_stored(self.member)
            stored = self.archive.open(self.member)
        return (
            stored
            if self.packing is None
            else open_unpacked(self.packing, stored, name, num_stored)
        )

    def unpack(self, name: str) -> Path:
        """Write the unpacked bytes to a temporary file.

        Raises: SourceInvalidError, StorageError.
        """
        try:
            descriptor, path = new_file(Path(strip_suffix(self.member or self.path.name)).suffix)
            with self.open(name) as stream, os.fdopen(descriptor, "wb") as file:
                while block := stream.read(_COPY_BYTES):
                    file.write(block)
        except OSError as error:
            raise StorageError(
                f"{name}: could not be unpacked to a temporary file ({error}), expected enough "
                "space. Set TMPDIR to a folder with more space, or unpack it yourself."
            ) from error
        return path

    def check_unchanged(self, name: str) -> None:
        """Refuse a file that was written to since it was looked at. Raises: SourceInvalidError."""
        stat = _stat(self.path, name)
        if (stat.st_size, stat.st_mtime_ns) != (self.num_bytes, self.modified_ns):
            raise changed_error(name)

    def _open_file(self, name: str) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise unreadable_error(name, error) from error


def find_source_bytes(path: Path, name: str) -> dict[str, SourceBytes]:
    """Return what lies in a file: the file itself under "", or the members of a zip by their paths.

    A zip that numpy.savez or torch.save wrote is a file. Raises: SourceInvalidError for a file that
    cannot be read, and for a zip that is torn, not safe, or holds another one.
    """
    stat = _stat(path, name)
    if not S_ISREG(stat.st_mode):
        raise SourceInvalidError(
            f"{name}: found a pipe or device, expected a file, because it is read more than "
            "once. Pipe "
            "into `replaylake ingest -` instead."
        )
    plain = SourceBytes(path, stat.st_size, stat.st_mtime_ns)
    head = _head(plain, name)
    if is_zip(head):
        archive = Archive(path, name)
        if not archive.is_file:
            return {
                member: _member(
                    SourceBytes(path, stat.st_size, stat.st_mtime_ns, archive, member), name
                )
                for member in archive.paths
            }
    return {"": _with_packing(plain, head)}


def _member(stored: SourceBytes, name: str) -> SourceBytes:
    head = _head(stored, f"{name}/{stored.member}")
    archive, member = stored.archive, stored.member
    if is_zip(head) and archive is not None and member and not archive.has_file(member):
        raise SourceInvalidError(
            f"{name}/{member}: found a zip inside a zip, expected files. Unpack the outer one."
        )
    return _with_packing(stored, head)


def _with_packing(stored: SourceBytes, head: bytes) -> SourceBytes:
    return SourceBytes(
        stored.path,
        stored.num_bytes,
        stored.modified_ns,
        stored.archive,
        stored.member,
        detect_compression(head),
    )


def _head(stored: SourceBytes, name: str) -> bytes:
    try:
        with stored.open(name) as stream:
            return stream.read(HEAD_BYTES)
    except OSError as error:
        raise unreadable_error(name, error) from error


def _stat(path: Path, name: str) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise unreadable_error(name, error) from error
