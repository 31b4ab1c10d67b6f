"""An environment whose steps take their time, as a simulator's or a robot's do."""

from __future__ import annotations

import time
from typing import Any

import gymnasium

from benchmarks.online.case import SLOW_STEP_S


class Waiting(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Waits in each step, for something that takes no time of this processor's."""

    def step(self, action: Any) -> Any:
        time.sleep(SLOW_STEP_S)
        return super().step(action)


def slow_pendulum() -> gymnasium.Env[Any, Any]:
    return Waiting(gymnasium.make("Pendulum-v1", disable_env_checker=True))
