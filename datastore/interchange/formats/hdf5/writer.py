"""HDF5 files, written: datasets at once, and columns that grow."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import StorageError
from replaylake.datastore.interchange.formats.hdf5.files import load_h5py

_CHUNK_BYTES: Final = 1 << 20
_APPEND_BYTES: Final = 4 << 20


class Hdf5Writer:
    """A new file, written to as a context manager. Raises: StorageError, ExtraMissingError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._h5py = load_h5py()
        self._waiting: dict[str, list[Array]] = {}
        self._num_rows: dict[str, int] = {}
        try:
            self._sink = _Sink(path)
        except OSError as error:
            raise self._write_failed_error(error) from error
        with self._writing():
            self._root: Any = self._h5py.File(self._sink, "w", libver=("earliest", "v110"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with self._writing():
                if kind is None:
                    for path in [*self._waiting]:
                        self._flush(path)
                self._root.close()
        finally:
            self._root.close()
            self._sink.close()

    @property
    def num_rows(self) -> Mapping[str, int]:
        """How many rows each column got by `append`."""
        return self._num_rows

    def write(self, path: str, array: Any) -> None:
        """Write a dataset whole: numbers, a str, or strings."""
        values = np.asarray(array)
        with self._writing():
            if values.dtype.kind in "OU":
                kind = self._h5py.string_dtype()
                self._root.create_dataset(path, data=values.astype(object), dtype=kind)
            else:
                self._root.create_dataset(path, data=values)

    def append(self, path: str, rows: Array) -> None:
        """Add rows [n, ...] to a dataset that grows; an object array holds strings."""
        buffer = self._waiting.setdefault(path, [])
        buffer.append(rows)
        self._num_rows[path] = self._num_rows.get(path, 0) + len(rows)
        if sum(part.nbytes for part in buffer) >= _APPEND_BYTES:
            with self._writing():
                self._flush(path)

    def drop(self, path: str) -> None:
        """Take a dataset out again."""
        self._waiting.pop(path, None)
        self._num_rows.pop(path, None)
        with self._writing():
            if path in self._root:
                del self._root[path]

    def label(self, group: str, labels: Mapping[str, Any]) -> None:
        """Set a group's attributes, making the group if need be."""
        with self._writing():
            self._root.require_group(group).attrs.update(labels)

    def require_group(self, path: str) -> None:
        """Make a group, unless it is there."""
        with self._writing():
            self._root.require_group(path)

    def _flush(self, path: str) -> None:
        parts = self._waiting.pop(path)
        rows = np.concatenate(parts)
        if path not in self._root:
            kind = self._h5py.string_dtype() if rows.dtype == object else rows.dtype
            row_bytes = max(1, math.prod(rows.shape[1:]) * rows.dtype.itemsize)
            self._root.create_dataset(
                path,
                shape=(0, *rows.shape[1:]),
                maxshape=(None, *rows.shape[1:]),
                dtype=kind,
                chunks=(max(1, _CHUNK_BYTES // row_bytes), *rows.shape[1:]),
            )
        dataset = self._root[path]
        first = len(dataset)
        dataset.resize(first + len(rows), axis=0)
        dataset[first:] = rows

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise self._write_failed_error(self._sink.error or error) from error
        if self._sink.error is not None:
            raise self._write_failed_error(self._sink.error) from self._sink.error

    def _write_failed_error(self, error: Exception) -> StorageError:
        return StorageError(
            f"{self._path.name}: could not be written ({error}), expected enough space. Check the "
            "disk, then export again."
        )


class _Sink(io.RawIOBase):
    """The file below HDF5. When the disk refuses a write, it keeps the error and takes the rest.

    HDF5 cannot close a file that does not take its caches: it tries again at the end of the
    process, and dies there of a segmentation fault (h5py 3.16, HDF5 2.0, a full disk).
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=0)
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        num_written = 0
        while self.error is None and num_written < len(view):
            try:
                num_written += self._file.write(view[num_written:])
            except OSError as error:
                self.error = error
        return len(view)

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer) or 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def truncate(self, size: int | None = None) -> int:
        try:
            return self._file.truncate(size) if self.error is None else 0
        except OSError as error:
            self.error = error
            return 0

    def close(self) -> None:
        self._file.close()
        super().close()
