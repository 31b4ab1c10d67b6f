"""Report: what a command says. The answer goes to stdout, talk and progress to stderr."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from decimal import Decimal
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# Nothing is said of what takes less; then no more often than this where the output is no terminal.
_LINE_INTERVAL_S: Final = 2.0
_BAR_DELAY_S: Final = 0.5
_MAX_TEXT: Final = 100
_MAX_VECTOR: Final = 44


_answers: ContextVar[TextIO | None] = ContextVar("answers", default=None)


@contextmanager
def only_answers_on_stdout() -> Iterator[None]:
    """Send what libraries print to stderr: with --json, stdout is parsed."""
    token = _answers.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _answers.reset(token)


def answer_stream() -> TextIO:
    """Return stdout as it is outside of `only_answers_on_stdout`."""
    return _answers.get() or sys.stdout


class Report:
    """The two streams of one command."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def answer(self, body: Mapping[str, Any], lines: Iterable[str]) -> None:
        """Print the answer on stdout: `body` with --json, else the lines."""
        if self.as_json:
            print_json(body)
        else:
            for line in lines:
                print(line, file=answer_stream())

    def say(self, text: str) -> None:
        """Print talk on stderr."""
        print(text, file=sys.stderr, flush=True)

    def progress(self, verb: str, unit: str) -> ProgressReport:
        """Return a context manager to be called with (done, total) as work goes on."""
        return ProgressReport(verb, unit)

    def waiting(self, what: str) -> WaitingReport:
        """Return a context manager around work that cannot say how far it is."""
        return WaitingReport(what)


class ProgressReport:
    """A bar on a terminal; elsewhere plain lines such as `read 120/200 files`."""

    def __init__(self, verb: str, unit: str) -> None:
        self.verb = verb
        self._unit = unit
        self._began = self._said = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last = ""

    def __enter__(self) -> ProgressReport:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._last and self._said > self._began:
            self._print()

    def __call__(self, done: int, total: int | None, note: str = "") -> None:
        """Say how far it is, if it is time to."""
        if self._is_terminal:
            self._draw(done, total, note)
            return
        of = f"{done:,}" if total is None else f"{done:,}/{total:,}"
        self._last = " ".join(filter(None, [self.verb, of, self._unit, note and f" {note}"]))
        if time.monotonic() - self._said >= _LINE_INTERVAL_S:
            self._print()

    def _print(self) -> None:
        self._said = time.monotonic()
        print(self._last, file=sys.stderr, flush=True)
        self._last = ""

    def _draw(self, done: int, total: int | None, note: str) -> None:
        if self._bar is None:
            if time.monotonic() - self._began < _BAR_DELAY_S:
                return
            self._bar, self._task = _open_bar(self.verb, self._unit)
        if self._task is not None:
            self._bar.update(self._task, completed=done, total=total, note=note)


class WaitingReport:
    """Says every two seconds what is being waited for; on a terminal in one line, then cleared."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._say, name="waiting", daemon=True)

    def __enter__(self) -> WaitingReport:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Fall silent; again if need be."""
        self._ended.set()
        self._thread.join()

    def _say(self) -> None:
        began = time.monotonic()
        is_terminal = sys.stderr.isatty()
        said = ""
        while not self._ended.wait(_LINE_INTERVAL_S):
            said = f"{self._what}, {time.monotonic() - began:.0f} s"
            print(said, end="\r" if is_terminal else "\n", file=sys.stderr, flush=True)
        if said and is_terminal:
            print(" " * len(said), end="\r", file=sys.stderr, flush=True)


def print_json(body: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout; a number that JSON lacks (NaN, infinity) becomes null."""
    text = json.dumps(_plain(body), ensure_ascii=False, allow_nan=False)
    print(text, file=answer_stream())


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


def fitting(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], width: int) -> list[str]:
    """Return the columns, from the left and at least one, whose table is no wider than `width`."""
    shown: list[str] = []
    for column in columns:
        lines = table_lines(rows, [*shown, column])
        if shown and max(len(line) for line in lines) > width:
            break
        shown.append(column)
    return shown


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


def _open_bar(verb: str, unit: str) -> tuple[Progress, TaskID]:
    # rich takes 60 ms to import, and most commands never draw a bar.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining
    from rich.table import Column

    bar = Progress(
        TextColumn(verb, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=20),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn(unit, table_column=Column(no_wrap=True)),
        Remaining(table_column=Column(no_wrap=True)),
        # Last and cut short: on a narrow terminal the count and the time matter more.
        TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=Console(stderr=True),
        transient=True,
    )
    bar.start()
    return bar, bar.add_task(verb, total=None, note="")


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
