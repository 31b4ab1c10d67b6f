"""Snapshot: one version of a dataset, read as SQL rows, Arrow or training batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Values, describe
from replaylake.datastore.query import query
from replaylake.datastore.replay.arrays import read_arrays
from replaylake.datastore.replay.packing.packing import OnProgress
from replaylake.datastore.replay.view import ReplayView
from replaylake.datastore.replay.view_opener import open_view
from replaylake.datastore.replay.view_query import ViewQuery, column_names
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.presence import check_shards_present
from replaylake.datastore.storage.table.table import TableSnapshot


@dataclass(frozen=True)
class Snapshot:
    """Exactly the files of one version. Later appends do not change what it reads."""

    dataset: str
    spec: DatasetSpec
    table: TableSnapshot

    def __repr__(self) -> str:
        return f"Snapshot('{self.dataset}@{self.version}')"

    @property
    def version(self) -> int:
        """The version that is pinned."""
        return self.table.version

    @property
    def files(self) -> tuple[FileEntry, ...]:
        return self.table.files

    @property
    def num_steps(self) -> int:
        """Rows in all shards."""
        return self.table.num_rows

    def replay(
        self,
        where: str | None = None,
        *,
        where_steps: str | None = None,
        reward: str | None = None,
        columns: Sequence[str] = (),
        float64: bool = False,
        frame_stack: int = 1,
        memory_budget_bytes: int | None = None,
        cache: bool = True,
        on_progress: OnProgress | None = None,
    ) -> ReplayView:
        """Decode episodes for sampling, or map what an earlier call decoded.

        Args:
            where: SQL condition over the columns of `episodes`; selects whole episodes.
            where_steps: SQL condition over the columns of `steps`; a sample may start at these
                steps alone. The steps that follow one stay, whatever it says of them.
            reward: SQL expression over the columns of `steps`, in place of the logged reward.
            columns: further columns of `steps` to keep with each step: numbers, flags and
                fixed-size lists of them.
            float64: keep what is stored as float64, instead of decoding it to float32.
            frame_stack: how many consecutive observations a sampled one is stacked of; each is
                stored once.
            memory_budget_bytes: a larger view is decoded to disk and mapped from there; by default
                half of the memory that is available. 0 always maps.
            cache: whether the view is kept for the next time (docs/REPLAY.md). False leaves no
                trace.
            on_progress: called with (shards decoded, shards) after each; not for a view that was
                kept.

        Raises: QueryRefusedError, QueryError, ShardCorruptError, EmptyReplayError,
        SpaceUnsupportedError; NotFoundError for a version whose shards were removed, or an absent
        column; SchemaMismatchError for a reward that is not finite; ConfigInvalidError;
        StorageError where the view fits neither memory nor disk.
        """
        check_shards_present(self.table)
        query = ViewQuery(where, where_steps, reward, column_names(columns), float64, frame_stack)
        return open_view(
            self.dataset,
            self.table,
            self.spec,
            query,
            memory_budget_bytes=memory_budget_bytes,
            cache=cache,
            on_progress=on_progress,
        )

    def arrays(self, columns: Sequence[str] | None = None) -> dict[str, Values]:
        """Decode columns of all steps into numpy arrays, by default those that no row lacks.

        Those are step, observation, action, reward, terminated and truncated. Arrays are [N, ...],
        in the order the steps were committed in; an unknown float, such as a reward where those are
        optional, is NaN, time NaT, text None.
        Every shard is checked against its sha256. Memory: the arrays and a few row groups.

        Raises: NotFoundError for an absent column, or a version whose shards were removed;
        SchemaMismatchError for a column that arrays cannot hold, by its type or for its nulls;
        ShardCorruptError.
        """
        check_shards_present(self.table)
        return read_arrays(self.table, self.spec, columns)

    def sql(self, text: str, parameters: dict[str, object] | None = None) -> pa.Table:
        """Run one SELECT over this version's `steps`, `episodes`, `games` and `transitions`.

        Raises: QueryRefusedError, QueryError; NotFoundError for a version whose shards were
        removed.
        """
        return query.run_snapshot_query(text, self.table, parameters)

    def describe(self) -> dict[str, Any]:
        """Return the counts, returns and spaces of this version.

        Returns are those of the `num_returns` episodes whose rewards are all known; None of none.
        Cost: one scan of a column; of six where no summary of the episodes is there.
        """
        row = self.sql(
            'SELECT count(*) AS num_episodes, count("return") AS num_returns, '
            'avg("return") AS mean_return, '
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
