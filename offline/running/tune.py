"""Tune: sweeps over options and seeds, on Ray Tune. Each trial is an ordinary run in the lake.

Ray Tune decides when which trial begins and, with ASHA, which ends early. What is known of a trial
is in the record of its run, and what is known of the sweep in its own: a killed sweep goes on from
there, and Ray's files are thrown away.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch

from replaylake.datastore.errors import ConfigInvalidError, TrainingError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.lake.runs.metrics import read_curves
from replaylake.datastore.names import new_ulid
from replaylake.offline.algorithms.catalog import check_options, make_learner
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.learning.normalization import fit_statistics
from replaylake.offline.learning.options import near_matches
from replaylake.offline.running.local_ray import check_room, open_ray
from replaylake.offline.running.training.data import open_data
from replaylake.offline.running.training.interruption import Interruption, RunInterrupted
from replaylake.offline.running.training.run_record import RunRecord, find_run
from replaylake.offline.running.tuning.config import (
    Mode,
    Sweep,
    TuneConfig,
    near_options,
    resolve_measure,
)
from replaylake.offline.running.tuning.ray_trials import EarlyStopping, run_trials
from replaylake.offline.running.tuning.results import (
    SweepResult,
    TrialResult,
    combine_trials,
    load_trials,
    value_name,
)
from replaylake.offline.running.tuning.trial import TrialSpec

KIND: Final = "tune"
_NEEDS: Final = "tune: found no ray, expected it to run the trials"
_ORPHANS_S: Final = 60.0
_POLL_S: Final = 0.5


@dataclass(frozen=True)
class SweepStart:
    """What is known when a sweep begins or goes on.

    num_finished: trials that have ended before. concurrency: trials at once. remarks: what a person
    should know of the data.
    """

    sweep_id: str
    num_combinations: int
    num_seeds: int
    num_trials: int
    num_finished: int
    concurrency: int
    measure: str
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class TrialProgress:
    """A trial that was measured, or ended. updates: how many it is to make."""

    trial: TrialResult
    updates: int


def tune(
    lake: Lake,
    datasets: str | Sequence[str],
    config: TuneConfig,
    *,
    callbacks: Callbacks | None = None,
) -> SweepResult:
    """Train with every seed and combination of options, and compare the results.

    Args:
        lake: the lake of the datasets and the policies.
        datasets: as for `train`.
        config: the training in `config.train`, the options to vary, the seeds.
        callbacks: on_start (SweepStart), once before the first trial; on_progress (TrialProgress),
            when trials are measured and when they end.

    All trials train on the present versions of the datasets. Each trial is a run, which `runs list`
    shows, and registers a version of the policy. Ctrl-C and SIGTERM save checkpoints first. Cost:
    `concurrency` processes, each of which executes one trial after the other.

    Raises: ConfigInvalidError, NotFoundError, InvalidNameError, SchemaMismatchError,
    EmptyReplayError, SpaceUnsupportedError, ExtraMissingError before anything is trained;
    TrainingError if no trial finishes; RunInterrupted.
    """
    sweep = Sweep.of(datasets, config).pin(lake)
    checked = check_sweep(lake, sweep)
    sweep_id = new_ulid()
    with RunLease(lake.storage, sweep_id):
        record = RunRecord(lake.registry, sweep_id, _first_record(sweep, checked), kind=KIND)
        record.record_start()
        with record.record_errors():
            return _SweepRun(lake, sweep, record, callbacks or Callbacks()).run(checked.remarks)


def resume_sweep(lake: Lake, sweep_id: str, *, callbacks: Callbacks | None = None) -> SweepResult:
    """Resume a sweep that was killed or interrupted, or that has failed trials.

    Trials that are done or were stopped early are not repeated; the others resume from their
    checkpoints. Raises: NotFoundError if there is no such sweep; CommitConflictError while another
    process executes it; otherwise as `tune`.
    """
    find_run(lake.registry, sweep_id, kind=KIND)
    with RunLease(lake.storage, sweep_id):
        body = find_run(lake.registry, sweep_id, kind=KIND)
        sweep = Sweep.from_json(body["asked"])
        record = RunRecord(lake.registry, sweep_id, body, kind=KIND)
        with record.record_errors():
            record.record_resume(0)
            return _SweepRun(lake, sweep, record, callbacks or Callbacks()).run(())


def _first_record(sweep: Sweep, checked: CheckedSweep) -> dict[str, Any]:
    request = sweep.request
    pinned = [text.rpartition("@") for text in request.datasets]
    return {
        "policy": request.config.policy,
        "algorithm": request.config.algorithm,
        "datasets": [{"dataset": name, "version": int(version)} for name, _, version in pinned],
        "config": {"updates": request.config.updates},
        "asked": sweep.to_json(),
        "combinations": sweep.tune.combinations(),
        "measure": checked.measure,
        "mode": checked.mode,
        "stopped": [],
    }


class _SweepRun:
    """A sweep at work, and the Listener of its trials."""

    def __init__(self, lake: Lake, sweep: Sweep, record: RunRecord, callbacks: Callbacks) -> None:
        self._lake = lake
        self._sweep = sweep
        self._record = record
        self._callbacks = callbacks
        self._measure, self._mode = record.body["measure"], record.body["mode"]
        self._errors: dict[int, str] = {}
        self._trials = self._load_trials()
        cores = len(os.sched_getaffinity(0))
        limit = sweep.tune.concurrency or max(1, cores // sweep.tune.cpus_per_trial)
        self._concurrency = min(limit, len(self._trials))

    def run(self, remarks: tuple[str, ...]) -> SweepResult:
        """Run the trials that are left; return what came of all. Raises: RunInterrupted."""
        interruption = Interruption()
        with interruption.handle_signals():
            if self._callbacks.on_start is not None:
                self._callbacks.on_start(self._start(remarks))
            if any(trial.is_unfinished for trial in self._trials):
                self._run_remaining(interruption)
        return self._record_result()

    def on_measurement(self, number: int, update: int, value: float) -> None:
        """Hand on that a trial was measured."""
        trial = replace(self._trials[number], status="running", update=update, value=value)
        self._report_trial(trial)

    def on_trial_end(self, number: int, *, is_stopped: bool, error: str | None) -> None:
        """Write down that a trial was stopped, if it was, and hand on how it ended."""
        if is_stopped:
            # At once: should this process be killed, it is not begun again.
            stopped = {*self._record.body["stopped"], number}
            self._record.add_fields(stopped=sorted(stopped))
        if error is not None:
            self._errors[number] = error
        self._trials = self._load_trials()
        trial = self._trials[number]
        # What was asked to end with all others is neither.
        if trial.status in ("done", "stopped", "failed"):
            self._report_trial(trial)

    def _report_trial(self, trial: TrialResult) -> None:
        if self._callbacks.on_progress is not None:
            updates = self._sweep.trial_request(trial.options, trial.seed).config.updates
            self._callbacks.on_progress(TrialProgress(trial, updates))

    def _start(self, remarks: tuple[str, ...]) -> SweepStart:
        return SweepStart(
            sweep_id=self._record.run_id,
            num_combinations=len(self._record.body["combinations"]),
            num_seeds=len(self._sweep.tune.seeds),
            num_trials=len(self._trials),
            num_finished=sum(not trial.is_unfinished for trial in self._trials),
            concurrency=self._concurrency,
            measure=self._measure,
            remarks=remarks,
        )

    def _run_remaining(self, interruption: Interruption) -> None:
        config = self._sweep.tune
        num_gpus = torch.cuda.device_count() if config.gpus_per_trial else 0
        num_cpus = self._concurrency * config.cpus_per_trial
        with open_ray(_NEEDS, num_cpus, num_gpus) as ray:
            check_room(ray, 1, config.cpus_per_trial, config.gpus_per_trial, "trials")
            self._wait_for_orphans(interruption)
            for numbers, is_racing in self._phases():
                remaining = [number for number in numbers if self._trials[number].is_unfinished]
                if remaining and not interruption.is_requested:
                    run_trials(
                        [self._make_trial_spec(self._trials[number]) for number in remaining],
                        self,
                        concurrency=self._concurrency,
                        cpus=config.cpus_per_trial,
                        gpus=config.gpus_per_trial,
                        stopping=self._make_asha_config(numbers) if is_racing else None,
                        should_end=lambda: interruption.is_requested,
                        is_running=self._is_trial_running,
                    )
                self._trials = self._load_trials()
                if interruption.is_requested:
                    raise RunInterrupted(self._record.run_id, None)

    def _phases(self) -> list[tuple[range, bool]]:
        """Return the trials that may run at once, and whether ASHA compares them.

        Only one seed decides which options are stopped, so that each that is left has all of them,
        and none only those that it was lucky with.
        """
        num, first = len(self._trials), len(self._record.body["combinations"])
        if not self._sweep.tune.asha:
            return [(range(num), False)]
        return [(range(first), True), (range(first, num), False)]

    def _make_asha_config(self, numbers: Sequence[int]) -> EarlyStopping:
        selection = self._measure.removeprefix("selection/")
        config, trials = self._sweep.tune, [self._trials[number] for number in numbers]
        requests = [self._sweep.trial_request(trial.options, trial.seed) for trial in trials]
        over = [trial.run_id for trial in trials if trial.run_id and not trial.is_unfinished]
        curves = [read_curves(self._lake.storage, run_id).get(self._measure) for run_id in over]
        return EarlyStopping(
            mode=self._mode,
            grace_updates=config.grace_updates
            or min(r.config.measure_interval_updates(selection) for r in requests),
            updates=max(request.config.updates for request in requests),
            reduction=config.reduction,
            known=[
                list(zip(curve.updates.tolist(), curve.values.tolist(), strict=True))
                for curve in curves
                if curve is not None
            ],
        )

    def _make_trial_spec(self, trial: TrialResult) -> TrialSpec:
        label = {"id": self._record.run_id, "trial": trial.number, "options": dict(trial.options)}
        return TrialSpec(
            url=self._lake.url,
            number=trial.number,
            request=self._sweep.trial_request(trial.options, trial.seed),
            run_id=trial.run_id,
            sweep=label,
            measure=self._measure,
            mode=self._mode,
        )

    def _load_trials(self) -> list[TrialResult]:
        """Return the trials as the lake has them, and as this process knows them to have ended."""
        trials = load_trials(self._lake, self._record.run_id, self._sweep, self._record.body)
        for number, error in self._errors.items():
            if trials[number].status in ("waiting", "running"):
                trials[number] = replace(trials[number], status="failed", error=error)
        return trials

    def _is_trial_running(self) -> bool:
        self._trials = self._load_trials()
        return any(trial.status == "running" for trial in self._trials)

    def _wait_for_orphans(self, interruption: Interruption) -> None:
        """Let trials end whose sweep was killed: Ray's processes notice after some seconds."""
        deadline = time.monotonic() + _ORPHANS_S
        while any(t.status == "running" for t in self._trials) and time.monotonic() < deadline:
            if interruption.is_requested:
                raise RunInterrupted(self._record.run_id, None)
            time.sleep(_POLL_S)
            self._trials = self._load_trials()

    def _record_result(self) -> SweepResult:
        """Write down what came of the trials. Raises: TrainingError, ConfigInvalidError."""
        trials, sweep_id = self._trials, self._record.run_id
        finished = [trial for trial in trials if trial.status == "done"]
        if not finished:
            errors = [trial.error for trial in trials if trial.error]
            raise TrainingError(
                f"sweep {sweep_id}: found no trial of {len(trials)} that finished "
                f"({errors[0] if errors else 'none failed'}), expected one or more. "
                "`replaylake runs list` shows them."
            )
        value = value_name(self._measure)
        if all(trial.value is None for trial in finished):
            raise self._unknown_measure_error(finished[0], value)
        result = SweepResult(
            sweep_id=sweep_id,
            measure=self._measure,
            value=value,
            mode=self._mode,
            trials=tuple(trials),
            combinations=combine_trials(trials, self._mode),
        )
        best = result.best
        ended = {
            "best": None if best is None else asdict(best),
            "results": [asdict(one) for one in result.combinations],
            "num_failed": sum(trial.status == "failed" for trial in trials),
        }
        self._record.add_fields(**self._record.to_finished(ended))
        return result

    def _unknown_measure_error(self, trial: TrialResult, value: str) -> ConfigInvalidError:
        known = [] if trial.run_id is None else [*read_curves(self._lake.storage, trial.run_id)]
        return ConfigInvalidError(
            f"tune: measure: found no number of {value!r} in {trial.run_id}, expected "
            f"{near_matches(value, known)}. `replaylake runs show` has a run's metrics."
        )


