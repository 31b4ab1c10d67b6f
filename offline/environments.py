"""Environments: Gymnasium's, by id; their spaces as ours; and `record`, which records any loop.

Needs gymnasium alone: neither torch nor ray, so that a user's own loop can be recorded anywhere.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from replaylake.datastore.dataset import Dataset, EpisodeWriter, new_episode_id
from replaylake.datastore.episode import Episode, checked
from replaylake.datastore.errors import (
    ConfigInvalid,
    EpisodeInvalid,
    ExtraMissing,
    NotFound,
    SchemaMismatch,
    SpaceUnsupported,
)
from replaylake.datastore.spaces import (
    Array,
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
    children,
)
from replaylake.datastore.writer.open_episode import copied

try:
    import gymnasium
except ModuleNotFoundError as _error:
    raise ExtraMissing(
        "environments: found no gymnasium, expected it to step and record. Install replaylake[gym]."
    ) from _error

Environment = gymnasium.Env[Any, Any]

# Imported when it is made.
gymnasium.register(
    "ReplayLake/FrameGrid-v0",
    entry_point="replaylake.offline.frame_grid:FrameGrid",
    max_episode_steps=10,
)


def make(env_id: str, **kwargs: Any) -> Environment:
    """Make an environment, without Gymnasium's checker, which costs a third of a CartPole step.

    Raises: NotFound for an id that is not registered, with the near matches; ExtraMissing where the
    environment's own library is not installed.
    """
    try:
        with warnings.catch_warnings():
            # An older version of an environment is the user's choice, made by its id.
            warnings.filterwarnings("ignore", message=".*is out of date", category=UserWarning)
            env: Environment = gymnasium.make(env_id, disable_env_checker=True, **kwargs)
            return env
    except gymnasium.error.DependencyNotInstalled as error:
        raise ExtraMissing(f"environment {env_id}: {error}.") from error
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        near = difflib.get_close_matches(env_id, list(gymnasium.registry), n=3, cutoff=0.6)
        raise NotFound(
            f"environment {env_id!r}: not registered with Gymnasium ({error}) "
            f"Expected {' or '.join(near) if near else 'an id such as CartPole-v1'}; "
            "`module:Name-v0` imports the module that registers it."
        ) from error


def make_rendering(env_id: str) -> Environment:
    """Make an environment that draws itself for `rendered`.

    Raises: as make; ConfigInvalid if it cannot draw into an array.
    """
    env = make(env_id)
    modes = [str(mode) for mode in env.metadata.get("render_modes") or []]
    env.close()  # type: ignore[no-untyped-call]
    if "rgb_array" not in modes:
        raise ConfigInvalid(
            f"environment {env_id}: found render modes {modes}, expected rgb_array among them: it "
            "cannot draw itself into pictures. Leave the video out."
        )
    return make(env_id, render_mode="rgb_array")


def frames_per_second(env_id: str) -> float:
    """Return at how many steps a second the environment is meant to be watched; 30 by default."""
    env = make(env_id)
    env.close()  # type: ignore[no-untyped-call]
    return float(env.metadata.get("render_fps") or 30)


def rendered(env: Environment) -> Array:
    """Return what an environment of `make_rendering` looks like now: uint8 [height, width, 3].

    Raises: ExtraMissing without the library that it draws with, ConfigInvalid for other pictures.
    """
    try:
        found: Any = env.render()
    except gymnasium.error.DependencyNotInstalled as error:
        raise ExtraMissing(
            f"environment {env.spec.id if env.spec else env}: drawing it: {error}."
        ) from error
    frame = np.asarray(found)
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
        raise ConfigInvalid(
            f"environment {env.spec.id if env.spec else env}: its picture is {frame.dtype} "
            f"{list(frame.shape)}, expected uint8 [height, width, 3]. Mend its render(), or leave "
            "the video out."
        )
    return frame


def spaces_of(env_id: str) -> tuple[Space, Space]:
    """Return an environment's (observation space, action space). Raises: as make."""
    env = make(env_id)
    try:
        return from_gymnasium(env.observation_space), from_gymnasium(env.action_space)
    finally:
        env.close()  # type: ignore[no-untyped-call]


def from_gymnasium(space: gymnasium.Space[Any]) -> Space:
    """Return the same space as ours. Raises: SpaceUnsupported for Graph, Sequence and OneOf."""
    kinds = gymnasium.spaces
    if isinstance(space, kinds.Box):
        dtype = np.dtype(space.dtype).name
        return Box(space.shape, dtype, space.low.tolist(), space.high.tolist())
    if isinstance(space, kinds.Discrete):
        return Discrete(int(space.n), int(space.start))
    if isinstance(space, kinds.MultiDiscrete) and space.nvec.ndim == 1 and not space.start.any():
        return MultiDiscrete(tuple(space.nvec.tolist()))
    if isinstance(space, kinds.MultiBinary) and len(space.shape) == 1:
        return MultiBinary(int(space.shape[0]))
    if isinstance(space, kinds.Text):
        return Text()
    if isinstance(space, kinds.Dict):
        return Dict({key: from_gymnasium(sub) for key, sub in space.spaces.items()})
    if isinstance(space, kinds.Tuple):
        return Tuple(tuple(from_gymnasium(sub) for sub in space.spaces))
    raise SpaceUnsupported(
        f"found Gymnasium space {space}, expected Box, Discrete, MultiDiscrete and MultiBinary "
        "with one dim and starting at 0, Text, Dict or Tuple. Wrap the environment to give one of "
        "these."
    )


