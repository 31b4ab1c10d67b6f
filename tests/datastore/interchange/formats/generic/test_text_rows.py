from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pyarrow as pa
import pytest

from replaylake.datastore.interchange.formats.generic.text_rows import json_text


@pytest.mark.parametrize(
    ("key", "value", "kinds", "expected"),
    [
        ([1], 2, (pa.list_(pa.int64()), pa.int64()), {"[1]": 2}),
        (1.5, b"\xff", (pa.float64(), pa.binary()), {"1.5": "/w=="}),
        (dt.date(2026, 1, 1), [1], (pa.date32(), pa.list_(pa.int8())), {"2026-01-01": [1]}),
        ('b"', {"x": None}, (pa.string(), pa.struct([("x", pa.int8())])), {'b"': {"x": None}}),
    ],
)
def test_maps_of_any_keys_and_values_are_objects(
    key: Any, value: Any, kinds: tuple[pa.DataType, pa.DataType], expected: dict[str, Any]
) -> None:
    maps = pa.array([[], [(key, value)], None, [(key, None)]], pa.map_(*kinds))
    texts = json_text(maps.slice(1)).to_pylist()
    (name,) = expected
    assert texts[1] is None
    assert [json.loads(texts[0]), json.loads(texts[2])] == [expected, {name: None}]
