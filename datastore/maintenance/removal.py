"""Removal: planning that rows leave the tables of a dataset, as trim, delete and purge do it.

Of steps, of decisions with the rewards given for them, of received steps and of quarantined rows:
which are those of some episodes, and how they leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.schema import EPISODE_ID, SOURCE_EPISODE_ID, STEP, TIMESTAMP
from replaylake.datastore.feedback.decisions import DECISION_ID, REQUEST_ID
from replaylake.datastore.feedback.set_aside import REWARD_CHECK, STEP_CHECK
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.names import new_ulid
from replaylake.datastore.query.episode_views import episodes_sql, group_rows_sql
from replaylake.datastore.query.expressions import bind_condition, select_episode_keys
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_arrow,
    query_rows,
    scan_connection,
)
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.rewrite import ChangeRows, RewritePlan, rewrite
from replaylake.datastore.storage.table.table import Table, TableSnapshot

# A report is of the newest decision of its name that was taken before it, else of the first after;
# of a step, of those that have the client's own number of it, where there is one.
_NAMED_REPORTS_SQL: Final = """
SELECT r.file_index, r.file_row_number FROM {rewards} r
ASOF LEFT JOIN named d ON d.name = r.{name} AND r.{time} >= d.{time}
ASOF LEFT JOIN named n ON n.name = r.{name} AND r.{time} <= n.{time}
ASOF LEFT JOIN numbered ds
    ON ds.name = r.{name} AND ds.{step} = r.{step} AND r.{time} >= ds.{time}
ASOF LEFT JOIN numbered ns
    ON ns.name = r.{name} AND ns.{step} = r.{step} AND r.{time} <= ns.{time}
WHERE r.{key} IS NULL AND {other}
    AND coalesce(ds.{key}, ns.{key}, d.{key}, n.{key}) IN (SELECT key FROM keys)
"""
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
class RemovalPlan:
    """A plan for `rewrite`, and how many rows leave with it."""

    plan: RewritePlan
    num_rows: int


def plan_removal(
    snapshot: TableSnapshot,
    column: str,
    keys: pa.Array,
    info: Mapping[str, Any] | None = None,
) -> RemovalPlan:
    """Plan that all rows leave whose `column`, a text, is among `keys`.

    A shard that holds no other rows is dropped without being read as a whole. Cost: one scan of
    the column.
    """
    if not len(keys) or not snapshot.files:
        return RemovalPlan(RewritePlan({}), 0)
    hits = _hits(snapshot, column, keys)
    changes = {}
    dropped: list[FileEntry] = []
    for entry, num_hit in hits:
        if num_hit == entry.num_rows:
            dropped.append(entry)
        else:
            changes[entry] = _without(column, keys)
    return RemovalPlan(
        RewritePlan(changes, info or {}, tuple(dropped)), sum(num for _, num in hits)
    )


def remove_decisions(dataset: Dataset, keys: pa.Array, operation: str) -> tuple[int, int]:
    """Remove decisions, and the rewards given for them, by decision id; return how many of each.

    Done before their steps leave: a crash in between then leaves steps without decisions, which
    nothing joins anew, and not decisions without steps, which `feedback join` would bring back.
    """
    # First: without the decisions nobody knows whose they are.
    num_named = remove_named_reports(dataset, keys, operation)
    counts = [
        remove_rows(table, DECISION_ID, keys, operation)
        # Rewards last: what is left of a crash here has no decision any more, and is never joined.
        for table in (dataset.decisions, dataset.rewards)
    ]
    return counts[0], counts[1] + num_named


def count_decisions(dataset: Dataset, keys: pa.Array) -> tuple[int, int]:
    """Return how many decisions and rewards `remove_decisions` would remove."""
    tables = (dataset.decisions, dataset.rewards)
    decisions, rewards = (count_rows(table, DECISION_ID, keys) for table in tables)
    return decisions, rewards + count_named_reports(dataset, keys)


def count_rows(table: Table, column: str, keys: pa.Array) -> int:
    """Return how many rows `remove_rows` would remove."""
    if not len(keys) or not table.exists():
        return 0
    batches = table.snapshot().batches([column])
    return sum(
        pc.sum(pc.is_in(batch.column(column), value_set=keys)).as_py() or 0 for batch in batches
    )


def remove_rows(table: Table, column: str, keys: pa.Array, operation: str) -> int:
    """Remove a table's rows of some keys, in a commit of its own; return how many."""
    if not len(keys) or not table.exists():
        return 0
    num_rows = 0

    def plan(snapshot: TableSnapshot) -> RewritePlan:
        nonlocal num_rows
        planned = plan_removal(snapshot, column, keys)
        num_rows = planned.num_rows
        return planned.plan

    producer = f"{operation.lower()}/{new_ulid()}"
    rewrite(table, plan, producer=producer, sequence=0, operation=operation)
    return num_rows


