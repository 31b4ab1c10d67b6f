"""`replaylake runs`: training runs, their learning curves, and what sets them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylake.cli.name_completion import complete_runs
from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput, table_lines
from replaylake.cli.output.run_lines import (
    Curves,
    about,
    comparison_lines,
    find_selected_update,
    run_lines,
    run_row,
    select_columns,
    time_text,
)

if TYPE_CHECKING:
    from replaylake.datastore.lake.runs.metrics import Curve
    from replaylake.datastore.lake.runs.summary import RunSummary

MetricOption = Annotated[
    list[str] | None,
    typer.Option("--metric", metavar="NAME", help="Metric to show; by default all. Repeatable."),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE", help="File to plot the curves to: a .png, .svg or .pdf."
    ),
]


def list_runs(
    status: Annotated[
        str | None,
        typer.Option(
            "--status",
            metavar="STATUS",
            help="Status of the runs: running, killed, interrupted, failed or done.",
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset", metavar="NAME", help="Dataset that the runs learn from, at any version."
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List training runs, oldest first.

    Example:
      replaylake runs list
      replaylake runs list --status done --dataset cartpole
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.lake.runs.summary import STATUSES, dataset_texts, summarize

    if status is not None and status not in STATUSES:
        raise typer.BadParameter(
            f"found {status!r}, expected one of {', '.join(STATUSES)}.", param_hint="--status"
        )
    report = CommandOutput(as_json)
    store = open_lake(lake)
    records = [
        record
        for record in store.registry.runs()
        if dataset is None or dataset in [text.partition("@")[0] for text in dataset_texts(record)]
    ]
    rows = [summarize(store.storage, record) for record in records]
    rows = [row for row in rows if status in (None, row.status)]
    if not rows:
        report.print_message(f"no matching runs in {lake}: `replaylake train` makes them")
    texts = [run_row(row) for row in rows]
    report.print_result(
        {"runs": [_json(row) for row in rows]},
        table_lines(texts, select_columns(texts)) if rows else [],
    )


def show_run(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            autocompletion=complete_runs,
            show_default=False,
            help="Run, by its id, a unique prefix of it, or the policy that it trained.",
        ),
    ],
    metrics: MetricOption = None,
    plot: PlotOption = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show a run: its options, results and learning curves.

    Draws the measure that the policy is selected by, or --metric, and prints a line for each other
    metric.

    Example:
      replaylake runs show 01m7xx
      replaylake runs show 01m7xx --metric critic_loss --plot curves.png
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.lake.runs.checkpoints import Checkpoints
    from replaylake.datastore.lake.runs.metrics import read_curves
    from replaylake.datastore.lake.runs.summary import find_run, summarize

    report = CommandOutput(as_json)
    _check_plot(plot)
    store = open_lake(lake)
    record = find_run(store.registry, run)
    summary = summarize(store.storage, record)
    curves = read_curves(store.storage, summary.run_id)
    names = _select_metrics([curves], metrics)
    _draw(
        report,
        plot,
        {summary.run_id: curves},
        names,
        {summary.run_id: find_selected_update(record)},
    )
    body = {
        **_json(summary),
        "record": dict(record),
        "checkpoints": Checkpoints(store.storage, summary.run_id).updates(),
        "metrics": {name: _points(curves[name]) for name in names},
    }
    report.print_result(body, run_lines(summary, body, curves, names, drawn=bool(metrics)))


def diff_runs(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            autocompletion=complete_runs,
            show_default=False,
            help="Runs to compare, by their ids, unique prefixes of them, or the policies that "
            "they trained; these label the curves.",
        ),
    ],
    metrics: MetricOption = None,
    plot: PlotOption = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare runs: their options, results and learning curves.

    Prints the options that differ, and the last and best value of each metric.

    Example:
      replaylake runs diff 01m7xx 01m8ab
      replaylake runs diff pong:3 pong@champion --metric selection/environment --plot both.png
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.lake.runs.metrics import read_curves
    from replaylake.datastore.lake.runs.summary import find_differences, find_run, summarize

    report = CommandOutput(as_json)
    _check_plot(plot)
    store = open_lake(lake)
    # By label: a policy as it was given, or a run's whole id.
    records: dict[str, Mapping[str, Any]] = {}
    for text in runs:
        record = find_run(store.registry, text)
        if record not in records.values():
            records[record["run_id"] if record["run_id"].startswith(text) else text] = record
    if len(records) < 2:
        raise typer.BadParameter(
            f"found {len(records)} run, expected two or more.", param_hint="RUN"
        )
    summaries = [summarize(store.storage, record) for record in records.values()]
    curves = {
        label: read_curves(store.storage, record["run_id"]) for label, record in records.items()
    }
    names = _select_metrics(list(curves.values()), metrics)
    updates = {label: find_selected_update(record) for label, record in records.items()}
    _draw(report, plot, curves, names, updates)
    options = find_differences(list(records.values()))
    best = {name: [about(one.get(name), name) for one in curves.values()] for name in names}
    body = {
        "runs": [_json(summary) for summary in summaries],
        "options": options,
        "metrics": best,
    }
    lines = comparison_lines(summaries, options, best, list(curves.values()), bool(metrics))
    report.print_result(body, lines)


def _check_plot(plot: Path | None) -> None:
    if plot is not None:
        from replaylake.cli.output.curves import check_picture

        check_picture(plot)


def _draw(
    report: CommandOutput,
    plot: Path | None,
    curves: Mapping[str, Curves],
    names: Sequence[str],
    updates: Mapping[str, int | None],
) -> None:
    if plot is None:
        return
    from replaylake.cli.output.curves import draw_learning_curves
    from replaylake.datastore.errors import NotFoundError

    if not names:
        raise NotFoundError(
            f"--plot {plot}: found no metrics of {', '.join(curves)} yet, expected some. Wait for "
            "the first ones: a run logs them every `log_updates` updates."
        )
    draw_learning_curves(plot, curves, names, updates)
    report.print_message(f"wrote {plot}")


def _select_metrics(curves: Sequence[Curves], only: list[str] | None) -> list[str]:
    """Return the metrics to show: those that were asked for, else all, measures first.

    What the links of an online run took is in `replaylake runs profile`, unless it is asked for.

    Raises: NotFoundError for one that none of the runs has, with the near ones.
    """
    from difflib import get_close_matches

    from replaylake.datastore.errors import NotFoundError

    names = list(dict.fromkeys(name for one in curves for name in one))
    for name in only or ():
        if name not in names:
            near = get_close_matches(name, names, n=3, cutoff=0.5) or names
            raise NotFoundError(
                f"--metric {name}: found no such metric, expected {' or '.join(near) or 'none'}."
            )
    ranks = ("selection/", "evaluation/", "holdout/", "return")
    ordered = sorted(names, key=lambda name: [not name.startswith(rank) for rank in ranks])
    return only or [name for name in ordered if not name.startswith("profile/")]


def _json(summary: RunSummary) -> dict[str, Any]:
    body = summary.to_json()
    return {**body, "started_at": time_text(body.pop("started_ms"))}


def _points(curve: Curve) -> dict[str, Any]:
    return {"updates": curve.updates.tolist(), "values": curve.values.tolist()}
