"""Recorder: the thread that commits what workers collected, and waits where the disk is full.

One a run: the one writer to the dataset's log for all of its workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import StorageError, TransientStorageError
from replaylake.datastore.lake.commit import Commit, DropCounts, WrittenEpisodes
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.runs.timings import Timings
from replaylake.online.pools.pool import ANSWER_TIMEOUT_S
from replaylake.online.recording.committed_steps import ABANDONED
from replaylake.online.recording.storage_retry import RETRY_S

# Steps. A worker in this process collects several times as fast as they are encoded beside it.
_MAX_WAITING_STEPS: Final = 1 << 17


@dataclass(frozen=True)
class AcknowledgedCommit:
    """A commit, and which of what was handed over is in it: counted from 0, up to `last`."""

    commit: Commit
    last: int


class EpisodeCommitter:
    """Commits in groups, as (producer, 0), (producer, 1), ...: readers see a group whole or not.

    What was handed over is acknowledged when it is committed. Where the store refuses in passing (a
    full disk) nothing is dropped: the same is tried again, under the same sequence, until it is
    taken, and `blocked_reason` says so meanwhile; whoever hands over is to stop then. Use it as a
    context manager.
    """

    def __init__(
        self,
        dataset: Dataset,
        producer: str,
        *,
        interval_s: float,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        """Go on after the producer's last commit.

        interval_s: from one commit to the next, at least. answer_timeout_s: after which a store
        that neither takes a commit nor refuses it counts as hung.
        """
        self.producer = producer
        self.blocked_reason: str | None = None
        self.timings = Timings("background")
        # Not from 0: a commit with a sequence that is taken would add nothing.
        self._sequence = dataset.next_sequence(producer)
        self.last_version: int | None = None
        self._dataset = dataset
        self._interval_s = interval_s
        self._condition = threading.Condition()
        self._waiting: list[WrittenEpisodes | Sequence[Episode]] = []
        self._num_waiting = 0
        self._losses: list[str] = []
        self._acknowledged: list[AcknowledgedCommit] = []
        self._num_done = 0
        self._is_committing = False
        self._answer_timeout_s = answer_timeout_s
        self._retry_at: float | None = None
        self._failure: BaseException | None = None
        self._is_urgent = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="replaylake-record", daemon=True)
        self._thread.start()

    def __enter__(self) -> EpisodeCommitter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, part: WrittenEpisodes | Sequence[Episode]) -> None:
        """Take what is written already, or episodes that are to be written; returns at once.

        Raises: what went wrong before, other than a store that refuses; StorageError for one that
        hangs.
        """
        with self._condition:
            self._check()
            self._waiting.append(part)
            self._num_waiting += _num_steps(part)
            self._condition.notify_all()

    @property
    def is_behind(self) -> bool:
        """Whether so much waits to be written that whoever hands over should wait.

        Raises: as add.
        """
        self._check()
        return self._num_waiting > _MAX_WAITING_STEPS

    def abandon(self, episode_ids: Sequence[str]) -> None:
        """Say in the next commit that these episodes will not go on: whoever made them is gone.

        At the latest `flush` and `close` make one.
        """
        with self._condition:
            self._losses += episode_ids

    def take_acknowledged(self) -> list[AcknowledgedCommit]:
        """Return the commits since the last call. Raises: as add, where there was none."""
        with self._condition:
            if not self._acknowledged:
                self._check()
            ends, self._acknowledged = self._acknowledged, []
            return ends

    def flush(self, timeout_s: float | None = None) -> bool:
        """Commit all of it now and wait; return whether it was done in time. Raises: as add."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._condition:
            self._is_urgent = True
            self._condition.notify_all()
            while self._waiting or self._losses or self._is_committing:
                self._check()
                wait_s = None if until is None else until - time.monotonic()
                if wait_s is not None and wait_s <= 0:
                    return False
                self._condition.wait(0.1 if wait_s is None else min(wait_s, 0.1))
            self._check()
            # Otherwise, episodes added before the thread's next check would be committed at once.
            self._is_urgent = False
        return True

    def close(self) -> None:
        """Commit what is left, if the store takes it, and end the thread; not where that hangs."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        while self._thread.is_alive() and not self._is_hung:
            self._thread.join(0.1)

    @property
    def _is_hung(self) -> bool:
        asked_at = self._retry_at
        return asked_at is not None and time.monotonic() - asked_at > self._answer_timeout_s

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_hung:
            raise StorageError(
                f"dataset {self._dataset.name!r}: found no answer of the store to a commit in "
                f"{self._answer_timeout_s:g} s, expected it to be accepted or refused. "
                "Acknowledged steps are in the dataset. Check the disk and the network; if a "
                "commit only takes longer, raise answer_timeout_s."
            )

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            with self._condition:
                while not (self._waiting or self._is_closing or (self._losses and self._is_urgent)):
                    self._is_urgent = False
                    self._condition.wait()
                if not (self._waiting or self._losses):
                    return
                while (wait_s := due - time.monotonic()) > 0 and not (
                    self._is_closing or self._is_urgent
                ):
                    self._condition.wait(wait_s)
                parts, self._waiting, self._num_waiting = self._waiting, [], 0
                lost, self._losses = self._losses, []
                self._is_committing = True
            try:
                commit = self._commit_group(parts, lost)
            except BaseException as error:
                with self._condition:
                    # Whoever waits for the trouble to end is to look, and so to be told.
                    self._failure, self.blocked_reason = error, None
                    self._num_waiting = 0
                    self._condition.notify_all()
                return
            due = time.monotonic() + self._interval_s
            with self._condition:
                self._num_done += len(parts)
                self._is_committing = False
                if parts:
                    self._acknowledged.append(AcknowledgedCommit(commit, self._num_done - 1))
                self._condition.notify_all()

    def _commit_group(
        self, parts: list[WrittenEpisodes | Sequence[Episode]], lost: Sequence[str]
    ) -> Commit:
        """Commit a group, however often the store refuses; once where that is closing.

        No parts, only lost episodes: a commit without rows. Raises: StorageError,
        SchemaMismatchError, EpisodeInvalidError, NotFoundError where the dataset is gone.
        """
        info: dict[str, Any] = {ABANDONED: list(lost)} if lost else {}
        written = [part for part in parts if isinstance(part, WrittenEpisodes)]
        # Together, or each round of a worker in this process would be a shard.
        episodes = [e for part in parts if not isinstance(part, WrittenEpisodes) for e in part]
        while True:
            self._retry_at = time.monotonic()
            try:
                if episodes:
                    written.append(self._write_episodes(episodes))
                    episodes = []
                started = time.perf_counter()
                commit = self._commit(written, info)
                seconds = time.perf_counter() - started
                self.timings.add("commit", seconds, 1, commit.num_bytes)
            except TransientStorageError as error:
                self._retry_at, self.blocked_reason = None, str(error)
                with self._condition:
                    if self._is_closing:
                        raise
                    self._condition.wait_for(lambda: self._is_closing, RETRY_S)
                continue
            self._retry_at = None
            self._sequence += 1
            self.last_version, self.blocked_reason = commit.version, None
            return commit

    def _commit(self, written: Sequence[WrittenEpisodes], info: dict[str, Any]) -> Commit:
        to: dict[str, Any] = {"producer": self.producer, "sequence": self._sequence, "info": info}
        if written:
            return self._dataset.commit(written, **to)
        return self._dataset.account(drops=DropCounts(), **to)

    def _write_episodes(self, episodes: Sequence[Episode]) -> WrittenEpisodes:
        started = time.perf_counter()
        encoded = self._dataset.encode(episodes)
        at = time.perf_counter()
        written = self._dataset.write(encoded)
        num_steps, num_bytes = written.num_steps, written.num_bytes
        self.timings.add("encode", at - started, num_steps, num_bytes)
        self.timings.add("shard_write", time.perf_counter() - at, num_steps, num_bytes)
        return written


def _num_steps(part: WrittenEpisodes | Sequence[Episode]) -> int:
    if isinstance(part, WrittenEpisodes):
        return part.num_steps
    return sum(len(episode) for episode in part)
