"""StepBlock: steps of environments side by side, written row by row into arrays made before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.spaces import (
    Array,
    Dict,
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
from replaylake.datastore.errors import RolloutFailed

# Rows of a block: at most so many, and so many bytes of observations, one row at least.
_ROWS: Final = 4096
_BYTES: Final = 32 << 20


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
        self.observations = _room(space, (rows + 1, num))
        self._plain = _plain(space, self.observations)
        self.masks = None if mask_size is None else np.ones((rows + 1, num, mask_size), np.bool_)
        self.actions = np.asarray(_room(action_space, (rows, num)))
        self.rewards = np.empty((rows, num))
        self.log_probs = np.empty((rows, num), np.float32)
        self.actors = np.empty((rows, num), np.int32)
        self.states = np.empty((rows, num, state_size), np.float32) if state_size else None

    def put(self, row: int, column: int, observation: Any) -> None:
        """Write an observation. Raises: EpisodeInvalid if it does not fit the space."""
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
        """Write an action mask. Raises: RolloutFailed if there is none, or no place for it."""
        if self.masks is None or mask is None:
            raise RolloutFailed(
                "rollout: found an action_mask in the info of some steps, expected it in all or "
                "none."
            )
        found = np.asarray(mask)
        if found.shape != self.masks.shape[2:]:
            raise RolloutFailed(
                f"rollout: found an action_mask of shape {list(found.shape)}, expected "
                f"{list(self.masks.shape[2:])} as before."
            )
        self.masks[row, column] = found

    def observation(self, row: int, column: int) -> Any:
        """Return a copy of one observation."""
        return _copied(take(self.observations, (row, column)))

    def begin_from(self, other: StepBlock, columns: Sequence[int]) -> None:
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

    def sealed(self) -> list[dict[str, Values]]:
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


def _room(space: Space, shape: tuple[int, ...]) -> Values:
    if isinstance(space, Dict | Tuple):
        return {key: _room(sub, shape) for key, sub in children(space).items()}
    return np.empty((*shape, *value_shape(space)), value_dtype(space))


def _plain(space: Space, values: Values) -> tuple[tuple[type, ...], Any, tuple[int, ...]] | None:
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


def _copied(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: _copied(sub) for key, sub in values.items()}
    return values.copy() if isinstance(values, np.ndarray) else values


def _by_environment(values: Values, num_rows: int) -> Any:
    if isinstance(values, Mapping):
        return {key: _by_environment(sub, num_rows) for key, sub in values.items()}
    swapped: Array = values[:num_rows].swapaxes(0, 1)
    return swapped.copy()
