"""Environments for tests of faults: `replaylake_faults:Walk`, whose every number is checkable.

An episode of seed s has 5 + s % 20 steps; the observation is [steps taken, s % 1000], and step t
pays t. It is terminated if s is even, else truncated.
"""

import os
import time
from pathlib import Path

import gymnasium
import numpy as np


class Walk(gymnasium.Env):
    """An environment of checkable numbers.

    step_s: what a step takes. broken_seed: its episode raises at its third step. hold: while this
    file is there, an environment takes `hold_after` steps, and waits before the next one; a file
    of the same name and `.waits` then tells of it.
    """

    observation_space = gymnasium.spaces.Box(0, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, step_s=0.0, broken_seed=None, hold=None, hold_after=0):
        self._step_s, self._broken_seed = step_s, broken_seed
        self._hold, self._num_before_hold = hold and Path(hold), hold_after
        self._taken = self._seed = 0

    def reset(self, *, seed=None, options=None):
        self._taken, self._seed = 0, seed or 0
        return self._observation(), {}

    def step(self, action):
        self._num_before_hold -= 1
        while self._hold and self._num_before_hold < 0 and self._hold.exists():
            self._hold.with_suffix(".waits").touch()
            time.sleep(0.01)
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


class Meeting(gymnasium.Wrapper):
    """CartPole that begins once it is in `num` processes, which the process `apart` is none of."""

    def __init__(self, folder, num, apart):
        super().__init__(gymnasium.make("CartPole-v1"))
        self._folder, self._num, self._apart = Path(folder), num, apart

    def reset(self, **options):
        if os.getpid() != self._apart:
            (self._folder / str(os.getpid())).touch()
            while len(list(self._folder.iterdir())) < self._num:
                time.sleep(0.01)
        return super().reset(**options)
