"""The steps that every system holds, and the checks that what it samples is among them.

A step's observation says its episode and its number in it, so that a batch can be compared with the
source: an observation with the action, the reward and the observation that belong to it. Odd
episodes terminate, even ones are truncated. Needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.steps import ACTION_SIZE, EPISODE_STEPS, OBSERVATION_SIZE

NUM_STEPS: Final = 1_000_000
NUM_FRAMES: Final = 100_000
FRAME: Final = (84, 84)
STACK: Final = 4
DISCOUNT: Final = 0.99


@dataclass(frozen=True)
class Source:
    """E episodes of T = 1,000: observations [E, T + 1, *obs], actions [E, T, *act], rewards [E, T].

    terminated and truncated are bool [E, T].
    """

    observations: NDArray[Any]
    actions: NDArray[Any]
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]

    def flat(self, start: int = 0) -> dict[str, NDArray[Any]]:
        """Return the transitions as columns; episodes are numbered from `start`."""
        observations = self.observations.copy()
        observations[:, :, 0] += start
        columns = {
            "observations": observations[:, :-1],
            "next_observations": observations[:, 1:],
            "actions": self.actions,
            "rewards": self.rewards,
            "terminated": self.terminated,
            "truncated": self.truncated,
        }
        return {
            name: np.ascontiguousarray(column).reshape(-1, *column.shape[2:])
            for name, column in columns.items()
        }


def source(num_steps: int = NUM_STEPS) -> Source:
    """Return noise: observations float32 [17], actions float32 [6]."""
    num_episodes = num_steps // EPISODE_STEPS
    rng = np.random.default_rng(0)
    shape = (num_episodes, EPISODE_STEPS)
    observations = rng.standard_normal((num_episodes, EPISODE_STEPS + 1, OBSERVATION_SIZE), "f4")
    observations[:, :, 0] = np.arange(num_episodes)[:, None]
    observations[:, :, 1] = np.arange(EPISODE_STEPS + 1)
    return Source(
        observations,
        rng.standard_normal((*shape, ACTION_SIZE), "f4"),
        rng.standard_normal(shape, "f4"),
        *_flags(num_episodes),
    )


def frame_source() -> Source:
    """Return frames of noise, uint8 [84, 84], of which the first 4 bytes are a number; 0.7 GB."""
    num_episodes = NUM_FRAMES // EPISODE_STEPS
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (num_episodes, EPISODE_STEPS + 1, *FRAME), np.uint8)
    count = num_episodes * (EPISODE_STEPS + 1)
    numbers = np.arange(count, dtype=np.uint32).view(np.uint8)
    frames[:, :, 0, :4] = numbers.reshape(num_episodes, EPISODE_STEPS + 1, 4)
    shape = (num_episodes, EPISODE_STEPS)
    actions, rewards = rng.integers(0, 18, shape), rng.standard_normal(shape, "f4")
    return Source(frames, actions, rewards, *_flags(num_episodes))


def _flags(num_episodes: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    terminated = np.zeros((num_episodes, EPISODE_STEPS), bool)
    truncated = terminated.copy()
    terminated[1::2, -1] = True
    truncated[::2, -1] = True
    return terminated, truncated


def transitions(
    held: Source, size: int, n_step: int = 1, ends: bool = True
) -> Callable[[Mapping[str, Any]], None]:
    """Return the check of a batch of transitions.

    Nobody bootstraps from what follows a termination, so that observation may be anything; so may,
    unless `ends`, all that says how the last n steps of an episode end.
    """

    def check(batch: Mapping[str, Any]) -> None:
        found = {name: _numpy(batch[name]) for name in _FIELDS}
        require(len(found["observations"]) == size, f"{size} transitions")
        episodes, steps = _places(found["observations"])
        after = np.minimum(steps + n_step, EPISODE_STEPS)
        rewards = np.zeros(size)
        for offset in range(n_step):
            there = steps + offset < EPISODE_STEPS
            rewards[there] += (
                DISCOUNT**offset * held.rewards[episodes[there], steps[there] + offset]
            )
        terminated = held.terminated[episodes, after - 1]
        expected = {
            "observations": held.observations[episodes, steps, 1:],
            "actions": held.actions[episodes, steps],
            "rewards": rewards,
            "terminated": terminated,
            "next_observations": held.observations[episodes, after, 1:],
        }
        found["observations"] = found["observations"][:, 1:]
        found["next_observations"] = found["next_observations"][:, 1:]
        for name, values in expected.items():
            compared = np.ones(size, bool)
            if name in ("next_observations", "terminated"):
                compared = ends | (after < EPISODE_STEPS)
            if name == "next_observations":
                compared &= ~terminated
            same = found[name].reshape(values.shape)[compared], values[compared]
            # Sums of float32 rewards are rounded in their own order.
            require(np.allclose(*same, atol=1e-5), f"the {name} of the observations")

    return check


def sequences(held: Source, count: int, length: int) -> Callable[[Mapping[str, Any]], None]:
    """Return the check of `count` stretches; where `masks` are false there may be anything."""

    def check(batch: Mapping[str, Any]) -> None:
        observations = _numpy(batch["observations"]).reshape(count, length, -1)
        actions = _numpy(batch["actions"]).reshape(count, length, -1)
        rewards = _numpy(batch["rewards"]).reshape(count, length)
        masks = _numpy(batch["masks"]).reshape(count, length) > 0 if "masks" in batch else None
        episodes, steps = _places(observations)
        there = np.ones((count, length), bool) if masks is None else masks
        both = there[:, 1:] & there[:, :-1]
        require((np.diff(episodes)[both] == 0).all(), "sequences within an episode")
        require((np.diff(steps)[both] == 1).all(), "consecutive steps")
        places = episodes[there], steps[there]
        require(np.allclose(actions[there], held.actions[places]), "the actions of the steps")
        require(np.allclose(rewards[there], held.rewards[places]), "the rewards of the steps")

    return check


def stacks(held: Source, size: int) -> Callable[[Mapping[str, Any]], None]:
    """Return the check of stacked frames, [B, 4, 84, 84] each.

    What fills the stack at an episode's start, and what follows its last step, may be anything:
    not every peer keeps it.
    """
    frames = held.observations.reshape(-1, *FRAME)

    def check(batch: Mapping[str, Any]) -> None:
        observations, following = (
            _numpy(batch[name]) for name in ("observations", "next_observations")
        )
        require(observations.shape == (size, STACK, *FRAME), f"{(size, STACK, *FRAME)}")
        require(following.shape == observations.shape, f"{observations.shape}")
        last = np.ascontiguousarray(observations[:, -1, 0, :4]).view(np.uint32)[:, 0]
        steps = last.astype(int) % (EPISODE_STEPS + 1)
        inner = (steps >= STACK - 1) & (steps < EPISODE_STEPS - 1)
        for back in range(STACK):
            number = last[inner] - (STACK - 1 - back)
            require((observations[inner, back] == frames[number]).all(), "the frames before")
            require((following[inner, back] == frames[number + 1]).all(), "the frames that follow")
        actions = held.actions[last // (EPISODE_STEPS + 1), np.minimum(steps, EPISODE_STEPS - 1)]
        same = _numpy(batch["actions"]).reshape(-1) == actions
        require(same.all(), "the actions of the frames")

    return check


def nothing(_: Any) -> None:
    """Check nothing, where there is no batch."""


def require(holds: bool | np.bool_, expected: str) -> None:
    if not holds:
        raise SystemExit(f"batch: found another, expected {expected}")


_FIELDS: Final = ("observations", "actions", "rewards", "terminated", "next_observations")


def _places(observations: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the episodes in the source, which is repeated in the larger datasets, and steps."""
    places = observations[..., :2].astype(np.int64)
    return places[..., 0] % (NUM_STEPS // EPISODE_STEPS), places[..., 1]


def _numpy(values: Any) -> NDArray[Any]:
    return np.asarray(values)
