from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
    as_batch,
    as_values,
    bounds,
    check_bounds,
    concatenate,
    describe,
    from_json,
    gather,
    leaves,
    num_elements,
    num_values,
    parse,
    take,
    to_json,
    value_dtype,
    value_shape,
)
from replaylake.datastore.errors import EpisodeInvalidError, SchemaMismatchError

NESTED = Dict({"camera": Box((2, 2), "uint8", 0, 255), "rest": Tuple((Discrete(3), Text()))})
ALL = [
    Box((4,)),
    Box((), "float64", -1.0, 1.0),
    Box((2,), "float32", [-1.0, -2.0], [1.0, np.inf]),
    Box((2, 2), "uint8", 0, 255),
    Discrete(2),
    Discrete(3, start=-1),
    MultiDiscrete((2, 3)),
    MultiBinary(5),
    Text(),
    NESTED,
]


@pytest.mark.parametrize("space", ALL, ids=describe)
def test_json_keeps_every_space(space: Space) -> None:
    text = json.dumps(to_json(space), allow_nan=False)
    assert from_json(json.loads(text)) == space
    assert hash(from_json(json.loads(text))) == hash(space)


@pytest.mark.parametrize(
    "data", [{}, {"type": "graph"}, {"type": "discrete"}, {"type": "discrete", "n": 1, "m": 2}]
)
def test_json_that_is_no_space_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(SchemaMismatchError, match="space"):
        from_json(data)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dict({}),
        lambda: Dict({"a.b": Discrete(2)}),
        lambda: Dict({"": Discrete(2)}),
        lambda: Dict({"a": Discrete(2), "A": Discrete(2)}),
        lambda: Tuple(()),
        lambda: Box((2,), "complex64"),
    ],
)
def test_spaces_that_no_column_can_hold_are_refused(make: Any) -> None:
    with pytest.raises(SchemaMismatchError, match="space: found"):
        make()


def test_leaves_are_named_by_their_path() -> None:
    assert dict(leaves(NESTED)) == {
        "camera": Box((2, 2), "uint8", 0, 255),
        "rest._0": Discrete(3),
        "rest._1": Text(),
    }
    assert dict(leaves(Discrete(2), "action")) == {"action": Discrete(2)}


def test_shapes_and_dtypes() -> None:
    assert [value_shape(s) for s in (Box((4, 2)), Discrete(2), MultiDiscrete((2, 3)))] == [
        (4, 2),
        (),
        (2,),
    ]
    assert [value_dtype(s) for s in (Box((4,)), Discrete(2), MultiBinary(2))] == [
        np.float32,
        np.int64,
        np.int64,
    ]


def test_as_values_casts_what_is_exact() -> None:
    values = as_values(Box((2,)), [[1, 2], [3, 4]], "observation")
    assert isinstance(values, np.ndarray)
    assert values.dtype == np.float32
    assert as_values(Discrete(2), [1.0, 0.0], "action", 2).tolist() == [1, 0]  # type: ignore[union-attr]
    # Rounding between float widths is what every log does; a change of magnitude is not.
    third = as_values(Box(()), np.array([1 / 3]), "observation")
    assert third.tolist() == [float(np.float32(1 / 3))]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("space", "raw", "message"),
    [
        (Discrete(2), [0, 1.5], r"x at step 1: found 1\.5 .*expected what int64 holds exactly"),
        (Box((), "uint8"), [0, 300], r"x at step 1: found 300 .*uint8 holds exactly"),
        (Box(()), [0.0, np.nan], "x at step 1: found nan, expected finite numbers"),
        (Box(()), [np.float64(1e300)], r"x at step 0: found 1\.e\+300"),
        (Box((), "int64"), [2**63], "x at step 0"),
        (Box((2,)), [[1.0], [2.0]], r"found shape \[1\] a step, expected \[2\]"),
        (Box((2,)), [[1.0, 2.0], [3.0]], "rows of unequal length"),
        (Box((2,)), 1.0, "found one value, expected an array"),
        (Discrete(2), ["a"], "expected numbers of dtype int64"),
        (Text(), ["a", 1], "expected one string per step"),
        (NESTED, {"camera": []}, r"expected the keys \['camera', 'rest'\]"),
        (NESTED, [1], "expected the keys"),
        (Discrete(2), [0, 1, 1], "found 3 rows, expected 2, one per step"),
    ],
)
def test_as_values_refuses_the_rest(space: Space, raw: Any, message: str) -> None:
    num = 2 if message.startswith("found 3") else None
    with pytest.raises(EpisodeInvalidError, match=message):
        as_values(space, raw, "x", num)


