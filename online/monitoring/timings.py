"""Timings: where a run's time and bytes go, link by link from a step taken to weights sent back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

Link = Literal[
    "env_step",
    "inference",
    "encode",
    "shard_write",
    "commit",
    "tail",
    "decode",
    "sample",
    "to_device",
    "update",
    "broadcast",
    "worker_wait",
    "learner_wait",
]
LINKS: Final[tuple[Link, ...]] = get_args(Link)
# Of the run's metrics: profile/<link>/seconds, /items and /bytes, totals since it began.
PROFILE: Final = "profile"


@dataclass
class Total:
    """Seconds that a link took, over all processes; items (steps, updates, ...) and bytes."""

    seconds: float = 0.0
    items: int = 0
    num_bytes: int = 0


@dataclass
class Timings:
    """Totals by link; one thread adds, or each has its own and they are merged."""

    totals: dict[Link, Total] = field(default_factory=dict)

    def add(self, link: Link, seconds: float, items: int = 1, num_bytes: int = 0) -> None:
        """Add to a link's totals."""
        total = self.totals.setdefault(link, Total())
        total.seconds += seconds
        total.items += items
        total.num_bytes += num_bytes

    @contextmanager
    def measure(self, link: Link, items: int = 1, num_bytes: int = 0) -> Iterator[None]:
        """Add the time of the block."""
        started = time.perf_counter()
        yield
        self.add(link, time.perf_counter() - started, items, num_bytes)

    def merge(self, other: Timings) -> None:
        for link, total in other.totals.items():
            self.add(link, total.seconds, total.items, total.num_bytes)

    def take(self) -> Timings:
        """Return the totals, and begin anew."""
        timings, self.totals = Timings(self.totals), {}
        return timings

    def to_metrics(self) -> Mapping[str, float]:
        return {
            f"{PROFILE}/{link}/{what}": float(value)
            for link, total in self.totals.items()
            for what, value in (
                ("seconds", total.seconds),
                ("items", total.items),
                ("bytes", total.num_bytes),
            )
        }
