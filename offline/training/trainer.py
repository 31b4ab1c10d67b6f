"""Trainer: the loop from batches to updates, and the check that their metrics stay finite."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, SupportsFloat

from replaylake.datastore.batch import Batch
from replaylake.datastore.errors import TrainingFailed
from replaylake.offline.learner import Learner

# Reading a metric waits for a GPU; on the CPU it costs nothing.
GPU_CHECK_UPDATES: Final = 50
_PROGRESS_INTERVAL_S: Final = 0.25


@dataclass(frozen=True)
class Progress:
    """Where a run is: updates done of all, the last update's metrics, updates a second so far."""

    update: int
    updates: int
    metrics: Mapping[str, float]
    updates_per_s: float


class Sampler(Protocol):
    """What draws the batches."""

    def sample(self) -> Batch:
        """Draw one."""
        ...


def run_updates(
    learner: Learner,
    sampler: Sampler,
    updates: int,
    *,
    check_updates: int = 1,
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[dict[str, float], float]:
    """Take `updates` gradient steps; return the mean metrics of the last tenth, and updates/s.

    Metrics are read every `check_updates` updates, at the end, and for `on_progress`, which is
    called about four times a second and after the last update.
    Raises: TrainingFailed naming the update, or those since the last check, where one is not
    finite.
    """
    num_averaged = max(1, updates // 10)
    averaged, unchecked = _Sums(), _Sums()
    began = reported = time.perf_counter()
    for update in range(1, updates + 1):
        batch = sampler.sample()
        metrics = learner.update(batch).metrics
        if check_updates == 1:
            metrics = _read(metrics)
        unchecked.add(metrics)
        if unchecked.num == check_updates or update == updates:
            _check_finite(unchecked, update, batch)
            unchecked = _Sums()
        if update > updates - num_averaged:
            averaged.add(metrics)
        now = time.perf_counter()
        is_due = now - reported > _PROGRESS_INTERVAL_S or update == updates
        if on_progress is not None and is_due:
            reported = now
            on_progress(Progress(update, updates, _read(metrics), update / (now - began)))
    # Some algorithms report a metric only in some updates, as TD3 its delayed actor's.
    means = {name: total / averaged.counts[name] for name, total in _read(averaged.totals).items()}
    return means, updates / (time.perf_counter() - began)


class _Sums:
    """Totals of metrics, on the device where those are: not finite where any of them was not."""

    def __init__(self) -> None:
        self.num = 0
        self.totals: dict[str, Any] = {}
        self.counts: dict[str, int] = {}

    def add(self, metrics: Mapping[str, Any]) -> None:
        self.num += 1
        for name, value in metrics.items():
            self.totals[name] = self.totals[name] + value if name in self.totals else value
            self.counts[name] = self.counts.get(name, 0) + 1


def _read(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _check_finite(sums: _Sums, update: int, batch: Batch) -> None:
    for name, value in _read(sums.totals).items():
        if not math.isfinite(value):
            keys = ", ".join(bytes(key).hex() for key in batch.keys[:3])
            at = f"update {update}"
            if sums.num > 1:
                at = f"one of the updates {update - sums.num + 1} to {update}"
            raise TrainingFailed(
                f"training: {name} is {value} at {at}, expected a finite number (the last batch: "
                f"{len(batch)} rows, first keys {keys}). Nothing was registered. Lower the "
                "learning rate, or look for outliers and, with action masks, logged actions that "
                "are masked."
            )