def test_nested_values() -> None:
    raw = {"camera": np.zeros((3, 2, 2), int), "rest": ([0, 1, 2], ["a", "b", "c"])}
    values = as_values(NESTED, raw, "observation", 3)
    assert num_values(values) == 3
    assert take(values, 1)["rest"] == {"_0": 1, "_1": "b"}
    one = as_batch({"camera": np.zeros((2, 2)), "rest": (0, "z")})
    joined = concatenate([values, as_values(NESTED, one, "final")])
    assert num_values(joined) == 4
    assert joined["rest"]["_1"].tolist() == ["a", "b", "c", "z"]  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"found both structs \(fields camera, rest\) and arrays"):
        concatenate([values, np.zeros((1, 2))])
    with pytest.raises(EpisodeInvalidError, match=r"observation\.rest\._0: found 1 rows"):
        as_values(NESTED, raw | {"rest": ([0], ["a", "b", "c"])}, "observation", 3)


def test_json_values_are_gathered_by_leaf() -> None:
    space = Dict({"a": Box((1,)), "b": Tuple((Discrete(2), Text()))})
    gathered = gather(space, [{"a": [1], "b": [0, "x"]}, {"a": [2.5], "b": [1, "y"]}])
    values = as_values(space, gathered, "observation", 2)
    assert values["a"].tolist() == [[1.0], [2.5]]  # type: ignore[call-overload]
    assert values["b"]["_1"].tolist() == ["x", "y"]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("space", "inside", "outside"),
    [
        (Discrete(3, start=-1), [-1, 1], 2),
        (MultiDiscrete((2, 3)), [[1, 2]], [0, 3]),
        (MultiBinary(2), [[0, 1]], [0, 2]),
        (Box((2,), "float32", [-1, 0], [1, 2]), [[-1.0, 2.0]], [0.0, -0.5]),
    ],
)
def test_bounds_are_inclusive(space: Space, inside: Any, outside: Any) -> None:
    good = as_values(space, inside, "x")
    check_bounds(space, good, "x")
    bad = as_values(space, [*np.asarray(good).tolist(), outside], "x")
    with pytest.raises(EpisodeInvalidError, match=f"x at step {len(inside)}: found .* between"):
        check_bounds(space, bad, "x")


def test_bounds_of_leaves_within_a_mapping() -> None:
    values = as_values(NESTED, {"camera": np.zeros((1, 2, 2)), "rest": ([3], ["a"])}, "observation")
    with pytest.raises(EpisodeInvalidError, match=r"observation\.rest\._0 at step 0: found 3"):
        check_bounds(NESTED, values, "observation")
    with pytest.raises(SchemaMismatchError, match="Text has no bounds"):
        bounds(Text())


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 100_000,
        '"a"',
        '{"type":"box","shape":[2],"dtype":"=)"}',
        '{"type":"box","shape":[2],"low":' + "9" * 400 + "}",
        '{"type":"box","shape":[2],"low":{}}',
        '{"type":"dict","spaces":[]}',
        '{"type":"dict"}',
        '{"type":"tuple","spaces":1}',
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_space_is_refused(text: str) -> None:
    with pytest.raises(SchemaMismatchError, match="space"):
        parse(text)


def test_spaces_are_read_64_levels_deep() -> None:
    def nested(depth: int) -> str:
        return '{"type":"dict","spaces":{"a":' * depth + '{"type":"text"}' + "}}" * depth

    assert next(iter(leaves(parse(nested(64)))))[1] == Text()
    with pytest.raises(SchemaMismatchError, match="nested more than 64 levels deep"):
        parse(nested(65))


def test_elements_of_a_value_are_counted_in_all_its_parts() -> None:
    assert [num_elements(space) for space in ALL] == [4, 1, 2, 4, 1, 1, 2, 5, 1, 6]
