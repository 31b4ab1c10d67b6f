"""Rejected rows: what the door of `ingest` refused, in a table of its own beside a dataset's steps.

The table is `<dataset>/_rejected`, which ingest/quarantine.py writes and SQL sees as
`<dataset>.quarantine`.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from replaylake.datastore.episodes.schema import (
    AGENT_ID,
    EPISODE_ID,
    SOURCE_EPISODE_ID,
    TIMESTAMP_TYPE,
)
from replaylake.datastore.storage.table.delta_schema import with_field_ids
from replaylake.datastore.storage.table.table import Table, TableSnapshot

REJECTED_SCHEMA: Final = pa.schema(
    [
        pa.field(EPISODE_ID, pa.string(), nullable=False),
        pa.field(AGENT_ID, pa.string(), nullable=False),
        pa.field(SOURCE_EPISODE_ID, pa.string(), nullable=False),
        pa.field("row_number", pa.int64(), nullable=False),
        pa.field("file", pa.string()),
        pa.field("file_row", pa.int64()),
        pa.field("checks", pa.list_(pa.string()), nullable=False),
        pa.field("reasons", pa.list_(pa.string()), nullable=False),
        pa.field("row", pa.string()),
        # JSON of ours to theirs: the columns of `row` that are fields of ours, where that is known.
        pa.field("mapping", pa.string()),
        pa.field("producer", pa.string(), nullable=False),
        pa.field("ingested_at", TIMESTAMP_TYPE, nullable=False),
    ]
)


def snapshot_rejected(table: Table) -> TableSnapshot:
    """Return a dataset's newest rejected rows: none where nothing was ever rejected."""
    if table.exists():
        return table.snapshot()
    return TableSnapshot(0, with_field_ids(REJECTED_SCHEMA), (), {}, table.storage, table.root)
