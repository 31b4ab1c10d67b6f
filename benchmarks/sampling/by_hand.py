"""What numpy does by hand: five arrays, each gathered into an output that is made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.sampling.case import APPEND, BATCH_SIZES, STEP, Case, uniform
from benchmarks.sampling.source import nothing, source, transitions


def uniforms(folder: Path) -> Iterator[Case]:
    held = source()
    columns = held.flat()
    del columns["truncated"]
    for size in BATCH_SIZES:
        yield Case(uniform(size), gathering(columns, size), transitions(held, size))


def gathering(columns: dict[str, NDArray[Any]], size: int) -> Callable[[], dict[str, Any]]:
    rng = np.random.default_rng(0)
    outputs = {
        name: np.empty((size, *held.shape[1:]), held.dtype) for name, held in columns.items()
    }
    tensors = {name: torch.from_numpy(output) for name, output in outputs.items()}
    num_steps = len(columns["rewards"])

    def draw() -> dict[str, Any]:
        rows = rng.integers(0, num_steps, size)
        for name, held in columns.items():
            # numpy buffers the output in the default mode, which checks the rows first.
            held.take(rows, axis=0, out=outputs[name], mode="clip")
        return tensors

    return draw


def appends(folder: Path) -> Iterator[Case]:
    held = source(10_000).flat()
    steps = list(zip(*held.values(), strict=True))

    def run() -> None:
        kept: list[Any] = []
        for step in steps:
            kept.append(step)
            if len(kept) == 1_000:
                for column in zip(*kept, strict=True):
                    np.array(column)
                kept.clear()

    yield Case(APPEND, run, nothing, STEP, len(steps), note="a list, made arrays every 1,000 steps")


KINDS = {"uniform": uniforms, "append": appends}
