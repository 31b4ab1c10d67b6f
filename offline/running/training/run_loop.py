"""Run loop: resume, report and interrupt a run of any kind, around its loop of updates.

The process that leads a run calls `run_updates`; the others of its process group call
`follow_updates`. The process that started the group calls `record_lost_leader`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import CommitConflictError, NotFoundError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.runs.checkpoints import Checkpoints
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.offline.callbacks import Callbacks, RunStart
from replaylake.offline.learning.process_group import ALREADY_FINISHED, ProcessGroup
from replaylake.offline.running.training.interruption import Interruption, RunInterrupted
from replaylake.offline.running.training.lake_observer import LakeObserver
from replaylake.offline.running.training.run_record import RunRecord, find_run


class UpdateLoop(Protocol):
    """A loop of updates whose position can be restored."""

    @property
    def update(self) -> int:
        """Number of updates made."""
        ...

    def load_state_dict(self, update: int, state: Mapping[str, Any]) -> None:
        """Continue from a saved position."""
        ...

    def run(self) -> bool:
        """Make the remaining updates; return false if it ended before the last one."""
        ...


class RestorableLearner(Protocol):
    """A learner whose state is restored from checkpoints."""

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what state_dict returned."""
        ...


def run_updates(
    loop: UpdateLoop,
    learner: RestorableLearner,
    observer: LakeObserver,
    record: RunRecord,
    *,
    callbacks: Callbacks,
    interruption: Interruption,
    group: ProcessGroup,
    resumed: bool,
    remarks: Sequence[str],
) -> None:
    """Make the remaining updates of a run that this process records.

    Args:
        loop: the updates; asks `interruption` whether to end.
        learner: what the loop updates.
        observer: where checkpoints are.
        record: of the run.
        callbacks: on_start is called before the first update.
        interruption: handles signals during the updates.
        group: the processes that follow.
        resumed: whether to continue from the newest checkpoint.
        remarks: about the data, for on_start.

    Raises: RunInterrupted if the run was asked to end before the last update; as loop.run.
    """
    if resumed:
        if (checkpoint := observer.load_latest()) is not None:
            learner.load_state_dict(checkpoint.arrays)
            loop.load_state_dict(checkpoint.update, checkpoint.state)
        record.record_resume(loop.update)
    group.broadcast(loop.update)
    if callbacks.on_start is not None:
        callbacks.on_start(RunStart(record.run_id, loop.update, resumed, tuple(remarks)))
    try:
        with interruption.handle_signals():
            is_complete = loop.run()
    except KeyboardInterrupt as error:
        raise RunInterrupted(record.run_id, observer.last_saved) from error
    if not is_complete:
        raise RunInterrupted(record.run_id, loop.update)


def follow_updates(
    loop: UpdateLoop, learner: RestorableLearner, lake: Lake, run_id: str, group: ProcessGroup
) -> None:
    """Make the updates of a run that another process of the group records.

    Raises: TrainingError if another process is gone; as loop.run.
    """
    update = int(group.broadcast(0))
    if update == ALREADY_FINISHED:
        return
    if update > 0:
        checkpoint = Checkpoints(lake.storage, run_id).load(update)
        learner.load_state_dict(checkpoint.arrays)
        loop.load_state_dict(checkpoint.update, checkpoint.state)
    loop.run()


def record_lost_leader(lake: Lake, run_id: str, kind: str, error: BaseException) -> None:
    """Record what ended a run whose leader may have been killed before it could."""
    with suppress(NotFoundError, CommitConflictError), RunLease(lake.storage, run_id):
        body = find_run(lake.registry, run_id, kind=kind)
        if body["status"] == "running":
            RunRecord(lake.registry, run_id, body, kind=kind).record_error(error)
