"""Sweep: the trials of `replaylake tune`, each a line through its options to its value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from replaylake.datastore.lake.runs.metrics import read_curves
from replaylake.datastore.lake.runs.summary import (
    EVALUATION,
    SELECTION,
    RunSummary,
    best_point,
    summarize,
)
from replaylake.serve.explorer.visits.page import Panel, draw_empty
from replaylake.serve.explorer.visits.visit import Visit
from replaylake.serve.pages.charts import (
    Interval,
    ParallelAxis,
    ParallelLine,
    interval_chart,
    parallel_chart,
)
from replaylake.serve.pages.markup import Child, Markup, tag
from replaylake.serve.pages.tables import Column, quiet_number, table
from replaylake.serve.pages.texts import number_text, short_number

_MAX_LINES: Final = 500
# Options over so many times their least value have a logarithmic axis.
_LOGARITHMIC: Final = 100
_MAX_NAMED: Final = 4
_MAX_COMPARED: Final = 40
# A longer table scrolls by itself.
_MAX_ROWS: Final = 24


@dataclass(frozen=True)
class _Trial:
    number: int
    options: Mapping[str, Any]
    run: RunSummary
    value: float | None


def draw_sweep(visit: Visit, record: Mapping[str, Any]) -> list[Panel]:
    """Return the panels of a sweep's trials; none for another run's record."""
    combinations, measure = record.get("combinations"), record.get("measure")
    if not isinstance(combinations, list) or not isinstance(measure, str):
        return []
    trials = _load_trials(visit, str(record["run_id"]), measure, str(record.get("mode")))
    if not trials:
        return [Panel("Trials", draw_empty("No trial of this sweep has begun."))]
    names = list(dict.fromkeys(name for one in combinations for name in one))
    is_less_better = record.get("mode") == "min"
    known = [trial.value for trial in trials if trial.value is not None]
    best = (min if is_less_better else max)(known, default=None)
    better = "less" if is_less_better else "more"
    label = EVALUATION if measure == f"{SELECTION}environment" else measure
    note = (
        f"Each line is a trial, from its options to its value by {label}, of which {better} is "
        "better; the best is drawn thick. A trial that is not done has its best value so far. The "
        "best of many is partly the best by chance."
    )
    axes = [_make_axis(name, [trial.options.get(name) for trial in trials]) for name in names]
    axes.append(_make_axis(label, [trial.value for trial in trials]))
    lines = []
    for trial in trials[:_MAX_LINES]:
        values = [*(trial.options.get(name) for name in names), trial.value]
        lines.append(
            ParallelLine(
                [axis.place(value) for axis, value in zip(axes, values, strict=True)],
                _describe(trial, label),
                visit.link("runs", trial.run.run_id),
                _strength(trial.value, known, is_less_better=is_less_better),
                is_best=trial.value is not None and trial.value == best,
            )
        )
    if len(trials) > _MAX_LINES:
        note += f" The first {_MAX_LINES} of {len(trials):,} trials are drawn."
    chart = parallel_chart([axis.drawn for axis in axes], lines, label="Trials")
    panel = Panel("Trials", [chart, _list_trials(visit, trials, names, label)], note=note)
    return [panel, *_compare_options(record, label, is_less_better=is_less_better)]


def _compare_options(record: Mapping[str, Any], label: str, *, is_less_better: bool) -> list[Panel]:
    """Draw the differences of all options from the best ones, as the sweep saved them."""
    results = record.get("results")
    if not isinstance(results, list) or len(results) < 2:
        return []
    best, *others = results
    rows = []
    for one in others:
        value, low, high = (
            one.get(key) for key in ("difference", "difference_low", "difference_high")
        )
        if value is None or not math.isfinite(value):
            continue
        text = short_number(value)
        if low is None or high is None:
            low = high = None
            text += ", no interval"
        else:
            text += f" ({short_number(low)} to {short_number(high)})"
        rows.append(Interval(_name_options(one.get("options") or {}), value, low, high, text))
    if not rows:
        return []
    better = "below" if is_less_better else "above"
    note = (
        "Mean over the seeds, paired by seed, with its 95% interval by Student's t; "
        f"{better} the line would be better. The intervals are not tests: the best was chosen by "
        "the same values, so differences from it are too large on average, and with many equal "
        "options most sweeps have an interval beside the line. Repeat the best few with new seeds."
    )
    chart = interval_chart(
        rows[:_MAX_COMPARED],
        label=f"{label} minus that of the best: {_name_options(best.get('options') or {})}",
        reference=("no difference", 0.0),
    )
    if len(rows) > _MAX_COMPARED:
        note += f" The best {_MAX_COMPARED} of {len(rows):,} are drawn."
    return [Panel("Differences from the best options", chart, note=note)]


def _name_options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_name(value)}" for name, value in options.items()) or "no options"


def _load_trials(visit: Visit, sweep_id: str, measure: str, mode: str) -> list[_Trial]:
    """Return the trials that have a run, by number; of several runs of one the newest counts."""
    storage = visit.lake.storage
    records: dict[int, Mapping[str, Any]] = {}
    for one in visit.lake.registry.runs():
        label = one.get("sweep") or {}
        if label.get("id") == sweep_id:
            records[int(label["trial"])] = one
    trials = []
    for number, record in sorted(records.items()):
        run = summarize(storage, record)
        value = None
        evaluation = record.get("evaluation")
        if measure == f"{SELECTION}environment" and evaluation is not None:
            value = float(evaluation["mean_return"])
        elif run.measure == measure.removeprefix(SELECTION) and run.best is not None:
            value = run.best
        elif (curve := read_curves(storage, run.run_id).get(measure)) is not None:
            point = best_point(curve, higher_is_better=mode != "min")
            value = None if point is None else point[1]
        is_known = value is not None and math.isfinite(value)
        options = record["sweep"].get("options") or {}
        trials.append(_Trial(number, options, run, value if is_known else None))
    return trials


@dataclass(frozen=True)
class _Axis:
    """Where values are on an axis: from low to high, or names one above the other."""

    drawn: ParallelAxis
    low: float = 0.0
    high: float = 1.0
    is_log: bool = False
    names: tuple[str, ...] = ()

    def place(self, value: Any) -> float | None:
        """Return the height of a value from 0 to 1; None where there is none."""
        if value is None:
            return None
        if self.names:
            return (self.names.index(_name(value)) + 0.5) / len(self.names)
        if self.low == self.high:
            return 0.5
        low, high, number = self.low, self.high, float(value)
        if self.is_log:
            low, high, number = math.log(low), math.log(high), math.log(number)
        return (number - low) / (high - low)


def _make_axis(name: str, values: Sequence[Any]) -> _Axis:
    known = [value for value in values if value is not None]
    if known and all(_is_number(value) for value in known):
        low, high = float(min(known)), float(max(known))
        is_log = low > 0 and high / low >= _LOGARITHMIC
        title = f"{name} (log)" if is_log else name
        return _Axis(ParallelAxis(title, number_text(high), number_text(low)), low, high, is_log)
    names = tuple(dict.fromkeys(_name(value) for value in known))
    if len(names) > 1 and len(names) <= _MAX_NAMED:
        return _Axis(ParallelAxis(name, names[-1], ", ".join(names[:-1])), names=names)
    high_text = names[-1] if names else ""
    return _Axis(ParallelAxis(name, high_text, names[0] if len(names) > 1 else ""), names=names)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _name(value: Any) -> str:
    if _is_number(value):
        return number_text(value)
    return value if isinstance(value, str) else json.dumps(value)


def _strength(value: float | None, known: Sequence[float], *, is_less_better: bool) -> float:
    """Return from 0 to 1 how good a value is among all; 0 without one."""
    if value is None or max(known) == min(known):
        return 0.0
    share = (value - min(known)) / (max(known) - min(known))
    return 1 - share if is_less_better else share


def _describe(trial: _Trial, label: str) -> str:
    options = _name_options(trial.options)
    value = "no value yet" if trial.value is None else f"{label} {number_text(trial.value)}"
    return f"trial {trial.number}: {options}, seed {trial.run.seed}: {value}"


def _list_trials(
    visit: Visit, trials: Sequence[_Trial], names: Sequence[str], measure: str
) -> Markup:
    rows: list[list[Child]] = [
        [
            tag("a", str(trial.number), href=visit.link("runs", trial.run.run_id)),
            *(_name(trial.options.get(name)) for name in names),
            "" if trial.run.seed is None else str(trial.run.seed),
            trial.run.status,
            quiet_number(trial.value),
            trial.run.policy or "",
        ]
        for trial in trials
    ]
    columns: list[Column | str] = [
        Column("Trial", is_number=True),
        *names,
        Column("Seed", is_number=True),
        "Status",
        Column(measure, is_number=True),
        "Policy",
    ]
    label = "Trials of the sweep"
    return table(columns, rows, label=label, is_tall=len(rows) > _MAX_ROWS)
