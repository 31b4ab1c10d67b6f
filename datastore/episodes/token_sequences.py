"""Token sequences: what trainers read and write, as the token columns of steps, and back.

A trainer has one row for a whole dialogue: its ids, and a mask of those that the loss is over.
Steps have what came before each generation, and what was generated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.episodes.tokens import (
    ACTION_LOG_PROBS,
    ACTION_LOSS_MASK,
    ACTION_TOKENS,
    ACTION_VERSIONS,
    FINAL_OBSERVATION_TOKENS,
    IS_TRAINABLE,
    OBSERVATION_TOKENS,
    TOKEN_TYPES,
)
from replaylake.datastore.errors import EpisodeInvalidError
from replaylake.datastore.storage.arrow_values import numbers

# The version of a token that no policy sampled.
NO_VERSION: Final = -1


@dataclass(frozen=True)
class TokenSequence:
    """A dialogue as N tokens in a row.

    token_ids int32 [N]. loss_mask bool [N]: the tokens that the loss is over. log_probs float32
    [N]: the behavior policy's of each token that it sampled, +0.0 elsewhere; None if unknown.
    versions int64 [N]: of the policy that sampled each token, -1 elsewhere; None if unknown.

    Raises: EpisodeInvalidError for arrays of other shapes.
    """

    token_ids: Array
    loss_mask: Array
    log_probs: Array | None = None
    versions: Array | None = None

    def __post_init__(self) -> None:
        dtypes = {
            "token_ids": np.int32,
            "loss_mask": np.bool_,
            "log_probs": np.float32,
            "versions": np.int64,
        }
        for name, dtype in dtypes.items():
            if (array := getattr(self, name)) is None:
                continue
            if array.dtype != dtype or array.shape != (len(self.token_ids),):
                raise EpisodeInvalidError(
                    f"{name}: found {array.dtype} {list(array.shape)}, expected "
                    f"{np.dtype(dtype)} [{len(self.token_ids)}]."
                )

    def __len__(self) -> int:
        return len(self.token_ids)


def find_sampled(sequence: TokenSequence) -> Array:
    """Return which tokens the policy sampled, bool [N]: those of the actions, in their order."""
    sampled = sequence.loss_mask.copy()
    if sequence.log_probs is not None:
        # By its bits: a trainer that writes -0.0 has it again.
        sampled |= sequence.log_probs.view(np.uint32) != 0
    if sequence.versions is not None:
        sampled |= sequence.versions != NO_VERSION
    return sampled


def split_sequence(sequence: TokenSequence) -> dict[str, pa.Array]:
    """Return the token columns of a sequence's S generations, one step each.

    A generation is a run of tokens that the policy sampled: those that the loss is over, and those
    beside them that have a log-prob or a version, as trainers leave it to tokens that they filter.
    The latter are false in `action_loss_mask`, and a generation of none but them is not trainable.
    What stands between two generations is the observation of the second; what follows the last is
    its `final_observation_tokens`. `join_steps` gives the same bytes again.

    Two generations with nothing between them become one. Raises: EpisodeInvalidError for a sequence
    without a sampled token.
    """
    columns, _ = split_sequences(sequence, np.asarray([len(sequence)]))
    return columns


def split_sequences(joined: TokenSequence, lengths: Array) -> tuple[dict[str, pa.Array], Array]:
    """Return the token columns of L sequences, as `split_sequence` does for each.

    joined: the concatenated sequences. lengths int64 [L]: number of tokens of each, 1 or more.
    Columns that some sequences lack are NULL in their steps. The second result, int64 [L], is the
    number of steps of each sequence.

    Raises: EpisodeInvalidError for a sequence without a sampled token.
    """
    if not lengths.all():
        raise _unsampled_error(0)
    sampled = find_sampled(joined)
    ends_of = np.cumsum(lengths)
    begins_of = ends_of - lengths
    is_first, is_last = sampled.copy(), sampled.copy()
    is_first[1:] &= ~sampled[:-1]
    is_last[:-1] &= ~sampled[1:]
    is_first[begins_of] = sampled[begins_of]
    is_last[ends_of - 1] = sampled[ends_of - 1]
    starts, ends = np.flatnonzero(is_first), np.flatnonzero(is_last) + 1
    owners = np.searchsorted(ends_of, starts, side="right")
    num_steps = np.bincount(owners, minlength=len(lengths))
    if not num_steps.all():
        raise _unsampled_error(int(lengths[np.argmin(num_steps)]))
    lasts = np.cumsum(num_steps) - 1
    num = len(starts)
    previous = np.append(0, ends[:-1])
    previous[lasts - num_steps + 1] = begins_of
    observation_lengths, action_lengths = starts - previous, ends - starts
    final_lengths = np.zeros(num, np.int64)
    final_lengths[lasts] = ends_of - ends[lasts]
    read = joined.token_ids[~sampled]
    final: Array | None = None
    if final_lengths.any():
        pieces = np.stack([observation_lengths, final_lengths], axis=1).reshape(-1)
        is_final = np.repeat(np.arange(2 * num) % 2 == 1, pieces)
        final, read = read[is_final], read[~is_final]
    action_offsets = _offsets(action_lengths)
    columns = {
        OBSERVATION_TOKENS: _lists(OBSERVATION_TOKENS, _offsets(observation_lengths), read),
        ACTION_TOKENS: _lists(ACTION_TOKENS, action_offsets, joined.token_ids[sampled]),
    }
    if final is not None:
        columns[FINAL_OBSERVATION_TOKENS] = _lists(
            FINAL_OBSERVATION_TOKENS, _offsets(final_lengths), final, final_lengths == 0
        )
    mask = joined.loss_mask[sampled]
    if not mask.all():
        num_trained = np.add.reduceat(mask, action_offsets[:-1], dtype=np.int64)
        is_uniform = (num_trained == 0) | (num_trained == action_lengths)
        is_whole = np.logical_and.reduceat(num_trained == action_lengths, lasts - num_steps + 1)
        columns[IS_TRAINABLE] = pa.array(num_trained > 0, mask=np.repeat(is_whole, num_steps))
        if not is_uniform.all():
            of_mixed = np.repeat(~is_uniform, action_lengths)
            columns[ACTION_LOSS_MASK] = _lists(
                ACTION_LOSS_MASK,
                _offsets(np.where(is_uniform, 0, action_lengths)),
                mask[of_mixed],
                is_uniform,
            )
    if joined.log_probs is not None:
        columns[ACTION_LOG_PROBS] = _lists(
            ACTION_LOG_PROBS, action_offsets, joined.log_probs[sampled]
        )
    if joined.versions is not None:
        columns[ACTION_VERSIONS] = _version_runs(joined.versions[sampled], action_offsets)
    return columns, num_steps


def _unsampled_error(length: int) -> EpisodeInvalidError:
    return EpisodeInvalidError(
        f"loss_mask: found no sampled token among {length}, expected at least one."
    )


def join_steps(columns: Mapping[str, pa.Array]) -> TokenSequence:
    """Return the sequence of a branch: steps of which each goes on from the one before.

    columns: token columns of S steps in their stored types, in order; the first observation is the
    whole prompt. The sequence has log-probs and versions where there are such columns; of a step
    that lacks them they are 0 and -1.

    Raises: EpisodeInvalidError for no steps, and for a step without its ids.
    """
    observations, actions = columns[OBSERVATION_TOKENS], columns[ACTION_TOKENS]
    num = len(actions)
    if not num or observations.null_count or actions.null_count:
        raise EpisodeInvalidError(
            f"steps: found {num} of which {actions.null_count} have no {ACTION_TOKENS}, expected "
            "at least one, and the ids of each."
        )
    observed = numbers(pc.list_value_length(observations)).astype(np.int64)
    acted = numbers(pc.list_value_length(actions)).astype(np.int64)
    lengths = np.stack([observed, acted], axis=1).reshape(-1)
    sampled = np.repeat(np.arange(2 * num) % 2 == 1, lengths)
    final = np.zeros(0, np.int32)
    if FINAL_OBSERVATION_TOKENS in columns:
        final = numbers(columns[FINAL_OBSERVATION_TOKENS][num - 1 :].flatten())
    sampled = np.append(sampled, np.zeros(len(final), np.bool_))
    token_ids = np.zeros(len(sampled), np.int32)
    token_ids[sampled] = numbers(actions.flatten())
    token_ids[~sampled] = np.append(numbers(observations.flatten()), final)
    loss_mask = sampled.copy()
    loss_mask[sampled] = find_trained_tokens(columns, acted)
    log_probs = versions = None
    if ACTION_LOG_PROBS in columns:
        log_probs = np.zeros(len(sampled), np.float32)
        known = np.repeat(numbers(columns[ACTION_LOG_PROBS].is_valid()), acted)
        log_probs[np.flatnonzero(sampled)[known]] = numbers(columns[ACTION_LOG_PROBS].flatten())
    if ACTION_VERSIONS in columns:
        versions = np.full(len(sampled), NO_VERSION, np.int64)
        versions[sampled] = _token_versions(columns[ACTION_VERSIONS], acted)
    return TokenSequence(token_ids, loss_mask, log_probs, versions)


def find_trained_tokens(columns: Mapping[str, pa.Array], acted: Array) -> Array:
    """Return which tokens of the actions the loss is over."""
    trained = np.ones(int(acted.sum()), np.bool_)
    if ACTION_LOSS_MASK in columns:
        masks = columns[ACTION_LOSS_MASK]
        trained[np.repeat(numbers(masks.is_valid()), acted)] = numbers(masks.flatten())
    if IS_TRAINABLE in columns:
        trainable = numbers(pc.fill_null(columns[IS_TRAINABLE], True))
        trained &= np.repeat(trainable, acted)
    return trained


def _version_runs(versions: Array, offsets: Array) -> pa.Array:
    """Return action_versions of the versions [M] of the tokens of all actions."""
    begins = np.append(True, versions[1:] != versions[:-1])
    begins[offsets[:-1]] = True
    places = np.flatnonzero(begins)
    actions = np.searchsorted(offsets, places, side="right") - 1
    runs = pa.StructArray.from_arrays(
        [
            pa.array((places - offsets[actions]).astype(np.int32)),
            pa.array(versions[places]),
        ],
        fields=list(TOKEN_TYPES[ACTION_VERSIONS].value_type),
    )
    return _lists(ACTION_VERSIONS, np.searchsorted(places, offsets).astype(np.int64), runs)


def _token_versions(runs: pa.Array, acted: Array) -> Array:
    """Return the version of each token of the actions; -1 in steps without."""
    versions = np.full(int(acted.sum()), NO_VERSION, np.int64)
    known = np.flatnonzero(numbers(runs.is_valid()))
    if not len(known):
        return versions
    values = runs.flatten()
    nums = numbers(pc.list_value_length(runs.take(pa.array(known)))).astype(np.int64)
    begins = (np.cumsum(acted) - acted)[np.repeat(known, nums)]
    begins = begins + numbers(pc.struct_field(values, "start"))
    ends = np.append(begins[1:], 0)
    lasts = np.cumsum(nums)[nums > 0] - 1
    ends[lasts] = np.cumsum(acted)[known[nums > 0]]
    where = np.repeat(numbers(runs.is_valid()), acted)
    versions[where] = np.repeat(numbers(pc.struct_field(values, "version")), ends - begins)
    return versions


def _offsets(lengths: Array) -> Array:
    return np.append(0, np.cumsum(lengths))


def _lists(
    name: str, offsets: Array, values: Array | pa.Array, absent: Array | None = None
) -> pa.Array:
    """Return a token column of lists; NULL where `absent`, whose lists are empty."""
    array = values if isinstance(values, pa.Array) else pa.array(values)
    mask = None if absent is None else np.append(absent, False)
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32), mask=mask), array, type=TOKEN_TYPES[name]
    )
