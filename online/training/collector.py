"""Collector: the workers' side of a run: permits, what comes back for them, and its arrival.

A permit lets a worker take so many steps with the newest policy; the rate limiter says how many. A
shipment is what it answers; its steps have arrived once they can be sampled. It all happens in
`look`, which the trainer calls between updates, and which waits only where there is nothing to
learn.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from replaylake.datastore.errors import TrainingError
from replaylake.online.collecting.behavior_policy import num_bytes_sent
from replaylake.online.collecting.returns import RecentReturns
from replaylake.online.collecting.rollout_batch import RolloutBatch
from replaylake.online.pools.pool import WorkerLost
from replaylake.online.recording.committed_steps import CommittedSteps
from replaylake.online.recording.storage_retry import RETRY_S
from replaylake.online.training.components import Components
from replaylake.online.training.config import OnlineConfig

# From one look at what the workers have sent to the next, while there are updates to make: a look
# at Ray takes 0.2 ms.
_POLL_S: Final = 0.005
_WAIT_S: Final = 0.02
# At the end, between two looks at whether the store refuses.
_SETTLE_S: Final = 1.0
_MAX_RETURNS: Final = 100
_MAX_LATENCIES: Final = 1000
# A broadcast takes a millisecond or two of the learner's time; what is replayed was collected by
# older policies anyway.
_INTERVAL_S: Final = 0.1
_MAX_STALENESSES: Final = 100


class Collector:
    """What workers were asked for, what came of it, and what of that can be learned from."""

    def __init__(
        self,
        parts: Components,
        config: OnlineConfig,
        *,
        on_remark: Callable[[str], None],
        should_end: Callable[[], bool],
    ) -> None:
        self._parts, self._config = parts, config
        self._remark, self._should_end = on_remark, should_end
        self._is_local = config.env_runner == "local"
        self._takes_turns = self._is_local or config.mode == "sync"
        self._broadcaster = Broadcaster(parts, config)
        self.num_steps = self.num_episodes = 0
        self.returns = RecentReturns(max(_MAX_RETURNS, config.until_episodes))
        self._has_warned = False
        # Steps that workers may still hand over, by worker; and those handed over and not arrived.
        self._permits: dict[int, int] = {}
        self._num_under_way = 0
        # By worker: episodes that it is in the middle of, and when it is asked again after the
        # store refused what it has.
        self._open: dict[int, Sequence[str]] = {}
        self._retry_at: dict[int, float] = {}
        self._latencies: deque[float] = deque(maxlen=_MAX_LATENCIES)
        self._polled_at = -math.inf
        # When something came, arrived or was learned last.
        self._active_at = time.monotonic()

    @property
    def can_update(self) -> bool:
        """Whether there is a batch to learn from, and the limiter lets it be sampled."""
        if self._takes_turns and self._has_remaining_steps:
            return False
        num = self._parts.batches.num_rows
        return self._parts.limiter.can_sample(num) and self._parts.batches.is_ready

    @property
    def is_done(self) -> bool:
        """Whether all steps were collected, and can be sampled."""
        return self.num_steps >= self._config.steps and not self._has_remaining_steps

    @property
    def mean_return(self) -> float | None:
        """Mean over the last hundred episodes as collected; in games, of their agents' sums."""
        returns = list(self.returns.sums)[-_MAX_RETURNS:]
        return float(np.mean(returns)) if returns else None

    @property
    def staleness(self) -> float:
        return self._broadcaster.staleness

    def poll(self, update: int, *, can_update: bool) -> None:
        """Hand out permits and take what came; wait for it only where there is nothing to learn.

        update: what the policy is of. can_update: whether the trainer makes an update next.
        Raises: TrainingError where neither workers nor the learner can go on for too long.
        """
        now = time.perf_counter()
        if can_update:
            self._active_at = time.monotonic()
        if can_update and (self._takes_turns or now - self._polled_at < _POLL_S):
            return
        is_wait = not (can_update or self._is_local)
        with self._parts.timings.measure("learner_wait" if is_wait else "receive"):
            self._record_arrived()
            self._issue_permits(update)
            came = self._receive(0.0 if can_update else _WAIT_S)
            self._record_arrived()
            self._issue_permits(update)
            if self._is_local and not (can_update or came):
                # A disk that is full: whoever works in this process waits for nothing else.
                time.sleep(_WAIT_S)
            self._check_moves()
        self._polled_at = time.perf_counter()

    def finish(self, on_wait: Callable[[], None]) -> None:
        """Take in what is under way, and give up what is open: nothing more comes of it.

        A run that goes on begins other episodes. on_wait: see settle.
        """
        # What workers that are at it have collected is not to be lost.
        until = time.monotonic() + 10 * self._config.flush_interval_s + 5
        while self._permits and time.monotonic() < until:
            self._handle_answer(self._parts.pool.receive(_WAIT_S))
        self._permits.clear()
        self._parts.feed.abandon([episode for ids in self._open.values() for episode in ids])
        self.settle(on_wait)
        self._record_arrived()

    def settle(self, on_wait: Callable[[], None]) -> None:
        """Wait until all is recorded; not where the run is asked to end and the store refuses.

        on_wait: called now and then meanwhile. Raises: TrainingError where nothing moves.
        """
        self._active_at = time.monotonic()
        while not self._parts.feed.drain(_SETTLE_S):
            self._record_arrived()
            on_wait()
            self._check_moves()
            if self._parts.feed.blocked_reason is not None and self._should_end():
                self._remark("what was collected last could not be recorded, and is dropped")
                return

    def metrics(self) -> dict[str, float]:
        """Return what was collected, and how far behind and how late it comes."""
        values = {
            **self.returns.metrics(),
            "env_steps": float(self.num_steps),
            "episodes": float(self.num_episodes),
            "policy_version": float(self._broadcaster.version),
        }
        if (mean_return := self.mean_return) is not None:
            values["return"] = mean_return
        if self._latencies:
            values["latency_ms"] = float(np.median(self._latencies)) * 1000
        return values

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "num_episodes": self.num_episodes,
            "version": self._broadcaster.version,
            "returns": self.returns.state_dict(),
            "limiter": self._parts.limiter.state_dict(),
        }

    def start_from(self, steps: CommittedSteps) -> None:
        """Begin with what the run has recorded; before the first look."""
        self.num_steps, self.num_episodes = steps.num_steps, steps.num_episodes
        self._broadcaster.begin_at(steps.policy_version + 1)
        self._parts.limiter.insert(steps.num_steps)

    def load_state_dict(self, state: Mapping[str, Any], steps: CommittedSteps) -> None:
        """Go on from it, and with all that the run has recorded by now."""
        # What acted after the state was saved was of versions that name nothing else.
        self._broadcaster.begin_at(max(state["version"], steps.policy_version) + 1)
        records = self._config.record
        self.num_steps = steps.num_steps if records else state["num_steps"]
        self.num_episodes = steps.num_episodes if records else state["num_episodes"]
        self.returns.load_state_dict(state["returns"])
        num_inserts = max(self.num_steps, state["limiter"]["num_inserts"])
        self._parts.limiter.load_state_dict({**state["limiter"], "num_inserts": num_inserts})

    @property
    def _has_remaining_steps(self) -> bool:
        """Whether there are steps to come that were asked for."""
        return bool(self._permits or self._num_under_way)

    def _check_moves(self) -> None:
        """Raise where all wait for each other, and not for a store that refuses.

        For workers that owe an answer the pool has its own limit.
        """
        now, timeout_s = time.monotonic(), self._config.answer_timeout_s
        if self._permits or self._retry_at or self._parts.feed.blocked_reason is not None:
            self._active_at = now
        if now - self._active_at > timeout_s:
            limiter = self._parts.limiter
            raise TrainingError(
                f"training: found nothing collected, committed or learned in {timeout_s:g} s, with "
                f"{self._num_under_way:,} steps in transit through the lake, "
                f"{limiter.num_inserts:,} there and {limiter.num_samples:,} samples taken; "
                "expected one of these to grow. Committed steps are in the lake: resume "
                "the run, and check the disk and the network; if it only takes longer, raise "
                "answer_timeout_s."
            )

    # Permits.

    def _issue_permits(self, update: int) -> None:
        """Let workers that are free collect as much as the limiter, and the run, allow."""
        if self._parts.feed.blocked_reason is not None or self._parts.feed.is_behind:
            return
        if self._takes_turns and (self._permits or self.can_update):
            return
        for worker in self._available_workers():
            num = self._next_permit()
            if num == 0:
                return
            self._broadcaster.broadcast_if_due(update, self.num_steps)
            self._parts.pool.request_steps(worker, num)
            self._permits[worker] = num
            self._broadcaster.record_request(worker)

    def _next_permit(self) -> int:
        """Return how many steps the next worker may collect."""
        promised = sum(self._permits.values())
        pending = promised + self._num_under_way
        maximum = min(self._config.round_steps, self._config.steps - self.num_steps - promised)
        num = self._parts.limiter.num_insertable(maximum, pending=pending)
        # A few at a time would cost a round trip each.
        minimum = min(maximum, self._config.envs_per_worker)
        if num > 0 and num >= minimum:
            return num
        if maximum <= 0 or pending or self.can_update:
            return 0
        # Neither may go on: sequences that were begun and lost count as if they would come.
        return maximum if self._parts.batches.samples_once else minimum

    def _available_workers(self) -> list[int]:
        """Return the workers that may be asked; where some were refused, those, to try again."""
        now = time.monotonic()
        free = [w for w in range(self._parts.pool.size) if w not in self._permits]
        if self._retry_at:
            return [w for w in free if now >= self._retry_at.get(w, math.inf)]
        return free

    # What comes.

    def _receive(self, timeout_s: float) -> bool:
        """Take all that has come; wait for the first; return whether there was one."""
        came = False
        while self._handle_answer(self._parts.pool.receive(timeout_s)):
            came, timeout_s = True, 0.0
        return came

    def _handle_answer(self, answer: RolloutBatch | WorkerLost | None) -> bool:
        if isinstance(answer, WorkerLost):
            self._record_lost(answer)
        elif answer is not None:
            self._record_batch(answer)
        return answer is not None

    def _record_batch(self, batch: RolloutBatch) -> None:
        worker, self._active_at = batch.worker, time.monotonic()
        self._permits.pop(worker, None)
        self._parts.storage_retry.set_blocked(f"worker {worker}", batch.blocked_reason)
        if batch.blocked_reason is not None:
            # What it has it keeps, and hands over the next time.
            self._retry_at[worker] = time.monotonic() + RETRY_S
            return
        self._retry_at.pop(worker, None)
        self._broadcaster.record_answer(worker)
        self._open[worker] = batch.open_episodes
        self.num_steps += batch.num_steps
        self._num_under_way += batch.num_steps
        self.num_episodes += len(batch.ends)
        self._record_returns(batch)
        timings = self._parts.timings
        if not self._is_local:
            timings.merge(batch.timings)
            self._parts.feed.add(batch)
            return
        # It collected in this thread, which also puts the steps into the view.
        timings.merge(batch.timings, place="trainer")
        with timings.measure("decode", batch.num_steps):
            self._parts.feed.add(batch)

    def _record_returns(self, batch: RolloutBatch) -> None:
        self.returns.add(batch.ends)
        if self.returns.is_zero_sum and not self._has_warned:
            self._has_warned = True
            self._remark(
                "what an agent gains another loses, so far in every game: the sum of their "
                "returns, 0, chooses no policy. Unless that changes, the last one is registered"
            )

    def _record_lost(self, lost: WorkerLost) -> None:
        for of_worker in (self._permits, self._open, self._retry_at):
            of_worker.pop(lost.worker, None)
        self._broadcaster.record_lost(lost.worker)
        self._parts.storage_retry.set_blocked(f"worker {lost.worker}", None)
        self._parts.feed.abandon(lost.open_episodes)
        self._remark(f"worker {lost.worker} was lost and replaced: {lost.reason}")

    def _record_arrived(self) -> None:
        for arrived in self._parts.feed.take_arrived():
            self._active_at = time.monotonic()
            self._num_under_way -= arrived.num_steps
            self._parts.limiter.insert(arrived.num_steps)
            if arrived.latency_s is not None:
                self._latencies.append(arrived.latency_s)
        self._parts.storage_retry.set_blocked("commit", self._parts.feed.blocked_reason)


