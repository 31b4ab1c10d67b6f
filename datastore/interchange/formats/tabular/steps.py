"""Steps: the rows of a table as arrays, one per field, and slices of them as episodes' fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Array, Values, take
from replaylake.datastore.interchange.formats.tabular.arrays import Mask

# The fields of Steps that are arrays, or mappings of arrays, with a row a step.
_PER_ROW: Final = (
    "origins",
    "observations",
    "actions",
    "rewards",
    "terminated",
    "truncated",
    "next_observations",
    "has_next",
    "final_observations",
    "has_final",
    "numbers",
    "env_steps",
    "log_probs",
    "masks",
    "timestamps",
    "policies",
    "policy_versions",
)
# What an Episode calls those that some episodes may lack, and a log's column.
OPTIONAL_FIELDS: Final = {
    "env_steps": ("env_steps", "env_step"),
    "masks": ("action_masks", "action_mask"),
    "timestamps": ("timestamps", "timestamp"),
    "policy_versions": ("policy_versions", "policy_version"),
}


@dataclass(frozen=True)
class RowFault:
    """Rows that fail one check in one column; `messages` say by their origin what is there."""

    check: str
    column: str
    rows: Mask
    messages: Mapping[int, str] = field(default_factory=dict)


@dataclass
class TableSteps:
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
    absent: dict[str, Mask] = field(default_factory=dict)
    """For env_steps, masks, timestamps and policy_versions the rows without one, if others have."""
    extras: dict[str, pa.Array] = field(default_factory=dict)
    head_widths: set[int] = field(default_factory=set)
    faults: list[RowFault] = field(default_factory=list)
    damage: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rewards)

    def take(self, order: Array) -> TableSteps:
        """Return the rows of these numbers, in that order."""

        def pick(values: Any) -> Any:
            return None if values is None else take(values, order)

        # damage is by row index: rows are few, so they are looked up in the new order.
        position = {int(row): i for i, row in enumerate(order)} if self.damage else {}
        return replace(
            self,
            **{name: pick(getattr(self, name)) for name in _PER_ROW},
            extras={name: column.take(order) for name, column in self.extras.items()},
            absent={name: rows[order] for name, rows in self.absent.items()},
            faults=[replace(f, rows=f.rows[order]) for f in self.faults],
            damage={position[row]: text for row, text in self.damage.items()},
        )


class StepSlices:
    """Slices of the steps' arrays, under the names that an Episode has for them."""

    def __init__(self, steps: TableSteps) -> None:
        self._steps = steps
        columns = {
            "behavior_log_probs": steps.log_probs,
            "policies": steps.policies,
            "policy_versions": steps.policy_versions,
            "action_masks": steps.masks,
            "timestamps": steps.timestamps,
            "env_steps": steps.env_steps,
            "rewards": steps.rewards,
        }
        self._arrays = {name: array for name, array in columns.items() if array is not None}
        self._absent = {OPTIONAL_FIELDS[name][0]: rows for name, rows in steps.absent.items()}

    def slice_fields(self, start: int, end: int) -> dict[str, Any]:
        steps, rows = self._steps, slice(start, end)
        return {
            "observations": take(steps.observations, rows),
            "actions": take(steps.actions, rows),
            "final_observation": self._final(end - 1),
            "extras": {name: a.slice(start, end - start) for name, a in steps.extras.items()},
            # Of these an episode has all or none: grouping refuses one that has some.
            **{
                name: array[rows]
                for name, array in self._arrays.items()
                if name not in self._absent or not self._absent[name][start]
            },
        }

    def _final(self, row: int) -> Any:
        steps = self._steps
        for values, having in (
            (steps.final_observations, steps.has_final),
            (steps.next_observations, steps.has_next),
        ):
            if values is not None and having is not None and having[row]:
                return take(values, row)
        return None
