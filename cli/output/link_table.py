"""Link table: the links of a profile, a row each, as runs, ingests and servers print them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from replaylake.cli.output.command_output import table_lines

if TYPE_CHECKING:
    from replaylake.datastore.lake.runs.run_profile import LinkUse

_COLUMNS: Final = ("link", "of", "seconds", "share %", "items", "items/s", "MB", "MB/s")
_BOUND_COLUMNS: Final = ("bound MB/s", "bound/rate")


def link_lines(links: Iterable[LinkUse]) -> list[str]:
    """Return a header and one line per link; the bounds, where one was measured."""
    rows = [_make_row(one) for one in links]
    has_bounds = any(row["bound MB/s"] is not None for row in rows)
    return table_lines(rows, (*_COLUMNS, *_BOUND_COLUMNS) if has_bounds else _COLUMNS)


def _make_row(one: LinkUse) -> dict[str, Any]:
    rate, mb_rate = one.items_per_s, one.mb_per_s
    return {
        "link": one.link,
        "of": one.place,
        "seconds": round(one.seconds, 2),
        "share %": round(100 * one.share, 1),
        "items": one.items or None,
        "items/s": None if rate is None else round(rate),
        "MB": round(one.num_bytes / 1e6, 1) if one.num_bytes else None,
        "MB/s": None if mb_rate is None else round(mb_rate, 1),
        "bound MB/s": None if one.bound_mb_per_s is None else round(one.bound_mb_per_s),
        "bound/rate": None if one.bound_ratio is None else float(f"{one.bound_ratio:.3g}"),
    }
