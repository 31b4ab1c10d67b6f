"""Link times: what a worker's event loop does with its time, link by link, and how long it idles.

One request in 16, drawn at random, is measured and stands for all: measuring each of them took 6 to
10 % of a worker's CPU time (2 busy cores, 2026-11-27). Times are by the wall clock, as the clock of
a thread's CPU time is a system call. How long the loop's thread was busy is the kernel's count,
read once a second. The numbers are where all of a worker's are (shared_counters.py).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from replaylake.datastore.lake.runs.timings import Link, Place, Timings, Total

# In the order of a request; `idle` and `batch_wait` are waits. Those of `background` lie beside the
# event loop: requests that wait for others, and large requests that a thread answers.
SERVER_LINKS: Final[tuple[tuple[Place, Link], ...]] = (
    ("process", "receive"),
    ("process", "check"),
    ("process", "parse"),
    ("process", "inference"),
    ("process", "journal"),
    ("process", "respond"),
    ("process", "send"),
    ("process", "idle"),
    ("background", "parse"),
    ("background", "inference"),
    ("background", "journal"),
    ("background", "respond"),
    ("background", "batch_wait"),
)
# Of each link: seconds, items, bytes; behind them the seconds of the worker.
WIDTH: Final = 3 * len(SERVER_LINKS) + 1
RECEIVE: Final = 3 * SERVER_LINKS.index(("process", "receive"))
CHECK: Final = 3 * SERVER_LINKS.index(("process", "check"))
PARSE: Final = 3 * SERVER_LINKS.index(("process", "parse"))
SEND: Final = 3 * SERVER_LINKS.index(("process", "send"))
IDLE: Final = 3 * SERVER_LINKS.index(("process", "idle"))
_BACKGROUND: Final = 3 * SERVER_LINKS.index(("background", "parse"))
BATCH_WAIT: Final = 3 * SERVER_LINKS.index(("background", "batch_wait"))
WALL: Final = WIDTH - 1
_MEASURED_BITS: Final = 4
_SCALE: Final = 1 << _MEASURED_BITS
_draw_bits: Final = random.Random().getrandbits
_NO_VALUES: Final = memoryview(bytearray(8 * WIDTH)).cast("d")


def is_measured() -> bool:
    """Draw whether a request, or a batch, is measured."""
    return not _draw_bits(_MEASURED_BITS)


class LinkTimes:
    """The numbers of one worker; they are lost until `start`."""

    def __init__(self) -> None:
        self._values, self._begin = _NO_VALUES, 0
        self._loop_thread = 0
        self._schedstat: Path | None = None
        self._started_s = self._busy_before_s = 0.0

    def start(self, values: memoryview[float], begin: int) -> None:
        """Add to WIDTH numbers from `begin` on; called in the event loop's thread."""
        self._values, self._begin = values, begin
        self._loop_thread = threading.get_ident()
        self._schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._started_s, self._busy_before_s = time.perf_counter(), self._read_busy_s()

    def add(self, link: int, seconds: float, num_bytes: int = 0) -> None:
        """Add a measured request to a link, by the place of its numbers."""
        values, at = self._values, self._begin + link
        values[at] += _SCALE * seconds
        values[at + 1] += _SCALE
        values[at + 2] += _SCALE * num_bytes

    def add_act(
        self,
        times: Sequence[float],
        num: int,
        num_bytes: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """Add what acting for `num` observations took.

        times: time.perf_counter() before parse, inference, journal and respond, and at the end.
        num_bytes: of the requests, of the journal records and of the responses. All values are
        those of one measured request or one measured batch.
        """
        is_loop = threading.get_ident() == self._loop_thread
        values, at = self._values, self._begin + (PARSE if is_loop else _BACKGROUND)
        sizes = (num_bytes[0], 0, num_bytes[1], num_bytes[2])
        for (start, end), size in zip(pairwise(times), sizes, strict=True):
            # Equal where a batch was parsed before, request by request.
            if end > start:
                values[at] += _SCALE * (end - start)
                values[at + 1] += _SCALE * num
                values[at + 2] += _SCALE * size
            at += 3

    def refresh(self, received: tuple[float, int, int]) -> None:
        """Bring up to date what is not added as it happens.

        received: seconds, packets and bytes that the connections took so far.
        """
        if self._schedstat is None:
            return
        values, begin = self._values, self._begin
        wall_s = time.perf_counter() - self._started_s
        busy_s = self._read_busy_s() - self._busy_before_s
        values[begin + WALL] = wall_s
        # The kernel's count may lag behind the clock, and a counter must not decrease.
        values[begin + IDLE] = max(values[begin + IDLE], wall_s - busy_s)
        for i, value in enumerate(received):
            values[begin + RECEIVE + i] = value

    def _read_busy_s(self) -> float:
        """Return the seconds that the loop's thread ran, or waited for a processor."""
        if self._schedstat is None:
            return 0.0
        try:
            ran_ns, waited_ns, _ = self._schedstat.read_text().split()
        except (OSError, ValueError):  # a kernel without it
            return time.process_time()
        return (int(ran_ns) + int(waited_ns)) / 1e9


def to_timings(values: Mapping[tuple[Place, Link], tuple[float, ...]]) -> Timings:
    """Return seconds, items and bytes by place and link as Timings."""
    timings = Timings("process")
    for (place, link), (seconds, items, num_bytes) in values.items():
        if seconds or items:
            total = Total(seconds, round(items), round(num_bytes), round(items))
            timings.merge(Timings(place, {(place, link): total}))
    return timings
