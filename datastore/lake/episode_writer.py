"""EpisodeWriter: episodes, whole or in pieces, one at a time into commits of many."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import (
    ACTION_MASK,
    BEHAVIOR_LOG_PROB,
    ENV_STEP,
    POLICY,
    POLICY_VERSION,
    TIMESTAMP,
)
from replaylake.datastore.episodes.spaces import (
    Array,
    Dict,
    Space,
    Text,
    Tuple,
    children,
    copy_value,
    num_bytes,
)
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EpisodeInvalidError,
    ReplayLakeError,
    SchemaMismatchError,
)
from replaylake.datastore.lake.commit import Appendable, Commit, DropCounts, count_rejected
from replaylake.datastore.lake.pieces import PieceOrder, iter_absent_pieces
from replaylake.datastore.lake.validation import EpisodeValidator, partition_valid
from replaylake.datastore.names import new_ulid

# In each commit's info: which writer made it. Two writers of one producer may take one sequence.
_WRITER: Final = "writer"

# The columns that `step` takes, and what Episode calls a piece's worth of each.
_FIELDS: Final = {
    BEHAVIOR_LOG_PROB: "behavior_log_probs",
    POLICY: "policies",
    POLICY_VERSION: "policy_versions",
    ACTION_MASK: "action_masks",
    TIMESTAMP: "timestamps",
    ENV_STEP: "env_steps",
}


@dataclass(frozen=True)
class _UnconfirmedCommit:
    """A commit whose answer is not known: its sequence, and what it was for."""

    sequence: int
    num_episodes: int
    drops: DropCounts


class EpisodeWriter:
    """Buffers episodes, and commits them after a number of steps or bytes, or after a time.

    Each flush is a commit with the producer's next sequence, so a flush that is repeated after an
    error adds nothing twice. A producer that has committed before (for example a process that was
    killed and restarted) may send the same steps again: steps that the dataset has are left out and
    counted as already present. Leaving the `with` block flushes, also after an exception.

    An episode may be written in pieces. Each piece begins at the step after the previous one, and
    only the last piece may be terminated or truncated. A step that this writer wrote before is
    refused, and so is a gap.

    With `flush_interval_s`, a thread commits every step within that time, whether or not `write` is
    called. An error in this thread is raised by the next `flush` or `close`, and the commit is
    tried again. Threads may share a writer.

    `rejected` has the episodes that a flush found invalid, with their errors. They are left out of
    later flushes, so that they do not block other episodes.
    """

    def __init__(
        self,
        dataset: Appendable,
        producer: str | None,
        flush_steps: int,
        flush_bytes: int,
        flush_interval_s: float | None,
    ) -> None:
        self.producer = producer or f"writer/{new_ulid()}"
        self.rejected: list[tuple[Episode, ReplayLakeError]] = []
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._id = new_ulid()
        self._dataset = dataset
        self._flush_steps = flush_steps
        self._flush_bytes = flush_bytes
        self._flush_interval_s = flush_interval_s
        self._buffer: list[Episode] = []
        self._num_buffered = 0
        self._num_bytes = 0
        self._order = PieceOrder()
        self._open: dict[tuple[str, str], OpenEpisode] = {}
        self._validator = EpisodeValidator(dataset)
        # The next one; None where it has to be looked up.
        self._sequence: int | None = None if producer else 0
        # Whether other writers have committed under this producer: the same rows, perhaps.
        self._is_resumed = False
        self._drops = DropCounts()
        self._attempt: _UnconfirmedCommit | None = None
        self._num_reported = 0
        self._timer: threading.Timer | None = None

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """The lock that a thread holds while it uses the writer.

        Raises: ConfigInvalidError in a forked child process.
        """
        # The child has a copy of the buffer, which the parent commits, and of its lock, perhaps
        # held by a thread that is not there.
        if os.getpid() != self._process:
            raise ConfigInvalidError(
                f"writer {self.producer}: used in process {os.getpid()}, a fork of process "
                f"{self._process} that created it. Create a writer in each process."
            )
        return self._lock

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except ReplayLakeError as failure:
            if error is None:
                raise
            # The error that ended the block says more than what it left behind.
            error.add_note(f"The episodes written before it were not committed: {failure}")

    def write(self, episode: Episode) -> None:
        """Check an episode, or the next piece of one, and buffer it.

        Before the dataset exists, the episode is checked against the spaces of the episodes written
        so far. Raises: EpisodeInvalidError or SchemaMismatchError for this episode, which is then
        not buffered; as `flush` if the buffer is full.
        """
        with self.lock:
            self._accept(episode)
            self._flush_if_full()

    def begin(self, episode_id: str | None = None, *, agent_id: str = "") -> OpenEpisode:
        """Begin an episode whose steps are added one by one; each flush writes a piece of it.

        By default its id is `<producer>/<ulid>`. Raises: NotFoundError if the dataset does not
        exist; EpisodeInvalidError if this writer already has an open episode with this id.
        """
        with self.lock:
            spec = self._dataset.spec
            key = (episode_id or f"{self.producer}/{new_ulid()}", agent_id)
            if key in self._open:
                raise EpisodeInvalidError(
                    f"episode {key[0]}: is already open in this writer for this agent. Continue "
                    "with the episode that `begin` returned."
                )
            episode = OpenEpisode(self, (spec.observation_space, spec.action_space), *key)
            self._open[key] = episode
            return episode

    def count_step(self, size: int) -> None:
        """Count a step of an open episode, and its bytes. Called with the lock held."""
        self._num_buffered += 1
        self._num_bytes += size
        self._start_timer()
        self._flush_if_full()

    def end(self, episode: OpenEpisode, piece: Episode) -> None:
        """Add the last piece of an open episode to the buffer. Called with the lock held."""
        self._open.pop((episode.episode_id, episode.agent_id), None)
        self._num_buffered -= len(piece) - 1  # those that were counted as they came
        self.write(piece)

    def flush(self) -> Commit | None:
        """Commit the buffered steps. Return the last commit, or None if the buffer was empty.

        Raises: EpisodeInvalidError or SchemaMismatchError that names the first invalid episode,
        after the others were committed. After another error, for example StorageError, the steps
        remain in the buffer.
        """
        with self.lock:
            commit = self._commit_all()
            new = self.rejected[self._num_reported :]
            if new:
                self._num_reported = len(self.rejected)
                error = new[0][1]
                raise type(error)(
                    f"{error} Left out {len(new)} of the episodes written, which are in the "
                    "writer's `refused`; all others are committed."
                ) from error
            return commit

    def close(self) -> None:
        """Commit the buffered steps and the counts of dropped ones; open episodes stay open.

        In a forked child process it does nothing. Raises: as flush.
        """
        if os.getpid() != self._process:
            return
        with self.lock:
            try:
                self.flush()
            finally:
                # Of a producer that could not commit, nothing can be told either.
                while self._drops and not self._buffer and self._dataset.exists():
                    self._commit()

    def _accept(self, episode: Episode) -> None:
        try:
            ready = self._validator.validate(episode)
            self._order.add(ready)
        except (EpisodeInvalidError, SchemaMismatchError):
            self._drops += count_rejected([episode])
            raise
        self._buffer.append(ready)
        self._num_buffered += len(ready)
        self._num_bytes += num_bytes(ready.observations)
        self._start_timer()

    def _flush_if_full(self) -> None:
        if self._num_buffered >= self._flush_steps or self._num_bytes >= self._flush_bytes:
            self.flush()

    def _start_timer(self) -> None:
        if self._flush_interval_s is None or self._timer is not None:
            return
        self._timer = threading.Timer(self._flush_interval_s, self._flush_in_time)
        self._timer.daemon = True
        self._timer.start()

    def _flush_in_time(self) -> None:
        # The buffer is as it was: `flush` and `close` raise what still stands in the way.
        with self.lock, suppress(ReplayLakeError):
            self._commit_all()

    def _commit_all(self) -> Commit | None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for episode in [episode for episode in self._open.values() if len(episode)]:
            piece = episode.take_piece()
            try:
                self._accept(piece)
            except (EpisodeInvalidError, SchemaMismatchError) as error:
                self.rejected.append((piece, error))
        self._keep(self._buffer)
        commit = None
        try:
            while self._buffer:
                commit = self._commit() or commit
        finally:
            if self._buffer:
                self._start_timer()
        return commit

    def _drop_present(self) -> None:
        """Drop from the buffer what this producer committed before it was started again."""
        if not self._is_resumed:
            return
        rest: list[Episode] = []
        for episode, pieces in iter_absent_pieces(self._dataset.snapshot(), self._buffer):
            rest += pieces
            self._drops += DropCounts(
                num_already_present=int(not pieces),
                num_already_present_steps=len(episode) - sum(map(len, pieces)),
            )
        self._keep(rest)

    def _commit(self) -> Commit | None:
        """Commit the buffer, or the part of it that an earlier flush may have committed."""
        attempt = self._attempt
        if attempt is None:
            if self._sequence is None:
                self._sequence = self._dataset.next_sequence(self.producer)
                self._is_resumed = self._is_resumed or self._sequence > 0
            if self._buffer:
                self._drop_present()
                if not self._buffer:
                    return None
            attempt = _UnconfirmedCommit(self._sequence, len(self._buffer), self._drops)
            self._attempt = attempt
        pending = self._buffer[: attempt.num_episodes]
        names: dict[str, Any] = {
            "producer": self.producer,
            "sequence": attempt.sequence,
            "info": {_WRITER: self._id},
            "drops": attempt.drops,
        }
        try:
            if pending:
                commit = self._dataset.append(pending, **names)
            else:
                commit = self._dataset.account(**names)
        except (EpisodeInvalidError, SchemaMismatchError):
            good, failures = partition_valid(self._dataset, pending)
            if not failures:
                raise
            self._attempt = None
            self._refuse(failures)
            self._keep([*good, *self._buffer[attempt.num_episodes :]])
            return None
        # Forgotten only now: an append that failed may have been committed all the same.
        self._attempt = None
        if commit.already_present and not self._is_own_commit(commit.version):
            # Another writer of this name took the sequence first: these rows need one of their own.
            self._sequence = None
            return None
        self._sequence = attempt.sequence + 1
        self._drops -= attempt.drops
        self._keep(self._buffer[attempt.num_episodes :])
        return commit

    def _refuse(self, failures: Sequence[tuple[Episode, ReplayLakeError]]) -> None:
        self.rejected += failures
        self._drops += count_rejected(episode for episode, _ in failures)
        for episode, _ in failures:
            self._order.remove(episode)

    def _is_own_commit(self, version: int) -> bool:
        return self._dataset.commit_info(version).get(_WRITER) == self._id

    def _keep(self, episodes: list[Episode]) -> None:
        self._buffer = episodes
        self._num_buffered = sum(map(len, episodes))
        self._num_bytes = sum(num_bytes(episode.observations) for episode in episodes)


@dataclass
class _UnwrittenSteps:
    """What was stepped and not yet written: one entry a step in each list."""

    observations: list[Any] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    extras: list[Mapping[str, Any]] = field(default_factory=list)
    final_observation: Any = None


class OpenEpisode:
    """Steps of one episode and agent; each flush of the writer commits those it has as a piece.

    Made by `EpisodeWriter.begin`. In `episodes` it has complete = false until a step ends it.
    """

    def __init__(
        self,
        writer: EpisodeWriter,
        spaces: tuple[Space, Space],
        episode_id: str,
        agent_id: str,
    ) -> None:
        self.episode_id = episode_id
        self.agent_id = agent_id
        self.ended = False
        self._writer = writer
        self._spaces = spaces
        self._first_step = 0
        self._steps = _UnwrittenSteps()

    def __len__(self) -> int:
        return len(self._steps.rewards)

    def step(
        self,
        observation: Any,
        action: Any,
        reward: float,
        next_observation: Any,
        *,
        terminated: bool = False,
        truncated: bool = False,
        **extras: Any,
    ) -> None:
        """Add a step: what was seen, done and received, and what was seen then.

        `extras` are `behavior_log_prob`, `policy`, `policy_version`, `action_mask`, `timestamp`
        (us since 1970), `env_step`, and columns of one's own; the same at every step. With
        `terminated` or `truncated` the episode is handed over for the next flush.

        Raises: EpisodeInvalidError, SchemaMismatchError for the steps that were not written yet,
        which are then left out; as `EpisodeWriter.flush` where the buffer is full.
        """
        if self.ended:
            raise EpisodeInvalidError(
                f"episode {self.episode_id}: found a step after its end, expected none. Begin "
                "another episode."
            )
        try:
            # Before any of it is kept: half a step would shift all that follow.
            observed, executed, following = map(copy_value, (observation, action, next_observation))
        except ValueError as error:
            raise EpisodeInvalidError(
                f"episode {self.episode_id}: step {self._first_step + len(self)}: found {error}, "
                "expected an observation and an action of the dataset's spaces. The step is left "
                "out."
            ) from error
        with self._writer.lock:
            steps = self._steps
            steps.observations.append(observed)
            steps.actions.append(executed)
            steps.rewards.append(reward)
            steps.extras.append(extras)
            steps.final_observation = following
            self.ended = terminated or truncated
            # The last values stand for the size of every step.
            size = num_bytes(steps.final_observation) if len(self) > 1 else 0
            if self.ended:
                self._writer.end(self, self.take_piece(terminated=terminated, truncated=truncated))
            else:
                self._writer.count_step(size)

    def take_piece(self, *, terminated: bool = False, truncated: bool = False) -> Episode:
        """Return the steps since the last piece as the next one, and forget them."""
        steps, self._steps = self._steps, _UnwrittenSteps()
        first, self._first_step = self._first_step, self._first_step + len(steps.rewards)
        columns = _columns(steps.extras)
        known: dict[str, Any] = {
            name: columns.pop(column) for column, name in _FIELDS.items() if column in columns
        }
        return Episode(
            self.episode_id,
            observations=_stack(self._spaces[0], steps.observations),
            actions=_stack(self._spaces[1], steps.actions),
            rewards=_array(steps.rewards),
            terminated=terminated,
            truncated=truncated,
            final_observation=steps.final_observation,
            agent_id=self.agent_id,
            first_step=first,
            extras=columns,
            **known,
        )


def _columns(extras: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for step in extras for name in step):
        values = [step.get(name) for step in extras]
        if name == POLICY:
            columns[name] = np.array(values, dtype=object)
        elif name in _FIELDS or isinstance(values[0], np.ndarray):
            columns[name] = _array(values)
        else:
            columns[name] = values  # the type is pyarrow's to find
    return columns


def _array(values: Sequence[Any]) -> Array:
    try:
        return np.asarray(values)
    except ValueError:  # of several shapes, for the door to refuse
        return np.fromiter(values, object, len(values))


def _stack(space: Space, values: Sequence[Any]) -> Any:
    """Stack single values to arrays [T, ...]; what does not stack is for the door to refuse."""
    if isinstance(space, Dict | Tuple):
        if not all(isinstance(value, Mapping) for value in values):
            return {}
        return {
            key: _stack(sub, [value.get(key) for value in values])
            for key, sub in children(space).items()
        }
    if isinstance(space, Text):
        return np.array(values, dtype=object)
    try:
        stacked: Array = np.stack([np.asarray(value) for value in values])
    except ValueError:
        return values
    return stacked
