"""Environments whose every number follows from the seed: `replaylake_toys:Countdown-v0`, ...

An episode of seed s has 1 + s % 3 steps; step t pays t + action / 10; it is terminated if s is
even, else truncated. The observation is [steps taken, s], always in the same array.
"""

import os

import gymnasium
import numpy as np


class Countdown(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, masked=False, broken_seed=None, deadly_seed=None):
        self._masked = masked
        self._broken_seed = broken_seed
        self._deadly_seed = deadly_seed
        self._observation = np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        self._observation[:] = 0, seed
        return self._observation, self._info()

    def step(self, action):
        taken, seed = (int(value) for value in self._observation)
        if seed == self._broken_seed:
            raise ValueError("the gripper\nis stuck")
        if seed == self._deadly_seed:
            os._exit(13)
        self._observation[0] += 1
        ended = taken == seed % 3
        reward = taken + action / 10
        return (
            self._observation,
            reward,
            ended and seed % 2 == 0,
            ended and seed % 2 == 1,
            self._info(),
        )

    def _info(self):
        # Action `seed % 3` is never allowed.
        seed = int(self._observation[1])
        return {"action_mask": np.arange(3) != seed % 3} if self._masked else {}


def _register(name, **kwargs):
    gymnasium.register(name, entry_point=f"{__name__}:Countdown", kwargs=kwargs)


_register("Countdown-v0")
_register("Masked-v0", masked=True)
_register("Broken-v0", broken_seed=7)
_register("BrokenAtOnce-v0", broken_seed=0)
_register("Deadly-v0", deadly_seed=7)
