"""Rejected rows: what the quarantine of a dataset keeps of each, and how a row becomes text."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.schema import (
    AGENT_ID,
    EPISODE_ID,
    SOURCE_EPISODE_ID,
    TIMESTAMP_TYPE,
)

# Rows that the door of `ingest` refused: `<dataset>/_rejected`, which SQL sees as
# `<dataset>.quarantine`.
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


def temporal_as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Cast times to text: Python's have no nanoseconds."""
    return pc.cast(column, pa.string()) if pa.types.is_temporal(column.type) else column


def to_json_value(value: Any) -> Any:
    """Return what JSON can say: NaN and the infinities by name, bytes as {"base64": ...}."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {str(key): to_json_value(sub) for key, sub in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(sub) for sub in value]
    return value
