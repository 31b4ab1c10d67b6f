"""EpisodeWriter: episodes one at a time into commits of many."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final

from replaylake.datastore.episode import Episode, checked
from replaylake.datastore.errors import EpisodeInvalid, ReplayLakeError, SchemaMismatch
from replaylake.datastore.inference import infer_spec, widest
from replaylake.datastore.names import new_ulid
from replaylake.datastore.rows import check_encodable
from replaylake.datastore.schema import DatasetSpec
from replaylake.datastore.spaces import num_bytes

if TYPE_CHECKING:
    from replaylake.datastore.dataset import Commit, Dataset

# In each commit's info: which writer made it. Two writers of one producer may take one sequence.
_WRITER: Final = "writer"


class EpisodeWriter:
    """Buffers episodes and commits them by steps, by bytes of observations or by time.

    Every flush is a commit with the next sequence of this producer, and a flush that is repeated
    after an error adds nothing twice. Leaving the `with` block flushes, also on an exception: what
    was written before it is whole episodes.

    `refused` holds the episodes that a flush found invalid, each with its error. They are in no
    later flush, so that the others are never held up by them.
    """

    def __init__(
        self,
        dataset: Dataset,
        producer: str | None,
        flush_steps: int,
        flush_bytes: int,
        flush_interval_s: float | None,
    ) -> None:
        self.producer = producer or f"writer/{new_ulid()}"
        self.refused: list[tuple[Episode, ReplayLakeError]] = []
        self._id = new_ulid()
        self._dataset = dataset
        self._flush_steps = flush_steps
        self._flush_bytes = flush_bytes
        self._flush_interval_s = flush_interval_s
        self._buffer: list[Episode] = []
        self._num_buffered = 0
        self._num_bytes = 0
        self._spec: DatasetSpec | None = None
        self._is_stated = False
        # The sequence of a flush whose answer is not known, and how many episodes it was for.
        self._attempt: tuple[int, int] | None = None
        self._num_reported = 0
        self._flushed_at = time.monotonic()

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
        """Check an episode and buffer it.

        Before the dataset exists, the spaces of the episodes written so far are what it has to fit.
        Raises: EpisodeInvalid, SchemaMismatch for this episode, which is not buffered then; as
        `flush` where the buffer is full.
        """
        episode = self._checked(episode)
        self._buffer.append(episode)
        self._num_buffered += len(episode)
        self._num_bytes += num_bytes(episode.observations)
        waited = time.monotonic() - self._flushed_at
        due = self._flush_interval_s is not None and waited >= self._flush_interval_s
        full = self._num_buffered >= self._flush_steps or self._num_bytes >= self._flush_bytes
        if due or full:
            self.flush()

    def flush(self) -> Commit | None:
        """Commit what is buffered; None if that is nothing. Returns the last of its commits.

        Raises: EpisodeInvalid or SchemaMismatch naming the first episode that was refused, after
        the others were committed; another error, such as StorageFailed, keeps the buffer.
        """
        self._flushed_at = time.monotonic()
        commit = None
        while self._buffer:
            commit = self._commit() or commit
        new = self.refused[self._num_reported :]
        if new:
            self._num_reported = len(self.refused)
            error = new[0][1]
            raise type(error)(
                f"{error} Left out {len(new)} of the episodes written, which are in the writer's "
                "`refused`; all others are committed."
            ) from error
        return commit

    def close(self) -> None:
        """Commit what is buffered. Raises: as flush."""
        self.flush()

    def _checked(self, episode: Episode) -> Episode:
        if not self._is_stated and self._dataset.exists():
            # Spaces are fixed at creation, so those read once hold for the writer's life.
            self._spec, self._is_stated = self._dataset.spec, True
        spec = self._spec
        if spec is None or not self._is_stated:
            own = infer_spec([episode])
            try:
                spec = own if spec is None else widest([spec, own])
            except EpisodeInvalid as error:
                raise _named(error, episode) from error
        episode = checked(episode, spec.observation_space, spec.action_space)
        try:
            check_encodable(episode, spec)
        except (EpisodeInvalid, SchemaMismatch) as error:
            raise _named(error, episode) from error
        self._spec = spec
        return episode

    def _commit(self) -> Commit | None:
        """Commit the buffer, or the part of it that an earlier flush may have committed."""
        if self._attempt is None:
            self._attempt = self._dataset.next_sequence(self.producer), len(self._buffer)
        sequence, num = self._attempt
        pending = self._buffer[:num]
        try:
            commit = self._dataset.append(
                pending, producer=self.producer, sequence=sequence, info={_WRITER: self._id}
            )
        except (EpisodeInvalid, SchemaMismatch):
            good, refused = _sorted_out(self._dataset, pending)
            if not refused:
                raise
            self._attempt = None
            self.refused += refused
            self._keep([*good, *self._buffer[num:]])
            return None
        # Forgotten only now: an append that failed may have been committed all the same.
        self._attempt = None
        if commit.already_present and not self._is_own(commit.version):
            # Another writer of this name took the sequence first: these rows need one of their own.
            return None
        self._keep(self._buffer[num:])
        return commit

    def _is_own(self, version: int) -> bool:
        return self._dataset.commit_info(version).get(_WRITER) == self._id

    def _keep(self, episodes: list[Episode]) -> None:
        self._buffer = episodes
        self._num_buffered = sum(map(len, episodes))
        self._num_bytes = sum(num_bytes(episode.observations) for episode in episodes)


def _sorted_out(
    dataset: Dataset, episodes: Sequence[Episode]
) -> tuple[list[Episode], list[tuple[Episode, ReplayLakeError]]]:
    """Part episodes into those that can be appended together and those that cannot, with why."""
    good: list[Episode] = []
    refused: list[tuple[Episode, ReplayLakeError]] = []
    parts = [list(episodes)]
    while parts:
        part = parts.pop()
        try:
            dataset.check([*good, *part])
            good += part
        except (EpisodeInvalid, SchemaMismatch) as error:
            if len(part) == 1:
                refused.append((part[0], _named(error, part[0])))
            else:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
    return good, refused


def _named(error: ReplayLakeError, episode: Episode) -> ReplayLakeError:
    """Return the error with the episode's name in front, if it does not say it yet."""
    name = episode.source_episode_id or episode.episode_id
    return error if f"episode {name}" in str(error) else type(error)(f"episode {name}: {error}")
