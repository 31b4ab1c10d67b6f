"""Report: what a command says. The answer goes to stdout, talk and progress to stderr."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import Any, Final, TextIO

from replaylake.cli.options import name_options
from replaylake.cli.output.progress import ProgressReport, WaitingReport
from replaylake.serve.pages.texts import cell_text as cell_text
from replaylake.serve.pages.texts import count as count
from replaylake.serve.pages.texts import is_number
from replaylake.serve.pages.texts import number_text as number_text
from replaylake.serve.pages.texts import size as size

# What a terminal obeys instead of showing it: control characters (C0 but tab and newline, DEL, C1),
# marks that turn the direction of text, and halves of surrogate pairs, which no stream encodes.
_CONTROL_CHARS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

# A piece of a line: its text, and the parameters of a terminal's SGR sequence ("1", "48;5;217");
# empty for plain text.
Styled = tuple[str, str]

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

    def print_result(
        self, body: Mapping[str, Any], lines: Iterable[str | Sequence[Styled]]
    ) -> None:
        """Print the answer on stdout: `body` with --json, else the lines.

        A line that is a text is the library's, whose `parameters` are named as options; one of
        pieces is printed as it is.
        """
        if self.as_json:
            print_json(body)
        else:
            for line in lines:
                pieces = [(name_options(line), "")] if isinstance(line, str) else line
                print("".join(_style(text, style) for text, style in pieces), file=result_stream())

    def print_message(self, text: str) -> None:
        """Print talk on stderr."""
        print(escape_controls(name_options(text)), file=sys.stderr, flush=True)

    def progress(self, verb: str, unit: str) -> ProgressReport:
        """Return a context manager to be called with (done, total) as work goes on."""
        return ProgressReport(verb, unit)

    def waiting(self, what: str) -> WaitingReport:
        """Return a context manager around work that cannot say how far it is."""
        return WaitingReport(what)


def data_lines(lines: Iterable[str]) -> Iterator[Sequence[Styled]]:
    """Yield lines that have text of the user's data, in which nothing may be replaced."""
    return ([(line, "")] for line in lines)


def has_styles() -> bool:
    """Whether stdout is a terminal that may show colors (https://no-color.org)."""
    return result_stream().isatty() and not os.environ.get("NO_COLOR")


def terminal_width() -> int | None:
    """Return how many characters a line of stdout has; None where it is no terminal."""
    return shutil.get_terminal_size().columns if result_stream().isatty() else None


def _style(text: str, style: str) -> str:
    escaped = escape_controls(text)
    return f"\x1b[{style}m{escaped}\x1b[0m" if style and has_styles() else escaped


def one_line(text: str) -> str:
    """Return a text whose tabs and line breaks are named, so that it cannot look like a line."""
    return text.replace("\t", "\\t").replace("\n", "\\n")


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
        any(is_number(row.get(column)) for row in rows)
        and all(row.get(column) is None or is_number(row.get(column)) for row in rows)
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


def interval_text(low: float | None, high: float | None) -> str:
    """Return the 95% interval as text; nothing where there is none."""
    if low is None or high is None:
        return ""
    return f", 95% interval {number_text(low)} to {number_text(high)}"


def duration(seconds: float) -> str:
    """Return a time in the largest unit that leaves it whole: `7d`, `90m`, `0.5s`."""
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds and seconds % length == 0:
            return f"{seconds / length:,.0f}{unit}"
    return f"{seconds:g}s"


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
