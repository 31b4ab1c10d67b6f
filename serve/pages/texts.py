"""Texts: numbers, sizes and values as people read them, in tables of a terminal and of a page."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Final

_MAX_TEXT: Final = 100
_MAX_VECTOR: Final = 44
_MAX_ID: Final = 34


def number_text(value: float | None) -> str:
    """Return a count with separators, or six significant digits: `4,137`, `9.34929`."""
    if value is None:
        return "unknown"
    # Adding 0 makes -0.0 the 0 that it is.
    return f"{value:,}" if isinstance(value, int) else f"{value + 0.0:,.6g}"


def short_number(value: float | None) -> str:
    """Return a count with separators, or four significant digits: `9.349`, `12,346`."""
    if value is None or isinstance(value, int) or not 1000 <= abs(value) < 1e15:
        return number_text(value if value is None or isinstance(value, int) else _round(value))
    return f"{value:,.0f}"


def shorten_id(text: str) -> str:
    """Return an id with its middle left out if it is long: ids differ at their ends."""
    if len(text) <= _MAX_ID:
        return text
    return f"{text[: _MAX_ID - 11]}\u2026{text[-10:]}"


def count(number: int, noun: str) -> str:
    """Return `1 shard` or `1,200 shards`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(num_bytes: int) -> str:
    """Return bytes in the unit a person would choose: `4.1 MB`."""
    value, units = float(num_bytes), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{num_bytes:,} bytes" if units[0] == "bytes" else f"{value:.1f} {units[0]}"


def duration_text(seconds: float | None) -> str:
    """Return a time span as people say it: `742 ms`, `12.3 s`, `4 min 05 s`, `6 h`, `3 days`."""
    if seconds is None:
        return ""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms" if seconds > 0 else "0 s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds:.3g} s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min" + (f" {rest:02} s" if rest else "")
    days, hours = divmod(hours, 24)
    if not days:
        return f"{hours} h" + (f" {minutes:02} min" if minutes else "")
    return count(days, "day") + (f" {hours} h" if hours else "")


def cell_text(value: Any) -> str:
    """Return a value as a person reads it in a table."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return _cut("[" + ", ".join(cell_text(item) for item in value[:64]) + "]", _MAX_VECTOR)
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    return _cut(" ".join(str(value).split()), _MAX_TEXT)


def is_number(value: Any) -> bool:
    """Whether a value is a number; DuckDB's sum of integers comes as a Decimal."""
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
