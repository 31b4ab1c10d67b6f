"""Snapshot: one version of a dataset, read as SQL rows, Arrow or training batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from replaylake.datastore.log.state import FileEntry
from replaylake.datastore.query import query
from replaylake.datastore.replay.packing import OnProgress
from replaylake.datastore.replay.view import ReplayView, open_view
from replaylake.datastore.schema import DatasetSpec
from replaylake.datastore.spaces import describe
from replaylake.datastore.table import TableSnapshot


@dataclass(frozen=True)
class Snapshot:
    """Exactly the files of one version. Later appends do not change what it reads."""

    dataset: str
    spec: DatasetSpec
    table: TableSnapshot

    @property
    def version(self) -> int:
        """The version that is pinned."""
        return self.table.version

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The shards."""
        return self.table.files

    @property
    def num_steps(self) -> int:
        """Rows in all shards."""
        return self.table.num_rows

    def replay(
        self,
        where: str | None = None,
        *,
        reward: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> ReplayView:
        """Decode episodes for sampling.

        Args:
            where: SQL condition over the columns of `episodes`; selects whole episodes.
            reward: SQL expression over the columns of `steps`, in place of the logged reward.
            on_progress: called with (shards decoded, shards) after each.

        Raises: QueryRefused, QueryFailed, ShardCorrupt, EmptyReplay, SpaceUnsupported.
        """
        return open_view(
            self.dataset, self.table, self.spec, where=where, reward=reward, on_progress=on_progress
        )

    def sql(self, text: str, parameters: dict[str, object] | None = None) -> pa.Table:
        """Run one SELECT over this version's `steps`, `episodes` and `transitions`.

        Raises: QueryRefused, QueryFailed.
        """
        with query.connect() as connection:
            query.check_select(connection, text)
            query.create_dataset_views(connection, "", self.table)
            return query.execute(connection, text, parameters)

    def describe(self) -> dict[str, Any]:
        """Return the counts, returns and spaces of this version. Cost: one scan of five columns."""
        row = self.sql(
            'SELECT count(*) AS num_episodes, avg("return") AS mean_return, '
            'min("return") AS min_return, max("return") AS max_return, '
            "avg(num_steps) AS mean_num_steps, "
            "count(*) FILTER (terminated) AS num_terminated, "
            "count(*) FILTER (truncated AND NOT terminated) AS num_truncated, "
            "count(*) FILTER (NOT complete) AS num_incomplete, "
            "(SELECT count(behavior_log_prob) FROM steps) AS num_log_probs FROM episodes"
        ).to_pylist()[0]
        return {
            "dataset": self.dataset,
            "version": self.version,
            "num_steps": self.num_steps,
            **row,
            "observation_space": describe(self.spec.observation_space),
            "action_space": describe(self.spec.action_space),
            "columns": {field.name: str(field.type) for field in self.table.schema},
            "num_shards": len(self.files),
            "num_bytes": sum(entry.size_bytes for entry in self.files),
        }
