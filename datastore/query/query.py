"""SQL over snapshots: DuckDB views on exactly the files of a version, for one SELECT at a time."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from replaylake.datastore.query.connections import session
from replaylake.datastore.query.statements import (
    check_select,
    execute_interruptibly,
    find_tables,
)
from replaylake.datastore.query.views import STEP_VIEWS, Catalog, Views, plan_views
from replaylake.datastore.storage.table.table import TableSnapshot


def run_query(
    query: str, catalog: Catalog, parameters: Mapping[str, object] | None = None
) -> pa.Table:
    """Run one SELECT with `$name` parameters and return Arrow.

    Raises: QueryRefusedError if it is not one SELECT, QueryError with DuckDB's own words,
    NotFoundError if it names a dataset or view that does not exist or a version whose shards were
    removed, ShardCorruptError if a file is missing that should be there.
    """
    with session() as connection:
        check_select(connection, query)
        # Only the views that the query names; making all of them is slow in a wide lake.
        views = plan_views(find_tables(connection, query), catalog)
        try:
            views.create(connection)
            return execute_interruptibly(connection, query, parameters)
        finally:
            views.release()


def run_snapshot_query(
    query: str, steps: TableSnapshot, parameters: Mapping[str, object] | None = None
) -> pa.Table:
    """Run one SELECT whose tables are the views of one version, by their plain names.

    Raises: as run.
    """
    with session() as connection:
        check_select(connection, query)
        names = {view for schema, view in find_tables(connection, query) if not schema}
        views = Views()
        try:
            if step_views := [view for view in STEP_VIEWS if view in names]:
                views.add("", step_views, steps)
            views.create(connection)
            return execute_interruptibly(connection, query, parameters)
        finally:
            views.release()
