"""Stable-Baselines3: its own loop, in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from stable_baselines3 import DQN, SAC

from benchmarks.online.case import LEARNING, SECONDS, Figure, Learning, Measure

_CLASSES: Final = {"dqn": DQN, "sac": SAC}


def learning(folder: Path, options: Any) -> Iterator[Figure]:
    for case in LEARNING:
        if options.algorithm in (None, case.algorithm):
            model = made(case)
            started = time.perf_counter()
            model.learn(case.num_steps)
            yield Figure(case.workload, time.perf_counter() - started, SECONDS)


def made(case: Learning) -> Any:
    """Return its algorithm; what is not said here is its default, as it is ours."""
    common = {
        "learning_rate": case.learning_rate,
        "learning_starts": case.learning_starts,
        "batch_size": case.batch_size,
        "gamma": case.discount,
        "train_freq": 1,
        "gradient_steps": 1,
        "policy_kwargs": {"net_arch": case.sizes},
        "seed": 0,
        "device": "cpu",
    }
    its_own = {
        "dqn": {
            "target_update_interval": case.target_period,
            "exploration_fraction": case.explore_steps / case.num_steps,
        },
        "sac": {},
    }[case.algorithm]
    return _CLASSES[case.algorithm]("MlpPolicy", case.env_id, **common, **its_own)


KINDS: Final[Mapping[str, Measure]] = {"learning": learning}
