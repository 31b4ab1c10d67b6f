"""Steps: the rows of a table as arrays, one per field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaylake.datastore.episodes.episode import Episode
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
    "unnumbered",
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
    """The step column, int64 [n]; undefined where `unnumbered`."""
    unnumbered: Mask | None = None
    """Whether the step of a row could not be read; None: no row's."""
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

        # Damaged rows are few, so they are looked up in the new order; it may leave them out.
        position = {int(row): i for i, row in enumerate(order)} if self.damage else {}
        damage = {position[row]: text for row, text in self.damage.items() if row in position}
        return replace(
            self,
            **{name: pick(getattr(self, name)) for name in _PER_ROW},
            extras={name: column.take(order) for name, column in self.extras.items()},
            absent={name: rows[order] for name, rows in self.absent.items()},
            faults=[replace(f, rows=f.rows[order]) for f in self.faults],
            damage=damage,
        )


def join_episode_rows(steps: TableSteps, lengths: Array) -> tuple[Episode, dict[str, Mask]]:
    """Return rows that are episodes of these lengths, one after another, as those of one episode.

    And, by their name, the fields that only some of the episodes have, with those that lack them.
    """
    firsts = np.cumsum(lengths) - lengths
    # Of these an episode has all or none: grouping refuses one that has some.
    absent = {OPTIONAL_FIELDS[name][0]: rows[firsts] for name, rows in steps.absent.items()}
    masks = steps.masks
    if masks is not None and "masks" in steps.absent:
        masks = masks | steps.absent["masks"][:, None]
    columns = Episode(
        episode_id="",
        observations=steps.observations,
        actions=steps.actions,
        rewards=steps.rewards,
        behavior_log_probs=steps.log_probs,
        policies=steps.policies,
        policy_versions=steps.policy_versions,
        action_masks=masks,
        timestamps=steps.timestamps,
        env_steps=steps.env_steps,
        extras=steps.extras,
    )
    return columns, {name: which for name, which in absent.items() if which.any()}
