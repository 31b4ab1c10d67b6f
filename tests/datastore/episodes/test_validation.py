"""Episodes checked together are what they are checked alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes import validation as episodes_module
from replaylake.datastore.episodes.episode import Episode, validate
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, Space
from replaylake.datastore.episodes.validation import validate_all
from replaylake.datastore.errors import EpisodeInvalidError

SPACES: tuple[Space, Space] = (Box((2,)), Discrete(2))
Make = Callable[..., Episode]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"final_observation": None},
        {"observations": np.zeros((1, 2)), "rewards": [1], "actions": [1.0]},
        {"behavior_log_probs": [-1.0], "policies": ["p"], "policy_versions": [3]},
        {"action_masks": np.ones((1, 2), bool), "timestamps": [1], "env_steps": [4]},
        {"extras": {"note": ["x"]}},
    ],
)
def test_together_as_alone(
    make_episode: Make, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    several = [make_episode(f"e{i}", 1, first_step=i, **fields) for i in range(4)]
    alone = [validate(episode, *SPACES) for episode in several]
    # Nothing is checked one by one unless what is together fails.
    monkeypatch.setattr(episodes_module, "validate", _only_joined)
    together = validate_all(several, *SPACES)
    assert all(same(vars(a), vars(b)) for a, b in zip(alone, together, strict=True))


def _only_joined(episode: Episode, *spaces: Space, rewards_optional: bool) -> Episode:
    assert not episode.episode_id
    return validate(episode, *spaces, rewards_optional=rewards_optional)


def test_mappings(make_episode: Make) -> None:
    space = Dict({"a": Box(()), "b": Discrete(3)})
    values = {"a": [1.0], "b": [2]}
    final = {"a": 2.0, "b": 0}
    several = [
        make_episode(f"e{i}", 1, observations=values, final_observation=final if i else None)
        for i in range(3)
    ]
    alone = [validate(episode, space, Discrete(2)) for episode in several]
    together = validate_all(several, space, Discrete(2))
    assert all(same(vars(a), vars(b)) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    "fields",
    [
        {"observations": np.full((1, 2), np.nan)},
        {"observations": np.zeros((1, 3))},
        {"observations": {"a": np.zeros((1, 2))}},
        {"observations": np.zeros((2, 2)), "actions": [1, 1]},
        {"actions": [7]},
        {"rewards": []},
        {"rewards": None},
        {"first_step": -1},
        {"first_step": 2**31},
        {"final_observation": [1.0, np.inf]},
        {"behavior_log_probs": [0.5]},
        {"action_masks": [[False, True]]},
        {"extras": {"note": []}},
    ],
)
def test_the_one_at_fault_is_named(make_episode: Make, fields: dict[str, Any]) -> None:
    good = [make_episode(f"e{i}", 1) for i in range(3)]
    bad = make_episode("bad", 1, **{"first_step": 0, "actions": [0], **fields})
    with pytest.raises((EpisodeInvalidError, TypeError)) as alone:
        validate(bad, *SPACES)
    with pytest.raises(alone.type) as together:
        validate_all([*good, bad, *good], *SPACES)
    assert str(together.value) == str(alone.value)


def test_rows_of_one_are_not_another_s(make_episode: Make) -> None:
    """As many rows in all, but not in each."""
    short = make_episode("short", 2, observations=np.zeros((1, 2)))
    long = make_episode("long", 2, observations=np.zeros((3, 2)))
    with pytest.raises(EpisodeInvalidError, match="episode short: observation: found 1 rows"):
        validate_all([short, long], *SPACES)


def test_integers_are_not_rounded_by_a_neighbour_s_floats(make_episode: Make) -> None:
    exact = make_episode("exact", 1, observations=np.array([2**53 + 1]), final_observation=None)
    other = make_episode("other", 1, observations=np.array([0.0]), final_observation=None)
    ready = validate_all([exact, other], Box((), "int64"), Discrete(2))
    assert np.asarray(ready[0].observations).tolist() == [2**53 + 1]
