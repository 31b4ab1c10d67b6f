"""Tables of pages: numbers to the right, times in the reader's zone, everything else as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from replaylake.serve.pages.markup import Child, Markup, tag
from replaylake.serve.pages.texts import cell_text, is_number, number_text, short_number, shorten_id


@dataclass(frozen=True)
class Column:
    """A column: its title, and whether its values are numbers.

    sort: `ascending` or `descending`, of the column that the rows are sorted by.
    """

    title: Child
    is_number: bool = False
    sort: str | None = None


def table(
    columns: Sequence[Column | str],
    rows: Iterable[Sequence[Child]],
    *,
    label: str,
    identity: str | None = None,
    is_tall: bool = False,
) -> Markup:
    """Return a table that scrolls by itself where it is wider than the page.

    A column given as a text is one of texts. label: what the table is of, for readers who hear it.
    is_tall: whether it scrolls within a part of the page, below its header.
    """
    heads = [one if isinstance(one, Column) else Column(one) for one in columns]
    kinds = ["number" if head.is_number else None for head in heads]
    head = [
        tag("th", one.title, scope="col", class_=kind, aria_sort=one.sort)
        for one, kind in zip(heads, kinds, strict=True)
    ]
    body = [
        tag("tr", [tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)])
        for row in rows
    ]
    return tag(
        "div",
        tag("table", tag("thead", tag("tr", head)), tag("tbody", body)),
        class_="scroll tall" if is_tall else "scroll",
        role="region",
        tabindex=0,
        aria_label=label,
        id=identity,
    )


def value_cell(value: object) -> Child:
    """Return any value of a query's row as the content of a cell."""
    if value is None:
        return tag("span", "null", class_="quiet")
    if isinstance(value, datetime):
        return time_tag(value)
    if is_number(value):
        return number_text(value if isinstance(value, int) else float(value))  # type: ignore[arg-type]
    return cell_text(value)


def quiet_number(value: float | None, *, is_short: bool = False) -> Child:
    """Return a number as the content of a cell; one that is unknown says so quietly."""
    if value is None:
        return tag("span", "unknown", class_="quiet")
    return short_number(value) if is_short else number_text(value)


def id_link(identity: str, address: str) -> Markup:
    """Return a link named by an id, whole in its tooltip, with its middle left out if long."""
    return tag("a", shorten_id(identity) or "(empty)", href=address, class_="id", title=identity)


def time_tag(at: datetime | None, *, has_seconds: bool = False) -> Markup | None:
    """Return a time in UTC, which the page's script shows in the reader's zone."""
    if at is None:
        return None
    known = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    known = known.astimezone(UTC)
    shown = f"{known:%Y-%m-%d %H:%M:%S}" if has_seconds else f"{known:%Y-%m-%d %H:%M}"
    machine = f"{known:%Y-%m-%dT%H:%M:%S}Z"
    return tag("time", f"{shown} UTC", datetime=machine, data_seconds=has_seconds)
