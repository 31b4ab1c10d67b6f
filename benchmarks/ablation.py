"""What each part costs or saves: fsync, checks, packing, prefetch, numba, priorities, broadcasts.

One part at a time is off, everything else as it is. With and without take short turns in one
process, the one first and then the other. A figure is that of the best turn, as on a busy machine
few are undisturbed, and the ratio the middle of those of turns beside each other. Parts without an
option are replaced in this process alone: a lake that is written without fsync or checks is no lake
to keep.

    python -m benchmarks.ablation --folder DIR [--parts fsync,numba] [--turns 51]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.append import as_episodes
from benchmarks.online.case import DQN
from benchmarks.online.ours import trained
from benchmarks.steps import ACTION_SIZE, OBSERVATION_SIZE, episodes
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake import dataset as dataset_module
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.replay import sampler as sampler_module
from replaylake.datastore.replay.kernels import kernels, plain
from replaylake.datastore.replay.prefetch import prefetch
from replaylake.datastore.replay.to_torch import TorchSampler
from replaylake.datastore.replay.view import ReplayView
from replaylake.offline.algorithms.catalog import make_learner

BATCH: Final = 256
NUM_STEPS: Final = 100_000
NUM_FRAMES: Final = 10_000
TURN_S: Final = 0.08
HIDDEN: Final = [256, 256]
ONLINE_STEPS: Final = 4_000

Without = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Ablation:
    """What is off, and the figure with and without it: units a second of one turn each."""

    part: str
    workload: str
    unit: str
    measure_with: Callable[[], float]
    measure_without: Callable[[], float]
    num_turns: int | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to write; must be a real disk")
    parser.add_argument("--parts", help=f"by commas: {','.join(PARTS)}")
    parser.add_argument("--turns", type=int, default=51, help="of each part, with and without it")
    options = parser.parse_args()
    parts = options.parts.split(",") if options.parts else list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: found {', '.join(sorted(unknown))}, expected {', '.join(PARTS)}")
    torch.set_num_threads(1)
    kernels.load()
    rows = ["| off | workload | with | without | without / with |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for part in parts:
            for one in PARTS[part](Path(folder)):
                rows.append(measure(one, options.turns))
    print("\n".join(rows))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"# {os.cpu_count()} cores, load {load}")


def measure(one: Ablation, num_turns: int) -> str:
    """Take turns, print a line per figure, and return the row of the table."""
    with_it, without = [], []
    turns = ((one.measure_with, with_it), (one.measure_without, without))
    for turn in range(one.num_turns or num_turns):
        for take, figures in turns if turn % 2 else reversed(turns):
            figures.append(take())
    best = max(with_it), max(without)
    for system, figure in zip(("ours", f"without {one.part}"), best, strict=True):
        line = {"workload": one.workload, "system": system, "figure": figure, "unit": one.unit}
        print(json.dumps(line), flush=True)
    shown = " | ".join(f"{float(f'{figure:.3g}'):,g} {one.unit}" for figure in best)
    ratio = statistics.median(b / a for a, b in zip(with_it, without, strict=True))
    return f"| {one.part} | {one.workload} | {shown} | {ratio:.2f} |"


def repeat(call: Callable[[], object], units: int = 1, turn_s: float = TURN_S) -> float:
    """Return the units a second of as many calls as a turn has time for, at least one."""
    num, started = 0, time.perf_counter()
    while num == 0 or time.perf_counter() - started < turn_s:
        call()
        num += 1
    return num * units / (time.perf_counter() - started)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Put something else in the place of a part during the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def inside(without: Without, call: Callable[[], float]) -> Callable[[], float]:
    def measured() -> float:
        with without():
            return call()

    return measured


# Recording.


def fsync(folder: Path) -> Iterator[Ablation]:
    yield from _appends(folder, "fsync", lambda: replaced(os, "fsync", lambda descriptor: None))


def checks(folder: Path) -> Iterator[Ablation]:
    # Steps of the dataset's own types need no conversion, which the checks do as well.
    yield from _appends(
        folder,
        "checks",
        lambda: replaced(dataset_module, "validate_all", lambda episodes, *args, **named: episodes),
    )


def _appends(folder: Path, part: str, without: Without) -> Iterator[Ablation]:
    found = as_episodes(episodes(NUM_STEPS))
    lake = open_lake(folder / part, create=True)
    for name, some in (("append of 1,000 steps", found[:1]), ("append of 100,000 steps", found)):
        for turn in ("with", "without"):
            _dataset(lake, f"{turn}_{len(some)}")
        num_steps = sum(map(len, some))

        def append(turn: str, some: list[Episode] = some, num_steps: int = num_steps) -> float:
            dataset = lake.dataset(f"{turn}_{len(some)}")
            return repeat(lambda: dataset.append(some), num_steps)

        yield Ablation(
            part,
            name,
            "steps/s",
            lambda append=append: append("with"),
            inside(without, lambda append=append: append("without")),
        )


def _dataset(lake: Any, name: str) -> Dataset:
    dataset = lake.dataset(name)
    dataset.create(Box((OBSERVATION_SIZE,)), Box((ACTION_SIZE,)))
    return dataset


# Sampling.


def packing(folder: Path) -> Iterator[Ablation]:
    """One gather of whole records, or one of each field from arrays of their own."""
    view, held = _view(folder, "packing"), episodes(NUM_STEPS)
    sampler = view.uniform(BATCH, seed=0)
    observations = np.concatenate([one.observations[:-1] for one in held])
    following = np.concatenate([one.observations[1:] for one in held])
    actions = np.concatenate([one.actions for one in held])
    rewards = np.concatenate([one.rewards for one in held])
    discounts, keys = np.full(NUM_STEPS, 0.99, np.float32), np.zeros((NUM_STEPS, 2), np.uint64)
    rng = np.random.default_rng(0)
    fields = (observations, actions, rewards, discounts, following, keys)

    def gather() -> None:
        chosen = rng.integers(0, NUM_STEPS, BATCH)
        for one in fields:
            one.take(chosen, axis=0)

    yield Ablation(
        "packing",
        f"uniform batches of {BATCH}",
        "batches/s",
        lambda: repeat(sampler.sample),
        lambda: repeat(gather),
    )


def read_ahead(folder: Path) -> Iterator[Ablation]:
    """Small batches that are drawn by the block; batches of frames that a thread draws ahead."""
    view = _view(folder, "blocks")
    blocks = view.uniform(32, seed=0)
    with replaced(sampler_module, "_BLOCK_ROWS", 0):
        singles = view.uniform(32, seed=0)
    yield Ablation(
        "blocks of batches",
        "uniform batches of 32",
        "batches/s",
        lambda: repeat(blocks.sample),
        lambda: repeat(singles.sample),
    )
    weights = torch.randn(1024, 1024)

    def learn(sampler: Any) -> Callable[[], None]:
        def step() -> None:
            batch = sampler.sample()
            assert len(batch.rewards) == BATCH
            torch.mm(weights, weights)

        return step

    frames = _frames(folder)

    def ahead() -> float:
        with prefetch(frames.uniform(BATCH, seed=0)) as sampler:
            return repeat(learn(sampler), turn_s=2 * TURN_S)

    yield Ablation(
        "prefetch",
        f"frames 4 x 84 x 84, batches of {BATCH}, beside a matrix product",
        "batches/s",
        ahead,
        lambda: repeat(learn(frames.uniform(BATCH, seed=0)), turn_s=2 * TURN_S),
    )


def numba(folder: Path) -> Iterator[Ablation]:
    view = _view(folder, "numba")
    uniform, prioritized = view.uniform(BATCH, seed=0), view.prioritized(BATCH, seed=0)
    priorities = np.random.default_rng(0).random(BATCH, np.float32)

    def draw() -> None:
        batch = prioritized.sample()
        prioritized.update_priorities(batch.indices, priorities)

    for name, call in (
        (f"uniform batches of {BATCH}", uniform.sample),
        (f"prioritized batches of {BATCH}, with update", draw),
    ):
        yield Ablation(
            "numba",
            name,
            "batches/s",
            lambda call=call: repeat(call),
            inside(
                lambda: replaced(kernels, "select_kernels", lambda: plain),
                lambda call=call: repeat(call),
            ),
        )


# Learning.


def priorities(folder: Path) -> Iterator[Ablation]:
    """Updates of DQN on batches drawn by priority, which it updates, or uniformly."""
    view = _view(folder, "priorities", is_discrete=True)

    def make(is_prioritized: bool) -> Callable[[], None]:
        spec = view.spec
        options = {"hidden_sizes": HIDDEN}
        learner = make_learner(
            "dqn", spec.observation_space, spec.action_space, options=options, seed=0
        )
        learner.prepare(view)
        draw = view.prioritized if is_prioritized else view.uniform
        sampler = TorchSampler(draw(BATCH, learner.item, seed=0), reuse=2)

        def update() -> None:
            batch = sampler.sample()
            done = learner.update(batch)
            for value in done.metrics.values():
                float(value)
            if is_prioritized:
                sampler.update_priorities(batch.indices, done.priorities)

        return update

    by_priority, uniformly = make(True), make(False)
    yield Ablation(
        "priorities",
        f"DQN, {HIDDEN[0]}x{HIDDEN[1]}, batches of {BATCH}",
        "updates/s",
        lambda: repeat(by_priority),
        lambda: repeat(uniformly),
    )


def broadcasts(folder: Path) -> Iterator[Ablation]:
    """A run of `train online` whose workers act with the newest policy, or with the first one."""
    case = replace(DQN, num_steps=ONLINE_STEPS)

    def run(broadcast_updates: int) -> float:
        how = {"env_runner": "ray", "workers": 1, "broadcast_updates": broadcast_updates}
        result, _ = trained(folder, case, how)
        return result.num_steps / result.wall_s

    yield Ablation(
        "broadcasts",
        f"DQN CartPole online, {ONLINE_STEPS:,} steps, 1 Ray worker, start and end included",
        "steps/s",
        lambda: run(1),
        lambda: run(1_000_000),
        num_turns=4,
    )


def _view(folder: Path, name: str, *, is_discrete: bool = False) -> ReplayView:
    dataset = open_lake(folder / "views", create=True).dataset(name)
    held = episodes(NUM_STEPS)
    found = as_episodes(held)
    actions: Any = Box((ACTION_SIZE,))
    if is_discrete:
        actions = Discrete(ACTION_SIZE)
        found = [
            replace(one, actions=steps.actions.argmax(axis=1))
            for one, steps in zip(found, held, strict=True)
        ]
    dataset.create(Box((OBSERVATION_SIZE,)), actions)
    dataset.append(found)
    return dataset.snapshot().replay(cache=False)


def _frames(folder: Path) -> ReplayView:
    dataset = open_lake(folder / "views", create=True).dataset("frames")
    dataset.create(Box((84, 84), "uint8", 0, 255), Discrete(4))
    rng, size = np.random.default_rng(0), 1_000
    for i in range(NUM_FRAMES // size):
        observations = rng.integers(0, 256, (size, 84, 84), np.uint8)
        dataset.append(
            [
                Episode(
                    f"e{i}",
                    observations=observations,
                    actions=rng.integers(0, 4, size),
                    rewards=np.ones(size),
                    terminated=True,
                    truncated=False,
                )
            ]
        )
    return dataset.snapshot().replay(frame_stack=4, cache=False)


PARTS: Final[dict[str, Callable[[Path], Iterator[Ablation]]]] = {
    "fsync": fsync,
    "checks": checks,
    "packing": packing,
    "prefetch": read_ahead,
    "numba": numba,
    "priorities": priorities,
    "broadcasts": broadcasts,
}

if __name__ == "__main__":
    main()
