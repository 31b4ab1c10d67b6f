"""Shipment: what a rollout worker hands to its run's driver, durable in shards or as it is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import TransientStorageError
from replaylake.datastore.lake.commit import WrittenEpisodes
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.runs.timings import Timings
from replaylake.online.collecting.behavior_policy import BehaviorPolicies, BehaviorPolicy
from replaylake.online.collecting.worker import EpisodeEnd, RolloutConfig
from replaylake.online.collecting.workers import Worker, make_worker


@dataclass(frozen=True)
class EpisodeNumbers:
    """Episode numbers without an end: `first`, and every `step`-th after it."""

    first: int = 0
    step: int = 1

    def __iter__(self) -> Iterator[int]:
        number = self.first
        while True:
            yield number
            number += self.step


@dataclass(frozen=True)
class WorkerSpec:
    """What one worker of a run is to collect, and where it goes; may be sent to another process.

    lake: what opens it there, a folder's path or a URL. episodes: their numbers, all of them or
    endless. records: the worker writes what it collects; else it hands over the episodes.
    """

    lake: str
    dataset: str
    producer: str
    worker: int
    episodes: Iterable[int]
    behavior_policy: BehaviorPolicies
    config: RolloutConfig
    records: bool = True


@dataclass(frozen=True)
class RolloutBatch:
    """What one worker collected since its last shipment.

    written: in durable shards, not committed yet; None if nothing was to be written. pieces: the
    episodes themselves, where the worker does not record. ends: episodes that ended, open_episodes:
    ids of those that did not, and of which pieces were handed over. num_steps: that were collected
    for it. first_step_at, last_step_at: when (Unix time, s) the oldest and the newest step in it
    were taken. busy_s: seconds that the worker's process spent on it, of which `timings` has the
    links. exhausted: nothing follows. blocked_reason: what the storage said no with; what was
    collected waits in the worker, which collects no more until it is written.
    """

    worker: int
    written: WrittenEpisodes | None = None
    pieces: Sequence[Episode] = ()
    ends: Sequence[EpisodeEnd] = ()
    open_episodes: Sequence[str] = ()
    num_steps: int = 0
    first_step_at: float | None = None
    last_step_at: float | None = None
    timings: Timings = field(default_factory=lambda: Timings("workers"))
    busy_s: float = 0.0
    exhausted: bool = False
    blocked_reason: str | None = None


class RecordingWorker:
    """A rollout worker that writes what it collects; the same class runs in process and in Ray."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Keep the spec; nothing fails before `collect_batch`, whose errors reach the driver."""
        self._order = spec
        self._worker: Worker | None = None
        self._dataset: Dataset | None = None
        self._waiting: RolloutBatch | None = None

    def collect_batch(
        self,
        num_steps: int,
        interval_s: float,
        behavior_policy: BehaviorPolicies | None = None,
        with_open: bool = False,
    ) -> RolloutBatch:
        """Collect so many steps or seconds, and write what there is, durably.

        behavior_policy: who acts from now on; None: as before. with_open: the steps so far of open
        episodes are handed over as well, as pieces. Where the storage refuses, the batch says so in
        `trouble` and is tried again by the next call, which collects nothing before.

        Raises: RolloutError, NotFoundError, EpisodeInvalidError, SpaceUnsupportedError,
        PackageInvalidError.
        """
        timings = Timings("workers")
        with timings.measure("start", items=0):
            worker = self._rollout_worker()
        if behavior_policy is not None:
            with timings.measure("set_policy"):
                worker.set_behavior_policy(self._localize_policies(behavior_policy))
        if self._waiting is None:
            self._waiting = self._collect(worker, num_steps, interval_s, with_open)
        waiting = self._waiting
        waiting.timings.merge(timings)
        if not self._order.records or not waiting.pieces:
            self._waiting = None
            return waiting
        try:
            written = self._write(waiting)
        except TransientStorageError as error:
            return RolloutBatch(self._order.worker, blocked_reason=str(error))
        self._waiting = None
        return replace(waiting, pieces=(), written=written)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _collect(
        self, worker: Worker, num_steps: int, interval_s: float, with_open: bool
    ) -> RolloutBatch:
        num = worker.advance(num_steps, interval_s)
        stepped = time.time()
        first_step_at = worker.first_step_at
        with worker.timings.measure("assemble", num):
            pieces, ends = worker.take_episodes(with_open), worker.take_ends()
            open_episodes = worker.open_episodes
        return RolloutBatch(
            worker=self._order.worker,
            pieces=pieces,
            ends=ends,
            open_episodes=open_episodes,
            num_steps=num,
            first_step_at=first_step_at,
            last_step_at=stepped if num else None,
            timings=worker.timings.take(),
            exhausted=worker.exhausted,
        )

    def _write(self, waiting: RolloutBatch) -> WrittenEpisodes:
        if self._dataset is None:
            # Kept, because it reads only what is new in the log.
            self._dataset = open_lake(self._order.lake).dataset(self._order.dataset)
        started = time.perf_counter()
        encoded = self._dataset.encode(waiting.pieces)
        num_steps, num_bytes = encoded.rows.num_rows, encoded.rows.nbytes
        ready = time.perf_counter()
        waiting.timings.add("encode", ready - started, num_steps, num_bytes)
        written = self._dataset.write(encoded)
        seconds = time.perf_counter() - ready
        waiting.timings.add("shard_write", seconds, num_steps, written.num_bytes)
        return written

    def _rollout_worker(self) -> Worker:
        if self._worker is None:
            spec = self._order
            self._worker = make_worker(
                spec.config,
                iter(spec.episodes),
                self._localize_policies(spec.behavior_policy),
                producer=spec.producer,
                worker=spec.worker,
            )
        return self._worker

    def _localize_policies(self, policies: BehaviorPolicies) -> BehaviorPolicies:
        """Return who acts; on another machine than the driver's the packages are copied there."""
        if isinstance(policies, BehaviorPolicy):
            return self._localize_policy(policies)
        return {agent: self._localize_policy(one) for agent, one in policies.items()}

    def _localize_policy(self, policy: BehaviorPolicy) -> BehaviorPolicy:
        if not isinstance(policy.source, Path) or policy.source.exists():
            return policy
        registry = open_lake(self._order.lake).registry
        return replace(policy, source=registry.resolve(f"{policy.name}:{policy.version}").path)
