"""Patient observer: a run's metrics and checkpoints, written again where the store refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from replaylake.datastore.errors import TransientStorageError
from replaylake.offline.running.training.lake_observer import LakeObserver
from replaylake.online.recording.storage_retry import StorageRetry


class RetryingObserver:
    """A trainer's Observer: what a LakeObserver cannot write now is tried again."""

    def __init__(
        self, run: LakeObserver, storage_retry: StorageRetry, on_remark: Callable[[str], None]
    ) -> None:
        self._run, self._retry, self._on_remark = run, storage_retry, on_remark

    @property
    def last_saved(self) -> int | None:
        """The update of the newest checkpoint, if there is one."""
        return self._run.last_saved

    def record_metrics(self, update: int, values: Mapping[str, float]) -> None:
        try:
            self._run.record_metrics(update, values)
        except TransientStorageError:
            # They are kept: only the writing is to be done again, or left to the next time.
            with suppress(TransientStorageError):
                self._retry.retry("metrics", self._run.flush)

    def save(self, update: int, state: Mapping[str, Any], *, best: int | None) -> None:
        """Save a checkpoint; where a run that is to end cannot, it says what it goes on from.

        Raises: TrainingError, StorageError, CommitConflictError.
        """

        def save() -> None:
            self._run.save(update, state, best=best)

        try:
            self._retry.retry("checkpoint", save)
        except TransientStorageError:
            saved = self._run.last_saved
            text = "none was saved before" if saved is None else f"that of update {saved:,} stays"
            self._on_remark(f"the checkpoint of update {update:,} could not be saved: {text}")
