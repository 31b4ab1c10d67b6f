"""Callbacks: what whoever asked for a run is told as it goes on, and is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from replaylake.offline.running.training.data import OnReading
from replaylake.offline.running.training.lake_observer import OnMetrics
from replaylake.offline.running.training.trainer import TrainProgress


@dataclass(frozen=True)
class RunStart:
    """What is known when a run begins to learn, or goes on.

    update: of the checkpoint that it goes on from, 0 at the beginning. resumed: whether it had
    begun before. remarks: what a person should know of the data, a sentence each.
    """

    run_id: str
    update: int
    resumed: bool
    remarks: tuple[str, ...]


OnStart = Callable[[RunStart], None]
OnProgress = Callable[[TrainProgress], None]


@dataclass(frozen=True)
class Callbacks:
    """See `train`."""

    on_reading: OnReading | None = None
    on_start: OnStart | None = None
    on_progress: OnProgress | None = None
    on_metrics: OnMetrics | None = None
    should_end: Callable[[], bool] | None = None

    @property
    def is_stop_requested(self) -> bool:
        """Whether the run is to end."""
        return self.should_end is not None and self.should_end()
