"""Archive: a zip whose members are read as if they were the files of a folder."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.sources.compression import (
    UNPACKING_ERRORS,
    guard_stream,
    refuse_bomb,
)
from replaylake.datastore.interchange.sources.source_errors import unreadable_error

_MAGIC: Final = (b"PK\x03\x04", b"PK\x05\x06")
_ENCRYPTED: Final = 0x1
# The others' decoders unpack a block as a whole, whatever it holds: some gigabytes of few bytes.
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class Archive:
    """A zip, open as long as this object is there; its members were checked."""

    def __init__(self, path: Path, name: str) -> None:
        """Open a zip. Raises: SourceInvalidError for one that is torn, or not safe to read."""
        self.path = path
        self.name = name
        try:
            # Open until nobody has it any more: a directory of many members is read once.
            self._zip = zipfile.ZipFile(path)
            size = path.stat().st_size
        except UNPACKING_ERRORS as error:
            raise unreadable_error(name, error) from error
        # Not `is_dir`, which fails for a member whose name is empty.
        infos = [info for info in self._zip.infolist() if not info.filename.endswith("/")]
        for info in infos:
            _check(info, name)
        _check_distinct(infos, name)
        # Members may share their bytes: the sum is what counts then.
        refuse_bomb(name, sum(info.file_size for info in infos), size)
        self._infos = {_path(info): info for info in infos}

    @property
    def paths(self) -> Sequence[str]:
        """The members' paths, with `/`; no folders."""
        return tuple(self._infos)

    @property
    def is_file(self) -> bool:
        """Whether it is one file that numpy.savez or torch.save wrote, and not a folder."""
        return _is_one_file([*self._infos])

    def num_stored(self, path: str) -> int:
        """Return the bytes that a member has in the archive."""
        return self._infos[path].compress_size

    def open(self, path: str) -> BinaryIO:
        """Open a member for reading in order. Raises: SourceInvalidError, also as it is read."""
        info = self._infos[path]
        name = f"{self.name}/{path}"
        try:
            # It ends at the declared size, and its checksum is held against what was read.
            return guard_stream(self._zip.open(info), name, lambda: info.compress_size)
        except UNPACKING_ERRORS as error:
            raise unreadable_error(name, error) from error

    def has_file(self, path: str) -> bool:
        """Whether a member that is a zip is one file, as `is_file`; False for any other zip."""
        try:
            with self._zip.open(self._infos[path]) as stream, zipfile.ZipFile(stream) as inner:
                names = inner.namelist()
        except UNPACKING_ERRORS as error:
            raise unreadable_error(f"{self.name}/{path}", error) from error
        return _is_one_file(names)


def _is_one_file(names: Sequence[str]) -> bool:
    is_arrays = bool(names) and all(name.endswith(".npy") for name in names)
    # torch.save writes all members below one folder.
    tops = {name.partition("/")[0] for name in names}
    is_tensors = len(tops) == 1 and {f"{top}/data.pkl" for top in tops} <= {*names}
    return is_arrays or is_tensors


def is_zip(head: bytes) -> bool:
    """Whether a file begins as a zip does."""
    return head.startswith(_MAGIC)


def _path(info: zipfile.ZipInfo) -> str:
    return info.filename.replace("\\", "/")


def _check(info: zipfile.ZipInfo, name: str) -> None:
    path = _path(info)
    found = None
    if not path:
        found, expected = "no name", "the path of a file"
    elif path.startswith("/") or path[1:2] == ":" or ".." in path.split("/"):
        found, expected = "a path that leads out of the archive", "paths inside it"
    elif stat.S_ISLNK(info.external_attr >> 16):
        found, expected = "a symbolic link", "files"
    elif info.flag_bits & _ENCRYPTED:
        found, expected = "an encrypted member", "one that can be read without a password"
    elif info.compress_type not in _METHODS:
        found, expected = f"compression method {info.compress_type}", "deflated or stored members"
    if found is not None:
        raise SourceInvalidError(
            f"{name}: member {info.filename!r}: found {found}, expected {expected}. None of it was "
            "read: unpack it yourself, or zip it again."
        )
    refuse_bomb(f"{name}/{path}", info.file_size, info.compress_size)


def _check_distinct(infos: Sequence[zipfile.ZipInfo], name: str) -> None:
    seen = set()
    for info in infos:
        path = _path(info)
        if path in seen:
            raise SourceInvalidError(
                f"{name}: found the member {path!r} twice, expected each name once, because it is "
                "ambiguous. Zip it again."
            )
        seen.add(path)
