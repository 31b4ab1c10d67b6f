"""RecordLayout: what a record holds, and what it refuses to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.schema import DatasetSpec, arrow_schema
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, MultiDiscrete, Text
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError, SpaceUnsupportedError
from replaylake.datastore.replay.layout import RecordLayout, make_layout

SPEC = DatasetSpec(Box((17,)), Box((6,)))


def test_a_record_is_a_whole_number_of_words() -> None:
    layout = RecordLayout(SPEC, {})
    assert (layout.dtype.itemsize, layout.num_words) == (128, 16)
    odd = RecordLayout(DatasetSpec(Box((3,)), Discrete(2), mask_size=3), {})
    assert odd.dtype.itemsize == 8 * odd.num_words
    words = np.zeros((5, 2 * odd.num_words), np.uint64)
    rows = odd.rows(words)
    assert rows.shape == (5, 2)
    rows["action_mask"][1, 1] = True
    assert words[1].any(), "rows are no copy"
    assert not words[[0, 2, 3, 4]].any()


def test_items_are_the_same_bytes() -> None:
    layout = RecordLayout(SPEC, {})
    assert layout.items_dtype.itemsize == layout.dtype.itemsize
    rows = np.zeros(3, layout.dtype)
    items = rows.view(layout.items_dtype)
    items["observation"][1] = np.arange(17, dtype=np.float32).tobytes()
    items["action"][2] = np.arange(6, dtype=np.float32).tobytes()
    assert rows["observation"][1].tolist() == list(range(17))
    assert rows["action"][2].tolist() == list(range(6))
    assert not rows["observation"][2].any()


@pytest.mark.parametrize(("float64", "kind"), [(False, np.float32), (True, np.float64)])
def test_float64_is_kept_if_asked_for(float64: bool, kind: type) -> None:
    spec = DatasetSpec(Box((3,), "float64"), Box((2,), "float64"), extras={})
    columns = {"hidden": pa.list_(pa.float64(), 4), "count": pa.int32()}
    dtype = RecordLayout(spec, columns, float64=float64).dtype
    for field, shape in (("observation", (3,)), ("action", (2,)), ("column.hidden", (4,))):
        assert (dtype[field].base, dtype[field].shape) == (kind, shape)
    assert dtype["reward"] == np.float32
    assert dtype["column.count"] == np.int32


def test_values_are_nested_as_the_space_is() -> None:
    inner = Dict({"speed": Box(()), "gear": MultiDiscrete((3, 3))})
    spec = DatasetSpec(Dict({"camera": Box((2, 2), "uint8"), "inner": inner}), Discrete(2))
    layout = RecordLayout(spec, {})
    rows = np.zeros(4, layout.dtype)
    rows["observation.inner.speed"] = 7
    found: Any = layout.observations(rows)
    assert found["inner"]["speed"].tolist() == [7] * 4
    assert found["camera"].shape == (4, 2, 2)
    assert found["inner"]["gear"].dtype == np.int64
    assert np.shares_memory(found["camera"], rows)
    actions: Any = layout.actions(rows)
    assert actions.shape == (4,)


def test_columns_of_a_table() -> None:
    spec = DatasetSpec(Box((3,)), Discrete(2), extras={"cost": pa.float64(), "note": pa.string()})
    table = arrow_schema(spec)
    layout = make_layout(spec, table, ("cost", "policy_version"))
    rows = np.zeros(2, layout.dtype)
    assert set(layout.column_values(rows) or {}) == {"cost", "policy_version"}
    assert layout.column_field("cost") == "column.cost"
    with pytest.raises(
        ConfigInvalidError, match="'step': found cost, policy_version in this replay"
    ):
        layout.column_field("step")
    without = make_layout(spec, table)
    assert without.column_values(rows) is None
    with pytest.raises(ConfigInvalidError, match="found none in this replay view"):
        without.column_field("cost")
    with pytest.raises(
        NotFoundError, match="found no column nonsense, expected some of episode_id"
    ):
        make_layout(spec, table, ("cost", "nonsense"))
    with pytest.raises(
        SpaceUnsupportedError, match="column 'note': found string, expected numbers"
    ):
        make_layout(spec, table, ("note",))


def test_what_cannot_be_packed() -> None:
    with pytest.raises(SpaceUnsupportedError, match="action: found a Text space"):
        _ = RecordLayout(DatasetSpec(Box((3,)), Text()), {}).dtype
    with pytest.raises(
        ConfigInvalidError, match="found frame_stack 0, expected a whole number from 1"
    ):
        RecordLayout(SPEC, {}, frame_stack=0)
    with pytest.raises(SpaceUnsupportedError, match="frame_stack 4 over a Discrete space"):
        RecordLayout(DatasetSpec(Discrete(3), Discrete(2)), {}, frame_stack=4)
