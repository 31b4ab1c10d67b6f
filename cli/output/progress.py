"""Progress: how far long work is, on stderr: a bar on a terminal, elsewhere now and then a line."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# Nothing is said of what takes less; then no more often than this where the output is no terminal.
_LINE_INTERVAL_S: Final = 2.0
_BAR_DELAY_S: Final = 0.5
# Before this a rate says nothing.
_RATE_AFTER_S: Final = 0.2


class ProgressReport:
    """A bar on a terminal; elsewhere lines such as `read 120/200 files, 60 files/s, 2 s left`.

    Work of several stages calls `stage` as each begins, so that rates are of the stage alone.
    """

    def __init__(self, verb: str, unit: str) -> None:
        self._verb = verb
        self._unit = unit
        self._start = self._stage_start = self._updated_at = self._printed_at = time.monotonic()
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
        elif self._last and self._printed_at > self._start:
            self._print()

    def stage(self, verb: str, unit: str) -> None:
        """Begin another part of the work, if it is another."""
        if (verb, unit) == (self._verb, self._unit):
            return
        self._verb, self._unit = verb, unit
        # It began when the stage before it ended; now, some of it is done.
        self._stage_start = self._updated_at

    def __call__(
        self, done: int, total: int | None, note: str = "", *, share: float | None = None
    ) -> None:
        """Say how far it is, if it is time to.

        share: of the stage's work that is done, where `total` does not tell it.
        """
        if share is None and total:
            share = done / total
        self._updated_at = time.monotonic()
        text = self._text(done, total, share, note)
        if self._is_terminal:
            self._draw(text, share)
            return
        self._last = text
        if time.monotonic() - self._printed_at >= _LINE_INTERVAL_S:
            self._print()

    def _text(self, done: int, total: int | None, share: float | None, note: str) -> str:
        elapsed_s = self._updated_at - self._stage_start
        of = amount(done, self._unit) if total is None else amount(done, self._unit, total)
        # Work that is not counted has no unit and no total.
        parts = [f"{self._verb} {of}" if self._unit or total or done else self._verb]
        if elapsed_s >= _RATE_AFTER_S and self._unit:
            parts.append(f"{amount(round(done / elapsed_s), self._unit)}/s")
        # Where there is no unit, a note may tell the time that is left better than the share.
        is_told = self._unit or not note
        if elapsed_s >= _RATE_AFTER_S and is_told and share is not None and 0 < share < 1:
            parts.append(f"{time_left(elapsed_s * (1 - share) / share)} left")
        return ", ".join(parts) + (f"  {note}" if note else "")

    def _print(self) -> None:
        self._printed_at = time.monotonic()
        print(self._last, file=sys.stderr, flush=True)
        self._last = ""

    def _draw(self, text: str, share: float | None) -> None:
        if self._bar is None:
            if time.monotonic() - self._start < _BAR_DELAY_S:
                return
            self._bar, self._task = _open_bar()
        if self._task is not None:
            total = None if share is None else 1.0
            self._bar.update(self._task, completed=share or 0.0, total=total, text=text)


class WaitingReport:
    """Says every two seconds what is being waited for; on a terminal in one line, then cleared."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print_message, name="waiting", daemon=True)

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

    def _print_message(self) -> None:
        start = time.monotonic()
        is_terminal = sys.stderr.isatty()
        text = ""
        while not self._ended.wait(_LINE_INTERVAL_S):
            text = f"{self._what}, {time.monotonic() - start:.0f} s"
            print(text, end="\r" if is_terminal else "\n", file=sys.stderr, flush=True)
        if text and is_terminal:
            print(" " * len(text), end="\r", file=sys.stderr, flush=True)


def amount(number: int, unit: str, total: int | None = None) -> str:
    """Return `1,200 steps`, `1,200/5,000 steps`, or for bytes `1.2 GB`, `1.2/5.0 GB`."""
    if unit == "bytes":
        scale, name = _scale(number if total is None else total)
        of = "" if total is None else f"/{total / scale:,.1f}"
        return f"{number / scale:,.1f}{of} {name}"
    of = f"{number:,}" if total is None else f"{number:,}/{total:,}"
    return f"{of} {unit}".rstrip()


def time_left(seconds: float) -> str:
    """Return `40 s`, `3 min 20 s` or `2 h 5 min`."""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _scale(num_bytes: int) -> tuple[int, str]:
    for power, name in ((4, "TB"), (3, "GB"), (2, "MB")):
        if num_bytes >= 1000**power:
            return 1000**power, name
    return 1000, "kB"


def _open_bar() -> tuple[Progress, TaskID]:
    # rich takes 60 ms to import, and most commands never draw a bar.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    bar = Progress(
        BarColumn(bar_width=20),
        # A name that is in a note may hold anything; rich would read [red] as a color.
        TextColumn(
            "{task.fields[text]}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis"),
        ),
        console=Console(stderr=True),
        transient=True,
    )
    bar.start()
    return bar, bar.add_task("", total=None, text="")