def find_decisions(dataset: Dataset, steps: TableSnapshot, episodes: pa.Array) -> pa.Array:
    """Return the ids of the decisions that episodes are made of.

    Those without a reward are among them, which became no step but lie between steps: a reward that
    comes late would make an episode of them again.
    """
    if DECISION_ID not in steps.schema.names or not steps.files or not len(episodes):
        return pa.array([], pa.string())
    tables = {"chosen": pa.table({"key": episodes})}
    with fetch_files(steps, steps.files) as paths, scan_connection(tables) as connection:
        source = from_clause(steps, paths)
        served = query_arrow(
            connection,
            f"SELECT {DECISION_ID} AS key FROM {source} "
            f"WHERE {DECISION_ID} IS NOT NULL AND {EPISODE_ID} IN (SELECT key FROM chosen)",
        )
        if not served.num_rows or not dataset.decisions.exists():
            return served.column("key").combine_chunks()
        others = query_arrow(
            connection,
            f"SELECT {DECISION_ID} AS key FROM {source} WHERE {DECISION_ID} IS NOT NULL "
            f"AND {EPISODE_ID} NOT IN (SELECT key FROM chosen) AND {SOURCE_EPISODE_ID} IN "
            f"(SELECT {SOURCE_EPISODE_ID} FROM {source} "
            f"WHERE {EPISODE_ID} IN (SELECT key FROM chosen))",
        )
    return _with_unrewarded(dataset.decisions.snapshot(), served, others)


def set_aside_of(dataset: Dataset, steps: TableSnapshot, episodes: pa.Array) -> pa.Array:
    """Return the ids of decisions of quarantined episodes that have not become steps since."""
    none = pa.array([], pa.string())
    if not len(episodes) or not dataset.rejected.exists():
        return none
    snapshot = dataset.rejected.snapshot()
    if not snapshot.files:
        return none
    tables = {"chosen": pa.table({"key": episodes})}
    with fetch_files(snapshot, snapshot.files) as paths, scan_connection(tables) as connection:
        rows = query_arrow(
            connection,
            f"SELECT DISTINCT json_extract_string(row, '$.{DECISION_ID}') AS key "
            f"FROM {from_clause(snapshot, paths)} WHERE {EPISODE_ID} IN (SELECT key FROM chosen) "
            f"AND list_has_any(checks, ['{REWARD_CHECK}', '{STEP_CHECK}']) AND key IS NOT NULL",
        )
    keys = rows.column("key").combine_chunks()
    if DECISION_ID not in steps.schema.names:
        return keys
    written = _find_written(steps, keys, DECISION_ID)
    return keys.filter(pc.invert(pc.is_in(keys, value_set=written)))


def _with_unrewarded(decisions: TableSnapshot, served: pa.Table, others: pa.Table) -> pa.Array:
    """Return served ids, and those of the same client episode up to the last of them.

    `others` belong to episodes that stay: a client may use one id for several.
    """
    if not decisions.files:
        return served.column("key").combine_chunks()
    tables = {"served": served, "others": others}
    with fetch_files(decisions, decisions.files) as paths, scan_connection(tables) as connection:
        source = from_clause(decisions, paths)
        last = (
            f"SELECT {EPISODE_ID} AS episode, max({TIMESTAMP}) AS until FROM {source} "
            f"WHERE {DECISION_ID} IN (SELECT key FROM served) AND {EPISODE_ID} IS NOT NULL "
            "GROUP BY episode"
        )
        rows = query_arrow(
            connection,
            f"SELECT {DECISION_ID} AS key FROM {source} JOIN ({last}) "
            f"ON {EPISODE_ID} = episode AND {TIMESTAMP} <= until "
            f"WHERE {DECISION_ID} NOT IN (SELECT key FROM others) UNION SELECT key FROM served",
        )
    return rows.column("key").combine_chunks()


