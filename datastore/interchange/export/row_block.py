"""Blocks: some rows of a snapshot, decoded once, of which episodes are slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec, to_numpy
from replaylake.datastore.episodes.spaces import Array, Space, Values, take
from replaylake.datastore.storage.arrow_values import combine_chunks, numbers

# Hidden columns: the row's number in the snapshot, and whether it is to be written. The NUL keeps
# them apart from any name that a dataset could have.
ROW: Final = "\0row"
SELECTED: Final = "\0selected"
# Of these an episode has all values or none, so that a piece ends where they begin or cease.
_ALL_OR_NONE: Final = (schema.POLICY_VERSION, schema.ACTION_MASK, schema.TIMESTAMP)

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class SparseColumn:
    """A column that rows may lack: `values` are those of the rows where `known`, in order."""

    known: Mask
    values: Any
    before: Array
    """How many known ones stand before each row, int64 [N]."""

    def value_at(self, row: int) -> Any:
        """Return a row's value, or None."""
        return take(self.values, int(self.before[row])) if self.known[row] else None

    def slice_values(self, start: int, end: int) -> Any:
        """Return the values of rows which all have one; None where the first has none."""
        if not self.known[start]:
            return None
        first = int(self.before[start])
        return take(self.values, slice(first, first + end - start))


