"""Report: what a command says. The answer goes to stdout, talk and progress to stderr."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from decimal import Decimal
from typing import Any, Final, TextIO

from replaylake.cli.options import name_options
from replaylake.cli.output.progress import ProgressReport, WaitingReport

_MAX_TEXT: Final = 100
_MAX_VECTOR: Final = 44
# What a terminal obeys instead of showing it: control characters (C0 but tab and newline, DEL, C1),
# marks that turn the direction of text, and halves of surrogate pairs, which no stream encodes.
_CONTROL_CHARS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

_answers: ContextVar[TextIO | None] = ContextVar("answers", default=None)


@contextmanager
def reserve_stdout() -> Iterator[None]:
    """Send what libraries print to stderr: with --json, stdout is parsed."""
    token = _answers.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _answers.reset(token)


def result_stream() -> TextIO:
    """Return stdout as it is outside of `reserve_stdout`."""
    return _answers.get() or sys.stdout


class CommandOutput:
    """The two streams of one command."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def print_result(self, body: Mapping[str, Any], lines: Iterable[str]) -> None:
        """Print the answer on stdout: `body` with --json, else the lines."""
        if self.as_json:
            print_json(body)
        else:
            for line in lines:
                print(escape_controls(name_options(line)), file=result_stream())

    def print_message(self, text: str) -> None:
        """Print talk on stderr."""
        print(escape_controls(name_options(text)), file=sys.stderr, flush=True)

    def progress(self, verb: str, unit: str) -> ProgressReport:
        """Return a context manager to be called with (done, total) as work goes on."""
        return ProgressReport(verb, unit)

    def waiting(self, what: str) -> WaitingReport:
        """Return a context manager around work that cannot say how far it is."""
        return WaitingReport(what)


def escape_controls(text: str) -> str:
    """Return a text that does nothing to a terminal: what it obeys is named, as Python does."""
    return _CONTROL_CHARS.sub(lambda found: ascii(found.group())[1:-1], text)


def print_json(body: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout; a number that JSON lacks (NaN, infinity) becomes null."""
    text = json.dumps(_plain(body), ensure_ascii=False, allow_nan=False)
    # In JSON these stand in strings alone, where \\u names the same characters.
    text = _CONTROL_CHARS.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
    print(text, file=result_stream())


def table_lines(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    """Return a header and one line a row: numbers to the right, long values cut short."""
    cells = [[cell_text(row.get(column)) for column in columns] for row in rows]
    to_right = [
        any(_is_number(row.get(column)) for row in rows)
        and all(row.get(column) is None or _is_number(row.get(column)) for row in rows)
        for column in columns
    ]
    widths = [
        max(len(column), *(len(line[i]) for line in cells)) if cells else len(column)
        for i, column in enumerate(columns)
    ]
    lines = []
    for line in [list(columns), *cells]:
        aligned = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, to_right, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return lines


def fit_columns(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], width: int) -> list[str]:
    """Return the columns, from the left and at least one, whose table is no wider than `width`."""
    columns_shown: list[str] = []
    for column in columns:
        lines = table_lines(rows, [*columns_shown, column])
        if columns_shown and max(len(line) for line in lines) > width:
            break
        columns_shown.append(column)
    return columns_shown


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


def tree_lines(body: Mapping[str, Any], indent: str = "") -> list[str]:
    """Return nested objects and lists as an indented tree; what is None or empty is left out."""
    lines: list[str] = []
    for key, value in body.items():
        if value is None or value in ([], {}, ()):
            continue
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}", *tree_lines(value, indent + "  ")]
        elif isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value):
            for item in value:
                lines += [f"{indent}{key}", *tree_lines(item, indent + "  ")]
        elif isinstance(value, str):
            lines.append(f"{indent}{key}  {' '.join(value.split())}")
        else:
            lines.append(f"{indent}{key}  {cell_text(value)}")
    return lines


def number_text(value: float | None) -> str:
    """Return a count with separators, or six significant digits: `4,137`, `9.34929`."""
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def interval_text(low: float | None, high: float | None) -> str:
    """Return the 95% interval as text; nothing where there is none."""
    if low is None or high is None:
        return ""
    return f", 95% interval {number_text(low)} to {number_text(high)}"


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


def duration(seconds: float) -> str:
    """Return a time in the largest unit that leaves it whole: `7d`, `90m`, `0.5s`."""
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds and seconds % length == 0:
            return f"{seconds / length:,.0f}{unit}"
    return f"{seconds:g}s"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _is_number(value: Any) -> bool:
    # DuckDB's sum of integers comes as a Decimal.
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else None
    if hasattr(value, "tolist"):  # a numpy scalar or array
        return _plain(value.tolist())
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
