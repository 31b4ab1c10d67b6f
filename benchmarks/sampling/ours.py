"""Ours: a replay view of a snapshot, through `to_torch`.

Batches come twice: with memory of their own, and into outputs that are used again
("preallocated"). Both are views of the packed records that were gathered.
"""

from __future__ import annotations

import itertools
import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch

from benchmarks.sampling import source as held_by_all
from benchmarks.sampling.case import (
    APPEND,
    BATCH_SIZES,
    COLD,
    CURVE,
    FRAMES,
    MAPPED,
    MAPPED_IN_RAM,
    MAPPED_MEMORY,
    MIB,
    NSTEP,
    PRIORITIZED,
    REOPENED,
    SECONDS,
    SEQUENCES,
    STEP,
    Case,
    curve,
    uniform,
)
from benchmarks.sampling.source import NUM_STEPS, STACK, Source, nothing, require, source
from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.sampler import Sampler
from replaylake.datastore.replay.to_torch import TorchSampler
from replaylake.datastore.replay.view import ReplayView

Check = Callable[[Batch], None]
PREALLOCATED: Final = "preallocated"
# A quarter of 1M records.
BUDGET: Final = 320_000_000
# Records, with the shards that they are decoded from, take 22 GB there.
LARGEST: Final = 100_000_000
LARGEST_BYTES: Final = 30 << 30


def uniforms(folder: Path) -> Iterator[Case]:
    held = source()
    view = recorded(folder, held).snapshot().replay(cache=False)
    for size in BATCH_SIZES:
        yield from both(
            uniform(size), lambda n=size: view.uniform(n, seed=0), transitions(held, size)
        )


def n_steps(folder: Path) -> Iterator[Case]:
    held = source()
    view = recorded(folder, held).snapshot().replay(cache=False)
    item = Transitions(n_step=3)
    check = transitions(held, 256, n_step=3)
    yield from both(NSTEP, lambda: view.uniform(256, item, seed=0), check)


def sequences(folder: Path) -> Iterator[Case]:
    held = source()
    view = recorded(folder, held).snapshot().replay(cache=False)
    compared = held_by_all.sequences(held, 32, 64)
    # Any step may be the first, as in TorchRL's slices.
    item = Sequences(length=64, overlap=63)

    def check(batch: Batch) -> None:
        compared({**vars(batch), "masks": batch.mask})

    yield from both(SEQUENCES, lambda: view.uniform(32, item, seed=0), check)


def prioritized(folder: Path) -> Iterator[Case]:
    held = source()
    view = recorded(folder, held).snapshot().replay(cache=False)
    priorities = torch.rand(256).numpy()
    for reuse, note in ((0, ""), (2, PREALLOCATED)):
        sampler = TorchSampler(view.prioritized(256, seed=0), reuse=reuse)

        def draw(sampler: TorchSampler = sampler) -> Batch:
            batch = sampler.sample()
            sampler.update_priorities(batch.indices, priorities)
            return batch

        yield Case(PRIORITIZED, draw, transitions(held, 256), note=note)


def frames(folder: Path) -> Iterator[Case]:
    held = held_by_all.frame_source()
    view = recorded(folder, held, "frames").snapshot().replay(frame_stack=STACK, cache=False)
    compared = held_by_all.stacks(held, 256)
    yield from both(FRAMES, lambda: view.uniform(256, seed=0), lambda batch: compared(vars(batch)))


def mapped(folder: Path) -> Iterator[Case]:
    held = source()
    # In a process of its own: what recording leaves behind would hide what a view takes.
    recording = multiprocessing.get_context("spawn").Process(target=record, args=(folder,))
    recording.start()
    recording.join()
    dataset = recorded(folder, held, name(CURVE[-1]), CURVE[-1])
    # What is imported and compiled on first use is no part of a view.
    small = recorded(folder, held, name(CURVE[0]), CURVE[0]).snapshot().replay(cache=False)
    TorchSampler(small.uniform(256, seed=0)).sample()
    before, most = anonymous_bytes(), 0

    def decoded(_done: int, _all: int) -> None:
        nonlocal most
        most = max(most, anonymous_bytes() - before)

    # So that it is decoded in each run.
    shutil.rmtree(dataset.path / "_derived" / "replay", ignore_errors=True)
    view = dataset.snapshot().replay(memory_budget_bytes=BUDGET, on_progress=decoded)
    require(view.packed.records.words.nbytes > 4 * BUDGET * 0.99, "a view of four times the budget")
    touch(view)
    yield from both(MAPPED, lambda: view.uniform(256, seed=0), transitions(held, 256))
    decoded(1, 1)
    note = f"budget {BUDGET >> 20}"
    yield Case(MAPPED_MEMORY, lambda: most / 2**20, nothing, MIB, note=note)
    in_memory = dataset.snapshot().replay(memory_budget_bytes=1 << 40, cache=False)
    yield from both(MAPPED_IN_RAM, lambda: in_memory.uniform(256, seed=0), transitions(held, 256))


