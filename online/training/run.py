"""Run: what one process does of an online run, from its parts to the policy that is registered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Final

from replaylake.datastore.errors import (
    LogCorrupt,
    NotFound,
    ReplayLakeError,
    StorageFailed,
    TrainingFailed,
)
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.runs.checkpoints import Checkpoint
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.replay.live.live_view import LiveView
from replaylake.offline.learning.learner import torch_threads
from replaylake.offline.running.training.callbacks import RunStart
from replaylake.offline.running.training.interruption import (
    Interruption,
    RunInterrupted,
    interrupted_at_once,
)
from replaylake.offline.running.training.lake_run import LakeRun
from replaylake.offline.running.training.run_record import RunRecord
from replaylake.online.recording.feed import Feed
from replaylake.online.recording.housekeeping import Housekeeper
from replaylake.online.recording.recorded import producer_of, recorded
from replaylake.online.recording.refusals import Refusals
from replaylake.online.training.agents import AgentViews
from replaylake.online.training.assembly import followed, made_feed, made_parts, made_pool
from replaylake.online.training.callbacks import OnlineCallbacks
from replaylake.online.training.job import Job
from replaylake.online.training.patient_observer import PatientObserver
from replaylake.online.training.registration import registered
from replaylake.online.training.result import OnlineResult
from replaylake.online.training.trainer import OnlineTrainer

# From one look to the next while a view catches up.
_LOOK_S: Final = 0.25


@dataclass(frozen=True)
class Attempt:
    """A process's part of a run: the whole of it, or what is left since it was interrupted.

    record: as it is written down. lease: held by this process. goes_on: whether an attempt came
    before.
    """

    lake: Lake
    job: Job
    record: RunRecord
    lease: RunLease
    callbacks: OnlineCallbacks
    goes_on: bool = False

    def carried_out(self) -> OnlineResult:
        """Train and register. Raises: as train_online."""
        run = LakeRun(
            self.lake.storage,
            self.lease,
            self.record.run_id,
            self.job.learner,
            keep=self.job.config.keep_checkpoints,
            on_metrics=self.callbacks.on_metrics,
        )
        interruption = Interruption()

        def should_end() -> bool:
            asked = self.callbacks.should_end
            return interruption.is_requested or bool(asked and asked())

        refusals = Refusals(self.callbacks.remark, should_end)
        observer = PatientObserver(run, refusals, self.callbacks.remark)
        try:
            with interrupted_at_once(), ExitStack() as stack:
                stack.callback(_flush, run)
                trainer = self._trainer(stack, run, observer, refusals, should_end)
                self._train(trainer, run, interruption)
                return registered(
                    self.lake, self.job, self.record, self.lease, trainer, run, observer, refusals
                )
        except RunInterrupted:
            raise
        except KeyboardInterrupt as error:
            raise RunInterrupted(self.record.run_id, run.last_saved) from error

    def _trainer(
        self,
        stack: ExitStack,
        run: LakeRun,
        observer: PatientObserver,
        refusals: Refusals,
        should_end: Callable[[], bool],
    ) -> OnlineTrainer:
        """Put the run together, where it goes on as it was; `stack` is what ends it."""
        job, callbacks, config = self.job, self.callbacks, self.job.config
        attempt = len(self.record.body.get("resumed", ())) + 1 if self.goes_on else 0
        run_id = self.record.run_id
        producer = producer_of(run_id, attempt)
        checkpoint = run.newest() if self.goes_on else None
        stack.enter_context(torch_threads(config.threads))
        view = followed(job, producer)
        stack.callback(view.close)
        pool = made_pool(self.lake, job, producer, attempt, should_end)
        stack.enter_context(closing(pool))
        feed = stack.enter_context(made_feed(job, view, producer))
        if config.compact and config.record:
            stack.enter_context(Housekeeper(self.lake.url, job.dataset, on_remark=callbacks.remark))
        trainer = OnlineTrainer(
            made_parts(job, view, pool, feed, observer, refusals, name=f"run:{run_id}"),
            config,
            on_progress=callbacks.on_progress,
            on_remark=callbacks.remark,
            should_end=should_end,
        )
        remarks = list(pool.remarks)
        if self.goes_on:
            remarks += self._gone_on(trainer, view, feed, checkpoint, should_end)
        if callbacks.on_start is not None:
            callbacks.on_start(RunStart(run_id, trainer.update, self.goes_on, tuple(remarks)))
        return trainer

    def _gone_on(
        self,
        trainer: OnlineTrainer,
        view: LiveView | AgentViews,
        feed: Feed,
        checkpoint: Checkpoint | None,
        should_end: Callable[[], bool],
    ) -> Iterator[str]:
        """Let it go on from a checkpoint and what is recorded; yield what is to be told."""
        job = self.job
        found = recorded(job.dataset, self.record.run_id, since=job.since)
        if found.left_open:
            yield (
                f"{len(found.left_open):,} episodes were open when the run ended and stay without "
                "an end"
            )
        # Until then the limiter would count steps that cannot be sampled.
        _catch_up(view, found.version, job, should_end)
        if checkpoint is None:
            trainer.begin_with(found)
        else:
            job.learner.load_state_dict(checkpoint.arrays)
            trainer.load_state_dict(checkpoint.update, checkpoint.state, found)
        self.record.go_on(trainer.update)
        feed.abandon(found.left_open)

    def _train(self, trainer: OnlineTrainer, run: LakeRun, interruption: Interruption) -> None:
        """Run it to its end. Raises: RunInterrupted where it was asked to end before."""
        name, url = self.job.request.dataset, self.lake.url
        try:
            with interruption.awaited():
                is_complete = trainer.run()
        except ReplayLakeError as error:
            # Asked anew: this one knows the log that it has read.
            if (damage := _damage(self.lake.dataset(name))) is None:
                raise
            raise NotFound(
                f"dataset {name!r}: gone from {url} while the run collects into it ({damage}), "
                "expected it to stay. Put it back and go on with the run, or begin another."
            ) from error
        if not is_complete:
            raise RunInterrupted(self.record.run_id, run.last_saved)
        if trainer.update == 0:
            raise TrainingFailed(
                f"training: found no update after {trainer.collector.num_steps:,} steps, expected "
                "one at least: too few came together for a batch. Collect more --steps."
            )


def _catch_up(
    view: LiveView | AgentViews, version: int, job: Job, should_end: Callable[[], bool]
) -> None:
    """Wait until a version can be sampled, as long as more and more of it can.

    Raises: KeyboardInterrupt where it should end; StorageFailed where nothing comes any more.
    """
    timeout_s, moved_at = job.config.answer_timeout_s, time.monotonic()
    while not view.wait_for(version=version, timeout_s=_LOOK_S):
        if should_end():
            raise KeyboardInterrupt
        decoded = view.timings()
        if decoded.tail.items or decoded.decode.items:
            moved_at = time.monotonic()
        if time.monotonic() - moved_at > timeout_s:
            raise StorageFailed(
                f"dataset {job.request.dataset!r}: found version {view.version} and nothing more "
                f"in {timeout_s:g} s, expected version {version}, with what the run has recorded. "
                "Look at the disk or the network; where it only takes longer, raise "
                "answer_timeout_s."
            )


def _flush(run: LakeRun) -> None:
    # What ended the run says more; one that goes on measures again what came after a checkpoint.
    with suppress(StorageFailed):
        run.close()


def _damage(dataset: Dataset) -> str | None:
    """Return why a dataset cannot be read; None if it can be."""
    try:
        dataset.snapshot()
    except (NotFound, LogCorrupt) as error:
        return str(error).rstrip(".")
    return None
