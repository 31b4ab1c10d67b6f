"""Removal: planning that rows leave the tables of a dataset, as trim, delete and purge do it.

Of steps, of decisions with the rewards given for them, of received steps and of quarantined rows:
which are those of some episodes, and how they leave.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.schema import (
    EPISODE_ID,
    SOURCE_EPISODE_ID,
    STEP,
    TIMESTAMP,
    TRACE_ID,
)
from replaylake.datastore.feedback.decisions import DECISION_ID, REQUEST_ID
from replaylake.datastore.feedback.segments import journal_folder, recover
from replaylake.datastore.feedback.set_aside import REWARD_CHECK, STEP_CHECK
from replaylake.datastore.interchange.ingest.received_spans import encode_spans
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.tombstones import Tombstones, identify, list_texts, merge_subjects
from replaylake.datastore.maintenance.episode_condition import EpisodeCondition
from replaylake.datastore.names import new_ulid
from replaylake.datastore.query.conditions import quantify, split_condition
from replaylake.datastore.query.episode_views import episodes_sql, group_rows_sql
from replaylake.datastore.query.expressions import (
    bind_condition,
    read_equalities,
    select_episode_keys,
)
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_arrow,
    query_rows,
    scan_connection,
)
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.delta_schema import FIELD_ID, plain_type, to_duckdb
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
# The columns of every dataset's steps that rows of quarantine are given.
_ALWAYS_THERE: Final = frozenset(
    (
        schema.EPISODE_ID,
        schema.AGENT_ID,
        schema.SOURCE_EPISODE_ID,
        schema.STEP,
        schema.ENV_STEP,
        schema.REWARD,
        schema.TERMINATED,
        schema.TRUNCATED,
        schema.TIMESTAMP,
        schema.POLICY,
        schema.POLICY_VERSION,
    )
)
_ABSENT_FIELD: Final = 1_000_000
# Where a column of a row is known, as an SQL condition.
_ROW_KNOWN: Final = {
    schema.EPISODE_ID: "true",
    schema.AGENT_ID: "true",
    schema.SOURCE_EPISODE_ID: "true",
    schema.POLICY: f'"{schema.POLICY} is known"',
    schema.POLICY_VERSION: f'"{schema.POLICY_VERSION} is known"',
}
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
    hits = count_hits(snapshot, column, keys)
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


def count_hits(snapshot: TableSnapshot, column: str, keys: pa.Array) -> list[tuple[FileEntry, int]]:
    """Return the shards that hold rows whose `column` is among `keys`, and how many each."""
    if not len(keys) or not snapshot.files:
        return []
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


def find_subjects(
    dataset: Dataset, condition: EpisodeCondition, *, columns: Collection[str]
) -> dict[str, list[str]]:
    """Return by column the values by which a condition selects, where it selects by nothing else.

    Of further columns, and of those standard ones that are in `columns`. As text of the column's
    type; of a column whose type `list_texts` does not take, none.
    """
    types = dataset.snapshot().table.schema
    names = {name.lower(): name for name in types.names}
    found = {name.lower(): list(values) for name, values in condition.values.items()}
    asked = {
        names[column]: values
        for column, values in (found or read_equalities(condition.sql)).items()
        if column in names and (column in columns or names[column] not in schema.STANDARD_COLUMNS)
    }
    return {name: _cast_texts(values, types.field(name).type) for name, values in asked.items()}


def _cast_texts(texts: list[str], kind: pa.DataType) -> list[str]:
    """Return the values that texts mean in a column, in the spelling that its rows are read in."""
    kind = plain_type(kind)
    if pa.types.is_string(kind):
        return texts
    given = pa.table({"text": pa.array(texts, pa.string())})
    with scan_connection({"given": given}) as connection:
        # What is no such number is in no row.
        cast = f"SELECT try_cast(text AS {to_duckdb(kind)}) AS value FROM given"
        return list_texts(query_arrow(connection, cast)["value"]) or []


def find_identities(dataset: Dataset, episodes: pa.Array) -> dict[str, list[str]]:
    """Return the ids by which episodes can be told when they are sent again. Cost: scans of ids."""
    found = []
    for table in (dataset.table, dataset.received, dataset.rejected):
        if len(episodes) and table.exists():
            for batch in table.snapshot().batches([EPISODE_ID, SOURCE_EPISODE_ID]):
                mine = pc.is_in(batch.column(EPISODE_ID), value_set=episodes)
                found.append(identify(batch.filter(mine)))
    return merge_subjects(*found)


@dataclass(frozen=True)
class ReturnedIds:
    """What was deleted before and is there again: ids of episodes, and of decisions."""

    episodes: pa.Array
    decisions: pa.Array


def find_returned(dataset: Dataset) -> ReturnedIds:
    """Return what the newest version has of what was deleted, as after a backup was restored."""
    episodes, decisions = [_NONE], [_NONE]
    for table in (dataset.table, dataset.received, dataset.rejected):
        if len(dataset.tombstones) and table.exists():
            episodes.append(find_deleted_episodes(dataset.tombstones, table.snapshot()))
    if len(dataset.tombstones) and dataset.decisions.exists():
        for batch in dataset.decisions.snapshot().batches([DECISION_ID, EPISODE_ID]):
            gone = pa.array(dataset.tombstones.find(batch, {SOURCE_EPISODE_ID: EPISODE_ID}))
            decisions.append(batch.column(DECISION_ID).filter(gone).combine_chunks())
    arrays = (pa.chunked_array(one, pa.string()) for one in (episodes, decisions))
    return ReturnedIds(*(one.combine_chunks().unique() for one in arrays))


def find_deleted_episodes(tombstones: Tombstones, snapshot: TableSnapshot) -> pa.Array:
    """Return the ids of a snapshot's episodes that were deleted. Cost: a scan of those columns."""
    found = [_NONE]
    if len(tombstones):
        names = {EPISODE_ID, *tombstones.columns} & set(snapshot.schema.names)
        for batch in snapshot.batches(sorted(names)):
            gone = pa.array(tombstones.find(batch))
            found.append(batch.column(EPISODE_ID).filter(gone).combine_chunks())
    return pa.chunked_array(found, pa.string()).combine_chunks().unique()


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


