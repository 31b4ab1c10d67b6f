"""Rejected: the quarantine's rows leave with the episodes that they are of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.schema import EPISODE_ID
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.maintenance.removal import count_rows, remove_rows
from replaylake.datastore.query.episode_views import episodes_sql, group_rows_sql
from replaylake.datastore.query.expressions import bound_condition
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_arrow,
    scan_connection,
)
from replaylake.datastore.storage.table.table import TableSnapshot

_NONE = pa.array([], pa.string())
# What `episodes` is made of. Of a row that is refused only who and where it is can be trusted, and
# that is in columns but for the policy, which is where the log has it: under the name that
# `mapping` has for it, where there is one. Rows that came before there was a `mapping` are asked
# for our own name, and tell nothing where they lack it.
_AS_STEPS = f"""
    {schema.EPISODE_ID}, {schema.AGENT_ID}, {schema.SOURCE_EPISODE_ID},
    CAST(row_number AS INTEGER) AS {schema.STEP}, CAST(NULL AS INTEGER) AS {schema.ENV_STEP},
    CAST(NULL AS DOUBLE) AS {schema.REWARD}, CAST(NULL AS BOOLEAN) AS {schema.TERMINATED},
    CAST(NULL AS BOOLEAN) AS {schema.TRUNCATED}, CAST(NULL AS TIMESTAMPTZ) AS {schema.TIMESTAMP}
"""
_KNOWN: Final = {
    schema.EPISODE_ID: "true",
    schema.AGENT_ID: "true",
    schema.SOURCE_EPISODE_ID: "true",
    "num_steps": "true",
    "policy": f'"{schema.POLICY} is known"',
    "min_policy_version": f'"{schema.POLICY_VERSION} is known"',
    "max_policy_version": f'"{schema.POLICY_VERSION} is known"',
}


@dataclass(frozen=True)
class RejectedEpisodes:
    """Quarantined episodes by id: `selected`, and those of which it cannot be told: `undecided`."""

    selected: pa.Array
    undecided: pa.Array


def select_rejected(snapshot: TableSnapshot, condition: str) -> RejectedEpisodes:
    """Return the quarantined episodes that a condition over `episodes` selects.

    Their ids, num_steps, policy and its versions are known, all else is not. The policy is not
    where the log did not say which column it is, or where the rows of an episode have several.
    `condition` is in DuckDB's spelling. Raises: QueryError.
    """
    if not (entries := snapshot.files):
        return RejectedEpisodes(_NONE, _NONE)
    surely, maybe = bound_condition(condition, _KNOWN)
    names = (schema.POLICY, schema.POLICY_VERSION)
    logged = ", ".join(
        f"{_extract_field(snapshot, name, kind)} AS {name}, "
        f'{_is_field_known(snapshot, name, kind)} AS "{name} is known"'
        # A row of frames takes long to parse: only where the condition asks.
        if f'"{name} is known"' in maybe
        else f'CAST(NULL AS {kind}) AS {name}, false AS "{name} is known"'
        for name, kind in zip(names, ("VARCHAR", "BIGINT"), strict=True)
    )
    with fetch_files(snapshot, entries) as paths, scan_connection() as connection:
        rows = f"SELECT {_AS_STEPS}, {logged} FROM {from_clause(snapshot, paths)}"
        connection.execute(f"CREATE TEMP TABLE rows AS {rows}")
        # The condition is somebody's text.
        connection.execute("SET enable_external_access = false")
        key = f"{EPISODE_ID}, {schema.AGENT_ID}"
        known = ", ".join(
            f'bool_and("{name} is known") AND count(DISTINCT {name}) <= 1 '
            f'AND count({name}) IN (0, count(*)) AS "{name} is known"'
            for name in names
        )
        flags = f"SELECT {key}, {known} FROM rows GROUP BY {key}"
        view = f"({episodes_sql(group_rows_sql('rows'))}) AS episodes JOIN ({flags}) USING ({key})"
        found = query_arrow(
            connection,
            f"SELECT {EPISODE_ID} AS key, bool_or(coalesce({surely}, false)) AS selected, "
            f"bool_or(coalesce({maybe}, false)) AS possible FROM {view} GROUP BY key",
        )
    keys, selected = found.column("key"), found.column("selected")
    undecided = pc.and_not(found.column("possible"), selected)
    parts = (keys.filter(mask).combine_chunks() for mask in (selected, undecided))
    return RejectedEpisodes(*parts)


def _extract_field(snapshot: TableSnapshot, name: str, kind: str) -> str:
    """Return the value that a row of the log has for a field of ours."""
    pointer = _point_to_field(snapshot, name)
    return f'TRY_CAST(json_extract_string("row", {pointer}) AS {kind})'


def _is_field_known(snapshot: TableSnapshot, name: str, kind: str) -> str:
    """Return whether a row of the log says what its field of ours is, be it NULL."""
    pointer = _point_to_field(snapshot, name)
    is_there = f'json_type("row", {pointer}) IS NOT NULL'
    if "mapping" in snapshot.schema.names:
        is_there = f"(mapping IS NOT NULL OR {is_there})"
    value = _extract_field(snapshot, name, kind)
    is_of_kind = f'(json_extract_string("row", {pointer}) IS NULL OR {value} IS NOT NULL)'
    return f'("row" IS NOT NULL AND {is_there} AND {is_of_kind})'


def _point_to_field(snapshot: TableSnapshot, name: str) -> str:
    """Return the JSON pointer to a field of ours in `row`; NULL if the log has no such column."""
    if "mapping" not in snapshot.schema.names:
        return f"'/{name}'"
    theirs = f"json_extract_string(mapping, '/{name}')"
    escaped = f"replace(replace({theirs}, '~', '~0'), '/', '~1')"
    return f"(CASE WHEN mapping IS NULL THEN '/{name}' ELSE '/' || {escaped} END)"


def select_rejected_before(dataset: Dataset, cutoff_us: int) -> pa.Array:
    """Return the ids of the episodes that came into quarantine before a time (us since 1970)."""
    if not dataset.rejected.exists() or not (snapshot := dataset.rejected.snapshot()).files:
        return _NONE
    with fetch_files(snapshot, snapshot.files) as paths, scan_connection() as connection:
        found = query_arrow(
            connection,
            f"SELECT {EPISODE_ID} AS key FROM {from_clause(snapshot, paths)} GROUP BY key "
            f"HAVING max(epoch_us(ingested_at)) < {cutoff_us}",
        )
    return found.column("key").combine_chunks()


def count_rejected(dataset: Dataset, keys: pa.Array) -> int:
    """Return how many rows `remove_rejected` would remove."""
    return count_rows(dataset.rejected, EPISODE_ID, keys)


def remove_rejected(dataset: Dataset, keys: pa.Array, operation: str) -> int:
    """Remove the quarantined rows of episodes, by episode id; return how many."""
    return remove_rows(dataset.rejected, EPISODE_ID, keys, operation)
