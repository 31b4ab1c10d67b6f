"""Ray pool: rollout workers as Ray actors, on this machine or on the nodes of a cluster.

Ray is imported when the workers are made, because it takes a second and most runs need none of it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import num_bytes
from replaylake.datastore.errors import ReplayLakeError, RolloutError, TransientStorageError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.runs.timings import Link, Timings
from replaylake.offline.running.local_ray import START_TIMEOUT_S
from replaylake.online.collecting.behavior_policy import BehaviorPolicies
from replaylake.online.collecting.rollout_batch import (
    EpisodeNumbers,
    RecordingWorker,
    RolloutBatch,
    WorkerSpec,
)
from replaylake.online.pools.cluster import Cluster
from replaylake.online.pools.nodes import current_node, pin_to_node
from replaylake.online.pools.pool import ANSWER_TIMEOUT_S, WorkerLost

# A worker that dies so often without a shipment in between will die again.
_MAX_DEATHS: Final = 3
# How often a pool that waits looks whether a new worker has found a node to run on.
_UNSCHEDULED_TIMEOUT_S: Final = 5.0
# How often it looks for processes that take too long to start, or to answer.
_LATE_S: Final = 1.0
# Where Ray's messages say it.
_DEATH_PATTERNS: Final = {
    "pid": re.compile(r"^\s*pid: (\d+)", re.MULTILINE),
    "ip": re.compile(r"^\s*ip: (\S+)", re.MULTILINE),
    "cause": re.compile(
        r"(?:because |is unavailable: )(.*?)(?: Some common causes|: RpcError|$)", re.MULTILINE
    ),
}


class RayPool:
    """A WorkerPool of one actor an order; see WorkerPool.

    A worker whose process or node died, or that does not answer, is replaced at once. Its numbered
    episodes that have not ended are begun again; of an endless order the replacement begins with
    episodes that nobody has begun. On a cluster, what workers collect on nodes that do not see the
    lake is written by an actor on this process's node; their shipments look no different.
    """

    def __init__(
        self,
        orders: Sequence[WorkerSpec],
        *,
        interval_s: float,
        with_open: bool = False,
        cpus_per_worker: float = 1.0,
        address: str | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        should_end: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start Ray where none runs, or connect to a cluster; ask its nodes; start the actors.

        Args:
            orders: what each worker is to collect, all into one dataset, which exists.
            interval_s: a worker hands over after so many seconds even if it has fewer steps.
            with_open: with the steps so far of open episodes, as pieces.
            cpus_per_worker: CPUs of Ray's that each takes up; a fraction, or a whole number.
            address: of a cluster, as open_ray takes it; None for a Ray of this process's own.
            start_timeout_s: how long a worker's process may take to start; one that found no CPUs
                by then ends the run, or, as a replacement, shares those of others.
            answer_timeout_s: how long a worker may be at what it was asked for; then it is lost.
            should_end: asked while the pool is made.

        Raises: ExtraMissingError, RolloutError, StorageError; ConfigInvalidError for CPUs that Ray
        does not give or that the cluster does not have, and for a working folder that is too large;
        KeyboardInterrupt where it should end.
        """
        self._interval_s, self._with_open = interval_s, with_open
        self._cpus = cpus_per_worker
        self._start_timeout_s, self._answer_timeout_s = start_timeout_s, answer_timeout_s
        self._timings = Timings("workers")
        self._workers = [WorkerState(spec, free_at=time.monotonic()) for spec in orders]
        self._pending: dict[Any, int] = {}
        self._behavior: Any = None
        self._writer: Any = None
        self._polled_at = self._checked_at = time.monotonic()
        self._stack = ExitStack()
        try:
            self._cluster = Cluster(
                self._stack,
                orders[0],
                len(orders),
                cpus_per_worker,
                address,
                start_timeout_s=start_timeout_s,
                should_end=should_end,
            )
            self._ray = self._cluster.ray
            for seat in self._workers:
                self._start_worker(seat)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return len(self._workers)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Which nodes do not see the lake, and who writes for their workers."""
        return self._cluster.remarks

    def request_steps(self, worker: int, num_steps: int) -> None:
        """Let a worker that owes no answer collect so many steps and hand them over."""
        seat = self._workers[worker]
        if seat.unwritten is None:
            seat.num_owed += num_steps
            seat.num_requested = num_steps
        self._send(worker)

    def broadcast(self, policy: BehaviorPolicies) -> None:
        """Let whatever is asked from now on be collected with this policy.

        It is put into Ray's object store once, and loaded once by each worker that is asked.
        """
        self._behavior = self._ray.put(self._cluster.embed_graphs(policy))

    def receive(self, timeout_s: float) -> RolloutBatch | WorkerLost | None:
        """Return the next answer, the one asked for first if there are several; None if none comes.

        Raises: what a worker raised; RolloutError where one dies again and again, or does not
        start.
        """
        until = time.monotonic() + timeout_s
        while self._pending:
            wait_s = max(0.0, until - time.monotonic())
            ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=wait_s)
            # Also while others answer: they may do so for hours beside one that hangs.
            if (lost := self._late()) is not None:
                return lost
            if not ready:
                self._restart_unscheduled()
                return None
            if (answer := self._take_answer(ready[0])) is not None:
                return answer
        time.sleep(max(0.0, until - time.monotonic()))
        return None

    def take_timings(self) -> Timings:
        """Return how long workers started, waited for requests, and messages took.

        The time of a request is its worker's own, and the rest of it the message's, both ways:
        that takes no comparison of the clocks of two machines.
        """
        asked = set(self._pending.values())
        for worker, seat in enumerate(self._workers):
            if worker not in asked and seat.has_answered:
                self._timings.add("worker_wait", seat.take_free_s(), 0)
        return self._timings.take()

    def close(self) -> None:
        """End the workers, and a Ray of our own; what was not handed over is dropped."""
        actors = [seat.actor for seat in self._workers] + [self._writer]
        for actor in filter(None, actors):
            self._ray.kill(actor)
        for seat in self._workers:
            seat.actor = seat.unwritten = None
        self._pending, self._writer, self._behavior = {}, None, None
        self._stack.close()

    # Where.

    def _start_worker(
        self, seat: WorkerState, *, is_first: bool = True, shares: bool = False
    ) -> None:
        """Start a process for a worker.

        A replacement takes no CPUs where too few are left, or where it shares them.
        """
        cluster, seat.num_cpus, seat.is_first = self._cluster, self._cpus, is_first
        if not is_first:
            if seat.spec.records:
                cluster.check_new_nodes()
            if shares or not cluster.has_free_cpus:
                seat.num_cpus = 0.0
        seeing = cluster.nodes_with_lake
        spec = replace(seat.spec, behavior_policy=cluster.embed_graphs(seat.spec.behavior_policy))
        actor = self._ray.remote(num_cpus=seat.num_cpus, max_restarts=0)(NodeWorker)
        seat.actor, seat.behavior_policy, seat.has_answered = (
            actor.remote(spec, seeing),
            None,
            False,
        )
        seat.ready = seat.actor.__ray_ready__.remote()
        seat.placed_at, seat.started_at = time.monotonic(), None

    def _restart_unscheduled(self) -> None:
        """Start again, without CPUs of its own, what no node has room for since one was lost."""
        now = time.monotonic()
        if now - self._polled_at < _UNSCHEDULED_TIMEOUT_S:
            return
        self._polled_at = now
        if self._cluster.has_free_cpus:
            return
        for reference, worker in list(self._pending.items()):
            seat = self._workers[worker]
            if not seat.has_answered and seat.num_cpus and seat.unwritten is None:
                del self._pending[reference]
                self._ray.kill(seat.actor)
                self._start_worker(seat, is_first=False)
                self._send(worker)

    # Whether it takes too long.

    def _late(self) -> WorkerLost | None:
        """Replace a worker that does not answer. Raises: RolloutError for one without a place."""
        now = time.monotonic()
        if now - self._checked_at < _LATE_S:
            return None
        self._checked_at = now
        for reference, worker in list(self._pending.items()):
            seat = self._workers[worker]
            if seat.unwritten is None and not self._has_started(seat):
                if now - seat.placed_at > self._start_timeout_s:
                    self._share(worker, reference)
                continue
            asked_at = max(seat.requested_at, seat.started_at or 0.0)
            if now - asked_at > self._answer_timeout_s:
                del self._pending[reference]
                if seat.unwritten is not None:
                    self._ray.kill(self._writer_actor())
                error = TimeoutError(
                    f"no answer in {self._answer_timeout_s:g} s (answer_timeout_s), in which it "
                    "creates an environment or takes a step"
                )
                if (lost := self._replace_lost(worker, error)) is not None:
                    return lost
        return None

    def _has_started(self, seat: WorkerState) -> bool:
        if seat.started_at is None:
            # One that died has something to say, too: what it was asked for says it.
            ready, _ = self._ray.wait([seat.ready], timeout=0)
            seat.started_at = time.monotonic() if ready else None
        return seat.started_at is not None

    def _share(self, worker: int, reference: Any) -> None:
        """Let a replacement share CPUs. Raises: RolloutError where it does, or none was there."""
        seat = self._workers[worker]
        if seat.is_first or not seat.num_cpus:
            free = self._ray.available_resources().get("CPU", 0.0)
            raise RolloutError(
                f"rollout worker {worker}: found no process in {self._start_timeout_s:g} s; it "
                f"needs {seat.num_cpus:g} CPUs, of which Ray has {free:g} free now. Wait until "
                "others are done, use fewer or smaller workers, or raise start_timeout_s."
            )
        del self._pending[reference]
        self._ray.kill(seat.actor)
        self._start_worker(seat, is_first=False, shares=True)
        self._send(worker)

    # What is asked, and answered.

    def _send(self, worker: int) -> None:
        seat = self._workers[worker]
        if seat.unwritten is not None:
            reference = self._writer_actor().write.remote(seat.unwritten)
        else:
            policy = None if seat.behavior_policy is self._behavior else self._behavior
            seat.behavior_policy = self._behavior
            if seat.has_answered:
                self._timings.add("worker_wait", seat.take_free_s())
            reference = seat.actor.collect_batch.remote(
                seat.num_requested, self._interval_s, policy, self._with_open
            )
        self._pending[reference], seat.requested_at = worker, time.monotonic()

    def _take_answer(self, reference: Any) -> RolloutBatch | WorkerLost | None:
        """Take what has come; None where it goes on to the writer."""
        worker = self._pending.pop(reference)
        seat, exceptions = self._workers[worker], self._ray.exceptions
        try:
            batch: RolloutBatch = self._ray.get(reference)
        except exceptions.RayTaskError as error:
            raise _unwrap_error(worker, error) from error
        except exceptions.RayError as error:
            return self._replace_lost(worker, error)
        if seat.unwritten is None:
            self._add_message(seat, batch)
        seat.deaths, seat.has_answered = 0, True
        if batch.pieces and seat.spec.records:
            seat.unwritten = reference
            self._send(worker)
            return None
        if batch.blocked_reason is None:
            seat.unwritten = None
            seat.apply_batch(batch)
        return batch

    def _add_message(self, seat: WorkerState, batch: RolloutBatch) -> None:
        """Add what of the time since the request was not the worker's own."""
        now = time.monotonic()
        link: Link = "transfer" if seat.has_answered else "start"
        since = seat.requested_at if seat.has_answered else seat.free_at
        size = sum(_num_bytes(piece) for piece in batch.pieces)
        items = 1 if seat.has_answered else 0
        self._timings.add(link, max(0.0, now - since - batch.busy_s), items, size)
        seat.free_at = now

    def _replace_lost(self, worker: int, error: Exception) -> WorkerLost | None:
        """Replace a worker that is gone, or the writer, which then writes what it was given."""
        seat, reason = self._workers[worker], death_reason(error)
        seat.deaths += 1
        if seat.deaths > _MAX_DEATHS:
            raise RolloutError(
                f"rollout worker {worker}: its process died {seat.deaths} times in a row, the last "
                f"time: {reason}; expected episodes. Check the memory and the environment's "
                "native code; without workers, a crash occurs in this process."
            ) from error
        is_lost_on_the_way = isinstance(error, self._ray.exceptions.ObjectLostError)
        if seat.unwritten is not None and not is_lost_on_the_way:
            self._writer = None
            self._send(worker)
            return None
        with suppress(Exception):
            # It may live on where it cannot be reached.
            self._ray.kill(seat.actor)
        lost = WorkerLost(worker, reason, seat.open_episodes)
        seat.spec = seat.remaining_spec()
        seat.num_ended, seat.num_owed, seat.open_episodes, seat.unwritten = 0, 0, (), None
        self._start_worker(seat, is_first=False)
        return lost

    def _writer_actor(self) -> Any:
        if self._writer is None:
            spec = self._workers[0].spec
            actor = self._ray.remote(num_cpus=0, scheduling_strategy=pin_to_node(current_node()))(
                RolloutBatchWriter
            )
            self._writer = actor.remote(spec.lake, spec.dataset)
        return self._writer


