"""LakeRun: what a run keeps in the lake while it goes on: checkpoints and metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import TrainingError
from replaylake.datastore.lake.runs.checkpoints import Checkpoint, Checkpoints
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.lake.runs.metrics import MetricsLog
from replaylake.datastore.lake.runs.summary import EVALUATION
from replaylake.datastore.storage.storage import Storage
from replaylake.offline.callbacks import OnMetrics


class StatefulLearner(Protocol):
    """A learner whose state can be saved in checkpoints."""

    def state_dict(self) -> dict[str, Array]:
        """Return the complete state of training as named arrays."""
        ...


class LakeObserver:
    """A trainer's Observer that writes to the lake, for as long as the lease is its own."""

    def __init__(
        self,
        storage: Storage,
        lease: RunLease,
        run_id: str,
        learner: StatefulLearner,
        *,
        keep: int,
        on_metrics: OnMetrics | None = None,
    ) -> None:
        """keep: how many of the newest checkpoints stay, beside the best one."""
        self.checkpoints = Checkpoints(storage, run_id)
        self._run_id = run_id
        self._metrics = MetricsLog(storage, run_id)
        self._lease = lease
        self._learner = learner
        self._keep = keep
        self._on_metrics = on_metrics
        self._last_saved: int | None = None

    @property
    def last_saved(self) -> int | None:
        """The update of the newest checkpoint, if there is one."""
        return self._last_saved

    def load_latest(self) -> Checkpoint | None:
        """Return where the run goes on, and forget metrics of what was done after it."""
        updates = self.checkpoints.updates()
        if not updates:
            self._metrics.truncate_after(0, without=[EVALUATION])
            return None
        checkpoint = self.checkpoints.load()
        if updates[-1] > checkpoint.update:
            # Damaged: as long as they were there they would count as the newest.
            self.checkpoints.retain([update for update in updates if update <= checkpoint.update])
        self._last_saved = checkpoint.update
        # Killed between the closing evaluation and the end, it comes again.
        self._metrics.truncate_after(checkpoint.update, without=[EVALUATION])
        return checkpoint

    def record_metrics(self, update: int, values: Mapping[str, float]) -> None:
        """Add to the run's metrics. Raises: StorageError; they are kept for the next time."""
        if self._on_metrics is not None:
            self._on_metrics(update, values)
        self._metrics.add(update, values, time.time())

    def flush(self) -> None:
        """Write what metrics are left now. Raises: StorageError."""
        self._metrics.flush()

    def save(self, update: int, state: Mapping[str, Any], *, best: int | None) -> None:
        """Save a checkpoint, then remove those that are not to be kept.

        Raises: TrainingError where a parameter is not a number: such a one is never the newest.
        """
        self._lease.check()
        arrays = self._learner.state_dict()
        for name, array in arrays.items():
            if array.dtype.kind == "f" and np.isnan(array).any():
                raise TrainingError(
                    f"training: {name} is not a number after update {update}, expected numbers "
                    f"(the last good checkpoint is that of update {self._last_saved}). Nothing was "
                    "registered. Lower the learning rate, or look for outliers."
                )
        # First: a run that goes on from the checkpoint does not measure again what was before.
        self._metrics.flush()
        self.checkpoints.save(update, arrays, state)
        self._last_saved = update
        newest = self.checkpoints.updates()[-self._keep :]
        self.checkpoints.retain({*newest, *([] if best is None else [best])})

    def close(self) -> None:
        """Write what metrics are left."""
        self._metrics.close()


class NullObserver:
    """An Observer that keeps nothing: the leader's does."""

    last_saved: Final = None

    def record_metrics(self, update: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def save(self, update: int, state: Mapping[str, Any], *, best: int | None) -> None:
        """Do nothing."""
