"""TorchRL: a TensorDict in RAM or memory-mapped."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, SliceSampler

from benchmarks.sampling.case import (
    APPEND,
    BATCH_SIZES,
    CURVE,
    FRAMES,
    MAPPED,
    PRIORITIZED,
    REOPENED,
    SECONDS,
    SEQUENCES,
    STEP,
    Case,
    curve,
    uniform,
)
from benchmarks.sampling.source import (
    FRAME,
    NUM_STEPS,
    STACK,
    Source,
    frame_source,
    sequences,
    source,
    stacks,
    transitions,
)
from benchmarks.steps import EPISODE_STEPS

warnings.simplefilter("ignore")


def uniforms(folder: Path) -> Iterator[Case]:
    held = source()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(NUM_STEPS), batch_size=256)
    buffer.extend(columns(held))
    for size in BATCH_SIZES:
        yield Case(uniform(size), lambda n=size: buffer.sample(n), transitions(held, size))


def slices(folder: Path) -> Iterator[Case]:
    held = source()
    sampler = SliceSampler(num_slices=32, traj_key="episode", cache_values=True)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(NUM_STEPS), sampler=sampler, batch_size=32 * 64
    )
    rows = columns(held)
    rows["episode"] = torch.arange(NUM_STEPS) // EPISODE_STEPS
    buffer.extend(rows)
    yield Case(SEQUENCES, buffer.sample, sequences(held, 32, 64))


def prioritized(folder: Path) -> Iterator[Case]:
    held = source()
    sampler = PrioritizedSampler(NUM_STEPS, alpha=0.6, beta=0.4)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(NUM_STEPS), sampler=sampler, batch_size=256
    )
    buffer.extend(columns(held))
    priorities = torch.rand(256)

    def draw() -> TensorDict:
        batch = buffer.sample()
        buffer.update_priority(batch["index"], priorities)
        return batch

    yield Case(PRIORITIZED, draw, transitions(held, 256))


def frames(folder: Path) -> Iterator[Case]:
    held = frame_source()
    size = held.rewards.size
    sampler = SliceSampler(slice_len=STACK + 1, traj_key="episode", cache_values=True)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(size), sampler=sampler, batch_size=256 * (STACK + 1)
    )
    flat = held.flat()
    rows = {name: torch.from_numpy(flat[name]) for name in ("observations", "actions", "rewards")}
    rows["episode"] = torch.arange(size) // EPISODE_STEPS
    buffer.extend(TensorDict(rows, [size]))

    def draw() -> dict[str, torch.Tensor]:
        batch = buffer.sample()
        stretches = batch["observations"].view(256, STACK + 1, *FRAME)
        return {
            "observations": stretches[:, :-1],
            "next_observations": stretches[:, 1:],
            "actions": batch["actions"].view(256, STACK + 1)[:, STACK - 1],
            "rewards": batch["rewards"].view(256, STACK + 1)[:, STACK - 1],
        }

    note = "stretches of 5, none at an episode's start"
    yield Case(FRAMES, draw, stacks(held, 256), note=note)


def mapped(folder: Path) -> Iterator[Case]:
    held = source()
    for size in CURVE:
        buffer = on_disk(folder / f"torchrl-{size}", held, size)
        check = transitions(held, 256)
        yield Case(curve(size), buffer.sample, check, note="memory-mapped")
        if size == NUM_STEPS:
            yield Case(MAPPED, buffer.sample, check, note="no budget")
        shutil.rmtree(folder / f"torchrl-{size}")


def opens(folder: Path) -> Iterator[Case]:
    held = source()
    saved = folder / "torchrl-saved"
    if not saved.exists():
        on_disk(folder / "torchrl-saving", held, NUM_STEPS).dumps(saved)
        shutil.rmtree(folder / "torchrl-saving")

    def run() -> Any:
        buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(NUM_STEPS), batch_size=256)
        buffer.loads(saved)
        return buffer.sample()

    yield Case(REOPENED, run, transitions(held, 256), SECONDS, note="its own memory-mapped files")


def appends(folder: Path) -> Iterator[Case]:
    held = source(1_000)
    steps = list(columns(held).unbind(0))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=256)

    def run() -> None:
        for step in steps:
            buffer.add(step)

    compared = transitions(held, 256)
    yield Case(APPEND, run, lambda _: compared(buffer.sample()), STEP, len(steps))


def columns(held: Source, start: int = 0) -> TensorDict:
    flat = held.flat(start)
    rows = {name: torch.from_numpy(values) for name, values in flat.items()}
    return TensorDict(rows, [len(flat["rewards"])])


def on_disk(scratch: Path, held: Source, num_steps: int) -> TensorDictReplayBuffer:
    shutil.rmtree(scratch, ignore_errors=True)
    storage = LazyMemmapStorage(num_steps, scratch_dir=scratch)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=256)
    for start in range(0, num_steps, NUM_STEPS):
        rows = columns(held, start // EPISODE_STEPS)
        buffer.extend(rows[: num_steps - start])
    return buffer


KINDS = {
    "uniform": uniforms,
    "sequences": slices,
    "prioritized": prioritized,
    "frames": frames,
    "mapped": mapped,
    "open": opens,
    "append": appends,
}
