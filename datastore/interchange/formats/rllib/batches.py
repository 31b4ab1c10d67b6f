"""RLlib's sample batches: objects whose columns are lists or packed arrays, laid out as rows.

{"type": "SampleBatch", "obs": [[...], ...]} has a list a column, or a packed text (packed.py).
{"type": "MultiAgentBatch", "count": n, "policy_batches": {"mover": {"obs": ...}}} has one such
object a policy. Layout: ray/rllib/offline/json_writer.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.rllib.unpacking import unpack_batches
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, TableSource

TYPE: Final = "type"
POLICY_BATCHES: Final = "policy_batches"
POLICY: Final = "policy"
# Columns of a batch that have one entry a sequence, not one a step; and the batch's length.
_NOT_PER_STEP: Final = ("seq_lens", "count")
# Whose shapes and kinds the policies of one log must share.
_SPACES: Final = ("obs", "actions")


class BatchTables(TableSource):
    """Chunks of rows, from tables with one batch a row; policy ids become a column `policy`.

    `notes` say what is left out.
    """

    def __init__(self, batches: TableSource, notes: list[str]) -> None:
        self._batches = batches
        self._notes = notes

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        file, row = None, 0
        spaces: dict[str, tuple[str, str]] = {}
        for lines in self._batches.chunks():
            lines.refuse_misfits()
            row = row if lines.file is file else 0
            file = lines.file
            is_multi = POLICY_BATCHES in lines.table.schema.names
            self._note_left_out(lines.table.schema.names, is_multi=is_multi)
            for part, policy in _by_policy(lines) if is_multi else [(lines, None)]:
                for chunk in _rows(part, row, self._notes):
                    row += chunk.table.num_rows
                    if policy is not None:
                        _check_spaces(chunk, policy, spaces)
                    yield _with_policy(chunk, policy) if is_multi else chunk

    def _note_left_out(self, names: Sequence[str], *, is_multi: bool) -> None:
        """Say what is of a batch and not of its steps; its type is what it is read by."""
        of_batch = {*names} - {TYPE, POLICY_BATCHES} if is_multi else {*names} & {*_NOT_PER_STEP}
        for name in sorted(of_batch):
            note = f"column {name!r} is of a whole batch and not of its steps: left out"
            if note not in self._notes:
                self._notes.append(note)


def _with_policy(chunk: Chunk, policy: str | None) -> Chunk:
    names = pa.repeat(pa.scalar(policy, pa.string()), chunk.table.num_rows)
    table = chunk.table.append_column(POLICY, names)
    return Chunk(chunk.file, chunk.first_row, table, chunk.damage)


def _by_policy(lines: Chunk) -> Iterator[tuple[Chunk, str | None]]:
    """Yield the lines of sample batches, then those of each policy, as columns of lists."""
    table = lines.table
    batches = table.column(POLICY_BATCHES).combine_chunks()
    if not pa.types.is_struct(batches.type):
        raise SourceInvalidError(
            f"{lines.file.name}: {POLICY_BATCHES!r} holds {batches.type}, expected an object with "
            "one batch per policy, as in RLlib's MultiAgentBatch."
        )
    single = batches.is_null()
    if pc.any(single).as_py():
        table = table.drop_columns([POLICY_BATCHES]).filter(single)
        yield Chunk(lines.file, lines.first_row, table), None
    for f in batches.type:
        batch = pc.struct_field(batches, f.name)
        if not pa.types.is_struct(f.type):
            continue
        batch = batch.filter(batch.is_valid())
        columns = {inner.name: pc.struct_field(batch, inner.name) for inner in f.type}
        if len(batch) and columns:
            yield Chunk(lines.file, lines.first_row, pa.table(columns)), f.name


def _rows(lines: Chunk, first_row: int, notes: list[str]) -> Iterator[Chunk]:
    """Lay the lists of each line out as rows: runs of lines with even lists at once."""
    line = lines.first_row
    for part in unpack_batches(lines, notes):
        table = _columns_of_lists(part, lines.file.name)
        for chunk in _lay_out(Chunk(lines.file, line, table), first_row):
            yield chunk
            first_row += chunk.table.num_rows
        line += part.num_rows


def _lay_out(lines: Chunk, first_row: int) -> Iterator[Chunk]:
    table = lines.table
    if not table.num_columns or not table.num_rows:
        return
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
            chunk = _lay_out_uneven(lines, table.slice(line, 1), line, first_row)
            first_row += chunk.table.num_rows
            yield chunk


def _columns_of_lists(table: pa.Table, where: str) -> pa.Table:
    dropped = [name for name in (TYPE, *_NOT_PER_STEP) if name in table.schema.names]
    table = table.drop_columns(dropped)
    for f in table.schema:
        if not (pa.types.is_list(f.type) or pa.types.is_large_list(f.type)) and not (
            pa.types.is_null(f.type)
        ):
            raise SourceInvalidError(
                f"{where}: column {f.name!r} holds {f.type}, expected a list, one entry per step, "
                "or a packed array. Name the format with `format` jsonl if each line is one step."
            )
    return table


def _lengths(column: pa.ChunkedArray) -> Any:
    if pa.types.is_null(column.type):
        return np.full(len(column), -1)
    return np.asarray(pc.list_value_length(column).fill_null(-1))


def _lay_out_uneven(lines: Chunk, one: pa.Table, line: int, first_row: int) -> Chunk:
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


def _check_spaces(chunk: Chunk, policy: str, spaces: dict[str, tuple[str, str]]) -> None:
    """Refuse policies whose observations or actions have different shapes or kinds."""
    for name in _SPACES:
        space = _space(chunk.table, name)
        if space is None:
            continue
        other, expected = spaces.setdefault(name, (policy, space))
        if space != expected:
            raise SourceInvalidError(
                f"{chunk.file.name}: the {name} of policy {policy!r} are {space}, those of policy "
                f"{other!r} {expected}, expected one space in a dataset. Write each policy's "
                "batches to a separate log, and ingest the logs into separate datasets."
            )


def _space(table: pa.Table, name: str) -> str | None:
    """Describe a column's values by the first of them, as `floats [4]`."""
    if name not in table.schema.names or not table.num_rows:
        return None
    values = table.column(name).slice(0, 1).combine_chunks()
    sizes = []
    while pa.types.is_list(values.type) or pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
        sizes.append(len(values))
        values = values.slice(0, 1)
    if pa.types.is_struct(values.type):
        return f"dicts of {sorted(f.name for f in values.type)}"
    return f"{'floats' if pa.types.is_floating(values.type) else 'whole numbers'} {sizes}"
