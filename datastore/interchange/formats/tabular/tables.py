"""Tables: what columnar formats read their files into, chunk by chunk, under one schema.

A column has the type that most of the source's values have. A value of another type is a misfit:
it is null in its column, and a hidden column says what it was, so that its row is refused alone.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import SourceInvalidError, StorageError
from replaylake.datastore.interchange.formats.tabular.arrays import to_plain
from replaylake.datastore.interchange.sources.source import OnRows, SourceFile
from replaylake.datastore.interchange.sources.source_errors import format_names

# Hidden columns of a chunk: the row's number in the whole source, what is wrong with it, and its
# misfits as a JSON object of [value, message] by column. The NUL keeps them apart from any name
# that a log could have.
ORIGIN: Final = "\0origin"
DAMAGE: Final = "\0damage"
MISFITS: Final = "\0misfits"
HIDDEN: Final = (ORIGIN, DAMAGE, MISFITS)
# Wider tables are refused: each column costs about a millisecond for each pass over a chunk.
MAX_COLUMNS: Final = 4096
# A source up to this size is parsed once and kept for the passes that follow.
_KEEP_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class Chunk:
    """Some rows of one file, in its order; `damage` says what is wrong with a row, by its index.

    Its text has the name of the door check and a NUL before it, where that is not unequal_lengths.
    num_bytes: of the file, how many were read so far; 0 where that is not known. misfits: by a
    row's index and a column, values of another type than the column has here, where it is null.
    lines: the rows' lines in a file of text, where they are known.
    """

    file: SourceFile
    first_row: int
    table: pa.Table
    damage: Mapping[int, str] = field(default_factory=dict)
    num_bytes: int = 0
    misfits: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    lines: Sequence[int] = ()

    def place(self, row: int) -> str:
        """Return `FILE line N` of one of the rows, or `FILE row N` where lines are not known."""
        if self.lines:
            return f"{self.file.name} line {self.lines[row]}"
        return f"{self.file.name} row {self.first_row + row}"

    def part(self, start: int, table: pa.Table) -> Chunk:
        """Return the rows from `start` on as this table of them, with what is known of each."""
        rows = range(start, start + table.num_rows)
        return replace(
            self,
            first_row=self.first_row + start,
            table=table,
            damage={i - start: text for i, text in self.damage.items() if i in rows},
            misfits={i - start: cells for i, cells in self.misfits.items() if i in rows},
            lines=self.lines[rows.start : rows.stop],
        )

    def refuse_misfits(self) -> None:
        """Raise SourceInvalidError at the first misfit, for rows that are more than a step each."""
        for i, cells in self.misfits.items():
            for name, value in cells.items():
                kind = pa.null()
                if name in self.table.schema.names:
                    kind = self.table.schema.field(name).type
                raise SourceInvalidError(
                    f"{self.place(i)}, column {name!r}: found {_format_value(value)}, expected "
                    f"{_format_kind(kind)}. Correct the line, or leave the file out."
                )


@dataclass(frozen=True)
class ChunkSchema:
    """A chunk without its data; `mixed` are the columns that have misfits."""

    file: SourceFile
    first_row: int
    num_rows: int
    schema: pa.Schema
    mixed: frozenset[str] = frozenset()


class TableSource(Protocol):
    """The chunks of a columnar source; reading may start over any number of times.

    A format's class derives from this one, and says itself what is not as here.
    """

    reread_cheaply: bool = False
    """Whether reading again costs less than keeping what was read, as with columnar files."""

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        """Read from the first file to the last; `columns` are those needed, where that is cheaper.

        Raises: SourceInvalidError naming file and row.
        """

    def schemas(self) -> Iterator[ChunkSchema]:
        """Return what each chunk, or a run of them in one file, holds; cheaper where it can be."""
        return map(describe, self.chunks())

    def line(self, row: int) -> int | None:
        """Return the line, from 1, of a row of the source in its file; None where not known."""
        return None

    @property
    def settled(self) -> frozenset[str]:
        """The columns that `settle` gave a type."""
        return frozenset()

    def settle(self, columns: Sequence[str]) -> None:
        """Give columns whose chunks disagree one type from now on, where a format can."""
        return


class HeadTables(TableSource):
    """The first rows of some tables, for whoever wants to see what they are like.

    Reads no more than the chunk that the last of them is in.
    """

    def __init__(self, tables: TableSource, num_rows: int) -> None:
        self._tables = tables
        self._num_rows = num_rows

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        left = self._num_rows
        for chunk in self._tables.chunks(columns):
            yield chunk.part(0, chunk.table.slice(0, left))
            left -= chunk.table.num_rows
            if left <= 0:
                return


class CachedTables(TableSource):
    """Tables that are parsed once: kept in memory, or where they are too large in a file.

    Those that say of themselves that they `reread_cheaply`, as Parquet's, are read again instead.
    """

    _overflown: bool
    _is_filled: bool
    _starts: Array

    def __init__(
        self, tables: TableSource, keep_bytes: int = _KEEP_BYTES, on_rows: OnRows | None = None
    ) -> None:
        self._tables = tables
        self._on_rows = on_rows
        self._keep_bytes = keep_bytes
        self._rereads = tables.reread_cheaply
        self._reset()

    def head(self, num_rows: int) -> CachedTables:
        """Return the first rows of these tables, which are then not read beyond them."""
        return CachedTables(HeadTables(self._tables, num_rows), on_rows=self._on_rows)

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
            yield from self._chunks
        else:
            names = None if columns is None else [*columns, MISFITS]
            for chunk, table in zip(self._chunks, self._spool.tables(names), strict=True):
                yield _with_misfits(replace(chunk, table=table))

    def schemas(self) -> Iterator[ChunkSchema]:
        self.fill()
        yield from self._tables.schemas() if self._overflown else self._schemas

    def line(self, row: int) -> int | None:
        if self._overflown or not self._is_filled:
            return self._tables.line(row)
        if not len(self._starts):
            sizes = [part.num_rows for part in self._schemas]
            self._starts = np.cumsum([0, *sizes[:-1]])
        i = int(np.searchsorted(self._starts, row, side="right")) - 1
        lines = self._chunks[i].lines
        return int(lines[row - int(self._starts[i])]) if lines else None

    @property
    def settled(self) -> frozenset[str]:
        return self._tables.settled

    def settle(self, columns: Sequence[str]) -> None:
        before = self.settled
        self._tables.settle(columns)
        if self.settled != before:
            self._reset()

    def _reset(self) -> None:
        self._chunks: list[Chunk] = []
        self._schemas: list[ChunkSchema] = []
        self._starts = np.zeros(0, np.int64)
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
                    self._reset()
                    self._overflown = True
                    break
                self._spill()
            self._schemas.append(describe(chunk))
            if self._spool is not None:
                self._spool.append(_table_with_misfits(chunk))
                chunk = _empty_chunk(chunk)
            self._chunks.append(chunk)
        self._is_filled = True

    def _spill(self) -> None:
        self._spool = Spool()
        for chunk in self._chunks:
            self._spool.append(_table_with_misfits(chunk))
        self._chunks = [_empty_chunk(chunk) for chunk in self._chunks]


def _empty_chunk(chunk: Chunk) -> Chunk:
    # Not a slice of it, which would hold its memory.
    return replace(chunk, table=chunk.table.schema.empty_table(), misfits={})


def _table_with_misfits(chunk: Chunk) -> pa.Table:
    if not chunk.misfits:
        return chunk.table
    cells = [chunk.misfits.get(i) for i in range(chunk.table.num_rows)]
    texts = [None if cell is None else json.dumps(dict(cell)) for cell in cells]
    return chunk.table.append_column(MISFITS, pa.array(texts, pa.string()))


def _with_misfits(chunk: Chunk) -> Chunk:
    """Undo `_table_with_misfits`."""
    if MISFITS not in chunk.table.schema.names:
        return chunk
    texts = chunk.table.column(MISFITS).to_pylist()
    misfits = {i: json.loads(text) for i, text in enumerate(texts) if text is not None}
    return replace(chunk, table=chunk.table.drop_columns([MISFITS]), misfits=misfits)


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
    line: Callable[[int], int | None] = lambda row: None
    """The line of a global row number, where it is known."""

    def place(self, row: int) -> str:
        """Return `FILE row N` for a global row number."""
        starts = [extent.start for extent in self.extents]
        extent = self.extents[int(np.searchsorted(starts, row, side="right")) - 1]
        return f"{extent.file.name} row {row - extent.start + extent.first_row}"


def survey(tables: TableSource) -> Survey:
    """Find one schema for every chunk: of each column the type that most values have.

    Cost: a further pass over the columns whose chunks disagree. Raises: SourceInvalidError for
    tensors of several shapes, or a column of which two types have equally many values.
    """
    kinds: dict[str, dict[pa.DataType, None]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    extents: list[Extent] = []
    lacking: dict[str, SourceFile] = {}
    mixed: set[str] = set()
    num_rows = 0
    for part in tables.schemas():
        check_columns(part.file, part.schema.names)
        for f in part.schema:
            check_fields(part.file, f.name, f.type)
        table, bad_cells = plain_table(_empty(part.schema))
        names = {*table.schema.names}
        for name in names - kinds.keys() if extents else ():
            lacking[name] = extents[0].file
        for name in kinds:
            if name not in names:
                lacking.setdefault(name, part.file)
        for f in table.schema:
            kinds.setdefault(f.name, {})[_to_signed(f.type)] = None
        mixed |= part.mixed & kinds.keys()
        _same_shapes(shapes, bad_cells, part.file)
        extents.append(Extent(num_rows, part.file, part.first_row))
        num_rows += part.num_rows
    joined = {name: _unify([*several]) for name, several in kinds.items()}
    contested = [n for n, kind in joined.items() if kind is None or n in mixed]
    settled = tables.settled
    if contested and not settled.issuperset(contested):
        tables.settle(contested)
        if tables.settled != settled:
            return survey(tables)
    # What was settled is of one type now, and its misfits are those of other types.
    contested = [n for n in contested if joined[n] is None or n not in settled]
    voted = _most_common(tables, contested)
    fields = [pa.field(name, voted.get(name, kind)) for name, kind in joined.items()]
    return Survey(pa.schema(fields), shapes, extents, num_rows, lacking, tables.line)


def uniform_chunks(
    tables: TableSource, survey: Survey, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Read chunks under the survey's schema, or some of its columns, and add the hidden columns."""
    start = 0
    names = survey.schema.names if columns is None else list(columns)
    for chunk in tables.chunks(columns):
        table, _ = plain_table(chunk.table)
        num = table.num_rows
        misfits: dict[int, dict[str, Any]] = {}
        arrays = []
        known = {*table.schema.names}
        for f in map(survey.schema.field, names):
            column = pa.nulls(num, f.type)
            if f.name in known:
                column, wrong = _fit(table.column(f.name), f.type)
                for row, value in wrong.items():
                    misfits.setdefault(row, {})[f.name] = value
            arrays.append(_restore(column, f.name, chunk, misfits) if chunk.misfits else column)
        if chunk.misfits:
            _add_unnamed(chunk, survey, misfits)
        damage = [chunk.damage.get(i) for i in range(num)] if chunk.damage else None
        yield pa.Table.from_arrays(
            [
                *arrays,
                pa.array(np.arange(start, start + num)),
                pa.nulls(num, pa.string()) if damage is None else pa.array(damage, pa.string()),
                _misfit_texts(misfits, chunk, survey) if misfits else pa.nulls(num, pa.string()),
            ],
            names=[*names, *HIDDEN],
        )
        start += num