def select_waiting(dataset: Dataset, steps: TableSnapshot, condition: EpisodeCondition) -> pa.Array:
    """Return the ids of received episodes of which no step is in the dataset yet.

    Those that a condition over `episodes` selects. Raises: QueryError.
    """
    if not dataset.received.exists():
        return pa.array([], pa.string())
    ids = select_received(dataset.received.snapshot(), condition)
    return ids.filter(pc.invert(pc.is_in(ids, value_set=_find_written(steps, ids))))


def select_received(received: TableSnapshot, condition: EpisodeCondition) -> pa.Array:
    """Return the ids of the episodes among received steps that a condition selects.

    A column of the log, which received steps lack, is NULL, as it will be once they are joined.
    """
    return select_ids(received, condition)


def select_ids(steps: TableSnapshot, condition: EpisodeCondition) -> pa.Array:
    """Return the ids of the episodes that a condition selects among steps, each once.

    A column that the condition takes from steps and that this version lacks is NULL.
    """
    names = {name.lower() for name in steps.schema.names}
    absent = [name for name in condition.step_types if name.lower() not in names]
    fields = [
        # No file has a column of such a number.
        pa.field(name, pa.string(), metadata={FIELD_ID: str(_ABSENT_FIELD + place)})
        for place, name in enumerate(absent)
    ]
    schema_with_all = pa.schema([*steps.schema, *fields])
    keys = select_episode_keys(
        replace(steps, schema=schema_with_all), condition.sql, condition.tables
    )
    return keys.column(EPISODE_ID).combine_chunks().unique()


def count_received(dataset: Dataset, keys: pa.Array) -> int:
    """Return how many rows `remove_received` would remove."""
    return count_rows(dataset.received, EPISODE_ID, keys)


def remove_received(dataset: Dataset, keys: pa.Array, operation: str) -> int:
    """Remove the received steps of episodes, by episode id; return how many.

    Done before the steps leave the dataset: `feedback join` would bring them back otherwise.
    """
    return remove_rows(dataset.received, EPISODE_ID, keys, operation)


def recover_spans(dataset: Dataset) -> None:
    """Commit the spans that killed servers had received and not yet committed."""
    if dataset.spans.exists() and journal_folder(dataset.spans).is_dir():
        recover(dataset.spans, encode_spans)


def remove_spans(dataset: Dataset, steps: TableSnapshot, episodes: pa.Array, operation: str) -> int:
    """Remove the received spans of episodes, before their steps; return how many.

    All spans of the traces that the steps were made of: their sessions would come back otherwise.
    """
    if not len(episodes) or not dataset.spans.exists() or TRACE_ID not in steps.schema.names:
        return 0
    if not steps.files:
        return 0
    tables = {"keys": pa.table({"key": episodes})}
    with fetch_files(steps, steps.files) as paths, scan_connection(tables) as connection:
        rows = query_arrow(
            connection,
            f"SELECT DISTINCT {TRACE_ID} AS key FROM {from_clause(steps, paths)} "
            f"WHERE {TRACE_ID} IS NOT NULL AND {EPISODE_ID} IN (SELECT key FROM keys)",
        )
    return remove_rows(dataset.spans, TRACE_ID, rows.column("key").combine_chunks(), operation)


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


