"""Following: what a learner of a team does that does not lead: the same updates, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.runs.checkpoints import Checkpoints
from replaylake.offline.learning.learner import torch_threads
from replaylake.offline.running.training.config import TrainRequest
from replaylake.offline.running.training.job import prepare
from replaylake.offline.running.training.team import Team, deciding
from replaylake.offline.running.training.trainer import Trainer

# What the leader tells in place of an update where the run had ended before.
NOTHING_LEFT: Final = -1


class Unobserved:
    """An Observer that keeps nothing: the leader's does."""

    last_saved: Final = None

    def measured(self, update: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def save(self, update: int, state: Mapping[str, Any], *, best: int | None) -> None:
        """Do nothing."""


def follow(lake: Lake, request: TrainRequest, run_id: str, team: Team) -> None:
    """Make the updates of a run that another learner leads, until it says that it is over.

    request: pinned. Raises: as prepare; TrainingFailed where another learner is gone.
    """
    job = prepare(lake, request, team=team)
    trainer = Trainer(
        job.learner,
        job.sampler,
        request.config,
        observer=Unobserved(),
        selection=job.selection(),
        measure=job.measure,
        should_end=deciding(job.learner, lambda: False),
    )
    with torch_threads(request.config.threads):
        update = int(team.told(0))
        if update == NOTHING_LEFT:
            return
        if update > 0:
            checkpoint = Checkpoints(lake.storage, run_id).load(update)
            job.learner.load_state_dict(checkpoint.arrays)
            trainer.load_state_dict(checkpoint.update, checkpoint.state)
        trainer.run()
