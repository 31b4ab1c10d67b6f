"""Served: decisions with their rewards as the lake has them, and episodes cut out of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

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
    TIMESTAMP_TYPE,
    TRUNCATED,
    DatasetSpec,
    to_numpy,
)
from replaylake.datastore.sessions.decisions import (
    DECISION_ID,
    LOG_PROB,
    REQUEST_ID,
    REWARD_LATE,
    REWARDED_AT,
)
from replaylake.datastore.sessions.segments import first_pending, has_live_worker
from replaylake.datastore.snapshot import Snapshot
from replaylake.datastore.spaces import Array, take
from replaylake.datastore.table import Table

# Far longer than a decision takes from its timestamp to its journal.
_IN_FLIGHT_US: Final = 100_000
# Far longer than a record waits in the journal of a server on another machine, which we cannot see.
_ELSEWHERE_US: Final = 60_000_000


@dataclass(frozen=True)
class Reward:
    """A decision's last reward; final_row is where the rewards table has its final observation.

    timestamp (us) is when this outcome was first reported since another one was: a client that
    repeats itself says nothing new.
    """

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

    written maps a decision to the outcome its step has, steps to the step's number, rewarded to the
    time (us) at which that outcome was reported, None if that is not known. last are the decisions
    of the last step that each episode has. All decisions before horizon (us) are here.
    """

    decisions: pa.Table
    rewards: Mapping[str, Reward]
    num_rewards: int
    final_observations: pa.ChunkedArray
    written: Mapping[str, tuple[float, bool, bool]]
    steps: Mapping[str, int]
    rewarded: Mapping[str, int | None]
    last: frozenset[str]
    horizon: int

    def late(self) -> dict[str, Reward]:
        """Return the rewards of written steps that were reported after the one that they have.

        What a label made of a step's reward since is not overruled by an older report.
        """
        found = {}
        for key, outcome in self.written.items():
            reward, since = self.rewards.get(key), self.rewarded[key]
            if reward is not None and is_late(reward, outcome, since):
                found[key] = reward
        return found

    def ends(self, key: str) -> bool:
        """Whether the episode ends, or will end once late rewards are applied, with a decision."""
        reward = self.rewards.get(key)
        if (outcome := self.written.get(key)) is None:
            return reward is not None and reward.ends
        if reward is not None and is_late(reward, outcome, self.rewarded[key]):
            _, terminated, truncated = settled(reward, outcome, is_last=key in self.last)
            return terminated or truncated
        return outcome[1] or outcome[2]


def is_late(reward: Reward, outcome: tuple[float, bool, bool], since: int | None) -> bool:
    """Whether a reward came after the outcome that a step has, and differs."""
    return reward.outcome != outcome and (since is None or reward.timestamp > since)


def settled(
    reward: Reward, outcome: tuple[float, bool, bool], *, is_last: bool
) -> tuple[float, bool, bool]:
    """Return the outcome of a step after a late reward.

    An end that comes late counts where no step follows. One that was written stays one: the client
    may have begun another episode under the same id since.
    """
    has_ended = outcome[1] or outcome[2]
    if reward.ends and (has_ended or is_last):
        return reward.outcome
    return reward.reward, outcome[1], outcome[2]


def read_logged(dataset: Dataset, snapshot: Snapshot, now: int) -> Logged:
    """Read the two tables' newest versions, and which decisions the snapshot has as steps.

    `now` (us) is the time, taken before. An episode whose last decision is at or after the horizon
    may have an earlier one that is not in the tables read: written without it, it would have a
    false successor, and that one's step number twice when it comes. What is in a journal yet is no
    older than its first record; what gets into one after we looked was decided after `now`, but for
    the moment between taking its time and writing it, which a live worker may be in. Of a remote
    lake other machines may have journals too: what was decided within a minute waits.
    """
    looked = now - _IN_FLIGHT_US if has_live_worker(dataset.decisions) else now
    if dataset.table.storage.is_remote:
        looked = now - _ELSEWHERE_US
    horizon = min([looked, *first_pending(dataset.decisions, TIMESTAMP)])
    rewards = dataset.rewards.snapshot().read()
    narrow = [DECISION_ID, EPISODE_ID, REQUEST_ID, TIMESTAMP]
    decisions = dataset.decisions.snapshot().read(narrow).sort_by(DECISION_ID)
    written = _read_written(snapshot)
    return Logged(
        decisions=decisions,
        rewards=_last_rewards(rewards),
        num_rewards=rewards.num_rows,
        final_observations=rewards.column(FINAL_OBSERVATION),
        written={row.key: row.outcome for row in written},
        steps={row.key: row.step for row in written},
        rewarded={row.key: row.rewarded_at for row in written},
        last=_last_of_each(written),
        horizon=horizon,
    )


class _Written(NamedTuple):
    """A served step."""

    key: str
    outcome: tuple[float, bool, bool]
    episode_id: str
    step: int
    rewarded_at: int | None


def _read_written(snapshot: Snapshot) -> list[_Written]:
    if DECISION_ID not in snapshot.spec.extras:
        return []
    columns = [DECISION_ID, REWARD, TERMINATED, TRUNCATED, EPISODE_ID, STEP]
    has_times = REWARDED_AT in snapshot.spec.extras
    rows: list[_Written] = []
    for batch in snapshot.table.batches([*columns, REWARDED_AT] if has_times else columns):
        served = batch.filter(pc.is_valid(batch.column(DECISION_ID)))
        keys, *outcomes, episodes, steps = (served.column(name).to_pylist() for name in columns)
        times: list[int | None] = [None] * served.num_rows
        if has_times:
            times = served.column(REWARDED_AT).cast(pa.int64()).to_pylist()
        cells = zip(keys, zip(*outcomes, strict=True), episodes, steps, times, strict=True)
        rows += map(_Written._make, cells)
    return rows


def _last_of_each(written: Sequence[_Written]) -> frozenset[str]:
    last: dict[str, _Written] = {}
    for row in written:
        if row.episode_id not in last or last[row.episode_id].step < row.step:
            last[row.episode_id] = row
    return frozenset(row.key for row in last.values())


def _last_rewards(rewards: pa.Table) -> dict[str, Reward]:
    """Return each decision's last reward by time; a repeat of the same one changes nothing.

    Of two reported in the same microsecond the one that was written down later counts.
    """
    rewards = rewards.append_column("row", pa.array(np.arange(rewards.num_rows)))
    rewards = rewards.take(
        pc.sort_indices(rewards, [(TIMESTAMP, "ascending"), ("row", "ascending")])
    )
    columns = (
        rewards.column(DECISION_ID).to_pylist(),
        rewards.column(REWARD).to_pylist(),
        rewards.column(TERMINATED).to_pylist(),
        rewards.column(TRUNCATED).to_pylist(),
        rewards.column(TIMESTAMP).cast(pa.int64()).to_pylist(),
        pc.is_valid(rewards.column(FINAL_OBSERVATION)).to_pylist(),
        rewards.column("row").to_pylist(),
    )
    last: dict[str, Reward] = {}
    for key, reward, terminated, truncated, timestamp, has_final, row in zip(*columns, strict=True):
        before = last.get(key)
        final_row = row if has_final else before.final_row if before else None
        said = Reward(reward, terminated, truncated, timestamp, final_row)
        if before is not None and before.outcome == said.outcome:
            said = replace(said, timestamp=before.timestamp)
        last[key] = said
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
                REWARDED_AT: pa.array([reward.timestamp for reward in rewards], TIMESTAMP_TYPE),
                REWARD_LATE: pa.array([False] * len(rewards)),
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
