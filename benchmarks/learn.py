"""Gradient steps a second, each with its batch: ours, d3rlpy behind our Learner, d3rlpy alone.

Networks 256 x 256, batches of 256, observations of 17 numbers and actions of 6 (or 6 actions),
100,000 noisy steps in memory. d3rlpy alone samples from its own buffer and updates, as its `fit`
does without logging. `floor` is the time of the update's matrix products alone, by torch.mm into
memory that is there already. The systems take turns of half a second in one process; the best turn
counts. Time to the first update: opening the view, making the learner and one update, past imports.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import d3rlpy
import numpy as np
import torch

from benchmarks.append import as_episodes
from benchmarks.steps import ACTION_SIZE, OBSERVATION_SIZE, Steps, episodes
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.replay.kernels import kernels
from replaylake.datastore.replay.to_torch import TorchSampler
from replaylake.datastore.replay.view import ReplayView
from replaylake.offline.algorithms.catalog import make_learner

BATCH: Final = 256
HIDDEN: Final = [256, 256]
NUM_STEPS: Final = 100_000
TURN_S: Final = 0.5
# Rows, summed elements, columns of one matrix product.
Product = tuple[int, int, int]


def net(outputs: int, *, inputs: int = OBSERVATION_SIZE, of: str = "forward") -> list[Product]:
    """Return a network's products: `forward`, `train` (with weights' gradients), or `through`.

    Of `through` only the inputs' gradients are wanted, as of a critic whose actor learns.
    """
    sizes = [inputs, *HIDDEN, outputs]
    products = []
    for layer, (size_in, size_out) in enumerate(pairwise(sizes)):
        products.append((BATCH, size_in, size_out))
        if of == "train":
            products.append((size_in, BATCH, size_out))
        if of == "through" or (of == "train" and layer):
            products.append((BATCH, size_out, size_in))
    return products


_CRITIC: Final = OBSERVATION_SIZE + ACTION_SIZE


def critics(num: int, of: str = "forward") -> list[Product]:
    return num * net(1, inputs=_CRITIC, of=of)


@dataclass(frozen=True)
class Task:
    """An algorithm in both libraries. floor: its products in `floor_updates` updates."""

    config: str
    is_discrete: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    floor: Sequence[Product] = ()
    floor_updates: int = 1


TASKS: Final[Mapping[str, Task]] = {
    "bc": Task("BCConfig", options={"head": "deterministic"}, floor=net(6, of="train")),
    "discrete bc": Task("DiscreteBCConfig", is_discrete=True, floor=net(6, of="train")),
    "dqn": Task(
        "DoubleDQNConfig",
        is_discrete=True,
        options={"double": True},
        floor=[*net(6, of="train"), *net(6), *net(6)],
    ),
    "iql": Task(
        "IQLConfig",
        floor=[
            *net(1),
            *critics(2),
            *net(1, of="train"),
            *critics(2, "train"),
            *net(6, of="train"),
        ],
    ),
    "td3_plus_bc": Task(
        "TD3PlusBCConfig",
        floor=[
            *(2 * [*net(6), *critics(2), *critics(2, "train")]),
            *net(6, of="train"),
            *critics(1, "through"),
        ],
        floor_updates=2,
    ),
    "sac": Task(
        "SACConfig",
        floor=[
            *net(12),
            *critics(2),
            *critics(2, "train"),
            *net(12, of="train"),
            *critics(2, "through"),
        ],
    ),
    "cql": Task("CQLConfig"),
}
# What d3rlpy calls another of its own, behind our Learner.
_THEIR_NAME: Final = {"discrete bc": "bc", "dqn": "double_dqn"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="holds the lake between runs")
    parser.add_argument("--algorithms", default=",".join(TASKS))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    kernels.load()
    snapshots = prepared(options.folder)
    views = {discrete: snapshot.replay() for discrete, snapshot in snapshots.items()}
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        for name in options.algorithms.split(","):
            task = TASKS[name]
            systems = made(name, task, views[task.is_discrete], options.device)
            said = f"learn {name}, {threads} thread" + ("" if threads == 1 else "s")
            for system, figure in best_of_turns(systems, options.turns).items():
                num = task.floor_updates if system == "floor" else 1
                tell(said, system, figure * num, "updates/s")
    torch.set_num_threads(1)
    for name in ("discrete bc", "iql"):
        task = TASKS[name]
        seconds = min(first_update(name, snapshots[task.is_discrete]) for _ in range(3))
        tell(f"time to first update, {name}", "ours", seconds, "s")


def tell(workload: str, system: str, figure: float, unit: str) -> None:
    line = {"workload": workload, "system": system, "figure": figure, "unit": unit}
    print(json.dumps(line), flush=True)


def made(name: str, task: Task, view: ReplayView, device: str) -> dict[str, Callable[[], None]]:
    """Return one update of each system."""
    their_name = f"d3rlpy:{_THEIR_NAME.get(name, name)}"
    options = {"hidden_sizes": HIDDEN}
    systems = {
        "ours": updates(_our_name(name), view, {**options, **task.options}, device),
        "d3rlpy behind Learner": updates(their_name, view, options, device),
        "d3rlpy": d3rlpy_updates(task, device),
    }
    if task.floor and device == "cpu":
        systems["floor"] = floor(task.floor)
    return systems


def _our_name(name: str) -> str:
    return name.removeprefix("discrete ")


def updates(name: str, view: ReplayView, options: Any, device: str) -> Callable[[], None]:
    """Return an update as the trainer makes it: the metrics are read each time on a CPU."""
    spec = view.spec
    learner = make_learner(
        name, spec.observation_space, spec.action_space, options=options, seed=0, device=device
    )
    learner.prepare(view)
    sampler = TorchSampler(view.uniform(BATCH, learner.item, seed=0), device, reuse=2)
    reads = device == "cpu"

    def update() -> None:
        metrics = learner.update(sampler.sample()).metrics
        if reads:
            for value in metrics.values():
                float(value)

    return update


def d3rlpy_updates(task: Task, device: str) -> Callable[[], None]:
    encoder = d3rlpy.models.VectorEncoderFactory(hidden_units=HIDDEN)
    config_class = getattr(d3rlpy.algos, task.config)
    factories = [
        key for key in config_class.__dataclass_fields__ if key.endswith("encoder_factory")
    ]
    config = config_class(batch_size=BATCH, **dict.fromkeys(factories, encoder))
    algorithm = config.create(device="cpu:0" if device == "cpu" else device)
    # Its own name for an episode: observations [T, 17], terminated 0 for truncation.
    theirs = [
        d3rlpy.dataset.Episode(
            episode.observations[:-1],
            _actions(episode, task.is_discrete).reshape(len(episode.actions), -1),
            episode.rewards[:, None],
            terminated=False,
        )
        for episode in episodes(NUM_STEPS)
    ]
    buffer = d3rlpy.dataset.create_infinite_replay_buffer(theirs)
    algorithm.build_with_dataset(buffer)

    def update() -> None:
        algorithm.update(buffer.sample_transition_batch(BATCH))

    return update


def floor(products: Sequence[Product]) -> Callable[[], None]:
    operands = [
        (torch.randn(rows, summed), torch.randn(summed, columns), torch.empty(rows, columns))
        for rows, summed, columns in products
    ]

    def multiply() -> None:
        for left, right, out in operands:
            torch.mm(left, right, out=out)

    return multiply


def best_of_turns(systems: Mapping[str, Callable[[], None]], turns: int) -> dict[str, float]:
    """Return each system's most updates a second over a turn."""
    best = dict.fromkeys(systems, 0.0)
    for update in systems.values():
        update()
    for _ in range(turns):
        for system, update in systems.items():
            num, started = 0, time.perf_counter()
            while (seconds := time.perf_counter() - started) < TURN_S:
                update()
                num += 1
            best[system] = max(best[system], num / seconds)
    return best