@dataclass(frozen=True)
class CheckedSweep:
    """A sweep that can be run.

    measure, mode: what its trials are compared by, and whether more of it is better. remarks: what
    a person should know of the data.
    """

    measure: str
    mode: Mode
    remarks: tuple[str, ...]


def check_sweep(lake: Lake, sweep: Sweep) -> CheckedSweep:
    """Refuse what not every trial could train. Cost: the data are decoded once.

    sweep: pinned. Raises: ConfigInvalidError, NotFoundError, InvalidNameError, SchemaMismatchError,
    EmptyReplayError, SpaceUnsupportedError, QueryRefusedError, QueryError, ExtraMissingError.
    """
    seed, grace = sweep.tune.seeds[0], sweep.tune.grace_updates
    requests = [sweep.trial_request(options, seed) for options in sweep.tune.combinations()]
    first = requests[0]
    spec = lake.snapshot(first.datasets[0]).spec
    for config in (request.config for request in requests):
        check_options(config.algorithm, spec.action_space, config.options, others=near_options())
        if sweep.tune.asha and grace is not None and grace > config.updates:
            raise ConfigInvalidError(
                f"tune: grace_updates: found {grace}, expected at most the {config.updates} "
                "updates of a trial: none would be stopped."
            )
    data = open_data(lake, first)
    measure, mode = resolve_measure(sweep.tune, data.measure)
    if sweep.tune.asha and measure.startswith("evaluation/"):
        raise ConfigInvalidError(
            f"tune: measure: found {measure!r} with asha, expected a metric that is measured "
            "during a run, such as 'selection/environment': that one is measured only at the end."
        )
    facts = fit_statistics(
        data.snapshots, data.where, first.config.where_steps, first.config.reward
    )
    for config in (request.config for request in requests):
        # What options are worth only their learner knows; it costs milliseconds.
        make_learner(
            config.algorithm,
            spec.observation_space,
            spec.action_space,
            options=config.options,
            seed=config.seed,
            discount=config.discount,
            device=config.device,
            facts=facts,
        )
    return CheckedSweep(measure, mode, data.remarks)
