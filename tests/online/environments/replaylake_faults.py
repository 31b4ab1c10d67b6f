"""An environment for tests of faults: `replaylake_faults:Walk`, whose every number is checkable.

An episode of seed s has 5 + s % 20 steps; the observation is [steps taken, s % 1000], and step t
pays t. It is terminated if s is even, else truncated.
"""

import time

import gymnasium
import numpy as np


class Walk(gymnasium.Env):
    """step_s: what a step takes. broken_seed: its episode raises at its third step."""

    observation_space = gymnasium.spaces.Box(0, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, step_s=0.0, broken_seed=None):
        self._step_s, self._broken_seed = step_s, broken_seed
        self._taken = self._seed = 0

    def reset(self, *, seed=None, options=None):
        self._taken, self._seed = 0, seed or 0
        return self._observation(), {}

    def step(self, action):
        if self._step_s:
            time.sleep(self._step_s)
        if self._seed == self._broken_seed and self._taken == 2:
            raise ValueError("the gripper\nis stuck")
        taken, self._taken = self._taken, self._taken + 1
        is_over = self._taken == 5 + self._seed % 20
        is_even = self._seed % 2 == 0
        return self._observation(), float(taken), is_over and is_even, is_over and not is_even, {}

    def _observation(self):
        return np.array([self._taken, self._seed % 1000], np.float32)
