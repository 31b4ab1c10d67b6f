"""RLlib's offline data: column Parquet, JSON lines of sample batches, and JSON lines of rows.

A sample batch is one object whose columns are lists: {"type": "SampleBatch", "obs": [[...], ...]}.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.formats.format import Reading, ReadOptions
from replaylake.datastore.formats.jsonl import JsonTables, first_object, json_chunks
from replaylake.datastore.formats.parquet import ParquetTables, is_parquet, parquet_columns
from replaylake.datastore.formats.source import SourceFile
from replaylake.datastore.formats.tables import Chunk, ChunkSchema, describe
from replaylake.datastore.formats.tabular import TabularReading

_TYPE: Final = "type"
# Of RLlib's own column names, those that no other format of ours has.
_OWN: Final = {"eps_id", "new_obs", "unroll_id", "agent_index", "action_dist_inputs", "terminateds"}
# Columns of a batch that have one entry a sequence, not one a step.
_PER_SEQUENCE: Final = "seq_lens"


class SampleBatchTables:
    """Chunks of column-list JSON: each line's lists, laid out as rows."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for file in self._files:
            row = 0
            for lines in json_chunks(file):
                for chunk in _rows(lines, row):
                    yield chunk
                    row += chunk.table.num_rows

    def schemas(self) -> Iterator[ChunkSchema]:
        return map(describe, self.chunks())

    def keep_as_text(self, column: str) -> bool:
        return False


class RllibFormat:
    """What RLlib's `output` config writes."""

    name = "rllib"

    def recognises(self, files: Sequence[SourceFile]) -> bool:
        if is_parquet(files[0]):
            return _is_rllib(parquet_columns(files[0]))
        found = first_object(files[0])
        return found is not None and (_is_batch(found) or _is_rllib(found))

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> Reading:
        if is_parquet(files[0]):
            return TabularReading(ParquetTables(files), options, files[0].name)
        found = first_object(files[0])
        if found is None:
            raise SourceInvalid(
                f"{files[0].name}: found neither Parquet nor a JSON object, expected one of "
                "RLlib's files. Name the format with --format."
            )
        if _is_batch(found):
            return TabularReading(SampleBatchTables(files), options, files[0].name)
        return TabularReading(JsonTables(files), options, files[0].name)


def _is_rllib(columns: Sequence[str] | Mapping[str, Any]) -> bool:
    return "obs" in columns and bool(_OWN & set(columns))


def _is_batch(found: Mapping[str, Any]) -> bool:
    if found.get(_TYPE) in ("SampleBatch", "MultiAgentBatch"):
        return True
    return _is_rllib(found) and isinstance(found.get("rewards"), list)


def _rows(lines: Chunk, first_row: int) -> Iterator[Chunk]:
    """Lay the lists of each line out as rows: runs of lines with even lists at once."""
    table = _columns_of_lists(lines)
    lengths = {name: _lengths(table.column(name)) for name in table.schema.names}
    stacked = np.stack(list(lengths.values()))
    even = (stacked == stacked[0]).all(axis=0) & (stacked[0] >= 0)
    bounds = np.flatnonzero(np.diff(even, prepend=~even[:1], append=~even[-1:]))
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        part = table.slice(start, end - start)
        if even[start]:
            flat = {n: part.column(n).combine_chunks().flatten() for n in part.schema.names}
            chunk = Chunk(lines.file, first_row, pa.table(flat))
            first_row += chunk.table.num_rows
            yield chunk
            continue
        for line in range(start, end):
            chunk = _uneven(lines, table.slice(line, 1), line, first_row)
            first_row += chunk.table.num_rows
            yield chunk


def _columns_of_lists(lines: Chunk) -> pa.Table:
    where, table = lines.file.name, lines.table
    if _TYPE in table.schema.names:
        kinds = set(pc.unique(table.column(_TYPE)).to_pylist())
        if "MultiAgentBatch" in kinds:
            raise SourceInvalid(
                f"{where}: found a MultiAgentBatch, expected SampleBatch lines. Multi-agent "
                "batches are not read yet: write one row a step, with an agent_id column."
            )
        table = table.drop_columns([_TYPE])
    if _PER_SEQUENCE in table.schema.names:
        table = table.drop_columns([_PER_SEQUENCE])
    for f in table.schema:
        if pa.types.is_string(f.type):
            raise SourceInvalid(
                f"{where}: column {f.name!r} is packed text (base64 of LZ4 of a pickle), expected "
                "a list. Packed columns are not read yet: write the log with "
                '"output_compress_columns": [].'
            )
        if not (pa.types.is_list(f.type) or pa.types.is_null(f.type)):
            raise SourceInvalid(
                f"{where}: column {f.name!r} holds {f.type}, expected a list, one entry a step. "
                "Name the format with --format jsonl if each line is one step."
            )
    return table


def _lengths(column: pa.ChunkedArray) -> Any:
    if pa.types.is_null(column.type):
        return np.full(len(column), -1)
    return np.asarray(pc.list_value_length(column).fill_null(-1))


def _uneven(lines: Chunk, one: pa.Table, line: int, first_row: int) -> Chunk:
    """Lay out a line whose lists differ in length.

    Absent columns are nulls. Otherwise no row can be trusted to hold what belongs together, so all
    are marked as damaged: their episodes are rejected whole.
    """
    lists = {name: one.column(name)[0].as_py() for name in one.schema.names}
    lengths = {name: len(values) for name, values in lists.items() if values is not None}
    num = max(lengths.values(), default=0)
    columns = {}
    for f in one.schema:
        kind = pa.null() if pa.types.is_null(f.type) else f.type.value_type
        values = lists[f.name] or []
        # Ids are repeated to the end, so that the rows beyond stay with their episode.
        filler = values[-1] if values and f.name == "eps_id" else None
        columns[f.name] = pa.array([*values, *[filler] * (num - len(values))], kind)
    damage = {}
    if len(set(lengths.values())) > 1:
        first = min(lengths, key=lambda name: lengths[name])
        longest = max(lengths, key=lambda name: lengths[name])
        text = (
            f"{lines.file.name} batch {lines.first_row + line}: column {first!r} has "
            f"{lengths[first]} entries and {longest!r} {lengths[longest]}, expected equal lengths"
        )
        damage = dict.fromkeys(range(num), text)
    return Chunk(lines.file, first_row, pa.table(columns), damage)
