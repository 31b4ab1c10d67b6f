"""SQL expressions that select episodes and reward steps, refused if they cannot be reproduced."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.errors import QueryRefusedError
from replaylake.datastore.query.connections import connect, session
from replaylake.datastore.query.statements import check_select, execute, literal, parse, walk
from replaylake.datastore.query.views import create_dataset_views
from replaylake.datastore.storage.arrow_values import combine_chunks, is_list, numbers
from replaylake.datastore.storage.table.shard import blob_of
from replaylake.datastore.storage.table.table import TableSnapshot

_PREFIX: Final = "SELECT 1 FROM episodes WHERE "
_REFUSED_NODES: Final = {
    "STAR": "*",
    "SUBQUERY": "a subquery",
    "WINDOW": "a window function",
}
# DuckDB takes these for columns until it binds them, or expands them from other functions.
_CLOCKS: Final = {
    "current_date",
    "current_time",
    "current_timestamp",
    "localtime",
    "localtimestamp",
}
_CLOCK_MACROS: Final = {"ago"}


def canonical_expression(expression: str) -> str:
    """Return an SQL expression in DuckDB's own spelling, refusing what cannot be reproduced.

    Raises: QueryRefusedError for random(), now() and the like, subqueries and window functions;
    QueryError if it does not parse.
    """
    if not expression.strip():
        raise QueryRefusedError("expression: found an empty one, expected SQL such as terminated.")
    with session() as connection:
        text = f"{_PREFIX}({expression}\n)"
        check_select(connection, text)
        tree = parse(connection, text)
        if _strip_where(tree) != _strip_where(parse(connection, f"{_PREFIX}true")):
            raise QueryRefusedError(
                f"{expression!r}: found more than an expression, expected one over the columns of "
                "the dataset. Leave out parameters, GROUP BY, UNION and the like."
            )
        _refuse_unreproducible(connection, expression, tree)
        plain = execute(
            connection, "SELECT json_deserialize_sql($j) AS q", {"j": json.dumps(tree)}
        )["q"][0].as_py()
    return str(plain).removeprefix(_PREFIX)


def canonical_reward(reward: str | None) -> str:
    """Return a reward expression in DuckDB's own spelling; None is the stored column, `reward`.

    Two that are equal reward alike. Raises: as canonical_expression.
    """
    sql = schema.REWARD if reward is None else canonical_expression(reward)
    # Names of columns have no case.
    return schema.REWARD if sql.lower() == schema.REWARD else sql


def check_reward(snapshot: TableSnapshot, reward: str) -> None:
    """Bind a reward expression to a snapshot's columns. Raises: QueryError. Cost: reads no row."""
    with reproducible_views(snapshot) as connection:
        execute(connection, f"SELECT CAST(({reward}) AS DOUBLE) AS reward FROM steps LIMIT 0")


def bind_condition(condition: str, known: Mapping[str, str]) -> tuple[str, str]:
    """Return two conditions: one that holds where this one surely does, and one where it may.

    Args:
        condition: over the columns of `episodes`, in DuckDB's spelling.
        known: where a column's value is known, as an SQL condition, by the column's name in small
            letters. The value of a column that is not named here is nowhere known.

    AND, OR and NOT are looked through; what they join is decided where all its columns are known.
    """
    with session() as connection:
        tree = parse(connection, f"{_PREFIX}({condition})")
        select = tree["statements"][0]["node"]

        def spell(node: Any) -> str:
            select["where_clause"] = node
            text = {"j": json.dumps(tree)}
            ast = execute(connection, "SELECT json_deserialize_sql($j) AS q", text)["q"][0]
            return str(ast.as_py()).removeprefix(_PREFIX)

        def bind(node: Any) -> tuple[str, str]:
            if node["class"] == "CONJUNCTION":
                word = " AND " if node["type"] == "CONJUNCTION_AND" else " OR "
                parts = [bind(child) for child in node["children"]]
                surely, maybe = (word.join(side) for side in zip(*parts, strict=True))
                return f"({surely})", f"({maybe})"
            if node["type"] == "OPERATOR_NOT":
                surely, maybe = bind(node["children"][0])
                return f"(NOT {maybe})", f"(NOT {surely})"
            columns = {n["column_names"][-1].lower() for n in walk(node) if "column_names" in n}
            where = " AND ".join(known.get(name, "false") for name in sorted(columns)) or "true"
            text = spell(node)
            return (
                f"(CASE WHEN {where} THEN ({text}) ELSE false END)",
                f"(CASE WHEN {where} THEN ({text}) ELSE true END)",
            )

        return bind(select["where_clause"])


