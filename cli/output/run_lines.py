"""What `replaylake runs` prints: tables of runs, options and metrics, and curves as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from replaylake.cli.output.command_output import number_text, table_lines, tree_lines
from replaylake.cli.output.progress import time_left

if TYPE_CHECKING:
    from replaylake.datastore.lake.runs.metrics import Curve
    from replaylake.datastore.lake.runs.summary import RunSummary

COLUMNS: Final = (
    "run_id",
    "status",
    "algorithm",
    "datasets",
    "env_steps",
    "updates",
    "return",
    "staleness",
    "measure",
    "best",
    "policy",
    "started_at",
    "took",
)
# Of runs that collect; a table without any has no such columns.
_ONLINE: Final = ("env_steps", "return", "staleness")
Curves = Mapping[str, "Curve"]
# Of a record, what is said above it, or drawn below.
_SHOWN_ELSEWHERE: Final = (
    "run_id",
    "kind",
    "status",
    "algorithm",
    "policy",
    "policy_version",
    "dataset",
    "env_id",
    "num_steps",
    "num_updates",
    "mean_return",
    "staleness",
    "update",
    "metrics",
    "selection",
    "evaluation",
    "request",
    "started_ms",
    "ended_ms",
    "error",
)


def record_lines(fields: Mapping[str, Any], indent: str) -> list[str]:
    """Return a run's record or a policy's lineage as a tree, with its holdout in words."""
    from replaylake.datastore.lake.holdout import describe_where

    datasets = [
        {**one, "where": describe_where(one["where"])} if one.get("where") else one
        for one in fields.get("datasets") or ()
    ]
    return tree_lines({**fields, "datasets": datasets} if datasets else fields, indent)


def run_row(summary: RunSummary) -> dict[str, Any]:
    return {
        **summary.to_json(),
        "datasets": " ".join(summary.datasets),
        "env_steps": _format_reached(summary.env_steps, summary.steps),
        "updates": _format_reached(summary.update, summary.updates),
        "return": summary.mean_return,
        "started_at": time_text(summary.started_ms),
        "took": None if summary.duration_s is None else time_left(summary.duration_s),
    }


def select_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns of a table of runs."""
    return [
        column
        for column in COLUMNS
        if column not in _ONLINE or any(row[column] not in (None, "") for row in rows)
    ]


def _format_reached(done: int | None, limit: int | None) -> str:
    reached = number_text(done) if done is not None else ""
    return reached + (f"/{limit:,}" if limit is not None else "")


def run_lines(
    summary: RunSummary, body: Mapping[str, Any], curves: Curves, names: Sequence[str], drawn: bool
) -> Iterator[str]:
    row = run_row(summary)
    yield f"{summary.run_id}  {summary.status}"
    for key in (
        "algorithm",
        "env",
        "datasets",
        "env_steps",
        "updates",
        "policy",
        "started_at",
        "took",
    ):
        if row[key]:
            yield f"  {key.ljust(12)}{row[key]}"
    if summary.mean_return is not None:
        yield f"  {'return'.ljust(12)}{number_text(summary.mean_return)} of its last episodes"
    if summary.staleness is not None:
        yield f"  {'staleness'.ljust(12)}{number_text(summary.staleness)} versions"
    if summary.measure is not None and summary.best is not None:
        at = "" if summary.best_update is None else f" after update {summary.best_update:,}"
        yield f"  {'best'.ljust(12)}{number_text(summary.best)} by {summary.measure}{at}"
    evaluation = body["record"].get("evaluation")
    if evaluation:
        yield f"  {'evaluation'.ljust(12)}{number_text(evaluation['mean_return'])}"
    if body["checkpoints"]:
        updates = ", ".join(f"{update:,}" for update in body["checkpoints"])
        yield f"  {'checkpoints'.ljust(12)}{updates}"
    if error := body["record"].get("error"):
        yield f"  {'error'.ljust(12)}{' '.join(str(error).split())}"
    yield "  record"
    fields = {key: value for key, value in body["record"].items() if key not in _SHOWN_ELSEWHERE}
    yield from record_lines(fields, "    ")
    for name in names if drawn else names[:1]:
        yield ""
        yield from _plot_lines(name, [curves[name]], mark=find_selected_update(body["record"]))
    if names and not drawn:
        yield ""
        yield from _sparklines(curves, names)


def _plot_lines(
    name: str, curves: Sequence[Curve | None], mark: int | None = None
) -> Iterator[str]:
    from replaylake.cli.output.text_plot import curve_letters, text_plot

    yield name
    marks = curve_letters(len(curves))
    points = {
        letter: (one.updates, one.values)
        for letter, one in zip(marks, curves, strict=True)
        if one is not None
    }
    yield from text_plot(points, mark=mark, is_lone=len(curves) == 1)


def _sparklines(curves: Curves, names: Sequence[str]) -> Iterator[str]:
    from replaylake.cli.output.text_plot import sparkline

    rows = [
        {"metric": name, "curve": sparkline(curves[name].values), **about(curves[name], name)}
        for name in names
    ]
    yield from table_lines(rows, ("metric", "curve", "last", "best", "best_update"))


def about(curve: Curve | None, name: str) -> dict[str, Any]:
    """Return the last value of a metric, and its best where one can be told by its name."""
    from replaylake.datastore.lake.runs.summary import SELECTION, best_point, is_loss

    if curve is None or not len(curve.values):
        return {"last": None, "best": None, "best_update": None}
    point = None
    if is_loss(name) or name.startswith((SELECTION, "evaluation/")) or name == "return":
        point = best_point(curve, higher_is_better=not is_loss(name))
    update, best = point or (None, None)
    return {"last": float(curve.values[-1]), "best": best, "best_update": update}


def comparison_lines(
    summaries: Sequence[RunSummary],
    options: Mapping[str, Sequence[Any]],
    metrics: Mapping[str, Sequence[Mapping[str, Any]]],
    curves: Sequence[Curves],
    drawn: bool,
) -> Iterator[str]:
    from replaylake.cli.output.text_plot import curve_letters

    marks = curve_letters(len(summaries))
    rows = [{"": mark, **run_row(one)} for mark, one in zip(marks, summaries, strict=True)]
    yield from table_lines(rows, ("", *select_columns(rows)))
    yield ""
    if options:
        rows = [
            {"option": name, **{mark: _text(v) for mark, v in zip(marks, values, strict=True)}}
            for name, values in options.items()
        ]
        yield from table_lines(rows, ("option", *marks))
    else:
        yield "asked for the same"
    rows = [
        {"metric": f"{name} {what}", **dict(zip(marks, [one[key] for one in by_run], strict=True))}
        for name, by_run in metrics.items()
        for key, what in (("last", "(last)"), ("best", "(best)"))
        if any(one[key] is not None for one in by_run)
    ]
    if rows:
        yield ""
        yield from table_lines(rows, ("metric", *marks))
    shared = [name for name in metrics if drawn or sum(name in one for one in curves) > 1]
    for name in shared if drawn else shared[:1]:
        yield ""
        yield from _plot_lines(name, [one.get(name) for one in curves])


def _text(value: Any) -> Any:
    """Return an option's value as a table shows it: a number as a number, a list as it is."""
    return str(value) if isinstance(value, list | tuple) else value


def find_selected_update(record: Mapping[str, Any]) -> int | None:
    """Return the update whose policy was registered, if one was chosen by a measure."""
    if (selection := record.get("selection") or {}).get("measure") in (None, "last"):
        return None
    update: int | None = selection.get("update")
    return update


def time_text(milliseconds: int | None) -> str | None:
    if milliseconds is None:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")
