"""Pace: which requests are worked on beside the event loop, by what such requests have cost."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Final, TypeVar

from starlette.concurrency import run_in_threadpool

_Result = TypeVar("_Result")

# The longest that one request may keep all others waiting; a thread adds 0.1 ms to its own.
_MAX_ON_LOOP_S: Final = 0.005
# What a byte of a body costs before one of its size was seen: four times what JSON of floats does.
_GUESS_S: Final = 2e-7
_WEIGHT: Final = 0.2
_MAX_FACTOR: Final = 4.0
_MAX_BITS: Final = 48


class LatencyEstimate:
    """Learns what requests of a kind cost by their size, to the power of two.

    The cost is that of all: parsing, the graph, the log. It is kept for sizes and not worked out
    from the number of rows, because a graph costs what it costs, be it for one row.
    """

    def __init__(self) -> None:
        self._seconds: list[float | None] = [None] * _MAX_BITS

    def is_within(self, num_bytes: int, seconds: float) -> bool:
        """Whether requests of that size have cost no more than so much; False for the first."""
        mean = self._seconds[min(num_bytes.bit_length(), _MAX_BITS - 1)]
        return mean is not None and mean <= seconds

    def learn(self, num_bytes: int, seconds: float) -> None:
        """Take note of what a request of that size cost."""
        self._learn(min(num_bytes.bit_length(), _MAX_BITS - 1), seconds)

    async def run(self, num_bytes: int, work: Callable[[], _Result]) -> _Result:
        """Do the work of a request of that size, here or in a thread."""
        size = min(num_bytes.bit_length(), _MAX_BITS - 1)
        if self._estimate_s(size) <= _MAX_ON_LOOP_S:
            start = perf_counter()
            try:
                return work()
            finally:
                self._learn(size, perf_counter() - start)
        return await run_in_threadpool(self._work_alone, size, work)

    def _work_alone(self, size: int, work: Callable[[], _Result]) -> _Result:
        # The thread's own time: while it waits for others it holds up nobody.
        start = thread_time()
        try:
            return work()
        finally:
            self._learn(size, thread_time() - start)

    def _estimate_s(self, size: int) -> float:
        mean = self._seconds[size]
        if mean is not None:
            return mean
        for smaller in range(size - 1, -1, -1):
            if (seconds := self._seconds[smaller]) is not None:
                return seconds * 2.0 ** (size - smaller)  # at most: a part of it is for any size
        return _GUESS_S * 2.0**size

    def _learn(self, size: int, seconds: float) -> None:
        mean = self._seconds[size]
        if mean is None:
            self._seconds[size] = seconds
        else:
            # One that had to wait for a commit took a hundred times as long, and says nothing.
            self._seconds[size] = mean + _WEIGHT * (min(seconds, _MAX_FACTOR * mean) - mean)