def _hits(snapshot: TableSnapshot, column: str, keys: pa.Array) -> list[tuple[FileEntry, int]]:
    """Return the shards that hold such rows, and how many each."""
    with (
        fetch_files(snapshot, snapshot.files) as paths,
        scan_connection({"keys": pa.table({"key": keys})}) as connection,
    ):
        rows = query_rows(
            connection,
            f"SELECT file_index, count(*) FROM {from_clause(snapshot, paths)} "
            f'WHERE "{column}" IN (SELECT key FROM keys) GROUP BY file_index ORDER BY file_index',
        )
    return [(snapshot.files[index], num) for index, num in rows]


def _without(column: str, keys: pa.Array) -> Any:
    return lambda rows: rows.filter(pc.invert(pc.is_in(rows.column(column), value_set=keys)))


def count_named_reports(dataset: Dataset, keys: pa.Array) -> int:
    """Return how many reports `remove_named_reports` would remove."""
    if not len(keys) or not _has_named_reports(dataset):
        return 0
    return sum(map(len, _find_named_reports(dataset, keys, dataset.rewards.snapshot()).values()))


def remove_named_reports(dataset: Dataset, keys: pa.Array, operation: str) -> int:
    """Remove the reports that name decisions otherwise than by id; return how many.

    The decisions have to be there still: afterwards nothing tells whose they were.
    """
    if not len(keys) or not _has_named_reports(dataset):
        return 0
    num_rows = 0

    def plan(snapshot: TableSnapshot) -> RewritePlan:
        nonlocal num_rows
        reports = _find_named_reports(dataset, keys, snapshot)
        num_rows = sum(map(len, reports.values()))
        return RewritePlan({entry: _drop_rows(rows) for entry, rows in reports.items()})

    producer = f"{operation.lower()}/{new_ulid()}"
    rewrite(dataset.rewards, plan, producer=producer, sequence=0, operation=operation)
    return num_rows


def _has_named_reports(dataset: Dataset) -> bool:
    if not dataset.decisions.exists() or not dataset.rewards.exists():
        return False
    rewards = dataset.rewards.snapshot()
    return REQUEST_ID in rewards.schema.names and bool(rewards.files)


def _find_named_reports(
    dataset: Dataset, keys: pa.Array, rewards: TableSnapshot
) -> dict[FileEntry, list[int]]:
    """Return which rows of which files are such reports."""
    decisions = dataset.decisions.snapshot()
    has_step = STEP in decisions.schema.names  # not in a lake that no newer server has served
    names = [DECISION_ID, REQUEST_ID, EPISODE_ID, TIMESTAMP, *([STEP] if has_step else [])]
    tables = {"keys": pa.table({"key": keys}), "decisions": decisions.read(names)}
    by_entry: dict[FileEntry, list[int]] = {}
    with fetch_files(rewards, rewards.files) as paths, scan_connection(tables) as connection:
        for name, other in ((REQUEST_ID, "true"), (EPISODE_ID, f"r.{REQUEST_ID} IS NULL")):
            query_rows(
                connection,
                f"CREATE OR REPLACE TEMP TABLE named AS SELECT {name} AS name, {DECISION_ID}, "
                f"{TIMESTAMP}, {STEP if has_step else 'NULL::INT'} AS {STEP} "
                f"FROM decisions WHERE {name} IS NOT NULL",
            )
            is_numbered = f"{STEP} IS NOT NULL" if name == EPISODE_ID else "false"
            query_rows(
                connection,
                f"CREATE OR REPLACE TEMP TABLE numbered AS SELECT * FROM named WHERE {is_numbered}",
            )
            source = from_clause(rewards, paths)
            text = _NAMED_REPORTS_SQL.format(
                rewards=source, name=name, time=TIMESTAMP, key=DECISION_ID, other=other, step=STEP
            )
            for index, row in query_rows(connection, text):
                by_entry.setdefault(rewards.files[index], []).append(row)
    return by_entry