class RowBlock:
    """Rows of one batch, those of an episode and agent side by side in the order of their steps."""

    def __init__(self, table: pa.Table, spec: DatasetSpec) -> None:
        self._table: pa.Table | None = table
        self._load: Callable[[], pa.Table] | None = None
        self._spec = spec

    @property
    def table(self) -> pa.Table:
        """The rows; read again, and kept, where they were put away."""
        if self._table is None:
            self._table = self._load() if self._load is not None else None
        return self._table

    def rows(self, start: int, end: int) -> pa.Table:
        """Return some rows, without keeping the others where they were put away."""
        if self._table is not None or self._load is None:
            return self.table.slice(start, end - start)
        return self._load().take(pa.array(np.arange(start, end)))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def spill(self, load: Callable[[], pa.Table]) -> None:
        """Let the rows go, and what was decoded of them; `load` reads them again."""
        for name in set(vars(self)) - {"_spec"}:
            delattr(self, name)
        self._table, self._load = None, load

    def episode(self, episode_id: str, agent_id: str, start: int, end: int) -> Episode:
        """Return consecutive steps as an episode, or a piece of one."""
        last = end - 1
        source = self._sources
        return Episode(
            episode_id=episode_id,
            agent_id=agent_id,
            observations=take(self._observations, slice(start, end)),
            actions=take(self._actions, slice(start, end)),
            rewards=self._rewards[start:end],
            terminated=bool(self._terminated[last]),
            truncated=bool(self._truncated[last]),
            final_observation=self._final_observation(last),
            first_step=int(self.steps[start]),
            behavior_log_probs=_unless_none(self._log_probs[start:end]),
            policies=_names(self._policies, start, end),
            policy_versions=self._sparse(schema.POLICY_VERSION).slice_values(start, end),
            action_masks=self._masks(start, end),
            timestamps=self._sparse(schema.TIMESTAMP).slice_values(start, end),
            env_steps=self._env_steps[start:end],
            source_episode_id=None if source is None else source[start],
            extras=self._extras(start, end),
        )

    @cached_property
    def steps(self) -> Array:
        """The step numbers, int32 [N]."""
        return numbers(self._column(schema.STEP))

    @cached_property
    def selected(self) -> Mask:
        """Which rows are to be written."""
        selected: Mask = numbers(self._column(SELECTED))
        return selected

    @cached_property
    def ended(self) -> Mask:
        """Which rows end an episode."""
        ended: Mask = self._terminated | self._truncated
        return ended

    @cached_property
    def breaks(self) -> Mask:
        """Rows that do not go on where the one before stopped, within one episode."""
        breaks = np.zeros(len(self), bool)
        breaks[1:] = (np.diff(self.steps) != 1) | self.ended[:-1]
        breaks[1:] |= np.diff(self.selected.view(np.int8)) != 0
        for name in _ALL_OR_NONE:
            if name in self.table.schema.names:
                breaks[1:] |= np.diff(self._sparse(name).known.view(np.int8)) != 0
        return breaks

    def _final_observation(self, row: int) -> Any:
        final = self._sparse(schema.FINAL_OBSERVATION).value_at(row)
        if final is not None or self.ended[row] or row + 1 == len(self):
            return final
        # Cut short by the selection: what was seen next is the following row's.
        follows = self._groups[row + 1] == self._groups[row]
        if follows and self.steps[row + 1] == self.steps[row] + 1:
            return take(self._observations, row + 1)
        return None

    def _column(self, name: str) -> pa.Array:
        return combine_chunks(self.table.column(name))

    @cached_property
    def _groups(self) -> Array:
        """A number for each episode and agent, [N]: these rows stand side by side."""
        starts = np.zeros(len(self), bool)
        for name in (schema.EPISODE_ID, schema.AGENT_ID):
            codes = self._column(name).indices.to_numpy(zero_copy_only=False)
            starts[1:] |= np.diff(codes) != 0
        return np.cumsum(starts)

    @cached_property
    def _observations(self) -> Values:
        return to_numpy(self._spec.observation_space, self._column(schema.OBSERVATION))

    @cached_property
    def _actions(self) -> Values:
        return to_numpy(self._spec.action_space, self._column(schema.ACTION))

    @cached_property
    def _rewards(self) -> Array:
        return numbers(self._column(schema.REWARD))

    @cached_property
    def _terminated(self) -> Array:
        return numbers(self._column(schema.TERMINATED))

    @cached_property
    def _truncated(self) -> Array:
        return numbers(self._column(schema.TRUNCATED))

    @cached_property
    def _env_steps(self) -> Array:
        return numbers(self._column(schema.ENV_STEP))

    @cached_property
    def _log_probs(self) -> Array:
        return numbers(self._column(schema.BEHAVIOR_LOG_PROB))

    @cached_property
    def _policies(self) -> NDArray[np.object_] | None:
        return _texts(self._column(schema.POLICY))

    @cached_property
    def _sources(self) -> NDArray[np.object_] | None:
        return _texts(self._column(schema.SOURCE_EPISODE_ID))

    def _masks(self, start: int, end: int) -> Any:
        if self._spec.mask_size is None:
            return None
        return self._sparse(schema.ACTION_MASK).slice_values(start, end)

    def _sparse(self, name: str) -> SparseColumn:
        if name not in self._decoded_columns:
            self._decoded_columns[name] = self._decode_sparse(name)
        return self._decoded_columns[name]

    @cached_property
    def _decoded_columns(self) -> dict[str, SparseColumn]:
        return {}

    def _decode_sparse(self, name: str) -> SparseColumn:
        column = self._column(name)
        known = np.asarray(numbers(column.is_valid()), bool)
        there = column.filter(column.is_valid()) if column.null_count else column
        if name == schema.FINAL_OBSERVATION:
            space: Space = self._spec.observation_space
            values: Any = to_numpy(space, there)
        elif name == schema.ACTION_MASK:
            values = numbers(there.flatten()).reshape(len(there), -1)
        else:
            values = numbers(there.cast(pa.int64()))
        return SparseColumn(known, values, np.cumsum(known) - known)

    @cached_property
    def _extra_columns(self) -> dict[str, pa.Array]:
        return {name: self._column(name) for name in self._spec.extras}

    def _extras(self, start: int, end: int) -> dict[str, pa.Array]:
        parts = {
            name: column.slice(start, end - start) for name, column in self._extra_columns.items()
        }
        return {name: part for name, part in parts.items() if part.null_count < len(part)}


def _texts(column: pa.Array) -> NDArray[np.object_] | None:
    """Return a dictionary column as objects, None where there is no value at all."""
    if column.null_count == len(column):
        return None
    texts = np.asarray([*column.dictionary.to_pylist(), None], object)
    indices = pc.fill_null(column.indices, len(texts) - 1).to_numpy(zero_copy_only=False)
    result: NDArray[np.object_] = texts[indices]
    return result


def _names(names: NDArray[np.object_] | None, start: int, end: int) -> NDArray[np.object_] | None:
    if names is None:
        return None
    own = names[start:end]
    return own if any(name is not None for name in own) else None


def _unless_none(values: Array) -> Array | None:
    return None if np.isnan(values).all() else values
