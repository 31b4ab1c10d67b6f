"""Forest plots: values with intervals and their differences, and pass@k of policies, as images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from replaylake.cli.output.plots import STYLE, shorten_name, simplify_axes
from replaylake.datastore.storage.storage import atomic_write

if TYPE_CHECKING:
    from replaylake.offline.evaluation.ope.evaluation_request import PolicyReport
    from replaylake.offline.evaluation.task_sets.task_set import TaskSetReport
    from replaylake.offline.running.tuning.results import Combination, SweepResult

_LOG = "#9aa3ad"
_VALUE = "#0072B2"
# Told apart with any kind of color vision (Okabe & Ito 2008).
_POLICIES = (_VALUE, "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_PASS = "pass@"


def draw_estimates(path: Path, report: PolicyReport) -> None:
    """Draw each estimate and its difference from the log, and how the weights are spread.

    Raises: StorageError.
    """
    estimates = report.estimates.estimates
    weights = report.count_weights()
    has_weights = weights is not None
    with mpl.rc_context({**STYLE, "font.size": 9}):
        figure = Figure(
            figsize=(12.6 if has_weights else 9.4, 1.7 + 0.34 * len(estimates)),
            layout="constrained",
            dpi=130,
        )
        grid = figure.subplots(1, 2 + has_weights, squeeze=False).ravel()
        _forest(grid[0], report)
        _differences(grid[1], report)
        if weights is not None:
            _weights(grid[2], weights)
        name = report.policy["policy"] or report.policy["target_prob"]
        title = (
            f"{shorten_name(str(name), 40)} on {report.dataset}@{report.version}: {report.verdict}"
        )
        figure.suptitle(title, fontsize=9.5, x=0.01, ha="left")
        with atomic_write(path) as file:
            figure.savefig(file, format=path.suffix.lower().lstrip("."))


def draw_combinations(path: Path, result: SweepResult) -> None:
    """Draw the mean of each combination of a sweep, and its difference from the best.

    Raises: StorageError.
    """
    combinations = [one for one in result.combinations if one.mean is not None]
    with mpl.rc_context({**STYLE, "font.size": 9}):
        figure = Figure(figsize=(9.4, 1.7 + 0.3 * len(combinations)), layout="constrained", dpi=130)
        means, differences = figure.subplots(1, 2, squeeze=False).ravel()
        _means(means, combinations)
        _combination_differences(differences, combinations)
        better = "more" if result.mode == "max" else "less"
        means.set_xlabel(f"{result.value}, {better} is better;\nmean over the seeds, 95% interval")
        figure.suptitle(f"sweep {result.sweep_id}", fontsize=9.5, x=0.01, ha="left")
        with atomic_write(path) as file:
            figure.savefig(file, format=path.suffix.lower().lstrip("."))


def draw_task_set(path: Path, report: TaskSetReport) -> None:
    """Draw pass@k by k with a band for each policy, and the differences from the first.

    Raises: StorageError.
    """
    others = report.policies[1:]
    with mpl.rc_context({**STYLE, "font.size": 9}):
        figure = Figure(figsize=(9.4 if others else 5.2, 3.4), layout="constrained", dpi=130)
        grid = figure.subplots(1, 1 + bool(others), squeeze=False).ravel()
        _pass_rates(grid[0], report)
        if others:
            _task_differences(grid[1], report)
        title = (
            f"{report.dataset}@{report.version}, {len(report.policies[0].samples.tasks):,} tasks"
        )
        figure.suptitle(title, fontsize=9.5, x=0.01, ha="left")
        with atomic_write(path) as file:
            figure.savefig(file, format=path.suffix.lower().lstrip("."))


def _means(axes: Any, combinations: Sequence[Combination]) -> None:
    names = []
    for place, one in enumerate(combinations):
        if one.ci_low is not None:
            axes.plot([one.ci_low, one.ci_high], [place, place], color=_VALUE, linewidth=1.6)
        axes.plot([one.mean], [place], "o", color=_VALUE, markersize=4.5)
        options = ", ".join(f"{name}={value}" for name, value in one.options.items())
        names.append(shorten_name(options or "no options", 48))
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.locator_params(axis="x", nbins=5)
    simplify_axes(axes)


def _combination_differences(axes: Any, combinations: Sequence[Combination]) -> None:
    """Draw values minus those of the best, paired by seed, against 0."""
    axes.axvline(0.0, color=_LOG, linewidth=1.2)
    for place, one in enumerate(combinations):
        if one.difference is None:
            continue
        if one.difference_low is not None:
            ends = [one.difference_low, one.difference_high]
            axes.plot(ends, [place, place], color=_VALUE, linewidth=1.6)
        axes.plot([one.difference], [place], "o", color=_VALUE, markersize=4.5)
    # The names are those of the panel beside it.
    axes.set_yticks(range(len(combinations)), [])
    axes.invert_yaxis()
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel("difference from the best,\npaired by seed, 95% interval")
    simplify_axes(axes)


def _pass_rates(axes: Any, report: TaskSetReport) -> None:
    for number, one in enumerate(report.policies):
        color = _POLICIES[number % len(_POLICIES)]
        rates = [measure for measure in one.measures if measure.name.startswith(_PASS)]
        ks = [int(measure.name.removeprefix(_PASS)) for measure in rates]
        ends = [(measure.estimate.low, measure.estimate.high) for measure in rates]
        if len(ks) > 1:
            axes.fill_between(ks, *zip(*ends, strict=True), color=color, alpha=0.15, linewidth=0)
        else:
            axes.plot([ks[0], ks[0]], ends[0], color=color, linewidth=1.6)
        name = shorten_name(str(one.samples.policy), 30)
        values = [measure.estimate.value for measure in rates]
        axes.plot(ks, values, color=color, marker="o", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda k, _: f"{k:g}")
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel(f"k; band: {report.request.level:.0%} interval over tasks")
    axes.set_ylabel("pass@k")
    axes.legend(frameon=False, fontsize=8)
    simplify_axes(axes)


def _task_differences(axes: Any, report: TaskSetReport) -> None:
    """Draw differences of pass@k from the first policy, paired by task, against 0."""
    axes.axvline(0.0, color=_LOG, linewidth=1.2)
    names: list[str] = []
    for number, one in enumerate(report.policies[1:], start=1):
        color = _POLICIES[number % len(_POLICIES)]
        for measure in one.measures:
            other = measure.difference
            if other is None or not measure.name.startswith(_PASS):
                continue
            place = len(names)
            axes.plot([other.low, other.high], [place, place], color=color, linewidth=1.6)
            axes.plot([other.value], [place], "o", color=color, markersize=4.5)
            names.append(f"{shorten_name(str(one.samples.policy), 20)} {measure.name}")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    first = shorten_name(str(report.policies[0].samples.policy), 30)
    axes.set_xlabel(f"difference from {first},\npaired by task")
    simplify_axes(axes)


def _forest(axes: Any, report: PolicyReport) -> None:
    log = report.estimates.log_interval
    axes.axvspan(log.low, log.high, color=_LOG, alpha=0.25, linewidth=0)
    axes.axvline(report.estimates.log_mean, color=_LOG, linewidth=1.2)
    names = []
    for place, one in enumerate(report.estimates.estimates):
        if one.ci_low is not None:
            axes.plot([one.ci_low, one.ci_high], [place, place], color=_VALUE, linewidth=1.6)
        # Hollow where a model alone speaks, which has no interval.
        inside = _VALUE if one.max_weight is not None else "white"
        axes.plot([one.value], [place], "o", color=_VALUE, markerfacecolor=inside, markersize=4.5)
        names.append(one.estimator)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    percent = f"{report.request.level:.0%}"
    fitted = "; propensities fitted" if report.diagnostics.behavior_fitted else ""
    axes.set_xlabel(
        f"value, {percent} interval{fitted}\nhollow: model alone, no interval; grey: the log's mean"
    )
    simplify_axes(axes)


def _differences(axes: Any, report: PolicyReport) -> None:
    """Draw values minus the log's own mean, paired by episode, against 0."""
    axes.axvline(0.0, color=_LOG, linewidth=1.2)
    for place, one in enumerate(report.estimates.estimates):
        if one.difference_low is not None:
            ends = [one.difference_low, one.difference_high]
            axes.plot(ends, [place, place], color=_VALUE, linewidth=1.6)
        inside = _VALUE if one.max_weight is not None else "white"
        axes.plot(
            [one.difference], [place], "o", color=_VALUE, markerfacecolor=inside, markersize=4.5
        )
    # The names are those of the panel beside it.
    axes.set_yticks(range(len(report.estimates.estimates)), [])
    axes.invert_yaxis()
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel("difference from the log's mean,\npaired by episode")
    simplify_axes(axes)


def _weights(axes: Any, weights: Mapping[str, Any]) -> None:
    """Draw a histogram of weights above 0, in powers of ten: they span many."""
    if weights["counts"]:
        axes.stairs(weights["counts"], weights["edges"], color=_VALUE, fill=True)
        axes.set_xscale("log")
    num = sum(weights["counts"]) + weights["num_zero"]
    axes.set_xlabel(f"weights; {weights['num_zero'] / num:.1%} are 0")
    axes.set_ylabel("episodes")
    simplify_axes(axes)
