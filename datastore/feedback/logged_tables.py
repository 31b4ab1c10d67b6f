"""Logged tables: decisions, reports and served steps as SQL joins them, times as integers.

Columns that tables of older lakes lack are there and null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.schema import (
    EPISODE_ID,
    FINAL_OBSERVATION,
    REWARD,
    STEP,
    TERMINATED,
    TIMESTAMP,
    TRUNCATED,
)
from replaylake.datastore.feedback.decisions import (
    DECISION_ID,
    FEEDBACK_ID,
    MODE,
    REPORTED,
    REQUEST_ID,
    REWARDED_AT,
)
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.storage.table.table import TableSnapshot

# Which file of a table a row is in, and which row of all it is; of a report, its final observation.
FILE: Final = "file"
ROW: Final = "row"
_FINAL_ROW: Final = "final_row"


def read_decisions(decisions: TableSnapshot) -> pa.Table:
    """Return the names and times of decisions, and in which file each is."""
    has_step = STEP in decisions.schema.names
    names = [DECISION_ID, EPISODE_ID, REQUEST_ID, TIMESTAMP, *([STEP] if has_step else [])]
    parts = []
    for number, batch in enumerate(decisions.batches(names)):
        part = _as_integers(batch)
        if not has_step:
            part = part.append_column(STEP, pa.nulls(part.num_rows, pa.int32()))
        part = part.append_column(FILE, pa.array(np.full(part.num_rows, number, np.int32)))
        parts.append(part)
    if parts:
        return pa.concat_tables(parts)
    text = pa.string()
    return pa.schema(
        [(DECISION_ID, text), (EPISODE_ID, text), (REQUEST_ID, text), (TIMESTAMP, pa.int64()),
         (STEP, pa.int32()), (FILE, pa.int32())]
    ).empty_table()  # fmt: skip


_LATER: Final[Mapping[str, pa.DataType]] = {
    REQUEST_ID: pa.string(),
    EPISODE_ID: pa.string(),
    STEP: pa.int32(),
    FEEDBACK_ID: pa.string(),
    MODE: pa.string(),
}


def read_rewards(rewards: TableSnapshot) -> tuple[pa.Table, pa.ChunkedArray]:
    """Return the reports, and apart from them the final observations that there are."""
    later = [name for name in _LATER if name in rewards.schema.names]
    names = [DECISION_ID, TIMESTAMP, REWARD, TERMINATED, TRUNCATED, FINAL_OBSERVATION, *later]
    parts, finals, num_rows, num_finals = [], [], 0, 0
    kind = rewards.schema.field(FINAL_OBSERVATION).type
    for batch in rewards.batches(names):
        column = batch.column(FINAL_OBSERVATION)
        there = pc.is_valid(column).to_numpy()
        finals += column.filter(pa.array(there)).chunks
        place = pa.array(np.cumsum(there) - 1 + num_finals, mask=~there)
        num_finals += int(there.sum())
        part = _as_integers(batch.drop_columns([FINAL_OBSERVATION]))
        for name, absent in _LATER.items():
            if name not in later:
                part = part.append_column(name, pa.nulls(part.num_rows, absent))
        part = part.append_column(_FINAL_ROW, place)
        part = part.append_column(ROW, pa.array(np.arange(part.num_rows) + num_rows))
        num_rows += part.num_rows
        parts.append(part)
    if not parts:
        first = [(DECISION_ID, pa.string()), (TIMESTAMP, pa.int64()), (REWARD, pa.float64()),
                 (TERMINATED, pa.bool_()), (TRUNCATED, pa.bool_())]  # fmt: skip
        last = [(_FINAL_ROW, pa.int64()), (ROW, pa.int64())]
        parts = [pa.schema([*first, *_LATER.items(), *last]).empty_table()]
    columns = [DECISION_ID, TIMESTAMP, REWARD, TERMINATED, TRUNCATED, *_LATER, _FINAL_ROW, ROW]
    joined = pa.concat_tables([part.select(columns).cast(parts[0].select(columns).schema)
                               for part in parts])  # fmt: skip
    return joined, pa.chunked_array(finals, kind)


def read_written(snapshot: Snapshot) -> pa.Table:
    """Return the served steps."""
    kinds = {
        DECISION_ID: pa.string(), REWARD: pa.float64(), TERMINATED: pa.bool_(),
        TRUNCATED: pa.bool_(), EPISODE_ID: pa.string(), STEP: pa.int64(), "since": pa.int64(),
        REPORTED: pa.string(),
    }  # fmt: skip
    schema = pa.schema(list(kinds.items()))
    extras = snapshot.spec.extras
    if DECISION_ID not in extras:
        return schema.empty_table()
    names = [DECISION_ID, REWARD, TERMINATED, TRUNCATED, EPISODE_ID, STEP]
    there = [name for name in (REWARDED_AT, REPORTED) if name in extras]
    parts = []
    for batch in snapshot.table.batches([*names, *there]):
        served = batch.filter(pc.is_valid(batch.column(DECISION_ID)))
        columns = {name: served.column(name) for name in served.column_names}
        columns["since"] = columns.pop(REWARDED_AT, pa.nulls(served.num_rows, pa.int64()))
        columns.setdefault(REPORTED, pa.nulls(served.num_rows, pa.string()))
        cells = [pc.cast(columns[name], kind) for name, kind in kinds.items()]
        parts.append(pa.Table.from_arrays(cells, schema=schema))
    return pa.concat_tables(parts) if parts else schema.empty_table()


def _as_integers(batch: pa.Table) -> pa.Table:
    at = batch.schema.get_field_index(TIMESTAMP)
    return batch.set_column(at, TIMESTAMP, batch.column(TIMESTAMP).cast(pa.int64()))
