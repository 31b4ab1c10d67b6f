"""Train online: workers collect into the lake, a learner learns from it, a policy is registered.

`train_online` begins a run and `resume_online` goes on with one that was killed or interrupted.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from replaylake.datastore.errors import ConfigInvalidError, ReplayLakeError, TrainingError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.runs.checkpoints import Checkpoints
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.names import new_ulid
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.running.local_ray import import_ray, open_ray
from replaylake.offline.running.training.interruption import (
    Interruption,
    RunInterrupted,
    interrupt_on_sigterm,
)
from replaylake.offline.running.training.run_record import RunRecord, find_run
from replaylake.online.training.config import OnlineConfig, OnlineRequest
from replaylake.online.training.job import first_record, prepare
from replaylake.online.training.result import OnlineResult, load_finished_result
from replaylake.online.training.run import RunAttempt

KIND: Final = "train online"
_NEEDS: Final = "a learner in Ray: found no ray, expected it for `learner_gpus`"
_POLL_S: Final = 0.25
# A learner that works answers at once, whatever it computes. Of one that was asked to end and is
# silent for so long, no checkpoint is waited for.
_SILENT_S: Final = 30.0
# After which a learner that finds no place is said to wait.
_PATIENT_S: Final = 10.0
_EVENTS: Final = ("on_start", "on_progress", "on_metrics", "on_remark")


def train_online(
    lake: Lake,
    dataset: str,
    config: OnlineConfig,
    *,
    callbacks: Callbacks | None = None,
) -> OnlineResult:
    """Train a policy while it collects steps, and register the best one.

    Args:
        lake: the lake of the dataset and the policy.
        dataset: name of the dataset to which the steps are written; created if it does not exist.
        config: environment, algorithm and its options, the policy's name, steps, workers.
            `config.env` and `config.policy` are required.
        callbacks: on_start, on_progress (OnlineProgress), on_metrics, on_remark, should_end.

    Every step is recorded with the policy version and log-probability of its action. Ctrl-C and
    SIGTERM save a checkpoint first.

    Raises: NotFoundError, InvalidNameError, SchemaMismatchError, SpaceUnsupportedError,
    ConfigInvalidError, ExtraMissingError before anything is collected; RolloutError if an
    environment raises or workers die repeatedly; TrainingError; StorageError; RunInterrupted. In
    each case no policy is registered, and committed steps remain.
    """
    request, callbacks = OnlineRequest(dataset, config), callbacks or Callbacks()
    if config.learns_in_ray:
        return _run_in_actor(lake, RunSpec(request), callbacks)
    return _start(lake, request, callbacks)


def _start(lake: Lake, request: OnlineRequest, callbacks: Callbacks) -> OnlineResult:
    job = prepare(lake, request)
    run_id = new_ulid()
    with RunLease(lake.storage, run_id) as lease:
        record = RunRecord(lake.registry, run_id, first_record(job), kind=KIND)
        record.record_start()
        with record.record_errors():
            return RunAttempt(lake, job, record, lease, callbacks).execute()


def resume_online(lake: Lake, run_id: str, *, callbacks: Callbacks | None = None) -> OnlineResult:
    """Resume an online run from its newest checkpoint, with all steps that it had committed.

    Steps that were committed after the checkpoint are used for learning like any others. Episodes
    that were open when the run was killed remain without an end (`complete` is false), and the
    first commit lists them. For the callbacks see `train_online`. Raises: NotFoundError if there is
    no such run; CommitConflictError while another process executes it; otherwise as train_online.
    """
    callbacks = callbacks or Callbacks()
    record = find_run(lake.registry, run_id, kind=KIND)
    if record["status"] == "done":
        return replace(load_finished_result(lake, record), already_finished=True)
    request = OnlineRequest.from_json(record["request"])
    if request.config.learns_in_ray:
        return _run_in_actor(lake, RunSpec(request, run_id), callbacks)
    return _resume(lake, run_id, callbacks)


def _resume(lake: Lake, run_id: str, callbacks: Callbacks) -> OnlineResult:
    record = find_run(lake.registry, run_id, kind=KIND)
    job = prepare(lake, OnlineRequest.from_json(record["request"]), record=record)
    with RunLease(lake.storage, run_id) as lease:
        # Read again: whoever had the lease before may have ended it in between.
        record = find_run(lake.registry, run_id, kind=KIND)
        if record["status"] == "done":
            return replace(load_finished_result(lake, record), already_finished=True)
        running = RunRecord(lake.registry, run_id, record, kind=KIND)
        with running.record_errors():
            return RunAttempt(lake, job, running, lease, callbacks, resumed=True).execute()


def _run_in_actor(lake: Lake, work: RunSpec, callbacks: Callbacks) -> OnlineResult:
    """Let an actor of Ray's do the run."""
    run_id = run_remotely(lake, work, callbacks, _train_here)
    return load_finished_result(lake, find_run(lake.registry, run_id, kind=KIND))