def check_columns(file: SourceFile, names: Sequence[str]) -> None:
    """Raise SourceInvalidError for a table with too many columns, or two of the same name."""
    if len(names) > MAX_COLUMNS:
        raise SourceInvalidError(
            f"{file.name}: found {len(names):,} columns, expected {MAX_COLUMNS:,} at most. Join "
            "the columns of a vector into one of lists, or leave columns out."
        )
    if twice := sorted(name for name, num in Counter(names).items() if num > 1):
        raise SourceInvalidError(
            f"{file.name}: found the columns {format_names(twice)} twice. Rename one of them."
        )


def check_fields(file: SourceFile, path: str, kind: pa.DataType) -> None:
    """Raise SourceInvalidError for two fields of the same name in a struct, at any depth."""
    fields = [kind.field(i) for i in range(kind.num_fields)]
    names = [f.name for f in fields]
    if pa.types.is_struct(kind) and len({*names}) < len(names):
        raise SourceInvalidError(
            f"{file.name}: column {path!r} has two fields of the same name among "
            f"{format_names(names)}. Rename one of them."
        )
    for f in fields:
        check_fields(file, f"{path}.{f.name}", f.type)


def describe(chunk: Chunk) -> ChunkSchema:
    """Return the chunk without its data."""
    mixed = frozenset(name for cells in chunk.misfits.values() for name in cells)
    return ChunkSchema(chunk.file, chunk.first_row, chunk.table.num_rows, chunk.table.schema, mixed)


