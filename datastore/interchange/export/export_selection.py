"""Selection: which episodes and steps of a snapshot are exported, and under which names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.conditions import episodes_where
from replaylake.datastore.query.expressions import (
    canonical_condition,
    canonical_expression,
    select_episode_keys,
    select_steps,
)


@dataclass(frozen=True)
class ExportSelection:
    """Episodes and steps of one version; None stands for all of them.

    episodes: `ID NUL AGENT`, sorted. steps: bool, by row of the snapshot. shared_ids: source ids
    that several of the episodes have, which therefore name none of them.
    """

    where: str | None
    where_steps: str | None
    episodes: pa.Array | None
    steps: NDArray[np.bool_] | None
    shared_ids: frozenset[str]

    def find_episodes(self, labels: list[tuple[str, str]]) -> NDArray[np.bool_] | None:
        """Return which of some (episode, agent) are selected; None where all are."""
        if self.episodes is None:
            return None
        keys = pa.array(["\0".join(label) for label in labels], pa.string())
        mask: Any = pc.is_in(keys, value_set=self.episodes)
        return np.asarray(mask.to_numpy(zero_copy_only=False), bool)

    def find_steps(self, rows: Array) -> NDArray[np.bool_]:
        """Return which rows of the snapshot are selected."""
        return np.ones(len(rows), bool) if self.steps is None else self.steps[rows]

    def export_name(self, episode_id: str, source_episode_id: str | None) -> str:
        """Return the source's own id where it names one episode, else the store's."""
        if not source_episode_id or source_episode_id in self.shared_ids:
            return episode_id
        return source_episode_id


def select_for_export(
    snapshot: Snapshot, where: str | None, where_steps: str | None
) -> ExportSelection:
    """Find what two SQL conditions select, over `episodes` and over `steps`.

    Memory: the ids of the selected episodes, and a byte a row with `where_steps`. Raises:
    QueryRefusedError where a condition cannot be reproduced, QueryError.
    """
    by_episode = None if where is None else canonical_condition(where)
    by_step = None if where_steps is None else canonical_expression(where_steps)
    episodes = None
    if by_episode is not None:
        keys = select_episode_keys(snapshot.table, by_episode)
        ids, agents = (keys[name].cast(pa.string()) for name in ("episode_id", "agent_id"))
        episodes = pc.binary_join_element_wise(ids, agents, "\0").combine_chunks()
    steps = None if by_step is None else select_steps(snapshot.table, by_step)
    return ExportSelection(
        by_episode, by_step, episodes, steps, _find_shared_ids(snapshot, by_episode)
    )


def _find_shared_ids(snapshot: Snapshot, where: str | None) -> frozenset[str]:
    source = schema.SOURCE_EPISODE_ID
    selected = episodes_where(where or "true", snapshot.table.schema.names)
    rows = snapshot.sql(
        f"SELECT {source} FROM ({selected}) WHERE {source} IS NOT NULL "
        f"GROUP BY {source} HAVING count(DISTINCT {schema.EPISODE_ID}) > 1"
    )
    return frozenset(rows[source].to_pylist())
