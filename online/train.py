"""Train online: workers collect into the lake, a learner learns from it, a policy is registered.

`train_online` begins a run and `resume_online` goes on with one that was killed or interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.names import new_ulid
from replaylake.offline.running.training.callbacks import RunStart
from replaylake.offline.running.training.lake_run import OnMetrics
from replaylake.offline.running.training.run_record import RunRecord, find_run
from replaylake.online.training.callbacks import OnlineCallbacks
from replaylake.online.training.config import OnlineRequest
from replaylake.online.training.job import first_record, prepared
from replaylake.online.training.progress import OnlineProgress
from replaylake.online.training.remote_learner import Work, run_remotely
from replaylake.online.training.result import OnlineResult, result_of_done
from replaylake.online.training.run import Attempt

KIND: Final = "train online"


def train_online(
    lake: Lake,
    request: OnlineRequest,
    *,
    on_start: Callable[[RunStart], None] | None = None,
    on_progress: Callable[[OnlineProgress], None] | None = None,
    on_metrics: OnMetrics | None = None,
    on_remark: Callable[[str], None] | None = None,
    should_end: Callable[[], bool] | None = None,
) -> OnlineResult:
    """Collect with a policy while it learns, and register the best one.

    Args:
        lake: where the dataset is, which is made where it does not exist, and the policy goes.
        request: environment, dataset, policy and config.
        on_start: called once, before the first step.
        on_progress: called about four times a second, and at the end.
        on_metrics: called with (update, values) for each point of the run's metrics.
        on_remark: called with what a person should know: a worker lost, a full disk.
        should_end: asked between updates; true saves a checkpoint and raises RunInterrupted.

    Every step is recorded with the policy version and log-probability of its action. Ctrl-C and
    SIGTERM save a checkpoint first.

    Raises: NotFound, NameRefused, SchemaMismatch, SpaceUnsupported, ConfigInvalid, ExtraMissing
    before anything is collected; RolloutFailed where an environment raises or workers die again and
    again; TrainingFailed; StorageFailed; RunInterrupted. No policy is registered then; what was
    committed stays.
    """
    callbacks = OnlineCallbacks(on_start, on_progress, on_metrics, on_remark, should_end)
    if request.config.learns_in_ray:
        return _remotely(lake, Work(request), callbacks)
    return _begun(lake, request, callbacks)


def _begun(lake: Lake, request: OnlineRequest, callbacks: OnlineCallbacks) -> OnlineResult:
    job = prepared(lake, request)
    run_id = new_ulid()
    with RunLease(lake.storage, run_id) as lease:
        record = RunRecord(lake.registry, run_id, first_record(job), kind=KIND)
        record.begin()
        with record.watched():
            return Attempt(lake, job, record, lease, callbacks).carried_out()


def resume_online(
    lake: Lake,
    run_id: str,
    *,
    on_start: Callable[[RunStart], None] | None = None,
    on_progress: Callable[[OnlineProgress], None] | None = None,
    on_metrics: OnMetrics | None = None,
    on_remark: Callable[[str], None] | None = None,
    should_end: Callable[[], bool] | None = None,
) -> OnlineResult:
    """Go on with a run from its newest checkpoint and with all that it had committed.

    Steps that were committed after the checkpoint are learned from like any others. Episodes that
    were open when it was killed stay without an end (`complete` is false), and the first commit
    names them. Raises: NotFound if there is no such run; CommitConflict while another process is at
    work on it; else as train_online.
    """
    callbacks = OnlineCallbacks(on_start, on_progress, on_metrics, on_remark, should_end)
    record = find_run(lake.registry, run_id, kind=KIND)
    if record["status"] == "done":
        return replace(result_of_done(lake, record), was_done=True)
    request = OnlineRequest.from_json(record["request"])
    if request.config.learns_in_ray:
        return _remotely(lake, Work(request, run_id), callbacks)
    return _gone_on(lake, run_id, callbacks)


def _gone_on(lake: Lake, run_id: str, callbacks: OnlineCallbacks) -> OnlineResult:
    record = find_run(lake.registry, run_id, kind=KIND)
    job = prepared(lake, OnlineRequest.from_json(record["request"]), began=record)
    with RunLease(lake.storage, run_id) as lease:
        # Read again: whoever had the lease before may have ended it in between.
        record = find_run(lake.registry, run_id, kind=KIND)
        if record["status"] == "done":
            return replace(result_of_done(lake, record), was_done=True)
        running = RunRecord(lake.registry, run_id, record, kind=KIND)
        with running.watched():
            return Attempt(lake, job, running, lease, callbacks, goes_on=True).carried_out()


def _remotely(lake: Lake, work: Work, callbacks: OnlineCallbacks) -> OnlineResult:
    """Let an actor of Ray's do the run."""
    run_id = run_remotely(lake, work, callbacks, _train_here)
    return result_of_done(lake, find_run(lake.registry, run_id, kind=KIND))


def _train_here(lake: Lake, work: Work, **callbacks: Any) -> str:
    """Do a run in this process, which is an actor's; returns its id."""
    told = OnlineCallbacks(**callbacks)
    if work.run_id is not None:
        return _gone_on(lake, work.run_id, told).run_id
    return _begun(lake, work.request, told).run_id
