"""Statements: what a query is, which tables it names, and its rows."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Final

import duckdb
import pyarrow as pa

from replaylake.datastore.errors import QueryError, QueryRefusedError

# WITH takes INSERT, UPDATE, DELETE and COPY TO as well, in what is still one SELECT statement.
_SELECT_NODES: Final = {"CTE_NODE", "RECURSIVE_CTE_NODE", "SELECT_NODE", "SET_OPERATION_NODE"}
# Functions of a SELECT that run or plan SQL out of a text, where no check sees it: COPY TO wrote a
# file that way (duckdb 2.0.0).
_SQL_TEXT_FUNCTIONS: Final = {"json_execute_serialized_sql", "json_serialize_plan", "query"}
# Those that change the DuckDB that all queries of this process share, or take addresses.
_NON_READING_FUNCTIONS: Final = {
    "arrow_scan",
    "arrow_scan_dumb",
    "checkpoint",
    "create_external_resource",
    "deregister_external_resource",
    "destroy_external_resource",
    "disable_logging",
    "disable_profiling",
    "enable_logging",
    "enable_profiling",
    "force_checkpoint",
    "pandas_scan",
    "python_arrow_scan",
    "python_map_function",
    "register_external_resource",
    "register_external_resource_type",
    "truncate_duckdb_logs",
    "write_log",
}

# How long a cancelled query continues at most.
_CHECK_S: Final = 0.1
# How the message of error() in a condition over episodes begins (conditions.py).
VARYING_COLUMN: Final = "condition over episodes: "


# With DuckDB's suggestion, if it makes one.
_UNKNOWN_TABLE: Final = re.compile(
    r"(Table with name .+? does not exist)!(?: Did you mean \"[^\"]*\"\?)?"
)


class Cancellation:
    """Cancels queries from another thread, including those that start later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._stop: Callable[[], None] | None = None

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def cancel(self) -> None:
        """Cancel the running query and all that start later."""
        with self._lock:
            self._is_cancelled = True
            if self._stop is not None:
                self._stop()

    @contextmanager
    def watching(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `stop` if the query is cancelled within the block or was before."""
        with self._lock:
            self._stop = stop
            if self._is_cancelled:
                stop()
        try:
            yield
        finally:
            with self._lock:
                self._stop = None


def check_select(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """Refuse what is not exactly one SELECT. Raises: QueryRefusedError, QueryError."""
    try:
        query.encode()
        statements = connection.extract_statements(query)
    except UnicodeEncodeError as error:
        # What a shell passes on that is no UTF-8; DuckDB would say that a str is no str.
        raise QueryError(f"query: {error}, expected text that UTF-8 can hold.") from error
    except duckdb.Error as error:
        raise QueryError(_first_line(error)) from error
    kinds = [statement.type.name for statement in statements]
    if kinds != ["SELECT"]:
        raise QueryRefusedError(
            f"query: found {', '.join(kinds) or 'no statement'}, expected one SELECT. "
            "SQL reads the lake; use the other commands to change it."
        )
    nodes = list(walk(parse(connection, query)))
    types = {str(node.get("type")) for node in nodes}
    if writes := sorted(n for n in types if n.endswith("_NODE") and n not in _SELECT_NODES):
        words = ", ".join(name.removesuffix("_NODE").removesuffix("_QUERY") for name in writes)
        raise QueryRefusedError(
            f"query: found {words} in WITH, expected nothing but SELECT. "
            "SQL reads the lake; use the other commands to change it."
        )
    called = {str(node.get("function_name", "")).lower() for node in nodes}
    if names := sorted(called & (_SQL_TEXT_FUNCTIONS | _NON_READING_FUNCTIONS)):
        what = (
            "runs SQL out of a text" if names[0] in _SQL_TEXT_FUNCTIONS else "does more than read"
        )
        raise QueryRefusedError(
            f"query: found {names[0]}(), which {what}, expected functions that only read. "
            "Write the SELECT out, or leave it to a DuckDB of your own."
        )


def execute(
    connection: duckdb.DuckDBPyConnection,
    query: str,
    parameters: Mapping[str, object] | None = None,
) -> pa.Table:
    """Run a query and return all its rows. Raises: QueryError."""
    try:
        relation = connection.sql(query, params=dict(parameters) if parameters else None)
        return relation.to_arrow_table() if relation is not None else pa.table({})
    except (duckdb.Error, pa.ArrowException) as error:
        _, found, message = _first_line(error).partition(f"Invalid Input Error: {VARYING_COLUMN}")
        if found:
            raise QueryError(message) from error
        raise QueryError(_first_line(error)) from error
    except RuntimeError as error:
        # What DuckDB makes of Ctrl-C (duckdb 2.0.0).
        if str(error) == "Query interrupted":
            raise KeyboardInterrupt from error
        raise


def execute_interruptibly(
    connection: duckdb.DuckDBPyConnection,
    query: str,
    parameters: Mapping[str, object] | None = None,
    cancellation: Cancellation | None = None,
) -> pa.Table:
    """Run a user's query, which Ctrl-C or its cancellation ends. Raises: as execute.

    DuckDB 2.0.0 misses one Ctrl-C in four, and every second one of a process, while a query runs
    in the main thread. So the query runs in another, and the main thread waits and tells it.
    """
    if cancellation is not None and cancellation.is_cancelled:
        raise QueryError("the query was cancelled.")
    with ThreadPoolExecutor(1, "replaylake-query") as pool:
        running = pool.submit(execute, connection, query, parameters)
        try:
            while cancellation is not None and not wait([running], _CHECK_S).done:
                if cancellation.is_cancelled:
                    # Repeated: DuckDB ignores an interrupt that precedes the start of the query.
                    connection.interrupt()
            return running.result()
        except (QueryError, KeyboardInterrupt) as error:
            if cancellation is not None and cancellation.is_cancelled:
                raise QueryError("the query was cancelled.") from error
            raise
        finally:
            if not running.done():
                connection.interrupt()


def parse(connection: duckdb.DuckDBPyConnection, query: str) -> Any:
    """Return DuckDB's parse tree of one SELECT. Raises: QueryError."""
    text = execute(connection, "SELECT json_serialize_sql($q) AS j", {"q": query})["j"][0].as_py()
    tree = json.loads(text)
    if tree.get("error"):
        raise QueryError(f"{query!r}: {tree.get('error_message')}")
    return tree


def find_tables(connection: duckdb.DuckDBPyConnection, query: str) -> Iterator[tuple[str, str]]:
    """Yield (dataset or "", view) for each base table of the query, as SQL folds their case.

    A name that WITH defines is left out where it is in scope: below that WITH, after its own
    definition, and in the repeated part of a recursive one.
    """
    return _tables(parse(connection, query), frozenset())


def walk(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of a parse tree."""
    if isinstance(node, dict):
        yield node
        for child in node.values():
            yield from walk(child)
    elif isinstance(node, list):
        for child in node:
            yield from walk(child)


def walk_outside_subqueries(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of a parse tree, subqueries themselves but nothing in them."""
    if isinstance(node, dict):
        yield node
        for key, child in node.items():
            if not (key == "subquery" and node.get("class") == "SUBQUERY"):
                yield from walk_outside_subqueries(child)
    elif isinstance(node, list):
        for child in node:
            yield from walk_outside_subqueries(child)


def literal(text: str) -> str:
    """Return an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def _tables(node: Any, own: frozenset[str]) -> Iterator[tuple[str, str]]:
    if isinstance(node, list):
        for child in node:
            yield from _tables(child, own)
    if not isinstance(node, dict):
        return
    entries = node.get("cte_map")
    for entry in entries.get("map", ()) if isinstance(entries, dict) else ():
        yield from _tables(entry["value"], own)
        own |= {str(entry["key"]).lower()}
    repeated = own
    if node.get("type") == "RECURSIVE_CTE_NODE":
        repeated = own | {str(node["cte_name"]).lower()}
    if node.get("type") == "BASE_TABLE":
        dataset, view = node.get("schema_name", "").lower(), node["table_name"].lower()
        if dataset or view not in own:
            yield "" if dataset == "main" else dataset, view
    for key, child in node.items():
        if key != "cte_map":
            yield from _tables(child, repeated if key == "right" else own)


def _first_line(error: Exception) -> str:
    """DuckDB's message without the echo of the query that follows it, and our catalog's name.

    For a table that is not there, DuckDB suggests one of its own catalog.
    """
    message = re.sub(r"\bsession \d+\.", "", " ".join(str(error).split("\n\n")[0].split()))
    message = _UNKNOWN_TABLE.sub(
        r"\1, expected a view of the lake (datasets, commits, ...), of a dataset (NAME.steps, ...) "
        "or, in a query of one version, steps or episodes.",
        message,
    )
    if message.endswith('at or near "@"'):
        message += ". A version is named beside the query: `at` NAME=VERSION."
    return message
