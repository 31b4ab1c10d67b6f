"""Struct fields: parts of a log's nested columns as columns, where a mapping names them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.interchange.formats.tabular.tables import (
    CachedTables,
    Chunk,
    ChunkSchema,
    TableSource,
)


def find_struct_fields(spelled: Iterable[str], schema: pa.Schema) -> dict[str, tuple[str, ...]]:
    """Return the names that are no column but a field of one, such as infos.TimeLimit.truncated.

    Each with its path: the column and the fields below it, whose own names may have dots, as
    Gym's `TimeLimit.truncated` does.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name in spelled:
        if name in schema.names:
            continue
        for root in schema:
            if name.startswith(f"{root.name}.") and pa.types.is_struct(root.type):
                rest = _find_path(name.removeprefix(f"{root.name}."), root.type)
                if rest is not None:
                    found[name] = (root.name, *rest)
    return found


def _find_path(name: str, kind: pa.DataType) -> tuple[str, ...] | None:
    for i in range(kind.num_fields):
        field = kind.field(i)
        if name == field.name:
            return (field.name,)
        if name.startswith(f"{field.name}.") and pa.types.is_struct(field.type):
            rest = _find_path(name.removeprefix(f"{field.name}."), field.type)
            if rest is not None:
                return (field.name, *rest)
    return None


class StructFieldTables(TableSource):
    """Tables with further columns that are fields of their columns.

    flags: the names of ends; where a row has no such field, it does not end there.
    """

    # Fields share the memory of their column.
    reread_cheaply = True

    def __init__(
        self,
        tables: CachedTables,
        paths: Mapping[str, tuple[str, ...]],
        flags: Collection[str],
    ) -> None:
        self._tables, self._paths, self._flags = tables, paths, flags

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        names = columns
        if columns is not None:
            names = list(dict.fromkeys(self._paths.get(name, (name,))[0] for name in columns))
        for chunk in self._tables.chunks(names):
            yield replace(chunk, table=self._with_fields(chunk.table, columns))

    def schemas(self) -> Iterator[ChunkSchema]:
        for part in self._tables.schemas():
            # Not `empty_table`: it makes no tensor whose dims have an order of their own.
            columns = [pa.chunked_array([], field.type) for field in part.schema]
            empty = pa.table(columns, schema=part.schema)
            yield replace(part, schema=self._with_fields(empty, None).schema)

    def line(self, row: int) -> int | None:
        return self._tables.line(row)

    @property
    def settled(self) -> frozenset[str]:
        return self._tables.settled

    def settle(self, columns: Sequence[str]) -> None:
        self._tables.settle([name for name in columns if name not in self._paths])

    def _with_fields(self, table: pa.Table, columns: Sequence[str] | None) -> pa.Table:
        for name in self._paths:
            if columns is None or name in columns:
                table = table.append_column(name, self._take(table, name))
        if columns is None:
            return table
        return table.select([name for name in columns if name in table.column_names])

    def _take(self, table: pa.Table, name: str) -> pa.ChunkedArray:
        root, *path = self._paths[name]
        values = pa.chunked_array([pa.nulls(table.num_rows)])
        if root in table.column_names:
            column = table.column(root)
            if _has_path(column.type, path):
                values = pc.struct_field(column, path)
        if name in self._flags and (pa.types.is_null(values.type) or values.null_count):
            kind = pa.bool_() if pa.types.is_null(values.type) else values.type
            values = values.cast(kind).fill_null(pa.scalar(0, pa.int8()).cast(kind))
        return values


def _has_path(kind: pa.DataType, path: Sequence[str]) -> bool:
    for name in path:
        if not pa.types.is_struct(kind) or (index := kind.get_field_index(name)) < 0:
            return False
        kind = kind.field(index).type
    return True