def _unwrap_error(worker: int, error: Any) -> ReplayLakeError:
    """Return the worker's own error, without the remote traceback that Ray puts into it."""
    if isinstance(error.cause, ReplayLakeError):
        return error.cause
    return RolloutError(
        f"rollout worker {worker}: found {type(error.cause).__name__}: {error.cause}, "
        "expected episodes. Run in this process, without workers, for the traceback."
    )


def _num_bytes(piece: Episode) -> int:
    """Return the bytes of a piece's observations, actions and rewards."""
    return num_bytes(piece.observations) + num_bytes(piece.actions) + piece.rewards.nbytes


class NodeWorker(RecordingWorker):
    """A shipping worker that writes only where its node was seen to see the lake."""

    def __init__(self, spec: WorkerSpec, seeing: frozenset[str] | None) -> None:
        """Keep the order. seeing: Ray's ids of those nodes; None if all are this machine."""
        sees = seeing is None or current_node() in seeing
        super().__init__(replace(spec, records=spec.records and sees))

    def collect_batch(self, *args: Any, **kwargs: Any) -> RolloutBatch:
        """Collect as RecordingWorker does, and time how long it took."""
        started = time.perf_counter()
        batch = super().collect_batch(*args, **kwargs)
        return replace(batch, busy_s=time.perf_counter() - started)


