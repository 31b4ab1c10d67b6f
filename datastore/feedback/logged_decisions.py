"""Logged decisions: what was seen and done, some at a time, from a dataset's decisions or steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.schema import DatasetSpec, to_numpy
from replaylake.datastore.episodes.spaces import Array, Values, num_values, take
from replaylake.datastore.errors import NotFoundError, QueryRefusedError
from replaylake.datastore.feedback.decisions import LOG_PROB
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.query.connections import session
from replaylake.datastore.query.expressions import canonical_expression
from replaylake.datastore.query.statements import execute
from replaylake.datastore.replay.view_query import explain_sql_errors
from replaylake.datastore.storage.arrow_values import combine_chunks, numbers
from replaylake.datastore.storage.table.table_snapshot import TableSnapshot

# Those of images are then some tens of MB.
_ROWS_AT_ONCE: Final = 4096


@dataclass(frozen=True, eq=False)
class LoggedDecisions:
    """N decisions as they were logged.

    observations [N, *obs] and actions [N, *act] in the dataset's dtypes; log_probs float64 [N], ln
    of the probability (density) that the logging policy gave the action, NaN where unknown; masks
    bool [N, A] of allowed actions, or None; groups: the text of a column's value in each row.
    """

    observations: Values
    actions: Values
    log_probs: Array
    masks: Array | None
    groups: tuple[str, ...] | None = None

    @property
    def num(self) -> int:
        return num_values(self.observations)

    def slice_rows(self, rows: slice) -> LoggedDecisions:
        """Return consecutive ones."""
        return LoggedDecisions(
            take(self.observations, rows),
            take(self.actions, rows),
            self.log_probs[rows],
            None if self.masks is None else self.masks[rows],
            None if self.groups is None else self.groups[rows],
        )


class DecisionReader:
    """Reads the decisions that were served into a dataset, or its steps where none were.

    Pinned at the newest version when it is made. name: `decisions` or `steps`. Raises:
    NotFoundError if there is no such dataset or no column `by`; QueryRefusedError or QueryError for
    a `where` that is not a condition over one row.
    """

    def __init__(
        self, dataset: Dataset, *, where: str | None = None, by: str | None = None
    ) -> None:
        if not dataset.exists():
            raise NotFoundError(
                f"dataset {dataset.name!r}: not in this lake, expected one with decisions or "
                "steps. `replaylake list` names those that are."
            )
        self.spec: DatasetSpec = dataset.spec
        self.name, self._table = _newest_table(dataset)
        self.where = None
        if where is not None:
            with explain_sql_errors("where", where):
                self.where = canonical_expression(where)
        self._by = by
        if by is not None:
            self._table.select_fields([by])

    @property
    def version(self) -> int:
        """The version of the table."""
        return self._table.version

    @property
    def num_rows(self) -> int:
        """Rows of the table, selected or not."""
        return self._table.num_rows

    def batches(self, limit: int | None = None) -> Iterator[LoggedDecisions]:
        """Yield the selected decisions, oldest shards first. Memory: one shard.

        Raises: QueryError, QueryRefusedError, ShardCorruptError.
        """
        left = self._table.num_rows if limit is None else limit
        for shard in self._table.batches(self._columns()):
            chosen = shard if self.where is None else _filter_rows(shard, self.where)
            chosen = chosen.slice(0, left)
            left -= chosen.num_rows
            for start in range(0, chosen.num_rows, _ROWS_AT_ONCE):
                yield self._decode(chosen.slice(start, _ROWS_AT_ONCE))
            if not left:
                return

    def _columns(self) -> list[str] | None:
        """Return the columns to read; None for all, as a condition may name any."""
        if self.where is not None:
            return None
        names = [schema.OBSERVATION, schema.ACTION, self._log_prob]
        names += [schema.ACTION_MASK] * (schema.ACTION_MASK in self._table.schema.names)
        return names if self._by is None or self._by in names else [*names, self._by]

    @property
    def _log_prob(self) -> str:
        return LOG_PROB if self.name == "decisions" else schema.BEHAVIOR_LOG_PROB

    def _decode(self, rows: pa.Table) -> LoggedDecisions:
        spec = self.spec
        return LoggedDecisions(
            to_numpy(spec.observation_space, combine_chunks(rows[schema.OBSERVATION])),
            to_numpy(spec.action_space, combine_chunks(rows[schema.ACTION])),
            numbers(rows[self._log_prob]).astype(np.float64),
            _masks(rows),
            None if self._by is None else _texts(rows[self._by]),
        )


def _newest_table(dataset: Dataset) -> tuple[str, TableSnapshot]:
    if dataset.decisions.exists() and (decisions := dataset.decisions.snapshot()).num_rows:
        return "decisions", decisions
    return "steps", dataset.snapshot().table


def _filter_rows(rows: pa.Table, condition: str) -> pa.Table:
    with session() as connection:
        connection.register("logged", rows)
        text = f"SELECT coalesce(CAST(({condition}) AS BOOLEAN), false) AS chosen FROM logged"
        flags = execute(connection, text)["chosen"]
    if len(flags) != rows.num_rows:
        raise QueryRefusedError(
            f"where {condition}: found {len(flags)} values for {rows.num_rows} rows, expected one "
            "per row. Leave out aggregates and unnest."
        )
    return rows.filter(flags)


def _masks(rows: pa.Table) -> Array | None:
    """Return action masks [N, A]; a decision without one allows every action."""
    if schema.ACTION_MASK not in rows.column_names:
        return None
    column = combine_chunks(rows[schema.ACTION_MASK])
    known = numbers(column.is_valid())
    if not known.any():
        return None
    flags = numbers(column.drop_null().flatten())
    masks = np.ones((len(column), len(flags) // int(known.sum())), np.bool_)
    masks[known] = flags.reshape(int(known.sum()), -1)
    return masks


def _texts(column: pa.ChunkedArray) -> tuple[str, ...]:
    return tuple("NULL" if value is None else str(value) for value in column.to_pylist())
