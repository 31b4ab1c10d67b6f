"""Tables: what columnar formats read their files into, chunk by chunk, under one schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa

from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.formats.tabular.arrays import plain
from replaylake.datastore.formats.tabular.spool import Spool
from replaylake.datastore.sources.source import OnRows, SourceFile

# Hidden columns of a chunk: the row's number in the whole source, and what is wrong with it.
# The NUL keeps them apart from any name that a log could have.
ORIGIN: Final = "\0origin"
DAMAGE: Final = "\0damage"
# A source up to this size is parsed once and kept for the passes that follow.
_KEEP_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class Chunk:
    """Some rows of one file, in its order; `damage` says what is wrong with a row, by its index.

    Its text has the name of the door check and a NUL before it, where that is not unequal_lengths.
    num_bytes: of the file, how many were read so far; 0 where that is not known.
    """

    file: SourceFile
    first_row: int
    table: pa.Table
    damage: Mapping[int, str] = field(default_factory=dict)
    num_bytes: int = 0


@dataclass(frozen=True)
class ChunkSchema:
    """A chunk without its data."""

    file: SourceFile
    first_row: int
    num_rows: int
    schema: pa.Schema


class Tables(Protocol):
    """The chunks of a columnar source; reading may start over any number of times.

    A format's class derives from this one, and says itself what is not as here.
    """

    reread_cheaply: bool = False
    """Whether reading again costs less than keeping what was read, as with columnar files."""

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        """Read from the first file to the last; `columns` are those needed, where that is cheaper.

        Raises: SourceInvalid naming file and row.
        """

    def schemas(self) -> Iterator[ChunkSchema]:
        """Return what each chunk, or a run of them in one file, holds; cheaper where it can be."""
        return map(describe, self.chunks())

    def keep_as_text(self, column: str) -> bool:
        """Read a column as text from now on; False where its type is the file's own."""
        return False


class Kept(Tables):
    """Tables that are parsed once: kept in memory, or where they are too large in a file.

    Those that say of themselves that they `reread_cheaply`, as Parquet's, are read again instead.
    """

    def __init__(
        self, tables: Tables, keep_bytes: int = _KEEP_BYTES, on_rows: OnRows | None = None
    ) -> None:
        self._tables = tables
        self._on_rows = on_rows
        self._keep_bytes = keep_bytes
        self._rereads = tables.reread_cheaply
        self._forget()

    def fill(self) -> bool:
        """Read until all is kept, or is known to be too much; return whether memory holds it."""
        if not self._is_filled:
            self._read()
        return self._spool is None and not self._overflown

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        self.fill()
        if self._overflown:
            yield from self._tables.chunks(columns)
        elif self._spool is None:
            yield from self._kept
        else:
            for chunk, table in zip(self._kept, self._spool.tables(columns), strict=True):
                yield replace(chunk, table=table)

    def schemas(self) -> Iterator[ChunkSchema]:
        self.fill()
        yield from self._tables.schemas() if self._overflown else self._described

    def keep_as_text(self, column: str) -> bool:
        self._forget()
        return self._tables.keep_as_text(column)

    def _forget(self) -> None:
        self._kept: list[Chunk] = []
        self._described: list[ChunkSchema] = []
        self._spool: Spool | None = None
        self._overflown = self._is_filled = False

    def _read(self) -> None:
        num_bytes = 0
        for chunk in self._tables.chunks():
            num_bytes += chunk.table.nbytes
            if self._on_rows is not None:
                self._on_rows(chunk.file, chunk.first_row + chunk.table.num_rows, chunk.num_bytes)
            if self._rereads and chunk.file.num_bytes > self._keep_bytes:
                num_bytes = chunk.file.num_bytes  # the first chunk tells already
            if self._spool is None and num_bytes > self._keep_bytes:
                if self._rereads:
                    self._forget()
                    self._overflown = True
                    break
                self._spill()
            self._described.append(describe(chunk))
            if self._spool is not None:
                self._spool.append(chunk.table)
                chunk = _emptied(chunk)
            self._kept.append(chunk)
        self._is_filled = True

    def _spill(self) -> None:
        self._spool = Spool()
        for chunk in self._kept:
            self._spool.append(chunk.table)
        self._kept = [_emptied(chunk) for chunk in self._kept]


def _emptied(chunk: Chunk) -> Chunk:
    # Not a slice of it, which would hold its memory.
    return replace(chunk, table=chunk.table.schema.empty_table())


@dataclass(frozen=True)
class Extent:
    """Where a run of the source's rows lies: its row number `start` is `first_row` of the file."""

    start: int
    file: SourceFile
    first_row: int


