"""Ray Data's variable-shaped tensor columns: where all of one have one shape, they are tensors.

Ray writes them wherever two blocks of a column differed in shape, and where it could not know that
they do not. A cell is a struct of `data`, the numbers in C order, and `shape`; what the column is
stands in the field's metadata (ray/data/_internal/tensor_extensions/arrow.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, ChunkSchema, Tables

VARIABLE: Final = "ray.data.arrow_variable_shaped_tensor"
_TENSOR: Final = "ray.data.arrow_tensor"

Shape = tuple[int, ...]


class OneShapeTables(Tables):
    """Tables some of whose variable-shaped tensor columns have a known shape."""

    reread_cheaply = True

    def __init__(self, tables: Tables, shapes: Mapping[str, Shape]) -> None:
        self._tables = tables
        self._shapes = shapes

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for chunk in self._tables.chunks(columns):
            yield replace(chunk, table=self._tensors(chunk.table, chunk.file.name))

    def schemas(self) -> Iterator[ChunkSchema]:
        for part in self._tables.schemas():
            empty = self._tensors(part.schema.empty_table(), part.file.name)
            yield replace(part, schema=empty.schema)

    def _tensors(self, table: pa.Table, where: str) -> pa.Table:
        for name, shape in self._shapes.items():
            at = table.schema.get_field_index(name)
            if at < 0:
                continue
            cells = _cells(table.column(name), name, where)
            column = pa.chunked_array([pc.struct_field(one, "data") for one in cells.chunks])
            metadata = {
                "ARROW:extension:name": _TENSOR,
                "ARROW:extension:metadata": json.dumps(list(shape)),
            }
            table = table.set_column(at, pa.field(name, column.type, metadata=metadata), column)
        return table


def shape_of(tables: Tables, name: str) -> Shape | None:
    """Return the shape that all cells of a column have; None where two differ, or none is there.

    Cost: a pass over the column. Raises: SourceInvalid for cells that are no tensors.
    """
    found: Shape | None = None
    for chunk in tables.chunks([name]):
        for part in _cells(chunk.table.column(name), name, chunk.file.name).chunks:
            there = part.drop_null()
            sizes = pc.struct_field(there, "shape")
            flat = np.asarray(sizes.flatten())
            if not len(there) or sizes.null_count or len(flat) % len(there):
                if len(there):
                    return None
                continue
            lengths = np.asarray(pc.list_value_length(sizes))
            rows = flat.reshape(len(there), -1)
            first = tuple(rows[0].tolist())
            if (lengths != rows.shape[1]).any() or (rows != rows[0]).any():
                return None
            if (found := found or first) != first:
                return None
    return found


def _cells(column: Any, name: str, where: str) -> pa.ChunkedArray:
    """Return the structs of a column, without the type that Ray gives it where it is loaded."""
    if isinstance(column.type, pa.BaseExtensionType):
        chunks = [chunk.storage for chunk in column.chunks]
        column = pa.chunked_array(chunks, column.type.storage_type)
    names = {f.name for f in column.type} if pa.types.is_struct(column.type) else set()
    if not {"data", "shape"} <= names:
        raise SourceInvalid(
            f"{where}: column {name!r} holds {column.type}, expected a struct of data and shape, "
            "as Ray writes tensors of varying shape. Write it as lists of numbers."
        )
    return column
