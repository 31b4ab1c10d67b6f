"""Token columns: which values are refused, and what a step's log-prob is computed from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode, validate
from replaylake.datastore.episodes.rows import encode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Text
from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.episodes.tokens import TOKEN_TYPES, count_positive_log_probs
from replaylake.datastore.episodes.validation import validate_all
from replaylake.datastore.errors import EpisodeInvalidError, SchemaMismatchError

Make = Callable[..., Episode]
SPACES = (Text(), Text())


def test_log_probs_are_summed_where_none_is_stated(make_dialogue: Make) -> None:
    whole = validate(make_dialogue(), *SPACES)
    assert whole.behavior_log_probs is not None
    assert whole.behavior_log_probs.tolist() == [-0.5, -1.0, -1.5]
    assert whole.behavior_log_probs.dtype == np.float32
    stated = validate(make_dialogue(behavior_log_probs=[np.nan, -1.00005, -1.5]), *SPACES)
    assert stated.behavior_log_probs is not None
    assert stated.behavior_log_probs.tolist() == [-0.5, np.float32(-1.00005), -1.5]
    without = make_dialogue()
    without.extras["action_log_probs"][1] = None  # type: ignore[index]
    assert np.isnan(np.asarray(validate(without, *SPACES).behavior_log_probs)).tolist() == [
        False,
        True,
        False,
    ]


def test_sum_is_of_float64() -> None:
    log_probs = [[-1e4] + [-1e-4] * 10_000]
    one = Episode(
        "e",
        np.array(["q"], object),
        np.array(["a"], object),
        np.zeros(1),
        extras={
            "observation_tokens": [[1]],
            "action_tokens": [[2] * 10_001],
            "action_log_probs": log_probs,
        },
    )
    # Added to -1e4 one after the other in float32, -1e-4 would be lost 10,000 times.
    (total,) = np.asarray(validate(one, *SPACES).behavior_log_probs).tolist()
    assert total == pytest.approx(-10_001, abs=1e-3)


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("action_log_probs", 1, [-0.5], "action_log_probs at step 1: found 1 values, expected 2"),
        ("proximal_log_probs", 2, [-1.0], "proximal_log_probs at step 2: found 1 values"),
        ("reference_log_probs", 0, [-1.0, -1.0], "reference_log_probs at step 0: found 2 values"),
        ("action_loss_mask", 1, [True], "action_loss_mask at step 1: found 1 values"),
        ("action_log_probs", 1, [-0.5, 2e-4], "step 1: found 0.0002 for token 1, expected at most"),
        ("action_log_probs", 0, [float("nan")], "at step 0: found nan for token 0"),
        ("action_log_probs", 0, [float("-inf")], "at step 0: found -inf for token 0"),
        ("action_log_probs", 1, [-0.5, None], "action_log_probs at step 1: found NULL within it"),
        ("action_tokens", 1, [7, -1], "action_tokens at step 1: found -1 as token 1"),
        ("observation_tokens", 2, [1, 512], "at step 2: found 512 as token 1, expected 0..511"),
        ("final_observation_tokens", 2, [600], "final_observation_tokens at step 2: found 600"),
        ("observation_tokens", 1, None, "observation_tokens at step 1: found NULL beside"),
        ("action_tokens", 1, None, "action_tokens at step 1: found NULL beside observation_tokens"),
        ("action_tokens", 0, [2**31], "action_tokens: .*2147483648"),
        ("action_advantages", 1, [0.5], "action_advantages at step 1: found 1 values, expected 2"),
        (
            "action_entropies",
            2,
            [0.5, 0.5, float("nan")],
            "at step 2: found nan for token 2, expec",
        ),
        ("action_judge", 0, [float("inf")], "action_judge at step 0: found inf .* finite number"),
        ("action_advantages", 1, [0.5, None], "action_advantages at step 1: found NULL within it"),
        ("action_versions", 1, [(1, 4)], r"action_versions at step 1: found starts \[1\]"),
        ("action_versions", 2, [(0, 4), (2, 5), (2, 6)], r"found starts \[0, 2, 2\]"),
        ("action_versions", 1, [(0, 4), (2, 5)], r"found starts \[0, 2\].*below 2"),
        ("action_versions", 0, [], r"action_versions at step 0: found starts \[\]"),
        ("action_versions", 0, [(0, None)], "found NULL as a start or version"),
        ("parent_step", 1, -1, "parent_step at step 1: found -1"),
        ("parent_agent_id", 1, "solver", "parent_step at step 1: found NULL beside"),
    ],
)
def test_refusals(make_dialogue: Make, column: str, row: int, value: Any, message: str) -> None:
    episode = make_dialogue("d7")
    values: list[Any] = [*episode.extras.get(column, [None] * 3)]
    values[row] = value
    if column == "action_versions":
        runs = [None if v is None else [{"start": s, "version": n} for s, n in v] for v in values]
        values = runs
    array = pa.array(values)
    changed = make_dialogue("d7", extras={column: array})
    tokenizer = Tokenizer("small", vocabulary_size=512)
    with pytest.raises(EpisodeInvalidError, match=f"episode d7: .*{message}"):
        validate(changed, *SPACES, tokenizer=tokenizer)
    # Of several that are checked together, the one at fault is named.
    several = [make_dialogue("d0"), changed, make_dialogue("d9")]
    with pytest.raises(EpisodeInvalidError, match="episode d7: "):
        validate_all(several, *SPACES, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("stated", "is_right"),
    [([-0.5, -1.0, -1.50009], True), ([-0.5, -1.0, -1.5002], False), ([-0.5, 0, -1.5], False)],
)
def test_stated_sum(make_dialogue: Make, stated: list[float], is_right: bool) -> None:
    episode = make_dialogue(behavior_log_probs=stated)
    if is_right:
        validate(episode, *SPACES)
        return
    with pytest.raises(EpisodeInvalidError, match=r"behavior_log_prob at step .*the sum of its"):
        validate(episode, *SPACES)


def test_lists_of_numbers_stay_as_they_are(make_dialogue: Make) -> None:
    """Lists of numbers are checked, and other columns of such names are not."""
    counts = pa.array([[1], None, [1, 2, 3]], pa.list_(pa.int16()))
    named = {"action_counts": counts, "action_notes": [["a", "b"]] * 3, "action_id": [1, 2, 3]}
    ready = validate(make_dialogue(extras=named), *SPACES)
    assert ready.extras["action_counts"].equals(counts)
    assert ready.extras["action_notes"] == [["a", "b"]] * 3
    # Of an episode without tokens, nothing is.
    plain = Episode("e", np.array(["q"], object), np.array(["a"], object), np.zeros(1))
    validate(replace(plain, extras={"action_vector": [[1.0, float("nan")]]}), *SPACES)


def test_types(make_dialogue: Make) -> None:
    episode = make_dialogue()
    lone = Episode(**{**vars(episode), "extras": {"action_tokens": [[1]] * 3}})
    with pytest.raises(SchemaMismatchError, match="action_tokens: found no column observation_t"):
        validate(lone, *SPACES)
    for name, wrong in [
        ("action_tokens", [["a"]] * 3),
        ("is_trainable", [1, 0, 1]),
        ("parent_step", ["1", "2", "3"]),
        ("action_versions", [[1], [2], [3]]),
    ]:
        with pytest.raises(SchemaMismatchError, match=f"column '{name}': found .*expected"):
            validate(make_dialogue(extras={name: wrong}), *SPACES)
    # Without action_tokens, such a column is one like all others.
    plain = {**vars(episode), "extras": {"is_trainable": [1, 0, 1], "parent_step": ["x"] * 3}}
    ready = validate(Episode(**plain), *SPACES)
    assert encode([ready], DatasetSpec(*SPACES))["is_trainable"].to_pylist() == [1, 0, 1]


def test_types_at_rest(make_dialogue: Make) -> None:
    extras = {
        "action_tokens": np.array([[1, 2], [3, 4], [5, 6]], np.uint16),
        "action_log_probs": np.array([[5e-5, -1.0]] * 3),
        "action_versions": [[{"version": 4, "start": 0}]] * 3,
        "is_continuation": [None] * 3,
    }
    episode = make_dialogue(extras=extras)
    table = encode([validate(episode, *SPACES)], DatasetSpec(*SPACES))
    for name in {*extras, "observation_tokens"}:
        assert table.schema.field(name).type.equals(TOKEN_TYPES[name])
    assert table["action_tokens"].to_pylist() == [[1, 2], [3, 4], [5, 6]]
    assert table["action_versions"].to_pylist() == [[{"start": 0, "version": 4}]] * 3
    # What is a little above 0 is 0, and counted.
    assert table["action_log_probs"].to_pylist() == [[0.0, -1.0]] * 3
    assert table["behavior_log_prob"].to_pylist() == [-1.0] * 3
    assert count_positive_log_probs(episode.extras) == 3
    assert count_positive_log_probs({"action_log_probs": [[1.0]]}) == 0


def test_clipped_lists_keep_their_rows(make_dialogue: Make) -> None:
    given: list[Any] = [[1e-5], None, [-1.0, 1e-5, -2.0]]
    table = encode(
        [validate(make_dialogue(extras={"action_log_probs": given}), *SPACES)], DatasetSpec(*SPACES)
    )
    assert table["action_log_probs"].to_pylist() == [[0.0], None, [-1.0, 0.0, -2.0]]


def test_log_probs_that_are_all_unknown(make_dialogue: Make) -> None:
    episode = make_dialogue(extras={"action_log_probs": [None] * 3})
    assert count_positive_log_probs(episode.extras) == 0
    assert np.isnan(np.asarray(validate(episode, *SPACES).behavior_log_probs)).all()
