"""Arrow IPC files (Feather) and streams, one row a step."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader, WriteResult
from replaylake.datastore.interchange.formats.generic.arrow_messages import (
    BoundedStream,
    refuse_packed_bomb,
)
from replaylake.datastore.interchange.formats.generic.encoded_columns import ColumnDecoder
from replaylake.datastore.interchange.formats.generic.standard import (
    read_declaration,
    standard_schema,
    write_tables,
)
from replaylake.datastore.interchange.formats.tabular.reader import TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import (
    Chunk,
    TableSource,
    check_columns,
)
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import unreadable_error

_FILE: Final = b"ARROW1"
_FEATHER_1: Final = b"FEA1"
_STREAM: Final = b"\xff\xff\xff\xff"
# The first message of a stream is its schema: longer ones than this are none.
_SCHEMA_BYTES: Final = 64 << 20


class ArrowTables(TableSource):
    """Chunks of Arrow files and streams, of about 16 MiB where their batches allow it."""

    reread_cheaply = True

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for file in self._files:
            file.check_unchanged()
            row, decoder = 0, ColumnDecoder(file)
            with _translate_errors(file), _batches(file) as batches:
                check_columns(file, _read_schema(file).names)
                for batch in batches:
                    # Offsets of a damaged batch would lead out of its memory; names may be no text.
                    batch.validate(full=True)
                    check_names(batch.schema)
                    for part in decoder.parts(batch):
                        table = pa.Table.from_batches([part])
                        if columns is not None:
                            table = table.select([n for n in columns if n in table.schema.names])
                        yield Chunk(file, row, table)
                        row += part.num_rows


class ArrowFormat:
    """Any Arrow table, by aliases and `--map`."""

    name = "arrow"
    about = "any table as an Arrow IPC file (Feather) or stream, one row per step"
    is_folder = False
    suffix = ".arrow"

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        head = files[0].head(8)
        if head.startswith((_FILE, _FEATHER_1)):
            return True
        return len(head) == 8 and head.startswith(_STREAM) and 0 < _size(head) < _SCHEMA_BYTES

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        name = files[0].name
        declared = read_declaration(map(_read_schema, files), options, name)
        return TabularReader(ArrowTables(files), options, name, declared)

    def write(self, episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> WriteResult:
        """Write one file, types kept; the spaces are in the schema's metadata."""
        settings = pa.ipc.IpcWriteOptions(compression="zstd")
        fields = standard_schema(spec)
        with (
            pa.OSFile(str(path), "wb") as sink,
            pa.ipc.new_file(sink, fields, options=settings) as w,
        ):
            return write_tables(episodes, spec, lambda table: w.write_table(table))


@contextmanager
def _batches(file: SourceFile) -> Iterator[Iterator[pa.RecordBatch]]:
    head = file.head(8)
    if head.startswith(_FEATHER_1):
        raise SourceInvalidError(
            f"{file.name}: found Feather of version 1, expected version 2 or an Arrow file. Write "
            "it again with a newer pyarrow or R arrow."
        )
    refuse_packed_bomb(file)
    if head.startswith(_FILE):
        with pa.OSFile(str(file.path)) as source, pa.ipc.open_file(source) as reader:
            yield (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        with BoundedStream(file) as source, pa.ipc.open_stream(source) as reader:
            yield iter(reader)


def _read_schema(file: SourceFile) -> pa.Schema:
    with _translate_errors(file):
        if file.head(len(_FEATHER_1)) == _FEATHER_1:
            return pa.schema([])
        if file.head(len(_FILE)) == _FILE:
            with pa.OSFile(str(file.path)) as source, pa.ipc.open_file(source) as reader:
                schema = reader.schema
        else:
            with BoundedStream(file) as source, pa.ipc.open_stream(source) as reader:
                schema = reader.schema
        check_names(schema)
        return schema


@contextmanager
def _translate_errors(file: SourceFile) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
        raise unreadable_error(file.name, error) from error


def check_names(fields: Iterable[pa.Field]) -> None:
    """Look at all names, also within structs. Raises: UnicodeDecodeError if one is no text."""
    for field in fields:
        if field.name is not None:
            check_names([field.type.field(i) for i in range(field.type.num_fields)])


def _size(head: Any) -> int:
    return int(struct.unpack_from("<i", head, 4)[0])
