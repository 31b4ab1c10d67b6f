"""Train offline: datasets of the lake to a policy in its registry, in runs that survive.

`train` begins a run and `resume` goes on with one. Both make a TrainingJob ready (data, learner,
sampler), let a Trainer step it, and register the policy that the run's measure chose.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replaylake.datastore.errors import SchemaMismatchError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.registry import PolicyRef
from replaylake.datastore.lake.runs.checkpoints import Checkpoints
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.lake.runs.summary import EVALUATION
from replaylake.datastore.lake.runs.timings import Timings
from replaylake.datastore.names import new_ulid
from replaylake.offline.algorithms.catalog import check_algorithm, require
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.evaluation.evaluate import Evaluation
from replaylake.offline.learning.learner import torch_threads
from replaylake.offline.learning.process_group import (
    ALREADY_FINISHED,
    SINGLE_PROCESS,
    ProcessGroup,
)
from replaylake.offline.running.distributed import run_distributed
from replaylake.offline.running.training.config import TrainConfig, TrainRequest
from replaylake.offline.running.training.data import check_same_data, find_needs
from replaylake.offline.running.training.interruption import Interruption
from replaylake.offline.running.training.job import TrainingJob, make_final_evaluation, prepare
from replaylake.offline.running.training.lake_observer import LakeObserver, NullObserver
from replaylake.offline.running.training.packaging import build_package
from replaylake.offline.running.training.process_group import sync_stop
from replaylake.offline.running.training.run_loop import (
    follow_updates,
    record_lost_leader,
    run_updates,
)
from replaylake.offline.running.training.run_record import KIND, RunRecord, find_run
from replaylake.offline.running.training.trainer import Trainer


@dataclass(frozen=True)
class TrainResult:
    """What a run made.

    update: that of the policy that was registered. metrics: their means since the measurement
    before it. selection: how it was chosen; see Selection.to_json. evaluation: the closing one,
    in the environment that was named. already_finished: the run had ended before, and nothing was
    done.
    """

    policy: PolicyRef
    run_id: str
    config: TrainConfig
    datasets: tuple[Mapping[str, Any], ...]
    num_steps: int
    num_episodes: int
    update: int
    metrics: Mapping[str, float]
    updates_per_s: float
    selection: Mapping[str, Any]
    evaluation: Evaluation | None
    already_finished: bool = False


def train(
    lake: Lake,
    datasets: str | Sequence[str],
    config: TrainConfig,
    *,
    callbacks: Callbacks | None = None,
) -> TrainResult:
    """Train a policy on stored datasets, and register it as a new version.

    Args:
        lake: the lake of the datasets and the policy.
        datasets: `NAME`, `NAME@VERSION` or `NAME@TAG`, or several with compatible spaces.
        config: algorithm and its options, the policy's name, the selection of data, updates, seed,
            holdout, selection of the policy. `config.policy` is required.
        callbacks: on_reading, on_start, on_progress (TrainProgress), on_metrics, should_end.

    Training is deterministic on the CPU: the same data, config and seed give the same weights, even
    if the run was killed and resumed. Ctrl-C and SIGTERM save a checkpoint first. With
    `config.learners`, additional processes compute each update together with the first. The run's
    record has the status `running` from the first update on, then `done`, `failed` or
    `interrupted`.

    Raises: NotFoundError, InvalidNameError, SchemaMismatchError, EmptyReplayError,
    SpaceUnsupportedError, ConfigInvalidError before training begins or anything is recorded;
    TrainingError that names the update if a loss is not finite; StorageError if a checkpoint cannot
    be saved; RunInterrupted. In each case no policy is registered.
    """
    return start_run(lake, TrainRequest.of(datasets, config), callbacks)


def start_run(
    lake: Lake,
    request: TrainRequest,
    callbacks: Callbacks | None = None,
    *,
    sweep: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Do what `train` does; sweep: what the record says of the sweep that it is a trial of."""
    callbacks = callbacks or Callbacks()
    work = _RunSpec(new_ulid(), request.pin(lake), sweep=sweep)
    if request.config.learners > 1:
        return _run_distributed(lake, work, callbacks)
    return _start(lake, work, callbacks)


def resume(lake: Lake, run_id: str, *, callbacks: Callbacks | None = None) -> TrainResult:
    """Resume a run that was killed, interrupted or failed, from its newest complete checkpoint.

    The record of the run determines the versions of the datasets and the options. On the CPU, the
    run ends with the same weights as an uninterrupted run, bit for bit. For a run that is done,
    nothing is executed and its result is returned. For the callbacks see `train`.

    Raises: NotFoundError if there is no such run, or a version of a dataset no longer exists;
    CommitConflictError while another process executes the run; SchemaMismatchError if the steps are
    not those with which it began; otherwise as `train`.
    """
    callbacks = callbacks or Callbacks()
    record = find_run(lake.registry, run_id)
    if record["status"] == "done":
        return _load_finished_result(lake, record)
    work = _RunSpec(run_id, TrainRequest.from_json(record.get("request", {})), resumed=True)
    if work.request.config.learners > 1:
        return _run_distributed(lake, work, callbacks)
    return _resume(lake, work, callbacks)


