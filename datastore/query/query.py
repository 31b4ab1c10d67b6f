"""SQL over snapshots: DuckDB views on exactly the files of a version, for one SELECT at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import duckdb
import pyarrow as pa

from replaylake.datastore.errors import QueryError
from replaylake.datastore.query.connections import session
from replaylake.datastore.query.list_functions import define_list_functions
from replaylake.datastore.query.statements import (
    Cancellation,
    check_select,
    execute_interruptibly,
    find_tables,
)
from replaylake.datastore.query.views import STEP_VIEWS, Catalog, Views, plan_views
from replaylake.datastore.storage.table.table import TableSnapshot

# What DuckDB adds to a message: the line, and where in it.
_EXCERPT: Final = re.compile(r"\n\nLINE (\d+): (.*)\n( *\^+)")


def run_query(
    query: str,
    catalog: Catalog,
    parameters: Mapping[str, object] | None = None,
    *,
    cancellation: Cancellation | None = None,
) -> pa.Table:
    """Run one SELECT with `$name` parameters and return Arrow.

    cancellation: ends the query from another thread. Raises: QueryRefusedError if it is not one
    SELECT, QueryError with DuckDB's message, or after a cancellation,
    NotFoundError if it names a dataset or view that does not exist or a version whose shards were
    removed, ShardCorruptError if a file is missing that should be there.
    """
    with session() as connection, _add_excerpt(connection, query, parameters):
        check_select(connection, query)
        define_list_functions(connection, query)
        # Only the views that the query names; making all of them is slow in a wide lake.
        views = plan_views(find_tables(connection, query), catalog)
        try:
            views.create(connection)
            return execute_interruptibly(connection, query, parameters, cancellation)
        finally:
            views.release()


def run_snapshot_query(
    query: str, steps: TableSnapshot, parameters: Mapping[str, object] | None = None
) -> pa.Table:
    """Run one SELECT whose tables are the views of one version, by their plain names.

    Raises: as run.
    """
    with session() as connection, _add_excerpt(connection, query, parameters):
        check_select(connection, query)
        define_list_functions(connection, query)
        names = {view for schema, view in find_tables(connection, query) if not schema}
        views = Views()
        try:
            if step_views := [view for view in STEP_VIEWS if view in names]:
                views.add("", step_views, steps)
            views.create(connection)
            return execute_interruptibly(connection, query, parameters)
        finally:
            views.release()


def run_table_query(
    query: str, tables: Mapping[str, pa.Table], parameters: Mapping[str, object] | None = None
) -> pa.Table:
    """Run one SELECT over Arrow tables, by their names, and nothing else of the lake.

    Raises: as run_query.
    """
    with session() as connection:
        check_select(connection, query)
        define_list_functions(connection, query)
        Views(relations=dict(tables)).create(connection)
        return execute_interruptibly(connection, query, parameters)


@contextmanager
def _add_excerpt(
    connection: duckdb.DuckDBPyConnection, query: str, parameters: Mapping[str, object] | None
) -> Iterator[None]:
    """Give an error of the query the line at fault, which DuckDB tells of statements alone."""
    try:
        yield
    except QueryError as error:
        try:
            # Its views are still there; what EXPLAIN does not refuse was no fault of the text.
            connection.execute(f"EXPLAIN\n{query}", dict(parameters) if parameters else None)
        except Exception as again:  # whatever DuckDB makes of it: the first error is raised
            if found := _EXCERPT.search(str(again)):
                number, line, carets = found.groups()
                # Without the line of EXPLAIN; the number may lose a digit.
                shown = f"LINE {int(number) - 1}: {line}"
                lost = len(number) - len(str(int(number) - 1))
                error.details["excerpt"] = f"{shown}\n{carets[lost:]}"
        raise
