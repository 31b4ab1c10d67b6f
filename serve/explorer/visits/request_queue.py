"""Request queue: which requests of a kind may run now, which wait, and which are refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from replaylake.serve.messages import RequestRefusedError

_POLL_S: Final = 0.05


class RequestQueue:
    """Turns in the order of arrival. Safe from several threads and event loops.

    Who waits holds no thread: the threads that make pages are for those that can go on.
    """

    def __init__(self, max_running: int, max_waiting: int, what: str = "queries") -> None:
        """what: the requests, in the plural, for messages."""
        self._lock = threading.Lock()
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._what = what
        # By arrival; the first `max_running` have their turn.
        self._tickets: list[object] = []

    @property
    def num_waiting(self) -> int:
        """How many wait for their turn now."""
        with self._lock:
            return max(0, len(self._tickets) - self._max_running)

    @asynccontextmanager
    async def take_turn(self, is_gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the block.

        is_gone: whether the reader has left. Raises: RequestRefusedError: 503 where too many wait,
        or where the reader left before the turn.
        """
        ticket = object()
        with self._lock:
            if len(self._tickets) >= self._max_running + self._max_waiting:
                message = (
                    f"{self._max_waiting} {self._what} wait already; try again in some seconds"
                )
                raise RequestRefusedError(503, self._what, message)
            self._tickets.append(ticket)
        try:
            while not self._is_first(ticket):
                if await is_gone():
                    message = "the reader left before this request ran"
                    raise RequestRefusedError(503, self._what, message)
                await asyncio.sleep(_POLL_S)
            yield
        finally:
            with self._lock:
                self._tickets.remove(ticket)

    def _is_first(self, ticket: object) -> bool:
        with self._lock:
            return ticket in self._tickets[: self._max_running]