class Broadcaster:
    """Counts versions, and keeps workers from falling further behind than allowed."""

    def __init__(self, parts: Components, config: OnlineConfig) -> None:
        self._parts, self._config = parts, config
        self._is_local = config.env_runner == "local"
        self._version = 0
        self._at, self._update = -math.inf, -1
        # By worker: the version that it collects with. Then how far behind those of the last
        # shipments were when they came.
        self._versions: dict[int, int] = {}
        self._staleness: deque[int] = deque(maxlen=_MAX_STALENESSES)

    @property
    def version(self) -> int:
        """Version of the newest policy that was handed out."""
        return self._version

    @property
    def staleness(self) -> float:
        """Versions that the workers' policies were behind when their last steps came, on average.

        Where steps are taken once, the supply says it of those that were learned from.
        """
        return float(np.mean(self._staleness)) if self._staleness else 0.0

    def begin_at(self, version: int) -> None:
        """Go on with a version that nobody has acted with."""
        self._version = self._parts.batches.version = version

    def broadcast_if_due(self, update: int, num_steps: int) -> None:
        """Hand the policy as it is now to whoever is asked next, if it is time to."""
        parts, now = self._parts, time.perf_counter()
        if self._update >= 0 and not self._is_due(update, num_steps, now):
            return
        if update > self._update >= 0:
            self._version += 1
        policy = parts.behavior.make_behavior_policy(self._version, num_steps)
        parts.pool.broadcast(policy)
        self._at, self._update = now, update
        parts.batches.version = self._version
        seconds = time.perf_counter() - now
        parts.timings.add("broadcast", seconds, 1, num_bytes_sent(policy))

    def record_request(self, worker: int) -> None:
        """Note that a worker collects with the newest version from now on."""
        self._versions[worker] = self._version

    def record_answer(self, worker: int) -> None:
        """Note that a worker's steps came."""
        self._staleness.append(self._version - self._versions.pop(worker, self._version))

    def record_lost(self, worker: int) -> None:
        """Note that nothing comes of what a worker was asked for."""
        self._versions.pop(worker, None)

    def _is_due(self, update: int, num_steps: int, now: float) -> bool:
        is_old = update - self._update >= self._config.broadcast_updates
        is_time = self._parts.batches.samples_once or now - self._at >= _INTERVAL_S
        # One more round, in which the policy takes over.
        random_until = self._parts.behavior.random_steps + self._config.round_steps
        explores_anew = num_steps < random_until
        if not (is_old and (is_time or self._is_local)) and not explores_anew:
            return False
        return not self._is_too_stale(update)

    def _is_too_stale(self, update: int) -> bool:
        """Whether a new version would leave a worker that is at it further behind than allowed."""
        maximum = self._config.max_staleness
        if maximum is None or self._parts.batches.samples_once or update == self._update:
            return False
        return any(self._version + 1 - version > maximum for version in self._versions.values())
