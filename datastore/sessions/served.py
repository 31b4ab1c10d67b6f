"""Served: decisions with their rewards as the lake has them, and episodes cut out of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.dataset import Dataset
from replaylake.datastore.episode import Episode
from replaylake.datastore.schema import (
    ACTION,
    ACTION_MASK,
    EPISODE_ID,
    FINAL_OBSERVATION,
    OBSERVATION,
    POLICY,
    POLICY_VERSION,
    REWARD,
    STEP,
    TERMINATED,
    TIMESTAMP,
    TRUNCATED,
    DatasetSpec,
    to_numpy,
)
from replaylake.datastore.sessions.decisions import DECISION_ID, LOG_PROB, REQUEST_ID
from replaylake.datastore.sessions.segments import first_pending, has_live_worker
from replaylake.datastore.snapshot import Snapshot
from replaylake.datastore.spaces import Array, take
from replaylake.datastore.table import Table

# Far longer than a decision takes from its timestamp to its journal.
_IN_FLIGHT_US: Final = 100_000


@dataclass(frozen=True)
class Reward:
    """A decision's last reward; final_row is where the rewards table has its final observation."""

    reward: float
    terminated: bool
    truncated: bool
    timestamp: int
    final_row: int | None

    @property
    def outcome(self) -> tuple[float, bool, bool]:
        """What a step keeps of it."""
        return self.reward, self.terminated, self.truncated

    @property
    def ends(self) -> bool:
        """Whether the episode ends with it."""
        return self.terminated or self.truncated


@dataclass(frozen=True)
class Piece:
    """Consecutive decisions to write; `next_id` is the decision after them in the same episode."""

    episode_id: str
    source_episode_id: str | None
    first_step: int
    decision_ids: list[str]
    next_id: str | None


@dataclass(frozen=True)
class Logged:
    """What was served, at pinned versions.

    written maps a decision to the outcome its step has, and steps to the step's number. All
    decisions before horizon (us) are here.
    """

    decisions: pa.Table
    rewards: Mapping[str, Reward]
    num_rewards: int
    final_observations: pa.ChunkedArray
    written: Mapping[str, tuple[float, bool, bool]]
    steps: Mapping[str, int]
    horizon: int


def read_logged(dataset: Dataset, snapshot: Snapshot, now: int) -> Logged:
    """Read the two tables' newest versions, and which decisions the snapshot has as steps.

    `now` (us) is the time, taken before. An episode whose last decision is at or after the horizon
    may have an earlier one that is not in the tables read: written without it, it would have a
    false successor, and that one's step number twice when it comes. What is in a journal yet is no
    older than its first record; what gets into one after we looked was decided after `now`, but for
    the moment between taking its time and writing it, which a live worker may be in.
    """
    looked = now - _IN_FLIGHT_US if has_live_worker(dataset.decisions) else now
    horizon = min([looked, *first_pending(dataset.decisions, TIMESTAMP)])
    rewards = dataset.rewards.snapshot().read()
    narrow = [DECISION_ID, EPISODE_ID, REQUEST_ID, TIMESTAMP]
    decisions = dataset.decisions.snapshot().read(narrow).sort_by(DECISION_ID)
    written: dict[str, tuple[float, bool, bool]] = {}
    steps: dict[str, int] = {}
    if DECISION_ID in snapshot.spec.extras:
        columns = [DECISION_ID, REWARD, TERMINATED, TRUNCATED]
        for batch in snapshot.table.batches([*columns, STEP]):
            served = batch.filter(pc.is_valid(batch.column(DECISION_ID)))
            ids, *outcomes = (served.column(name).to_pylist() for name in columns)
            written.update(zip(ids, zip(*outcomes, strict=True), strict=True))
            steps.update(zip(ids, served.column(STEP).to_pylist(), strict=True))
    return Logged(
        decisions=decisions,
        rewards=_last_rewards(rewards),
        num_rewards=rewards.num_rows,
        final_observations=rewards.column(FINAL_OBSERVATION),
        written=written,
        steps=steps,
        horizon=horizon,
    )


def _last_rewards(rewards: pa.Table) -> dict[str, Reward]:
    """Return each decision's last reward by time; a repeat of the same one changes nothing."""
    columns = (
        rewards.column(DECISION_ID).to_pylist(),
        rewards.column(REWARD).to_pylist(),
        rewards.column(TERMINATED).to_pylist(),
        rewards.column(TRUNCATED).to_pylist(),
        rewards.column(TIMESTAMP).cast(pa.int64()).to_pylist(),
        pc.is_valid(rewards.column(FINAL_OBSERVATION)).to_pylist(),
    )
    last: dict[str, Reward] = {}
    for row, (key, reward, terminated, truncated, timestamp, has_final) in enumerate(
        zip(*columns, strict=True)
    ):
        before = last.get(key)
        if before is None or timestamp >= before.timestamp:
            final_row = row if has_final else before.final_row if before else None
            last[key] = Reward(reward, terminated, truncated, timestamp, final_row)
    return last


def build_episodes(
    table: Table,
    logged: Logged,
    spec: DatasetSpec,
    pieces: Sequence[Piece],
    on_progress: Callable[[int, int], None] | None,
) -> list[Episode]:
    """Read the rows that the pieces need and cut the episodes out of them."""
    wanted = [key for piece in pieces for key in piece.decision_ids]
    wanted += [piece.next_id for piece in pieces if piece.next_id is not None]
    chosen = pa.array(wanted, pa.string())
    rows = pa.concat_tables(
        batch.filter(pc.is_in(batch.column(DECISION_ID), chosen))
        for batch in table.snapshot().batches()
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
            },
        )

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
