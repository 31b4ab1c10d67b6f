"""Callbacks: what whoever asked for an online run is told as it goes on, and is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from replaylake.offline.running.training.callbacks import RunStart
from replaylake.offline.running.training.lake_observer import OnMetrics
from replaylake.online.training.progress import OnlineProgress


@dataclass(frozen=True)
class OnlineCallbacks:
    """See `train_online`."""

    on_start: Callable[[RunStart], None] | None = None
    on_progress: Callable[[OnlineProgress], None] | None = None
    on_metrics: OnMetrics | None = None
    on_remark: Callable[[str], None] | None = None
    should_end: Callable[[], bool] | None = None

    def remark(self, text: str) -> None:
        """Tell a sentence that a person should read."""
        if self.on_remark is not None:
            self.on_remark(text)
