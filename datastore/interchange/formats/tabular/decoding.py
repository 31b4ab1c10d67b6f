"""Decoding: rows of a table to steps; those that fail a check are marked, never changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Array, Values
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.tabular import arrays
from replaylake.datastore.interchange.formats.tabular.action_units import ActionUnits
from replaylake.datastore.interchange.formats.tabular.arrays import DecodedColumn, Mask
from replaylake.datastore.interchange.formats.tabular.encoder import Encoder
from replaylake.datastore.interchange.formats.tabular.fields import (
    EPISODE,
    HEAD_COLUMNS,
    ColumnLayout,
)
from replaylake.datastore.interchange.formats.tabular.steps import RowFault, TableSteps
from replaylake.datastore.interchange.formats.tabular.tables import DAMAGE, MISFITS, ORIGIN, Survey
from replaylake.datastore.storage.arrow_values import is_list

# Base64 of an LZ4 frame's magic number: how RLlib packs pickled arrays into JSON.
_PACKED = "BCJNGG"
_PLAIN = Encoder()
_AS_LOGGED = ActionUnits()


def decode_steps(
    table: pa.Table,
    layout: ColumnLayout,
    survey: Survey,
    encoder: Encoder = _PLAIN,
    units: ActionUnits = _AS_LOGGED,
    reward_scale: float | None = None,
) -> TableSteps:
    """Decode rows; those that fail a check are marked in `faults`, never dropped or changed.

    `encoder` makes numbers of text columns; `units` are those that actions are brought to,
    and `reward_scale` is what rewards are multiplied by.

    Raises: SourceInvalidError for a column whose type cannot be its field's at all.
    """
    return _Decoder(table, layout, survey, encoder, units, reward_scale).steps()


class _Decoder:
    def __init__(
        self,
        table: pa.Table,
        layout: ColumnLayout,
        survey: Survey,
        encoder: Encoder,
        units: ActionUnits,
        reward_scale: float | None,
    ) -> None:
        self._encoder = encoder
        self._reward_scale = reward_scale
        self._units = units
        self._table = table
        self._layout = layout
        self._shapes = survey.shapes
        self._faults: list[RowFault] = []
        self._absent: dict[str, Mask] = {}

    def steps(self) -> TableSteps:
        observations = self._vector("observation")
        actions = self._actions()
        terminated, truncated = self._ends()
        next_observations, has_next = self._sparse("next_observation")
        final_observations, has_final = self._sparse("final_observation")
        steps = TableSteps(
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
            numbers=self._decode_integers("step"),
            env_steps=self._decode_integers("env_step"),
            log_probs=self._log_probs(actions),
            masks=self._masks(),
            timestamps=self._timestamps(),
            policies=self._policies(),
            policy_versions=self._decode_integers("policy_version"),
            absent=self._absent,
            extras=self._extras(),
            head_widths=self._head_widths(),
            damage=self._damage(),
        )
        self._mark_unnamed()
        misfits = self._misfits()
        steps.faults = [*misfits, *_without(self._faults, misfits)]
        name = self._layout.one("step")
        if unread := [fault.rows for fault in steps.faults if fault.column == name]:
            steps.unnumbered = np.logical_or.reduce(unread)
        return steps

    def _misfits(self) -> list[RowFault]:
        """Return the cells of another type than their column, which are null in it."""
        column = self._column(MISFITS)
        if column.null_count == len(column):
            return []
        origins = self._column(ORIGIN).to_pylist()
        by_name: dict[str, dict[int, str]] = {}
        rows: dict[str, Mask] = {}
        for row, text in enumerate(column.to_pylist()):
            for name, (_, message) in json.loads(text or "{}").items():
                by_name.setdefault(name, {})[origins[row]] = message
                rows.setdefault(name, np.zeros(len(column), dtype=np.bool_))[row] = True
        return [RowFault("dtype", name, rows[name], cause) for name, cause in by_name.items()]

    def _mark_unnamed(self) -> None:
        names = [self._layout.one("episode_id"), self._layout.one("agent_id")]
        for name in (*names, *self._layout.order_by):
            if name is not None and self._table.column(name).null_count:
                unnamed = np.asarray(self._table.column(name).is_null())
                shown = ",".join(self._layout.episode_by) if name == EPISODE else name
                self._faults.append(RowFault("missing", shown, unnamed))

    def _column(self, theirs: str) -> pa.Array:
        column = self._table.column(theirs)
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()

    def _mark(self, decoded: DecodedColumn, column: str, *, but: str | None = None) -> Any:
        for check, rows in decoded.faults.items():
            if check != but:
                self._faults.append(RowFault(check, column, rows))
        return decoded.values

    def _parts(self, ours: str) -> tuple[Any, list[RowFault]] | None:
        """Decode the columns of a field to one value a row, and mark what fails in each."""
        theirs = self._layout.fields.get(ours)
        if not theirs:
            return None
        columns = [self._column(name) for name in theirs]
        if ours in self._encoder.encodes:
            values, found = self._encoder.vectors(columns)
        else:
            parts = [
                arrays.decode(column, self._shapes.get(name))
                for column, name in zip(columns, theirs, strict=True)
            ]
            for part, name in zip(parts, theirs, strict=True):
                _refuse_packed(part.values, name)
            values = arrays.stack(parts, list(theirs), ours).values
            found = [dict(part.faults) for part in parts]
        faults = [
            RowFault(check, name, rows)
            for name, wrong in zip(theirs, found, strict=True)
            for check, rows in wrong.items()
        ]
        return values, faults

    def _vector(self, ours: str) -> Values:
        nothing: tuple[Any, list[RowFault]] = (None, [])
        values, faults = self._parts(ours) or nothing
        self._faults += faults
        known: Values = values
        return known

    def _sparse(self, ours: str) -> tuple[Values | None, Mask | None]:
        """Decode a field that rows may lack."""
        if (parts := self._parts(ours)) is None:
            return None, None
        values, faults = parts
        self._faults += [fault for fault in faults if fault.check != "missing"]
        missing = np.zeros(self._table.num_rows, dtype=np.bool_)
        for fault in faults:
            missing |= fault.rows if fault.check == "missing" else False
        return arrays.as_vectors(values), ~missing

    def _actions(self) -> Values:
        column = self._layout.fields["action"][0]
        is_text = arrays.is_text(self._table.schema.field(column).type)
        if is_text and self._encoder.names_actions:
            codes, faults = self._encoder.actions(self._column(column))
            self._faults += [RowFault(check, column, rows) for check, rows in faults.items()]
            return codes
        actions = self._vector("action")
        if not self._units.changes:
            return actions
        actions, outside = self._units.convert(actions, ",".join(self._layout.fields["action"]))
        if outside.any():
            self._faults.append(RowFault("action_range", column, outside))
        return actions

    def _rewards(self) -> Array:
        num = self._table.num_rows
        if (column := self._layout.one("reward")) is None:
            return np.full(num, np.nan)
        is_optional = self._layout.rewards_optional
        if is_optional and self._column(column).null_count == num:
            return np.full(num, np.nan)  # whatever type a column of nulls was given
        decoded = arrays.decode(self._column(column))
        values = self._mark(decoded, column, but="missing" if is_optional else None)
        if isinstance(values, Mapping) or values.ndim != 1 or values.dtype.kind not in "fiub":
            raise SourceInvalidError(
                f"column {column!r}: found {self._table.column(column).type}"
                f"{_example(values)}, expected one number per step as the reward. Map another "
                "column."
            )
        rewards = np.asarray(values, dtype=np.float64)
        if self._reward_scale is not None:
            rewards = rewards * self._reward_scale
        missing = decoded.faults.get("missing") if is_optional else None
        return rewards if missing is None else np.where(missing, np.nan, rewards)

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

    def _decode_integers(self, ours: str) -> Array | None:
        if (name := self._layout.one(ours)) is None:
            return None
        column = self._column(name)
        if ours == "step":
            return np.asarray(self._mark(arrays.whole_numbers(column), name))
        if self._is_lacking(column, f"{ours}s"):
            return None
        return np.asarray(self._mark(arrays.whole_numbers(column), name, but="missing"))

    def _is_lacking(self, column: pa.Array, field: str) -> bool:
        """Note which rows lack a field that some episodes may lack; whether all do."""
        if column.null_count and column.null_count < len(column):
            self._absent[field] = np.asarray(column.is_null())
        return bool(column.null_count == len(column))

    def _log_probs(self, actions: Values) -> Array | None:
        ours = "behavior_log_prob"
        name = self._layout.one(ours) or self._layout.one(ours := "behavior_prob")
        if name is None:
            return None
        values = arrays.decode(self._column(name)).values
        missing = np.asarray(self._column(name).is_null())
        if isinstance(values, Mapping) or values.ndim != 1 or values.dtype.kind not in "fiu":
            raise SourceInvalidError(
                f"column {name!r}: found {self._table.column(name).type}, expected one number "
                f"per step as the {ours}. Map another column."
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
            self._faults.append(RowFault("propensity", name, outside))
        if self._units.changes and not isinstance(actions, Mapping):
            values = values + self._units.log_density_shift(actions)
        return None if np.isnan(values).all() else values.astype(np.float32)

    def _masks(self) -> Array | None:
        if (parts := self._parts("action_mask")) is None:
            return None
        masks, faults = parts
        theirs = self._layout.fields["action_mask"]
        if len(theirs) == 1:
            if self._is_lacking(self._column(theirs[0]), "masks"):
                return None
            absent = self._absent.get("masks", np.zeros(self._table.num_rows, dtype=np.bool_))
            faults = [RowFault(f.check, f.column, f.rows & ~absent) for f in faults]
        self._faults += [fault for fault in faults if fault.rows.any()]
        if isinstance(masks, Mapping) or masks.ndim != 2 or masks.dtype.kind not in "fiub":
            columns = ",".join(self._layout.fields["action_mask"])
            raise SourceInvalidError(
                f"column {columns!r}: expected a list of flags per step as the action_mask. "
                "Map another column."
            )
        return np.asarray(masks, dtype=bool)

    def _timestamps(self) -> Array | None:
        name = self._layout.one("timestamp")
        if name is None or self._is_lacking(column := self._column(name), "timestamps"):
            return None
        return arrays.microseconds(column, name)

    def _policies(self) -> NDArray[np.object_] | None:
        if (name := self._layout.one("policy")) is None:
            return None
        names: NDArray[np.object_] = arrays.decode_names(self._column(name), name).to_numpy(False)
        return names

    def _extras(self) -> dict[str, pa.Array]:
        extras = {
            ours: arrays.to_storable(self._column(theirs), theirs)
            for theirs, ours in self._layout.extras.items()
        }
        return {name: column for name, column in extras.items() if column is not None}

    def _head_widths(self) -> set[int]:
        widths: set[int] = set()
        for name in HEAD_COLUMNS:
            if name in self._layout.extras and is_list(self._table.column(name).type):
                widths |= set(pc.unique(pc.list_value_length(self._column(name))).to_pylist())
        return widths

    def _damage(self) -> dict[int, str]:
        column = self._column(DAMAGE)
        if column.null_count == len(column):
            return {}
        return {i: text for i, text in enumerate(column.to_pylist()) if text is not None}


def _without(faults: list[RowFault], misfits: list[RowFault]) -> list[RowFault]:
    """Return the faults, without those cells said to be missing that hold something else."""
    known = {fault.column: fault.rows for fault in misfits}
    rest = [
        replace(fault, rows=fault.rows & ~known[fault.column])
        if fault.check == "missing" and fault.column in known
        else fault
        for fault in faults
    ]
    return [fault for fault in rest if fault.rows.any()]


def _refuse_packed(values: Any, column: str) -> None:
    if isinstance(values, Mapping) or values.dtype != object or not len(values):
        return
    if isinstance(values[0], str) and values[0].startswith(_PACKED):
        raise SourceInvalidError(
            f"column {column!r}: found packed arrays (base64 of LZ4 of a pickle), expected lists "
            "of numbers. RLlib writes them: read the log with `format` rllib."
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
