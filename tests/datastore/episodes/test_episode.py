from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode, check_in_spaces, validate
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, MultiDiscrete
from replaylake.datastore.errors import EpisodeInvalidError

OBSERVATION = Box((2,))
ACTION = Discrete(2)
Make = Callable[..., Episode]


def test_every_array_gets_its_stored_dtype(make_episode: Make) -> None:
    episode = validate(
        make_episode(
            observations=[[1, 2], [3, 4], [5, 6]],
            actions=[0.0, 1.0, 0.0],
            rewards=[1, 2, 3],
            final_observation=[7, 8],
            behavior_log_probs=[-0.5, None, -0.25],
            policy_versions=[1, 1, 2],
            policies=["a", None, "b"],
            timestamps=np.array([1, 2, 3], np.int32),
            env_steps=[0, 2, 4],
            action_masks=[[True, True]] * 3,
            extras={"note": ["x", "y", "z"]},
        ),
        OBSERVATION,
        ACTION,
    )
    arrays = {name: getattr(episode, name) for name in ("rewards", "actions", "timestamps")}
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "rewards": "float64",
        "actions": "int64",
        "timestamps": "int64",
    }
    assert episode.final_observation.dtype == np.float32
    assert episode.behavior_log_probs is not None
    assert np.isnan(episode.behavior_log_probs[1])
    assert episode.env_steps is not None
    assert episode.env_steps.dtype == np.int32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rewards": []}, "found no steps, expected at least one"),
        ({"rewards": [1.0, np.nan, 3.0]}, "reward at step 1: found nan, expected finite"),
        ({"rewards": [1.0, 2.0]}, "action: found 3 rows, expected 2, one per step"),
        ({"rewards": ["a", "b", "c"]}, "reward: found .*, expected numbers of dtype float64"),
        ({"observations": np.zeros((3, 4))}, r"observation: found shape \[4\] a step, expected"),
        ({"final_observation": np.zeros(3)}, r"final_observation: found shape \[3\]"),
        ({"actions": [0, 1, 2]}, "action at step 2: found 2, expected values between 0 and 1"),
        ({"actions": [0, -1, 1]}, "action at step 1: found -1, expected values between 0 and 1"),
        ({"actions": [0, 0.5, 1]}, "action at step 1: found 0.5"),
        ({"first_step": -1}, r"step: found -1\.\.1, expected 0\.\.2147483647"),
        ({"first_step": 2**31 - 2}, r"step: found 2147483646\.\.2147483648, expected"),
        ({"behavior_log_probs": [0.0, -np.inf, 0.0]}, "behavior_log_prob at step 1: found -inf"),
        ({"behavior_log_probs": [0.0, 1e300, 0.0]}, "behavior_log_prob at step 1: found inf"),
        ({"behavior_log_probs": [0.0]}, r"behavior_log_prob: found shape \[1\], expected \[3\]"),
        ({"behavior_log_probs": ["a"] * 3}, "behavior_log_prob: .*expected one number per step"),
        ({"policies": ["a"]}, r"policy: found shape \[1\], expected \[3\]"),
        ({"policies": ["a", 7, "b"]}, "policy: found 7, expected names, or None"),
        ({"policy_versions": [1, 2]}, "policy_version: found 2 rows, expected 3"),
        ({"timestamps": ["a", "b", "c"]}, "timestamp: found .*expected numbers of dtype int64"),
        ({"env_steps": [0, 1, 2**31]}, "env_step at step 2: found 2147483648"),
        ({"action_masks": [True] * 3}, r"action_mask: found bool \[3\], expected bool \[3, A\]"),
        ({"action_masks": np.ones((3, 2))}, r"action_mask: found float64 \[3, 2\], expected bool"),
        ({"extras": {"note": ["x"]}}, "note: found 1 rows, expected 3, one per step"),
        ({"extras": {"note": 7}}, "note: found 0 rows, expected 3, one per step"),
    ],
)
def test_an_episode_that_breaks_the_row_rule_is_refused_by_name(
    make_episode: Make, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(EpisodeInvalidError, match=f"^episode first: {message}"):
        validate(make_episode("first", **fields), OBSERVATION, ACTION)


def test_what_is_seen_after_the_last_step_is_no_observation_of_a_step(make_episode: Make) -> None:
    episode = make_episode(observations=[[0, 0]] * 4)
    with pytest.raises(EpisodeInvalidError, match=r"found 4 rows, expected 3.*final_observation"):
        validate(episode, OBSERVATION, ACTION)


def test_the_log_s_own_id_is_the_one_in_messages(make_episode: Make) -> None:
    episode = make_episode("0a/7", source_episode_id="7", rewards=[])
    with pytest.raises(EpisodeInvalidError, match=r"^episode 7: "):
        validate(episode, OBSERVATION, ACTION)


def test_countable_actions_are_checked_wherever_they_are(make_episode: Make) -> None:
    space = Dict({"gear": MultiDiscrete((2, 3)), "gas": Box((), "float32", 0, 1)})
    actions = {"gear": [[0, 0], [1, 2], [1, 3]], "gas": [0.0, 0.5, 9.0]}
    with pytest.raises(EpisodeInvalidError, match=r"action\.gear at step 2: found \[1, 3\]"):
        validate(make_episode(actions=actions), OBSERVATION, space)
    actions["gear"][2] = [0, 0]
    validate(make_episode(actions=actions), OBSERVATION, space)


def test_an_environment_s_bounds_are_a_check_of_their_own(make_episode: Make) -> None:
    bounded = Box((2,), "float32", -1.5, 1.5)
    episode = validate(make_episode(), bounded, ACTION)
    with pytest.raises(
        EpisodeInvalidError, match=r"^episode e: observation at step 2: found \[ ?2"
    ):
        check_in_spaces(episode, bounded, ACTION)


def test_an_action_that_its_mask_forbids(make_episode: Make) -> None:
    masks = np.array([[True, False], [False, True], [False, True]])
    with pytest.raises(
        EpisodeInvalidError, match=r"episode e: action at step 2: found 0, .*of \[1\]"
    ):
        validate(make_episode(action_masks=masks), OBSERVATION, ACTION)
    masks[2] = True
    validate(make_episode(action_masks=masks), OBSERVATION, ACTION)
    # Column 0 of the mask stands for the space's first action.
    shifted = make_episode(num_steps=2, actions=[5, 6], action_masks=masks[:2])
    validate(shifted, OBSERVATION, Discrete(2, start=5))
    with pytest.raises(EpisodeInvalidError, match=r"found 6, which .* expected one of \[5\]"):
        validate(
            make_episode(num_steps=1, actions=[6], action_masks=masks[:1]),
            OBSERVATION,
            Discrete(2, start=5),
        )


def test_a_probability_above_one(make_episode: Make) -> None:
    above = make_episode(behavior_log_probs=[0.0, np.nan, 3.0])
    with pytest.raises(
        EpisodeInvalidError, match=r"behavior_log_prob at step 2: found 3, .* at most 0"
    ):
        validate(above, OBSERVATION, ACTION)
    validate(make_episode(behavior_log_probs=[0.0, 9e-7, -3.0]), OBSERVATION, ACTION)
    # A density may be above 1.
    validate(make_episode(behavior_log_probs=[3.0] * 3, actions=[0.5] * 3), OBSERVATION, Box(()))
