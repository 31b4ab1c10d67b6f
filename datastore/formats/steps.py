"""Steps: the rows of a table decoded to arrays, one per field, before they are grouped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.formats import arrays
from replaylake.datastore.formats.arrays import Decoded, Mask
from replaylake.datastore.formats.fields import HEAD_COLUMNS, Layout
from replaylake.datastore.formats.tables import DAMAGE, ORIGIN, Survey
from replaylake.datastore.spaces import Array, Values

# Base64 of an LZ4 frame's magic number: how RLlib packs pickled arrays into JSON.
_PACKED = "BCJNGG"


@dataclass(frozen=True)
class Fault:
    """Rows that fail one check in one column."""

    check: str
    column: str
    rows: Mask


@dataclass
class Steps:
    """n rows, in the source's order.

    `origins` int64 [n] number the source's rows; `terminated` is True where the log says so or, for
    a log with one flag, where that is set and `truncated` is not. `next_observations` hold anything
    where `has_next` is False.
    """

    origins: Array
    observations: Values
    actions: Values
    rewards: Array
    terminated: Mask
    truncated: Mask
    next_observations: Values | None = None
    has_next: Mask | None = None
    final_observations: Values | None = None
    has_final: Mask | None = None
    numbers: Array | None = None
    """The step column, int64 [n]."""
    env_steps: Array | None = None
    log_probs: Array | None = None
    masks: Array | None = None
    timestamps: Array | None = None
    policies: NDArray[np.object_] | None = None
    policy_versions: Array | None = None
    extras: dict[str, pa.Array] = field(default_factory=dict)
    head_widths: set[int] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    damage: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rewards)


def decode_steps(table: pa.Table, layout: Layout, seen: Survey) -> Steps:
    """Decode rows; those that fail a check are marked in `faults`, never dropped or changed.

    Raises: SourceInvalid for a column whose type cannot be its field's at all.
    """
    return _Decoder(table, layout, seen).steps()


class _Decoder:
    def __init__(self, table: pa.Table, layout: Layout, seen: Survey) -> None:
        self._table = table
        self._layout = layout
        self._shapes = seen.shapes
        self._faults: list[Fault] = []

    def steps(self) -> Steps:
        observations = self._vector("observation")
        actions = self._vector("action")
        terminated, truncated = self._ends()
        next_observations, has_next = self._sparse("next_observation")
        final_observations, has_final = self._sparse("final_observation")
        steps = Steps(
            origins=np.asarray(self._column(ORIGIN)),
            observations=arrays.as_vectors(observations),
            actions=arrays.as_vectors(actions),
            rewards=self._rewards(),
            terminated=terminated,
            truncated=truncated,
            next_observations=next_observations,
            has_next=has_next,
            final_observations=final_observations,
            has_final=has_final,
            numbers=self._whole("step"),
            env_steps=self._whole("env_step"),
            log_probs=self._log_probs(actions),
            masks=self._masks(),
            timestamps=self._timestamps(),
            policies=self._policies(),
            policy_versions=self._whole("policy_version"),
            extras=self._extras(),
            head_widths=self._head_widths(),
            damage=self._damage(),
        )
        self._mark_unnamed()
        steps.faults = self._faults
        return steps

    def _mark_unnamed(self) -> None:
        for name in (self._layout.one("episode_id"), self._layout.one("agent_id")):
            if name is not None and self._table.column(name).null_count:
                unnamed = np.asarray(self._table.column(name).is_null())
                self._faults.append(Fault("missing", name, unnamed))

    def _column(self, theirs: str) -> pa.Array:
        column = self._table.column(theirs)
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()

    def _mark(self, decoded: Decoded, column: str, *, but: str | None = None) -> Any:
        for check, rows in decoded.faults.items():
            if check != but:
                self._faults.append(Fault(check, column, rows))
        return decoded.values

    def _parts(self, ours: str) -> tuple[Decoded, str] | None:
        theirs = self._layout.fields.get(ours)
        if not theirs:
            return None
        parts = [arrays.decode(self._column(name), self._shapes.get(name)) for name in theirs]
        for part, name in zip(parts, theirs, strict=True):
            _refuse_packed(part.values, name)
        return arrays.stack(parts, list(theirs), ours), ",".join(theirs)

    def _vector(self, ours: str) -> Values:
        decoded, column = self._parts(ours) or (Decoded(None, {}), "")
        values: Values = self._mark(decoded, column)
        return values

    def _sparse(self, ours: str) -> tuple[Values | None, Mask | None]:
        """Decode a field that rows may lack."""
        if (found := self._parts(ours)) is None:
            return None, None
        decoded, column = found
        self._mark(decoded, column, but="missing")
        missing = decoded.faults.get("missing", np.zeros(self._table.num_rows, bool))
        return arrays.as_vectors(decoded.values), ~missing

    def _rewards(self) -> Array:
        column = self._layout.fields["reward"][0]
        values = self._mark(arrays.decode(self._column(column)), column)
        if isinstance(values, Mapping) or values.ndim != 1 or values.dtype.kind not in "fiub":
            raise SourceInvalid(
                f"column {column!r}: found {self._table.column(column).type}"
                f"{_example(values)}, expected one number a step as the reward. Map another column."
            )
        return np.asarray(values, dtype=np.float64)

    def _ends(self) -> tuple[Mask, Mask]:
        terminated, truncated, done = (
            np.zeros(self._table.num_rows, bool)
            if name is None
            else self._mark(arrays.flags(self._column(name)), name)
            for name in (
                self._layout.one("terminated"),
                self._layout.one("truncated"),
                self._layout.done,
            )
        )
        return terminated | (done & ~truncated), truncated

    def _whole(self, ours: str) -> Array | None:
        if (name := self._layout.one(ours)) is None:
            return None
        column = self._column(name)
        if ours != "step" and column.null_count == len(column):
            return None
        return np.asarray(self._mark(arrays.whole_numbers(column), name))

    def _log_probs(self, actions: Values) -> Array | None:
        ours = "behavior_log_prob"
        name = self._layout.one(ours) or self._layout.one(ours := "behavior_prob")
        if name is None:
            return None
        values = arrays.decode(self._column(name)).values
        missing = np.asarray(self._column(name).is_null())
        if isinstance(values, Mapping) or values.ndim != 1 or values.dtype.kind not in "fiu":
            raise SourceInvalid(
                f"column {name!r}: found {self._table.column(name).type}, expected one number a "
                f"step as the {ours}. Map another column."
            )
        values = np.where(missing, np.nan, values.astype(np.float64))
        # A density may exceed 1, the probability of one of several actions may not.
        is_discrete = not isinstance(actions, Mapping) and actions.dtype.kind in "iub"
        with np.errstate(invalid="ignore", divide="ignore"):
            if ours == "behavior_prob":
                outside = (values <= 0) | np.isinf(values) | ((values > 1) & is_discrete)
                values = np.log(np.where(outside, 1.0, values))
            else:
                # 1e-3 is room for float32 rounding of the logged policy's softmax.
                outside = np.isinf(values) | ((values > 1e-3) & is_discrete)
                values = np.where((values > 0) & is_discrete & ~outside, 0.0, values)
        if outside.any():
            self._faults.append(Fault("propensity", name, outside))
        return None if np.isnan(values).all() else values.astype(np.float32)

    def _masks(self) -> Array | None:
        if (found := self._parts("action_mask")) is None:
            return None
        masks = self._mark(*found)
        if isinstance(masks, Mapping) or masks.ndim != 2 or masks.dtype.kind not in "fiub":
            raise SourceInvalid(
                f"column {found[1]!r}: expected a list of flags a step as the action_mask. "
                "Map another column."
            )
        return np.asarray(masks, dtype=bool)

    def _timestamps(self) -> Array | None:
        name = self._layout.one("timestamp")
        return None if name is None else arrays.microseconds(self._column(name), name)

    def _policies(self) -> NDArray[np.object_] | None:
        if (name := self._layout.one("policy")) is None:
            return None
        names: NDArray[np.object_] = arrays.names_of(self._column(name), name).to_numpy(False)
        return names

    def _extras(self) -> dict[str, pa.Array]:
        found = {
            ours: arrays.stored(self._column(theirs), theirs)
            for theirs, ours in self._layout.extras.items()
        }
        return {name: column for name, column in found.items() if column is not None}

    def _head_widths(self) -> set[int]:
        widths: set[int] = set()
        for name in HEAD_COLUMNS:
            if name in self._layout.extras and pa.types.is_list(self._table.column(name).type):
                widths |= set(pc.unique(pc.list_value_length(self._column(name))).to_pylist())
        return widths

    def _damage(self) -> dict[int, str]:
        column = self._column(DAMAGE)
        if column.null_count == len(column):
            return {}
        return {i: text for i, text in enumerate(column.to_pylist()) if text is not None}


def _refuse_packed(values: Any, column: str) -> None:
    if isinstance(values, Mapping) or values.dtype != object or not len(values):
        return
    if isinstance(values[0], str) and values[0].startswith(_PACKED):
        raise SourceInvalid(
            f"column {column!r}: found packed arrays (base64 of LZ4 of a pickle), expected lists "
            "of numbers. They are not read yet: write the log with packed columns off "
            '("output_compress_columns": []).'
        )


def _example(values: Any) -> str:
    """Show the first cell that is not a number: what kept a text column from being one."""
    if isinstance(values, Mapping) or values.dtype != object:
        return ""
    for row, value in enumerate(values):
        try:
            float(value)
        except (TypeError, ValueError):
            return f" ({value!r} in row {row})"
    return ""