@dataclass(frozen=True)
class Survey:
    """What a pass over the schemas told: one schema for all chunks, and where the rows lie."""

    schema: pa.Schema
    shapes: Mapping[str, tuple[int, ...]]
    extents: Sequence[Extent]
    num_rows: int
    incomplete: Mapping[str, SourceFile]
    """Columns that some file lacks, with the first such file."""

    def place(self, row: int) -> str:
        """Return `FILE row N` for a global row number."""
        starts = [extent.start for extent in self.extents]
        extent = self.extents[int(np.searchsorted(starts, row, side="right")) - 1]
        return f"{extent.file.name} row {row - extent.start + extent.first_row}"


def survey(tables: Tables) -> Survey:
    """Find one schema that every chunk can be cast to.

    Raises: SourceInvalid if a column is text in one place and a number in another, in a format
    whose types are its own.
    """
    schema = pa.schema([])
    shapes: dict[str, tuple[int, ...]] = {}
    extents: list[Extent] = []
    lacking: dict[str, SourceFile] = {}
    num_rows = 0
    for part in tables.schemas():
        table, found = plain_table(_empty(part.schema))
        for name in table.schema.names:
            if extents and name not in schema.names:
                lacking[name] = extents[0].file
        for name in schema.names:
            if name not in table.schema.names:
                lacking.setdefault(name, part.file)
        clash = _clash(schema, table.schema)
        if clash is not None:
            if tables.keep_as_text(clash):
                return survey(tables)
            raise SourceInvalid(
                f"{part.file.name}: column {clash!r} is {table.schema.field(clash).type}, expected "
                f"{schema.field(clash).type} as before it. Make the column one type."
            )
        schema = pa.unify_schemas([schema, table.schema], promote_options="permissive")
        _same_shapes(shapes, found, part.file)
        extents.append(Extent(num_rows, part.file, part.first_row))
        num_rows += part.num_rows
    return Survey(schema, shapes, extents, num_rows, lacking)


def uniform_chunks(
    tables: Tables, seen: Survey, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Read chunks under the survey's schema, or some of its columns, and add the hidden columns.

    Raises: SourceInvalid if a value does not survive the cast.
    """
    start = 0
    names = seen.schema.names if columns is None else list(columns)
    for chunk in tables.chunks(columns):
        table, _ = plain_table(chunk.table)
        num = table.num_rows
        arrays = []
        for f in map(seen.schema.field, names):
            column = pa.nulls(num, f.type)
            if f.name in table.schema.names:
                column = _cast(table.column(f.name), f.type, chunk, f.name)
            arrays.append(column)
        damage = [chunk.damage.get(i) for i in range(num)] if chunk.damage else None
        yield pa.Table.from_arrays(
            [
                *arrays,
                pa.array(np.arange(start, start + num)),
                pa.nulls(num, pa.string()) if damage is None else pa.array(damage, pa.string()),
            ],
            names=[*names, ORIGIN, DAMAGE],
        )
        start += num


def describe(chunk: Chunk) -> ChunkSchema:
    """Return the chunk without its data."""
    return ChunkSchema(chunk.file, chunk.first_row, chunk.table.num_rows, chunk.table.schema)


def plain_table(table: pa.Table) -> tuple[pa.Table, dict[str, tuple[int, ...]]]:
    """Strip extension and dictionary types; return the shapes of tensor columns beside it."""
    shapes = {}
    columns = {}
    for f, column in zip(table.schema, table.columns, strict=True):
        columns[f.name], shape = plain(f, column)
        if shape is not None:
            shapes[f.name] = shape
    return pa.table(columns), shapes


def _empty(schema: pa.Schema) -> pa.Table:
    # Not `empty_table`: it makes no tensor whose dims have an order of their own.
    return pa.table([pa.chunked_array([], field.type) for field in schema], schema=schema)


def _clash(first: pa.Schema, second: pa.Schema) -> str | None:
    for f in second:
        if f.name not in first.names or first.field(f.name).type == f.type:
            continue
        pair = [pa.schema([first.field(f.name)]), pa.schema([f])]
        try:
            pa.unify_schemas(pair, promote_options="permissive")
        except pa.ArrowException:
            return str(f.name)
    return None


def _same_shapes(
    shapes: dict[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], file: SourceFile
) -> None:
    for name, shape in found.items():
        if shapes.setdefault(name, shape) != shape:
            raise SourceInvalid(
                f"{file.name}: column {name!r} has shape {list(shape)}, expected "
                f"{list(shapes[name])} as in the files before it. Ingest it into another dataset."
            )


def _cast(column: Any, kind: pa.DataType, chunk: Chunk, name: str) -> Any:
    if column.type == kind:
        return column
    try:
        return column.cast(kind)
    except pa.ArrowException as error:
        raise SourceInvalid(
            f"{chunk.file.name} from row {chunk.first_row}: column {name!r} does not fit {kind} as "
            f"in the rest of the source ({error}). Make the column one type."
        ) from error
