"""One memcpy of a batch's bytes, from another place of 1.8 GB each time, into the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.language.case import SAMPLE, Line, Sizes, time_batches
from benchmarks.language.source import BATCH

_BYTES_PER_TOKEN = 4 + 1 + 4


def sample(folder: Path, sizes: Sizes) -> Iterator[Line]:
    num, length = sizes.sampled
    size = BATCH * length * _BYTES_PER_TOKEN
    stored = np.ones(num * length * _BYTES_PER_TOKEN, np.uint8)
    target = np.zeros(size, np.uint8)
    rng = np.random.default_rng(0)
    starts = iter(rng.integers(0, len(stored) - size, 1_000_000).tolist())

    def copy() -> np.ndarray:
        start = next(starts)
        target[:] = stored[start : start + size]
        return target

    figure = time_batches(copy, lambda copied: None)
    yield SAMPLE.format(num=num, length=length), figure, "us a batch"


KINDS = {"sample": sample}
