"""Lanes: environments stepped in lockstep, each through one episode after the other."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.spaces import (
    Array,
    Dict,
    Discrete,
    Space,
    Tuple,
    Values,
    as_batch,
    as_values,
    children,
    leaves,
    take,
    value_dtype,
    value_shape,
)
from replaylake.datastore.errors import RolloutError
from replaylake.online.collecting.actor import Actor
from replaylake.online.collecting.episode_random import EpisodeRandom
from replaylake.online.collecting.step_buffer import EpisodeEnd, RolloutEpisode, StepBuffer

# Rows of a block: at most so many, and so many bytes of observations, one row at least.
_ROWS: Final = 4096
_BYTES: Final = 32 << 20


@dataclass
class _EnvSlot:
    """An environment; `step` is its method, looked up once.

    first_row: of the block, from which on its rows are not counted in the open episode yet.
    """

    env: Any
    step: Any
    buffer: StepBuffer
    first_row: int = 0


class VectorEnv:
    """Steps environments together until there is no episode left for them.

    tracks: what there is to take, also of environments that are closed; see `flush_block`. ends:
    the episodes that ended. Whoever takes either empties it.
    """

    def __init__(
        self,
        envs: Sequence[Any],
        spaces: tuple[Space, Space],
        numbers: Iterator[int],
        first_seed: int,
        actor: Actor,
        *,
        name: str,
        env_id: str,
    ) -> None:
        """Reset as many environments as there are episodes, and close the others.

        Args:
            envs: environments.
            spaces: of observations and actions.
            numbers: of episodes; episode i is reset with first_seed + i.
            first_seed: of episode 0.
            actor: who acts at first.
            name: who steps them, for errors.
            env_id: what the environments are, for errors.

        Raises: RolloutError, EpisodeInvalidError.
        """
        self._spaces = spaces
        self._is_discrete = isinstance(spaces[1], Discrete)
        self._numbers = numbers
        self._first_seed = first_seed
        self._name, self._env_id = name, env_id
        self._actor = actor
        self._draws = EpisodeRandom()
        self._closed: list[StepBuffer] = []
        self._slots: list[_EnvSlot] = []
        self.ends: list[EpisodeEnd] = []
        self.mask_size: int | None = None
        first = []
        for env in envs:
            if (number := next(numbers, None)) is None:
                env.close()
                continue
            lane = _EnvSlot(env, env.step, StepBuffer(None))
            self._slots.append(lane)
            first.append(self._reset(lane, number))
        self._draws.restart([_require_open_episode(lane).seed for lane in self._slots])
        self._state = _first_states(actor, len(self._slots))
        if first and (mask := first[0][1].get("action_mask")) is not None:
            self.mask_size = len(mask)
        self._block = self._allocate_block(actor.recorded_state_size)
        for i, (observation, info) in enumerate(first):
            self._put(0, i, observation, info)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def open_episodes(self) -> list[RolloutEpisode]:
        """The episodes that go on."""
        return [_require_open_episode(lane) for lane in self._slots]

    def set_actor(self, actor: Actor) -> None:
        """Act otherwise from the next step on; what is remembered stays if it is as much."""
        if actor.state_size != self._actor.state_size:
            self._state = _first_states(actor, len(self._slots))
        if actor.recorded_state_size != self._actor.recorded_state_size:
            self.flush_block()
            self._replace_block(range(len(self._slots)), actor.recorded_state_size)
        self._actor = actor

    def act(self, actor_number: int) -> Array:
        """Choose an action for each environment, and write down who chose.

        Raises: as Policy.act.
        """
        if self._block.row == self._block.num_rows:
            self.flush_block()
        block, row = self._block, self._block.row
        masks = None if block.masks is None else block.masks[row]
        observations = take(block.observations, row)
        act = self._actor.act(observations, self._state, masks, self._draws)
        block.actions[row] = act.actions
        block.log_probs[row] = np.nan if act.log_probs is None else act.log_probs
        block.actors[row] = actor_number
        if block.states is not None:
            assert self._state is not None  # what is recorded is a part of it
            block.states[row] = self._state[:, : block.states.shape[-1]]
        self._state = act.state
        return act.actions

    def step(self, actions: Array) -> None:
        """Step each environment, and begin the next episode where one ended.

        Raises: RolloutError naming the episode if an environment raises, EpisodeInvalidError if it
        gives what its spaces do not hold.
        """
        block, row = self._block, self._block.row
        put, is_masked = block.put, self.mask_size is not None
        # Python ints, which the step of an environment handles several times faster. Others are
        # copied, because an environment may write into what it is given.
        inputs = actions.tolist() if self._is_discrete else actions.copy()
        rewards = [0.0] * len(self._slots)
        ended: list[tuple[int, Any, bool, bool]] = []
        for i, lane in enumerate(self._slots):
            try:
                observation, reward, terminated, truncated, info = lane.step(inputs[i])
                if type(reward) is not float:
                    reward = float(reward.item() if isinstance(reward, np.ndarray) else reward)
            except Exception as error:
                raise self._env_error(lane, row, "step", error) from error
            rewards[i] = reward
            put(row + 1, i, observation)
            if terminated or truncated:
                # A copy: the environment may reuse its array at the reset.
                final_observation = block.observation(row + 1, i)
                ended.append((i, final_observation, bool(terminated), bool(truncated)))
            elif is_masked or info:
                self._put_mask(row + 1, i, info)
        block.rewards[row] = rewards
        block.row = row + 1
        if self._state is not None:
            self._state = self._actor.policy.observe(self._state, block.rewards[row])
        if ended:
            self._begin_next_episodes(ended)

    def flush_block(self) -> None:
        """Move what was stepped to the tracks."""
        block = self._block
        if block.row:
            for i, (lane, part) in enumerate(zip(self._slots, block.copy_columns(), strict=True)):
                if lane.buffer.open is not None:
                    self._count(lane, i, block.row)
                lane.first_row = 0
                lane.buffer.parts.append(part)
            block.rewind()

    def take_buffers(self) -> list[tuple[StepBuffer, Any]]:
        """Return the tracks, and what the open episode of each observed last; call `seal` before.

        Those of closed environments are there once.
        """
        closed, self._closed = self._closed, []
        block = self._block
        return [
            *((track, None) for track in closed),
            *((lane.buffer, block.observation(0, i)) for i, lane in enumerate(self._slots)),
        ]

    def close(self) -> None:
        for lane in self._slots:
            lane.env.close()
        self._slots = []
        self._closed = []

    def _allocate_block(self, state_size: int) -> StepBlock:
        return StepBlock(
            self._spaces,
            len(self._slots),
            mask_size=self.mask_size,
            state_size=state_size,
            name=f"{self._name}: {self._env_id}",
        )

    def _replace_block(self, columns: Sequence[int], state_size: int) -> None:
        before, self._block = self._block, self._allocate_block(state_size)
        self._block.copy_from(before, columns)

    def _reset(self, lane: _EnvSlot, number: int) -> tuple[Any, Any]:
        seed = self._first_seed + number
        lane.buffer.open = RolloutEpisode(number, seed, time.time())
        try:
            observation, info = lane.env.reset(seed=seed)
        except Exception as error:
            raise self._env_error(lane, 0, "reset", error) from error
        return observation, info

    def _put(self, row: int, column: int, observation: Any, info: Any) -> None:
        self._block.put(row, column, observation)
        self._put_mask(row, column, info)

    def _put_mask(self, row: int, column: int, info: Any) -> None:
        mask = info.get("action_mask")
        if mask is not None or self.mask_size is not None:
            self._block.put_mask(row, column, mask)

    def _count(self, lane: _EnvSlot, column: int, row: int) -> None:
        """Count the rows before `row` in the lane's open episode."""
        episode, first = _require_open_episode(lane), lane.first_row
        episode.num_steps += row - first
        episode.episode_return += float(self._block.rewards[first:row, column].sum())
        lane.first_row = row

    def _begin_next_episodes(self, ended: Sequence[tuple[int, Any, bool, bool]]) -> None:
        """Begin the next episodes where some ended; an environment without one is closed."""
        idle = set()
        row = self._block.row
        for i, final_observation, terminated, truncated in ended:
            lane = self._slots[i]
            self._count(lane, i, row)
            self.ends.append(
                lane.buffer.end(final_observation, terminated=terminated, truncated=truncated)
            )
            if (number := next(self._numbers, None)) is None:
                idle.add(i)
                continue
            self._put(row, i, *self._reset(lane, number))
            self._draws.start(i, _require_open_episode(lane).seed)
            if self._state is not None:
                self._state[i] = self._actor.first_state[0]  # type: ignore[index]
        if idle:
            self._close(idle)

    def _close(self, idle: Collection[int]) -> None:
        """Close environments, and go on with the others."""
        self.flush_block()
        for i in idle:
            self._slots[i].env.close()
            self._closed.append(self._slots[i].buffer)
        rest = [i for i in range(len(self._slots)) if i not in idle]
        self._slots = [self._slots[i] for i in rest]
        if rest:
            self._replace_block(rest, self._actor.recorded_state_size)
            self._draws.select_rows(rest)
            self._state = None if self._state is None else self._state[rest]

    def _env_error(self, lane: _EnvSlot, row: int, call: str, error: Exception) -> RolloutError:
        episode = _require_open_episode(lane)
        return RolloutError(
            f"{self._name}: {call} of {self._env_id} raised {type(error).__name__}: {error}, at "
            f"step {episode.num_steps + row - lane.first_row} of the episode reset with seed "
            f"{episode.seed}; expected an observation. Fix the environment; the same seed and "
            "policy reproduce the error."
        )


