"""HDF5: opened, listed and read, as far as a stranger's file can be trusted.

The one home of h5py. What is opened is reached by hard links alone, lies in the file itself, holds
numbers, text or bytes, and is stored by the filters that come with h5py: external and soft links,
external storage, virtual datasets, references, opaque and compound types, and filters that HDF5
would load as plugins are refused. Nothing is unpickled.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ExtraMissingError, SourceInvalidError
from replaylake.datastore.interchange.sources.compression import refuse_bomb
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import unreadable_error

NUMBERS: Final = "numbers"
TEXT: Final = "text"
BYTES: Final = "bytes"

_MAGIC: Final = b"\x89HDF\r\n\x1a\n"
_FILTERS: Final = {1, 2, 3, 4, 5, 6, 32000}  # gzip, shuffle, fletcher32, szip, nbit, offset, lzf
# What h5py raises on damaged bytes, by where they are met.
_READ_ERRORS: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SystemError,
    TypeError,
    ValueError,
)
# Each value of variable length may be as long as the file: so many bytes of them at once.
_VARIABLE_BYTES: Final = 256 << 20
_VARIABLE_ROWS: Final = 4096
_SIGNATURE: Final = b"GCOL\x01"
_HEADER_BYTES: Final = 16
_OBJECT: Final = struct.Struct("<HHIQ")


def is_hdf5(file: SourceFile) -> bool:
    """Whether the file begins as HDF5 does; a torn one still does."""
    return file.head(len(_MAGIC)) == _MAGIC


class Hdf5Array:
    """A dataset of a file, opened: its declared shape and what it holds, nothing read yet.

    `kind` is NUMBERS, TEXT, BYTES (of any length each), or the name of a type that is not read.
    `row_bytes` are those of one row's numbers.
    """

    def __init__(
        self, file: SourceFile, path: str, dataset: Any, check_heaps: Callable[[], None]
    ) -> None:
        self._file = file
        self._check_heaps = check_heaps
        self._dataset = dataset
        self.path = path
        self.shape: tuple[int, ...] = tuple(int(n) for n in dataset.shape)
        self.kind, self.dtype = _kind_of(dataset)
        item = self.dtype.itemsize if self.kind == NUMBERS else 16
        self.row_bytes = math.prod(self.shape[1:]) * item
        self.num_bytes = math.prod(self.shape) * item
        self.chunk_rows = int(dataset.chunks[0]) if dataset.chunks else 1

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 1

    def value(self) -> Any:
        """Return the one value of a dataset without dims: a number, str or bytes."""
        self._expect((), self.shape)
        with _reading(self._file):
            if self.kind != NUMBERS:
                self._check_heaps()
            value = self._dataset[()]
            if self.kind == TEXT:
                return value.decode() if isinstance(value, bytes) else str(value)
            return value.item() if self.kind == NUMBERS else bytes(value)

    def read(self, start: int = 0, stop: int | None = None) -> Array:
        """Read rows: numbers [n, ...] of `dtype`, or an object array [n] of str or bytes.

        Raises: SourceInvalidError on torn bytes, and on a type that is not read.
        """
        stop = len(self) if stop is None else min(stop, len(self))
        if not self.shape:
            self._expect((1,), self.shape)
        with _reading(self._file):
            return (
                self._numbers(start, stop)
                if self.kind == NUMBERS
                else self._read_variable(start, stop)
            )

    def _numbers(self, start: int, stop: int) -> Array:
        out: Array = np.empty((max(stop - start, 0), *self.shape[1:]), self.dtype)
        if not out.size:
            return out
        self._dataset.read_direct(out, np.s_[start:stop])
        if self.dtype.kind == "b" and (out.view(np.uint8) > 1).any():
            raise ValueError(f"dataset {self.path}: flags that are neither true nor false")
        return out

    def _read_variable(self, start: int, stop: int) -> Array:
        if self.kind not in (TEXT, BYTES) or len(self.shape) != 1:
            raise SourceInvalidError(
                f"{self._file.name}: dataset {self.path!r} is {self.kind}{list(self.shape)}, "
                "expected numbers, or one text per row. Leave it out, or write it as numbers."
            )
        self._check_heaps()
        out: Array = np.empty(max(stop - start, 0), object)
        step = max(1, min(_VARIABLE_ROWS, _VARIABLE_BYTES // self._file.num_bytes))
        num_bytes = 0
        for first in range(start, stop, step):
            for row, cell in enumerate(self._dataset[first : min(first + step, stop)], first):
                raw = bytes(cell)
                num_bytes += len(raw)
                out[row - start] = raw.decode() if self.kind == TEXT else raw
            refuse_bomb(self._file.name, num_bytes, self._file.num_bytes)
        return out

    def _expect(self, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
        if expected != found:
            raise SourceInvalidError(
                f"{self._file.name}: dataset {self.path!r} has shape {list(found)}, expected "
                f"{'one value' if not expected else 'one row per step'}. The file may have "
                "another format."
            )


class Hdf5File:
    """A file open for reading; a context manager. Raises: SourceInvalidError, ExtraMissingError."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._h5py = load_h5py()
        self._heaps_are_checked = False
        self._declared: set[str] = set()
        self._declared_bytes = 0
        file.check_unchanged()
        with _reading(file):
            self._root: Any = self._h5py.File(file.path, "r", locking=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _reading(self._file):
            self._root.close()

    def names(self, group: str = "") -> list[str]:
        """Return what a group holds, sorted."""
        with _reading(self._file):
            return sorted(self._open(group))

    def has_path(self, path: str) -> bool:
        """Whether there is a group or dataset of that path."""
        with _reading(self._file):
            group, _, name = path.rpartition("/")
            return name in self._open(group)

    def is_group(self, path: str) -> bool:
        """Whether a path is a group."""
        with _reading(self._file):
            return isinstance(self._open(path), self._h5py.Group)

    def arrays(self, group: str = "") -> list[str]:
        """Return the paths of all datasets in and below a group; a group met twice counts once."""
        paths: list[str] = []
        seen: set[Any] = set()
        waiting = [group]
        while waiting:
            path = waiting.pop()
            with _reading(self._file):
                item = self._open(path)
                if isinstance(item, self._h5py.Dataset):
                    paths.append(path)
                elif isinstance(item, self._h5py.Group) and item.id not in seen:
                    seen.add(item.id)
                    waiting += [f"{path}/{name}".lstrip("/") for name in sorted(item)]
        return sorted(paths)

    def array(self, path: str) -> Hdf5Array:
        """Open a dataset. Raises: SourceInvalidError if it is none, or not to be trusted."""
        with _reading(self._file):
            dataset = self._open(path)
            if not isinstance(dataset, self._h5py.Dataset):
                raise SourceInvalidError(
                    f"{self._file.name}: {path!r} is no dataset, expected one. "
                    "Name the format with `format` if the file has another one."
                )
            self._refuse_elsewhere(dataset, path)
            array = Hdf5Array(self._file, path, dataset, self._check_heaps)
            stored = min(int(dataset.id.get_storage_size()), self._file.num_bytes)
        refuse_bomb(f"{self._file.name}: dataset {path!r}", array.num_bytes, stored)
        if path not in self._declared:
            self._declared.add(path)
            self._declared_bytes += array.num_bytes
            refuse_bomb(self._file.name, self._declared_bytes, self._file.num_bytes)
        return array

    def label(self, group: str, name: str) -> Any:
        """Return a group's attribute that is a single number; None if there is no such one."""
        with _reading(self._file):
            attributes = self._open(group).attrs
            if name not in attributes:
                return None
            stored = attributes.get_id(name)
            if stored.shape != ():
                return None
            return attributes[name].item() if stored.dtype.kind in "fiub" else None

    def text_label(self, group: str, name: str) -> str | None:
        """Return a group's attribute that is a single text; None if there is no such one."""
        with _reading(self._file):
            attributes = self._open(group).attrs
            if name not in attributes or attributes.get_id(name).shape != ():
                return None
            if self._h5py.check_string_dtype(attributes.get_id(name).dtype) is None:
                return None
            self._check_heaps()
            value = attributes[name]
            return value.decode() if isinstance(value, bytes) else str(value)

    def _check_heaps(self) -> None:
        if not self._heaps_are_checked:
            check_heaps(self._file)
            self._heaps_are_checked = True

    def _open(self, path: str) -> Any:
        """Open by hard links alone: others lead to other files, and back up."""
        item = self._root
        for name in filter(None, path.split("/")):
            kind = item.id.links.get_info(name.encode(errors="surrogateescape")).type
            if kind != self._h5py.h5l.TYPE_HARD:
                raise SourceInvalidError(
                    f"{self._file.name}: {path!r} is a link to another place, expected data in "
                    "the file itself. Links are not followed: copy the linked data into the file."
                )
            item = item[name]
        return item

    def _refuse_elsewhere(self, dataset: Any, path: str) -> None:
        if dataset.is_virtual or dataset.external:
            raise SourceInvalidError(
                f"{self._file.name}: dataset {path!r} keeps its data in other files, expected it "
                "in the file itself. Copy it there, for example with h5repack."
            )
        plan = dataset.id.get_create_plist()
        filters = {int(plan.get_filter(i)[0]) for i in range(plan.get_nfilters())}
        if not filters <= _FILTERS:
            raise SourceInvalidError(
                f"{self._file.name}: dataset {path!r} is packed by the HDF5 filter "
                f"{min(filters - _FILTERS)}, expected gzip, lzf, szip or none: others are plugins, "
                "which are not loaded. Repack it, for example with h5repack -f GZIP=1."
            )


def _kind_of(dataset: Any) -> tuple[str, np.dtype[Any]]:
    h5py = load_h5py()
    try:
        dtype = dataset.dtype
    except TypeError:
        return "a type without a name in numpy", np.dtype(object)
    if h5py.check_string_dtype(dtype) is not None:
        return TEXT, np.dtype(object)
    if (element := h5py.check_vlen_dtype(dtype)) is not None:
        is_bytes = np.dtype(element) == np.uint8
        return BYTES if is_bytes else f"lists of {element}", np.dtype(object)
    if dtype.kind in "fiub" and dtype.itemsize <= 8:
        return NUMBERS, dtype.newbyteorder("=")
    return str(dtype), np.dtype(object)


@contextmanager
def _reading(file: SourceFile) -> Iterator[None]:
    try:
        yield
    except _READ_ERRORS as error:
        raise unreadable_error(file.name, error) from error


def load_h5py() -> Any:
    """Return h5py. Raises: ExtraMissingError."""
    try:
        import h5py
    except ImportError as error:
        raise ExtraMissingError(
            "HDF5 files: found no h5py, expected it. Run: pip install 'replaylake[formats]'."
        ) from error
    return h5py


def check_heaps(file: SourceFile) -> None:
    """Refuse a file with a heap whose objects do not fill it.

    Cost: a pass over the file's bytes. Raises: SourceInvalidError.
    """
    with file.path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as raw:
        if not _has_long_sizes(raw):
            raise _torn_heap_error(file, 0, "sizes of other than 8 bytes")
        at = raw.find(_SIGNATURE)
        while at >= 0:
            if (wrong := _find_heap_fault(raw, at)) is not None:
                raise _torn_heap_error(file, at, wrong)
            at = raw.find(_SIGNATURE, at + len(_SIGNATURE))


def _has_long_sizes(raw: mmap.mmap) -> bool:
    """Whether offsets and lengths have 8 bytes, by the superblock, as every writer today has it."""
    at = 13 if raw[8] < 2 else 9
    return raw[at] == raw[at + 1] == 8


def _find_heap_fault(raw: mmap.mmap, heap: int) -> str | None:
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


def _torn_heap_error(file: SourceFile, at: int, found: str) -> SourceInvalidError:
    return SourceInvalidError(
        f"{file.name}: the heap of values of variable length at byte {at} has {found}, expected "
        "objects that fill it. The file may be damaged: copy or write it again."
    )
