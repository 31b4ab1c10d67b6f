"""Trial: one run of a sweep, in a process of its own, which goes from measurement to measurement.

The run is trained in a thread, which waits after each measurement until it is told to go on: so
that what is stopped there stops there.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from replaylake.datastore.lake.lake import open_lake
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.running.train import resume, start_run
from replaylake.offline.running.training.config import TrainRequest
from replaylake.offline.running.training.interruption import RunInterrupted
from replaylake.offline.running.tuning.config import Mode

_LOOK_S: Final = 0.2


@dataclass(frozen=True)
class TrialSpec:
    """What a trial is: enough for another process to do it.

    request: pinned. run_id: of the run to go on with, None for a new one. sweep: what the run's
    record says of the sweep. stop_file: once it exists the trial saves and ends after its next
    update; the calls of the trial's process wait for each other, so none could tell it.
    """

    url: str
    number: int
    request: TrainRequest
    run_id: str | None
    sweep: Mapping[str, Any]
    measure: str
    mode: Mode
    stop_file: str | None = None


@dataclass(frozen=True)
class TrialMeasurement:
    """A trial's measure after an update."""

    update: int
    value: float


@dataclass(frozen=True)
class TrialEnd:
    """A trial that came to its end, was asked to end, or failed: then why."""

    error: str | None = None


class Trial:
    """A run in a thread, driven by `next` and `stop`."""

    def __init__(self, work: TrialSpec) -> None:
        self._work = work
        self._results: queue.Queue[TrialMeasurement | TrialEnd] = queue.Queue()
        self._may_go_on = threading.Semaphore(0)
        self._is_stopped = threading.Event()
        self._next_look = 0.0
        self._thread = threading.Thread(target=self._run, name=f"trial {work.number}")

    def next(self) -> TrialMeasurement | TrialEnd:
        """Go on up to the next measurement, or the end."""
        if self._thread.ident is None:
            if self._has_stop_file():
                return TrialEnd()
            self._thread.start()
        else:
            self._may_go_on.release()
        return self._results.get()

    def stop(self) -> None:
        """Let the run save and end after its next update, and wait for that."""
        self._is_stopped.set()
        self._may_go_on.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        work = self._work
        callbacks = Callbacks(on_metrics=self._report_measurement, should_end=self._should_end)
        try:
            lake = open_lake(work.url)
            if work.run_id is not None:
                resume(lake, work.run_id, callbacks=callbacks)
            else:
                start_run(lake, work.request, callbacks, sweep=work.sweep)
        except RunInterrupted:
            self._results.put(TrialEnd())
        except BaseException as error:
            self._results.put(TrialEnd(f"{type(error).__name__}: {error}"))
        else:
            self._results.put(TrialEnd())

    def _should_end(self) -> bool:
        if not self._is_stopped.is_set() and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_S
            if self._has_stop_file():
                self._is_stopped.set()
        return self._is_stopped.is_set()

    def _has_stop_file(self) -> bool:
        return self._work.stop_file is not None and os.path.exists(self._work.stop_file)

    def _report_measurement(self, update: int, values: Mapping[str, float]) -> None:
        config, measure = self._work.request.config, self._work.measure
        # Other metrics are logged more often than that.
        is_due = (
            measure.startswith("selection/")
            or update % config.measure_interval_updates(measure) == 0
            or update == config.updates
        )
        if measure not in values or not is_due or self._is_stopped.is_set():
            return
        self._results.put(TrialMeasurement(update, values[measure]))
        self._may_go_on.acquire()
