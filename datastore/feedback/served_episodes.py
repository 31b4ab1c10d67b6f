"""Served episodes: pieces of client episodes cut out of the decisions, ready to be appended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import (
    ACTION,
    ACTION_MASK,
    OBSERVATION,
    POLICY,
    POLICY_VERSION,
    TIMESTAMP,
    TIMESTAMP_TYPE,
    DatasetSpec,
    to_numpy,
)
from replaylake.datastore.episodes.spaces import Array, take
from replaylake.datastore.feedback.decisions import (
    DECISION_ID,
    LOG_PROB,
    REPORTED,
    REQUEST_ID,
    REWARD_LATE,
    REWARDED_AT,
)
from replaylake.datastore.feedback.reports import Reward
from replaylake.datastore.feedback.served import Logged


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive decisions to write; `next_id` is the decision after them in the same episode."""

    episode_id: str
    source_episode_id: str | None
    first_step: int
    decision_ids: list[str]
    next_id: str | None


def build_episodes(
    logged: Logged,
    spec: DatasetSpec,
    pieces: Sequence[Piece],
    on_progress: Callable[[int, int], None] | None,
) -> list[Episode]:
    """Read the rows that the pieces need and cut the episodes out of them."""
    wanted = [key for piece in pieces for key in piece.decision_ids]
    wanted += [piece.next_id for piece in pieces if piece.next_id is not None]
    chosen = pa.array(wanted, pa.string())
    files = sorted({logged.file_of[key] for key in wanted})
    some = replace(logged.decisions, files=tuple(logged.decisions.files[i] for i in files))
    rows = pa.concat_tables(
        batch.filter(pc.is_in(batch.column(DECISION_ID), chosen)) for batch in some.batches()
    ).combine_chunks()
    source = _Source(rows, logged, spec)
    episodes = []
    for number, piece in enumerate(pieces, 1):
        episodes.append(source.episode(piece))
        if on_progress is not None:
            on_progress(number, len(pieces))
    return episodes


class _Source:
    """Decoded decisions, from which episodes are cut."""

    def __init__(self, rows: pa.Table, logged: Logged, spec: DatasetSpec) -> None:
        self._logged, self._spec = logged, spec
        self._row_of = {key: row for row, key in enumerate(rows.column(DECISION_ID).to_pylist())}
        self._observations = to_numpy(spec.observation_space, rows.column(OBSERVATION))
        self._actions = to_numpy(spec.action_space, rows.column(ACTION))
        self._log_probs = rows.column(LOG_PROB).to_numpy().astype(np.float32)
        self._policies = np.asarray(rows.column(POLICY).to_pylist(), dtype=object)
        self._versions = rows.column(POLICY_VERSION).to_numpy()
        self._timestamps = rows.column(TIMESTAMP).cast(pa.int64()).to_numpy()
        self._request_ids = rows.column(REQUEST_ID)
        self._masks = self._decoded_masks(rows)
        self._has_sums = any(reward.has_sums for reward in logged.rewards.values())

    def episode(self, piece: Piece) -> Episode:
        """Cut one piece out."""
        index = np.asarray([self._row_of[key] for key in piece.decision_ids])
        rewards = [self._logged.rewards[key] for key in piece.decision_ids]
        last = rewards[-1]
        return Episode(
            episode_id=piece.episode_id,
            source_episode_id=piece.source_episode_id,
            first_step=piece.first_step,
            observations=take(self._observations, index),
            actions=take(self._actions, index),
            rewards=np.asarray([reward.reward for reward in rewards], np.float64),
            terminated=last.terminated,
            truncated=last.truncated,
            final_observation=self._final_observation(piece, last),
            behavior_log_probs=self._log_probs[index],
            policies=self._policies[index],
            policy_versions=self._versions[index],
            action_masks=None if self._masks is None else self._masks[index],
            timestamps=self._timestamps[index],
            extras={
                DECISION_ID: pa.array(piece.decision_ids, pa.string()),
                REQUEST_ID: self._request_ids.take(pa.array(index)).combine_chunks(),
                REWARDED_AT: pa.array([reward.timestamp for reward in rewards], TIMESTAMP_TYPE),
                REWARD_LATE: pa.array([False] * len(rewards)),
                **self._sums(rewards),
            },
        )

    def _sums(self, rewards: Sequence[Reward]) -> dict[str, pa.Array]:
        """Return the column of sums, where any of the rewards of this run is one."""
        if not self._has_sums:
            return {}
        return {REPORTED: pa.array([reward.reported for reward in rewards], pa.string())}

    def _final_observation(self, piece: Piece, last: Reward) -> Any:
        if piece.next_id is not None and not last.ends:
            return take(self._observations, self._row_of[piece.next_id])
        if last.final_row is None:
            return None
        one = self._logged.final_observations.slice(last.final_row, 1)
        return take(to_numpy(self._spec.observation_space, one), 0)

    def _decoded_masks(self, rows: pa.Table) -> Array | None:
        """Return bool [T, A]; a decision without a mask had every action allowed."""
        if self._spec.mask_size is None or ACTION_MASK not in rows.column_names:
            return None
        column = rows.column(ACTION_MASK).combine_chunks()
        given = column.is_valid().to_numpy(zero_copy_only=False)
        if not given.any():
            return None
        masks = np.ones((len(column), self._spec.mask_size), dtype=bool)
        flat = column.drop_null().flatten().to_numpy(zero_copy_only=False)
        masks[given] = flat.reshape(-1, self._spec.mask_size)
        return masks
