"""Spool: parsed chunks on the disk, so that a source too large for memory is parsed only once."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from replaylake.datastore.errors import StorageFailed


@dataclass(frozen=True)
class _Place:
    """Where one table lies in the file."""

    start: int
    num_bytes: int


class Spool:
    """Tables in a temporary file without a name, which the system removes with the process.

    Each keeps its own schema. Text compresses to a third with LZ4, at the speed of the disk.
    """

    def __init__(self) -> None:
        self._file: Any = tempfile.TemporaryFile(prefix="replaylake-spool-")  # noqa: SIM115
        # As nobody says when a reading will not be iterated again.
        self.close = weakref.finalize(self, self._file.close)
        self._places: list[_Place] = []
        self._end = 0

    def append(self, table: pa.Table) -> None:
        """Write one table. Raises: StorageFailed if the disk takes no more."""
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        data = sink.getvalue()
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise StorageFailed(
                f"{tempfile.gettempdir()}: no room for the parsed source ({error.strerror}), "
                f"expected {(self._end + data.size) >> 20} MiB or more. Free some, or set TMPDIR "
                "to a folder on a larger disk."
            ) from error
        self._places.append(_Place(self._end, data.size))
        self._end += data.size

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read the tables in the order they were written; of absent columns nothing is said."""
        for place in self._places:
            data: Any = os.pread(self._file.fileno(), place.num_bytes, place.start)
            with pa.ipc.open_stream(data) as reader:
                table = reader.read_all()
            if columns is not None:
                table = table.select([name for name in columns if name in table.schema.names])
            yield table
