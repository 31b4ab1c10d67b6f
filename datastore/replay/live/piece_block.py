"""Packing pieces of episodes that this process collected, without a file in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.episode import Episode, validate
from replaylake.datastore.episodes.episode_columns import EpisodeColumns
from replaylake.datastore.episodes.rows import check_ids, encode
from replaylake.datastore.episodes.spaces import Array, Values, as_batch, concatenate, leaves
from replaylake.datastore.episodes.validation import validate_all, validate_as_one
from replaylake.datastore.errors import EpisodeInvalidError, SchemaMismatchError
from replaylake.datastore.replay.layout import BOOTSTRAPPABLE, KEY, STEPS_LEFT, RecordLayout
from replaylake.datastore.replay.live.packed_block import PackedBlock
from replaylake.datastore.replay.live.runs import StepInterval
from replaylake.datastore.replay.packing.fields import (
    UNKNOWN_VERSION,
    put,
    put_column,
    put_values,
)
from replaylake.datastore.replay.packing.row_keys import digests_of, keys_of_steps, pair_name
from replaylake.datastore.replay.record_runs import Runs
from replaylake.datastore.replay.records import Packed, Records

# Packed together: what is copied into the ring then still lies in the processor's cache.
_BYTES_AT_ONCE: Final = 2 << 20
# Memory that is kept for the next pieces; more is made anew each time.
_MAX_KEPT_BYTES: Final = 32 << 20
# Pieces with larger records are written one by one: joining them would copy them once more.
_JOINED_RECORD_BYTES: Final = 2048
_INVALID_ERRORS: Final = (EpisodeInvalidError, ValueError, KeyError, TypeError, AttributeError)


class _PieceArrays(NamedTuple):
    """What is known of each of some pieces; arrays [P]. pairs: `pair_name` of each."""

    pairs: list[str]
    lengths: NDArray[np.int64]
    first_steps: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    has_final: NDArray[np.bool_]


class PiecePacker:
    """Turns pieces into blocks for a ring; each block is valid until the next one is made."""

    def __init__(self, layout: RecordLayout) -> None:
        self._layout = layout
        self._before = layout.frame_stack - 1
        space = layout.spec.observation_space
        self._observation = [name for name, _ in leaves(space, schema.OBSERVATION)]
        self._optional = ["behavior_log_probs", "action_masks"]
        if schema.POLICY_VERSION in layout.columns:
            self._optional.append("policy_versions")
        self._are_joined = layout.dtype.itemsize <= _JOINED_RECORD_BYTES
        self._words: NDArray[np.uint64] = np.empty((0, layout.num_words), np.uint64)

    def blocks(self, pieces: Sequence[Episode]) -> Iterator[PackedBlock]:
        """Yield blocks of some megabytes; each checked as Dataset.append checks episodes.

        Raises: EpisodeInvalidError, SchemaMismatchError for the first piece that does not fit, of a
        block of which nothing is yielded; SpaceUnsupportedError for numbers beyond float32.
        """
        if isinstance(pieces, EpisodeColumns) and self._are_joined:
            if len(pieces):
                yield self._pack(pieces)
            return
        limit = max(1, _BYTES_AT_ONCE // self._layout.dtype.itemsize)
        start, num = 0, 0
        for number, piece in enumerate(pieces):
            size = len(piece) + self._before + 1
            if num and num + size > limit:
                yield self._pack(pieces[start:number])
                start, num = number, 0
            num += size
        if num:
            yield self._pack(pieces[start:])

    def _pack(self, pieces: Sequence[Episode]) -> PackedBlock:
        layout, before = self._layout, self._before
        check_ids(pieces)
        facts = _collect_piece_arrays(pieces)
        lengths, first_steps, has_final = facts.lengths, facts.first_steps, facts.has_final
        ends = lengths.cumsum()
        starts = ends - lengths + np.arange(len(lengths)) * (before + 1) + before
        within = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        positions = within + np.repeat(starts, lengths)
        words = self._room(int(ends[-1]) + len(pieces) * (before + 1))
        rows = layout.rows(words)[:, 0]
        finals = self._put_steps(rows, pieces, starts, positions)
        self._put_around(rows, starts, lengths, has_final, finals)
        digests = digests_of(facts.pairs)
        rows[KEY][positions] = keys_of_steps(
            np.repeat(digests, lengths, axis=0), within + np.repeat(first_steps, lengths)
        )
        rows[STEPS_LEFT][positions] = np.repeat(lengths, lengths) - within
        rows[schema.TERMINATED][positions] = False
        rows[schema.TERMINATED][starts + lengths - 1] = facts.terminated
        known = np.ones(len(positions), np.bool_)
        known[ends - 1] = has_final | facts.terminated
        rows[BOOTSTRAPPABLE][positions] = known
        ended = (facts.terminated | facts.truncated).astype(np.int64)
        packed = Packed(
            records=Records(layout, words, has_links=False),
            runs=Runs(starts, lengths, np.zeros_like(lengths), first_steps, ended),
            steps=positions,
            bootstrappable=positions[known],
            num_steps=int(ends[-1]),
            num_episodes=len(pieces),
        )
        episodes = [digest.tobytes() for digest in digests]
        steps = zip(episodes, first_steps.tolist(), lengths.tolist(), strict=True)
        return PackedBlock(packed, [StepInterval(*one) for one in steps], has_final)

    def _room(self, num: int) -> NDArray[np.uint64]:
        """Return words for `num` records, with anything in them."""
        if num > len(self._words):
            # Not zeroed: all of a record but its padding is written.
            words = np.empty((num, self._layout.num_words), np.uint64)
            if words.nbytes > _MAX_KEPT_BYTES:
                return words
            self._words = words
        return self._words[:num]

    def _put_steps(
        self,
        rows: NDArray[np.void],
        pieces: Sequence[Episode],
        starts: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> Values | None:
        """Write what was logged at each step; return the final observations that there are."""
        spec, layout = self._layout.spec, self._layout
        spaces = (spec.observation_space, spec.action_space)
        if len(pieces) > 1 and self._are_joined:
            try:
                whole, finals = validate_as_one(
                    pieces, *spaces, spec.rewards_optional, self._optional
                )
            except _INVALID_ERRORS:
                # One by one it is said which, and what can only not be joined passes.
                pass
            else:
                block = np.empty(len(positions), layout.dtype)
                self._put_values(block, whole, pieces)
                whole_record = f"V{layout.dtype.itemsize}"
                rows.view(whole_record)[positions] = block.view(whole_record)
                return finals
        parts: list[Values] = []
        for piece, start in zip(pieces, starts.tolist(), strict=True):
            validated = validate(piece, *spaces, rewards_optional=spec.rewards_optional)
            self._put_values(rows[start : start + len(piece)], validated, [validated])
            if validated.final_observation is not None:
                parts.append(as_batch(validated.final_observation))
        return concatenate(parts) if parts else None

    def _put_values(
        self, rows: NDArray[np.void], whole: Episode, pieces: Sequence[Episode]
    ) -> None:
        """Write checked steps, those of some pieces one after another, into `rows` [N]."""
        layout, spec = self._layout, self._layout.spec
        put_values(layout, rows, schema.OBSERVATION, spec.observation_space, whole.observations)
        put_values(layout, rows, schema.ACTION, spec.action_space, whole.actions)
        put(layout, rows, schema.REWARD, whole.rewards)
        log_probs = whole.behavior_log_probs
        rows[schema.BEHAVIOR_LOG_PROB] = np.nan if log_probs is None else log_probs
        if whole.action_masks is not None:
            self._check_masks(whole.action_masks)
        if spec.mask_size is not None:
            rows[schema.ACTION_MASK] = True if whole.action_masks is None else whole.action_masks
        table: pa.Table | None = None
        parts = [whole] if isinstance(pieces, EpisodeColumns) else pieces
        for name, kind in layout.columns.items():
            values = _column(whole, parts, name, kind)
            if values is not None:
                put(layout, rows, layout.column_field(name), values, name=f"column {name!r}")
                continue
            # What has to be converted, or is missing somewhere: as it would be when it is stored.
            table = self._encode(pieces) if table is None else table
            column = table[name] if name in table.column_names else pa.nulls(len(rows), kind)
            put_column(layout, rows, name, pa.chunked_array(column, kind))

    def _encode(self, pieces: Sequence[Episode]) -> pa.Table:
        spec = self._layout.spec
        spaces = (spec.observation_space, spec.action_space)
        ready = validate_all(pieces, *spaces, rewards_optional=spec.rewards_optional)
        return encode(ready, spec)

    def _check_masks(self, masks: Array) -> None:
        expected = self._layout.spec.mask_size
        if expected is None:
            raise SchemaMismatchError(
                "found action masks, expected none: the dataset was created without. Leave them "
                "out, or record into a new dataset."
            )
        if masks.shape[1] != expected:
            raise EpisodeInvalidError(
                f"action_mask: found {masks.shape[1]} actions, expected {expected}."
            )

    def _put_around(
        self,
        rows: NDArray[np.void],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        has_final: NDArray[np.bool_],
        finals: Values | None,
    ) -> None:
        """Write the record after each run, what was observed then, and those before it, stacked."""
        layout, space = self._layout, self._layout.spec.observation_space
        has_masks = layout.spec.mask_size is not None
        whole = rows.view(f"V{layout.dtype.itemsize}")
        tails = np.zeros(len(starts), layout.dtype)
        if finals is None or not has_final.all():
            for name in self._observation:
                tails[name] = rows[name][starts + lengths - 1]
        if finals is not None:
            known = np.zeros(int(has_final.sum()), layout.dtype)
            put_values(layout, known, schema.OBSERVATION, space, finals)
            for name in self._observation:
                tails[name][has_final] = known[name]
        if has_masks:
            tails[schema.ACTION_MASK] = True
        whole[starts + lengths] = tails.view(whole.dtype)
        for back in range(1, self._before + 1):
            stacked = np.zeros(len(starts), layout.dtype)
            for name in self._observation:
                stacked[name] = rows[name][starts]
            stacked[STEPS_LEFT] = lengths + back
            if has_masks:
                stacked[schema.ACTION_MASK] = True
            whole[starts - back] = stacked.view(whole.dtype)


def _collect_piece_arrays(pieces: Sequence[Episode]) -> _PieceArrays:
    if isinstance(pieces, EpisodeColumns):
        agents = pieces.agent_ids or [""] * len(pieces)
        return _PieceArrays(
            [pair_name(*pair) for pair in zip(pieces.episode_ids, agents, strict=True)],
            pieces.lengths.astype(np.int64),
            pieces.first_steps.astype(np.int64),
            pieces.terminated.astype(np.bool_),
            pieces.truncated.astype(np.bool_),
            np.isin(np.arange(len(pieces)), pieces.having_final),
        )
    return _PieceArrays(
        [pair_name(piece.episode_id, piece.agent_id) for piece in pieces],
        np.array([len(piece) for piece in pieces], np.int64),
        np.array([piece.first_step for piece in pieces], np.int64),
        np.array([piece.terminated for piece in pieces], np.bool_),
        np.array([piece.truncated for piece in pieces], np.bool_),
        np.array([piece.final_observation is not None for piece in pieces], np.bool_),
    )


def _column(
    whole: Episode, pieces: Sequence[Episode], name: str, kind: pa.DataType
) -> Array | None:
    """Return a further column as it is stored; None where it has to be converted."""
    if name == schema.POLICY_VERSION:
        versions = whole.policy_versions
        return np.full(len(whole), UNKNOWN_VERSION) if versions is None else versions
    parts: list[Any] = [piece.extras.get(name) for piece in pieces]
    shape: tuple[int, ...] = ()
    if pa.types.is_fixed_size_list(kind):
        kind, shape = kind.value_type, (kind.list_size,)
    dtype = np.dtype(kind.to_pandas_dtype())
    for part, piece in zip(parts, pieces, strict=True):
        if not isinstance(part, np.ndarray) or part.dtype != dtype:
            return None
        if part.shape != (len(piece), *shape):
            return None
    return np.concatenate(parts) if len(parts) > 1 else parts[0]
