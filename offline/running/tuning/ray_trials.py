"""Ray trials: trials as processes of Ray Tune, and what it decides about them.

Ray Tune makes copies of what it is given to have it again after a crash. Nothing here is: what has
to survive is in the lake.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Protocol

from replaylake.offline.running.tuning.config import Mode
from replaylake.offline.running.tuning.trial import Trial, TrialEnd, TrialSpec

# What a measure that is not a number counts as for ASHA, which compares numbers.
_WORST: Final = 1e300
# What trials get to save in, once they are asked to end.
_SAVE_TIMEOUT_S: Final = 60.0
_LOOK_S: Final = 0.2
# The measurements of a trial that is over: (update, value).
Curve = Iterable[tuple[int, float]]


class TrialObserver(Protocol):
    """Who is told of trials, by number, in the process that runs them."""

    def on_measurement(self, number: int, update: int, value: float) -> None:
        """Take a measurement."""
        ...

    def on_trial_end(self, number: int, *, is_stopped: bool, error: str | None) -> None:
        """Take the end of a trial: stopped by ASHA, failed of something, or at its end."""
        ...


@dataclass(frozen=True)
class EarlyStopping:
    """How ASHA stops trials that are behind.

    Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning", algorithm 2.
    known: the measurements of trials that are over.
    """

    mode: Mode
    grace_updates: int
    updates: int
    reduction: int
    known: Sequence[Curve]


def run_trials(
    works: Sequence[TrialSpec],
    observer: TrialObserver,
    *,
    concurrency: int,
    cpus: int,
    gpus: float,
    stopping: EarlyStopping | None,
    should_end: Callable[[], bool],
    is_running: Callable[[], bool],
) -> None:
    """Run trials on a running Ray, `concurrency` at once; each process runs one at a time.

    should_end: asked several times a second; true has all of them save and end, wherever they are
    between two measurements. is_running: whether a trial has something to save still; asked then,
    until it is false. Trials that are only being started are not waited for.
    """
    from ray import tune

    scheduler = None if stopping is None else _asha(tune, stopping)
    is_stopped = _ignore if scheduler is None else scheduler.stopped.__contains__
    with tempfile.TemporaryDirectory(prefix="replaylake-tune-") as folder:
        stop_file = Path(folder, "stop")
        specs = [replace(work, stop_file=str(stop_file)) for work in works]
        tuner = tune.Tuner(
            tune.with_resources(_trainable(tune, specs), {"cpu": cpus, "gpu": gpus}),
            param_space={"number": tune.grid_search([work.number for work in works])},
            tune_config=tune.TuneConfig(
                scheduler=scheduler,
                max_concurrent_trials=concurrency,
                reuse_actors=True,
                trial_dirname_creator=lambda trial: str(trial.trial_id),
            ),
            run_config=tune.RunConfig(
                name="trials",
                storage_path=folder,
                stop=_stopper(tune, _Ending(stop_file, should_end, is_running)),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                callbacks=[_callback(tune, observer, is_stopped)],
                verbose=0,
            ),
        )
        with suppress(_TrialsEnded):
            tuner.fit()


def to_comparable(value: float, mode: Mode) -> float:
    """Return the value, or for what is not finite one that is worse than all others."""
    if math.isfinite(value):
        return value
    return _WORST if mode == "min" else -_WORST


def _trainable(tune: Any, works: Sequence[TrialSpec]) -> type:
    by_number = {work.number: work for work in works}

    class SweepTrial(tune.Trainable):  # type: ignore[misc]
        def setup(self, config: Mapping[str, Any]) -> None:
            self._work = by_number[config["number"]]
            self._trial = Trial(self._work)

        def reset_config(self, config: Mapping[str, Any]) -> bool:
            # Of the next trial: importing torch in another process would take seconds.
            self._trial.stop()
            self.setup(config)
            return True

        def step(self) -> dict[str, Any]:
            result = self._trial.next()
            if isinstance(result, TrialEnd):
                return {"done": True, "error": result.error}
            value = to_comparable(result.value, self._work.mode)
            return {"update": result.update, "value": value}

        def cleanup(self) -> None:
            self._trial.stop()

    return SweepTrial


def _asha(tune: Any, stopping: EarlyStopping) -> Any:
    """Return the scheduler, as if it had seen the trials that are over."""
    proceed = tune.schedulers.TrialScheduler.CONTINUE

    class Asha(tune.schedulers.ASHAScheduler):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.stopped: set[int] = set()

        def on_trial_result(self, controller: Any, trial: Any, result: Mapping[str, Any]) -> str:
            decision: str = super().on_trial_result(controller, trial, result)
            if decision != proceed:
                self.stopped.add(trial.config["number"])
            return decision

    scheduler = Asha(
        time_attr="update",
        metric="value",
        mode=stopping.mode,
        # One more than there are: at its last measurement a trial ends by itself.
        max_t=stopping.updates + 1,
        grace_period=stopping.grace_updates,
        reduction_factor=stopping.reduction,
    )
    for i, curve in enumerate(stopping.known):
        over = SimpleNamespace(trial_id=f"known-{i}", config={"number": None})
        scheduler.on_trial_add(None, over)
        for update, value in curve:
            point = {"update": update, "value": to_comparable(value, stopping.mode)}
            scheduler.on_trial_result(None, over, point)
    scheduler.stopped.clear()
    return scheduler


def _callback(tune: Any, observer: TrialObserver, is_stopped: Callable[[int], bool]) -> Any:
    class Told(tune.Callback):  # type: ignore[misc]
        # What it tells goes in here: of a class in a function all that it names would be copied.
        def __init__(self, observer: TrialObserver, is_stopped: Callable[[int], bool]) -> None:
            self._observer, self._is_stopped = observer, is_stopped
            self._errors: dict[int, str] = {}

        def __getstate__(self) -> dict[str, Any]:
            return {}

        def on_trial_result(
            self, iteration: int, trials: Any, trial: Any, result: Mapping[str, Any], **_: Any
        ) -> None:
            number = trial.config["number"]
            if result.get("error") is not None:
                self._errors[number] = result["error"]
            elif "update" in result and not result.get("done"):
                self._observer.on_measurement(number, result["update"], result["value"])

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
            number = trial.config["number"]
            error, stopped = self._errors.get(number), self._is_stopped(number)
            self._observer.on_trial_end(number, is_stopped=stopped, error=error)

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
            # The trial's own errors are results: what ends here is its process.
            lines = str(trial.get_error() or "killed, or crashed").strip().splitlines()
            error = f"its process is gone ({lines[-1].strip()}): look at memory"
            self._observer.on_trial_end(trial.config["number"], is_stopped=False, error=error)

    return Told(observer, is_stopped)


class _TrialsEnded(BaseException):
    """All trials have saved and ended, as asked."""


class _Ending:
    """The end of all trials, once it is asked for."""

    def __init__(
        self, stop_file: Path, should_end: Callable[[], bool], is_running: Callable[[], bool]
    ) -> None:
        self._stop_file = stop_file
        self._should_end = should_end
        self._is_running = is_running
        self._until = math.inf
        self._next_look = 0.0

    def check(self) -> None:
        """Raises: _TrialsEnded once none runs, or if one does not end."""
        if not self._should_end() or (now := time.monotonic()) < self._next_look:
            return
        if not self._stop_file.exists():
            self._stop_file.touch()
            self._until = now + _SAVE_TIMEOUT_S
        if not self._is_running() or now > self._until:
            raise _TrialsEnded
        self._next_look = now + _LOOK_S


def _stopper(tune: Any, ending: _Ending) -> Any:
    class Asked(tune.Stopper):  # type: ignore[misc]
        def __init__(self, ending: _Ending | None) -> None:
            self._ending = ending

        def __getstate__(self) -> dict[str, Any]:
            return {"_ending": None}

        def __call__(self, trial_id: str, result: Any) -> bool:
            return False

        def stop_all(self) -> bool:
            # Not by answering true: Ray Tune would wait for processes that are being started.
            if self._ending is not None:
                self._ending.check()
            return False

    return Asked(ending)


def _ignore(number: int) -> bool:
    return False
