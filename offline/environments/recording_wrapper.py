"""Recorder: `record` writes down what any loop does with an environment.

Needs gymnasium alone: neither torch nor ray, so that a user's own loop can be recorded anywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from replaylake.datastore.episodes.episode import Episode, validate
from replaylake.datastore.episodes.spaces import (
    Array,
    Dict,
    Space,
    Text,
    Tuple,
    children,
    copy_value,
)
from replaylake.datastore.errors import ConfigInvalidError, EpisodeInvalidError, SchemaMismatchError
from replaylake.datastore.lake.dataset import Dataset, new_episode_id
from replaylake.datastore.lake.episode_writer import EpisodeWriter
from replaylake.offline.environments.spaces import (
    Environment,
    action_mask,
    from_gymnasium,
    gymnasium,
)


def record(
    env: Environment,
    dataset: Dataset,
    *,
    producer: str | None = None,
    policy: str | None = None,
) -> RecordingWrapper:
    """Wrap an environment so that every step of whatever loop runs it is written to the dataset.

    An episode is written when it ends, committed within seconds, and durable at the latest when
    `close()` returns. Close the environment: what is still buffered is committed then, an episode
    still open as an open piece. A reset before the end marks the episode as truncated. One that is
    refused (a reward that is not finite, an observation of another shape) is dropped whole: the
    step, reset or close that ended it raises why, and the next `reset()` begins another.

    Args:
        env: a single environment; wrap each one of a vector environment before it is vectorized.
        dataset: created with the environment's spaces if it does not exist.
        producer: who records, for the commits; unique to this process. Default: made up.
        policy: who acts, `name`, `name:version` or `run:<id>`; left unknown if None.

    Raises: ConfigInvalidError for a vector environment or a malformed policy, SchemaMismatchError
    if the dataset has other spaces.
    """
    if isinstance(env, gymnasium.vector.VectorEnv):
        raise ConfigInvalidError(
            f"record: found a vector environment of {env.num_envs}, expected a single one. Record "
            "inside: SyncVectorEnv([lambda: record(make(...), dataset), ...])."
        )
    return RecordingWrapper(env, dataset, producer, policy)


class RecordingWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """What `record` returns: the environment, unchanged but for being written down."""

    def __init__(
        self,
        env: Environment,
        dataset: Dataset,
        producer: str | None,
        policy: str | None,
    ) -> None:
        super().__init__(env)
        self._policy, self._policy_version = _parse_policy(policy)
        self._spaces = from_gymnasium(env.observation_space), from_gymnasium(env.action_space)
        self._dataset = dataset
        # A loop that is killed loses the seconds since the last flush, not the run.
        self._writer: EpisodeWriter = dataset.writer(producer=producer, flush_interval_s=5.0)
        self._steps: list[tuple[Any, Any, Array, Array | None]] = []
        self._observation: Any = None
        self._mask: Array | None = None
        self._mask_size: int | None = None  # the dataset's once it is known, 0 for no masks
        self._ended = True

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset, writing an episode that had not ended as truncated. Raises: as `record` says."""
        if self._steps:
            self._write(truncated=True)
        observation, info = self.env.reset(**kwargs)
        self._ended = False
        self._observation, self._mask = copy_value(observation), action_mask(info)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and write the episode down if this ended it. Raises: as `record` says."""
        if self._ended:
            raise EpisodeInvalidError("record: found a step before reset, expected reset first.")
        action_taken = copy_value(action)  # before the step: an environment may write into it
        observation, reward, terminated, truncated, info = self.env.step(action)
        # Some environments return rewards as arrays of one element.
        value = np.array(reward).squeeze()
        self._steps.append((self._observation, action_taken, value, self._mask))
        self._observation, self._mask = copy_value(observation), action_mask(info)
        if terminated or truncated:
            self._write(terminated=bool(terminated), truncated=bool(truncated))
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Commit everything, an unfinished episode as an open piece, and close the environment."""
        try:
            if self._steps:
                self._write()
        finally:
            try:
                self._writer.close()
            finally:
                self._ended = True
                self.env.close()  # type: ignore[no-untyped-call]

    def _write(self, *, terminated: bool = False, truncated: bool = False) -> None:
        # First of all, so that a refused episode leaves nothing behind that a later step goes on.
        self._ended = True
        steps, self._steps = self._steps, []
        observations, actions, rewards, masks = zip(*steps, strict=True)
        num, policy, version = len(steps), self._policy, self._policy_version
        has_masks = all(mask is not None for mask in masks)
        episode = Episode(
            episode_id=new_episode_id(self._writer.producer),
            observations=_stack_values(self._spaces[0], observations, "observation"),
            actions=_stack_values(self._spaces[1], actions, "action"),
            rewards=_stack_leaf(rewards, "reward"),
            terminated=terminated,
            truncated=truncated,
            final_observation=self._observation,
            policies=None if policy is None else np.full(num, policy, dtype=object),
            policy_versions=None if version is None else np.full(num, version, np.int64),
            action_masks=_stack_leaf(masks, "action_mask") if has_masks else None,
        )
        # Before the dataset is made, and before the writer holds it together with others.
        episode = validate(episode, *self._spaces)
        mask_size = None if episode.action_masks is None else episode.action_masks.shape[1]
        if not self._dataset.exists():
            self._dataset.create(*self._spaces, mask_size=mask_size)
        if self._mask_size is None:
            self._mask_size = self._dataset.spec.mask_size or 0
        if mask_size is not None and mask_size != self._mask_size:
            raise SchemaMismatchError(
                f"record into {self._dataset.name}: found action masks of {mask_size} actions, "
                f"expected {self._mask_size or 'none'} as the dataset has. Record into a new one."
            )
        self._writer.write(episode)


def _parse_policy(policy: str | None) -> tuple[str | None, int | None]:
    """Split `name:version`; `run:<id>` is a name of its own."""
    if policy is None or policy.startswith("run:") or ":" not in policy:
        return policy, None
    name, _, version = policy.rpartition(":")
    if not version.isdecimal():
        raise ConfigInvalidError(
            f"record: found policy {policy!r}, expected NAME, NAME:VERSION with a whole number, or "
            "run:ID."
        )
    return name, int(version)


def _stack_leaf(values: tuple[Any, ...], what: str) -> Array:
    try:
        return np.stack([np.asarray(value) for value in values])
    except ValueError as error:
        shapes = sorted({np.shape(value) for value in values})
        raise EpisodeInvalidError(
            f"{what}: found the shapes {shapes} in one episode, expected one. Fix the environment."
        ) from error


def _stack_values(space: Space, values: tuple[Any, ...], what: str) -> Any:
    if isinstance(space, Dict | Tuple):
        return {
            key: _stack_values(sub, tuple(value[key] for value in values), f"{what}.{key}")
            for key, sub in children(space).items()
        }
    if isinstance(space, Text):
        return np.array(values, dtype=object)
    return _stack_leaf(values, what)
