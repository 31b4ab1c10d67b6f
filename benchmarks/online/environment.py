"""Environments: one whose steps take their time, as a robot's do, and one of frames."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np

from benchmarks.online.case import SLOW_STEP_S


class Waiting(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Waits in each step, for something that takes no time of this processor's."""

    def step(self, action: Any) -> Any:
        time.sleep(SLOW_STEP_S)
        return super().step(action)


def slow_pendulum() -> gymnasium.Env[Any, Any]:
    return Waiting(gymnasium.make("Pendulum-v1", disable_env_checker=True))


class Frames(gymnasium.Env[Any, Any]):
    """Episodes of 64 frames of 84 x 84 bytes, drawn once."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self) -> None:
        self._frames = np.random.default_rng(0).integers(0, 256, (64, 84, 84), np.uint8)
        self._at = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._at = 0
        return self._frames[0], {}

    def step(self, action: Any) -> Any:
        self._at = (self._at + 1) % len(self._frames)
        return self._frames[self._at], 1.0, self._at == 0, False, {}


def frames() -> gymnasium.Env[Any, Any]:
    return Frames()
