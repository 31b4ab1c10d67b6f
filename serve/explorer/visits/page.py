"""Page: panels and facts as HTML in the explorer's frame, and the same as JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from replaylake.serve.explorer.visits.live_pages import Rendering
from replaylake.serve.explorer.visits.visit import Links, Query, Visit
from replaylake.serve.pages.frame import (
    Entry,
    write_document,
    write_facts,
    write_heading,
    write_panel,
)
from replaylake.serve.pages.markup import Child, Markup, join, join_list, tag

_Subject = TypeVar("_Subject")
# What the pages call themselves, where, and the first segment of the pages below.
_SECTIONS: Final = (
    ("Lake", (), ("", "datasets")),
    ("Runs", ("runs",), ("runs",)),
    ("Policies", ("policies",), ("policies",)),
    ("Serving", ("serving",), ("serving",)),
    ("SQL", ("sql",), ("sql",)),
)


@dataclass(frozen=True)
class Panel:
    """A part of a page with a heading. note: a line below it; queries: where its numbers are from.

    is_wide: whether it takes the whole width of the page. shows_title: whether the heading is seen,
    not only heard; not where the page's own says the same.
    """

    title: str
    body: Child
    note: Child = None
    queries: Sequence[Query] = ()
    is_wide: bool = True
    shows_title: bool = True


@dataclass(frozen=True)
class Page:
    """What one address shows.

    crumbs: (text, address) of the pages above. facts: (name, value) in its head. data: what `.json`
    has, or a function that reads it; rows: what `.csv` has, None where the page is no table.
    section: the first segment of its address. tools: controls beside its heading. plots: whether it
    needs the library for plots. refresh_s: after how many seconds it is made again for those who
    follow it, None where it does not change by itself.
    """

    title: str
    section: str = ""
    crumbs: Sequence[tuple[str, str]] = ()
    lead: Child = None
    facts: Sequence[tuple[str, Child]] = ()
    tools: Child = None
    panels: Sequence[Panel] = ()
    data: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] | None = None
    plots: bool = False
    refresh_s: float | None = None
    status: int = 200


@dataclass(frozen=True)
class Download:
    """A file. name: file name for saving; is_fixed: whether its address contains its version.

    digest: sha256 of the content, sent as its ETag.
    """

    content: bytes
    media_type: str
    name: str | None = None
    is_fixed: bool = False
    digest: str | None = None


@dataclass(frozen=True)
class Redirect:
    """Where the browser goes next. reader: the name that it is to keep for further forms."""

    address: str
    reader: str | None = None


# One function a panel: it returns None where the subject has nothing to show.
PanelFunction = Callable[[Visit, _Subject], Panel | None]


def build_panels(
    visit: Visit, subject: _Subject, functions: Sequence[PanelFunction[_Subject]]
) -> list[Panel]:
    """Call the functions of a page's panels, and give each panel the queries that it made."""
    panels = []
    for function in functions:
        visit.take_queries()
        panel = function(visit, subject)
        queries = visit.take_queries()
        if panel is not None:
            panels.append(replace(panel, queries=queries or panel.queries))
    return panels


def draw_empty(what: str, *, command: str | None = None, hint: Child = None) -> Markup:
    """Return what a panel shows instead of nothing: why, and the command that changes it.

    command: in backticks, as commands are written in messages.
    """
    return tag(
        "div",
        tag("p", _mark_commands(what)),
        None if hint is None else tag("p", hint),
        None if command is None else tag("pre", tag("code", command.strip("`"))),
        class_="empty",
    )


def _mark_commands(text: str) -> list[Child]:
    """Return a message with what is in backticks as code."""
    return [tag("code", part) if place % 2 else part for place, part in enumerate(text.split("`"))]


