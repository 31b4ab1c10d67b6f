"""Values: the quick way of reading them says what the slow way does."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from replaylake.datastore.episodes.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Text,
    Tuple,
    as_values,
    gather,
)
from replaylake.datastore.errors import EpisodeInvalidError
from replaylake.serve.api.values import _check_value, depth_of, num_dims, read_values
from replaylake.serve.messages import RequestRefusedError

SPACES = [
    Box((3,)), Box((2, 2), "float64"), Box((2,), "uint8", 0, 255), Box((1,), "int64"), Box(()),
    Box((2,), "bool", 0, 1), Box((2,), "uint64", 0, 2.0**64), Box((2,), "float16"), Discrete(3),
    Discrete(3, start=-1), MultiDiscrete((2, 3)), MultiBinary(2), Text(),
    Dict({"x": Box((2,)), "n": Discrete(2)}), Tuple((Box((2,)), Text())),
]  # fmt: skip
NUMBERS = (
    st.integers(-2, 3)
    | st.sampled_from([255, 256, 2**31, 2**53 + 1, 2**63, 2**64 - 1, 2**64, -(2**63) - 1])
    | st.sampled_from([0.5, 1e39, 1e5, -0.0, float("nan"), float("inf"), 1e-320])
)
LEAVES = NUMBERS | st.booleans() | st.none() | st.text(max_size=2)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(NUMBERS, min_size=2, max_size=3)
        | st.fixed_dictionaries({"x": inner, "n": inner})
    ),
    max_leaves=9,
)


def slowly(space, raw):
    """Check each value by itself, then all together, as the message of a refusal is made."""
    for value in raw:
        _check_value(space, value, "observation")
    return as_values(space, gather(space, raw), "observation", len(raw))


def same(found, expected):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        return all(same(found[key], expected[key]) for key in expected)
    return found.dtype == expected.dtype and found.shape == expected.shape and (
        np.array_equal(found, expected)
    )  # fmt: skip


GIVEN = hypothesis.given(st.sampled_from(SPACES), st.lists(VALUES, min_size=1, max_size=3))


@pytest.mark.slow
@hypothesis.settings(deadline=None, max_examples=300)
@GIVEN
def test_the_quick_way_takes_what_the_slow_way_does(space, raw):
    check_quick_way(space, raw)


@pytest.mark.chaos
@hypothesis.settings(deadline=None, max_examples=5000)
@GIVEN
def test_the_quick_way_takes_a_thousand_things_that_the_slow_way_does(space, raw):
    check_quick_way(space, raw)


def check_quick_way(space, raw):
    try:
        expected = slowly(space, raw)
    except (RequestRefusedError, EpisodeInvalidError):
        with pytest.raises(RequestRefusedError):
            read_values(space, raw, "observation", True)
    else:
        assert same(read_values(space, raw, "observation", True), expected)


@pytest.mark.parametrize(
    ("space", "dims"),
    [(Box((2, 3)), 2), (Box(()), 0), (Discrete(2), 0), (MultiDiscrete((2, 2)), 1), (Text(), 0),
     (Dict({"x": Box((2,))}), 0), (Tuple((Box((2,)), Text())), 2)],
)  # fmt: skip
def test_dims_are_lists_around_the_first_number(space, dims):
    assert num_dims(space) == dims


def test_depth():
    assert depth_of([[1, 2], [3]], 0) == 2
    assert depth_of(5, 0) == 0
    assert depth_of([], 0) == 1
    assert depth_of([{"x": [[1]]}], 0) == 1
    assert depth_of([{"age": 1}], 1) == 2  # named fields are a vector
    assert depth_of([np.zeros((2, 3))], 0) == 3
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert depth_of(deep, 0) == 100_001