@dataclass(frozen=True)
class _RunSpec:
    """What a run is: enough for another process to do it. request: pinned."""

    run_id: str
    request: TrainRequest
    resumed: bool = False
    sweep: Mapping[str, Any] | None = None


def _start(
    lake: Lake, work: _RunSpec, callbacks: Callbacks, group: ProcessGroup = SINGLE_PROCESS
) -> TrainResult:
    run_id, timings = work.run_id, Timings("trainer")
    with timings.measure("start", items=0):
        job = prepare(lake, work.request, on_reading=callbacks.on_reading, group=group)
    with RunLease(lake.storage, run_id) as lease:
        record = RunRecord(lake.registry, run_id, _first_record(job, work))
        record.record_start()
        with record.record_errors():
            return _run(lake, job, record, lease, callbacks, group, timings)


def _resume(
    lake: Lake, work: _RunSpec, callbacks: Callbacks, group: ProcessGroup = SINGLE_PROCESS
) -> TrainResult:
    run_id, timings = work.run_id, Timings("trainer")
    with RunLease(lake.storage, run_id) as lease:
        # Read again: whoever had the lease before may have ended it in between.
        record = find_run(lake.registry, run_id)
        if record["status"] == "done":
            group.broadcast(ALREADY_FINISHED)
            return _load_finished_result(lake, record)
        with timings.measure("start", items=0):
            job = prepare(lake, work.request, on_reading=callbacks.on_reading, group=group)
        _check_same(job, record)
        running = RunRecord(lake.registry, run_id, record)
        with running.record_errors():
            return _run(lake, job, running, lease, callbacks, group, timings, resumed=True)


def _run_distributed(lake: Lake, work: _RunSpec, callbacks: Callbacks) -> TrainResult:
    """Let several processes do a run together, and wait for them."""
    config = work.request.config
    snapshots = [lake.snapshot(text) for text in work.request.datasets]
    needed = find_needs(config, snapshots)
    algorithm = check_algorithm(config.algorithm, snapshots[0].spec.action_space, needed=needed)
    require(algorithm, "gradients", needed=needed)
    try:
        run_distributed(_run_process, (lake.url, work), config.learners, config.device, callbacks)
    except BaseException as error:
        record_lost_leader(lake, work.run_id, KIND, error)
        raise
    record = find_run(lake.registry, work.run_id)
    ref = lake.registry.resolve(f"{record['policy']}:{record['policy_version']}")
    return _make_result(ref, record)


def _run_process(group: ProcessGroup, callbacks: Callbacks, url: str, work: _RunSpec) -> None:
    """Do what each process of a group does: the first has the run, the others follow it."""
    lake = open_lake(url)
    if group.rank:
        follow_leader(lake, work.request, work.run_id, group)
    elif work.resumed:
        _resume(lake, work, callbacks, group)
    else:
        _start(lake, work, callbacks, group)


def _run(
    lake: Lake,
    job: TrainingJob,
    record: RunRecord,
    lease: RunLease,
    callbacks: Callbacks,
    group: ProcessGroup,
    timings: Timings,
    *,
    resumed: bool = False,
) -> TrainResult:
    """Make the updates that are left, and register the policy that was chosen."""
    config, interruption = job.request.config, Interruption()
    with ExitStack() as stack:
        run = LakeObserver(
            lake.storage,
            lease,
            record.run_id,
            job.learner,
            keep=config.keep_checkpoints,
            on_metrics=callbacks.on_metrics,
        )
        stack.enter_context(closing(run))
        stack.enter_context(torch_threads(config.threads))
        trainer = Trainer(
            job.learner,
            job.sampler,
            config,
            observer=run,
            selection=job.selection(),
            measure=job.measure,
            on_progress=callbacks.on_progress,
            should_end=sync_stop(
                job.learner, lambda: interruption.is_requested or callbacks.is_end_requested
            ),
            timings=timings,
        )
        run_updates(
            trainer,
            job.learner,
            run,
            record,
            callbacks=callbacks,
            interruption=interruption,
            group=group,
            resumed=resumed,
            remarks=job.data.remarks,
        )
        return _register_policy(lake, job, record, lease, trainer, run)


