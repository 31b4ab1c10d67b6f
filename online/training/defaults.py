"""Defaults: what suits an algorithm online where its own defaults are for logs that stand still."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from replaylake.offline.algorithms.info import AlgorithmInfo
from replaylake.online.training.config import OnlineConfig


@dataclass(frozen=True)
class OnlineDefaults:
    """batch_size: steps a batch. options: of the algorithm."""

    batch_size: int = 256
    options: Mapping[str, Any] = field(default_factory=dict)


# CartPole, mean of 20 greedy episodes, 3 seeds: 500 from 20,000 to 25,000 steps on; without the
# dueling heads and three steps it went between 14 and 500, and with the offline defaults it did not
# learn within 60,000 (2 cores, 2026-11-22).
_DQN: Final = OnlineDefaults(
    batch_size=64,
    options={
        "learning_rate": 1e-3,
        "double": True,
        "dueling": True,
        "n_step": 3,
        "target_update_period": 1,
        "tau": 0.005,
    },
)


def online_defaults(algorithm: AlgorithmInfo) -> OnlineDefaults:
    """Return them for an algorithm; where nothing better is known, those of the algorithm."""
    if (algorithm.name, algorithm.provider) == ("dqn", "replaylake"):
        return _DQN
    return OnlineDefaults()


def resolved(
    config: OnlineConfig, algorithm: AlgorithmInfo, started: Mapping[str, Any] | None
) -> OnlineConfig:
    """Return the config with nothing left to a default that may change.

    started: the options of the policy that is started from, whose networks are to be gone on with.
    """
    defaults = online_defaults(algorithm)
    options = defaults.options if started is None else started
    batch_size = config.batch_size or defaults.batch_size
    # Nobody asks for a GPU to leave it idle.
    device = "cuda" if config.learner_gpus and config.device == "cpu" else config.device
    options = {**options, **config.options}
    return replace(config, batch_size=batch_size, device=device, options=options)
