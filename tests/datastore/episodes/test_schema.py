from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.schema import (
    NAMES_TYPE,
    STANDARD_COLUMNS,
    TIMESTAMP_TYPE,
    DatasetSpec,
    arrow_schema,
    arrow_type,
    to_arrow,
    to_numpy,
    vector_type,
    widen,
)
from replaylake.datastore.episodes.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
    as_values,
    describe,
    leaves,
)
from replaylake.datastore.errors import SchemaMismatchError
from replaylake.datastore.storage.table.delta_schema import field_id, to_delta, to_duckdb

RNG = np.random.default_rng(0)
SPACES: list[tuple[Space, Any]] = [
    (Box((4,)), RNG.normal(size=(5, 4))),
    (Box((), "float64"), [1 / 3, np.pi, 1e300, -1e-300, 0.0]),
    (Box((2, 3), "float64"), RNG.normal(size=(5, 2, 3))),
    (Box((3,), "float16"), RNG.normal(size=(5, 3)).astype(np.float16)),
    (Box((6, 4), "uint8", 0, 255), RNG.integers(0, 256, (5, 6, 4))),
    (Box((6, 4, 3), "uint8", 0, 255), RNG.integers(0, 256, (5, 6, 4, 3))),
    (Box((3,), "uint8", 0, 255), RNG.integers(0, 256, (5, 3))),
    (Box((), "uint16"), [0, 1, 2, 3, 65535]),
    (Box((2,), "uint32"), np.full((5, 2), 2**32 - 1)),
    (Box((2,), "int8"), np.full((5, 2), -128)),
    (Box((2,), "bool"), RNG.integers(0, 2, (5, 2)).astype(bool)),
    (Discrete(3), [0, 1, 2, 1, 0]),
    (Discrete(3, start=-1), [-1, 0, 1, 0, -1]),
    (MultiDiscrete((2, 3)), [[0, 1], [1, 2], [0, 0], [1, 1], [0, 2]]),
    (MultiBinary(3), RNG.integers(0, 2, (5, 3))),
    (Text(), ["", "a", "ü", "line\nbreak", "x" * 999]),
]
NESTED = Dict(
    {
        "camera": Box((2, 2), "uint8", 0, 255),
        "inner": Dict({"speed": Box((), "float64"), "say": Text()}),
        "pair": Tuple((Box((2,)), Discrete(5))),
    }
)
NESTED_VALUES = {
    "camera": RNG.integers(0, 256, (5, 2, 2)),
    "inner": {"speed": [0.1, 0.2, 0.3, 0.4, 0.5], "say": list("abcde")},
    "pair": (RNG.normal(size=(5, 2)), [4, 3, 2, 1, 0]),
}
SPACES.append((NESTED, NESTED_VALUES))


def leaf(values: Any, name: str) -> Any:
    for key in name.split(".") if name else ():
        values = values[key]
    return values


@pytest.mark.parametrize(("space", "raw"), SPACES, ids=[describe(space) for space, _ in SPACES])
@pytest.mark.parametrize("part", [slice(None), slice(1, 4), slice(2, 2)])
def test_values_of_every_space_round_trip(space: Space, raw: Any, part: slice) -> None:
    values = as_values(space, raw, "observation")
    column = to_arrow(space, values)
    assert column.type == arrow_type(space)
    assert column.null_count == 0
    decoded = to_numpy(space, column.slice(part.start or 0, part.stop and part.stop - part.start))
    for name, _ in leaves(space):
        expected = leaf(values, name)[part]
        found = leaf(decoded, name)
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert (found == expected).all()


def test_a_column_in_chunks_decodes_as_one() -> None:
    values = as_values(NESTED, NESTED_VALUES, "observation")
    column = to_arrow(NESTED, values)
    decoded = to_numpy(NESTED, pa.chunked_array([column.slice(0, 2), column.slice(2)]))
    assert (leaf(decoded, "camera") == leaf(values, "camera")).all()
    assert (leaf(decoded, "pair._1") == [4, 3, 2, 1, 0]).all()


def test_how_spaces_are_stored() -> None:
    stored = {
        Box((2, 3)): vector_type(pa.float32(), 6),
        Box(()): pa.float32(),
        Box((2, 2), "uint8"): pa.large_binary(),
        Box((2,), "uint8"): vector_type(pa.int16(), 2),
        Discrete(2): pa.int64(),
        MultiDiscrete((2, 2)): vector_type(pa.int64(), 2),
        Text(): pa.string(),
    }
    assert {space: arrow_type(space) for space in stored} == stored
    with pytest.raises(SchemaMismatchError, match="uint64: no Delta type holds it"):
        arrow_type(Box((2,), "uint64"))


def test_standard_columns_keep_their_field_ids_in_every_dataset() -> None:
    plain = arrow_schema(DatasetSpec(Box((2,)), Discrete(2)))
    full = arrow_schema(DatasetSpec(Text(), Text(), 3, {"a": pa.int64(), "B": pa.string()}))
    assert "action_mask" not in plain.names
    for schema in (plain, full):
        ids = {field.name: field_id(field) for field in schema}
        assert all(
            ids[name] == number
            for number, name in enumerate(STANDARD_COLUMNS, 1)
            if name in schema.names
        )
    assert [field_id(full.field(name)) for name in ("a", "B")] == [17, 18]
    assert [field.name for field in plain if not field.nullable] == [
        "episode_id",
        "step",
        "env_step",
        "agent_id",
        "observation",
        "action",
        "reward",
        "terminated",
        "truncated",
    ]