def _require_open_episode(lane: _EnvSlot) -> RolloutEpisode:
    episode = lane.buffer.open
    assert episode is not None  # an environment without one is closed
    return episode


def _first_states(actor: Actor, num: int) -> Array | None:
    """Return what is remembered of N episodes that begin, [N, S]."""
    return None if actor.first_state is None else np.repeat(actor.first_state, num, axis=0)


class StepBlock:
    """Row t of each column [R, N, ...] is step t of all N environments.

    observations and masks have a row more: row t + 1 is what step t led to, which at the last step
    of an episode is overwritten by what the next one begins with.

    actors int32: a number for who acted. log_probs float32, NaN where there is none.
    """

    def __init__(
        self,
        spaces: tuple[Space, Space],
        num: int,
        *,
        mask_size: int | None,
        state_size: int,
        name: str,
    ) -> None:
        """Make room; arrays take memory as they are written. name: whose steps, for errors."""
        space, action_space = spaces
        row_bytes = num * sum(
            value_dtype(leaf).itemsize * int(np.prod(value_shape(leaf)))
            for _, leaf in leaves(space)
        )
        self.num_rows = rows = max(1, min(_ROWS, _BYTES // max(row_bytes, 1)))
        self.num = num
        self.row = 0
        self._space = space
        self._what = f"{name}: observation"
        self.observations = _allocate(space, (rows + 1, num))
        self._plain = _scalar_types(space, self.observations)
        self.masks = None if mask_size is None else np.ones((rows + 1, num, mask_size), np.bool_)
        self.actions = np.asarray(_allocate(action_space, (rows, num)))
        self.rewards = np.empty((rows, num))
        self.log_probs = np.empty((rows, num), np.float32)
        self.actors = np.empty((rows, num), np.int32)
        self.states = np.empty((rows, num, state_size), np.float32) if state_size else None

    def put(self, row: int, column: int, observation: Any) -> None:
        """Write an observation. Raises: EpisodeInvalidError if it does not fit the space."""
        if self._plain is not None:
            kinds, dtype, shape = self._plain
            kind = type(observation)
            if kind in kinds and (
                kind is int or (observation.dtype is dtype and observation.shape == shape)
            ):
                self.observations[row, column] = observation  # type: ignore[index]
                return
        values = as_values(self._space, as_batch(observation), self._what, 1)
        _write(self.observations, (row, column), take(values, 0))

    def put_mask(self, row: int, column: int, mask: Any) -> None:
        """Write an action mask. Raises: RolloutError if there is none, or no place for it."""
        if self.masks is None or mask is None:
            raise RolloutError(
                "rollout: found an action_mask in the info of some steps, expected it in all or "
                "none."
            )
        array = np.asarray(mask)
        if array.shape != self.masks.shape[2:]:
            raise RolloutError(
                f"rollout: found an action_mask of shape {list(array.shape)}, expected "
                f"{list(self.masks.shape[2:])} as before."
            )
        self.masks[row, column] = array

    def observation(self, row: int, column: int) -> Any:
        """Return a copy of one observation."""
        return _copy_values(take(self.observations, (row, column)))

    def copy_from(self, other: StepBlock, columns: Sequence[int]) -> None:
        """Begin where another block is, with some of its environments."""
        rows = take(other.observations, other.row)
        _write(self.observations, 0, take(rows, list(columns)))
        if self.masks is not None and other.masks is not None:
            self.masks[0] = other.masks[other.row, list(columns)]

    def rewind(self) -> None:
        """Begin anew at row 0, with what the last row led to."""
        _write(self.observations, 0, take(self.observations, self.row))
        if self.masks is not None:
            self.masks[0] = self.masks[self.row]
        self.row = 0

    def copy_columns(self) -> list[dict[str, Values]]:
        """Return each environment's steps, copied: columns [rows, ...] by name."""
        columns: dict[str, Values] = {
            "observations": self.observations,
            "actions": self.actions,
            "rewards": self.rewards,
            "log_probs": self.log_probs,
            "actors": self.actors,
        }
        if self.masks is not None:
            columns["masks"] = self.masks
        if self.states is not None:
            columns["states"] = self.states
        whole = _by_environment(columns, self.row)
        return [take(whole, column) for column in range(self.num)]


def _allocate(space: Space, shape: tuple[int, ...]) -> Values:
    if isinstance(space, Dict | Tuple):
        return {key: _allocate(sub, shape) for key, sub in children(space).items()}
    return np.empty((*shape, *value_shape(space)), value_dtype(space))


def _scalar_types(
    space: Space, values: Values
) -> tuple[tuple[type, ...], Any, tuple[int, ...]] | None:
    """Return what may be written as it is: Python types, and dtype and shape of numpy's."""
    if isinstance(space, Dict | Tuple) or value_dtype(space).kind == "O":
        return None
    dtype, shape = np.asarray(values).dtype, value_shape(space)
    if shape:
        return (np.ndarray,), dtype, shape
    scalar = (np.ndarray, dtype.type)
    return (*scalar, int) if dtype == np.int64 else scalar, dtype, shape


def _write(target: Values, index: Any, values: Values) -> None:
    if isinstance(target, Mapping):
        parts: Any = values
        for key, sub in target.items():
            _write(sub, index, parts[key])
    else:
        target[index] = values


def _copy_values(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: _copy_values(sub) for key, sub in values.items()}
    return values.copy() if isinstance(values, np.ndarray) else values


def _by_environment(values: Values, num_rows: int) -> Any:
    if isinstance(values, Mapping):
        return {key: _by_environment(sub, num_rows) for key, sub in values.items()}
    swapped: Array = values[:num_rows].swapaxes(0, 1)
    return swapped.copy()
