"""SQL expressions that select episodes and reward steps, refused if they cannot be reproduced."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.errors import QueryRefusedError
from replaylake.datastore.query.conditions import (
    check_quantifiers,
    episodes_where,
    quote_quantifiers,
)
from replaylake.datastore.query.connections import connect, session
from replaylake.datastore.query.statements import (
    check_select,
    execute,
    find_tables,
    literal,
    parse,
    walk,
    walk_outside_subqueries,
)
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
    return _canonical(expression, expression)


def canonical_condition(condition: str) -> str:
    """Return a condition over episodes in DuckDB's own spelling; see conditions.py for its form.

    Raises: as canonical_expression.
    """
    return _canonical(condition, quote_quantifiers(condition), is_condition=True)


def canonical_removal_condition(
    condition: str, given_tables: Collection[str] = ()
) -> tuple[str, dict[str, str]]:
    """Return a condition over episodes that may have subqueries, and these subqueries by name.

    Each subquery is replaced by one that selects all of a table of that name, but for those over
    `given_tables`. Raises: as canonical_expression.
    """
    subqueries: dict[str, str] = {}

    def replace_subqueries(connection: duckdb.DuckDBPyConnection, tree: Any) -> None:
        for node in walk_outside_subqueries(tree):
            if node.get("class") != "SUBQUERY":
                continue
            text = execute(
                connection,
                "SELECT json_deserialize_sql($j) AS q",
                {"j": json.dumps({"error": False, "statements": [node["subquery"]]})},
            )["q"][0].as_py()
            names = {table for _, table in find_tables(connection, text)}
            if names and names <= set(given_tables):
                continue
            name = f"subquery {len(subqueries) + 1}"
            subqueries[name] = text
            node["subquery"] = parse(connection, f'SELECT * FROM "{name}"')["statements"][0]

    sql = _canonical(
        condition,
        quote_quantifiers(condition),
        is_condition=True,
        replace_subqueries=replace_subqueries,
    )
    return sql, subqueries


def _canonical(
    expression: str,
    sql: str,
    *,
    is_condition: bool = False,
    replace_subqueries: Callable[[duckdb.DuckDBPyConnection, Any], None] | None = None,
) -> str:
    """Return `sql`, which is `expression` with any and all quoted, in DuckDB's own spelling."""
    if not expression.strip():
        raise QueryRefusedError("expression: found an empty one, expected SQL such as terminated.")
    with session() as connection:
        text = f"{_PREFIX}({sql}\n)"
        check_select(connection, text)
        tree = parse(connection, text)
        if _strip_where(tree) != _strip_where(parse(connection, f"{_PREFIX}true")):
            raise QueryRefusedError(
                f"{expression!r}: found more than an expression, expected one over the columns of "
                "the dataset. Leave out parameters, GROUP BY, UNION and the like."
            )
        if replace_subqueries is not None:
            replace_subqueries(connection, tree["statements"][0]["node"]["where_clause"])
        allowed = set() if replace_subqueries is None else {"SUBQUERY"}
        _refuse_unreproducible(connection, expression, tree, allowed)
        if is_condition:
            check_quantifiers(expression, tree)
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


