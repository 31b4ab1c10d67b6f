"""JSON rows: what a quarantine keeps as JSON is again what it was, or is named."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from replaylake.datastore.interchange.formats.tabular.json_rows import to_column
from replaylake.datastore.interchange.ingest.quarantine import _texts

_TABLE = pa.table(
    {
        "float": [0.5, float("inf"), None],
        "int": [2**60, -1, None],
        "flag": [True, False, None],
        "text": ["NaN", "", None],
        "bytes": [b"\x00\xff", b"", None],
        "date": pa.array([date(2026, 1, 31), date(1969, 1, 1), None]),
        "at": pa.array([0, 1_700_000_000_123_456_789, None], pa.timestamp("ns", tz="UTC")),
        "naive": pa.array([0, 1_700_000_000_123_456, None], pa.timestamp("us")),
        "decimal": pa.array([Decimal("1.50"), Decimal("-2.25"), None]),
        "list": [[1.0, None], [], None],
        "fixed": pa.array([[1, 2], [3, 4], None], pa.list_(pa.int64(), 2)),
        "struct": [{"a": 1, "b": ["x"]}, {"a": None, "b": None}, None],
        "map": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int64())),
    }
)


@pytest.mark.parametrize("name", _TABLE.column_names)
def test_every_type_comes_back(name: str) -> None:
    values = [json.loads(text)[name] for text in _texts(_TABLE)]
    column, misfits = to_column(values, _TABLE.schema.field(name).type, [False] * 3)
    assert misfits == {}
    assert column.equals(_TABLE.column(name).combine_chunks())


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (pa.int64(), "1"),
        (pa.int64(), 2**63),
        (pa.int64(), True),
        (pa.int32(), 2**40),
        (pa.float64(), "NaN"),
        (pa.bool_(), 1),
        (pa.string(), 1),
        (pa.binary(), {"base64": "?"}),
        (pa.timestamp("us", tz="UTC"), "yesterday"),
        (pa.list_(pa.int64()), [1, "2"]),
        (pa.list_(pa.int64(), 2), [1]),
        (pa.struct({"a": pa.int64()}), {"b": 1}),
    ],
)
def test_a_value_of_another_type_is_a_misfit(kind: pa.DataType, wrong: Any) -> None:
    column, misfits = to_column([None, wrong], kind, [False, True])
    assert misfits == {1: wrong}
    assert (column.type, column.null_count) == (kind, 2)