def to_html(
    page: Page,
    links: Links,
    *,
    lake: str,
    address: str,
    assets: Mapping[str, str],
    has_signed_in: bool = False,
) -> str:
    """Return a page as HTML.

    address: address of this page, with its query and without a suffix. has_signed_in: whether the
    page has a sign-out button.
    """
    path, mark, query = address.partition("?")
    stem = path.rstrip("/") if path.rstrip("/") != links().rstrip("/") else links("index")
    forms = [("JSON", f"{stem}.json{mark}{query}")] if page.data else []
    if page.rows is not None:
        forms.append(("CSV", f"{stem}.csv{mark}{query}"))
    # The library for plots comes before the script that draws with it.
    loaded = {
        name: file for name, file in assets.items() if page.plots or not name.startswith("uplot.")
    }
    parts = render(page, links)
    content = [parts.heading, tag("div", [panel for _, panel in parts.panels], class_="panels")]
    return write_document(
        page.title,
        content,
        assets=loaded,
        home=links(),
        entries=[
            Entry(name, links(*segments), is_current=page.section in below)
            for name, segments, below in _SECTIONS
        ],
        where=lake,
        head=[
            parts.marks if page.refresh_s is not None else None,
            *(
                tag("link", rel="alternate", type=f"application/{name.lower()}", href=href)
                if name == "JSON"
                else tag("link", rel="alternate", type="text/csv", href=href)
                for name, href in forms
            ),
        ],
        footer=[
            tag(
                "form",
                tag("button", "Sign out", type="submit", class_="plain"),
                method="post",
                action=links("sign-out"),
            )
            if has_signed_in
            else None,
            tag("span", "This page as ", join_list([tag("a", n, href=h) for n, h in forms]))
            if forms
            else None,
        ],
    )


def render(page: Page, links: Links) -> Rendering:
    """Return the parts of a page that change while it is followed."""
    panels = tuple((panel.title, _panel(panel, links)) for panel in page.panels)
    return Rendering(page.title, _heading(page), panels, page.refresh_s)


def _heading(page: Page) -> Markup:
    crumbs = [tag("li", tag("a", text, href=href)) for text, href in page.crumbs]
    # Shown by the script, without which nothing is read again.
    follow = (
        tag(
            "div",
            tag("span", f"This page is updated every {page.refresh_s:g} s", class_="quiet"),
            tag("button", "Pause", type="button"),
            class_="follow",
            data_refresh=page.refresh_s,
            hidden=True,
        )
        if page.refresh_s is not None
        else None
    )
    return join(
        tag("nav", tag("ol", crumbs), class_="crumbs", aria_label="Above") if crumbs else None,
        write_heading(page.title, tools=page.tools, lead=page.lead),
        follow,
        write_facts(page.facts) if page.facts else None,
    )


def _panel(panel: Panel, links: Links) -> Markup:
    return write_panel(
        panel.title,
        panel.body,
        _queries(panel.queries, links),
        note=panel.note,
        is_wide=panel.is_wide,
        shows_title=panel.shows_title,
    )


def _queries(queries: Sequence[Query], links: Links) -> Markup | None:
    distinct = list({query.standalone: query for query in queries}.values())
    if not distinct:
        return None
    items = [
        tag("li", tag("code", query.standalone), tag("a", "Run", href=links.console(query)))
        for query in distinct
    ]
    word = "SQL of this panel"
    return tag("details", tag("summary", word), tag("ul", items), class_="sql")


def to_json(page: Page) -> bytes:
    """Return a page's data as JSON; a number that JSON lacks becomes null."""
    data = page.data() if callable(page.data) else page.data
    return json.dumps(plain_value(data), ensure_ascii=False, allow_nan=False).encode(
        "utf-8", "replace"
    )


def to_csv(page: Page) -> bytes:
    """Return a page's rows as CSV with a header line; lists and structs as JSON text."""
    rows = page.rows or ()
    sink = io.StringIO()
    names = list(rows[0]) if rows else []
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        values = (plain_value(row[name]) for name in names)
        writer.writerow(
            json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
            for value in values
        )
    return sink.getvalue().encode("utf-8", "replace")


def plain_value(value: Any) -> Any:
    """Return a value as JSON has it; what is not finite is None, times are ISO 8601."""
    if isinstance(value, Mapping):
        return {str(key): plain_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(one) for one in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return plain_value(value.tolist())
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
