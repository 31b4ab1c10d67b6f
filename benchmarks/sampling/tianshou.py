"""Tianshou: columns in a Batch, gathered; a segment tree in numba."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tianshou.algorithm.algorithm_base import Algorithm
from tianshou.data import Batch, PrioritizedReplayBuffer, ReplayBuffer

from benchmarks.sampling.case import (
    APPEND,
    BATCH_SIZES,
    FRAMES,
    NSTEP,
    PRIORITIZED,
    STEP,
    Case,
    uniform,
)
from benchmarks.sampling.source import (
    DISCOUNT,
    STACK,
    Source,
    frame_source,
    source,
    stacks,
    transitions,
)


def uniforms(folder: Path) -> Iterator[Case]:
    held = source()
    buffer = filled(ReplayBuffer(held.rewards.size), held)
    for size in BATCH_SIZES:

        def draw(size: int = size) -> dict[str, torch.Tensor]:
            return fields(buffer.sample(size)[0])

        yield Case(uniform(size), draw, transitions(held, size))


def n_steps(folder: Path) -> Iterator[Case]:
    """The returns are Tianshou's own, which add what a network says of the last observation."""
    held = source()
    buffer = filled(ReplayBuffer(held.rewards.size), held)

    def draw() -> dict[str, torch.Tensor]:
        batch, rows = buffer.sample(256)

        def target(held: ReplayBuffer, after: np.ndarray) -> torch.Tensor:
            batch.obs_next = held.obs_next[after]
            batch.terminated = held.terminated[after]
            return torch.zeros(256)

        returns = Algorithm.compute_nstep_return(batch, buffer, rows, target, DISCOUNT, 3).returns
        return {**fields(batch), "rewards": returns}

    yield Case(NSTEP, draw, transitions(held, 256, n_step=3))


def prioritized(folder: Path) -> Iterator[Case]:
    held = source()
    buffer = filled(PrioritizedReplayBuffer(held.rewards.size, alpha=0.6, beta=0.4), held)
    buffer.init_weight(np.arange(held.rewards.size))
    priorities = np.random.default_rng(0).random(256, np.float32)

    def draw() -> dict[str, torch.Tensor]:
        batch, rows = buffer.sample(256)
        buffer.update_weight(rows, priorities)
        return {**fields(batch), "weights": torch.from_numpy(batch.weight)}

    yield Case(PRIORITIZED, draw, transitions(held, 256))


def frames(folder: Path) -> Iterator[Case]:
    held = frame_source()
    size = held.rewards.size
    buffer = filled(
        ReplayBuffer(size, stack_num=STACK, ignore_obs_next=True), held, following=False
    )
    yield Case(FRAMES, lambda: fields(buffer.sample(256)[0]), stacks(held, 256))


def appends(folder: Path) -> Iterator[Case]:
    held = source(10_000)
    columns = named(held)
    steps = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    buffer = ReplayBuffer(100_000)

    def run() -> None:
        for step in steps:
            buffer.add(Batch(step))

    compared = transitions(held, 256)
    yield Case(APPEND, run, lambda _: compared(fields(buffer.sample(256)[0])), STEP, len(steps))


def filled(buffer: ReplayBuffer, held: Source, following: bool = True) -> ReplayBuffer:
    """Return the buffer as a million calls of `add` would leave it."""
    columns = named(held)
    columns["done"] = columns["terminated"] | columns["truncated"]
    if not following:
        del columns["obs_next"]
    buffer.set_batch(Batch(columns))
    buffer._size = held.rewards.size
    buffer.last_index[0] = held.rewards.size - 1
    return buffer


def named(held: Source) -> dict[str, Any]:
    columns = held.flat()
    return {
        "obs": columns["observations"],
        "act": columns["actions"],
        "rew": columns["rewards"],
        "terminated": columns["terminated"],
        "truncated": columns["truncated"],
        "obs_next": columns["next_observations"],
    }


def fields(batch: Any) -> dict[str, torch.Tensor]:
    return {
        "observations": torch.from_numpy(batch.obs),
        "actions": torch.from_numpy(batch.act),
        "rewards": torch.from_numpy(batch.rew),
        "terminated": torch.from_numpy(batch.terminated),
        "next_observations": torch.from_numpy(batch.obs_next),
    }


KINDS = {
    "uniform": uniforms,
    "n-step": n_steps,
    "prioritized": prioritized,
    "frames": frames,
    "append": appends,
}