def select_episode_keys(snapshot: TableSnapshot, where: str) -> pa.Table:
    """Return episode_id and agent_id of the episodes that a WHERE over `episodes` selects.

    Raises: QueryError if DuckDB refuses it.
    """
    with reproducible_views(snapshot) as connection:
        return execute(
            connection,
            f"SELECT {schema.EPISODE_ID}, {schema.AGENT_ID} FROM episodes WHERE ({where})",
        )


def evaluate_rewards(snapshot: TableSnapshot, reward: str) -> pa.Table:
    """Return one column `reward` (double) for the rows of all files, in file and row order.

    Raises: QueryError if DuckDB refuses it, QueryRefusedError if it is not one number a row.
    """
    return _evaluate_per_step(snapshot, f"CAST(({reward}) AS DOUBLE) AS reward", f"reward {reward}")


def evaluate_column(snapshot: TableSnapshot, expression: str, name: str) -> NDArray[np.float64]:
    """Evaluate an expression over the columns of `steps` that is a number a row, or a list of them.

    Returns float64 [num_rows], or [num_rows, K] of lists, for the rows of all files, in file and
    row order; NaN where it is NULL. Raises: QueryError if DuckDB refuses it, QueryRefusedError if
    it is not one value a row, or lists of several lengths.
    """
    with reproducible_views(snapshot) as connection:
        kind = execute(connection, f"SELECT ({expression}) AS value FROM steps LIMIT 0")
    if not is_list(kind["value"].type):
        column = _evaluate_per_step(snapshot, f"CAST(({expression}) AS DOUBLE) AS value", name)
        return numbers(column["value"]).astype(np.float64)
    lists = _evaluate_per_step(snapshot, f"CAST(({expression}) AS DOUBLE[]) AS value", name)
    column = combine_chunks(lists["value"])
    known = numbers(pc.is_valid(column))
    sizes = pc.unique(pc.list_value_length(column.drop_null())).to_pylist()
    if len(sizes) > 1:
        raise QueryRefusedError(
            f"{name} {expression}: found lists of {', '.join(map(str, sizes[:4]))} numbers, "
            "expected as many in each row. NULL stands for a list that is missing."
        )
    values = np.full((len(column), sizes[0] if sizes else 0), np.nan)
    values[known] = numbers(pc.list_flatten(column)).reshape(-1, values.shape[1])
    return values


def select_steps(snapshot: TableSnapshot, where_steps: str) -> NDArray[np.bool_]:
    """Return which steps a condition over the columns of `steps` selects; NULL selects none.

    bool [num_rows], for the rows of all files, in file and row order.
    Raises: QueryError if DuckDB refuses it, QueryRefusedError if it is not one value a row.
    """
    flags = _evaluate_per_step(
        snapshot,
        f"coalesce(CAST(({where_steps}) AS BOOLEAN), false) AS selected",
        f"where_steps {where_steps}",
    )
    selected: NDArray[np.bool_] = flags["selected"].to_numpy()
    return selected


def _evaluate_per_step(snapshot: TableSnapshot, selected: str, name: str) -> pa.Table:
    with reproducible_views(snapshot) as connection:
        rows = execute(connection, f"SELECT {selected} FROM steps")
    if rows.num_rows != snapshot.num_rows:
        raise QueryRefusedError(
            f"{name}: found {rows.num_rows} values for {snapshot.num_rows} steps, expected one a "
            "step. Leave out aggregates and unnest."
        )
    return rows


