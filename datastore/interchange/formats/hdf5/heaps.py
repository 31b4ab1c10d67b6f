"""HDF5's global heaps, where values of variable length lie: checked before libhdf5 reads them.

libhdf5 2.0 walks a heap by the sizes that its objects declare, and never returns from one whose
free space declares none (found by altering bytes). Format: HDF5 File Format Specification 3.0,
section III.E.
"""

from __future__ import annotations

import mmap
import struct
from typing import Final

from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.interchange.sources.source import SourceFile

_SIGNATURE: Final = b"GCOL\x01"
_HEADER_BYTES: Final = 16
_OBJECT: Final = struct.Struct("<HHIQ")


def check_heaps(file: SourceFile) -> None:
    """Refuse a file with a heap whose objects do not fill it.

    Cost: a pass over the file's bytes. Raises: SourceInvalid.
    """
    with file.path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as raw:
        if not _has_long_sizes(raw):
            raise _torn(file, 0, "sizes of other than 8 bytes")
        at = raw.find(_SIGNATURE)
        while at >= 0:
            if (wrong := _wrong(raw, at)) is not None:
                raise _torn(file, at, wrong)
            at = raw.find(_SIGNATURE, at + len(_SIGNATURE))


def _has_long_sizes(raw: mmap.mmap) -> bool:
    """Whether offsets and lengths have 8 bytes, by the superblock, as every writer today has it."""
    at = 13 if raw[8] < 2 else 9
    return raw[at] == raw[at + 1] == 8


def _wrong(raw: mmap.mmap, heap: int) -> str | None:
    if heap + _HEADER_BYTES > len(raw):
        return "no header"
    size = struct.unpack_from("<Q", raw, heap + 8)[0]
    if heap + size > len(raw):
        return f"{size} bytes declared"
    at = _HEADER_BYTES
    # What is left at the end may be too little for an object.
    while size - at >= _OBJECT.size:
        index, _, _, num_bytes = _OBJECT.unpack_from(raw, heap + at)
        # Object 0 is the free space, whose size is with its header.
        needed = num_bytes if index == 0 else _OBJECT.size + -(-num_bytes // 8) * 8
        if not _OBJECT.size <= needed <= size - at:
            return f"an object of {num_bytes} bytes"
        at += needed
    return None


def _torn(file: SourceFile, at: int, found: str) -> SourceInvalid:
    return SourceInvalid(
        f"{file.name}: the heap of values of variable length at byte {at} has {found}, expected "
        "objects that fill it. The file may be torn: copy or write it again."
    )
