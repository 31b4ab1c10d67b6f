"""cpprb: a ring buffer in Cython. Batches are numpy arrays, made tensors without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cpprb
import numpy as np
import torch

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
    FRAME,
    STACK,
    Source,
    frame_source,
    source,
    stacks,
    transitions,
)

FIELDS = {
    "observations": {"shape": 17},
    "next_observations": {"shape": 17},
    "actions": {"shape": 6},
    "rewards": {},
    "terminated": {},
}


def uniforms(folder: Path) -> Iterator[Case]:
    held = source()
    buffer = filled(cpprb.ReplayBuffer(held.rewards.size, FIELDS), held)
    for size in BATCH_SIZES:
        yield Case(uniform(size), lambda n=size: tensors(buffer.sample(n)), transitions(held, size))


def n_steps(folder: Path) -> Iterator[Case]:
    """An episode's last steps get wrong flags and next observations, which are not compared."""
    held = source()
    fields = {**FIELDS, "done": {}}
    fields.pop("terminated")
    over = {"size": 3, "gamma": DISCOUNT, "rew": "rewards", "next": "next_observations"}
    buffer = cpprb.ReplayBuffer(held.rewards.size, fields, Nstep=over)
    filled(buffer, held, flag="done")

    def draw() -> dict[str, torch.Tensor]:
        batch = tensors(buffer.sample(256))
        batch["terminated"] = batch.pop("done")
        return batch

    check = transitions(held, 256, n_step=3, ends=False)
    yield Case(NSTEP, draw, check, note="n fixed at append")


def prioritized(folder: Path) -> Iterator[Case]:
    held = source()
    buffer = filled(cpprb.PrioritizedReplayBuffer(held.rewards.size, FIELDS), held)
    priorities = np.random.default_rng(0).random(256, np.float32)

    def draw() -> dict[str, torch.Tensor]:
        batch = buffer.sample(256)
        buffer.update_priorities(batch["indexes"], priorities)
        return tensors(batch)

    yield Case(PRIORITIZED, draw, transitions(held, 256))


def frames(folder: Path) -> Iterator[Case]:
    held = frame_source()
    shape = {"observations": {"shape": (*FRAME, STACK), "dtype": np.uint8}}
    fields = {**shape, "actions": {"dtype": np.int64}, "rewards": {}, "terminated": {}}
    buffer = cpprb.ReplayBuffer(
        held.rewards.size, fields, next_of="observations", stack_compress="observations"
    )
    for number, episode in enumerate(held.observations):
        padded = np.concatenate([np.repeat(episode[:1], STACK - 1, axis=0), episode])
        stacked = np.lib.stride_tricks.sliding_window_view(padded, STACK, axis=0)
        buffer.add(
            observations=stacked[:-1],
            next_observations=stacked[1:],
            actions=held.actions[number],
            rewards=held.rewards[number],
            terminated=held.terminated[number],
        )
        buffer.on_episode_end()

    def draw() -> dict[str, torch.Tensor]:
        batch = tensors(buffer.sample(256))
        for name in ("observations", "next_observations"):
            batch[name] = batch[name].permute(0, 3, 1, 2)
        return batch

    yield Case(FRAMES, draw, stacks(held, 256))


def appends(folder: Path) -> Iterator[Case]:
    held = source(10_000)
    buffer = cpprb.ReplayBuffer(100_000, FIELDS)
    columns = held.flat()
    ends = columns["truncated"]
    rows = zip(*(columns[name] for name in FIELDS), strict=True)
    steps = [dict(zip(FIELDS, values, strict=True)) for values in rows]

    def run() -> None:
        for step, truncated in zip(steps, ends, strict=True):
            buffer.add(**step)
            if truncated:
                buffer.on_episode_end()

    compared = transitions(held, 256)
    yield Case(APPEND, run, lambda _: compared(tensors(buffer.sample(256))), STEP, len(steps))


def filled(buffer: Any, held: Source, flag: str = "terminated") -> Any:
    for number in range(len(held.rewards)):
        buffer.add(
            observations=held.observations[number, :-1],
            next_observations=held.observations[number, 1:],
            actions=held.actions[number],
            rewards=held.rewards[number].copy(),  # Nstep sums them in place
            **{flag: held.terminated[number]},
        )
        buffer.on_episode_end()
    return buffer


def tensors(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in batch.items()}


KINDS = {
    "uniform": uniforms,
    "n-step": n_steps,
    "prioritized": prioritized,
    "frames": frames,
    "append": appends,
}
