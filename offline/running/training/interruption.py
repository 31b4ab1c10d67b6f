"""Interruption: Ctrl-C and SIGTERM as a request, so that a run ends between two updates."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class RunInterrupted(KeyboardInterrupt):
    """A run that was asked to end; it can be resumed from the checkpoint of `update`."""

    def __init__(self, run_id: str, update: int | None) -> None:
        super().__init__(f"run {run_id}, saved at update {update}")
        self.run_id = run_id
        self.update = update


class Interruption:
    """Whether somebody asked the run to end."""

    def __init__(self) -> None:
        self.is_requested = False

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Take the first signal in the block as a request; the second interrupts at once.

        In an update the learner is between two states, of which no checkpoint can be made. Handlers
        that the program set itself are left alone, and so are all outside of the main thread.
        """
        with _install_handlers(self._on_signal):
            yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt in the block, as Ctrl-C does: what was begun is ended.

    For what is done before and after `wait`, which may be within it.
    """
    with _install_handlers(_raise_interrupt):
        yield


@contextmanager
def _install_handlers(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {}
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if handler in (signal.SIG_DFL, signal.default_int_handler, _raise_interrupt):
            before[number] = handler
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