def record(folder: Path) -> None:
    recorded(folder, source(), name(CURVE[-1]), CURVE[-1])


def curves(folder: Path) -> Iterator[Case]:
    held = source()
    sizes = list(CURVE)
    if shutil.disk_usage(folder).free > LARGEST_BYTES or (folder / "lake" / name(LARGEST)).exists():
        sizes.append(LARGEST)
    for size in sizes:
        view = recorded(folder, held, name(size), size).snapshot().replay(memory_budget_bytes=0)
        touch(view)
        yield from both(curve(size), lambda v=view: v.uniform(256, seed=0), transitions(held, 256))


def touch(view: ReplayView) -> None:
    """Bring a mapped view's files into the page cache, and its pages into the process."""
    # By reads: the mapping is advised as random, and faults one page at a time from the disk.
    folder = view.wait_cached()
    for path in folder.iterdir() if folder else ():
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    words = view.packed.records.words
    for start in range(0, len(words), NUM_STEPS):
        words[start : start + NUM_STEPS].max()


def opens(folder: Path) -> Iterator[Case]:
    held = source()
    path = recorded(folder, held).path

    def view(cache: bool) -> ReplayView:
        return open_lake(path.parent).dataset(path.name).snapshot().replay(cache=cache)

    def first(cache: bool) -> Batch:
        return TorchSampler(view(cache).uniform(256, seed=0)).sample()

    yield Case(COLD, lambda: first(cache=False), transitions(held, 256), SECONDS)
    yield Case(REOPENED, lambda: first(cache=True), transitions(held, 256), SECONDS)


def appends(folder: Path) -> Iterator[Case]:
    held = source(10_000)
    columns = held.observations[:, :-1], held.actions, held.rewards, held.terminated, held.truncated
    steps = [list(zip(*one, strict=True)) for one in zip(*columns, strict=True)]
    compared = transitions(held, 256)
    numbers = itertools.count()
    with recorded(folder, held, "live", 10_000).follow(max_steps=100_000) as view:

        def run() -> None:
            for one, observations in zip(steps, held.observations, strict=True):
                append = view.stream(f"append/{next(numbers)}").append
                for step in one[:-1]:
                    append(*step)
                append(*one[-1], final_observation=observations[-1])

        def check(_: None) -> None:
            compared(TorchSampler(view.uniform(256, seed=0)).sample())

        yield Case(APPEND, run, check, STEP, held.rewards.size)


def both(workload: str, make: Callable[[], Sampler], check: Check) -> Iterator[Case]:
    """Yield the case with memory of its own for each batch, and the one without."""
    for reuse, note in ((0, ""), (2, PREALLOCATED)):
        yield Case(workload, TorchSampler(make(), reuse=reuse).sample, check, note=note)


def transitions(held: Source, size: int, n_step: int = 1) -> Check:
    compared = held_by_all.transitions(held, size, n_step)
    return lambda batch: compared({**vars(batch), "terminated": batch.discounts == 0})


def name(num_steps: int) -> str:
    return f"noise_{num_steps}"


def recorded(
    folder: Path, held: Source, dataset: str = name(NUM_STEPS), num_steps: int = NUM_STEPS
) -> Dataset:
    """Return a dataset that repeats the source up to `num_steps`, recorded the first time."""
    found = open_lake(folder / "lake", create=True).dataset(dataset)
    for start in range(0, num_steps, NUM_STEPS):
        if found.find_commit("bench", start) is None:
            found.append(
                episodes(held, start, min(num_steps, NUM_STEPS)), producer="bench", sequence=start
            )
    return found


def episodes(held: Source, start: int, num_steps: int) -> list[Episode]:
    length = held.rewards.shape[1]
    observations = held.observations
    if start:
        observations = observations.copy()
        observations[:, :, 0] += start // length
    return [
        Episode(
            f"bench/{start // length + number:07d}",
            observations[number, :-1],
            held.actions[number],
            held.rewards[number],
            terminated=bool(held.terminated[number, -1]),
            truncated=bool(held.truncated[number, -1]),
            final_observation=observations[number, -1],
        )
        for number in range(min(num_steps, held.rewards.size) // length)
    ]


def anonymous_bytes() -> int:
    """Return the resident memory that no file is behind."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise SystemExit("/proc/self/status: found no RssAnon, expected Linux")


KINDS: Final[dict[str, Callable[[Path], Iterator[Case]]]] = {
    "uniform": uniforms,
    "n-step": n_steps,
    "sequences": sequences,
    "prioritized": prioritized,
    "frames": frames,
    "mapped": mapped,
    "curve": curves,
    "open": opens,
    "append": appends,
}
