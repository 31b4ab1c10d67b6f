"""Parquet tables, one row a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader, WriteResult
from replaylake.datastore.interchange.formats.generic.encoded_columns import (
    MAX_LIST_BYTES,
    ColumnDecoder,
    min_width,
)
from replaylake.datastore.interchange.formats.generic.standard import (
    read_declaration,
    standard_schema,
    write_tables,
)
from replaylake.datastore.interchange.formats.tabular.reader import TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import (
    Chunk,
    ChunkSchema,
    TableSource,
    check_columns,
)
from replaylake.datastore.interchange.sources.compression import refuse_bomb
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import unreadable_error

# What pyarrow raises for torn files and flipped bytes; names in a footer may be no text.
PARQUET_ERRORS: Final = (pa.ArrowException, OSError, UnicodeDecodeError)

_MAGIC: Final = b"PAR1"
_BATCH_ROWS: Final = 131_072
_BATCH_BYTES: Final = 16 << 20
# Texts that decode to less than this, whatever they are, are decoded as they are read.
_MAX_PLAIN_BYTES: Final = 64 << 20
# Bytes of a value by its physical type; those of BYTE_ARRAY have an offset each.
_WIDTHS: Final = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}


class ParquetTables(TableSource):
    """Chunks of Parquet files; schemas come from the footers alone."""

    reread_cheaply = True

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for file in self._files:
            file.check_unchanged()
            row, decoder = 0, ColumnDecoder(file)
            try:
                check_columns(file, parquet_schema(file).names)
                # Buffering ahead would keep the bytes of every row group read so far.
                with pq.ParquetFile(
                    file.path,
                    pre_buffer=False,
                    page_checksum_verification=True,
                    read_dictionary=_find_dictionaries(file),
                ) as parquet:
                    names = None
                    if columns is not None:
                        names = [n for n in columns if n in parquet.schema_arrow.names]
                    num_rows = _rows_at_once(parquet, file)
                    for batch in parquet.iter_batches(num_rows, columns=names):
                        batch.validate(full=True)  # texts may be no text
                        for part in decoder.parts(batch):
                            yield Chunk(file, row, pa.Table.from_batches([part]))
                            row += part.num_rows
            except PARQUET_ERRORS as error:
                raise unreadable_error(file.name, error) from error

    def schemas(self) -> Iterator[ChunkSchema]:
        for file in self._files:
            try:
                with pq.ParquetFile(file.path) as parquet:
                    check_columns(file, parquet.schema_arrow.names)
                    _rows_at_once(parquet, file)
                    rows = parquet.metadata.num_rows
                    yield ChunkSchema(file, 0, rows, parquet.schema_arrow)
            except PARQUET_ERRORS as error:
                raise unreadable_error(file.name, error) from error


class ParquetFormat:
    """Any Parquet table, by aliases and `--map`."""

    name = "parquet"
    about = "any table as Parquet, one row per step"
    is_folder = False
    suffix = ".parquet"

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        return is_parquet(files[0])

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        name = files[0].name
        declared = read_declaration(map(parquet_schema, files), options, name)
        return TabularReader(ParquetTables(files), options, name, declared)

    def write(self, episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> WriteResult:
        """Write one file, types kept; the spaces are in the schema's metadata."""
        fields = standard_schema(spec)
        # Checksums, as without them most flipped bits are read as other numbers.
        with pq.ParquetWriter(path, fields, compression="zstd", write_page_checksum=True) as writer:
            return write_tables(episodes, spec, lambda table: writer.write_table(table))


def is_parquet(file: SourceFile) -> bool:
    """Whether the file begins as Parquet does; a torn one still does."""
    return file.head(len(_MAGIC)) == _MAGIC


def parquet_columns(file: SourceFile) -> list[str]:
    """Return the column names. Raises: SourceInvalidError on a torn file."""
    names: list[str] = parquet_schema(file).names
    return names


def parquet_schema(file: SourceFile) -> pa.Schema:
    """Return the columns, their types and metadata. Raises: SourceInvalidError on a torn file."""
    try:
        return pq.read_schema(file.path)
    except PARQUET_ERRORS as error:
        raise unreadable_error(file.name, error) from error


def _rows_at_once(parquet: pq.ParquetFile, file: SourceFile) -> int:
    """Return how many rows make a chunk. Raises: SourceInvalidError for a bomb.

    Rows times their width is what a file unpacks to, whatever sizes it states: a run of a thousand
    million equal numbers takes a few bytes.
    """
    num_rows = parquet.metadata.num_rows
    width = sum(min_width(field.type) for field in parquet.schema_arrow)
    refuse_bomb(file.name, num_rows * width, file.num_bytes)
    items = _count_item_bytes(parquet)
    refuse_bomb(file.name, items, file.num_bytes, MAX_LIST_BYTES)
    groups = range(parquet.metadata.num_row_groups)
    stated = sum(parquet.metadata.row_group(group).total_byte_size for group in groups)
    widest = max(width, max(stated, items) // max(1, num_rows), 1)
    return int(np.clip(_BATCH_BYTES // widest, 1, _BATCH_ROWS))


def _count_item_bytes(parquet: pq.ParquetFile) -> int:
    """Return what the items of all lists decode to at the least: a run of equal ones is short."""
    metadata, total = parquet.metadata, 0
    for number in range(metadata.num_columns):
        column = metadata.schema.column(number)
        if column.max_repetition_level:
            width = _WIDTHS.get(column.physical_type) or max(column.length, 4)
            for group in range(metadata.num_row_groups):
                total += width * metadata.row_group(group).column(number).num_values
    return total


def _find_dictionaries(file: SourceFile) -> list[str]:
    """Return the columns of texts that are read as dictionaries: they may decode to far more."""
    with pq.ParquetFile(file.path) as parquet:
        metadata, found = parquet.metadata, []
        for number in range(metadata.num_columns):
            column = metadata.schema.column(number)
            if column.physical_type != "BYTE_ARRAY":
                continue
            chunks = [
                metadata.row_group(group).column(number) for group in range(metadata.num_row_groups)
            ]
            # At most each value is as long as all that is stored.
            if any(
                any("DICTIONARY" in encoding for encoding in chunk.encodings)
                and chunk.num_values * chunk.total_uncompressed_size > _MAX_PLAIN_BYTES
                for chunk in chunks
            ):
                found.append(column.path)
    return found
