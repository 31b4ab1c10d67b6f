"""Compression: a file stored as gzip, bzip2 or Zstandard, told by its bytes, read as it unpacks.

Nothing is unpacked to the disk here, and memory holds a block, whatever the file would unpack to;
and formats refuse by the same limits what a small file of theirs may unpack to.
"""

from __future__ import annotations

import bz2
import gzip
import io
import re
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Final, cast

import pyarrow as pa

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.sources.source_errors import unreadable_error

HEAD_BYTES: Final = 16
# What a small file may unpack to.
MAX_UNPACKED_BYTES: Final = 1 << 30
MAX_RATIO: Final = 1000
# Whole headers, and not the two bytes that name the kind: the length in front of a TFRecord's first
# record may be those.
_MAGIC: Final = {
    "gz": re.compile(rb"\x1f\x8b\x08[\x00-\x1f]....[\x00\x02\x04]", re.DOTALL),
    "bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)"),
    "zst": re.compile(rb"\x28\xb5\x2f\xfd"),
}
_SUFFIXES: Final = re.compile(r"\.(gz|gzip|bz2|zst|zstd)$", re.IGNORECASE)
_BUFFER_BYTES: Final = 1 << 20
# What these libraries raise for bytes that are not theirs.
UNPACKING_ERRORS: Final = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    NotImplementedError,
    zlib.error,
    zipfile.BadZipFile,
    pa.ArrowException,
)


def detect_compression(head: bytes) -> str | None:
    """Return gz, bz2 or zst, or None for a file that is as it is."""
    return next((kind for kind, magic in _MAGIC.items() if magic.match(head)), None)


def strip_suffix(name: str) -> str:
    """Return what a packed file's name is without the packing's suffix."""
    return _SUFFIXES.sub("", name)


def open_unpacked(packing: str, stored: BinaryIO, name: str, num_stored: int | None) -> BinaryIO:
    """Return what a packed stream unpacks to, for reading in order; closing it closes `stored`.

    `num_stored` is how much the disk holds of it where `stored` is itself unpacked. Reading raises
    SourceInvalidError naming the file if the stream is torn, or unpacks to far more than was read
    of it.
    """

    def read_so_far() -> int:
        read = stored.tell()
        return read if num_stored is None else min(read, num_stored)

    try:
        return guard_stream(_decoder(packing, stored), name, read_so_far, stored)
    except UNPACKING_ERRORS as error:
        stored.close()
        raise unreadable_error(name, error) from error


def guard_stream(
    inner: Any, name: str, stored: Callable[[], int], beneath: BinaryIO | None = None
) -> BinaryIO:
    """Return `inner` buffered, its errors as SourceInvalidError and its bytes within a limit.

    Closing it closes `inner` and what is `beneath`.
    """
    raw = _GuardedStream(inner, name, stored, beneath)
    return cast(BinaryIO, io.BufferedReader(raw, _BUFFER_BYTES))


def _decoder(packing: str, stored: BinaryIO) -> Any:
    if packing == "gz":
        return gzip.GzipFile(fileobj=stored, mode="rb")
    if packing == "bz2":
        return bz2.BZ2File(stored)
    return pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), "zstd")


class _GuardedStream(io.RawIOBase):
    def __init__(
        self, inner: Any, name: str, stored: Callable[[], int], beneath: BinaryIO | None
    ) -> None:
        self._inner = inner
        self._name = name
        self._stored = stored
        self._beneath = beneath
        self._count = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._count

    def readinto(self, buffer: Any) -> int:
        try:
            num = int(self._inner.readinto(buffer))
        except SourceInvalidError:
            raise
        except UNPACKING_ERRORS as error:
            raise unreadable_error(self._name, error) from error
        self._count += num
        if self._count > MAX_UNPACKED_BYTES:
            refuse_bomb(self._name, self._count, self._stored())
        return num

    def close(self) -> None:
        if not self.closed:
            self._inner.close()
            if self._beneath is not None:
                self._beneath.close()
        super().close()


def refuse_bomb(
    name: str, declared_bytes: int, stored_bytes: int, max_bytes: int = MAX_UNPACKED_BYTES
) -> None:
    """Refuse what would unpack to more than `max_bytes` and more than 1000 times its stored size.

    `name` is the file's in messages; `declared_bytes` what it says, or was counted, to unpack to.
    Raises: SourceInvalidError.
    """
    if declared_bytes > max_bytes and declared_bytes > MAX_RATIO * stored_bytes:
        raise SourceInvalidError(
            f"{name}: {stored_bytes:,} stored bytes unpack to {declared_bytes:,} or more, expected "
            f"at most {MAX_RATIO} times as many or {max_bytes:,}. If the data is "
            "correct, unpack it yourself and pass its contents."
        )