def select_rejected(snapshot: TableSnapshot, condition: EpisodeCondition) -> RejectedEpisodes:
    """Return the quarantined episodes that a condition over `episodes` selects.

    Their ids, num_steps, policy and its versions are known, and the columns of the log, as far as
    their rows tell; all else is not. The policy is not where the log did not say which column it
    is, or where the rows of an episode have several. Raises: QueryError.
    """
    if not (entries := snapshot.files):
        return RejectedEpisodes(_NONE, _NONE)
    part = split_condition(condition.sql, condition.step_types)
    own = {name: kind for name, kind in condition.step_types.items() if name not in _ALWAYS_THERE}
    is_known = {name: f'"{name} is known"' for name in own if name in condition.scalars}
    row_known = {name.lower(): flag for name, flag in is_known.items()}
    known = {**_KNOWN, **row_known}
    known |= {name: f'("{name} surely" = "{name} possibly")' for name in part.quantified}
    bounds = {name: (f'"{name} surely"', f'"{name} possibly"') for name in part.quantified}
    surely, maybe = bind_condition(part.where, known, bounds)
    policy_kinds = {schema.POLICY: "VARCHAR", schema.POLICY_VERSION: "BIGINT"}
    asked = f"{maybe} {part.quantified}"
    logged = [
        f"{_extract_field(snapshot, name, kind)} AS {name}, "
        f'{_is_field_known(snapshot, name, kind)} AS "{name} is known"'
        # A row of frames takes long to parse: only where the condition asks.
        if name in asked
        else f'CAST(NULL AS {kind}) AS {name}, false AS "{name} is known"'
        for name, kind in policy_kinds.items()
    ]
    logged += [
        f'{_extract_field(snapshot, name, kind)} AS "{name}", '
        f'{_is_field_known(snapshot, name, kind)} AS "{name} is known"'
        if name in is_known
        else f'CAST(NULL AS {kind}) AS "{name}", false AS "{name} is known"'
        for name, kind in own.items()
    ]
    with (
        fetch_files(snapshot, entries) as paths,
        scan_connection(condition.tables, is_private=True) as connection,
    ):
        rows = f"SELECT {_AS_STEPS}, {', '.join(logged)} FROM {from_clause(snapshot, paths)}"
        connection.execute(f"CREATE TEMP TABLE rows AS {rows}")
        # The condition is somebody's text.
        connection.execute("SET enable_external_access = false")
        key = f"{EPISODE_ID}, {schema.AGENT_ID}"
        columns = [
            f'bool_and("{name} is known") AND count(DISTINCT "{name}") <= 1 '
            f'AND count("{name}") IN (0, count(*)) AS "{name} is known"'
            for name in (*policy_kinds, *own)
        ]
        columns += [f'any_value("{name}") AS "{name}"' for name in own]
        for name, (word, sql) in part.quantified.items():
            columns += _bound_quantifier(name, word, sql, row_known)
        flags = f"SELECT {key}, {', '.join(columns)} FROM rows GROUP BY {key}"
        view = f"({episodes_sql(group_rows_sql('rows'))}) AS episodes JOIN ({flags}) USING ({key})"
        matches = query_arrow(
            connection,
            # Aliases with a space: the log may have columns of any other name.
            f'SELECT {EPISODE_ID}, bool_or(coalesce({surely}, false)) AS "is selected", '
            f'bool_or(coalesce({maybe}, false)) AS "is possible" FROM {view} GROUP BY {EPISODE_ID}',
        )
    keys, selected = matches.column(EPISODE_ID), matches.column("is selected")
    undecided = pc.and_not(matches.column("is possible"), selected)
    parts = (keys.filter(mask).combine_chunks() for mask in (selected, undecided))
    return RejectedEpisodes(*parts)


def _bound_quantifier(name: str, word: str, sql: str, is_known: Mapping[str, str]) -> list[str]:
    """Return columns that tell whether any() or all() surely holds, and whether it possibly does.

    A row of which the condition asks what is not known counts for one as if it were false, and for
    the other as if it were true.
    """
    surely, possibly = bind_condition(sql, {**_ROW_KNOWN, **is_known})
    return [
        f'{quantify(word, surely)} AS "{name} surely"',
        f'{quantify(word, possibly)} AS "{name} possibly"',
        f'{quantify(word, surely)} AS "{name}"',
    ]


def _extract_field(snapshot: TableSnapshot, name: str, kind: str) -> str:
    """Return the value that a row of the log has for a field of ours."""
    pointer = _point_to_field(snapshot, name)
    return f'TRY_CAST(json_extract_string("row", {pointer}) AS {kind})'


def _is_field_known(snapshot: TableSnapshot, name: str, kind: str) -> str:
    """Return whether a row of the log says what its field of ours is, be it NULL."""
    pointer = _point_to_field(snapshot, name)
    is_there = f'json_type("row", {pointer}) IS NOT NULL'
    if "mapping" in snapshot.schema.names and name in _ALWAYS_THERE:
        is_there = f"(mapping IS NOT NULL OR {is_there})"
    value = _extract_field(snapshot, name, kind)
    is_of_kind = f'(json_extract_string("row", {pointer}) IS NULL OR {value} IS NOT NULL)'
    return f'("row" IS NOT NULL AND {is_there} AND {is_of_kind})'


def _point_to_field(snapshot: TableSnapshot, name: str) -> str:
    """Return the JSON pointer to a field of ours in `row`; NULL if the log has no such column."""
    if "mapping" not in snapshot.schema.names or name not in _ALWAYS_THERE:
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
