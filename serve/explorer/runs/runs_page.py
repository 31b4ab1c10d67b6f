"""Runs: a list of them, and a run's curves, options and data, alone or beside another run's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

import numpy as np

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.holdout import describe_selection
from replaylake.datastore.lake.runs.checkpoints import Checkpoints
from replaylake.datastore.lake.runs.metrics import Curve, read_curves
from replaylake.datastore.lake.runs.summary import (
    RunSummary,
    best_point,
    dataset_text,
    find_differences,
    find_run,
    is_loss,
    summarize,
)
from replaylake.serve.explorer.runs.sweep_panel import draw_sweep
from replaylake.serve.explorer.visits.page import Page, Panel, Redirect, draw_empty
from replaylake.serve.explorer.visits.visit import Visit
from replaylake.serve.pages.markup import Child, Markup, data_block, join, join_list, tag
from replaylake.serve.pages.tables import Column, quiet_number, table, time_tag
from replaylake.serve.pages.texts import cell_text, count, duration_text, number_text

_REFRESH_S: Final = 2
_MAX_METRICS: Final = 30
# Of a curve with more points, so many are drawn.
_MAX_POINTS: Final = 2000
_MAX_RUNS: Final = 1000
# Metrics that a run is chosen by come first.
_FIRST: Final = ("selection/", "evaluation/", "holdout/", "return")
_HIDDEN: Final = "profile/"


def list_runs(visit: Visit) -> Page:
    """Return the page of `/runs`, newest first."""
    lake = visit.lake
    records = list(reversed(lake.registry.runs()))
    runs = [summarize(lake.storage, record) for record in records[:_MAX_RUNS]]
    rows: list[list[Child]] = [
        [
            _selectable(visit, run.run_id) if len(runs) > 1 else _run_link(visit, run.run_id),
            run.algorithm or run.kind or "",
            draw_status(run.status),
            [_data_link(visit, text) for text in run.datasets],
            quiet_number(run.best) if run.best is not None else "",
            run.measure or "",
            "" if run.update is None else f"{run.update:,}",
            _policy_link(visit, run.policy),
            join(time_tag(_time(run.started_ms))),
            duration_text(run.duration_s),
        ]
        for run in runs
    ]
    visit.note_query(
        "SELECT run_id, kind, status, started_at, ended_at FROM runs ORDER BY started_at DESC"
    )
    columns: list[Column | str] = [
        "Run",
        "Algorithm",
        "Status",
        "Data",
        Column("Best", is_number=True),
        "By",
        Column("Updates", is_number=True),
        "Policy",
        "Started",
        Column("Took", is_number=True),
    ]
    body: Child = table(columns, rows, label="Runs")
    if len(runs) > 1:
        body = _selection_form(visit, body)
    if not runs:
        body = draw_empty(
            "No run has trained in this lake.",
            command="`replaylake train offline DATASET --algorithm bc --policy NAME`",
        )
    active = any(run.status == "running" for run in runs)
    data = [{**run.to_json(), "started_at": _time(run.started_ms)} for run in runs]
    return Page(
        "Runs",
        section="runs",
        panels=[Panel("Runs", body, queries=visit.take_queries(), shows_title=False)],
        data={"runs": data},
        rows=data,
        refresh_s=_REFRESH_S if active else None,
    )


def _selection_form(visit: Visit, rows: Child) -> list[Markup]:
    """Return the table in a form, whose button compares the two selected runs."""
    actions = tag(
        "div",
        tag("button", "Compare two runs", type="submit", form="compare", class_="plain"),
        tag("span", "", id="selected", class_="quiet", role="status"),
        class_="more",
    )
    address = visit.link("runs", "compare")
    return [
        actions,
        tag("form", rows, action=address, id="compare", data_least=2, data_most=2),
    ]


def open_comparison(visit: Visit) -> Redirect:
    """Redirect `/runs/compare?id=RUN&id=RUN` to the page of both runs.

    Raises: ConfigInvalidError unless there are two.
    """
    ids = list(dict.fromkeys(visit.lists.get("id", ())))
    if len(ids) != 2:
        raise ConfigInvalidError(
            f"id: found {count(len(ids), 'run')}, expected two to compare. Select them in "
            "the list of runs.",
            parameter="id",
        )
    return Redirect(visit.link("runs", ids[0], **{"with": ids[1]}))


def show_run(visit: Visit) -> Page:
    """Return the page of `/runs/RUN`, with `with` beside another one."""
    lake = visit.lake
    record = find_run(lake.registry, visit.path["run"])
    records = [record]
    if other := visit.values.get("with"):
        records.append(find_run(lake.registry, other))
    runs = [summarize(lake.storage, one) for one in records]
    curves = [read_curves(lake.storage, run.run_id) for run in runs]
    run = runs[0]
    sweep = draw_sweep(visit, record) if len(runs) == 1 else []
    # A sweep itself has no metrics: its trials have.
    panels = [*sweep, *([] if sweep and not curves[0] else [_curves_panel(visit, runs, curves)])]
    if len(runs) > 1:
        panels += [_differences_panel(records, runs), _metrics_panel(runs, curves)]
    elif curves[0] or not sweep:
        panels.append(_metrics_panel(runs, curves))
    # Beside the metrics, if there is something beside.
    data = _data_panel(visit, records, runs)
    panels.append(data if curves[0] or not sweep else replace(data, is_wide=True))
    for one in records:
        of_run = f" of {one['run_id']}" if len(records) > 1 else ""
        panels += [_options_panel(one, of_run), *_error_panels(one, of_run)]

    def read_data() -> dict[str, Any]:
        body = [
            {
                **one.to_json(),
                "record": dict(its),
                "checkpoints": Checkpoints(lake.storage, one.run_id).updates(),
                "metrics": {
                    name: {"updates": curve.updates.tolist(), "values": curve.values.tolist()}
                    for name, curve in metrics.items()
                },
            }
            for one, its, metrics in zip(runs, records, curves, strict=True)
        ]
        return body[0] if len(body) == 1 else {"runs": body}

    title = run.run_id if len(runs) == 1 else f"{run.run_id} and {runs[1].run_id}"
    return Page(
        title,
        section="runs",
        crumbs=[("Runs", visit.link("runs"))],
        facts=_facts(visit, run) if len(runs) == 1 else (),
        tools=_comparison_form(visit, run),
        panels=panels,
        data=read_data,
        plots=True,
        refresh_s=_REFRESH_S if any(one.status == "running" for one in runs) else None,
    )


def _facts(visit: Visit, run: RunSummary) -> list[tuple[str, Child]]:
    facts: list[tuple[str, Child]] = [
        ("status", draw_status(run.status)),
        ("algorithm", run.algorithm or run.kind or "unknown"),
        ("updates", "unknown" if run.update is None else f"{run.update:,}"),
    ]
    if run.best is not None:
        facts.append((f"best {run.measure}", number_text(run.best)))
    if run.env is not None:
        facts.append(("environment", run.env))
    if run.mean_return is not None:
        facts.append(("mean return", number_text(run.mean_return)))
    if run.policy is not None:
        facts.append(("policy", _policy_link(visit, run.policy)))
    facts.append(("started", time_tag(_time(run.started_ms)) or "unknown"))
    facts.append(("took", duration_text(run.duration_s) or "unknown"))
    return facts


def _comparison_form(visit: Visit, run: RunSummary) -> Markup | None:
    others = [one for one in reversed(visit.lake.registry.runs()) if one["run_id"] != run.run_id]
    if not others:
        return None
    chosen = visit.values.get("with", "")
    options = [
        tag(
            "option",
            " ".join(filter(None, (one["run_id"], one.get("algorithm")))),
            value=one["run_id"],
            selected=one["run_id"] == chosen,
        )
        for one in others[:_MAX_RUNS]
    ]
    return tag(
        "form",
        tag("label", "Beside", for_="with"),
        tag("select", options, id="with", name="with"),
        tag("button", "Compare", type="submit"),
        action=visit.link("runs", run.run_id),
        class_="tools",
    )


def _curves_panel(
    visit: Visit, runs: Sequence[RunSummary], curves: Sequence[Mapping[str, Curve]]
) -> Panel:
    names = _order_metrics(curves)
    ids = ", ".join(f"'{run.run_id}'" for run in runs)
    visit.note_query(
        f'SELECT run_id, name, "update", value FROM metrics WHERE run_id IN ({ids}) '
        'ORDER BY run_id, name, "update"'
    )
    queries = visit.take_queries()
    if not names:
        body = draw_empty("This run has logged no metrics yet: the first come with an update.")
        return Panel("Curves", body)
    plots = []
    for name in names[:_MAX_METRICS]:
        known = [(place, thin_curve(one[name])) for place, one in enumerate(curves) if name in one]
        updates = np.unique(np.concatenate([curve.updates for _, curve in known]))
        series = []
        for place, curve in known:
            values: list[float | None] = [None] * len(updates)
            for at, value in zip(
                np.searchsorted(updates, curve.updates), curve.values.tolist(), strict=True
            ):
                if math.isfinite(value):
                    values[at] = value if value.is_integer() else float(f"{value:.7g}")
            label = runs[place].run_id if len(runs) > 1 else "value"
            series.append({"name": label, "values": values, "color": place})
        plots.append({"title": name, "x": updates.tolist(), "series": series})
    smoothing = tag(
        "div",
        tag("label", "Smoothing", for_="smoothing"),
        tag("input", id="smoothing", type="range", min=0, max=0.98, step=0.02, value=0),
        class_="scrub short",
    )
    block = data_block("metrics", {"x": [], "label": "update", "plots": plots})
    notes = []
    if len(names) > _MAX_METRICS:
        notes.append(f"{_MAX_METRICS} of {len(names)} metrics; the others are in the table below.")
    longest = max(
        len(one[name].updates) for name in names[:_MAX_METRICS] for one in curves if name in one
    )
    if longest > _MAX_POINTS:
        notes.append(
            f"A curve has up to {longest:,} points; of more than {_MAX_POINTS:,}, the least and "
            "the greatest of each part are drawn."
        )
    note = " ".join(notes) or None
    drawn = tag("div", class_="plots two", data_plots="metrics")
    return Panel("Curves", [smoothing, drawn, block], note=note, queries=queries)


def thin_curve(curve: Curve) -> Curve:
    """Return at most 2,000 points: the first, the last, and each part's least and greatest."""
    num = len(curve.updates)
    if num <= _MAX_POINTS:
        return curve
    is_unknown = np.isnan(curve.values)
    lows = np.where(is_unknown, np.inf, curve.values)
    highs = np.where(is_unknown, -np.inf, curve.values)
    places = {0, num - 1}
    edges = np.linspace(1, num - 1, _MAX_POINTS // 2).round().astype(np.int64).tolist()
    for start, stop in pairwise(edges):
        places.add(start + int(lows[start:stop].argmin()))
        places.add(start + int(highs[start:stop].argmax()))
    chosen = np.array(sorted(places))
    return Curve(curve.updates[chosen], curve.values[chosen])


def _order_metrics(curves: Sequence[Mapping[str, Curve]]) -> list[str]:
    names = [name for one in curves for name in one if not name.startswith(_HIDDEN)]
    return sorted(
        dict.fromkeys(names), key=lambda name: [not name.startswith(first) for first in _FIRST]
    )


def _metrics_panel(runs: Sequence[RunSummary], curves: Sequence[Mapping[str, Curve]]) -> Panel:
    columns: list[Column | str] = ["Metric"]
    for run in runs:
        of_run = f" of {run.run_id[-6:]}" if len(runs) > 1 else ""
        columns += [
            Column(f"Last{of_run}", is_number=True),
            Column(f"Best{of_run}", is_number=True),
            Column(f"At update{of_run}", is_number=True),
        ]
    rows: list[list[Child]] = []
    for name in _order_metrics(curves):
        row: list[Child] = [name]
        for one in curves:
            curve = one.get(name)
            best = None if curve is None else best_point(curve, higher_is_better=not is_loss(name))
            if curve is None or best is None:
                row += ["", "", ""]
            else:
                row += [number_text(float(curve.values[-1])), number_text(best[1]), f"{best[0]:,}"]
        rows.append(row)
    body: Child = table(columns, rows, label="Metrics")
    note = "Each point of a training metric is the mean over the updates since the previous point."
    if not rows:
        body, note = draw_empty("No metrics yet."), ""
    return Panel("Metrics", body, note=note or None, is_wide=len(runs) > 1)


def _differences_panel(records: Sequence[Mapping[str, Any]], runs: Sequence[RunSummary]) -> Panel:
    differences = find_differences(records)
    if not differences:
        body: Child = draw_empty("Both runs were asked for the same, on the same data.")
    else:
        rows: list[list[Child]] = [
            [tag("code", name), *(cell_text(value) for value in values)]
            for name, values in differences.items()
        ]
        body = table(["Option", *(run.run_id for run in runs)], rows, label="Differences")
    return Panel("Differences", body)


def _data_panel(
    visit: Visit, records: Sequence[Mapping[str, Any]], runs: Sequence[RunSummary]
) -> Panel:
    rows: list[list[Child]] = []
    for record, run in zip(records, runs, strict=True):
        for one in record.get("datasets") or ():
            rows.append(
                [
                    *([run.run_id] if len(runs) > 1 else []),
                    _data_link(visit, dataset_text(one)),
                    link_selection(visit, one),
                    _count(one.get("num_episodes")),
                    _count(one.get("num_steps")),
                ]
            )
    if not rows:
        body: Child = draw_empty("The run has recorded no data that it learned from.")
    else:
        columns: list[Column | str] = [
            *(["Run"] if len(runs) > 1 else []),
            "Data",
            "Where",
            Column("Episodes", is_number=True),
            Column("Steps", is_number=True),
        ]
        body = [table(columns, rows, label="Data"), _diff_links(visit, records)]
    return Panel("Data", body, is_wide=len(runs) > 1)


def _diff_links(visit: Visit, records: Sequence[Mapping[str, Any]]) -> Markup | None:
    """Return links to the differences between the dataset versions of two runs."""
    if len(records) < 2:
        return None
    first, second = (
        {str(one.get("dataset")): one.get("version") for one in record.get("datasets") or ()}
        for record in records
    )
    links = []
    for name in sorted(first.keys() & second.keys()):
        versions = sorted(v for v in {first[name], second[name]} if isinstance(v, int))
        if len(versions) == 2:
            a, b = versions
            address = visit.link("datasets", name, "diff", a=a, b=b)
            links.append(tag("a", f"{name}@{a} and {name}@{b}", href=address))
    return tag("p", "Differences in the data: ", join_list(links)) if links else None


def link_selection(visit: Visit, used: Mapping[str, Any]) -> Child:
    """Return the condition of the data that a run used, with a link to its episodes."""
    where = used.get("where")
    address = visit.link(
        "datasets", str(used.get("dataset")), "episodes", where=where, at=used.get("version")
    )
    text = tag("code", describe_selection(str(where))) if where else "all episodes"
    return tag("a", text, href=address)


def _options_panel(record: Mapping[str, Any], of_run: str) -> Panel:
    config = record.get("config") or {}
    body: Child = draw_tree(config, in_columns=True)
    if not config:
        body = draw_empty("The run has recorded no options.")
    return Panel(f"Options{of_run}", body, is_wide=not of_run)


def _error_panels(record: Mapping[str, Any], of_run: str) -> list[Panel]:
    error = record.get("error")
    if not error:
        return []
    return [Panel(f"Error{of_run}", tag("pre", tag("code", str(error))))]


def draw_tree(body: Mapping[str, Any], *, in_columns: bool = False) -> Markup:
    """Return nested options as a list; what is None or empty is left out."""
    items = []
    for key, value in body.items():
        if value is None or value in ([], {}, ()):
            continue
        name = tag("span", key, class_="key")
        if isinstance(value, Mapping):
            items.append(tag("li", name, draw_tree(value)))
        else:
            items.append(tag("li", name, " ", cell_text(value)))
    return tag("ul", items, class_="tree columns" if in_columns else "tree")


def _run_link(visit: Visit, run_id: str) -> Markup:
    return tag("a", run_id, href=visit.link("runs", run_id), class_="ulid")


def _selectable(visit: Visit, run_id: str) -> list[Markup]:
    box = tag("input", type="checkbox", name="id", value=run_id, aria_label=f"Select {run_id}")
    return [tag("span", box, _run_link(visit, run_id), class_="selectable")]


def _data_link(visit: Visit, text: str) -> Markup:
    name, _, version = text.partition("@")
    return tag("a", text, href=visit.link("datasets", name, at=version or None), class_="pill")


def _policy_link(visit: Visit, text: str | None) -> Child:
    if text is None:
        return ""
    return tag("a", text, href=visit.link("policies", text.partition(":")[0]))


def draw_status(status: str) -> Markup:
    """Return the status of a run in the color of what it means."""
    kinds = {"running": "pill good", "failed": "pill bad", "killed": "pill bad"}
    return tag("span", status, class_=kinds.get(status, "pill"))


def _time(milliseconds: int | None) -> datetime | None:
    return None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, UTC)


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"
