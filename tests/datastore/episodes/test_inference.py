from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.inference import infer_spec
from replaylake.datastore.episodes.spaces import (
    Box,
    Dict,
    Discrete,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
)
from replaylake.datastore.errors import EpisodeInvalidError

Make = Callable[..., Episode]


@pytest.mark.parametrize(
    ("observations", "space"),
    [
        (np.zeros((3, 4), np.float32), Box((4,))),
        (np.zeros((3, 4)), Box((4,), "float64")),
        (np.zeros((3, 4), np.float16), Box((4,), "float32")),
        (np.zeros(3, np.int64), Box((), "int64")),
        (np.zeros((3, 8, 8), np.uint8), Box((8, 8), "uint8", 0, 255)),
        (np.zeros((3, 8), np.uint8), Box((8,), "uint8")),
        (["a", "b", "c"], Text()),
        ({"a": np.zeros(3), "b": ["x"] * 3}, Dict({"a": Box((), "float64"), "b": Text()})),
        ((np.zeros((3, 2)), np.zeros(3)), Tuple((Box((2,), "float64"), Box((), "float64")))),
    ],
)
def test_observations(make_episode: Make, observations: Any, space: Space) -> None:
    assert infer_spec([make_episode(observations=observations)]).observation_space == space


@pytest.mark.parametrize(
    ("actions", "space"),
    [
        ([0, 2, 1], Discrete(3)),
        (np.array([True, False, True]), Discrete(2)),
        (np.array([[0, 1], [1, 4], [0, 0]]), MultiDiscrete((2, 5))),
        (np.zeros((3, 2), np.float32), Box((2,))),
        (np.zeros(3, np.float32), Box(())),
        (["left", "up", "up"], Text()),
        (
            {"gear": [0, 1, 1], "gas": np.zeros((3, 1))},
            Dict({"gear": Discrete(2), "gas": Box((1,), "float64")}),
        ),
    ],
)
def test_actions(make_episode: Make, actions: Any, space: Space) -> None:
    assert infer_spec([make_episode(actions=actions)]).action_space == space


def test_the_widest_over_episodes(make_episode: Make) -> None:
    discrete = [make_episode("a", actions=[0, 1, 1]), make_episode("b", actions=[0, 0, 4])]
    assert infer_spec(discrete).action_space == Discrete(5)
    vectors = [make_episode("a", actions=[[0, 3]] * 3), make_episode("b", actions=[[2, 0]] * 3)]
    assert infer_spec(vectors).action_space == MultiDiscrete((3, 4))
    with pytest.raises(EpisodeInvalidError, match=r"action: found Discrete.* and Box"):
        infer_spec([discrete[0], make_episode("c", actions=[0.5, 0.5, 0.5])])
    with pytest.raises(EpisodeInvalidError, match=r"observation: found Box float32\[2\] and Box"):
        infer_spec([discrete[0], make_episode("c", observations=np.zeros((3, 4)))])


def test_a_mask_says_how_many_actions_there_are(make_episode: Make) -> None:
    spec = infer_spec([make_episode(action_masks=np.ones((3, 6), bool)), make_episode("b")])
    assert (spec.action_space, spec.mask_size) == (Discrete(6), 6)
    with pytest.raises(
        EpisodeInvalidError, match="action_mask: found 1 actions, expected 2 or more"
    ):
        infer_spec([make_episode(action_masks=np.ones((3, 1), bool))])
    with pytest.raises(EpisodeInvalidError, match=r"action_mask: found shapes \[\(3,\)\]"):
        infer_spec([make_episode(action_masks=[True] * 3)])
    two = [make_episode(action_masks=np.ones((3, n), bool)) for n in (2, 3)]
    with pytest.raises(EpisodeInvalidError, match="action_mask: found shapes"):
        infer_spec(two)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"actions": [0, -1, 1]}, "action: found -1, expected integers from 0"),
        ({"actions": [[0, -1]] * 3}, "action: found -1, expected integers from 0"),
        ({"actions": np.zeros((3, 2, 2), int)}, r"action: found integers of shape \[2, 2\]"),
        ({"observations": [[1], [1, 2], [3]]}, "observation: found rows of unequal length"),
        ({"observations": np.zeros((3, 2), complex)}, "observation: found complex128, expected"),
        ({"observations": np.zeros((3, 0))}, r"observation: found \(3, 0\), expected at least one"),
        ({"observations": {"a.b": [1, 2, 3]}}, "Dict space: found the keys"),
        ({"observations": {}}, "Dict space: found the keys"),
        ({"rewards": [], "observations": np.zeros((0, 2))}, "found no steps, expected at least"),
    ],
)
def test_what_no_space_holds_is_refused_by_name(
    make_episode: Make, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(EpisodeInvalidError, match=f"^episode odd: {message}"):
        infer_spec([make_episode("fine"), make_episode("odd", **fields)])
