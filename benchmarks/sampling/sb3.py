"""Stable-Baselines3: arrays, gathered and copied to tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer

from benchmarks.sampling.case import APPEND, BATCH_SIZES, FRAMES, NSTEP, STEP, Case, uniform
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

OBSERVATIONS = spaces.Box(-np.inf, np.inf, (17,), np.float32)
ACTIONS = spaces.Box(-1, 1, (6,), np.float32)


def uniforms(folder: Path) -> Iterator[Case]:
    held = source()
    buffer = filled(ReplayBuffer(held.rewards.size, OBSERVATIONS, ACTIONS, "cpu"), held)
    for size in BATCH_SIZES:
        yield Case(uniform(size), lambda n=size: fields(buffer.sample(n)), transitions(held, size))


def n_steps(folder: Path) -> Iterator[Case]:
    held = source()
    buffer = NStepReplayBuffer(
        held.rewards.size, OBSERVATIONS, ACTIONS, "cpu", n_steps=3, gamma=DISCOUNT
    )
    filled(buffer, held)
    yield Case(NSTEP, lambda: fields(buffer.sample(256)), transitions(held, 256, n_step=3))


def frames(folder: Path) -> Iterator[Case]:
    held = frame_source()
    space = spaces.Box(0, 255, (STACK, *FRAME), np.uint8)
    buffer = ReplayBuffer(
        held.rewards.size,
        space,
        spaces.Discrete(18),
        "cpu",
        optimize_memory_usage=True,
        handle_timeout_termination=False,
    )
    for number, episode in enumerate(held.observations):
        padded = np.concatenate([np.repeat(episode[:1], STACK - 1, axis=0), episode[:-1]])
        stacked = np.lib.stride_tricks.sliding_window_view(padded, STACK, axis=0)
        rows = slice(number * len(stacked), (number + 1) * len(stacked))
        buffer.observations[rows, 0] = stacked.transpose(0, 3, 1, 2)
    buffer.actions[:, 0, 0] = held.actions.reshape(-1)
    buffer.full = True
    note = "stacks stored, 2.8 GB"
    yield Case(FRAMES, lambda: fields(buffer.sample(256)), stacks(held, 256), note=note)


def appends(folder: Path) -> Iterator[Case]:
    held = source(10_000)
    columns = held.flat()
    done = columns["terminated"] | columns["truncated"]
    infos = [[{"TimeLimit.truncated": bool(truncated)}] for truncated in columns["truncated"]]
    names = ("observations", "next_observations", "actions", "rewards")
    steps = list(zip(*(columns[name] for name in names), done, infos, strict=True))
    buffer = ReplayBuffer(100_000, OBSERVATIONS, ACTIONS, "cpu")

    def run() -> None:
        for step in steps:
            buffer.add(*step)

    compared = transitions(held, 256)
    yield Case(APPEND, run, lambda _: compared(fields(buffer.sample(256))), STEP, len(steps))


def filled(buffer: ReplayBuffer, held: Source) -> ReplayBuffer:
    """Return the buffer as a million calls of `add` would leave it."""
    columns = held.flat()
    buffer.observations[:, 0] = columns["observations"]
    buffer.next_observations[:, 0] = columns["next_observations"]
    buffer.actions[:, 0] = columns["actions"]
    buffer.rewards[:, 0] = columns["rewards"]
    buffer.dones[:, 0] = columns["terminated"] | columns["truncated"]
    buffer.timeouts[:, 0] = columns["truncated"]
    buffer.full = True
    return buffer


def fields(samples: Any) -> dict[str, torch.Tensor]:
    return {
        "observations": samples.observations,
        "actions": samples.actions,
        "rewards": samples.rewards,
        "terminated": samples.dones,
        "next_observations": samples.next_observations,
    }


KINDS = {"uniform": uniforms, "n-step": n_steps, "frames": frames, "append": appends}
