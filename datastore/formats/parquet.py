"""Parquet tables, one row a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from replaylake.datastore.formats.format import Reading, ReadOptions
from replaylake.datastore.formats.source import SourceFile, unreadable
from replaylake.datastore.formats.tables import Chunk, ChunkSchema
from replaylake.datastore.formats.tabular import TabularReading

_MAGIC = b"PAR1"
_BATCH_ROWS = 131_072


class ParquetTables:
    """Chunks of Parquet files; schemas come from the footers alone."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for file in self._files:
            file.check_unchanged()
            row = 0
            try:
                # Buffering ahead would keep the bytes of every row group read so far.
                with pq.ParquetFile(
                    file.path, pre_buffer=False, page_checksum_verification=True
                ) as parquet:
                    names = None
                    if columns is not None:
                        names = [n for n in columns if n in parquet.schema_arrow.names]
                    for batch in parquet.iter_batches(_BATCH_ROWS, columns=names):
                        table = pa.Table.from_batches([batch])
                        yield Chunk(file, row, table)
                        row += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                raise unreadable(file.name, error) from error

    def schemas(self) -> Iterator[ChunkSchema]:
        for file in self._files:
            try:
                with pq.ParquetFile(file.path) as parquet:
                    rows = parquet.metadata.num_rows
                    yield ChunkSchema(file, 0, rows, parquet.schema_arrow)
            except (pa.ArrowException, OSError) as error:
                raise unreadable(file.name, error) from error

    def keep_as_text(self, column: str) -> bool:
        return False


class ParquetFormat:
    """Any Parquet table, by aliases and `--map`."""

    name = "parquet"

    def recognises(self, files: Sequence[SourceFile]) -> bool:
        return is_parquet(files[0])

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> Reading:
        return TabularReading(ParquetTables(files), options, files[0].name)


def is_parquet(file: SourceFile) -> bool:
    """Whether the file begins as Parquet does; a torn one still does."""
    return file.head(len(_MAGIC)) == _MAGIC


def parquet_columns(file: SourceFile) -> list[str]:
    """Return the column names. Raises: SourceInvalid on a torn file."""
    try:
        names: list[str] = pq.read_schema(file.path).names
    except (pa.ArrowException, OSError) as error:
        raise unreadable(file.name, error) from error
    return names
