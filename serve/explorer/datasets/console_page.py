"""The SQL console: one SELECT in the sandbox, its rows as a table and as a file."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from typing import Any, Final

from replaylake.datastore.errors import (
    ConfigInvalidError,
    InvalidNameError,
    NotFoundError,
    QueryError,
    QueryRefusedError,
)
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.names import parse_version
from replaylake.datastore.query.results import write_result
from replaylake.datastore.query.untrusted import UntrustedResult
from replaylake.datastore.query.views import COLUMN_SOURCES, LAKE_VIEWS
from replaylake.serve.explorer.visits.page import Download, Page, Panel, draw_empty
from replaylake.serve.explorer.visits.visit import Query, Visit
from replaylake.serve.messages import RequestRefusedError
from replaylake.serve.pages.markup import Child, Markup, data_block, join, tag
from replaylake.serve.pages.tables import Column, table, value_cell
from replaylake.serve.pages.texts import cell_text, count, is_number

_MAX_SHOWN: Final = 500
# Rows and columns that a chart is drawn from, in the browser.
_MAX_DRAWN: Final = 2000
_MAX_DRAWN_COLUMNS: Final = 12
_MEDIA_TYPES: Final = {
    "csv": "text/csv; charset=utf-8",
    "json": "application/json",
    "parquet": "application/vnd.apache.parquet",
}
# The views of a dataset that an example names, and whose columns are suggested.
_COMPUTED_VIEWS: Final = ("episodes", "games", "transitions")
_REFUSED: Final = (
    ConfigInvalidError,
    InvalidNameError,
    NotFoundError,
    QueryError,
    QueryRefusedError,
)


def show_console(visit: Visit) -> Page:
    """Return the page of `/sql?q=QUERY&at=DATASET=VERSION`."""
    text = visit.values.get("q", "")
    at = visit.lists.get("at", ())
    page = Page("SQL", section="sql", plots=True)
    editor = Panel("Query", _editor(visit, text, at))
    if not text.strip():
        help_panel = Panel("Tables", _tables(visit))
        history = Panel("History", _history())
        data = {"tables": list_tables(visit.lake)}
        return replace(page, panels=[editor, help_panel, history], data=data)
    if visit.is_cross_site:
        # Whoever wrote the link chose the query: the reader decides whether it runs.
        what = "A link on another site led to this query. Read it, then press Run."
        panels = [editor, Panel("Result", draw_empty(what)), Panel("History", _history())]
        return replace(page, panels=panels, data={"query": text})
    try:
        result = run_query(visit, text, at)
    except _REFUSED as error:
        body = tag("div", tag("p", str(error), class_="wrong"), role="alert", id="result")
        panels = [editor, Panel("Result", body), Panel("History", _history())]
        return replace(page, panels=panels, data={"error": {"message": str(error)}}, status=400)
    panels = [editor, _result(visit, text, at, result), Panel("History", _history())]
    return replace(page, panels=panels)


def send_result(visit: Visit, form: str) -> Download:
    """Return a query's rows as a file: csv, json or parquet.

    Raises: as `run_query`; RequestRefusedError where a link on another site led to it.
    """
    if visit.is_cross_site:
        message = "a link on another site led to this file; open /sql, and run the query there"
        raise RequestRefusedError(403, "sec-fetch-site", message)
    text = visit.values.get("q", "")
    result = run_query(visit, text, visit.lists.get("at", ()))
    sink = io.BytesIO()
    write_result(result.rows, form, sink, {"truncated": result.truncated})
    name = None if form == "json" else f"result.{form}"
    return Download(sink.getvalue(), _MEDIA_TYPES[form], name=name)


def run_query(visit: Visit, text: str, at: Sequence[str]) -> UntrustedResult:
    """Run a reader's query in the sandbox. Raises: ReplayLakeError."""
    versions: dict[str, int | str] = {}
    for one in at:
        name, equals, version = one.partition("=")
        if not equals:
            raise ConfigInvalidError(
                f"at: found {one[:80]!r}, expected DATASET=VERSION, such as cartpole=12.",
                parameter="at",
            )
        number = parse_version(version)
        versions[name] = version if number is None else number
    return visit.sql_of_reader(Query(text, at=versions))


def list_tables(lake: Lake) -> dict[str, list[str]]:
    """Return the columns of each view, by its name in SQL."""
    catalog = lake.catalog()
    tables: dict[str, list[str]] = {}
    for name in lake.datasets():
        columns = list(lake.snapshot(name).table.schema.names)
        tables[f"{name}.steps"] = columns
        for view in _COMPUTED_VIEWS:
            own = sorted(COLUMN_SOURCES[view])
            tables[f"{name}.{view}"] = [*columns, *own] if view == "transitions" else own
        if lake.dataset(name).decisions.exists():
            for view in ("decisions", "rewards"):
                table_snapshot = catalog.table(name, view)
                if table_snapshot is not None:
                    tables[f"{name}.{view}"] = list(table_snapshot.schema.names)
    for view in LAKE_VIEWS:
        relation = None if view == "metrics" else catalog.relation(view)
        if relation is not None:
            tables[view] = list(relation.column_names)
    tables["metrics"] = ["run_id", "update", "name", "value", "measured_at"]
    return tables


