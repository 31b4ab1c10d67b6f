"""Trainer: the loop from batches to updates, and what is due between two of them.

Every so many updates it averages the metrics, judges the policy, and saves a checkpoint; a run that
goes on from one makes the same updates as a run that was never interrupted, bit for bit on the CPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, SupportsFloat

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.errors import ConfigInvalidError, TrainingError
from replaylake.datastore.lake.policies.policy import Policy
from replaylake.datastore.lake.runs.timings import Timings
from replaylake.datastore.replay.batch_source import PrioritizedSource
from replaylake.offline.learning.learner import Learner, Update
from replaylake.offline.networks.graph import TorchPolicy
from replaylake.offline.running.training.config import TrainConfig
from replaylake.offline.running.training.policy_selection import PolicySelection

# Reading a metric waits for a GPU; on the CPU it costs nothing.
GPU_CHECK_UPDATES: Final = 50
_PROGRESS_INTERVAL_S: Final = 0.25
_MAX_KEYS_SHOWN: Final = 3


@dataclass(frozen=True)
class TrainProgress:
    """Where a run is: updates done of all, and updates a second so far.

    metrics: their means since the last point of the log; at the last update, those of its point.
    remaining_s: seconds that are left at the pace so far, with what measuring and saving take.
    """

    update: int
    updates: int
    metrics: Mapping[str, float]
    updates_per_s: float
    remaining_s: float


class Observer(Protocol):
    """What a trainer tells of, as it goes on: the run's place in the lake, a process that tunes.

    A method that raises ends the run there. None of them changes what is learned.
    """

    def record_metrics(self, update: int, values: Mapping[str, float]) -> None:
        """Take means of metrics since the last time, and measurements, by name."""
        ...

    def save(self, update: int, state: Mapping[str, Any], *, best: int | None) -> None:
        """Keep the state of the trainer, and the learner as it is; `best` is to be kept too."""
        ...

    @property
    def last_saved(self) -> int | None:
        """The update of the newest checkpoint, if there is one."""
        ...


class Trainer:
    """Steps a learner through batches."""

    def __init__(
        self,
        learner: Learner,
        sampler: PrioritizedSource,
        config: TrainConfig,
        *,
        observer: Observer,
        selection: PolicySelection | None = None,
        measure: Callable[[Policy], float] | None = None,
        on_progress: Callable[[TrainProgress], None] | None = None,
        should_end: Callable[[], bool] = lambda: False,
        timings: Timings | None = None,
    ) -> None:
        """Take what learns from what.

        measure: judges the policy, with `selection` to keep what it says. on_progress: is called
        about four times a second, and after the last update. should_end: asked after each update.
        timings: of what the run has done before it makes updates; None: none are recorded.
        """
        self._learner = learner
        self._sampler = sampler
        self._config = config
        self._observer = observer
        self.selection = selection or PolicySelection("last")
        self._measure = measure
        self._measure_interval = config.measure_interval_updates(self.selection.measure)
        self._on_progress = on_progress
        self._should_end = should_end
        self._timings, self._is_profiled = timings or Timings("trainer"), timings is not None
        self.update = 0
        self._check_updates = 1 if config.device == "cpu" else GPU_CHECK_UPDATES
        # Metrics since they were looked at, since the last point of the log, and since the last
        # measurement.
        self._unchecked, self._logged, self._measured = MetricSums(), MetricSums(), MetricSums()
        self._update_s = 0.0

    @property
    def updates_per_s(self) -> float:
        """Updates a second, without what was measured and saved in between."""
        return self.update / self._update_s if self._update_s else 0.0

    def run(self) -> bool:
        """Make the updates that are left; return false if it was asked to end before.

        The last thing it does is to save. Raises: TrainingError naming the update where a metric
        is not finite; ConfigInvalidError for priorities that the learner does not give; what the
        observer raises.
        """
        start, first = time.perf_counter(), self.update
        entered = reported = start
        last = self._config.updates
        timings = self._timings
        while self.update < last and not self.selection.is_exhausted:
            sample_start = time.perf_counter()
            batch = self._sampler.sample()
            timings.add("sample", time.perf_counter() - sample_start, 1, batch.num_bytes)
            with timings.measure("update"):
                result = self._learner.update(batch)
                self.update += 1
                if self._config.prioritized:
                    self._update_priorities(batch, result)
                self._add_metrics(result.metrics)
                is_ending = self._should_end()
                is_due = self._is_due(is_ending)
                if is_due or self._unchecked.num == self._check_updates:
                    self._check(batch)
            now = time.perf_counter()
            if self._on_progress is not None and (
                now - reported > _PROGRESS_INTERVAL_S or self.update == last
            ):
                reported = now
                spent = self._update_s + now - entered
                left_s = (now - start) / (self.update - first) * (last - self.update)
                rate = self.update / spent
                with timings.measure("log"):
                    means = self._logged.means()
                    progress = TrainProgress(self.update, last, means, rate, left_s)
                    self._on_progress(progress)
            if is_due:
                self._update_s += now - entered
                self._run_due_tasks(is_ending)
                entered = time.perf_counter()
            if is_ending:
                return self.update == last
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next update depends on but the learner's own state."""
        return {
            "sampler": self._sampler.state_dict(),
            "selection": self.selection.state_dict(),
            "logged": self._logged.state_dict(),
            "measured": self._measured.state_dict(),
            "update_s": self._update_s,
        }

    def load_state_dict(self, update: int, state: Mapping[str, Any]) -> None:
        """Continue from it; the learner's state is loaded by itself."""
        self._sampler.load_state_dict(state["sampler"])
        self.selection.load_state_dict(state["selection"])
        self._logged.load_state_dict(state["logged"])
        self._measured.load_state_dict(state["measured"])
        self._update_s = state["update_s"]
        self.update = update

    def _add_metrics(self, metrics: Mapping[str, SupportsFloat]) -> None:
        if self._check_updates == 1:
            metrics = _read(metrics)
        for sums in (self._unchecked, self._logged, self._measured):
            sums.add(metrics)

    def _is_due(self, is_ending: bool) -> bool:
        config, update = self._config, self.update
        return (
            is_ending
            or update == config.updates
            or update % config.log_updates == 0
            or update % self._measure_interval == 0
            or update % config.save_interval_updates == 0
        )

    def _run_due_tasks(self, is_ending: bool) -> None:
        """Log, measure and save, in this order: a checkpoint is of a moment with nothing due."""
        config, update = self._config, self.update
        is_last = update == config.updates
        is_best = False
        if is_last or update % self._measure_interval == 0:
            is_best = self._measure_policy()
        is_last = is_last or self.selection.is_exhausted
        if is_last or update % config.log_updates == 0:
            with self._timings.measure("log"):
                profile = self._timings.to_metrics() if self._is_profiled else {}
                self._observer.record_metrics(update, {**self._logged.means(), **profile})
            self._logged = MetricSums()
        if is_ending or is_last or is_best or update % config.save_interval_updates == 0:
            best = self.selection.best
            with self._timings.measure("checkpoint"):
                self._observer.save(
                    update, self.state_dict(), best=None if best is None else best.update
                )

    def _measure_policy(self) -> bool:
        """Measure the policy as it is; return whether it is the best so far."""
        value = None
        if self._measure is not None:
            with self._timings.measure("evaluate"):
                policy = TorchPolicy(self._learner.policy(), self._config.device)
                value = self._measure(policy)
            self._observer.record_metrics(
                self.update, {f"selection/{self.selection.measure}": value}
            )
        is_best = self.selection.add(self.update, value, self._measured.means())
        self._measured = MetricSums()
        return is_best

    def _update_priorities(self, batch: Batch, result: Update) -> None:
        if result.priorities is None:
            raise ConfigInvalidError(
                f"algorithm {self._config.algorithm}: found that it returns no priorities, "
                "expected one for each step of a batch. Leave prioritized out, or "
                "use an algorithm that returns them."
            )
        assert batch.indices is not None, "a run's own samplers number their rows"
        self._sampler.update_priorities(batch.indices, result.priorities)

    def _check(self, batch: Batch) -> None:
        """Raises: TrainingError where what was added since the last time is not finite."""
        unchecked, self._unchecked = self._unchecked, MetricSums()
        for name, value in unchecked.means().items():
            if not math.isfinite(value):
                raise self._not_finite_error(name, value, unchecked.num, batch)

    def _not_finite_error(self, name: str, value: float, num: int, batch: Batch) -> NotFiniteError:
        keys = tuple(bytes(key).hex() for key in batch.keys)
        at, saved = f"update {self.update}", self._observer.last_saved
        if num > 1:
            at = f"one of the updates {self.update - num + 1} to {self.update}"
        good = "no checkpoint was saved before"
        if saved is not None:
            good = f"the last good checkpoint is that of update {saved}"
        return NotFiniteError(
            f"training: {name} is {value} at {at}, expected a finite number (the last batch: "
            f"{len(batch)} rows, first keys {', '.join(keys[:_MAX_KEYS_SHOWN])}; {good}). "
            f"Nothing was "
            "registered. Lower the learning rate, or look for outliers and, with action masks, "
            "logged actions that are masked.",
            {"update": self.update, "metric": name, "row_keys": keys, "checkpoint": saved},
        )


class NotFiniteError(TrainingError):
    """A metric that is not finite; details: the update, the rows of its batch, the checkpoint."""

    def __init__(self, message: str, details: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.details = details


class MetricSums:
    """Totals of metrics, on the device where those are: not finite where any of them was not."""

    def __init__(self) -> None:
        self.num = 0
        self._totals: dict[str, Any] = {}
        self._counts: dict[str, int] = {}

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of one update."""
        self.num += 1
        for name, value in metrics.items():
            self._totals[name] = self._totals[name] + value if name in self._totals else value
            self._counts[name] = self._counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """Return each metric's mean over the updates that had it, as TD3's delayed actor has."""
        return {name: total / self._counts[name] for name, total in _read(self._totals).items()}

    def state_dict(self) -> dict[str, Any]:
        """Return them as JSON has them; from then on they are numbers of Python's."""
        self._totals = _read(self._totals)
        return {"num": self.num, "totals": dict(self._totals), "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num, self._totals = state["num"], dict(state["totals"])
        self._counts = dict(state["counts"])


def _read(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
