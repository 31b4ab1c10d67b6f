"""Sessions: decisions and the rewards that followed, joined into episodes of the dataset.

What is written, and when:
    - Decisions of one client episode_id are its steps, in the order of the client's own `step`
      where all have one, else of time; the decision whose reward said terminated or truncated is
      the last, and a later one under the same id begins another episode. A decision without an
      episode_id is an episode of one step.
    - An episode is written once it has ended and every decision has its reward. Until then it
      waits, at most the reward window after its last decision.
    - After that, what is known is written and nothing is invented: no end that nobody reported, no
      reward of 0. Steps without a reward stay out, the steps around them keep their numbers, and
      the row before the gap keeps the observation that followed as its final_observation.
    - A decision is written at most once, whenever and however often this runs. A reward that comes
      after its step was written, and differs, changes the step, which then says `reward_late`
      (late_rewards.py has the rules). Of several rewards of one decision the last by time counts
      and sums add onto it, whichever order they arrive in (reports.py).
    - A decision whose reports come to no finite number, or whose row is none of a step, is set
      aside (set_aside.py): as one without a reward, but that an end that was reported counts. All
      others go on.
    - A report names its decision by its id, or by the client's own names: then it means the newest
      decision of that request, or of that step of the episode, that was taken before it came
      (timeline.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count
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
    STEP,
    TIMESTAMP,
    TIMESTAMP_TYPE,
    DatasetSpec,
    to_numpy,
)
from replaylake.datastore.episodes.spaces import Array, take
from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.feedback.decision_id import read_unverified
from replaylake.datastore.feedback.decisions import (
    DECIDED_BY_CLIENT,
    DECISION_ID,
    DEFAULT_WINDOW_S,
    LOG_PROB,
    REPORTED,
    REQUEST_ID,
    REWARD_LATE,
    REWARDED_AT,
    recover_feedback,
)
from replaylake.datastore.feedback.late_rewards import LateResult, apply_late
from replaylake.datastore.feedback.logged_feedback import (
    OTHER_SERVER_LAG_US,
    LoggedFeedback,
    read_logged_feedback,
)
from replaylake.datastore.feedback.received_steps import ReceivedResult, move_received
from replaylake.datastore.feedback.reports import Reward
from replaylake.datastore.feedback.segments import NOTHING_RECOVERED, Recovered
from replaylake.datastore.feedback.set_aside import (
    REWARD_CHECK,
    STEP_CHECK,
    UNWRITABLE,
    SetAside,
    find_unwritable,
    join_producer,
    record_set_aside,
)
from replaylake.datastore.feedback.timeline import TimelineEpisode, cut_episodes, number_steps
from replaylake.datastore.feedback.waits import END, JOURNAL, REWARD, Wait, Waits
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake


@dataclass(frozen=True)
class JoinReceipt:
    """What one run found and wrote.

    decisions and rewards: rows of the two tables. joined: decisions that have a reward. episodes
    (pieces count singly) and steps: what this run added as `version`. waiting: decisions that may
    still be completed; waits: for what, and until when. unrewarded: decisions whose window passed
    without a reward. repeated: unrewarded decisions whose request was sent again and then rewarded,
    and those of a request that the client decided itself, or sent as its own decision before.
    late: steps that got another reward, or an end, after they were written. ends_refused: those of
    them of which the reward says that the episode ends there, though steps follow, or does not,
    though it did. orphaned: rewarded decisions that are not there, and reports by a request or a
    step for which none came within the window; they count as soon as it does. recovered: rows of
    killed servers committed first. damaged: their records that cannot be; the files are kept in the
    journals' folders. set_aside: decisions that cannot be a step, or, of steps, have the reward
    reported; quarantined: rows that are new in the dataset's quarantine, where they can be looked
    at. received: what became of steps that clients sent as episodes.
    """

    dataset: str
    version: int
    decisions: int
    rewards: int
    joined: int
    episodes: int
    steps: int
    waiting: int
    unrewarded: int
    repeated: int
    late: int
    ends_refused: int
    orphaned: int
    recovered: int
    damaged: int
    waits: Sequence[Wait] = ()
    set_aside: int = 0
    quarantined: int = 0
    received: ReceivedResult = field(default_factory=ReceivedResult)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def has_changed(self) -> bool:
        """Whether this run wrote anything into the dataset, or into its quarantine."""
        return bool(self.steps or self.late or self.received.steps or self.quarantined)

    def to_line(self) -> str:
        """Return what this run did, in a line."""
        num_aside = self.set_aside + self.received.set_aside
        return (
            f"{self.dataset}@{self.version}: {self.episodes:,} episodes, "
            f"{self.steps + self.received.steps:,} steps added, {self.late:,} late; "
            f"{self.waiting:,} waiting, {self.orphaned:,} orphaned"
            + (f", {num_aside:,} set aside" if num_aside else "")
        )


@dataclass
class _JoinCounts:
    waits: Waits
    unrewarded: int = 0
    repeated: int = 0
    due: int | None = None
    aside: list[SetAside] = field(default_factory=list)

    def wait_until(self, timestamp: int) -> None:
        """Note that something may be written then (us)."""
        self.due = timestamp if self.due is None else min(self.due, timestamp)


@dataclass(frozen=True)
class JoinRound:
    """One run: its receipt, and when (us) the next has something to do though nothing comes."""

    receipt: JoinReceipt
    due: int | None


def join_feedback(
    lake: Lake,
    dataset: str,
    *,
    window_s: float = DEFAULT_WINDOW_S,
    now_s: float | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> JoinReceipt:
    """Join served decisions with their rewards, and append the episodes to the dataset.

    All episodes are appended in one commit.

    Args:
        lake: the lake.
        dataset: the dataset into which the decisions were served.
        window_s: the time that a decision waits for its reward.
        now_s: the time for evaluating the window (s since 1970, UTC); the clock's by default. Later
            decisions wait.
        on_progress: called with (episodes built, episodes).

    Raises: NotFoundError if nothing was ever served into the dataset. Cost: one scan of the two
    tables' ids and of the dataset's decision_id column; Python objects are created only for rows
    that may change.
    """
    return join_once(lake, dataset, window_s=window_s, now_s=now_s, on_progress=on_progress).receipt


def join_once(
    lake: Lake,
    dataset: str,
    *,
    window_s: float = DEFAULT_WINDOW_S,
    now_s: float | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> JoinRound:
    """Do what `join_feedback` does, and return when the next round is due. Raises: as it does."""
    handle = lake.dataset(dataset)
    if not (handle.exists() and handle.decisions.exists() and handle.rewards.exists()):
        raise NotFoundError(
            f"feedback join {dataset}: found no decisions, expected some from a served policy. "
            f"`replaylake serve POLICY --log-to {dataset}` logs them."
        )
    now = time.time_ns() // 1000 if now_s is None else int(now_s * 1e6)
    window = int(window_s * 1e6)
    moved = move_received(handle, now_s=now / 1e6, window_s=window_s)
    producer = join_producer(dataset)
    recovered = NOTHING_RECOVERED
    unwritable: dict[str, str] = {}
    while True:
        recovered += recover_feedback(handle)
        # Two runs at once get the same sequence: the later finds it taken and reads anew.
        sequence = handle.next_sequence(producer)
        snapshot = handle.snapshot()
        logged = read_logged_feedback(handle, snapshot, now, window)
        logged.set_aside = unwritable | logged.set_aside
        counts = _JoinCounts(logged.waits, logged.unrewarded, logged.repeated)
        pieces = list(_plan(logged, now, window, counts))
        version = snapshot.version
        if pieces:
            try:
                episodes = build_episodes(logged, snapshot.spec, pieces, on_progress)
                commit = handle.append(episodes, producer=producer, sequence=sequence)
            except UNWRITABLE:
                errors = _find_unwritable(handle, logged, snapshot.spec, pieces)
                if not errors:
                    raise
                unwritable |= errors
                continue
            if commit.already_present:
                continue
            version = commit.version
        late = apply_late(handle, logged)
        version = version if late.version is None else late.version
        if late.is_behind or logged.num_early:
            counts.wait_until(now)
        quarantined = record_set_aside(handle, counts.aside, producer=producer)
        receipt = _receipt(dataset, version, logged, pieces, counts, recovered, late)
        journal_lag = None if handle.table.storage.shares_state else OTHER_SERVER_LAG_US
        receipt = replace(
            receipt,
            waits=counts.waits.to_list(window, journal_lag),
            received=moved,
            quarantined=quarantined + moved.quarantined,
        )
        return JoinRound(receipt, counts.due)


def _find_unwritable(
    dataset: Dataset, logged: LoggedFeedback, spec: DatasetSpec, pieces: Sequence[DecisionPiece]
) -> dict[str, str]:
    """Return the decisions of which no step can be made, with the reasons."""

    def check(some: Sequence[DecisionPiece]) -> None:
        dataset.check(build_episodes(logged, spec, some, None))

    errors: dict[str, str] = {}
    for piece, reason in find_unwritable(pieces, check):
        ones = [
            replace(piece, first_step=piece.first_step + i, decision_ids=[key], next_id=None)
            for i, key in enumerate(piece.decision_ids)
        ]
        alone = find_unwritable(ones, check) or [(piece, reason)]
        errors |= {key: error for one, error in alone for key in one.decision_ids}
    return errors


def _plan(
    logged: LoggedFeedback, now: int, window: int, counts: _JoinCounts
) -> Iterator[DecisionPiece]:
    """Yield what is to be written now; decisions older than `window` (us) no longer wait."""
    known = {key: step.step for key, step in logged.written.items()}
    for client in logged.clients.values():
        keys = (decision.key for decision in client.decisions)
        taken = {logged.written[key].episode_id for key in keys if key in logged.written}
        for episode in cut_episodes(client.decisions, logged.is_episode_end, logged.rank):
            yield from _pieces(episode, client.source, logged, known, taken, now, window, counts)


def _pieces(
    episode: TimelineEpisode,
    source: str | None,
    logged: LoggedFeedback,
    known: Mapping[str, int],
    taken: set[str],
    now: int,
    window: int,
    counts: _JoinCounts,
) -> Iterator[DecisionPiece]:
    rewards, written = logged.rewards, logged.written
    numbers = number_steps(episode, known)
    # A client that got no answer (the server was killed) asks again under the same request_id.
    counts.repeated += sum(decision.key not in numbers for decision in episode.decisions)
    ids = sorted(numbers, key=numbers.__getitem__)
    there = (written[key].episode_id for key in ids if key in written)
    stored_id = next(there, None)
    for key in ids:
        if key in logged.set_aside:
            episode_id = stored_id or f"served/{min(ids)}"
            counts.aside.append(_aside(key, episode_id, source, episode, logged))
    open_ids = [key for key in ids if key not in written and key not in logged.set_aside]
    if not open_ids:
        return
    is_whole = all(logged.has_reward(key) for key in ids) and (
        source is None or logged.is_episode_end(ids[-1])
    )
    newest = max(decision.timestamp for decision in episode.decisions)
    if newest >= logged.horizon or not (is_whole or newest < now - window):
        if newest >= logged.horizon:
            reason = JOURNAL
        else:
            reason = END if all(logged.has_reward(key) for key in ids) else REWARD
        counts.waits.add(reason, len(open_ids), newest, newest)
        counts.wait_until(now if newest >= logged.horizon else newest + window + 1)
        return
    counts.unrewarded += sum(key not in rewards for key in ids)
    episode_id = stored_id or _unused_id(f"served/{min(ids)}", taken)
    taken.add(episode_id)
    for run, next_id in _runs(ids, numbers, logged):
        yield DecisionPiece(episode_id, source, numbers[run[0]], run, next_id)


def _aside(
    key: str, episode_id: str, source: str | None, episode: TimelineEpisode, logged: LoggedFeedback
) -> SetAside:
    (decision,) = (one for one in episode.decisions if one.key == key)
    reward = logged.rewards.get(key)
    is_sum = reward is not None and not reward.is_finite
    about = {DECISION_ID: key, REQUEST_ID: decision.request_id, STEP: decision.step}
    # Who asks that a policy's rows go means these too.
    if (issued := read_unverified(key)) is not None:
        about |= {POLICY: issued.policy, POLICY_VERSION: issued.policy_version}
    check = REWARD_CHECK if is_sum else STEP_CHECK
    return SetAside(episode_id, "", source or episode_id, check, logged.set_aside[key], about)


def _unused_id(name: str, taken: Collection[str]) -> str:
    """Return a name for an episode that no other of the client's has.

    A decision that a step was written after, and whose own report then says that it ended the
    episode, is one by itself; the other has its name.
    """
    names = chain([name], (f"{name}+{number}" for number in count(1)))
    return next(free for free in names if free not in taken)


def _runs(
    ids: Sequence[str], numbers: Mapping[str, int], logged: LoggedFeedback
) -> Iterator[tuple[list[str], str | None]]:
    """Yield decisions to be written whose numbers follow on each other, and the one after them."""
    run: list[str] = []
    for key in ids:
        follows = bool(run) and numbers[key] == numbers[run[-1]] + 1
        is_open = logged.has_reward(key) and key not in logged.written
        if run and (not follows or not is_open or logged.is_episode_end(run[-1])):
            yield run, key if follows else None
            run = []
        if is_open:
            run.append(key)
    if run:
        yield run, None


def _receipt(
    dataset: str,
    version: int,
    logged: LoggedFeedback,
    pieces: Sequence[DecisionPiece],
    counts: _JoinCounts,
    recovered: Recovered,
    late: LateResult,
) -> JoinReceipt:
    tokens = (read_unverified(key) for key in logged.unknown)
    orphaned = sum(token is not None and token.timestamp < logged.horizon for token in tokens)
    fresh = sum(logged.has_reward(key) and key not in logged.written for key in logged.file_of)
    stale = sum(key in logged.written for key in logged.set_aside)
    return JoinReceipt(
        dataset=dataset,
        version=version,
        decisions=logged.num_decisions,
        rewards=logged.num_rewards,
        joined=logged.num_written + fresh - stale,
        episodes=len(pieces),
        steps=sum(len(piece.decision_ids) for piece in pieces),
        waiting=counts.waits.num,
        unrewarded=counts.unrewarded,
        repeated=counts.repeated,
        late=late.num_steps,
        ends_refused=late.num_ends_refused,
        orphaned=orphaned + logged.unmatched,
        recovered=recovered.num_rows,
        damaged=recovered.num_damaged,
        set_aside=len(logged.set_aside),
    )


@dataclass(frozen=True, slots=True)
class DecisionPiece:
    """Consecutive decisions to write; `next_id` is the decision after them in the same episode."""

    episode_id: str
    source_episode_id: str | None
    first_step: int
    decision_ids: list[str]
    next_id: str | None


def build_episodes(
    logged: LoggedFeedback,
    spec: DatasetSpec,
    pieces: Sequence[DecisionPiece],
    on_progress: Callable[[int, int], None] | None,
) -> list[Episode]:
    """Read the rows that the pieces need and cut the episodes out of them."""
    keys = [key for piece in pieces for key in piece.decision_ids]
    keys += [piece.next_id for piece in pieces if piece.next_id is not None]
    chosen = pa.array(keys, pa.string())
    files = sorted({logged.file_of[key] for key in keys})
    some = replace(logged.decisions, files=tuple(logged.decisions.files[i] for i in files))
    rows = pa.concat_tables(
        batch.filter(pc.is_in(batch.column(DECISION_ID), chosen)) for batch in some.batches()
    ).combine_chunks()
    source = _DecodedDecisions(rows, logged, spec)
    episodes = []
    for number, piece in enumerate(pieces, 1):
        episodes.append(source.episode(piece))
        if on_progress is not None:
            on_progress(number, len(pieces))
    return episodes


class _DecodedDecisions:
    """Decoded decisions, from which episodes are cut."""

    def __init__(self, rows: pa.Table, logged: LoggedFeedback, spec: DatasetSpec) -> None:
        self._logged, self._spec = logged, spec
        self._row_of = {key: row for row, key in enumerate(rows.column(DECISION_ID).to_pylist())}
        self._observations = to_numpy(spec.observation_space, rows.column(OBSERVATION))
        self._actions = to_numpy(spec.action_space, rows.column(ACTION))
        self._log_probs = rows.column(LOG_PROB).to_numpy().astype(np.float32)
        self._policies = np.asarray(rows.column(POLICY).to_pylist(), dtype=object)
        self._versions = rows.column(POLICY_VERSION).to_numpy()
        self._timestamps = rows.column(TIMESTAMP).cast(pa.int64()).to_numpy()
        self._request_ids = rows.column(REQUEST_ID)
        self._masks = self._decode_masks(rows)
        self._by_client = None
        if DECIDED_BY_CLIENT in rows.column_names:
            self._by_client = rows.column(DECIDED_BY_CLIENT).combine_chunks().fill_null(False)
        self._has_sums = any(reward.has_sums for reward in logged.rewards.values())

    def episode(self, piece: DecisionPiece) -> Episode:
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
                **self._marks(index),
            },
        )

    def _sums(self, rewards: Sequence[Reward]) -> dict[str, pa.Array]:
        """Return the column of sums, where any of the rewards of this run is one."""
        if not self._has_sums:
            return {}
        return {REPORTED: pa.array([reward.reported for reward in rewards], pa.string())}

    def _marks(self, index: Array) -> dict[str, pa.Array]:
        """Return the column of what clients decided, where any of this run is such a decision."""
        if self._by_client is None:
            return {}
        marks = self._by_client.take(pa.array(index))
        return {DECIDED_BY_CLIENT: marks} if marks.true_count else {}

    def _final_observation(self, piece: DecisionPiece, last: Reward) -> Any:
        if piece.next_id is not None and not last.ends:
            return take(self._observations, self._row_of[piece.next_id])
        if last.final_row is None:
            return None
        one = self._logged.final_observations.slice(last.final_row, 1)
        return take(to_numpy(self._spec.observation_space, one), 0)

    def _decode_masks(self, rows: pa.Table) -> Array | None:
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
