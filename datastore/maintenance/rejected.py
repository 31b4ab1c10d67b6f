"""Rejected: the quarantine's rows leave with the episodes that they are of."""

from __future__ import annotations

import pyarrow as pa

from replaylake.datastore import schema
from replaylake.datastore.dataset import Dataset
from replaylake.datastore.maintenance.removal import count_rows, forget_rows
from replaylake.datastore.query.episode_views import episodes, groups_of_rows
from replaylake.datastore.query.table_files import arrow_of, fetched, located, scanning
from replaylake.datastore.schema import EPISODE_ID
from replaylake.datastore.table.table import TableSnapshot

_NONE = pa.array([], pa.string())
# What `episodes` is made of; of a row that is refused, only who and where it is can be trusted.
_AS_STEPS = f"""
    {schema.EPISODE_ID}, {schema.AGENT_ID}, {schema.SOURCE_EPISODE_ID},
    CAST(row_number AS INTEGER) AS {schema.STEP}, CAST(NULL AS INTEGER) AS {schema.ENV_STEP},
    CAST(NULL AS DOUBLE) AS {schema.REWARD}, CAST(NULL AS BOOLEAN) AS {schema.TERMINATED},
    CAST(NULL AS BOOLEAN) AS {schema.TRUNCATED}, CAST(NULL AS VARCHAR) AS {schema.POLICY},
    CAST(NULL AS BIGINT) AS {schema.POLICY_VERSION},
    CAST(NULL AS TIMESTAMPTZ) AS {schema.TIMESTAMP}
"""


def select_rejected(snapshot: TableSnapshot, condition: str) -> pa.Array:
    """Return the ids of the quarantined episodes that a condition over `episodes` selects.

    Their ids and num_steps are known, all else is NULL. `condition` is in DuckDB's spelling.
    Raises: QueryFailed.
    """
    if not (entries := snapshot.files):
        return _NONE
    with fetched(snapshot, entries) as paths, scanning() as connection:
        rows = f"SELECT {_AS_STEPS} FROM {located(snapshot, paths)}"
        connection.execute(f"CREATE TEMP TABLE rows AS {rows}")
        # The condition is somebody's text.
        connection.execute("SET enable_external_access = false")
        view = episodes(groups_of_rows("rows"))
        found = arrow_of(
            connection, f"SELECT DISTINCT {EPISODE_ID} AS key FROM ({view}) WHERE ({condition})"
        )
    return found.column("key").combine_chunks()


def rejected_before(dataset: Dataset, cutoff_us: int) -> pa.Array:
    """Return the ids of the episodes that came into quarantine before a time (us since 1970)."""
    if not dataset.rejected.exists() or not (snapshot := dataset.rejected.snapshot()).files:
        return _NONE
    with fetched(snapshot, snapshot.files) as paths, scanning() as connection:
        found = arrow_of(
            connection,
            f"SELECT {EPISODE_ID} AS key FROM {located(snapshot, paths)} GROUP BY key "
            f"HAVING max(epoch_us(ingested_at)) < {cutoff_us}",
        )
    return found.column("key").combine_chunks()


def count_rejected(dataset: Dataset, keys: pa.Array) -> int:
    """Return how many rows `forget_rejected` would remove."""
    return count_rows(dataset.rejected, EPISODE_ID, keys)


def forget_rejected(dataset: Dataset, keys: pa.Array, operation: str) -> int:
    """Remove the quarantined rows of episodes, by episode id; return how many."""
    return forget_rows(dataset.rejected, EPISODE_ID, keys, operation)
