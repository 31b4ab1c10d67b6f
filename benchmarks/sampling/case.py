"""A case: one workload of one system, ready to be checked and timed.

Needs nothing but the standard library: it is imported in the peers' environments too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

BATCH: Final = "us a batch"
STEP: Final = "us a step"
SECONDS: Final = "s"
MIB: Final = "MiB"

# The names of the table's rows; `uniform` and `curve` say the rest.
NSTEP: Final = "n-step 3, B=256"
SEQUENCES: Final = "32 sequences of 64"
PRIORITIZED: Final = "prioritized B=256, sample and update"
FRAMES: Final = "Atari-like frames B=256, stacks of 4"
MAPPED: Final = "mmap view 4x larger than the memory budget, B=256"
MAPPED_IN_RAM: Final = "the same view in memory, B=256"
MAPPED_MEMORY: Final = "anonymous memory of the mmap view"
COLD: Final = "snapshot to first batch, cold"
REOPENED: Final = "snapshot to first batch, reopened"
APPEND: Final = "append one step to a live view"
BATCH_SIZES: Final = (256, 32, 4096)
CURVE: Final = (100_000, 1_000_000, 10_000_000)

_CHECKED_BATCHES: Final = 10


@dataclass(frozen=True)
class Case:
    """`run` gives a batch (by field name, or what `check` takes) or appends `steps` steps.

    In MiB, `run` gives the figure itself. `note` says in what the system differs from the others;
    it is shown behind its name.
    """

    workload: str
    run: Callable[[], Any]
    check: Callable[[Any], None]
    unit: str = BATCH
    steps: int = 1
    note: str = ""


# Prepares and yields the cases of one kind; what they share lives while the generator does.
Cases = Callable[[Path], Iterator[Case]]


def uniform(batch_size: int) -> str:
    return f"uniform B={batch_size}"


def curve(num_steps: int) -> str:
    return f"uniform B=256 out of {num_steps:.0e} steps".replace("e+0", "e")


def figure(case: Case) -> float:
    """Check the first batches, then return the least of several means, in the case's unit."""
    if case.unit == MIB:
        return float(case.run())
    for _ in range(_CHECKED_BATCHES if case.unit == BATCH else 1):
        case.check(case.run())
    count = max(1, min(2_000, int(0.3 / _mean(case.run, 1))))
    means: list[float] = []
    while len(means) < 3 or (len(means) < 7 and sum(means) * count < 2.0):
        means.append(_mean(case.run, count))
    return min(means) / case.steps * (1 if case.unit == SECONDS else 1e6)


def _mean(run: Callable[[], Any], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - started) / count
