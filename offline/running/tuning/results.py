"""Results: what came of a sweep's trials, as the lake's records of their runs say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.runs.lease import is_active
from replaylake.datastore.lake.runs.metrics import read_curves
from replaylake.datastore.lake.runs.summary import EVALUATION, SELECTION, best_point
from replaylake.offline.evaluation.intervals import student_t_interval
from replaylake.offline.running.tuning.config import Mode, Sweep

# waiting: not begun, or to be gone on with. stopped: by ASHA. skipped: as those options were.
TrialStatus = Literal["waiting", "running", "done", "stopped", "skipped", "failed"]


@dataclass(frozen=True)
class TrialResult:
    """One trial: options under a seed.

    combination: the number of its options among the sweep's. value: of the policy that it
    registered or, where it is not done, the best that was measured so far.
    """

    number: int
    combination: int
    options: Mapping[str, Any]
    seed: int
    status: TrialStatus
    run_id: str | None = None
    update: int | None = None
    value: float | None = None
    policy: str | None = None
    error: str | None = None

    @property
    def is_unfinished(self) -> bool:
        """Whether there is something of it to run, or to run again."""
        return self.status in ("waiting", "running", "failed")


@dataclass(frozen=True)
class Combination:
    """What options are worth: the mean over the seeds that are done, and its 95% interval.

    ci_low, ci_high: by Student's t; None for fewer than two seeds. policy: the version that the
    best of its seeds registered, None before one is done. difference: the mean over the seeds of
    its value minus that of the best combination under the same seed, with its interval; None for
    the best itself, and where no combination is the best.
    """

    number: int
    options: Mapping[str, Any]
    num_done: int
    num_seeds: int
    mean: float | None
    ci_low: float | None
    ci_high: float | None
    policy: str | None
    seed: int | None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether it was trained under every seed."""
        return self.num_done == self.num_seeds


@dataclass(frozen=True)
class SweepResult:
    """What a sweep found.

    measure: what the trials were compared by on their way, mode: whether more of it is better.
    value: what the numbers are; the closing evaluation's return where policies were chosen by
    returns, as the best of several noisy numbers is too good by chance. combinations: the best
    first, those that lack a seed last. best: the first of them, None where none is whole.
    """

    sweep_id: str
    measure: str
    value: str
    mode: Mode
    trials: tuple[TrialResult, ...]
    combinations: tuple[Combination, ...]

    @property
    def best(self) -> Combination | None:
        """The combination with the best mean of those trained under every seed."""
        first = self.combinations[0]
        return first if first.is_complete and first.mean is not None else None

    def to_json(self) -> dict[str, Any]:
        body = asdict(self)
        best = self.best
        return body | {"best": None if best is None else asdict(best)}


def load_trials(
    lake: Lake, sweep_id: str, sweep: Sweep, record: Mapping[str, Any]
) -> list[TrialResult]:
    """Return every trial of a sweep, as far as it is. Cost: the metrics of those not done."""
    runs = find_trial_runs(lake, sweep_id)
    stopped = set(record.get("stopped", ()))
    combinations, seeds = record["combinations"], sweep.tune.seeds
    # The first seed of all options comes first: that is what decides which are stopped.
    points = [(i, seed) for seed in seeds for i in range(len(combinations))]
    trials: list[TrialResult] = []
    for number, (i, seed) in enumerate(points):
        trial = TrialResult(number, i, combinations[i], seed, "waiting")
        run = runs.get(number)
        if run is not None:
            trial = _load_trial(lake, trial, run, record, is_stopped=number in stopped)
        elif sweep.tune.asha and number > i and trials[i].status in ("stopped", "failed"):
            trial = replace(trial, status="skipped")
        trials.append(trial)
    return trials


def find_trial_runs(lake: Lake, sweep_id: str) -> dict[int, Mapping[str, Any]]:
    """Return the record of each trial's run, the newest if there are more, by trial."""
    labeled = [
        run for run in lake.registry.runs() if (run.get("sweep") or {}).get("id") == sweep_id
    ]
    return {run["sweep"]["trial"]: run for run in labeled}