def evaluate_weights(snapshot: TableSnapshot, weight: str, where: str | None = None) -> pa.Table:
    """Return episode_id, agent_id, step and `weight` (double) of steps, in no certain order.

    They are the steps of the episodes that `where` selects, by default of all. `weight` may name
    the columns of `steps` and of the step's row in `episodes`; a name that both have is the step's.
    Raises: QueryError if DuckDB refuses it, QueryRefusedError if it is not one value a step.
    """
    with reproducible_views(snapshot) as connection:
        names = execute(connection, "SELECT * FROM episodes LIMIT 0").column_names
        own = {name.lower() for name in snapshot.schema.names}
        of_episode = "".join(f', "{name}"' for name in names if name.lower() not in own)
        key = f"{schema.EPISODE_ID}, {schema.AGENT_ID}"
        source = (
            f"FROM steps JOIN (SELECT {key}{of_episode} FROM episodes WHERE ({where or 'true'})) "
            f"AS episodes USING ({key})"
        )
        weights = execute(
            connection,
            f"SELECT {key}, {schema.STEP}, CAST(({weight}) AS DOUBLE) AS weight {source}",
        )
        num_steps = execute(connection, f"SELECT count(*) AS num {source}")["num"][0].as_py()
    if weights.num_rows != num_steps:
        raise QueryRefusedError(
            f"weight {weight}: found {weights.num_rows} values for {num_steps} steps, expected one "
            "a step. Leave out unnest."
        )
    return weights


@contextmanager
def reproducible_views(snapshot: TableSnapshot) -> Iterator[duckdb.DuckDBPyConnection]:
    """Lend views that read nothing but the snapshot's files, and always in the same order.

    The last instance is kept for the next use: `where` and `reward` come one after the other. Its
    settings are locked and it is used by one caller at a time, so it stays as it was made.
    """
    paths = [str(path) for path in snapshot.paths()]
    key = (snapshot.version, snapshot.schema, *paths)
    with _lock:
        idle = _idle.pop(key, None)
    connection = _open_views(snapshot, paths) if idle is None else idle
    try:
        yield connection
    finally:
        blobs = [blob_of(snapshot.root, entry) for entry in snapshot.files]
        snapshot.storage.release(blobs)
        with _lock:
            others = list(_idle.values())
            _idle.clear()
            _idle[key] = connection
        for other in others:
            other.close()


_lock = threading.Lock()
# At most one.
_idle: dict[Any, duckdb.DuckDBPyConnection] = {}


def _open_views(snapshot: TableSnapshot, paths: list[str]) -> duckdb.DuckDBPyConnection:
    connection = connect()
    # Sums of floats depend on their order, and a return may lie just at the limit of a condition.
    connection.execute("SET threads = 1")
    create_dataset_views(connection, "", snapshot)
    connection.execute(f"SET allowed_paths = [{', '.join(map(literal, paths))}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _strip_where(tree: Any) -> Any:
    """Return a parsed SELECT without its WHERE and without positions in the text."""
    if isinstance(tree, dict):
        return {
            key: _strip_where(child)
            for key, child in tree.items()
            if key not in ("where_clause", "query_location", "query_location_length")
        }
    return [_strip_where(child) for child in tree] if isinstance(tree, list) else tree


def _refuse_unreproducible(
    connection: duckdb.DuckDBPyConnection, expression: str, tree: Any
) -> None:
    nodes = list(walk(tree))
    kinds = {node.get("class") for node in nodes}
    if names := [name for kind, name in _REFUSED_NODES.items() if kind in kinds]:
        raise QueryRefusedError(
            f"{expression!r}: found {', '.join(names)}, expected an expression over one row's "
            "columns, so that the selection can be reproduced. Add a column when ingesting instead."
        )
    volatile = execute(
        connection,
        "SELECT DISTINCT lower(function_name) AS name FROM duckdb_functions() "
        "WHERE function_type = 'scalar' AND stability <> 'CONSISTENT'",
    )["name"].to_pylist()
    changing = sorted(set(_names(nodes, {*volatile, *_CLOCKS, *_CLOCK_MACROS})))
    if changing:
        raise QueryRefusedError(
            f"{expression!r}: found {', '.join(changing)}, whose value changes between runs, "
            "expected an expression that selects the same rows each time. Write the value out."
        )


def _names(nodes: list[dict[str, Any]], volatile: set[str]) -> Iterator[str]:
    for node in nodes:
        if node.get("class") == "FUNCTION":
            name = node["function_name"].lower()
            # age(t) counts from today, age(t, u) does not.
            if name in volatile or (name == "age" and len(node["arguments"]) == 1):
                yield name
        elif node.get("class") == "COLUMN_REF" and len(node["column_names"]) == 1:
            name = node["column_names"][0].lower()
            if name in _CLOCKS:
                yield name
