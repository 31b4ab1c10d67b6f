"""Train online: workers collect into the lake, a learner learns from it, a policy is registered.

`train_online` begins a run and `resume_online` goes on with one that was killed or interrupted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.dataset import Dataset
from replaylake.datastore.errors import (
    LogCorrupt,
    NotFound,
    ReplayLakeError,
    StorageFailed,
    TrainingFailed,
)
from replaylake.datastore.lake import Lake
from replaylake.datastore.names import new_ulid
from replaylake.datastore.replay.live.live_view import LiveView
from replaylake.datastore.runs.checkpoints import Checkpoint
from replaylake.datastore.runs.lease import RunLease
from replaylake.offline.evaluate import Evaluation, evaluate
from replaylake.offline.learner import torch_threads
from replaylake.offline.self_play import AgentPolicies
from replaylake.offline.training.callbacks import RunStart
from replaylake.offline.training.interruption import (
    Interruption,
    RunInterrupted,
    interrupted_at_once,
)
from replaylake.offline.training.lake_run import EVALUATION, LakeRun, OnMetrics
from replaylake.offline.training.packaging import packaged
from replaylake.offline.training.run_record import RunRecord, find_run
from replaylake.online.agent_packages import packaged_each, register
from replaylake.online.agents import (
    AgentLearners,
    AgentViews,
    own_steps,
    policy_names,
)
from replaylake.online.assembly import followed, made_feed, made_parts, made_pool
from replaylake.online.callbacks import OnlineCallbacks
from replaylake.online.config import OnlineRequest
from replaylake.online.housekeeping import Housekeeper
from replaylake.online.job import Job, first_record, manifest_of, prepared
from replaylake.online.recorded import Recorded, recorded
from replaylake.online.refusals import PatientObserver, Refusals
from replaylake.online.remote_learner import Work, run_remotely
from replaylake.online.result import OnlineResult, result_of, result_of_done
from replaylake.online.trainer import OnlineProgress, OnlineTrainer

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
            return _run(lake, job, record, lease, callbacks)


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
            return _run(lake, job, running, lease, callbacks, goes_on=True)


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


def _run(
    lake: Lake,
    job: Job,
    record: RunRecord,
    lease: RunLease,
    callbacks: OnlineCallbacks,
    *,
    goes_on: bool = False,
) -> OnlineResult:
    run = LakeRun(
        lake.storage,
        lease,
        record.run_id,
        job.learner,
        keep=job.config.keep_checkpoints,
        on_metrics=callbacks.on_metrics,
    )
    try:
        with interrupted_at_once(), ExitStack() as stack:
            stack.callback(_flush, run)
            return _ran(lake, job, record, lease, callbacks, run, stack, goes_on=goes_on)
    except RunInterrupted:
        raise
    except KeyboardInterrupt as error:
        raise RunInterrupted(record.run_id, run.last_saved) from error


def _flush(run: LakeRun) -> None:
    # What ended the run says more; one that goes on measures again what came after a checkpoint.
    with suppress(StorageFailed):
        run.close()


def _ran(
    lake: Lake,
    job: Job,
    record: RunRecord,
    lease: RunLease,
    callbacks: OnlineCallbacks,
    run: LakeRun,
    stack: ExitStack,
    *,
    goes_on: bool,
) -> OnlineResult:
    config, interruption = job.config, Interruption()
    checkpoint = run.newest() if goes_on else None
    attempt = len(record.body.get("resumed", ())) + 1 if goes_on else 0
    producer = f"online/{record.run_id}" + (f"/{attempt}" if attempt else "")

    def should_end() -> bool:
        return interruption.is_requested or bool(callbacks.should_end and callbacks.should_end())

    stack.enter_context(torch_threads(config.threads))
    view = followed(job, producer)
    stack.callback(view.close)
    pool = stack.enter_context(closing(made_pool(lake, job, producer, attempt)))
    feed = stack.enter_context(made_feed(job, view, producer))
    if config.compact and config.record:
        stack.enter_context(Housekeeper(lake.url, job.dataset, on_remark=callbacks.remark))
    refusals = Refusals(callbacks.remark, should_end)
    observer = PatientObserver(run, refusals, callbacks.remark)
    trainer = OnlineTrainer(
        made_parts(job, view, pool, feed, observer, refusals, name=f"run:{record.run_id}"),
        config,
        on_progress=callbacks.on_progress,
        on_remark=callbacks.on_remark,
        should_end=should_end,
    )
    remarks = list(pool.remarks)
    if goes_on:
        found = recorded(job.dataset, record.run_id, since=job.since)
        if found.left_open:
            remarks.append(
                f"{len(found.left_open):,} episodes were open when the run ended and stay without "
                "an end"
            )
        _go_on(job, trainer, view, checkpoint, found)
        record.go_on(trainer.update)
        feed.abandon(found.left_open)
    if callbacks.on_start is not None:
        callbacks.on_start(RunStart(record.run_id, trainer.update, goes_on, tuple(remarks)))
    try:
        with interruption.awaited():
            is_complete = trainer.run()
    except ReplayLakeError as error:
        # Asked anew: this one knows the log that it has read.
        if (damage := _damage(lake.dataset(job.request.dataset))) is None:
            raise
        raise NotFound(
            f"dataset {job.request.dataset!r}: gone from {lake.url} while the run collects into "
            f"it ({damage}), expected it to stay. Put it back and go on with the run, or begin "
            "another."
        ) from error
    if not is_complete:
        raise RunInterrupted(record.run_id, run.last_saved)
    if trainer.update == 0:
        raise TrainingFailed(
            f"training: found no update after {trainer.num_steps:,} steps, expected one at least: "
            "too few came together for a batch. Collect more --steps."
        )
    return _registered(lake, job, record, lease, trainer, run, observer, refusals)


def _damage(dataset: Dataset) -> str | None:
    """Return why a dataset cannot be read; None if it can be."""
    try:
        dataset.snapshot()
    except (NotFound, LogCorrupt) as error:
        return str(error).rstrip(".")
    return None


def _go_on(
    job: Job,
    trainer: OnlineTrainer,
    view: LiveView | AgentViews,
    checkpoint: Checkpoint | None,
    found: Recorded,
) -> None:
    # What the learner takes next is found by what it took last.
    while not view.wait_for(version=found.version):
        pass
    if checkpoint is None:
        trainer.begin_with(found)
        return
    job.learner.load_state_dict(checkpoint.arrays)
    trainer.load_state_dict(checkpoint.update, checkpoint.state, found)


def _registered(
    lake: Lake,
    job: Job,
    record: RunRecord,
    lease: RunLease,
    trainer: OnlineTrainer,
    run: LakeRun,
    observer: PatientObserver,
    refusals: Refusals,
) -> OnlineResult:
    """Package, evaluate and register the policy that was chosen; the checkpoints go."""
    request, config, selection = job.request, job.config, trainer.selection
    chosen = selection.chosen
    if chosen.update != trainer.update:
        job.learner.load_state_dict(run.checkpoints.load(chosen.update).arrays)
    snapshot = job.dataset.snapshot()
    manifest = manifest_of(job, record.run_id, snapshot.version) | {
        "selection": selection.to_json(),
        "metrics": dict(chosen.metrics),
    }

    def closing_evaluation(policy: AgentPolicies) -> Evaluation:
        return evaluate(
            policy,
            request.env_id,
            episodes=config.evaluation_episodes,
            seed=config.seed,
            env_args=request.env_args,
        )

    with tempfile.TemporaryDirectory(prefix="replaylake-train-") as scratch:
        packages, evaluation = _packages(Path(scratch), job, manifest, closing_evaluation)
        observer.measured(chosen.update, {EVALUATION: evaluation.mean_return})
        refusals.until_taken("metrics", run.flush)
        found = {
            "update": chosen.update,
            "num_updates": trainer.update,
            "num_steps": trainer.num_steps,
            "num_episodes": trainer.num_episodes,
            "metrics": manifest["metrics"],
            "mean_return": trainer.mean_return,
            "staleness": trainer.staleness,
            "selection": manifest["selection"],
            "evaluation": evaluation.to_json(),
            "converged": trainer.has_converged,
            "wall_s": trainer.wall_s,
            "datasets": manifest["datasets"],
        }
        lease.confirm()
        ref, done = refusals.until_taken(
            "policy", lambda: register(lake.registry, record, packages, found)
        )
    run.checkpoints.remove()
    return result_of(lake, ref, {**done, "run_id": record.run_id})


def _packages(
    scratch: Path,
    job: Job,
    manifest: Mapping[str, Any],
    evaluated: Callable[[AgentPolicies], Evaluation],
) -> tuple[Mapping[str, Path], Evaluation]:
    """Return each agent's package; of one policy for whoever acts, that of an unnamed one."""
    if not isinstance(job.learner, AgentLearners):
        package, evaluation = packaged(scratch, job.learner, manifest, evaluated=evaluated)
        assert evaluation is not None
        return {"": package}, evaluation
    names = policy_names(job.request.policy_name, job.agents)
    manifests = {}
    for agent, name in names.items():
        own, *rest = manifest["datasets"]
        datasets = [{**own, "where_steps": own_steps(agent)}, *rest]
        manifests[agent] = {**manifest, "name": name, "datasets": datasets}
    return packaged_each(scratch, job.learner.by_agent, manifests, evaluated)
