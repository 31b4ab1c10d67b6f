"""Token sequences: splits and joins give the same bytes again, both ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylake.datastore.episodes.token_sequences import (
    TokenSequence,
    join_steps,
    split_sequence,
)
from replaylake.datastore.episodes.tokens import TOKEN_TYPES, validate_tokens
from replaylake.datastore.errors import EpisodeInvalidError


def _sequence(ids: Any, mask: Any, log_probs: Any = None, versions: Any = None) -> TokenSequence:
    return TokenSequence(
        np.asarray(ids, np.int32),
        np.asarray(mask, np.bool_),
        None if log_probs is None else np.asarray(log_probs, np.float32),
        None if versions is None else np.asarray(versions, np.int64),
    )


def _lists(columns: dict[str, pa.Array]) -> dict[str, Any]:
    return {name: array.to_pylist() for name, array in columns.items()}


def test_split_by_hand() -> None:
    sequence = _sequence(
        # A prompt of 3, a call of 4, a tool's answer of 2, a call of 2, and what came back.
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
        [0, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0],
        [0, 0, 0, -1, -2, -3, -4, 0, 0, -5, -6, 0],
        [-1, -1, -1, 7, 7, 7, 8, -1, -1, 8, 8, -1],
    )
    columns = split_sequence(sequence)
    assert _lists(columns) == {
        "observation_tokens": [[1, 2, 3], [8, 9]],
        # The filtered token 6 was sampled: the action has it, and the loss leaves it out.
        "action_tokens": [[4, 5, 6, 7], [10, 11]],
        "final_observation_tokens": [None, [12]],
        "is_trainable": [True, True],
        "action_loss_mask": [[True, True, False, True], None],
        "action_log_probs": [[-1, -2, -3, -4], [-5, -6]],
        "action_versions": [
            [{"start": 0, "version": 7}, {"start": 3, "version": 8}],
            [{"start": 0, "version": 8}],
        ],
    }
    assert all(array.type.equals(TOKEN_TYPES[name]) for name, array in columns.items())
    validate_tokens(columns, None, None)


def test_without_log_probs_the_mask_alone_decides() -> None:
    columns = split_sequence(_sequence([1, 2, 3, 4], [0, 1, 0, 1]))
    assert _lists(columns) == {
        "observation_tokens": [[1], [3]],
        "action_tokens": [[2], [4]],
    }


def test_generation_that_was_filtered_whole() -> None:
    columns = split_sequence(_sequence([1, 2, 3, 4], [0, 0, 0, 1], [0, -1, 0, -2]))
    assert columns["is_trainable"].to_pylist() == [False, True]
    assert "action_loss_mask" not in columns


def test_join_of_steps_that_lack_facts() -> None:
    columns: dict[str, list[Any]] = {
        "observation_tokens": [[1], []],
        "action_tokens": [[2, 3], [4]],
        "is_trainable": [False, None],
        "action_log_probs": [None, [-0.5]],
        "action_versions": [[{"start": 0, "version": 6}, {"start": 1, "version": 7}], None],
    }
    arrays = {name: pa.array(values, TOKEN_TYPES[name]) for name, values in columns.items()}
    joined = join_steps(arrays)
    assert joined.token_ids.tolist() == [1, 2, 3, 4]
    assert joined.loss_mask.tolist() == [False, False, False, True]
    assert joined.log_probs is not None
    assert joined.log_probs.tolist() == [0, 0, 0, -0.5]
    assert joined.versions is not None
    assert joined.versions.tolist() == [-1, 6, 7, -1]


@pytest.mark.parametrize("ids", [[], [1, 2]])
def test_nothing_sampled(ids: list[int]) -> None:
    with pytest.raises(EpisodeInvalidError, match=f"found no sampled token among {len(ids)}"):
        split_sequence(_sequence(ids, [0] * len(ids), [0] * len(ids)))


def test_shapes() -> None:
    with pytest.raises(EpisodeInvalidError, match=r"log_probs: found float32 \[1\], expected"):
        _sequence([1, 2], [0, 1], [0])
    with pytest.raises(EpisodeInvalidError, match=r"steps: found 1 of which 1 have no action"):
        join_steps(
            {
                "observation_tokens": pa.array([None], TOKEN_TYPES["observation_tokens"]),
                "action_tokens": pa.array([None], TOKEN_TYPES["action_tokens"]),
            }
        )


# A negative zero and a subnormal number are log-probs like all others.
_LOG_PROBS = st.sampled_from([0.0, -0.0, -0.5, -1e-45, -30.0])


@st.composite
def _sequences(draw: st.DrawFn) -> TokenSequence:
    num = draw(st.integers(1, 24))

    def each(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=num, max_size=num))

    mask = np.asarray(each(st.booleans()))
    mask[draw(st.integers(0, num - 1))] = True
    log_probs = each(_LOG_PROBS) if draw(st.booleans()) else None
    versions = None
    if draw(st.booleans()):
        # Some of the tokens that the loss leaves out were sampled.
        versions = np.asarray(each(st.sampled_from([-1, 3, 3, 4])))
    return _sequence(each(st.integers(0, 2**31 - 1)), mask, log_probs, versions)


@settings(max_examples=60)
@given(_sequences())
def test_split_and_join_give_the_same_bytes(sequence: TokenSequence) -> None:
    columns = split_sequence(sequence)
    assert {len(array) for array in columns.values()} == {len(columns["action_tokens"])}
    joined = join_steps(columns)
    for name, array in vars(sequence).items():
        other = getattr(joined, name)
        if array is None:
            assert other is None
        else:
            assert (other.dtype, other.tobytes()) == (array.dtype, array.tobytes())


@st.composite
def _steps(draw: st.DrawFn) -> dict[str, list[Any]]:
    """Steps with something between any two, whose sampled tokens can be told from the others."""
    num = draw(st.integers(1, 5))
    tokens = st.lists(st.integers(0, 99), min_size=1, max_size=4)
    first = draw(st.lists(st.integers(0, 99), max_size=4))
    columns: dict[str, list[Any]] = {
        "observation_tokens": [first, *(draw(tokens) for _ in range(num - 1))],
        "action_tokens": [draw(tokens) for _ in range(num)],
    }
    lengths = [*map(len, columns["action_tokens"])]
    if draw(st.booleans()):
        final = draw(tokens)
        columns["final_observation_tokens"] = [*[None] * (num - 1), final]
    if draw(st.booleans()):
        known = st.sampled_from([-0.5, -1.5])
        columns["action_log_probs"] = [
            draw(st.lists(known, min_size=n, max_size=n)) for n in lengths
        ]
        masks = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
        if not all(map(all, masks)):
            columns["is_trainable"] = [any(mask) for mask in masks]
        mixed = [mask if any(mask) and not all(mask) else None for mask in masks]
        if any(mask is not None for mask in mixed):
            columns["action_loss_mask"] = mixed
    if draw(st.booleans()):
        # Each run has another version than the one before it.
        runs = [sorted({0, *draw(st.sets(st.integers(0, n - 1)))}) for n in lengths]
        columns["action_versions"] = [
            [{"start": start, "version": 10 * t + i} for i, start in enumerate(starts)]
            for t, starts in enumerate(runs)
        ]
    return columns


@settings(max_examples=60)
@given(_steps())
def test_join_and_split_give_the_same_steps(steps: dict[str, list[Any]]) -> None:
    columns = {name: pa.array(values, TOKEN_TYPES[name]) for name, values in steps.items()}
    assert _lists(split_sequence(join_steps(columns))) == steps
    # And of a slice of a longer column, as a branch is one.
    doubled = {name: pa.concat_arrays([array, array]) for name, array in columns.items()}
    sliced = {name: array[len(array) // 2 :] for name, array in doubled.items()}
    assert _lists(split_sequence(join_steps(sliced))) == steps
