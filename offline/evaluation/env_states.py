"""States of environments, set from observations: what a replay of single transitions needs.

An environment of one's own joins by a method on its unwrapped self:
`set_state_from_observation(observation) -> None`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array

HOOK: Final = "set_state_from_observation"
SetState = Callable[[Any, Array], None]


def state_setter(env: Any) -> SetState | None:
    """Return what puts the environment into an observation's state, or None where none is known."""
    inner = env.unwrapped
    if hasattr(inner, HOOK):
        return lambda env, observation: getattr(env.unwrapped, HOOK)(observation)
    return next((_SETTERS[k.__name__] for k in type(inner).__mro__ if k.__name__ in _SETTERS), None)


def transition_table(env: Any) -> Any | None:
    """Return P[state][action] = [(probability, next state, reward, terminated)], or None.

    FrozenLake, CliffWalking and Taxi have one: there several next states may be right.
    """
    return getattr(env.unwrapped, "P", None)


def _set_cart_pole(env: Any, observation: Array) -> None:
    env.unwrapped.state = np.asarray(observation, np.float64)
    env.unwrapped.steps_beyond_terminated = None


def _set_pendulum(env: Any, observation: Array) -> None:
    cosine, sine, velocity = np.asarray(observation, np.float64)
    env.unwrapped.state = np.array([np.arctan2(sine, cosine), velocity])


def _set_acrobot(env: Any, observation: Array) -> None:
    cos_1, sin_1, cos_2, sin_2, velocity_1, velocity_2 = np.asarray(observation, np.float64)
    angles = np.arctan2(sin_1, cos_1), np.arctan2(sin_2, cos_2)
    env.unwrapped.state = np.array([*angles, velocity_1, velocity_2])


def _set_mountain_car(env: Any, observation: Array) -> None:
    env.unwrapped.state = np.asarray(observation, np.float64)


# By the name of the environment's class, which outlives its versions' ids.
_SETTERS: Final[dict[str, SetState]] = {
    "CartPoleEnv": _set_cart_pole,
    "PendulumEnv": _set_pendulum,
    "AcrobotEnv": _set_acrobot,
    "MountainCarEnv": _set_mountain_car,
    "Continuous_MountainCarEnv": _set_mountain_car,
}
