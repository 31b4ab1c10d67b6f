"""Stopping: letting a signal end work that goes on and on, where it may be left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from replaylake.cli.output.command_output import CommandOutput


@contextmanager
def stop_on_signals(report: CommandOutput) -> Iterator[threading.Event]:
    """Let the first SIGINT or SIGTERM end the work between two commits, a second at once."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def on_signal(number: int, frame: Any) -> None:
        for which, handler in before.items():
            signal.signal(which, handler)
        stop.set()

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
    if stop.is_set():
        report.print_message("stopped")