def plain_table(table: pa.Table) -> tuple[pa.Table, dict[str, tuple[int, ...]]]:
    """Strip extension and dictionary types; return the shapes of tensor columns beside it."""
    shapes = {}
    columns = {}
    for f, column in zip(table.schema, table.columns, strict=True):
        columns[f.name], shape = to_plain(f, column)
        if shape is not None:
            shapes[f.name] = shape
    return pa.table(columns), shapes


def _empty(schema: pa.Schema) -> pa.Table:
    # Not `empty_table`: it makes no tensor whose dims have an order of their own.
    return pa.table([pa.chunked_array([], field.type) for field in schema], schema=schema)


def _unify(kinds: Sequence[pa.DataType]) -> pa.DataType | None:
    """Return the type that holds values of all of these, None where there is none."""
    known = kinds[0]
    for kind in kinds[1:]:
        pair = [pa.schema({"v": known}), pa.schema({"v": kind})]
        try:
            known = pa.unify_schemas(pair, promote_options="permissive").field(0).type
        except pa.ArrowException:
            return None
    return known


def _to_signed(kind: pa.DataType) -> pa.DataType:
    """Return int64 for uint64, also in lists: tables have no other, and what is more, no place."""
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_to_signed(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_to_signed(kind.value_type)), kind.list_size)
    return pa.int64() if pa.types.is_uint64(kind) else kind