def to_gymnasium(space: Space) -> gymnasium.Space[Any]:
    """Return the same space as Gymnasium's."""
    kinds = gymnasium.spaces
    if isinstance(space, Box):
        dtype = np.dtype(space.dtype)
        low, high = (_bound_array(bound, space) for bound in (space.low, space.high))
        return kinds.Box(low, high, space.shape, dtype.type)
    if isinstance(space, Discrete):
        return kinds.Discrete(space.n, start=space.start)
    if isinstance(space, MultiDiscrete):
        return kinds.MultiDiscrete(list(space.nvec))
    if isinstance(space, MultiBinary):
        return kinds.MultiBinary(space.n)
    if isinstance(space, Dict):
        return kinds.Dict({key: to_gymnasium(sub) for key, sub in space.spaces.items()})
    if isinstance(space, Tuple):
        return kinds.Tuple([to_gymnasium(sub) for sub in space.spaces])
    return kinds.Text(max_length=2**31 - 1)


def record(
    env: Environment,
    dataset: Dataset,
    *,
    producer: str | None = None,
    policy: str | None = None,
) -> Recorder:
    """Wrap an environment so that every step of whatever loop runs it is written to the dataset.

    An episode is written when it ends, committed within seconds, and durable at the latest when
    `close()` returns. Close the environment: what is still buffered is committed then, an episode
    still open as an open piece. A reset before the end marks the episode as truncated. One that is
    refused (a reward that is not finite, an observation of another shape) is dropped whole: the
    step, reset or close that ended it raises why, and the next `reset()` begins another.

    Args:
        env: a single environment; wrap each one of a vector environment before it is vectorised.
        dataset: created with the environment's spaces if it does not exist.
        producer: who records, for the commits; unique to this process. Default: made up.
        policy: who acts, `name`, `name:version` or `run:<id>`; left unknown if None.

    Raises: ConfigInvalid for a vector environment or a malformed policy, SchemaMismatch if the
    dataset has other spaces.
    """
    if isinstance(env, gymnasium.vector.VectorEnv):
        raise ConfigInvalid(
            f"record: found a vector environment of {env.num_envs}, expected a single one. Record "
            "inside: SyncVectorEnv([lambda: record(make(...), dataset), ...])."
        )
    return Recorder(env, dataset, producer, policy)


class Recorder(gymnasium.Wrapper[Any, Any, Any, Any]):
    """What `record` returns: the environment, unchanged but for being written down."""

    def __init__(
        self,
        env: Environment,
        dataset: Dataset,
        producer: str | None,
        policy: str | None,
    ) -> None:
        super().__init__(env)
        self._policy, self._policy_version = _parsed_policy(policy)
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
        self._observation, self._mask = copied(observation), action_mask(info)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and write the episode down if this ended it. Raises: as `record` says."""
        if self._ended:
            raise EpisodeInvalid("record: found a step before reset, expected reset first.")
        action_taken = copied(action)  # before the step: an environment may write into it
        observation, reward, terminated, truncated, info = self.env.step(action)
        # Some environments return rewards as arrays of one element.
        value = np.array(reward).squeeze()
        self._steps.append((self._observation, action_taken, value, self._mask))
        self._observation, self._mask = copied(observation), action_mask(info)
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
            observations=_stacked(self._spaces[0], observations, "observation"),
            actions=_stacked(self._spaces[1], actions, "action"),
            rewards=_stack(rewards, "reward"),
            terminated=terminated,
            truncated=truncated,
            final_observation=self._observation,
            policies=None if policy is None else np.full(num, policy, dtype=object),
            policy_versions=None if version is None else np.full(num, version, np.int64),
            action_masks=_stack(masks, "action_mask") if has_masks else None,
        )
        # Before the dataset is made, and before the writer holds it together with others.
        episode = checked(episode, *self._spaces)
        mask_size = None if episode.action_masks is None else episode.action_masks.shape[1]
        if not self._dataset.exists():
            self._dataset.create(*self._spaces, mask_size=mask_size)
        if self._mask_size is None:
            self._mask_size = self._dataset.spec.mask_size or 0
        if mask_size is not None and mask_size != self._mask_size:
            raise SchemaMismatch(
                f"record into {self._dataset.name}: found action masks of {mask_size} actions, "
                f"expected {self._mask_size or 'none'} as the dataset has. Record into a new one."
            )
        self._writer.write(episode)


def action_mask(info: Mapping[str, Any]) -> Array | None:
    """Return the mask bool [A] that an environment puts into info["action_mask"], if it does."""
    mask = info.get("action_mask")
    return None if mask is None else np.asarray(mask).astype(bool)


def _parsed_policy(policy: str | None) -> tuple[str | None, int | None]:
    """Split `name:version`; `run:<id>` is a name of its own."""
    if policy is None or policy.startswith("run:") or ":" not in policy:
        return policy, None
    name, _, version = policy.rpartition(":")
    if not version.isdecimal():
        raise ConfigInvalid(
            f"record: found policy {policy!r}, expected NAME, NAME:VERSION with a whole number, or "
            "run:ID."
        )
    return name, int(version)


def _stack(values: tuple[Any, ...], what: str) -> Array:
    try:
        return np.stack([np.asarray(value) for value in values])
    except ValueError as error:
        shapes = sorted({np.shape(value) for value in values})
        raise EpisodeInvalid(
            f"{what}: found the shapes {shapes} in one episode, expected one. Mend the environment."
        ) from error


def _stacked(space: Space, values: tuple[Any, ...], what: str) -> Any:
    if isinstance(space, Dict | Tuple):
        return {
            key: _stacked(sub, tuple(value[key] for value in values), f"{what}.{key}")
            for key, sub in children(space).items()
        }
    if isinstance(space, Text):
        return np.array(values, dtype=object)
    return _stack(values, what)


def _bound_array(bound: Any, space: Box) -> Array:
    return np.broadcast_to(np.asarray(bound), space.shape).astype(space.dtype)