class RolloutBatchWriter:
    """Turns shipments of episodes into shipments of durable shards; keeps nothing in between."""

    def __init__(self, lake: str, dataset: str) -> None:
        """Keep the names; nothing can fail before `write`, whose errors reach the driver whole."""
        self._lake = lake
        self._name = dataset
        self._dataset: Dataset | None = None

    def write(self, batch: RolloutBatch) -> RolloutBatch:
        """Write what a worker handed over, and return its shipment as if it had written itself.

        Where the storage refuses, what is returned says so in `trouble` and holds nothing else.
        Raises: EpisodeInvalidError, SchemaMismatchError.
        """
        if self._dataset is None:
            self._dataset = open_lake(self._lake).dataset(self._name)
        try:
            written = self._dataset.write(batch.pieces)
        except TransientStorageError as error:
            return RolloutBatch(batch.worker, blocked_reason=str(error))
        return replace(batch, pieces=(), written=written)


@dataclass
class WorkerState:
    """One worker of a pool.

    spec: what that process was made with. ended: numbers of its episodes that ended; num_begun: at
    most so many were begun. owed: steps that were asked for and not handed over. unwritten: a
    shipment that the writer has still to write. deaths: in a row, without a shipment in between.
    ready: what is answered once the process runs. placed_at, started_at, requested_at: when it was
    asked for, was found to run, and was asked for what it owes, by the monotonic clock (s).
    free_at: since when it waits for a request.
    """

    spec: WorkerSpec
    actor: Any = None
    num_cpus: float = 0.0
    behavior_policy: Any = None
    ended: set[int] = field(default_factory=set)
    num_ended: int = 0
    num_owed: int = 0
    num_requested: int = 0
    open_episodes: tuple[str, ...] = ()
    unwritten: Any = None
    deaths: int = 0
    has_answered: bool = False
    is_first: bool = True
    ready: Any = None
    placed_at: float = 0.0
    started_at: float | None = None
    requested_at: float = 0.0
    free_at: float = 0.0

    def take_free_s(self) -> float:
        """Return the seconds since it waits for a request, or since the last call."""
        before, self.free_at = self.free_at, time.monotonic()
        return self.free_at - before

    def apply_batch(self, batch: RolloutBatch) -> None:
        """Take what a shipment tells of the episodes."""
        numbers = {end.number for end in batch.ends}
        if not isinstance(self.spec.episodes, EpisodeNumbers):
            self.ended |= numbers
        self.num_ended += len(numbers)
        self.num_owed = 0
        self.open_episodes = tuple(batch.open_episodes)

    def remaining_spec(self) -> WorkerSpec:
        """Return what a replacement is to collect: what has not ended, or fresh episodes."""
        episodes = self.spec.episodes
        if not isinstance(episodes, EpisodeNumbers):
            remaining = [number for number in episodes if number not in self.ended]
            return replace(self.spec, episodes=remaining)
        # An episode has a step at least, and every environment may have begun another.
        num_begun = self.num_ended + self.num_owed + 2 * self.spec.config.envs_per_worker
        fresh = EpisodeNumbers(episodes.first + episodes.step * num_begun, episodes.step)
        return replace(self.spec, episodes=fresh)


def death_reason(error: Exception) -> str:
    """Return in one line what Ray says of a death in a dozen."""
    text = str(error)
    reasons = {
        name: match.group(1) for name, one in _DEATH_PATTERNS.items() if (match := one.search(text))
    }
    cause = reasons.get("cause") or next(iter(text.splitlines()), "") or type(error).__name__
    where = " ".join(f"{name} {reasons[name]}" for name in ("pid", "ip") if name in reasons)
    return f"{where}: {cause}" if where else cause
