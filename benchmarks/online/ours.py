"""Ours: a run of `train online`, its worker in this process or two of Ray's beside it."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.online.by_hand import options_of
from benchmarks.online.case import (
    DQN,
    LATENCY_WORKLOAD,
    LEARNING,
    MS,
    SECONDS,
    SLOW,
    SLOW_WORKLOAD,
    STEPS_PER_S,
    Figure,
    Learning,
    Measure,
)
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.replay.kernels import kernels
from replaylake.offline.callbacks import Callbacks
from replaylake.online.train import OnlineResult, train_online
from replaylake.online.training.config import OnlineConfig

# By what it is called behind `ours`.
_VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "": {"env_runner": "local"},
    "recording off": {"env_runner": "local", "record": False},
    "2 Ray workers": {"env_runner": "ray", "workers": 2},
}


def learning(folder: Path, options: Any) -> Iterator[Figure]:
    for case in LEARNING:
        if options.algorithm not in (None, case.algorithm):
            continue
        # What a process pays for once, such as the choice of kernels, is paid here.
        trained(folder, replace(case, num_steps=case.learning_starts + 200), _VARIANTS[""])
        variants = {name: _VARIANTS[name] for name in (options.variants or _VARIANTS)}
        for _ in range(options.turns):
            for variant, how in variants.items():
                result, _ = trained(folder, case, how)
                yield Figure(case.workload, result.wall_s, SECONDS, variant)


def slow(folder: Path, options: Any) -> Iterator[Figure]:
    for variant, mode in (("", "async"), ("in turns", "sync")):
        result, _ = trained(folder, SLOW, {"workers": 2, "envs_per_worker": 4, "mode": mode})
        yield Figure(SLOW_WORKLOAD, result.num_steps / result.wall_s, STEPS_PER_S, variant)


def latency(folder: Path, options: Any) -> Iterator[Figure]:
    """Of the run's own measurements, each the median of its last thousand shipments."""
    _, logged = trained(folder, DQN, _VARIANTS["2 Ray workers"])
    found = [values["latency_ms"] for values in logged if "latency_ms" in values]
    yield Figure(LATENCY_WORKLOAD, statistics.median(found), MS)


def trained(
    folder: Path, case: Learning, how: Mapping[str, Any]
) -> tuple[OnlineResult, list[Mapping[str, float]]]:
    """Run it in a lake of its own, and return its metrics too.

    The policy is judged once, at the end, by one episode. What is imported by the first batch is
    imported before, as everything is of the other systems.
    """
    kernels.load()
    config = OnlineConfig(
        algorithm=case.algorithm,
        env=case.env_id,
        policy="policy",
        steps=case.num_steps,
        min_size=case.learning_starts,
        batch_size=case.batch_size,
        discount=case.discount,
        explore_steps=case.explore_steps,
        options=options_of(case),
        evaluate_steps=2 * case.num_steps,
        selection_episodes=1,
        evaluation_episodes=1,
        **how,
    )
    logged: list[Mapping[str, float]] = []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        lake = open_lake(Path(scratch) / "lake", create=True)
        result = train_online(
            lake,
            "run",
            config,
            callbacks=Callbacks(on_metrics=lambda _, values: logged.append(values)),
        )
    updates = case.num_steps - case.learning_starts
    if abs(result.num_updates - updates) > 0.02 * updates or result.num_steps < case.num_steps:
        raise RuntimeError(
            f"{case.workload}: found {result.num_steps} steps and {result.num_updates} updates, "
            f"expected {case.num_steps} and {updates}"
        )
    return result, logged


KINDS: Final[Mapping[str, Measure]] = {"learning": learning, "slow": slow, "latency": latency}
