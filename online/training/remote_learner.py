"""Remote learner: a run's trainer as a Ray actor, where its GPU is; this process watches.

The actor commits, follows the lake and learns as a trainer in process does, so its node has to see
the lake. What it tells comes here in batches, a few times a second.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from replaylake.datastore.errors import ReplayLakeError, TrainingFailed
from replaylake.datastore.lake import Lake, open_lake
from replaylake.offline.local_ray import running_ray
from replaylake.offline.training.interruption import Interruption, RunInterrupted
from replaylake.online.training.callbacks import OnlineCallbacks
from replaylake.online.training.config import OnlineRequest

_POLL_S: Final = 0.25
_EVENTS: Final = ("on_start", "on_progress", "on_metrics", "on_remark")


@dataclass(frozen=True)
class Work:
    """What the actor is to do: begin what is requested, or go on with a run."""

    request: OnlineRequest
    run_id: str | None = None


# Trains: (lake, work, callbacks by name) to the run's id.
Train = Callable[..., str]


@dataclass(frozen=True)
class _Interrupted:
    """In place of an exception, which Ray would take for its own."""

    run_id: str
    update: int | None


class TrainerActor:
    """Runs a trainer in one thread, and says in another what it tells."""

    def __init__(self, lake: str, train: Train) -> None:
        self._lake, self._train = lake, train
        self._told: list[tuple[str, tuple[Any, ...]]] = []
        self._lock = threading.Lock()
        self._is_ending = False

    def run(self, work: Work) -> str | _Interrupted:
        """Train to the end; returns the run's id. Raises: as train_online and resume_online."""
        callbacks = {name: self._teller(name) for name in _EVENTS}
        try:
            lake = open_lake(self._lake)
            return self._train(lake, work, should_end=lambda: self._is_ending, **callbacks)
        except RunInterrupted as error:
            return _Interrupted(error.run_id, error.update)

    def events(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Return the calls of callbacks since the last time, in order."""
        with self._lock:
            told, self._told = self._told, []
        return told

    def end(self) -> None:
        """Let the run save a checkpoint and end."""
        self._is_ending = True

    def _teller(self, name: str) -> Callable[..., None]:
        def tell(*values: Any) -> None:
            with self._lock:
                self._told.append((name, values))

        return tell


def run_remotely(lake: Lake, work: Work, callbacks: OnlineCallbacks, train: Train) -> str:
    """Run the trainer in an actor and wait; returns the run's id.

    Raises: as train_online; TrainingFailed where the actor's process or node died.
    """
    config = work.request.config
    gpus = config.learner_gpus
    num_cpus = math.ceil(config.num_workers * config.worker_cpus) + 1
    with running_ray(
        "a learner in Ray: found no ray, expected it for --learner-gpus",
        num_cpus,
        math.ceil(gpus),
        address=work.request.address,
    ) as ray:
        remote = ray.remote(num_cpus=1, num_gpus=gpus, max_concurrency=2, max_restarts=0)
        actor = remote(TrainerActor).remote(lake.url, train)
        # The actor is in the cluster already, wherever that is.
        inside = replace(work, request=replace(work.request, address=None))
        try:
            return _awaited(ray, actor, actor.run.remote(inside), callbacks)
        finally:
            ray.kill(actor)


def _awaited(ray: Any, actor: Any, done: Any, callbacks: OnlineCallbacks) -> str:
    interruption = Interruption()
    try:
        with interruption.awaited():
            while True:
                ready, _ = ray.wait([done], timeout=_POLL_S)
                for name, values in ray.get(actor.events.remote()):
                    if (told := getattr(callbacks, name)) is not None:
                        told(*values)
                if ready:
                    break
                asked = callbacks.should_end
                if interruption.is_requested or (asked is not None and asked()):
                    ray.get(actor.end.remote())
            result: str | _Interrupted = ray.get(done)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ReplayLakeError):
            raise error.cause from error
        raise TrainingFailed(
            f"learner: found {type(error.cause).__name__}: {error.cause}, expected a policy. "
            "Run without --learner-gpus for the traceback."
        ) from error
    except ray.exceptions.RayError as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise TrainingFailed(
            f"learner: its process is gone ({reason}), expected a policy. `replaylake runs list` "
            "has the run, and `replaylake train online --resume RUN` goes on with it."
        ) from error
    if isinstance(result, _Interrupted):
        raise RunInterrupted(result.run_id, result.update)
    return result