def combine_trials(trials: Sequence[TrialResult], mode: Mode) -> tuple[Combination, ...]:
    """Return the combinations with their means and differences, the best first."""
    numbers = dict.fromkeys(trial.combination for trial in trials)
    combinations = [
        _summarize_combination([trial for trial in trials if trial.combination == number], mode)
        for number in numbers
    ]
    sign = 1 if mode == "min" else -1

    def rank(one: Combination) -> tuple[bool, float]:
        return (
            not one.is_complete or one.mean is None,
            math.inf if one.mean is None else sign * one.mean,
        )

    ordered = sorted(combinations, key=rank)
    best = ordered[0]
    if not best.is_complete or best.mean is None:
        return tuple(ordered)
    return (best, *(_compare_combinations(one, best, trials) for one in ordered[1:]))


def _compare_combinations(
    one: Combination, best: Combination, trials: Sequence[TrialResult]
) -> Combination:
    """Return a combination with its difference from the best.

    Paired by seed, as that leaves out what varies with the seed under all options.
    """
    values = {
        (trial.combination, trial.seed): trial.value for trial in trials if trial.status == "done"
    }
    differences = []
    for seed in dict.fromkeys(trial.seed for trial in trials):
        its, of_best = values.get((one.number, seed)), values.get((best.number, seed))
        if its is not None and of_best is not None:
            differences.append(its - of_best)
    if not differences:
        return one
    mean, low, high = student_t_interval(differences)
    return replace(one, difference=mean, difference_low=low, difference_high=high)


def value_name(measure: str) -> str:
    """Return what a trial that is done is compared by."""
    return EVALUATION if measure == f"{SELECTION}environment" else measure


def _summarize_combination(trials: Sequence[TrialResult], mode: Mode) -> Combination:
    first = trials[0]
    done = [trial for trial in trials if trial.status == "done" and trial.value is not None]
    known = Combination(
        first.combination, first.options, len(done), len(trials), None, None, None, None, None
    )
    if not done:
        return known
    mean, low, high = student_t_interval([_number(trial) for trial in done])
    best = max(done, key=lambda trial: _number(trial) if mode == "max" else -_number(trial))
    return Combination(
        known.number, known.options, len(done), len(trials), mean, low, high, best.policy, best.seed
    )


def _number(trial: TrialResult) -> float:
    assert trial.value is not None, "of those that are done, only measured ones are combined"
    return trial.value


def _load_trial(
    lake: Lake,
    trial: TrialResult,
    run: Mapping[str, Any],
    sweep_record: Mapping[str, Any],
    *,
    is_stopped: bool,
) -> TrialResult:
    """Return a trial as the record of its run says it is."""
    measure, mode = sweep_record["measure"], sweep_record["mode"]
    status = _status(lake, run, is_stopped)
    trial = replace(trial, run_id=run["run_id"], status=status)
    if status == "done":
        policy = f"{run['policy']}:{run['policy_version']}"
        value = _value_of_done(lake, run, measure)
        return replace(trial, policy=policy, value=value, update=run["update"])
    curve = read_curves(lake.storage, run["run_id"]).get(measure)
    best = None if curve is None else best_point(curve, higher_is_better=mode == "max")
    update, value = best or (None, None)
    error = run.get("error") if status == "failed" else None
    return replace(trial, update=update, value=value, error=error)


def _status(lake: Lake, run: Mapping[str, Any], is_stopped: bool) -> TrialStatus:
    status = run["status"]
    if status == "done" or status == "failed":
        return "done" if status == "done" else "failed"
    if is_stopped:
        return "stopped"
    return "running" if is_active(lake.storage, run["run_id"]) else "waiting"


def _value_of_done(lake: Lake, run: Mapping[str, Any], measure: str) -> float | None:
    name = value_name(measure)
    if name == EVALUATION:
        evaluation = run["evaluation"]
        return None if evaluation is None else float(evaluation["mean_return"])
    if measure.startswith(SELECTION):
        value = run["selection"]["value"]
        return None if value is None else float(value)
    curve = read_curves(lake.storage, run["run_id"]).get(measure)
    if curve is None or not len(curve.values) or not math.isfinite(curve.values[-1]):
        return None
    return float(curve.values[-1])
