"""d3rlpy: episodes, from which a batch is put together transition by transition."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from d3rlpy.dataset import Episode, InfiniteBuffer, ReplayBuffer, create_infinite_replay_buffer

from benchmarks.sampling.case import BATCH_SIZES, COLD, SECONDS, SEQUENCES, Case, uniform
from benchmarks.sampling.source import Source, sequences, source, transitions

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))


def samples(folder: Path) -> Iterator[Case]:
    held = source()
    buffer = create_infinite_replay_buffer(episodes(held))
    for size in BATCH_SIZES:

        def draw(size: int = size) -> dict[str, torch.Tensor]:
            return tensors(buffer.sample_transition_batch(size))

        yield Case(uniform(size), draw, transitions(held, size))
    stretches = Case(
        SEQUENCES,
        lambda: tensors(buffer.sample_trajectory_batch(32, 64)),
        sequences(held, 32, 64),
    )
    yield stretches


def opens(folder: Path) -> Iterator[Case]:
    held = source()
    saved = folder / "d3rlpy.h5"
    if not saved.exists():
        with saved.open("w+b") as file:
            create_infinite_replay_buffer(episodes(held)).dump(file)

    def run() -> dict[str, torch.Tensor]:
        with saved.open("rb") as file:
            buffer = ReplayBuffer.load(file, InfiniteBuffer())
        return tensors(buffer.sample_transition_batch(256))

    yield Case(COLD, run, transitions(held, 256), SECONDS, note="its own HDF5")


def episodes(held: Source) -> list[Episode]:
    """A truncated episode's last step is never sampled: it keeps no observation after it."""
    columns = held.observations[:, :-1], held.actions, held.rewards[:, :, None]
    ends = held.terminated[:, -1]
    return [
        Episode(*(np.ascontiguousarray(column[number]) for column in columns), bool(ends[number]))
        for number in range(len(ends))
    ]


def tensors(batch: Any) -> dict[str, torch.Tensor]:
    found = {
        field.name: torch.from_numpy(value)
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), np.ndarray)
    }
    found["terminated"] = found.pop("terminals")
    return found


KINDS = {"samples": samples, "open": opens}
