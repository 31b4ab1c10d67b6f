"""SQL over snapshots: DuckDB views on exactly the files of a version, for one SELECT at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import duckdb
import pyarrow as pa

from replaylake.datastore import schema
from replaylake.datastore.delta_schema import field_id, to_duckdb
from replaylake.datastore.errors import NotFound, QueryFailed, QueryRefused
from replaylake.datastore.shard import check_present
from replaylake.datastore.table import TableSnapshot

_LAKE_VIEWS: Final = ("commits", "datasets", "policies", "runs", "shards")
_STEP_VIEWS: Final = ("steps", "episodes", "transitions")
_FEEDBACK_VIEWS: Final = ("decisions", "rewards")
_DATASET_VIEWS: Final = (*_STEP_VIEWS, *_FEEDBACK_VIEWS)

# One row per episode and agent. arg_max by step picks what the last row says.
_EPISODES: Final = f"""
SELECT {schema.EPISODE_ID}, {schema.AGENT_ID},
       count(*) AS num_steps,
       sum({schema.REWARD}) AS "return",
       bool_or({schema.TERMINATED}) AS terminated,
       bool_or({schema.TRUNCATED}) AS truncated,
       bool_or({schema.TERMINATED} OR {schema.TRUNCATED}) AS complete,
       min({schema.STEP}) AS first_step,
       arg_max({schema.POLICY}, {schema.STEP}) AS policy,
       min({schema.POLICY_VERSION}) AS min_policy_version,
       max({schema.POLICY_VERSION}) AS max_policy_version,
       min({schema.TIMESTAMP}) AS started_at,
       max({schema.TIMESTAMP}) AS ended_at,
       any_value({schema.SOURCE_EPISODE_ID}) AS {schema.SOURCE_EPISODE_ID}
FROM {{steps}}
GROUP BY {schema.EPISODE_ID}, {schema.AGENT_ID}
"""

# The rule of ARCHITECTURE.md's data model: the following row counts only if it is the next
# step of the same episode and agent, and this row has not ended.
# The names with spaces are of no dataset's columns.
_TRANSITIONS: Final = f"""
SELECT * EXCLUDE ("next step", "following observation"),
       CASE WHEN {schema.FINAL_OBSERVATION} IS NOT NULL THEN {schema.FINAL_OBSERVATION}
            WHEN NOT {schema.TERMINATED} AND NOT {schema.TRUNCATED}
                 AND "next step" = {schema.STEP} + 1 THEN "following observation"
       END AS next_observation
FROM (
    SELECT *,
           lead({schema.STEP}) OVER following AS "next step",
           lead({schema.OBSERVATION}) OVER following AS "following observation"
    FROM {{steps}}
    WINDOW following AS (PARTITION BY {schema.EPISODE_ID}, {schema.AGENT_ID} ORDER BY {schema.STEP})
)
"""


class Catalog(Protocol):
    """Finds what a query names."""

    def datasets(self) -> list[str]:
        """Return the names of all datasets."""
        ...

    def table(self, dataset: str, view: str) -> TableSnapshot | None:
        """Return the pinned table behind a view (steps, decisions or rewards); None if none."""
        ...

    def relation(self, name: str) -> pa.Table | None:
        """Return a lake-wide relation such as `policies`; None if there is no such name."""
        ...


def run(query: str, catalog: Catalog, parameters: Mapping[str, object] | None = None) -> pa.Table:
    """Run one SELECT with `$name` parameters and return Arrow.

    Raises: QueryRefused if it is not one SELECT, QueryFailed with DuckDB's own words, NotFound if
    it names a dataset or view that does not exist, ShardCorrupt if a file of one is missing.
    """
    with connect() as connection:
        check_select(connection, query)
        _create_views(connection, query, catalog)
        return execute(connection, query, parameters)


def connect() -> duckdb.DuckDBPyConnection:
    """Open an in-memory DuckDB that downloads nothing and does not see Python variables."""
    connection = duckdb.connect(
        config={"autoinstall_known_extensions": False, "autoload_known_extensions": False}
    )
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET enable_progress_bar = false")
    return connection


def check_select(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """Refuse what is not exactly one SELECT. Raises: QueryRefused, QueryFailed."""
    try:
        statements = connection.extract_statements(query)
    except duckdb.Error as error:
        raise QueryFailed(_first_line(error)) from error
    kinds = [statement.type.name for statement in statements]
    if kinds != ["SELECT"]:
        raise QueryRefused(
            f"query: found {', '.join(kinds) or 'no statement'}, expected one SELECT. "
            "SQL reads the lake; use the other commands to change it."
        )


def execute(
    connection: duckdb.DuckDBPyConnection,
    query: str,
    parameters: Mapping[str, object] | None = None,
) -> pa.Table:
    """Run a query and return all its rows. Raises: QueryFailed."""
    try:
        relation = connection.sql(query, params=dict(parameters) if parameters else None)
        return relation.to_arrow_table() if relation is not None else pa.table({})
    except (duckdb.Error, pa.ArrowException) as error:
        raise QueryFailed(_first_line(error)) from error


def create_dataset_views(
    connection: duckdb.DuckDBPyConnection, prefix: str, steps: TableSnapshot
) -> None:
    """Create steps, episodes and transitions, each named `<prefix><view>`."""
    source = scan(steps)
    steps_view = f"{prefix}steps"
    execute(connection, f"CREATE VIEW {steps_view} AS SELECT * FROM {source}")
    execute(connection, f"CREATE VIEW {prefix}episodes AS {_EPISODES.format(steps=steps_view)}")
    transitions = _TRANSITIONS.format(steps=steps_view)
    execute(connection, f"CREATE VIEW {prefix}transitions AS {transitions}")


def scan(snapshot: TableSnapshot) -> str:
    """Return a FROM item over exactly the snapshot's files, columns matched by field id.

    Inferring columns from the first file would hide those that later appends added.
    Raises: ShardCorrupt if a file is not there.
    """
    for path in snapshot.paths():
        check_present(path)
    columns = ", ".join(
        f"{field_id(field)}: {{name: {literal(field.name)}, "
        f"type: {literal(to_duckdb(field.type))}, default_value: NULL}}"
        for field in snapshot.schema
    )
    if not snapshot.files:
        nulls = ", ".join(
            f'CAST(NULL AS {to_duckdb(field.type)}) AS "{field.name}"' for field in snapshot.schema
        )
        return f"(SELECT {nulls} WHERE false)"
    paths = ", ".join(literal(str(path)) for path in snapshot.paths())
    source = f"read_parquet([{paths}], schema = map {{{columns}}})"
    # DuckDB 2.0 fails on a field of a struct that some file lacks (its issue 24253), unless an
    # expression keeps it from reading that field alone. Only nullable columns may be absent.
    structs = [f.name for f in snapshot.schema if f.nullable and pa.types.is_struct(f.type)]
    kept = ", ".join(f'coalesce("{name}", NULL) AS "{name}"' for name in structs)
    return f"(SELECT * REPLACE ({kept}) FROM {source})" if structs else source


def parse(connection: duckdb.DuckDBPyConnection, query: str) -> Any:
    """Return DuckDB's parse tree of one SELECT. Raises: QueryFailed."""
    text = execute(connection, "SELECT json_serialize_sql($q) AS j", {"q": query})["j"][0].as_py()
    tree = json.loads(text)
    if tree.get("error"):
        raise QueryFailed(f"{query!r}: {tree.get('error_message')}")
    return tree


