"""RLlib's packed columns, unpacked: a whole column a batch, or one value a row.

Chunks are cut where 16 MiB are unpacked, so that memory holds no more than that at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.spaces import (
    Values,
    as_batch,
    concatenate,
    num_bytes,
    num_values,
)
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.packed.packed import (
    NoArraysError,
    Unpacker,
    is_packed,
)
from replaylake.datastore.interchange.formats.tabular.arrays import is_text
from replaylake.datastore.interchange.formats.tabular.episode_rows import CHUNK_BYTES, to_column
from replaylake.datastore.interchange.formats.tabular.fields import ALIASES, DONE_ALIASES
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, ChunkSchema, TableSource

# What steps are made of; any other column may be left out.
_NEEDED: Final = {*DONE_ALIASES}.union(*ALIASES.values())


class TablesWithoutColumns(TableSource):
    """Tables of Parquet files, without some of their columns."""

    reread_cheaply = True

    def __init__(self, tables: TableSource, names: Sequence[str]) -> None:
        self._tables = tables
        self._names = {*names}

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for chunk in self._tables.chunks(columns):
            yield replace(
                chunk, table=chunk.table.select(self._remaining_names(chunk.table.schema))
            )

    def schemas(self) -> Iterator[ChunkSchema]:
        for part in self._tables.schemas():
            schema = pa.schema(
                [part.schema.field(name) for name in self._remaining_names(part.schema)]
            )
            yield replace(part, schema=schema)

    def _remaining_names(self, schema: pa.Schema) -> list[str]:
        return [name for name in schema.names if name not in self._names]


class UnpackedTables(TableSource):
    """Tables of one row a step, some of whose cells are packed; `notes` say what is left out."""

    def __init__(self, tables: TableSource, notes: list[str]) -> None:
        self._tables = tables
        self._notes = notes

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for chunk in self._tables.chunks(columns):
            start = 0
            for part in _unpack(chunk, "row", self._notes, per_row=True):
                yield chunk.part(start, part)
                start += part.num_rows


def is_packed_column(column: pa.ChunkedArray) -> bool:
    """Whether the first cell that is there is a packed text."""
    if not is_text(column.type):
        return False
    first = next((cell for cell in column if cell.is_valid), None)
    return first is not None and is_packed(first.as_py())


def unpack_batches(lines: Chunk, notes: list[str]) -> Iterator[pa.Table]:
    """Yield runs of batches whose packed columns are lists, one entry a step.

    A further column whose cells hold no arrays, as infos do, is left out, which `notes` say.
    Raises: SourceInvalidError for a cell that is no packed array.
    """
    yield from _unpack(lines, "batch", notes, per_row=False)


def _unpack(chunk: Chunk, what: str, notes: list[str], *, per_row: bool) -> Iterator[pa.Table]:
    """Cut a table where its packed cells change in kind, or are 16 MiB, and unpack them."""
    table = _without_objects(chunk.table, notes)
    packed = [name for name in table.schema.names if is_packed_column(table.column(name))]
    if not packed:
        yield table
        return
    unpackers = {name: Unpacker() for name in packed}
    texts = {name: table.column(name).to_pylist() for name in packed}
    buffer: list[dict[str, Values | None]] = []
    kinds: Any = None
    start = held_bytes = 0
    for row in range(table.num_rows):
        where = f"{chunk.file.name} {what} {chunk.first_row + row}"
        columns = {
            name: _cell(texts[name][row], unpackers[name], f"{where}, column {name!r}", per_row)
            for name in packed
        }
        now = {name: _kind(values) for name, values in columns.items()}
        if buffer and (now != kinds or held_bytes >= CHUNK_BYTES):
            yield _replace_columns(table.slice(start, len(buffer)), buffer, per_row)
            start, buffer, held_bytes = row, [], 0
        buffer.append(columns)
        kinds = now
        held_bytes += sum(num_bytes(values) for values in columns.values() if values is not None)
    if buffer:
        yield _replace_columns(table.slice(start, len(buffer)), buffer, per_row)


def _without_objects(table: pa.Table, notes: list[str]) -> pa.Table:
    """Leave out further columns whose first cell holds no arrays."""
    for name in table.schema.names:
        if name in _NEEDED or not is_packed_column(table.column(name)):
            continue
        try:
            Unpacker()(next(cell.as_py() for cell in table.column(name) if cell.is_valid), name)
        except NoArraysError as error:
            reason = str(error).split(", expected", 1)[0].removeprefix(f"{name}: found ")
            note = f"column {name!r} holds {reason}, packed: left out"
            if note not in notes:
                notes.append(note)
            table = table.drop_columns([name])
        except SourceInvalidError:
            continue  # refused below, with its place
    return table


def _cell(text: Any, unpacked: Unpacker, where: str, per_row: bool) -> Values | None:
    """Unpack a cell to entries [n, ...]; n is 1 where a cell is one row's value."""
    if text is None:
        return None
    values: Values = unpacked(text, where)
    if per_row:
        values = as_batch(values)
    if len(lengths := set(_lengths(values))) > 1 or None in lengths:
        raise SourceInvalidError(
            f"{where}: found packed arrays with {sorted(map(str, lengths))} entries, expected one "
            "entry per step in each. Write the log again, or leave the file out."
        )
    return values


def _lengths(values: Values) -> Iterator[int | None]:
    if isinstance(values, Mapping):
        for part in values.values():
            yield from _lengths(part)
    else:
        yield len(values) if values.ndim else None


def _replace_columns(
    table: pa.Table, buffer: list[dict[str, Values | None]], per_row: bool
) -> pa.Table:
    for name in buffer[0]:
        # Cells of one run are all there or all absent.
        parts = [part for columns in buffer if (part := columns[name]) is not None]
        array = pa.nulls(len(buffer))
        if parts:
            array = to_column(concatenate(parts), name)
        if parts and not per_row:
            offsets = np.cumsum([0, *map(num_values, parts)]).astype(np.int32)
            array = pa.ListArray.from_arrays(pa.array(offsets), array)
        table = table.set_column(table.schema.names.index(name), name, array)
    return table


def _kind(values: Values | None) -> Any:
    if values is None:
        return None
    if isinstance(values, Mapping):
        return tuple((key, _kind(part)) for key, part in values.items())
    return values.dtype, values.shape[1:]
