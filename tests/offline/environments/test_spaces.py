import gymnasium
import pytest

from replaylake.datastore.episodes.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Text,
    Tuple,
)
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.offline.environments.spaces import from_gymnasium, to_gymnasium

SPACES = [
    Box((2,), "float32", -1.0, 1.0),
    Box((2,), "float64", [-1.0, -2.0], [1.0, float("inf")]),
    Box((8, 8, 3), "uint8", 0, 255),
    Discrete(4, 2),
    MultiDiscrete((2, 3)),
    MultiBinary(4),
    Dict({"a": Discrete(2), "b": Tuple((Box((1,)), Text()))}),
]


@pytest.mark.parametrize("space", SPACES)
def test_spaces_go_there_and_back(space):
    assert from_gymnasium(to_gymnasium(space)) == space


def test_a_space_without_a_column_is_refused():
    sequence = gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(2))
    with pytest.raises(SpaceUnsupportedError, match="Sequence"):
        from_gymnasium(sequence)