def _create_views(connection: duckdb.DuckDBPyConnection, query: str, catalog: Catalog) -> None:
    """Create only the views that the query names; making all of them is slow in a wide lake."""
    done = set()
    for dataset, view in dict.fromkeys(_named_tables(connection, query)):
        if not dataset:
            relation = catalog.relation(view) if view in _LAKE_VIEWS else None
            if relation is not None:
                connection.register(view, relation)
            else:
                _refuse_without_dataset(view, catalog)
        elif view in _FEEDBACK_VIEWS or view in _STEP_VIEWS:
            made = (dataset, view if view in _FEEDBACK_VIEWS else _STEP_VIEWS)
            if made not in done and (snapshot := catalog.table(dataset, view)) is not None:
                connection.execute(f"CREATE SCHEMA IF NOT EXISTS {dataset}")
                if view in _FEEDBACK_VIEWS:
                    source = scan(snapshot)
                    execute(connection, f"CREATE VIEW {dataset}.{view} AS SELECT * FROM {source}")
                else:
                    create_dataset_views(connection, f"{dataset}.", snapshot)
            done.add(made)
        elif dataset in catalog.datasets():
            raise NotFound(
                f"{dataset}.{view}: found no such view, expected {', '.join(_DATASET_VIEWS)}."
            )


def _refuse_without_dataset(view: str, catalog: Catalog) -> None:
    """Refuse a dataset's view, or a dataset, alone: DuckDB would suggest tables of its own."""
    names = catalog.datasets()
    if view not in (*_DATASET_VIEWS, *names):
        return
    if view in names:
        expected = f"one of its views, such as {view}.steps"
    elif names:
        expected = f"the dataset before it: {', '.join(f'{name}.{view}' for name in names[:5])}"
    else:
        expected = f"<dataset>.{view}, and this lake has no dataset yet: ingest one"
    raise NotFound(f"{view}: found no such view of the lake, expected {expected}.")


def _named_tables(connection: duckdb.DuckDBPyConnection, query: str) -> Iterator[tuple[str, str]]:
    """Yield (dataset or "", view) for each base table of the query, as SQL folds their case.

    Those that the query defines itself with WITH are left out.
    """
    nodes = list(walk(parse(connection, query)))
    own = {
        str(entry["key"]).lower()
        for node in nodes
        if isinstance(entries := node.get("cte_map"), dict)
        for entry in entries.get("map", ())
    }
    for node in nodes:
        if node.get("type") == "BASE_TABLE":
            dataset, view = node.get("schema_name", "").lower(), node["table_name"].lower()
            if dataset or view not in own:
                yield "" if dataset == "main" else dataset, view


def walk(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of a parse tree."""
    if isinstance(node, dict):
        yield node
        for child in node.values():
            yield from walk(child)
    elif isinstance(node, list):
        for child in node:
            yield from walk(child)


def literal(text: str) -> str:
    """Return an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def _first_line(error: Exception) -> str:
    """DuckDB's message without the echo of the query that follows it."""
    return " ".join(str(error).split("\n\n")[0].split())
