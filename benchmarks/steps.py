"""The steps that every workload records and reads: noise, so that no system compresses it away.

Needs numpy alone: it is imported in the peers' environments too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

OBSERVATION_SIZE: Final = 17
ACTION_SIZE: Final = 6
EPISODE_STEPS: Final = 1_000


@dataclass(frozen=True)
class Steps:
    """One truncated episode; observations [T + 1, 17], actions [T, 6], rewards [T], all float32."""

    observations: NDArray[np.float32]
    actions: NDArray[np.float32]
    rewards: NDArray[np.float32]


def episodes(num_steps: int, seed: int = 0) -> list[Steps]:
    """Return `num_steps` steps in episodes of 1,000."""
    rng = np.random.default_rng(seed)

    def noise(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32)

    return [
        Steps(
            noise(EPISODE_STEPS + 1, OBSERVATION_SIZE),
            noise(EPISODE_STEPS, ACTION_SIZE),
            noise(EPISODE_STEPS),
        )
        for _ in range(num_steps // EPISODE_STEPS)
    ]
