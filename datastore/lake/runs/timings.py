"""Timings: the time and bytes of each link of a run, from a step taken to the updated policy.

Each process of a run adds up what its links take. The run logs the totals, from which
`build_run_profile` tells where its time went. `ThreadTimings` does the same for one operation
of a process, such as an ingest, from its spans.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from replaylake.datastore.storage.spans import SpanName, SpanWork

# Where a link runs: in the workers' processes, in the thread of the training loop, in the thread
# that does the work of a process without a run (an ingest), or in other threads of the
# same process, which run beside it.
Place = Literal["workers", "trainer", "process", "background"]
PLACES: Final[tuple[Place, ...]] = get_args(Place)
Link = Literal[
    "start",
    "hash",
    "parse",
    "validate",
    "set_policy",
    "env_step",
    "inference",
    "assemble",
    "encode",
    "key_index",
    "quarantine",
    "compress",
    "shard_write",
    "fsync",
    "write_wait",
    "transfer",
    "worker_wait",
    "receive",
    "check",
    "journal",
    "respond",
    "send",
    "batch_wait",
    "idle",
    "commit",
    "tail",
    "decode",
    "sample",
    "to_device",
    "update",
    "broadcast",
    "evaluate",
    "checkpoint",
    "log",
    "learner_wait",
]
LINKS: Final[tuple[Link, ...]] = get_args(Link)
# Of the run's metrics: profile/<place>/<link>/seconds, /items, /bytes and /calls, and
# profile/seconds: totals since the process that logs them began to work on the run.
PROFILE: Final = "profile"
WALL_SECONDS: Final = f"{PROFILE}/seconds"


@dataclass
class Total:
    """Seconds that a link took, over all processes.

    items: steps, updates, ..., by link. num_calls: how often it was timed, so that bytes a call
    are the size of a message.
    """

    seconds: float = 0.0
    items: int = 0
    num_bytes: int = 0
    num_calls: int = 0

    def add(self, other: Total) -> None:
        self.seconds += other.seconds
        self.items += other.items
        self.num_bytes += other.num_bytes
        self.num_calls += other.num_calls


@dataclass
class Timings:
    """Totals by place and link; one thread adds, or each has its own and they are merged.

    place: of the links that are added here. started_at: when the work began, by `perf_counter`.
    """

    place: Place
    totals: dict[tuple[Place, Link], Total] = field(default_factory=dict)
    started_at: float = field(default_factory=time.perf_counter)
    # For each measurement that is open: the seconds that were added inside it.
    _inside: list[float] = field(default_factory=list)

    def add(self, link: Link, seconds: float, items: int = 1, num_bytes: int = 0) -> None:
        """Add to a link's totals; a measurement that is open does not count these seconds."""
        self._add_to(self.place, link, Total(seconds, items, num_bytes, 1))
        if self._inside:
            self._inside[-1] += seconds

    @contextmanager
    def measure(self, link: Link, items: int = 1) -> Iterator[SpanWork]:
        """Add the time of the block, without what is added to other links inside it.

        The block may count its items and bytes in what it is given.
        """
        work = SpanWork(items)
        self._inside.append(0.0)
        started = time.perf_counter()
        try:
            yield work
        finally:
            seconds = time.perf_counter() - started
            own = seconds - self._inside.pop()
            self._add_to(self.place, link, Total(own, work.items, work.num_bytes, 1))
            if self._inside:
                self._inside[-1] += seconds

    def merge(self, other: Timings, *, place: Place | None = None) -> None:
        """Add another's totals. place: where its links ran, if in this thread's own time."""
        for (of, link), total in other.totals.items():
            self._add_to(of if place is None else place, link, total)
            if place is not None and self._inside:
                self._inside[-1] += total.seconds

    def take(self) -> Timings:
        """Return the totals, and begin anew."""
        taken, self.totals = Timings(self.place, self.totals), {}
        return taken

    def to_metrics(self) -> Mapping[str, float]:
        """Return the totals as a run logs them, and the seconds since the work began."""
        metrics = {WALL_SECONDS: time.perf_counter() - self.started_at}
        for (place, link), total in self.totals.items():
            name = f"{PROFILE}/{place}/{link}"
            metrics[f"{name}/seconds"] = total.seconds
            metrics[f"{name}/items"] = float(total.items)
            metrics[f"{name}/bytes"] = float(total.num_bytes)
            metrics[f"{name}/calls"] = float(total.num_calls)
        return metrics

    def _add_to(self, place: Place, link: Link, total: Total) -> None:
        self.totals.setdefault((place, link), Total()).add(total)


class ThreadTimings:
    """A SpanRecorder that keeps totals per thread.

    timings: totals of the thread that creates the recorder; other threads count as `background`.
    """

    def __init__(self, timings: Timings) -> None:
        self._owner = threading.get_ident()
        self._timings = {self._owner: timings}

    def measure_span(self, name: SpanName) -> AbstractContextManager[SpanWork]:
        thread = threading.get_ident()
        # Each thread adds its own key, which a dict takes without a lock.
        timings = self._timings.get(thread)
        if timings is None:
            timings = self._timings.setdefault(thread, Timings("background"))
        return timings.measure(name, items=0)

    def merge(self) -> Timings:
        """Return the totals of all threads; of running threads, the spans that have ended."""
        merged = self._timings[self._owner].take()
        for thread, timings in list(self._timings.items()):
            if thread != self._owner:
                merged.merge(Timings(timings.place, dict(timings.totals)))
        return merged