def _train_here(lake: Lake, work: RunSpec, **callbacks: Any) -> str:
    """Do a run in this process, which is an actor's; returns its id."""
    listener = Callbacks(**callbacks)
    if work.run_id is not None:
        return _resume(lake, work.run_id, listener).run_id
    return _start(lake, work.request, listener).run_id


@dataclass(frozen=True)
class RunSpec:
    """What the actor is to do: begin what is requested, or go on with a run."""

    request: OnlineRequest
    run_id: str | None = None


# Trains: (lake, work, callbacks by name) to the run's id.
Train = Callable[..., str]


@dataclass(frozen=True)
class _InterruptedRun:
    """In place of an exception, which Ray would take for its own."""

    run_id: str
    update: int | None


class TrainerActor:
    """Runs a trainer in one thread, and says in another what it tells."""

    def __init__(self, lake: str, train: Train) -> None:
        self._lake, self._train = lake, train
        self._events: list[tuple[str, tuple[Any, ...]]] = []
        self._lock = threading.Lock()
        self._is_ending = False

    def run(self, work: RunSpec) -> str | _InterruptedRun:
        """Train to the end; returns the run's id. Raises: as train_online and resume_online."""
        callbacks = {name: self._make_forwarder(name) for name in _EVENTS}
        try:
            lake = open_lake(self._lake)
            return self._train(lake, work, should_end=lambda: self._is_ending, **callbacks)
        except RunInterrupted as error:
            return _InterruptedRun(error.run_id, error.update)

    def events(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Return the calls of callbacks since the last time, in order."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def end(self) -> None:
        """Let the run save a checkpoint and end."""
        self._is_ending = True

    def _make_forwarder(self, name: str) -> Callable[..., None]:
        def tell(*values: Any) -> None:
            with self._lock:
                self._events.append((name, values))

        return tell


def run_remotely(lake: Lake, work: RunSpec, callbacks: Callbacks, train: Train) -> str:
    """Run the trainer in an actor and wait; returns the run's id.

    Raises: as train_online; ConfigInvalidError for CPUs and GPUs that Ray does not have;
    TrainingError where the actor finds no place in time, does not answer, or its process or node
    died; KeyboardInterrupt where it is interrupted before there is a run.
    """
    request, config = work.request, work.request.config
    _check_own_gpus(request)
    with (
        interrupt_on_sigterm(),
        open_ray(
            _NEEDS,
            math.ceil(_num_cpus(config)),
            math.ceil(config.learner_gpus),
            address=config.address,
            start_timeout_s=config.start_timeout_s,
        ) as ray,
    ):
        _check_room(ray, request)
        return _RemoteRun(ray, lake, work, callbacks, train).wait()


def _num_cpus(config: OnlineConfig) -> float:
    """Return the CPUs that the learner and its workers take up."""
    workers = config.num_workers * config.worker_cpus if config.env_runner == "ray" else 0.0
    return workers + 1


def _check_own_gpus(request: OnlineRequest) -> None:
    """Refuse GPUs that this machine lacks: a Ray started here would accept any number."""
    num_gpus, here = request.config.learner_gpus, torch.cuda.device_count()
    is_ours = request.config.address is None and not import_ray(_NEEDS).is_initialized()
    if is_ours and num_gpus > here:
        raise ConfigInvalidError(
            f"online: learner_gpus: found {here} GPUs on this machine, expected {num_gpus:g} or "
            "more. Connect to a Ray cluster that has them with `address`, or leave `learner_gpus` "
            "out."
        )


def _check_room(ray: Any, request: OnlineRequest) -> None:
    """Refuse a run that the cluster has no room for: Ray would wait without an end."""
    config = request.config
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    where = "Ray" if config.address is None else f"Ray at {config.address}"
    gpus = [float(node.get("GPU", 0)) for node in nodes]
    if config.learner_gpus > max(gpus, default=0.0):
        raise ConfigInvalidError(
            f"{where}: found {sum(gpus):g} GPUs on {len(nodes)} nodes, {max(gpus, default=0):g} on "
            f"one at most; expected {config.learner_gpus:g} on one node, for `learner_gpus`. "
            "Start Ray on a machine that has them (`ray start --num-gpus N` if it does not detect "
            "them), or leave `learner_gpus` out."
        )
    num_cpus, available = _num_cpus(config), sum(float(node.get("CPU", 0)) for node in nodes)
    if num_cpus > available:
        raise ConfigInvalidError(
            f"{where}: found {available:g} CPUs, expected {num_cpus:g}: one for the learner, and "
            f"{config.worker_cpus:g} for each of {config.num_workers} workers. Use fewer "
            "`workers`, or a smaller `worker_cpus`."
        )


class _RemoteRun:
    """A run in an actor, as the process sees it that asked for it."""

    def __init__(
        self, ray: Any, lake: Lake, work: RunSpec, callbacks: Callbacks, train: Train
    ) -> None:
        self._ray, self._lake, self._callbacks = ray, lake, callbacks
        request = work.request
        self._config = request.config
        self._run_id = work.run_id
        remote = ray.remote(
            num_cpus=1, num_gpus=self._config.learner_gpus, max_concurrency=2, max_restarts=0
        )
        self._actor = remote(TrainerActor).remote(lake.url, train)
        self._ready = self._actor.__ray_ready__.remote()
        # The actor is in the cluster already, wherever that is.
        inside = replace(request, config=replace(request.config, address=None))
        self._done = self._actor.run.remote(replace(work, request=inside))
        self._interruption = Interruption()

    def wait(self) -> str:
        """Wait for its end and hand on what it tells. Raises: as run_remotely."""
        exceptions = self._ray.exceptions
        try:
            with self._interruption.handle_signals():
                self._wait_for_place()
                result = self._result()
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, ReplayLakeError):
                raise error.cause from error
            raise TrainingError(
                f"learner: {type(error.cause).__name__}: {error.cause}. Run without "
                "`learner_gpus` for the traceback."
            ) from error
        except exceptions.RayError as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise TrainingError(
                f"learner: its process died ({reason}). `replaylake runs list` shows the run, and "
                "`replaylake train online --resume RUN` resumes it."
            ) from error
        except RunInterrupted:
            raise
        except KeyboardInterrupt as error:
            if self._run_id is None:
                raise
            raise RunInterrupted(self._run_id, self._last_saved(self._run_id)) from error
        finally:
            self._ray.kill(self._actor)
        if isinstance(result, _InterruptedRun):
            raise RunInterrupted(result.run_id, result.update)
        return result

    def _wait_for_place(self) -> None:
        """Wait until the actor's process runs. Raises: TrainingError where it finds no place."""
        start, is_told = time.monotonic(), False
        while not self._ray.wait([self._ready], timeout=_POLL_S)[0]:
            if self._should_end():
                raise KeyboardInterrupt
            waited_s = time.monotonic() - start
            if waited_s > self._config.start_timeout_s:
                raise TrainingError(
                    f"learner: found no process in {self._config.start_timeout_s:g} s, expected "
                    f"{self._place()}. Nothing was collected. Wait until others are done, or raise "
                    "start_timeout_s."
                )
            if waited_s > _PATIENT_S and not is_told:
                is_told = True
                self._callbacks.report_remark(f"the learner waits for a process: {self._place()}")

    def _place(self) -> str:
        free = self._ray.available_resources()
        resources = {"CPU": 1.0, "GPU": self._config.learner_gpus}
        return " and ".join(
            f"{num:g} {name} of which Ray has {free.get(name, 0.0):g} free"
            for name, num in resources.items()
            if num
        )

    def _result(self) -> str | _InterruptedRun:
        """Hand on what is told until it is done. Raises: TrainingError where nothing is told."""
        events, heard_at, ending_at = self._actor.events.remote(), time.monotonic(), math.inf
        while True:
            is_done = bool(self._ray.wait([self._done], timeout=_POLL_S)[0])
            now = time.monotonic()
            if self._ray.wait([events], timeout=0)[0]:
                self._hand_on(events)
                events, heard_at = self._actor.events.remote(), now
            if is_done:
                # What it told last came after what was asked for before.
                if self._ray.wait([events], timeout=_SILENT_S)[0]:
                    self._hand_on(events)
                result: str | _InterruptedRun = self._ray.get(self._done)
                return result
            if ending_at == math.inf and self._should_end():
                self._actor.end.remote()
                ending_at = now
            if now - max(heard_at, ending_at) > _SILENT_S:
                raise KeyboardInterrupt
            if now - heard_at > self._config.answer_timeout_s:
                raise TrainingError(
                    f"learner: no answer within {self._config.answer_timeout_s:g} s "
                    "(answer_timeout_s): it hangs, or its node cannot be reached. `replaylake "
                    f"train online --resume {self._run_id or 'RUN'}` resumes the run."
                )

    def _hand_on(self, events: Any) -> None:
        for name, values in self._ray.get(events):
            if name == "on_start":
                self._run_id = values[0].run_id
            if (callback := getattr(self._callbacks, name)) is not None:
                callback(*values)

    def _should_end(self) -> bool:
        return self._interruption.is_requested or self._callbacks.is_end_requested

    def _last_saved(self, run_id: str) -> int | None:
        """Return the update that it goes on after, if the lake says so."""
        with suppress(ReplayLakeError):
            return max(Checkpoints(self._lake.storage, run_id).updates(), default=None)
        return None
