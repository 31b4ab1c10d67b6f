"""OnlineTrainer: the loop between workers that collect and a learner that learns from it.

One thread: it hands out permits to collect, takes what comes back, and makes the updates that the
rate limiter allows in between. Asynchronous, workers collect while it learns; synchronous, they
take turns.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from replaylake.datastore.batch import Batch
from replaylake.datastore.errors import TrainingFailed
from replaylake.offline.learner import Learner
from replaylake.offline.self_play import AgentPolicies
from replaylake.offline.training.selection import Selection
from replaylake.offline.training.trainer import Observer, Sums
from replaylake.online.behavior import Behavior
from replaylake.online.config import OnlineConfig
from replaylake.online.feed import Feed
from replaylake.online.limiter import RateLimiter
from replaylake.online.pool import WorkerLost, WorkerPool
from replaylake.online.recorded import Recorded
from replaylake.online.refusals import RETRY_S, Refusals
from replaylake.online.returns import LastReturns
from replaylake.online.shipment import Shipment
from replaylake.online.supply import AnySupply
from replaylake.online.timings import Timings

# From one look at what the workers have sent to the next, while there are updates to make: a look
# at Ray takes 0.2 ms.
_LOOK_S: Final = 0.005
_WAIT_S: Final = 0.02
# A broadcast takes a millisecond or two of the learner's time; what is replayed was collected by
# older policies anyway.
_BROADCAST_S: Final = 0.1
# At the end, between two looks at whether the store refuses.
_SETTLE_S: Final = 1.0
_PROGRESS_INTERVAL_S: Final = 0.25
_RETURNS_KEPT: Final = 100
_LATENCIES_KEPT: Final = 1000


@dataclass(frozen=True)
class OnlineProgress:
    """Where a run is: steps collected of all, updates, mean return of the last episodes, or None.

    trouble: why it waits, if it does.
    """

    num_steps: int
    steps: int
    update: int
    num_episodes: int
    mean_return: float | None
    steps_per_s: float
    updates_per_s: float
    trouble: str | None


@dataclass(frozen=True)
class Parts:
    """What a trainer is made of; measure: judges a policy, higher is better; None: not at all."""

    learner: Learner
    supply: AnySupply
    pool: WorkerPool
    feed: Feed
    limiter: RateLimiter
    behavior: Behavior
    selection: Selection
    observer: Observer
    timings: Timings
    refusals: Refusals
    measure: Callable[[AgentPolicies], float] | None = None


class OnlineTrainer:
    """Runs until the steps are collected and learned from, or the policy is good enough."""

    def __init__(
        self,
        parts: Parts,
        config: OnlineConfig,
        *,
        on_progress: Callable[[OnlineProgress], None] | None = None,
        on_remark: Callable[[str], None] | None = None,
        should_end: Callable[[], bool] = lambda: False,
    ) -> None:
        self._parts, self._config = parts, config
        self._on_progress, self._on_remark, self._should_end = on_progress, on_remark, should_end
        self._is_local = config.env_runner == "local"
        self._takes_turns = self._is_local or config.mode == "sync"
        self.update = self.num_steps = self.num_episodes = 0
        self.version = 0
        self.has_converged = self._said_zero_sum = False
        # Steps that workers may still hand over, by worker; and those handed over and not arrived.
        self._promised: dict[int, int] = {}
        self._num_under_way = 0
        # By worker: the version that it collects with. Then how far behind those of the last
        # shipments were when they came.
        self._asked_with: dict[int, int] = {}
        self._staleness: deque[int] = deque(maxlen=_RETURNS_KEPT)
        # By worker: episodes that it is in the middle of, and when it is asked again after the
        # store refused what it has.
        self._open: dict[int, Sequence[str]] = {}
        self._refused_until: dict[int, float] = {}
        self._returns = LastReturns(max(_RETURNS_KEPT, config.until_episodes))
        self._latencies: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        self._logged, self._measured, self._unchecked = Sums(), Sums(), Sums()
        self._due = {"log": config.log_steps, "judge": config.evaluated_every}
        self._due["save"] = config.saved_every
        self._broadcast_at, self._broadcast_update = -math.inf, -1
        self._looked_at = self._told_at = -math.inf
        self._tried_at_steps = 0
        self._wall_s, self._began = 0.0, 0.0
        self._logged_wall_s, self._logged_steps, self._logged_update = 0.0, 0, 0

    def run(self) -> bool:
        """Collect and learn what is left; return false if it was asked to end before.

        The last thing it does is to save. Raises: TrainingFailed where a metric is not finite; what
        workers, feed and observer raise.
        """
        self._began = time.perf_counter()
        is_ending = False
        while not (is_ending or self._is_over()):
            can_update = self._can_update()
            self._look(can_update)
            if can_update:
                self._make_update()
            self._do_what_is_due()
            self._tell()
            is_ending = self._should_end()
        self._end(is_asked=is_ending)
        return not is_ending

    @property
    def selection(self) -> Selection:
        """All measurements, and the best."""
        return self._parts.selection

    @property
    def wall_s(self) -> float:
        """Seconds that the run has taken, over all processes that did it."""
        return self._wall_s + (time.perf_counter() - self._began if self._began else 0.0)

    @property
    def mean_return(self) -> float | None:
        """Of the last hundred episodes, as they were collected; of games their agents' sums."""
        returns = list(self._returns.sums)[-_RETURNS_KEPT:]
        return float(np.mean(returns)) if returns else None

    @property
    def staleness(self) -> float:
        """Versions that the workers' policies were behind when their last steps came, on average.

        Where steps are taken once, the supply says it of those that were learned from.
        """
        return float(np.mean(self._staleness)) if self._staleness else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return where the run is, JSON-able; the learner's state is saved by itself."""
        return {
            "num_steps": self.num_steps,
            "num_episodes": self.num_episodes,
            "version": self.version,
            "returns": self._returns.state_dict(),
            "limiter": self._parts.limiter.state_dict(),
            "supply": self._parts.supply.state_dict(),
            "selection": self._parts.selection.state_dict(),
            "measured": self._measured.state_dict(),
            "due": dict(self._due),
            "wall_s": self.wall_s,
        }

    def begin_with(self, found: Recorded) -> None:
        """Begin to learn, from what the run has recorded; before it is run."""
        self.num_steps, self.num_episodes = found.num_steps, found.num_episodes
        self.version = self._parts.supply.version = found.policy_version + 1
        self._parts.limiter.insert(found.num_steps)
        self._logged_steps = found.num_steps

    def load_state_dict(self, update: int, state: Mapping[str, Any], found: Recorded) -> None:
        """Go on from it, and with all that the run has recorded by now.

        Steps that came after the state was saved count as any others: the learner catches up.
        """
        # What acted after the state was saved was of versions that name nothing else.
        self.update, self.version = update, max(state["version"], found.policy_version) + 1
        self._parts.supply.version = self.version
        num_steps = found.num_steps if self._config.record else state["num_steps"]
        self.num_steps = num_steps
        self.num_episodes = found.num_episodes if self._config.record else state["num_episodes"]
        self._returns.load_state_dict(state["returns"])
        self._parts.limiter.load_state_dict(
            {**state["limiter"], "num_inserts": max(num_steps, state["limiter"]["num_inserts"])}
        )
        self._parts.supply.load_state_dict(state["supply"])
        self._parts.selection.load_state_dict(state["selection"])
        self._measured.load_state_dict(state["measured"])
        self._due = dict(state["due"])
        self._wall_s = state["wall_s"]
        self._logged_steps, self._logged_update = num_steps, update

    def _is_over(self) -> bool:
        is_worse = self._parts.selection.is_exhausted and not self._returns.is_zero_sum
        if self.has_converged or is_worse:
            return True
        if self.num_steps < self._config.steps or self._promised or self._num_under_way:
            return False
        return not self._can_update()

    def _can_update(self) -> bool:
        if self._takes_turns and (self._promised or self._num_under_way):
            return False
        num = self._parts.supply.num_rows
        return self._parts.limiter.can_sample(num) and self._parts.supply.is_ready

    # Collecting.

    def _look(self, can_update: bool) -> None:
        """Hand out permits and take what came; wait for it only where there is nothing to learn."""
        now = time.perf_counter()
        if can_update and (self._takes_turns or now - self._looked_at < _LOOK_S):
            return
        self._note_arrived()
        self._hand_out()
        timeout_s = 0.0 if can_update else _WAIT_S
        came = False
        while (answer := self._parts.pool.receive(timeout_s)) is not None:
            came = True
            if isinstance(answer, WorkerLost):
                self._note_lost(answer)
            else:
                self._note_shipment(answer)
            timeout_s = 0.0
        self._note_arrived()
        self._hand_out()
        if self._is_local and not (can_update or came):
            # A disk that is full: whoever works in this process waits for nothing else.
            time.sleep(_WAIT_S)
        self._looked_at = time.perf_counter()
        if not can_update and not self._is_local:
            self._parts.timings.add("learner_wait", self._looked_at - now)

    def _hand_out(self) -> None:
        """Let workers that are free collect as much as the limiter, and the run, allow."""
        if self._parts.feed.trouble is not None or self._parts.feed.is_behind:
            return
        if self._takes_turns and (self._promised or self._can_update()):
            return
        for worker in self._free():
            pending = sum(self._promised.values()) + self._num_under_way
            left = self._config.steps - self.num_steps - sum(self._promised.values())
            most = min(self._config.round_steps, left)
            num = self._parts.limiter.num_insertable(most, pending=pending)
            # A few at a time would cost a round trip each.
            least = min(most, self._config.envs_per_worker)
            if num <= 0 or num < least:
                if most <= 0 or pending or self._can_update():
                    break
                # Neither may go on: sequences that were begun and lost count as if they would come.
                num = most if self._parts.supply.takes_once else least
            self._broadcast()
            self._parts.pool.ask(worker, num)
            self._promised[worker] = num
            self._asked_with[worker] = self.version

    def _free(self) -> list[int]:
        """Return the workers that may be asked; where some were refused, those, to try again."""
        now = time.monotonic()
        free = [w for w in range(self._parts.pool.size) if w not in self._promised]
        if self._refused_until:
            return [w for w in free if now >= self._refused_until.get(w, math.inf)]
        return free

    def _note_shipment(self, shipment: Shipment) -> None:
        worker = shipment.worker
        self._promised.pop(worker, None)
        self._parts.refusals.note(f"worker {worker}", shipment.trouble)
        if shipment.trouble is not None:
            # What it has it keeps, and hands over the next time.
            self._refused_until[worker] = time.monotonic() + RETRY_S
            return
        self._refused_until.pop(worker, None)
        self._staleness.append(self.version - self._asked_with.pop(worker, self.version))
        self._open[worker] = shipment.open_episodes
        self.num_steps += shipment.num_steps
        self._num_under_way += shipment.num_steps
        self.num_episodes += len(shipment.ends)
        self._note_returns(shipment)
        self._parts.timings.merge(shipment.timings)
        self._parts.feed.add(shipment)

    def _note_returns(self, shipment: Shipment) -> None:
        self._returns.add(shipment.ends)
        if self._returns.is_zero_sum and not self._said_zero_sum:
            self._said_zero_sum = True
            self._remark(
                "what an agent gains another loses, so far in every game: the sum of their "
                "returns, 0, chooses no policy. Unless that changes, the last one is registered"
            )

    def _note_lost(self, lost: WorkerLost) -> None:
        for of_worker in (self._promised, self._asked_with, self._open, self._refused_until):
            of_worker.pop(lost.worker, None)
        self._parts.refusals.note(f"worker {lost.worker}", None)
        self._parts.feed.abandon(lost.open_episodes)
        self._remark(f"worker {lost.worker} was lost and replaced: {lost.reason}")

    def _note_arrived(self) -> None:
        for arrived in self._parts.feed.arrived():
            self._num_under_way -= arrived.num_steps
            self._parts.limiter.insert(arrived.num_steps)
            if arrived.latency_s is not None:
                self._latencies.append(arrived.latency_s)
        self._parts.refusals.note("commit", self._parts.feed.trouble)

    def _broadcast(self) -> None:
        """Hand the policy as it is now to whoever is asked next."""
        parts, now = self._parts, time.perf_counter()
        if self._broadcast_update >= 0:
            is_old = self.update - self._broadcast_update >= self._config.broadcast_updates
            is_due = parts.supply.takes_once or now - self._broadcast_at >= _BROADCAST_S
            explores_anew = self.num_steps < self._random_until
            if not (is_old and (is_due or self._is_local)) and not explores_anew:
                return
            if self._would_be_too_stale():
                return
        if self.update > self._broadcast_update >= 0:
            self.version += 1
        parts.pool.broadcast(parts.behavior.acting(self.version, self.num_steps))
        self._broadcast_at, self._broadcast_update = now, self.update
        parts.supply.version = self.version
        parts.timings.add("broadcast", time.perf_counter() - now)

    def _would_be_too_stale(self) -> bool:
        """Whether a new version would leave a worker that is at it further behind than allowed."""
        most = self._config.max_staleness
        if most is None or self._parts.supply.takes_once or self.update == self._broadcast_update:
            return False
        return any(self.version + 1 - version > most for version in self._asked_with.values())

    @property
    def _random_until(self) -> int:
        # One more round, in which the policy takes over.
        return self._parts.behavior.random_steps + self._config.round_steps

    # Learning.

    def _make_update(self) -> None:
        parts, started = self._parts, time.perf_counter()
        batch = parts.supply.sample()
        sampled = time.perf_counter()
        parts.timings.add("sample", sampled - started)
        parts.limiter.sample(parts.supply.num_taken)
        if batch is None:
            return
        result = parts.learner.update(batch)
        self.update += 1
        if self._config.prioritized:
            parts.supply.give_back(batch, result)
        metrics = {name: float(value) for name, value in result.metrics.items()}
        for sums in (self._unchecked, self._logged, self._measured):
            sums.add(metrics)
        self._check(metrics, batch)
        parts.timings.add("update", time.perf_counter() - sampled)

    def _check(self, metrics: Mapping[str, float], batch: Batch) -> None:
        for name, value in metrics.items():
            if not math.isfinite(value):
                keys = ", ".join(bytes(key).hex() for key in batch.keys.reshape(-1, 2)[:3])
                saved = self._parts.observer.last_saved
                good = "none was saved" if saved is None else f"that of update {saved} is good"
                raise TrainingFailed(
                    f"training: {name} is {value} at update {self.update}, expected a finite "
                    f"number (a batch of {len(batch)} rows, first keys {keys}; of its checkpoints "
                    f"{good}). Nothing was registered; what was collected is in the lake. Lower "
                    "the learning rate."
                )

    # What is due.

    def _do_what_is_due(self) -> None:
        due = {name for name, at in self._due.items() if self.num_steps >= at}
        config = self._config
        if self._seems_good_enough():
            due.add("judge")
        if not due:
            return
        every = {
            "log": config.log_steps,
            "judge": config.evaluated_every,
            "save": config.saved_every,
        }
        for name in due:
            while self._due[name] <= self.num_steps:
                self._due[name] += every[name]
        if self.update == 0:
            return
        is_best = self._judge() if "judge" in due else False
        if "log" in due or self.has_converged:
            self._log()
        if is_best or "save" in due:
            self._save()

    def _seems_good_enough(self) -> bool:
        """Whether episodes as they were collected return as much as is asked for."""
        until, num = self._config.until_return, self._config.until_episodes
        if until is None or len(self._returns.sums) < num or self.has_converged:
            return False
        # Not again at once where the evaluation said no.
        if self.num_steps < self._tried_at_steps + self._config.log_steps:
            return False
        recent = list(self._returns.sums)[-num:]
        if float(np.mean(recent)) < until:
            return False
        self._tried_at_steps = self.num_steps
        return True

    def _judge(self) -> bool:
        """Measure the policy as it is; return whether it is the best so far."""
        parts, value = self._parts, None
        if parts.measure is not None:
            value = parts.measure(parts.behavior.policies)
            parts.observer.measured(self.update, {"selection/environment": value})
            if value == 0 and self._returns.may_be_zero_sum:
                # It would keep the first policy, which is as good as any by this number.
                value = None
        is_best = parts.selection.add(self.update, value, self._measured.means())
        self._measured = Sums()
        until = self._config.until_return
        if until is not None and value is not None and value >= until:
            self.has_converged = True
        return is_best

    def _log(self) -> None:
        parts, wall_s = self._parts, self.wall_s
        parts.timings.merge(parts.feed.taken_timings())
        passed = max(wall_s - self._logged_wall_s, 1e-9)
        values = {
            "staleness": self.staleness,
            **self._logged.means(),
            **parts.supply.taken_metrics(),
            **self._returns.metrics(),
            **parts.timings.to_metrics(),
            "env_steps": float(self.num_steps),
            "episodes": float(self.num_episodes),
            "samples_per_insert": parts.limiter.num_samples / max(1, parts.limiter.num_inserts),
            "policy_version": float(self.version),
        }
        if self.num_steps > self._logged_steps:
            # Not of the last point, which comes right after another.
            values["steps_per_s"] = (self.num_steps - self._logged_steps) / passed
            values["updates_per_s"] = (self.update - self._logged_update) / passed
        if (mean_return := self.mean_return) is not None:
            values["return"] = mean_return
        if self._latencies:
            values["latency_ms"] = float(np.median(self._latencies)) * 1000
        parts.observer.measured(self.update, values)
        self._logged = Sums()
        self._logged_wall_s, self._logged_steps = wall_s, self.num_steps
        self._logged_update = self.update

    def _save(self) -> None:
        # A run that goes on finds by what was taken last what it takes next.
        self._settle()
        best = self._parts.selection.best
        self._parts.observer.save(
            self.update, self.state_dict(), best=None if best is None else best.update
        )

    def _end(self, *, is_asked: bool) -> None:
        """Take in what is under way, then judge, log and save; is_asked: to end before it is over.

        Nothing more comes of the open episodes: a run that goes on begins others.
        """
        self._drain()
        self._parts.feed.abandon([episode for ids in self._open.values() for episode in ids])
        self._settle()
        self._note_arrived()
        if self.update == 0:
            return
        last = self._parts.selection.last
        if not is_asked and (last is None or last.update != self.update):
            self._judge()
        self._log()
        self._save()
        self._tell(is_last=True)

    def _drain(self) -> None:
        """Wait for workers that are at it: what they have collected is not to be lost."""
        until = time.monotonic() + 10 * self._config.flush_interval_s + 5
        while self._promised and time.monotonic() < until:
            answer = self._parts.pool.receive(_WAIT_S)
            if isinstance(answer, WorkerLost):
                self._note_lost(answer)
            elif answer is not None:
                self._note_shipment(answer)

    def _settle(self) -> None:
        """Wait until all is recorded; not where the run is asked to end and the store refuses."""
        while not self._parts.feed.settle(_SETTLE_S):
            self._note_arrived()
            self._tell()
            if self._parts.feed.trouble is not None and self._should_end():
                self._remark("what was collected last could not be recorded, and is dropped")
                return

    def _tell(self, *, is_last: bool = False) -> None:
        now = time.perf_counter()
        if self._on_progress is None or not (is_last or now - self._told_at > _PROGRESS_INTERVAL_S):
            return
        self._told_at = now
        wall_s = max(self.wall_s, 1e-9)
        self._on_progress(
            OnlineProgress(
                num_steps=self.num_steps,
                steps=self._config.steps,
                update=self.update,
                num_episodes=self.num_episodes,
                mean_return=self.mean_return,
                steps_per_s=self.num_steps / wall_s,
                updates_per_s=self.update / wall_s,
                trouble=self._parts.refusals.trouble,
            )
        )

    def _remark(self, text: str) -> None:
        if self._on_remark is not None:
            self._on_remark(text)