def _editor(visit: Visit, text: str, at: Sequence[str]) -> list[Markup]:
    tables = list_tables(visit.lake)
    return [
        tag(
            "form",
            tag("label", "One SELECT over the lake", for_="q", class_="quiet"),
            tag(
                "textarea",
                text,
                id="q",
                name="q",
                spellcheck="false",
                autocomplete="off",
                autocapitalize="off",
                rows=6,
                data_tables="tables",
            ),
            [tag("input", type="hidden", name="at", value=one) for one in at],
            tag(
                "div",
                tag("button", "Run", type="submit"),
                tag("button", "Cancel", type="button", id="cancel", hidden=True),
                tag("span", "", id="status", class_="status", role="status"),
                tag("span", "Ctrl+Enter runs, Ctrl+Space completes", class_="quiet"),
                class_="actions",
            ),
            tag("p", "Reads ", ", ".join(at), class_="quiet") if at else None,
            action=visit.link("sql"),
            class_="console",
            id="console",
        ),
        data_block("tables", tables),
    ]


def _result(visit: Visit, text: str, at: Sequence[str], result: UntrustedResult) -> Panel:
    rows = result.rows.slice(0, _MAX_SHOWN).to_pylist()
    names: list[str] = result.rows.column_names
    columns: list[Column | str] = [
        Column(
            name,
            is_number=any(is_number(row.get(name)) for row in rows)
            and all(row.get(name) is None or is_number(row.get(name)) for row in rows),
        )
        for name in names
    ]
    cells = [[value_cell(row[name]) for name in names] for row in rows]
    note = count(result.rows.num_rows, "row")
    if result.truncated:
        note = f"the first {note}: the whole result has more {result.truncated} than are read"
    if result.rows.num_rows > _MAX_SHOWN:
        note += f"; the table shows {_MAX_SHOWN}"
    links = []
    for form in _MEDIA_TYPES:
        address = visit.link(f"sql.{form}", q=text, at=list(at))
        title = "Parquet" if form == "parquet" else form.upper()
        links.append(tag("a", title, href=address, class_="button", download=True))
    shown: Child = table(columns, cells, label="Result", is_tall=True)
    if not rows:
        shown = draw_empty("The query has no rows.")
    body = tag(
        "div",
        shown,
        tag("div", "Download", links, class_="more"),
        _chart(result),
        id="result",
    )
    return Panel("Result", body, note=note)


def _chart(result: UntrustedResult) -> Child:
    """Return the controls of a chart of two columns, which the script draws; None without numbers.

    Times are seconds since 1970. What is no finite number is null.
    """
    rows = result.rows
    drawn: dict[str, dict[str, Any]] = {}
    for name in rows.column_names:
        values = rows.column(name).slice(0, _MAX_DRAWN).to_pylist()
        kind = _kind_of(values)
        if kind is not None and len(drawn) < _MAX_DRAWN_COLUMNS:
            drawn[name] = {"kind": kind, "values": [_plottable(value) for value in values]}
    numbers = [name for name, one in drawn.items() if one["kind"] == "number"]
    if not numbers or rows.num_rows < 2:
        return None
    first = next((name for name in drawn if name != numbers[0]), None)
    chosen = numbers[0]
    if first in numbers:
        # Of two numbers, the first is along the axis, as in `SELECT step, reward`.
        first, chosen = numbers[0], str(first)
    controls = [
        _choice("Chart", "kind", {"line": "line", "bar": "bars", "scatter": "points"}, "line"),
        _choice("Along", "x", {"": "row number", **{name: name for name in drawn}}, first or ""),
        _choice("Up", "y", {name: name for name in numbers}, chosen),
    ]
    note = None
    if rows.num_rows > _MAX_DRAWN:
        note = tag("p", f"The first {_MAX_DRAWN:,} rows.", class_="quiet")
    return tag(
        "details",
        tag("summary", "Chart"),
        tag("div", controls, class_="fields"),
        note,
        tag("p", "A bar is the sum of its rows.", class_="quiet", id="chart-note", hidden=True),
        tag("div", class_="canvas", role="img", id="chart-canvas"),
        data_block("chart-data", drawn),
        id="chart",
        hidden=True,
    )


def _choice(label: str, name: str, options: Mapping[str, str], chosen: str) -> Markup:
    return tag(
        "label",
        tag("span", label),
        tag(
            "select",
            [
                tag("option", text, value=value, selected=value == chosen)
                for value, text in options.items()
            ],
            id=f"chart-{name}",
        ),
    )


def _kind_of(values: Sequence[object]) -> str | None:
    """Return what a column is along an axis; None where it cannot be drawn, or has no value."""
    known = [value for value in values if value is not None]
    if known and all(map(is_number, known)):
        return "number"
    if known and all(isinstance(value, date) for value in known):
        return "time"
    return "text" if known and all(isinstance(value, str | bool) for value in known) else None


def _plottable(value: object) -> float | str | None:
    if isinstance(value, datetime):
        return (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp()
    if is_number(value):
        number = float(value)  # type: ignore[arg-type]
        return number if math.isfinite(number) else None
    return None if value is None else cell_text(value)


def _tables(visit: Visit) -> list[Child]:
    rows: list[list[Child]] = []
    for name, columns in list_tables(visit.lake).items():
        query = f"SELECT * FROM {name} LIMIT 100"
        link = tag("a", name, href=visit.link("sql", q=query), class_="id")
        rows.append([link, ", ".join(columns)])
    return [table(["Table", "Columns"], rows, label="Tables")]


def _history() -> Markup:
    return join(
        tag("ol", class_="history", id="history"),
        tag(
            "p",
            "Queries that you run are listed here. The list stays in this browser.",
            class_="quiet",
            id="no-history",
        ),
    )
