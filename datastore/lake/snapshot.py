"""Snapshot: one version of a dataset, read as SQL rows, Arrow or training batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Values, describe
from replaylake.datastore.errors import ExtraMissingError
from replaylake.datastore.query import query
from replaylake.datastore.replay.arrays import read_arrays
from replaylake.datastore.replay.packing.packing import OnProgress
from replaylake.datastore.replay.tokens.sequence_opener import open_token_sequences
from replaylake.datastore.replay.tokens.token_view import TokenSequences
from replaylake.datastore.replay.view import ReplayView
from replaylake.datastore.replay.view_opener import open_view
from replaylake.datastore.replay.view_query import ViewQuery, column_names
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.column_ranges import ColumnRange, column_ranges
from replaylake.datastore.storage.table.presence import check_shards_present
from replaylake.datastore.storage.table.table import TableSnapshot

if TYPE_CHECKING:
    import polars


@dataclass(frozen=True)
class Snapshot:
    """The files of one version. Later commits do not change what it reads."""

    dataset: str
    spec: DatasetSpec
    table: TableSnapshot

    def __repr__(self) -> str:
        return f"Snapshot('{self.dataset}@{self.version}')"

    @property
    def version(self) -> int:
        """The version of the snapshot."""
        return self.table.version

    @property
    def files(self) -> tuple[FileEntry, ...]:
        return self.table.files

    @property
    def num_steps(self) -> int:
        """The number of rows in all shards."""
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
        """Decode episodes for sampling, or map a decoded view from the cache.

        Args:
            where: SQL condition over the columns of `episodes`; selects whole episodes.
            where_steps: SQL condition over the columns of `steps`; a sample may start only at steps
                that meet it. The steps that follow remain, even if they do not meet it.
            reward: SQL expression over the columns of `steps` that replaces the logged reward.
            columns: further columns of `steps` to include with each step: numbers, flags and
                fixed-size lists of them.
            float64: decode values that are stored as float64 as float64, not as float32.
            frame_stack: number of consecutive observations in a stacked observation; each
                observation is stored once.
            memory_budget_bytes: a larger view is decoded to disk and mapped from there; by default
                half of the available memory. With 0, every view is mapped.
            cache: whether to use the cache of decoded views (docs/REPLAY.md). With False, it is
                neither read nor written.
            on_progress: called with (shards decoded, shards) after each shard; not for a cached
                view.

        Raises: QueryRefusedError, QueryError, ShardCorruptError, EmptyReplayError,
        SpaceUnsupportedError; NotFoundError for a version whose shards were removed, or an absent
        column; SchemaMismatchError for a reward that is not finite; ConfigInvalidError;
        StorageError if the view fits neither in memory nor on disk.
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

    def token_sequences(
        self,
        where: str | None = None,
        *,
        columns: Sequence[str] = (),
        cache: bool = True,
        on_progress: OnProgress | None = None,
    ) -> TokenSequences:
        """Decode the rows of the view `sequences` for sampling, or map them from the cache.

        Args:
            where: SQL condition over the columns of `episodes`: of each agent, all or none of the
                sequences that end with it are selected.
            columns: further columns of `sequences` with a value for each token, for example
                proximal_log_probs. Numbers are decoded to float32.
            cache: whether to use the cache of decoded views (docs/REPLAY.md). With False, it is
                neither read nor written, and the sequences are decoded into temporary files.
            on_progress: called with (shards decoded, shards); not for cached sequences.

        Raises: NotFoundError for a dataset without token columns, an absent column, or a version
        whose shards were removed; QueryRefusedError, QueryError, ShardCorruptError,
        EmptyReplayError, ConfigInvalidError, StorageError. Cost: docs/REPLAY.md.
        """
        check_shards_present(self.table)
        return open_token_sequences(
            self.dataset, self.table, where, columns, cache=cache, on_progress=on_progress
        )

    def arrays(self, columns: Sequence[str] | None = None) -> dict[str, Values]:
        """Decode columns of all steps into numpy arrays.

        By default, these are the columns that have a value in every row: step, observation, action,
        reward, terminated and truncated. Arrays are [N, ...], in the order in which the steps were
        committed. An unknown float (for example an optional reward) is NaN, an unknown time NaT, an
        unknown text None. Every shard is checked against its sha256. Memory: the arrays and a few
        row groups.

        Raises: NotFoundError for an absent column, or a version whose shards were removed;
        SchemaMismatchError for a column that an array cannot represent because of its type or its
        nulls; ShardCorruptError.
        """
        check_shards_present(self.table)
        return read_arrays(self.table, self.spec, columns)

    def sql(self, text: str, parameters: dict[str, object] | None = None) -> pa.Table:
        """Run one SELECT over this version's `steps`, `episodes`, `games` and `transitions`.

        Also over its `sequences`, if it has token columns, and its `groups` and `preference_pairs`,
        if it has group_id.

        Raises: QueryRefusedError, QueryError; NotFoundError for a version whose shards were
        removed.
        """
        return query.run_snapshot_query(text, self.table, parameters)

    def to_polars(self) -> polars.LazyFrame:
        """Return the steps of this version as a lazy Polars frame, one row per step.

        Its columns are those of `steps`; vectors are Arrays, repeated texts Categoricals. Nothing
        but the files' presence is read before it is collected, and then only the columns and row
        groups that the query needs. A column that was added later is null in older rows. Like
        `sql`, it does not check the shards' sha256. From an object store, the shards are first
        copied to the local disk, where they remain until this process ends.

        Raises: ExtraMissingError; NotFoundError for a version whose shards were removed.
        """
        try:
            import polars
        except ImportError:
            raise ExtraMissingError(
                f"{self.dataset}: to_polars needs polars, which is not installed. Install it with: "
                "pip install 'replaylake[polars]'"
            ) from None
        check_shards_present(self.table)
        empty = polars.from_arrow(self.table.schema.empty_table())
        assert isinstance(empty, polars.DataFrame)
        if not self.files:
            return empty.lazy()
        return polars.scan_parquet(
            self.table.paths(),
            schema=empty.schema,
            glob=False,
            hive_partitioning=False,
            missing_columns="insert",
        )

    def describe(self, ranges: Mapping[str, ColumnRange] | None = None) -> dict[str, Any]:
        """Return the counts, returns, spaces and columns of this version, JSON-able.

        `ranges` has `min`, `max` and `missing` of each column, as column_ranges returns them.
        Returns are computed from the `num_returns` episodes whose rewards are all known; they are
        None if there is no such episode. `normalized_return` is their mean, normalized by
        `score_reference` if the dataset has one. `ranges` are what column_ranges returns, where the
        caller has them. Cost: reads the footer of each shard; a scan of six columns if there is no
        summary of the episodes.
        """
        row = self.sql(
            'SELECT count(*) AS num_episodes, count("return") AS num_returns, '
            'avg("return") AS mean_return, '
            'min("return") AS min_return, max("return") AS max_return, '
            "avg(num_steps) AS mean_num_steps, "
            "count(*) FILTER (terminated) AS num_terminated, "
            "count(*) FILTER (truncated AND NOT terminated) AS num_truncated, "
            "count(*) FILTER (NOT complete) AS num_incomplete FROM episodes"
        ).to_pylist()[0]
        # After the query, which says why shards are not there.
        if ranges is None:
            ranges = column_ranges(self.table)
        missing = ranges[schema.BEHAVIOR_LOG_PROB].missing or 0.0
        row["num_log_probs"] = self.num_steps - round(missing * self.num_steps)
        reference, mean = self.spec.score_reference, row["mean_return"]
        return {
            "dataset": self.dataset,
            "version": self.version,
            "num_steps": self.num_steps,
            **row,
            "observation_space": describe(self.spec.observation_space),
            "action_space": describe(self.spec.action_space),
            "columns": {field.name: str(field.type) for field in self.table.schema},
            "ranges": {
                name: {
                    "min": _json_value(one.least),
                    "max": _json_value(one.greatest),
                    "missing": one.missing,
                }
                for name, one in ranges.items()
            },
            "score_reference": None if reference is None else reference.to_json(),
            "normalized_return": None
            if reference is None or mean is None
            else reference.normalize(mean),
            "num_shards": len(self.files),
            "num_bytes": sum(entry.size_bytes for entry in self.files),
        }


def _json_value(value: Any) -> Any:
    """Return a value as JSON has it; times as text in ISO 8601."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
