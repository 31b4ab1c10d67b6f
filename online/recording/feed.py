"""Feed: how collected steps come to be sampled: through the lake, or past it and into it beside.

LakeFeed      workers wrote shards; they are committed, and the view that follows the dataset has
              them some milliseconds later. The lake is the transport.
DirectFeed    a worker in this process: its steps go into the view at once, and a thread records
              them; the view passes over the commits of this producer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from replaylake.datastore.lake.runs.timings import Timings
from replaylake.datastore.replay.live.live_view import LiveView
from replaylake.datastore.replay.live.log_reader import FollowTimings
from replaylake.online.collecting.rollout_batch import RolloutBatch
from replaylake.online.recording.episode_committer import EpisodeCommitter


@dataclass(frozen=True)
class ArrivedSteps:
    """Steps that can be sampled from now on; latency_s: since the middle one was taken."""

    num_steps: int
    latency_s: float | None


class Feed(Protocol):
    """Takes shipments; nothing that it was given is lost while the process lives."""

    @property
    def blocked_reason(self) -> str | None:
        """Why nothing more should be collected now: the store refuses."""
        ...

    @property
    def is_behind(self) -> bool:
        """Whether so much waits to be recorded that no more should be collected now."""
        ...

    def add(self, batch: RolloutBatch) -> None:
        """Take what a worker handed over.

        Where there is nothing in it, as of steps in games whose rewards are not known yet, it has
        arrived: they come with later ones.
        """
        ...

    def abandon(self, episode_ids: Sequence[str]) -> None:
        """Say that nothing more of these episodes will come."""
        ...

    def take_arrived(self) -> list[ArrivedSteps]:
        """Return what can be sampled since the last call."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that was added is recorded and arrived; return whether it is, in time."""
        ...

    def take_timings(self) -> Timings:
        """Return what committing and following took since the last call."""
        ...


class DirectFeed:
    """Into the view at once; recorder: None where nothing is recorded."""

    def __init__(self, view: LiveView, recorder: EpisodeCommitter | None) -> None:
        self._view = view
        self._recorder = recorder
        self._arrivals: list[ArrivedSteps] = []

    @property
    def blocked_reason(self) -> str | None:
        return None if self._recorder is None else self._recorder.blocked_reason

    @property
    def is_behind(self) -> bool:
        return self._recorder is not None and self._recorder.is_behind

    def add(self, batch: RolloutBatch) -> None:
        """Put the pieces into the view, and hand them on to be recorded."""
        if batch.pieces:
            self._view.put(batch.pieces)
            if self._recorder is not None:
                self._recorder.add(batch.pieces)
        self._arrivals.append(ArrivedSteps(batch.num_steps, _latency(batch)))

    def abandon(self, episode_ids: Sequence[str]) -> None:
        if self._recorder is not None:
            self._recorder.abandon(episode_ids)

    def take_arrived(self) -> list[ArrivedSteps]:
        """Return what was added since the last call."""
        arrived, self._arrivals = self._arrivals, []
        if self._recorder is not None:
            self._recorder.take_acknowledged()
        return arrived

    def drain(self, timeout_s: float) -> bool:
        return self._recorder is None or self._recorder.flush(timeout_s)

    def take_timings(self) -> Timings:
        return Timings("background") if self._recorder is None else self._recorder.timings.take()


class FollowedView(Protocol):
    """What follows the dataset: a LiveView, or several."""

    @property
    def version(self) -> int:
        """The newest version whose steps can be sampled."""
        ...

    def wait_for(self, version: int | None = None, *, timeout_s: float = 30.0) -> bool:
        """Wait until that is a version; return whether it is, in time."""
        ...

    def timings(self) -> FollowTimings:
        """Return what following took since the last call."""
        ...


class LakeFeed:
    """Through commits of what workers wrote."""

    def __init__(self, view: FollowedView, recorder: EpisodeCommitter) -> None:
        self._view = view
        self._recorder = recorder
        # Handed over and not committed; then committed and not there yet, by version.
        self._batches: deque[RolloutBatch] = deque()
        self._committed: deque[tuple[int, RolloutBatch]] = deque()
        self._num_committed = 0
        # Of shipments in which there was nothing to write.
        self._empty: list[ArrivedSteps] = []

    @property
    def blocked_reason(self) -> str | None:
        return self._recorder.blocked_reason

    @property
    def is_behind(self) -> bool:
        return self._recorder.is_behind

    def add(self, batch: RolloutBatch) -> None:
        """Hand it on to be committed."""
        if batch.written is None:
            self._empty.append(ArrivedSteps(batch.num_steps, None))
            return
        self._recorder.add(batch.written)
        self._batches.append(batch)

    def abandon(self, episode_ids: Sequence[str]) -> None:
        self._recorder.abandon(episode_ids)

    def take_arrived(self) -> list[ArrivedSteps]:
        """Return what the view has of what was committed."""
        for acknowledged in self._recorder.take_acknowledged():
            while self._num_committed <= acknowledged.last:
                self._committed.append((acknowledged.commit.version, self._batches.popleft()))
                self._num_committed += 1
        arrived, self._empty = self._empty, []
        if not self._committed:
            return arrived
        version = self._view.version
        while self._committed and self._committed[0][0] <= version:
            _, batch = self._committed.popleft()
            arrived.append(ArrivedSteps(batch.num_steps, _latency(batch)))
        return arrived

    def drain(self, timeout_s: float) -> bool:
        """Wait for the commits, and for the view to have them."""
        if not self._recorder.flush(timeout_s):
            return False
        return self._view.wait_for(version=self._recorder.last_version, timeout_s=timeout_s)

    def take_timings(self) -> Timings:
        """Take those of the committer and of the view that follows the dataset."""
        timings = self._recorder.timings.take()
        timings.merge(_take_follow_timings(self._view))
        return timings


def _take_follow_timings(view: FollowedView) -> Timings:
    """Return what the view's thread has been at since the last call."""
    totals, timings = view.timings(), Timings("background")
    timings.add("tail", totals.tail.seconds, totals.tail.items, totals.tail.num_bytes)
    timings.add("decode", totals.decode.seconds, totals.decode.items, totals.decode.num_bytes)
    return timings


def _latency(batch: RolloutBatch) -> float | None:
    if batch.first_step_at is None or batch.last_step_at is None:
        return None
    return time.time() - (batch.first_step_at + batch.last_step_at) / 2
