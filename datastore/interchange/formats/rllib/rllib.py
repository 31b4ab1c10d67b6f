"""RLlib's offline data: column and episode Parquet, JSON of sample batches, JSON of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader, WriteResult
from replaylake.datastore.interchange.formats.generic.jsonl import JsonTables, first_object
from replaylake.datastore.interchange.formats.generic.parquet import (
    PARQUET_ERRORS,
    ParquetTables,
    is_parquet,
    parquet_columns,
    parquet_schema,
)
from replaylake.datastore.interchange.formats.generic.standard import read_declaration
from replaylake.datastore.interchange.formats.rllib.batches import POLICY_BATCHES, TYPE, BatchTables
from replaylake.datastore.interchange.formats.rllib.columns import write_columns
from replaylake.datastore.interchange.formats.rllib.episodes import ITEM, EpisodeStateTables
from replaylake.datastore.interchange.formats.rllib.unpacking import (
    TablesWithoutColumns,
    UnpackedTables,
)
from replaylake.datastore.interchange.formats.tabular.arrays import is_text
from replaylake.datastore.interchange.formats.tabular.reader import Declaration, TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, ChunkSchema, TableSource
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import unreadable_error

# Of RLlib's own column names, those that no other format of ours has.
_RLLIB_COLUMNS: Final = {
    "eps_id",
    "new_obs",
    "unroll_id",
    "agent_index",
    "action_dist_inputs",
    "terminateds",
}
_PICKLED_COLUMN: Final = "ray.data.arrow_pickled_object"
_TENSORS: Final = ("obs", "actions", "new_obs")
# Columns of text that name things.
_NAMES: Final = ("eps_id", "agent_id", "module_id", "policy")
_MODULE: Final = "module_id"
_TICK: Final = "t"
# Columns that say nothing where all of their cells are null, or name nobody.
_OPTIONAL: Final = ("agent_id", "module_id", "policy", "policy_version", "timestamp", "action_mask")
VARIABLE: Final = "ray.data.arrow_variable_shaped_tensor"
_TENSOR: Final = "ray.data.arrow_tensor"


class RllibFormat:
    """What RLlib's `output` config writes; writes column Parquet, which its `input_` reads."""

    name = "rllib"
    about = "RLlib's offline data: column or episode Parquet, JSON sample batches"
    is_folder = False
    suffix = ".parquet"

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        if is_parquet(files[0]):
            schema = parquet_schema(files[0])
            return _is_rllib(schema.names) or _is_episodes(schema)
        body = first_object(files[0])
        return body is not None and (_is_batch(body) or _is_rllib(body))

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        where, notes = files[0].name, list[str]()
        if is_parquet(files[0]):
            declared = _make_declaration(files, options, notes)
            return TabularReader(_parquet(files, notes), options, where, declared)
        body = first_object(files[0])
        if body is None:
            raise SourceInvalidError(
                f"{where}: found neither Parquet nor a JSON object, expected one of "
                "RLlib's files. Name the format with `format`."
            )
        if not _is_batch(body):
            tables: TableSource = UnpackedTables(JsonTables(files), notes)
            return TabularReader(tables, options, where, Declaration(notes=notes, observed="obs"))
        tables = BatchTables(JsonTables(files), notes)
        if not _has_ticks(body) or "step" in options.mapping:
            return TabularReader(tables, options, where, Declaration(notes=notes, observed="obs"))
        # Agents that do not act at each tick have gaps in `t`: it puts their rows in order, and is
        # the environment's step, not theirs.
        notes.append("t of the multi-agent batches is taken as the environment's step")
        options = replace(options, order_by=options.order_by or (_TICK,))
        fields = {} if "env_step" in options.mapping else {"env_step": _TICK}
        return TabularReader(
            tables, options, where, Declaration(fields=fields, notes=notes, observed="obs")
        )

    def write(self, episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> WriteResult:
        return write_columns(episodes, spec, path)


def _is_rllib(columns: Sequence[str] | Mapping[str, Any]) -> bool:
    return "obs" in columns and bool(_RLLIB_COLUMNS & set(columns))


def _is_batch(body: Mapping[str, Any]) -> bool:
    if body.get(TYPE) in ("SampleBatch", "MultiAgentBatch"):
        return True
    return _is_rllib(body) and isinstance(body.get("rewards"), list)


def _has_ticks(body: Mapping[str, Any]) -> bool:
    batches = body.get(POLICY_BATCHES)
    first = next(iter(batches.values()), None) if isinstance(batches, dict) else None
    return isinstance(first, dict) and _TICK in first


def _is_episodes(schema: pa.Schema) -> bool:
    if schema.names != [ITEM]:
        return False
    kind = schema.field(ITEM).type
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _make_declaration(
    files: Sequence[SourceFile], options: ReadOptions, notes: list[str]
) -> Declaration:
    own = read_declaration(map(parquet_schema, files), options, files[0].name) or Declaration()
    names = parquet_columns(files[0])
    # The module of the new API stack is what acted, as the policy of the old one is.
    is_named = _MODULE in names and not {"policy"} & {*names, *options.mapping}
    fields = {"policy": _MODULE} if is_named and not _is_empty_column(files, _MODULE) else {}
    return replace(own, fields=fields, notes=notes, observed="obs")


def _parquet(files: Sequence[SourceFile], notes: list[str]) -> TableSource:
    schema = parquet_schema(files[0])
    if _is_episodes(schema):
        return EpisodeStateTables(files, notes)
    tables: TableSource = ParquetTables(files)
    rewards = schema.field("rewards").type if "rewards" in schema.names else pa.null()
    if pa.types.is_list(rewards) or pa.types.is_large_list(rewards):
        return BatchTables(tables, notes)
    pickled = [f.name for f in schema if _extension(f) == _PICKLED_COLUMN]
    if pickled:
        notes.append(f"columns of pickled Python objects, not read: {', '.join(pickled)}")
    tables, varying = _with_one_shape(tables, schema)
    if varying:
        notes.append(f"columns of tensors of varying shape, not read: {', '.join(varying)}")
    empty = [name for name in _OPTIONAL if name in schema.names and _is_empty_column(files, name)]
    if empty:
        notes.append(f"columns that hold nothing, left out: {', '.join(empty)}")
    omitted = [*pickled, *varying, *empty]
    known: TableSource = TablesWithoutColumns(tables, omitted) if omitted else tables
    # RLlib packs any of its columns that are arrays, under whatever name.
    return UnpackedTables(known, notes) if any(_may_be_packed(f) for f in schema) else known


def _with_one_shape(tables: TableSource, schema: pa.Schema) -> tuple[TableSource, list[str]]:
    """Return the tables with tensors of one shape, and the further columns that have several.

    Those that steps need stay as they are, and reading refuses them by name.
    """
    names = [f.name for f in schema if _extension(f) == VARIABLE]
    shapes = {name: find_common_shape(tables, name) for name in names}
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    varying = [name for name in names if name not in known and name not in _TENSORS]
    return (OneShapeTables(tables, known) if known else tables), varying


def _may_be_packed(field: pa.Field) -> bool:
    return is_text(field.type) and field.name not in _NAMES


def _extension(field: pa.Field) -> str:
    if isinstance(field.type, pa.BaseExtensionType):  # where Ray is loaded
        return str(field.type.extension_name)
    name: bytes = (field.metadata or {}).get(b"ARROW:extension:name", b"")
    return name.decode(errors="replace")


def _is_empty_column(files: Sequence[SourceFile], name: str) -> bool:
    """Whether by the footers a column holds nulls and empty texts alone."""
    for file in files:
        schema = parquet_schema(file)
        if name not in schema.names or pa.types.is_null(schema.field(name).type):
            continue
        try:
            metadata = pq.read_metadata(file.path)
        except PARQUET_ERRORS as error:
            raise unreadable_error(file.name, error) from error
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                if column.path_in_schema.split(".")[0] != name:
                    continue
                statistics = column.statistics
                if statistics is None or not statistics.has_null_count:
                    return False
                if statistics.null_count < group.num_rows and not (
                    statistics.has_min_max and statistics.min == statistics.max == ""
                ):
                    return False
    return True


Shape = tuple[int, ...]


class OneShapeTables(TableSource):
    """Tables some of whose variable-shaped tensor columns have a known shape."""

    reread_cheaply = True

    def __init__(self, tables: TableSource, shapes: Mapping[str, Shape]) -> None:
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


def find_common_shape(tables: TableSource, name: str) -> Shape | None:
    """Return the shape that all cells of a column have; None where two differ, or none is there.

    Cost: a pass over the column. Raises: SourceInvalidError for cells that are no tensors.
    """
    shape: Shape | None = None
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
            if (shape := shape or first) != first:
                return None
    return shape


def _cells(column: Any, name: str, where: str) -> pa.ChunkedArray:
    """Return the structs of a column, without the type that Ray gives it where it is loaded."""
    if isinstance(column.type, pa.BaseExtensionType):
        chunks = [chunk.storage for chunk in column.chunks]
        column = pa.chunked_array(chunks, column.type.storage_type)
    names = {f.name for f in column.type} if pa.types.is_struct(column.type) else set()
    if not {"data", "shape"} <= names:
        raise SourceInvalidError(
            f"{where}: column {name!r} holds {column.type}, expected a struct of data and shape, "
            "as Ray writes tensors of varying shape. Write it as lists of numbers."
        )
    return column
