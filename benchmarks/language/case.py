"""A case: a figure of one system, and how it is measured. Needs the standard library alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

INGEST: Final = "NeMo-RL's JSONL, read and written"
SAMPLE: Final = "64 sequences of {length}, of {num:,}"
COLD: Final = "{num:,} sequences of {length} to the first batch, cold"
REOPENED: Final = "{num:,} sequences of {length} to the first batch, reopened"
AT_REST: Final = "NeMo-RL's JSONL, at rest"
TRAJECTORY: Final = "a trajectory of 200,000 tokens and 300 tool calls: {what}"
_MEANS: Final = 7
_SECONDS: Final = 0.4


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    jsonl: tuple[int, int]
    sampled: tuple[int, int]
    opened: tuple[int, int]


FULL: Final = Sizes(jsonl=(2_500, 2_048), sampled=(100_000, 2_048), opened=(1_000_000, 256))
SMALL: Final = Sizes(jsonl=(200, 512), sampled=(500, 256), opened=(2_000, 64))

Line = tuple[str, float, str]
Measure = Callable[[Path, Sizes], Iterator[Line]]


def time_batches(sample: Callable[[], Any], check: Callable[[Any], None]) -> float:
    """Return the least of several means, in us a batch, after checking some batches."""
    for _ in range(5):
        check(sample())
    means = []
    for _ in range(_MEANS):
        num, started = 0, time.perf_counter()
        while (seconds := time.perf_counter() - started) < _SECONDS:
            sample()
            num += 1
        means.append(seconds / num * 1e6)
    return min(means)
