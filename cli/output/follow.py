"""`replaylake ingest --follow`: JSON lines that keep arriving, until they end or it is told to."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from replaylake.cli.output.command_output import CommandOutput, count
from replaylake.cli.output.receipt import key_lines, rename_lines, shorten_line

if TYPE_CHECKING:
    from replaylake.datastore.episodes.spaces import Space
    from replaylake.datastore.interchange.formats.checks import Finding
    from replaylake.datastore.interchange.formats.format import ReadOptions
    from replaylake.datastore.interchange.ingest.stream.lines import LineReader
    from replaylake.datastore.interchange.ingest.stream.receipt import StreamProgress, StreamReceipt
    from replaylake.datastore.lake.lake import Lake
    from replaylake.datastore.lake.unique_keys import OnConflict

_STDIN: Final = "-"
# Rejected lines that are said as they come; the receipt counts all.
_MAX_REPORTED: Final = 20


def follow_lines(
    report: CommandOutput,
    lake: Lake,
    sources: Sequence[Path],
    dataset: str,
    *,
    format: str,
    options: ReadOptions,
    spaces: tuple[Space, Space] | None,
    flush_every_s: float,
    stream: str | None,
    readmit: bool,
    unique: Sequence[str],
    late: Sequence[str],
    on_conflict: OnConflict,
) -> None:
    """Follow one source, and print the receipt. SIGINT and SIGTERM end it as its end would."""
    from replaylake.datastore.interchange.ingest.stream.line_kinds import find_line_kind
    from replaylake.datastore.interchange.ingest.stream.stream import follow

    if len(sources) != 1:
        raise typer.BadParameter(
            f"found {len(sources)} sources, expected one with --follow: - or a growing file.",
            param_hint="SOURCE",
        )
    find_line_kind(format, options)  # refused before the source is opened
    num_reported = 0

    def report_rejected(finding: Finding) -> None:
        nonlocal num_reported
        num_reported += 1
        if num_reported <= _MAX_REPORTED:
            report.print_message(f"rejected: {finding.check}: {finding.message}")
        elif num_reported == _MAX_REPORTED + 1:
            report.print_message("rejected: further lines; the receipt counts them")

    with report.progress("committed", "steps") as progress, _stop_on_signals() as stop:

        def report_progress(now: StreamProgress) -> None:
            waiting = f"{now.num_waiting:,} waiting" if now.num_waiting else ""
            progress(now.num_committed, None, waiting)

        with _reader(sources[0]) as lines:
            receipt = follow(
                lake,
                lines,
                dataset,
                format=format,
                stream=stream,
                options=options,
                spaces=spaces,
                flush_every_s=flush_every_s,
                stop=stop,
                on_progress=report_progress,
                on_rejected=report_rejected,
                readmit=readmit,
                unique=unique,
                late=late,
                on_conflict=on_conflict,
            )
    report.print_result(receipt.to_json(), _summary(receipt))


def _reader(source: Path) -> LineReader:
    from replaylake.datastore.interchange.ingest.stream.lines import LineReader

    if str(source) == _STDIN:
        return LineReader(sys.stdin.fileno(), "<stdin>")
    return LineReader.from_path(source)


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """Return an event that SIGINT and SIGTERM set; a second one ends the process as usual."""
    stop = threading.Event()
    before: dict[int, Any] = {}

    def on_signal(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, before[number])

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def _summary(receipt: StreamReceipt) -> Iterator[str]:
    lines = receipt.lines
    if receipt.version is None:
        yield f"{receipt.dataset}: nothing added"
    else:
        yield (
            f"{receipt.dataset}@{receipt.version}: {count(lines.committed, 'step')} committed in "
            f"{count(receipt.num_commits, 'version')}"
        )
    read = count(lines.read, "line")
    if receipt.num_lines != lines.read:
        read = f"{count(lines.read, 'step')} in {count(receipt.num_lines, 'line')}"
    yield (
        f"  read {read} of stream {receipt.stream}: rejected "
        f"{lines.rejected:,}; already present {lines.already_present:,}"
        + (f"; deleted before {lines.deleted_before:,}" if lines.deleted_before else "")
    )
    yield from key_lines(receipt.keys)
    for reason in receipt.reasons:
        text = count(reason.num_lines, "line")
        yield f"  rejected {text} for {reason.check}, such as {shorten_line(reason.example)}"
    yield from rename_lines(receipt.renames)
    for note in receipt.notes:
        yield f"  note: {shorten_line(note)}"