def _most_common(tables: TableSource, names: Sequence[str]) -> dict[str, pa.DataType]:
    """Return the type that most values of each column have, whatever their order is."""
    if not names:
        return {}
    counts: dict[str, Counter[pa.DataType]] = {name: Counter() for name in names}
    files: dict[tuple[str, pa.DataType], SourceFile] = {}
    for chunk in tables.chunks(names):
        table, _ = plain_table(chunk.table)
        for name in table.schema.names:
            if name in counts:
                column = table.column(name)
                counts[name][_to_signed(column.type)] += len(column) - column.null_count
                files.setdefault((name, _to_signed(column.type)), chunk.file)
        for cells in chunk.misfits.values():
            for name in cells.keys() & counts.keys():
                counts[name][kind := _type_of(cells[name])] += 1
                files.setdefault((name, kind), chunk.file)
    ranked = {name: _by_frequency(several) for name, several in counts.items()}
    for name, kinds in ranked.items():
        if len(kinds) > 1 and kinds[0][0] == kinds[1][0]:
            second = next(k for k in counts[name] if _unify([k, kinds[1][1]]) is not None)
            raise SourceInvalidError(
                f"{files[name, second].name}: column {name!r}: found {kinds[1][0]:,} values of "
                f"type {kinds[1][1]} and as many of type {kinds[0][1]}, expected one type. Convert "
                "the values of one type to the other."
            )
    return {name: kinds[0][1] for name, kinds in ranked.items()}


def _by_frequency(counts: Mapping[pa.DataType, int]) -> list[tuple[int, pa.DataType]]:
    """Return how many values have each type, those that one type holds counted together."""
    joined: list[tuple[int, pa.DataType]] = []
    for kind, num in sorted(counts.items(), key=lambda item: (-item[1], str(item[0]))):
        for i, (total, known) in enumerate(joined):
            if (wider := _unify([known, kind])) is not None:
                joined[i] = (total + num, wider)
                break
        else:
            joined.append((num, kind))
    return sorted(joined, key=lambda one: (-one[0], str(one[1])))


def _type_of(value: Any) -> pa.DataType:
    """Return the type of a misfit, as a format with types of its own has it."""
    try:
        return pa.array([value]).type
    except OverflowError:
        return pa.int64()
    except (pa.ArrowException, UnicodeError, TypeError, ValueError):
        return pa.string()


def _same_shapes(
    shapes: dict[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], file: SourceFile
) -> None:
    for name, shape in found.items():
        if shapes.setdefault(name, shape) != shape:
            raise SourceInvalidError(
                f"{file.name}: column {name!r} has shape {list(shape)}, expected "
                f"{list(shapes[name])} as in the files before it. Ingest it into another dataset."
            )


def _fit(column: Any, kind: pa.DataType) -> tuple[Any, dict[int, Any]]:
    """Return a column as another type, and the values that it does not hold, which are null."""
    if column.type == kind:
        return column, {}
    if _unify([_to_signed(column.type), kind]) is None:
        # Never by a cast: "1" is no number, and true not 1.
        wrong = np.flatnonzero(np.asarray(column.is_valid()))
        fitted = pa.nulls(len(column), kind)
    else:
        try:
            return column.cast(kind), {}
        except pa.ArrowException:
            wrong = np.asarray(_uncast(column, kind), np.int64)
        is_kept = np.ones(len(column), np.bool_)
        is_kept[wrong] = False
        at = pa.array(np.arange(len(column)), mask=~is_kept)
        fitted = column.take(at).cast(kind)
    values = column.take(pa.array(wrong)).to_pylist()
    return fitted, dict(zip(wrong.tolist(), values, strict=True))