def _register_policy(
    lake: Lake,
    job: TrainingJob,
    record: RunRecord,
    lease: RunLease,
    trainer: Trainer,
    run: LakeObserver,
) -> TrainResult:
    """Package, evaluate and register the policy that was chosen; the checkpoints go."""
    point = trainer.selection.chosen
    if point.update != trainer.update:
        job.learner.load_state_dict(run.checkpoints.load(point.update).arrays)
    manifest = job.manifest(record.run_id) | {
        "selection": trainer.selection.to_json(),
        "metrics": dict(point.metrics),
        "observation_statistics": job.observation_statistics(),
    }
    with tempfile.TemporaryDirectory(prefix="replaylake-train-") as scratch:
        package, evaluation = build_package(
            Path(scratch),
            job.learner,
            manifest,
            encoding=job.data.view.spec.encoding,
            evaluate=make_final_evaluation(job.request),
        )
        if evaluation is not None:
            run.record_metrics(point.update, {EVALUATION: evaluation.mean_return})
        run.close()
        fields = {
            "update": point.update,
            "metrics": manifest["metrics"],
            "updates_per_s": trainer.updates_per_s,
            "selection": manifest["selection"],
            "evaluation": None if evaluation is None else evaluation.to_json(),
        }
        lease.confirm()
        # The policy and the end of its run are one commit: neither is there without the other.
        keys = ("datasets", "holdout", "algorithm", "seed", "run_id")
        ref = lake.registry.register(
            job.request.config.policy,
            package,
            run_id=record.run_id,
            lineage={key: manifest[key] for key in keys},
            run=record.to_finished(fields),
            # Whoever took the run over has changed its record.
            replaces=record.body,
        )
    run.checkpoints.remove()
    return _make_result(ref, {**record.to_finished(fields), "run_id": record.run_id})


def _first_record(job: TrainingJob, work: _RunSpec) -> dict[str, Any]:
    manifest = job.manifest(work.run_id)
    keys = ("algorithm", "seed", "config", "normalization", "datasets", "holdout")
    return {
        "policy": job.request.config.policy,
        "num_steps": job.data.view.num_steps,
        "num_episodes": job.data.view.num_episodes,
        **{key: manifest[key] for key in keys},
        "request": job.request.to_json(),
        **({} if work.sweep is None else {"sweep": dict(work.sweep)}),
    }


def _check_same(job: TrainingJob, record: Mapping[str, Any]) -> None:
    """Refuse to go on where the data, or what they are scaled by, are not what they were."""
    run_id = record["run_id"]
    check_same_data(run_id, record["datasets"], job.data.lineage(job.request))
    # As JSON has it, which is how the record was kept.
    actual = json.loads(json.dumps(dict(job.learner.normalization)))
    if actual != record["normalization"]:
        raise SchemaMismatchError(
            f"run {run_id}: found other normalization statistics than it began with, for the same "
            "steps. Another version of ReplayLake or DuckDB began it: resume it with that version, "
            "or train again."
        )


def _load_finished_result(lake: Lake, record: Mapping[str, Any]) -> TrainResult:
    """Return what a run made that ended before; checkpoints that a crash left behind go."""
    Checkpoints(lake.storage, record["run_id"]).remove()
    ref = lake.registry.resolve(f"{record['policy']}:{record['policy_version']}")
    return _make_result(ref, record, was_done=True)


def _make_result(
    ref: PolicyRef, record: Mapping[str, Any], *, was_done: bool = False
) -> TrainResult:
    evaluation = None
    if (score := record["evaluation"]) is not None:
        # As JSON has it: lists.
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in score.items()
        }
        evaluation = Evaluation(**fields)
    return TrainResult(
        policy=ref,
        run_id=record["run_id"],
        config=TrainRequest.from_json(record["request"]).config,
        datasets=tuple(record["datasets"]),
        num_steps=record["num_steps"],
        num_episodes=record["num_episodes"],
        update=record["update"],
        metrics=record["metrics"],
        updates_per_s=record["updates_per_s"],
        selection=record["selection"],
        evaluation=evaluation,
        already_finished=was_done,
    )


def follow_leader(lake: Lake, request: TrainRequest, run_id: str, group: ProcessGroup) -> None:
    """Make the updates of a run that another learner leads, until it says that it is over.

    request: pinned. Raises: as prepare; TrainingError where another learner is gone.
    """
    job = prepare(lake, request, group=group)
    trainer = Trainer(
        job.learner,
        job.sampler,
        request.config,
        observer=NullObserver(),
        selection=job.selection(),
        measure=job.measure,
        should_end=sync_stop(job.learner, lambda: False),
    )
    with torch_threads(request.config.threads):
        follow_updates(trainer, job.learner, lake, run_id, group)
