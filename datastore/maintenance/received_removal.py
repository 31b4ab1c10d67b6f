"""Received: the steps that clients sent leave with the episodes that they are of."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.schema import EPISODE_ID
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.maintenance.removal import count_rows, remove_rows
from replaylake.datastore.query.expressions import select_episode_keys
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_arrow,
    scan_connection,
)
from replaylake.datastore.storage.table.table import TableSnapshot


def select_waiting(dataset: Dataset, steps: TableSnapshot, condition: str) -> pa.Array:
    """Return the ids of received episodes of which no step is in the dataset yet.

    Those that a condition over `episodes` selects, in DuckDB's spelling. Raises: QueryError.
    """
    if not dataset.received.exists():
        return pa.array([], pa.string())
    found = select_received(dataset.received.snapshot(), condition)
    return found.filter(pc.invert(pc.is_in(found, value_set=_find_written(steps, found))))


def select_received(received: TableSnapshot, condition: str) -> pa.Array:
    """Return the ids of the episodes among received steps that a condition selects."""
    return select_episode_keys(received, condition).column(EPISODE_ID).combine_chunks().unique()


def count_received(dataset: Dataset, keys: pa.Array) -> int:
    """Return how many rows `remove_received` would remove."""
    return count_rows(dataset.received, EPISODE_ID, keys)


def remove_received(dataset: Dataset, keys: pa.Array, operation: str) -> int:
    """Remove the received steps of episodes, by episode id; return how many.

    Done before the steps leave the dataset: `feedback join` would else bring them back.
    """
    return remove_rows(dataset.received, EPISODE_ID, keys, operation)


def find_written_received(dataset: Dataset, steps: TableSnapshot, episodes: pa.Array) -> pa.Array:
    """Return those of the ids that have both received steps and steps in the dataset."""
    if not len(episodes) or not dataset.received.exists():
        return pa.array([], pa.string())
    received = dataset.received.snapshot()
    return _find_written(steps, _find_written(received, episodes))


def _find_written(steps: TableSnapshot, episodes: pa.Array) -> pa.Array:
    """Return those of the ids that a table of steps has one of."""
    if not steps.files or not len(episodes):
        return pa.array([], pa.string())
    tables = {"keys": pa.table({"key": episodes})}
    with fetch_files(steps, steps.files) as paths, scan_connection(tables) as connection:
        found = query_arrow(
            connection,
            f"SELECT DISTINCT {EPISODE_ID} AS key FROM {from_clause(steps, paths)} "
            f"WHERE {EPISODE_ID} IN (SELECT key FROM keys)",
        )
    return found.column("key").combine_chunks()
