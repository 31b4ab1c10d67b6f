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


class Museum(gymnasium.Env):
    """Observations of every kind, actions of two elements, 1 + s % 3 steps that are truncated."""

    observation_space = gymnasium.spaces.Dict(
        {
            "picture": gymnasium.spaces.Box(0, 255, (3, 2, 1), np.uint8),
            "place": gymnasium.spaces.Box(-np.inf, np.inf, (), np.float64),
            "room": gymnasium.spaces.Discrete(5),
            "lamps": gymnasium.spaces.MultiBinary(2),
            "said": gymnasium.spaces.Text(9),
            "pair": gymnasium.spaces.Tuple(
                (gymnasium.spaces.Discrete(9, start=-4), gymnasium.spaces.MultiDiscrete([300, 2]))
            ),
        }
    )
    action_space = gymnasium.spaces.MultiDiscrete([3, 2])

    def __init__(self, strange=None):
        self._strange = strange or {}
        self._at = 0, 0

    def reset(self, *, seed=None, options=None):
        self._at = seed, 0
        return self._observation(), {}

    def step(self, action):
        seed, taken = self._at
        self._at = seed, taken + 1
        action += 1  # an environment may write into what it is given
        return self._observation(), np.array([float(taken)]), False, taken == seed % 3, {}

    def _observation(self):
        seed, taken = self._at
        return {
            "picture": np.full((3, 2, 1), (seed + taken) % 256, np.uint8),
            "place": seed / 7 + taken,
            "room": (seed + taken) % 5,
            "lamps": np.array([taken % 2, seed % 2], np.int8),
            "said": f"{seed}.{taken}",
            "pair": (np.int64(taken - 4), np.array([seed, taken % 2])),
            **self._strange,
        }


gymnasium.register("Museum-v0", entry_point=f"{__name__}:Museum")


class Arm(gymnasium.Env):
    """Two joints: the action is what it pays; five steps, which end it."""

    observation_space = gymnasium.spaces.Box(0, 5, (1,), np.float32)
    action_space = gymnasium.spaces.Box(np.array([-1, 0]), np.array([1, 10]), dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        self._taken = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._taken += 1
        return np.full(1, self._taken), np.float32(action[0]), self._taken == 5, False, {}


gymnasium.register("Arm-v0", entry_point=f"{__name__}:Arm")
