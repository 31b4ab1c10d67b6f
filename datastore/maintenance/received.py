"""Received: the steps that clients sent leave with the episodes that they are of."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.schema import EPISODE_ID
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.maintenance.removal import count_rows, forget_rows
from replaylake.datastore.query.expressions import selected_episodes
from replaylake.datastore.query.table_files import arrow_of, fetched, located, scanning
from replaylake.datastore.storage.table.table import TableSnapshot


def select_waiting(dataset: Dataset, steps: TableSnapshot, condition: str) -> pa.Array:
    """Return the ids of received episodes of which no step is in the dataset yet.

    Those that a condition over `episodes` selects, in DuckDB's spelling. Raises: QueryFailed.
    """
    if not dataset.received.exists():
        return pa.array([], pa.string())
    found = select_received(dataset.received.snapshot(), condition)
    return found.filter(pc.invert(pc.is_in(found, value_set=_written(steps, found))))


def select_received(received: TableSnapshot, condition: str) -> pa.Array:
    """Return the ids of the episodes among received steps that a condition selects."""
    return selected_episodes(received, condition).column(EPISODE_ID).combine_chunks().unique()


def count_received(dataset: Dataset, keys: pa.Array) -> int:
    """Return how many rows `forget_received` would remove."""
    return count_rows(dataset.received, EPISODE_ID, keys)


def forget_received(dataset: Dataset, keys: pa.Array, operation: str) -> int:
    """Remove the received steps of episodes, by episode id; return how many.

    Done before the steps leave the dataset: `sessionise` would else bring them back.
    """
    return forget_rows(dataset.received, EPISODE_ID, keys, operation)


def _written(steps: TableSnapshot, episodes: pa.Array) -> pa.Array:
    """Return those of the ids that the dataset has a step of."""
    if not steps.files or not len(episodes):
        return pa.array([], pa.string())
    tables = {"keys": pa.table({"key": episodes})}
    with fetched(steps, steps.files) as paths, scanning(tables) as connection:
        found = arrow_of(
            connection,
            f"SELECT DISTINCT {EPISODE_ID} AS key FROM {located(steps, paths)} "
            f"WHERE {EPISODE_ID} IN (SELECT key FROM keys)",
        )
    return found.column("key").combine_chunks()
