"""Deadlines of requests that wait for the rest of their body or for an endpoint.

One timer serves all of them: a timer or a task for each request would cost more than its handling.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

# Key of an ASGI scope: time.perf_counter() when the request's head was complete, if it is known.
ARRIVED: Final = "replaylake.arrived"
# Key of an ASGI scope: the ArrivalCounter of the server, if it has one.
ARRIVALS: Final = "replaylake.arrivals"
_CHECK_INTERVAL_S: Final = 0.05


class ArrivalCounter:
    """How many requests have come and not begun, of those that the event loop handed out at once.

    It reads from all sockets that have something, and then begins the requests: so the first knows
    how many are behind it. A request that never begins is forgotten two rounds of the loop later.
    """

    def __init__(self) -> None:
        """num_waiting: requests that arrived and have not begun; until then, the loop is busy."""
        self.num_waiting, self._is_armed = 0, False

    def record_arrival(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count a request that has come."""
        self.num_waiting += 1
        if not self._is_armed:
            self._is_armed = True
            loop.call_soon(loop.call_soon, self._reset)

    def start_next(self) -> int:
        """Count one that begins; return how many are behind it."""
        if self.num_waiting:
            self.num_waiting -= 1
        return self.num_waiting

    def _reset(self) -> None:
        self.num_waiting, self._is_armed = 0, False


class RequestDeadline:
    """The deadline of a request: the task that answers it, and the time (time.perf_counter).

    The state of a request is a subclass, so that a request needs one object, not two.
    """

    __slots__ = ("due", "is_overdue", "task")

    def __init__(self, due: float) -> None:
        """Make the deadline of a request that the current task answers."""
        task = asyncio.current_task()
        assert task is not None
        self.task: asyncio.Task[object] = task
        self.due, self.is_overdue = due, False


class Deadlines:
    """All requests of a worker that have not been answered."""

    def __init__(self) -> None:
        self._all: set[RequestDeadline] = set()
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, wait: RequestDeadline) -> None:
        """Start a deadline: when due, the task is cancelled and `is_overdue` is set."""
        self._all.add(wait)
        if self._timer is None:
            self._arm()

    def leave(self, wait: RequestDeadline) -> None:
        """End; the task is then as if it had not been cancelled by us."""
        self._all.discard(wait)
        if wait.is_overdue:
            wait.task.uncancel()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_CHECK_INTERVAL_S, self._check)

    def _check(self) -> None:
        now = time.perf_counter()
        for wait in self._all:
            if wait.due <= now and not wait.is_overdue:
                wait.is_overdue = True
                wait.task.cancel()
        if self._all:
            self._arm()
        else:
            self._timer = None