def first_update(name: str, snapshot: Snapshot) -> float:
    """Return the seconds from a snapshot that was never decoded to the first update."""
    started = time.perf_counter()
    view = snapshot.replay(cache=False)
    updates(_our_name(name), view, {"hidden_sizes": HIDDEN}, "cpu")()
    return time.perf_counter() - started


def prepared(folder: Path) -> dict[bool, Snapshot]:
    """Return the snapshots by whether actions are discrete, filled the first time."""
    lake = open_lake(folder / "learn", create=True)
    found = {}
    for is_discrete in (False, True):
        dataset = lake.dataset("discrete" if is_discrete else "continuous")
        if dataset.find_commit("bench", 0) is None:
            bounded = Box((ACTION_SIZE,), low=-1.0, high=1.0)
            actions = Discrete(ACTION_SIZE) if is_discrete else bounded
            dataset.create(Box((OBSERVATION_SIZE,)), actions)
            logged = [
                replace(ours, actions=_actions(theirs, is_discrete))
                for ours, theirs in _pairs(episodes(NUM_STEPS))
            ]
            dataset.append(logged, producer="bench", sequence=0)
        found[is_discrete] = dataset.snapshot()
    return found


def _pairs(steps: Sequence[Steps]) -> Iterator[tuple[Episode, Steps]]:
    return zip(as_episodes(list(steps)), steps, strict=True)


def _actions(steps: Steps, is_discrete: bool) -> np.ndarray:
    """Return actions within [-1, 1], or the number of the largest element."""
    return steps.actions.argmax(axis=1) if is_discrete else np.tanh(steps.actions)


if __name__ == "__main__":
    main()