def bind_condition(
    condition: str,
    known: Mapping[str, str],
    bounds: Mapping[str, tuple[str, str]] | None = None,
) -> tuple[str, str]:
    """Return two conditions: one that holds where this one surely does, and one where it may.

    Args:
        condition: over the columns of `episodes`, in DuckDB's spelling.
        known: where a column's value is known, as an SQL condition, by the column's name in small
            letters. The value of a column that is not named here is nowhere known.
        bounds: such a pair for columns that are conditions themselves, by name.

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
            if bounds and node["class"] == "COLUMN_REF" and node["column_names"][-1] in bounds:
                return bounds[node["column_names"][-1]]
            columns = {
                _named_column(n["column_names"])[0] for n in walk(node) if "column_names" in n
            }
            where = " AND ".join(known.get(name, "false") for name in sorted(columns)) or "true"
            text = spell(node)
            return (
                f"(CASE WHEN {where} THEN ({text}) ELSE false END)",
                f"(CASE WHEN {where} THEN ({text}) ELSE true END)",
            )

        return bind(select["where_clause"])


def read_equalities(condition: str) -> dict[str, list[str]]:
    """Return the values that a condition asks of columns, as text, where it asks nothing else.

    By column, in small letters. A condition such as `a = 'x' OR b IN ('y', 4)` selects all that has
    one of the values, and so does `any(a = 'x')`. Any other, be it narrower or wider, gives no
    column. `condition` is in DuckDB's spelling.
    """
    with session() as connection:
        tree = parse(connection, f"{_PREFIX}({condition})")
    values: dict[str, list[str]] = {}
    nodes = [tree["statements"][0]["node"]["where_clause"]]
    while nodes:
        node = nodes.pop()
        if node["type"] == "CONJUNCTION_OR":
            nodes += node["children"]
            continue
        if node["class"] == "FUNCTION" and node["function_name"].lower() == "any":
            nodes += [argument["expression"] for argument in node["arguments"]]
            continue
        if node["type"] == "COMPARE_EQUAL":
            sides = [node["left"], node["right"]]
            sides.sort(key=lambda side: str(side["class"]) != "COLUMN_REF")
        else:
            sides = node["children"] if node["type"] == "COMPARE_IN" else []
        texts = [_read_constant(side) for side in sides[1:]]
        if not texts or None in texts or sides[0]["class"] != "COLUMN_REF":
            return {}
        column, is_field = _named_column(sides[0]["column_names"])
        if is_field:
            return {}
        values.setdefault(column, []).extend(text for text in texts if text is not None)
    return values


def _named_column(path: Sequence[str]) -> tuple[str, bool]:
    """Return the column that a reference names, in small letters, and whether it is a field of it.

    `path` may begin with the name of a view.
    """
    names = [name.lower() for name in path]
    if len(names) > 1 and names[0] in ("episodes", "steps"):
        names = names[1:]
    return names[0], len(names) > 1


def _read_constant(node: Mapping[str, Any]) -> str | None:
    """Return a constant as text; None for anything else, NULL included."""
    if node["type"] == "OPERATOR_CAST":
        return _read_constant(node["child"])
    literal = node.get("literal") or {}
    is_id = node["class"] == "CONSTANT" and literal.get("kind") in ("STRING", "INTEGER")
    return str(literal["text"]) if is_id else None


def select_episode_keys(
    snapshot: TableSnapshot, where: str, tables: Mapping[str, pa.Table] | None = None
) -> pa.Table:
    """Return episode_id and agent_id of the episodes that `where` selects, a canonical_condition.

    tables: what its subqueries select from. Raises: QueryError if DuckDB refuses it, or if it names
    a column of steps outside of any() and all() that has several values in one episode.
    """
    selected = episodes_where(where, snapshot.schema.names)
    with reproducible_views(snapshot) as connection, registered(connection, tables or {}):
        return execute(
            connection, f"SELECT {schema.EPISODE_ID}, {schema.AGENT_ID} FROM ({selected})"
        )


@contextmanager
def registered(
    connection: duckdb.DuckDBPyConnection, tables: Mapping[str, pa.Table]
) -> Iterator[None]:
    """Let queries of a connection read Arrow tables by name, until the block ends."""
    for name, table in tables.items():
        connection.register(name, table)
    try:
        yield
    finally:
        for name in tables:
            connection.unregister(name)


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
            f"{name}: found {rows.num_rows} values for {snapshot.num_rows} steps, expected one "
            "per step. Leave out aggregates and unnest."
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
        selected = episodes_where(where or "true", snapshot.schema.names)
        source = (
            f"FROM steps JOIN (SELECT {key}{of_episode} FROM ({selected})) "
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
            "per step. Leave out unnest."
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
    connection: duckdb.DuckDBPyConnection, expression: str, tree: Any, allowed: Set[str]
) -> None:
    # If a subquery is refused, what is in it does not matter; if allowed, it is executed by itself.
    nodes = list(walk_outside_subqueries(tree))
    kinds = {node.get("class") for node in nodes}
    if names := [name for kind, name in _REFUSED_NODES.items() if kind in kinds - allowed]:
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