def _drop_rows(rows: list[int]) -> ChangeRows:
    def change(table: pa.Table) -> pa.Table:
        mask = np.ones(table.num_rows, bool)
        mask[rows] = False
        return table.filter(pa.array(mask))

    return change


def select_waiting(dataset: Dataset, steps: TableSnapshot, condition: str) -> pa.Array:
    """Return the ids of received episodes of which no step is in the dataset yet.

    Those that a condition over `episodes` selects, in DuckDB's spelling. Raises: QueryError.
    """
    if not dataset.received.exists():
        return pa.array([], pa.string())
    ids = select_received(dataset.received.snapshot(), condition)
    return ids.filter(pc.invert(pc.is_in(ids, value_set=_find_written(steps, ids))))


def select_received(received: TableSnapshot, condition: str) -> pa.Array:
    """Return the ids of the episodes among received steps that a condition selects."""
    return select_episode_keys(received, condition).column(EPISODE_ID).combine_chunks().unique()


def count_received(dataset: Dataset, keys: pa.Array) -> int:
    """Return how many rows `remove_received` would remove."""
    return count_rows(dataset.received, EPISODE_ID, keys)


def remove_received(dataset: Dataset, keys: pa.Array, operation: str) -> int:
    """Remove the received steps of episodes, by episode id; return how many.

    Done before the steps leave the dataset: `feedback join` would bring them back otherwise.
    """
    return remove_rows(dataset.received, EPISODE_ID, keys, operation)


def find_written_received(dataset: Dataset, steps: TableSnapshot, episodes: pa.Array) -> pa.Array:
    """Return those of the ids that have both received steps and steps in the dataset."""
    if not len(episodes) or not dataset.received.exists():
        return pa.array([], pa.string())
    received = dataset.received.snapshot()
    return _find_written(steps, _find_written(received, episodes))


def _find_written(steps: TableSnapshot, keys: pa.Array, column: str = EPISODE_ID) -> pa.Array:
    """Return those of the keys that a column of a table of steps holds, each once."""
    if not steps.files or not len(keys):
        return pa.array([], pa.string())
    tables = {"keys": pa.table({"key": keys})}
    with fetch_files(steps, steps.files) as paths, scan_connection(tables) as connection:
        rows = query_arrow(
            connection,
            f"SELECT DISTINCT {column} AS key FROM {from_clause(steps, paths)} "
            f"WHERE {column} IN (SELECT key FROM keys)",
        )
    return rows.column("key").combine_chunks()


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
    surely, maybe = bind_condition(condition, _KNOWN)
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
        matches = query_arrow(
            connection,
            f"SELECT {EPISODE_ID} AS key, bool_or(coalesce({surely}, false)) AS selected, "
            f"bool_or(coalesce({maybe}, false)) AS possible FROM {view} GROUP BY key",
        )
    keys, selected = matches.column("key"), matches.column("selected")
    undecided = pc.and_not(matches.column("possible"), selected)
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
        rows = query_arrow(
            connection,
            f"SELECT {EPISODE_ID} AS key FROM {from_clause(snapshot, paths)} GROUP BY key "
            f"HAVING max(epoch_us(ingested_at)) < {cutoff_us}",
        )
    return rows.column("key").combine_chunks()


def count_rejected(dataset: Dataset, keys: pa.Array) -> int:
    """Return how many rows `remove_rejected` would remove."""
    return count_rows(dataset.rejected, EPISODE_ID, keys)


def remove_rejected(dataset: Dataset, keys: pa.Array, operation: str) -> int:
    """Remove the quarantined rows of episodes, by episode id; return how many."""
    return remove_rows(dataset.rejected, EPISODE_ID, keys, operation)