@pytest.mark.parametrize(
    "names",
    [["reward"], ["Reward"], ["a", "A"], ["a b"], ["1a"], [""], ["next_observation"]],
)
def test_further_columns_that_sql_could_not_tell_apart_are_refused(names: list[str]) -> None:
    with pytest.raises(SchemaMismatchError, match="unlike every other column"):
        arrow_schema(DatasetSpec(Text(), Text(), None, dict.fromkeys(names, pa.int64())))


UTC_TIME = datetime(2026, 1, 2, 3, 4, 5, 6, UTC)


@pytest.mark.parametrize(
    ("given", "kind", "values"),
    [
        (np.array([255], np.uint8), pa.int16(), [255]),
        (np.array([65535], np.uint16), pa.int32(), [65535]),
        (np.array([2**32 - 1], np.uint32), pa.int64(), [2**32 - 1]),
        (np.array([2**63 - 1], np.uint64), pa.int64(), [2**63 - 1]),
        (np.array([0.5], np.float16), pa.float32(), [0.5]),
        (np.array([1.5]), pa.float64(), [1.5]),
        ([True], pa.bool_(), [True]),
        (["a"], pa.string(), ["a"]),
        (np.array(["a"]), pa.string(), ["a"]),
        (pa.array(["a"], pa.large_string()), pa.string(), ["a"]),
        (pa.array(["a"], pa.string_view()), pa.string(), ["a"]),
        (pa.array(["a"]).dictionary_encode(), NAMES_TYPE, ["a"]),
        (pa.array([7]).dictionary_encode(), pa.int64(), [7]),
        ([b"x"], pa.binary(), [b"x"]),
        (pa.array([b"xy"], pa.binary(2)), pa.binary(), [b"xy"]),
        (pa.array([b"x"], pa.large_binary()), pa.binary(), [b"x"]),
        ([UTC_TIME], TIMESTAMP_TYPE, [UTC_TIME]),
        (pa.array([1_000], pa.timestamp("ns", "UTC")), TIMESTAMP_TYPE, None),
        (pa.array([1], pa.timestamp("s", "+02:00")), TIMESTAMP_TYPE, None),
        ([date(2026, 1, 2)], pa.date32(), [date(2026, 1, 2)]),
        ([Decimal("1.25")], pa.decimal128(3, 2), [Decimal("1.25")]),
        ([[1, 2]], pa.list_(pa.field("element", pa.int64())), [[1, 2]]),
        (
            pa.array([[1, 2]], pa.large_list(pa.uint8())),
            pa.list_(pa.field("element", pa.int16())),
            [[1, 2]],
        ),
        (np.array([[1, 2]], np.uint8), vector_type(pa.int16(), 2), [[1, 2]]),
        (np.ones((1, 2, 2), np.float32), vector_type(pa.float32(), 4), [[1.0] * 4]),
        ([{"a": 1, "b": "x"}], None, [{"a": 1, "b": "x"}]),
        (
            pa.array([{"a": 1}], pa.struct([("a", pa.uint8())])),
            pa.struct([("a", pa.int16())]),
            [{"a": 1}],
        ),
        (
            pa.array([[("k", 1)]], pa.map_(pa.string(), pa.uint16())),
            pa.map_(pa.string(), pa.int32()),
            [[("k", 1)]],
        ),
        (pa.chunked_array([[1], [2]]), pa.int64(), [1, 2]),
    ],
)
def test_further_columns_are_widened_at_the_door(given: Any, kind: Any, values: Any) -> None:
    column = widen(given, "x")
    assert kind is None or column.type == kind
    assert values is None or column.to_pylist() == values
    to_delta(pa.schema([("x", column.type)]))
    to_duckdb(column.type)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.array([2**63], np.uint64), "expected values that int64 holds exactly"),
        ([None, None], "found only nulls, expected typed values"),
        ([[None]], "found only nulls"),
        (np.array(["2026-01-01"], "datetime64[us]"), "without a time zone, expected UTC"),
        ([datetime(2026, 1, 1)], "without a time zone, expected UTC"),
        (pa.array([1], pa.timestamp("ns", "UTC")), "expected values that timestamp"),
        (pa.array([1], pa.time64("us")), "expected a type that Delta and SQL have"),
        (pa.array([1], pa.duration("us")), "expected a type that Delta and SQL have"),
        ([1, "a"], "expected one value of one type per step"),
        ([object()], "expected one value of one type per step"),
        ([2**70], "expected one value of one type per step"),
    ],
)
def test_further_columns_that_no_table_holds_are_refused(given: Any, message: str) -> None:
    with pytest.raises(SchemaMismatchError, match=f"column 'x': .*{message}"):
        widen(given, "x")
