"""Arrays of npz files: headers, then rows in order, straight from the zip's members.

Nothing is unpickled: an array of Python objects is known by its header and not read. No length
that a header declares is allocated before its bytes are there.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from tokenize import TokenError
from typing import Any, BinaryIO, Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.sources.archive import Archive
from replaylake.datastore.interchange.sources.source import SourceFile

_SUFFIX: Final = ".npy"
_HEADERS: Final[dict[tuple[int, int], Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# What numpy raises for bytes that are no header: it parses them as Python's literals.
_HEADER_ERRORS: Final = (
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TokenError,
    TypeError,
    ValueError,
)
_READ_BYTES: Final = 16 << 20
# Columns in Fortran order lie apart, row by row: such an array is read as a whole.
_MAX_WHOLE_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class NpzArray:
    """One array, by its header."""

    file: SourceFile
    archive: Archive
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def unread_reason(self) -> str | None:
        """Why it is no column of numbers, flags or texts; None if it is one."""
        if self.dtype.hasobject:
            return "pickled Python objects"
        if self.dtype.kind not in "fiubU" or not self.dtype.itemsize:
            return f"dtype {self.dtype}"
        if not self.shape:
            return "a single value"
        return None

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    def rows(self) -> NpzRows:
        """Open it for reading. Raises: SourceInvalidError."""
        return NpzRows(self)

    def read_all(self) -> Array:
        """Return all rows. Raises: SourceInvalidError."""
        return self.rows().take(len(self))


class NpzRows:
    """The rows of one array, read in order."""

    def __init__(self, array: NpzArray) -> None:
        self._array = array
        self._stream = array.archive.open(array.name + _SUFFIX)
        _header(self._stream, array.file, array.name)
        self._transposed: Array | None = self._read_transposed() if array.is_fortran else None
        self._at = 0

    def take(self, num: int) -> Array:
        """Return the next rows [num, ...]. Raises: SourceInvalidError if the file ends before."""
        start, self._at = self._at, self._at + num
        if self._transposed is not None:
            return self._transposed[start : self._at]
        rows = self._read((num, *self._array.shape[1:]))
        if self._at >= len(self._array):
            self._check_end()
        return rows

    def _check_end(self) -> None:
        if self._stream.read(1):
            array = self._array
            raise SourceInvalidError(
                f"{array.file.name}: array {array.name!r} continues after its last row, expected "
                f"{array.shape} of {array.dtype}. Save it again, or leave the file out."
            )

    def _read_transposed(self) -> Array | None:
        array = self._array
        if len(array.shape) < 2:
            return None
        if array.row_bytes * len(array) > _MAX_WHOLE_BYTES:
            raise SourceInvalidError(
                f"{array.file.name}: array {array.name!r} is in Fortran order, found "
                f"{array.row_bytes * len(array):,} bytes, expected at most {_MAX_WHOLE_BYTES:,}. "
                "Save it in C order (numpy.ascontiguousarray)."
            )
        rows = np.ascontiguousarray(self._read(array.shape[::-1]).T)
        self._check_end()
        return rows

    def _read(self, shape: tuple[int, ...]) -> Array:
        array = self._array
        expected = array.dtype.itemsize * math.prod(shape)
        data = _read_up_to(self._stream, expected)
        if len(data) < expected:
            raise SourceInvalidError(
                f"{array.file.name}: array {array.name!r} ends before its last row, expected "
                f"{array.shape} of {array.dtype}. It may be damaged: save it again, or leave it "
                "out."
            )
        flat = np.frombuffer(data, array.dtype) if expected else np.empty(0, array.dtype)
        return flat.reshape(shape).astype(array.dtype.newbyteorder("="), copy=False)


def npz_arrays(file: SourceFile) -> dict[str, NpzArray]:
    """Return a file's arrays by name, in its order. Raises: SourceInvalidError."""
    file.check_unchanged()
    archive = Archive(file.path, file.name)
    arrays = {}
    for path in archive.paths:
        if not path.endswith(_SUFFIX):
            raise SourceInvalidError(
                f"{file.name}: found {path!r} in it, expected arrays alone, as numpy.savez writes "
                "them. Unpack it and pass its contents."
            )
        name = path.removesuffix(_SUFFIX)
        with archive.open(path) as stream:
            dtype, shape, is_fortran = _header(stream, file, name)
        arrays[name] = NpzArray(file, archive, name, dtype, shape, is_fortran)
    return arrays


def _read_up_to(stream: BinaryIO, num_bytes: int) -> bytes:
    """Read so many bytes, or what is there; more than a block is not asked for at once."""
    parts = []
    while num_bytes and (part := stream.read(min(num_bytes, _READ_BYTES))):
        parts.append(part)
        num_bytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _header(
    stream: BinaryIO, file: SourceFile, name: str
) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Read a header. numpy parses it as a literal: nothing in it is run."""
    try:
        version = np.lib.format.read_magic(stream)
        if version not in _HEADERS:
            raise ValueError(f"version {version}")
        with warnings.catch_warnings():
            # Of files from Python 2, which are read all the same.
            warnings.simplefilter("ignore")
            shape, is_fortran, dtype = _HEADERS[version](stream)
        if any(size < 0 for size in shape):
            raise ValueError(f"shape {shape}")
    except _HEADER_ERRORS as error:
        reason = " ".join(str(error).split())[:200]
        raise SourceInvalidError(
            f"{file.name}: array {name!r} has no header of numpy's ({reason}), expected one "
            "as numpy.savez writes it. Save it again, or leave it out."
        ) from error
    return dtype, shape, is_fortran
