"""OnlineTrainer: the loop between workers that collect and a learner that learns from it.

One thread: it looks after the workers (collector.py), and makes the updates that the rate limiter
allows in between. Asynchronous, workers collect while it learns; synchronous, they take turns.
Every so many steps it judges the policy, logs, and saves a checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.errors import TrainingError
from replaylake.offline.running.training.policy_selection import PolicySelection
from replaylake.offline.running.training.trainer import MetricSums
from replaylake.online.recording.committed_steps import CommittedSteps
from replaylake.online.training.collector import Collector
from replaylake.online.training.components import Components
from replaylake.online.training.config import OnlineConfig
from replaylake.online.training.progress import OnlineProgress

_PROGRESS_INTERVAL_S: Final = 0.25


class OnlineTrainer:
    """Runs until the steps are collected and learned from, or the policy is good enough."""

    def __init__(
        self,
        parts: Components,
        config: OnlineConfig,
        *,
        on_progress: Callable[[OnlineProgress], None] | None = None,
        on_remark: Callable[[str], None] = lambda remark: None,
        should_end: Callable[[], bool] = lambda: False,
    ) -> None:
        self._parts, self._config = parts, config
        self._on_progress, self._should_end = on_progress, should_end
        self.collector = Collector(parts, config, on_remark=on_remark, should_end=should_end)
        self.update = 0
        self.has_converged = False
        self._logged, self._measured = MetricSums(), MetricSums()
        # In steps: how often each comes, and when next.
        self._every = {
            "log": config.log_steps,
            "judge": config.evaluate_interval_steps,
            "save": config.save_interval_steps,
        }
        self._due = dict(self._every)
        self._sent_at = -math.inf
        self._evaluated_at = 0
        self._wall_s, self._began = 0.0, 0.0
        self._logged_wall_s, self._logged_steps, self._logged_update = 0.0, 0, 0

    def run(self) -> bool:
        """Collect and learn what is left; return false if it was asked to end before.

        The last thing it does is to save. Raises: TrainingError where a metric is not finite; what
        workers, feed and observer raise.
        """
        self._began = time.perf_counter()
        is_ending = False
        while not (is_ending or self._is_over()):
            can_update = self.collector.can_update
            self.collector.poll(self.update, can_update=can_update)
            if can_update:
                self._make_update()
            self._run_due_tasks()
            self._report_progress()
            is_ending = self._should_end()
        self._end(is_asked=is_ending)
        return not is_ending

    @property
    def selection(self) -> PolicySelection:
        """All measurements, and the best."""
        return self._parts.selection

    @property
    def wall_s(self) -> float:
        """Seconds that the run has taken, over all processes that did it."""
        return self._wall_s + (time.perf_counter() - self._began if self._began else 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return where the run is, as checkpoints keep it, but for the learner's own state."""
        return {
            **self.collector.state_dict(),
            "supply": self._parts.batches.state_dict(),
            "selection": self._parts.selection.state_dict(),
            "measured": self._measured.state_dict(),
            "due": dict(self._due),
            "wall_s": self.wall_s,
        }

    def start_from(self, steps: CommittedSteps) -> None:
        """Begin to learn, from what the run has recorded; before it is run."""
        self.collector.start_from(steps)
        self._logged_steps = steps.num_steps

    def load_state_dict(self, update: int, state: Mapping[str, Any], steps: CommittedSteps) -> None:
        """Go on from it, and with all that the run has recorded by now.

        Steps that came after the state was saved count as any others: the learner catches up.
        """
        self.update = update
        self.collector.load_state_dict(state, steps)
        self._parts.batches.load_state_dict(state["supply"])
        self._parts.selection.load_state_dict(state["selection"])
        self._measured.load_state_dict(state["measured"])
        self._due = dict(state["due"])
        self._wall_s = state["wall_s"]
        self._logged_steps, self._logged_update = self.collector.num_steps, update

    def _is_over(self) -> bool:
        is_worse = self._parts.selection.is_exhausted and not self.collector.returns.is_zero_sum
        if self.has_converged or is_worse:
            return True
        return self.collector.is_done and not self.collector.can_update

    # Learning.

    def _make_update(self) -> None:
        parts = self._parts
        # The draws themselves are counted where they are made.
        with parts.timings.measure("sample", items=0):
            batch = parts.batches.sample()
            parts.limiter.sample(parts.batches.num_taken)
        if batch is None:
            return
        with parts.timings.measure("update"):
            result = parts.learner.update(batch)
            self.update += 1
            if self._config.prioritized:
                parts.batches.update_priorities(batch, result)
            metrics = {name: float(value) for name, value in result.metrics.items()}
            for sums in (self._logged, self._measured):
                sums.add(metrics)
            self._check(metrics, batch)

    def _check(self, metrics: Mapping[str, float], batch: Batch) -> None:
        for name, value in metrics.items():
            if not math.isfinite(value):
                keys = ", ".join(bytes(key).hex() for key in batch.keys.reshape(-1, 2)[:3])
                saved = self._parts.observer.last_saved
                good = "none was saved" if saved is None else f"that of update {saved} is good"
                raise TrainingError(
                    f"training: {name} is {value} at update {self.update}, expected a finite "
                    f"number (a batch of {len(batch)} rows, first keys {keys}; of its checkpoints "
                    f"{good}). Nothing was registered; the collected steps are in the lake. Lower "
                    "the learning rate."
                )

    # What is due.

    def _run_due_tasks(self) -> None:
        num_steps = self.collector.num_steps
        due = {name for name, at in self._due.items() if num_steps >= at}
        if self._has_reached_return():
            due.add("judge")
        if not due:
            return
        for name in due:
            while self._due[name] <= num_steps:
                self._due[name] += self._every[name]
        if self.update == 0:
            return
        is_best = self._measure_policy() if "judge" in due else False
        if "log" in due or self.has_converged:
            self._log()
        if is_best or "save" in due:
            self._save()

    def _has_reached_return(self) -> bool:
        """Whether episodes as they were collected return as much as is asked for."""
        until, num = self._config.until_return, self._config.until_episodes
        sums, num_steps = self.collector.returns.sums, self.collector.num_steps
        if until is None or len(sums) < num or self.has_converged:
            return False
        # Not again at once where the evaluation said no.
        if num_steps < self._evaluated_at + self._config.log_steps:
            return False
        if float(np.mean(list(sums)[-num:])) < until:
            return False
        self._evaluated_at = num_steps
        return True

    def _measure_policy(self) -> bool:
        """Measure the policy as it is; return whether it is the best so far."""
        parts, value = self._parts, None
        if parts.measure is not None:
            with parts.timings.measure("evaluate"):
                value = parts.measure(parts.behavior.policies)
            parts.observer.record_metrics(self.update, {"selection/environment": value})
            if value == 0 and self.collector.returns.may_be_zero_sum:
                # It would keep the first policy, which is as good as any by this number.
                value = None
        is_best = parts.selection.add(self.update, value, self._measured.means())
        self._measured = MetricSums()
        until = self._config.until_return
        if until is not None and value is not None and value >= until:
            self.has_converged = True
        return is_best

    def _log(self) -> None:
        with self._parts.timings.measure("log"):
            self._record_metrics()

    def _record_metrics(self) -> None:
        parts, wall_s, num_steps = self._parts, self.wall_s, self.collector.num_steps
        parts.timings.merge(parts.feed.take_timings())
        parts.timings.merge(parts.pool.take_timings())
        passed = max(wall_s - self._logged_wall_s, 1e-9)
        values = {
            "staleness": self.collector.staleness,
            **self._logged.means(),
            **parts.batches.take_metrics(),
            **self.collector.metrics(),
            **parts.timings.to_metrics(),
            "samples_per_insert": parts.limiter.num_samples / max(1, parts.limiter.num_inserts),
        }
        if num_steps > self._logged_steps:
            # Not of the last point, which comes right after another.
            values["steps_per_s"] = (num_steps - self._logged_steps) / passed
            values["updates_per_s"] = (self.update - self._logged_update) / passed
        parts.observer.record_metrics(self.update, values)
        self._logged = MetricSums()
        self._logged_wall_s, self._logged_steps = wall_s, num_steps
        self._logged_update = self.update

    def _save(self) -> None:
        # A run that goes on learns from what is recorded: all that was learned from has to be.
        with self._parts.timings.measure("checkpoint"):
            self.collector.settle(self._report_progress)
            best = self._parts.selection.best
            self._parts.observer.save(
                self.update, self.state_dict(), best=None if best is None else best.update
            )

    def _end(self, *, is_asked: bool) -> None:
        """Take in what is under way, judge, log and save; is_asked: to end before it is over."""
        with self._parts.timings.measure("learner_wait"):
            self.collector.finish(self._report_progress)
        if self.update == 0:
            return
        last = self._parts.selection.last
        if not is_asked and (last is None or last.update != self.update):
            self._measure_policy()
        self._log()
        self._save()
        self._report_progress(is_last=True)

    def _report_progress(self, *, is_last: bool = False) -> None:
        now = time.perf_counter()
        if self._on_progress is None or not (is_last or now - self._sent_at > _PROGRESS_INTERVAL_S):
            return
        self._sent_at = now
        with self._parts.timings.measure("log"):
            self._on_progress(self._progress())

    def _progress(self) -> OnlineProgress:
        wall_s, collector = max(self.wall_s, 1e-9), self.collector
        return OnlineProgress(
            num_steps=collector.num_steps,
            steps=self._config.steps,
            update=self.update,
            num_episodes=collector.num_episodes,
            mean_return=collector.mean_return,
            steps_per_s=collector.num_steps / wall_s,
            updates_per_s=self.update / wall_s,
            blocked_reason=self._parts.storage_retry.blocked_reason,
        )