def _uncast(column: Any, kind: pa.DataType, start: int = 0) -> list[int]:
    """Return the rows that do not survive a cast, by halves."""
    try:
        column.cast(kind)
    except pa.ArrowException:
        if len(column) == 1:
            return [start]
        half = len(column) // 2
        # Not slices: the cast of one looks at the items of all its lists.
        first, second = np.split(np.arange(len(column)), [half])
        return [
            *_uncast(column.take(pa.array(first)), kind, start),
            *_uncast(column.take(pa.array(second)), kind, start + half),
        ]
    return []


def _restore(
    column: Any, name: str, chunk: Chunk, misfits: dict[int, dict[str, Any]]
) -> pa.Array | pa.ChunkedArray:
    """Put back what is a misfit in its chunk and none in the whole source; note the others."""
    known: dict[int, pa.Scalar] = {}
    for row, cells in chunk.misfits.items():
        if name not in cells:
            continue
        try:
            one = pa.array([cells[name]])
            if _unify([one.type, column.type]) is None:
                raise pa.ArrowInvalid("of another type")
            known[row] = one.cast(column.type)[0]
        except OverflowError:
            # A float where the column has floats and holds it: 10**400 is no float either.
            if pa.types.is_floating(column.type) and abs(cells[name]) <= sys.float_info.max:
                known[row] = pa.scalar(float(cells[name]), column.type)
            else:
                misfits.setdefault(row, {})[name] = cells[name]
        except (pa.ArrowException, UnicodeError, TypeError, ValueError):
            misfits.setdefault(row, {})[name] = cells[name]
    if not known:
        return column
    there = np.zeros(len(column), np.bool_)
    there[[*known]] = True
    values = pa.array([known[row].as_py() for row in sorted(known)], column.type)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    at = np.where(there, len(column) + np.cumsum(there) - 1, np.arange(len(column)))
    return pa.concat_arrays([column, values]).take(pa.array(at))


def _add_unnamed(chunk: Chunk, survey: Survey, misfits: dict[int, dict[str, Any]]) -> None:
    """Add the misfits of names that no column can have."""
    for row, cells in chunk.misfits.items():
        for name in cells.keys() - {*survey.schema.names}:
            misfits.setdefault(row, {})[name] = cells[name]


def _misfit_texts(
    misfits: Mapping[int, Mapping[str, Any]], chunk: Chunk, facts: Survey
) -> pa.Array:
    texts: list[str | None] = [None] * chunk.table.num_rows
    for row, cells in misfits.items():
        texts_of = {}
        for name, value in cells.items():
            expected = "what most rows have"
            if name in facts.schema.names:
                kind = facts.schema.field(name).type
                expected = f"{_format_kind(kind)} as in most rows"
            message = (
                f"{chunk.place(row)}, column {name!r}: found {_format_value(value)}, expected "
            )
            texts_of[name] = [_json_value(value), message + expected]
        texts[row] = json.dumps(texts_of, default=str)
    return pa.array(texts, pa.string())


def _json_value(value: Any) -> Any:
    """Return a value for JSON that any reader takes: bytes as base64, half characters as JSON."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping) and all(is_encodable(str(key)) for key in value):
        return {str(key): _json_value(sub) for key, sub in value.items()}
    if isinstance(value, Mapping):
        return {"json": json.dumps(value)}
    if isinstance(value, list | tuple):
        return [_json_value(sub) for sub in value]
    if isinstance(value, str) and not is_encodable(value):
        return {"json": json.dumps(value)}
    return value


def is_encodable(text: str) -> bool:
    """Whether UTF-8 can hold a text: lone surrogates, which JSON can spell, it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _format_value(value: Any) -> str:
    shown = repr(value)
    shown = shown if is_encodable(shown) else ascii(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _format_kind(kind: pa.DataType) -> str:
    """Return what a person calls a type."""
    types = pa.types
    if types.is_integer(kind):
        return "a whole number of 64 bits at most"
    if types.is_floating(kind) or types.is_decimal(kind):
        return "a number"
    if types.is_boolean(kind):
        return "true or false"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text in UTF-8"
    if types.is_list(kind) or types.is_fixed_size_list(kind):
        return f"a list ({kind})"
    return "no value" if types.is_null(kind) else str(kind)


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
        """Write one table. Raises: StorageError if the disk takes no more."""
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        data = sink.getvalue()
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise StorageError(
                f"{tempfile.gettempdir()}: too little space for the parsed source "
                f"({error.strerror}), "
                f"expected {(self._end + data.size) >> 20} MiB or more. Free some space, or set "
                "TMPDIR to a folder on a larger disk."
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
