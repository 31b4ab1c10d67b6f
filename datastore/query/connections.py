"""Connections: DuckDB in memory, shared by the queries of a process or locked down for one use."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import duckdb

# From the first of the steps given, not from step 0: so a log that starts later counts alike, and
# gamma ** step cannot underflow on both sides of a division. Unknown where one reward is.
_DISCOUNTED_RETURN: Final = (
    "CREATE TEMP MACRO discounted_return(reward, step, gamma) AS CASE "
    "WHEN count(reward) = count(*) "
    "THEN list_sum(list_transform(list({'reward': reward, 'step': step}), "
    "lambda pair: pair.reward * power(gamma, pair.step - min(step)))) END"
)

_lock = threading.Lock()
_shared: duckdb.DuckDBPyConnection | None = None
_inherited_connections: list[duckdb.DuckDBPyConnection] = []
_numbers = itertools.count()


def connect() -> duckdb.DuckDBPyConnection:
    """Open a DuckDB of its own, which downloads nothing and does not see Python variables.

    For settings that hold for a whole instance; a query takes a `session`, which costs a tenth.
    """
    connection = duckdb.connect(
        config={"autoinstall_known_extensions": False, "autoload_known_extensions": False}
    )
    _configure(connection)
    return connection


@contextmanager
def session() -> Iterator[duckdb.DuckDBPyConnection]:
    """Lend a connection to the process's one DuckDB: its views are no other session's.

    Safe from any thread. Raises: KeyboardInterrupt, also where DuckDB raises something else for
    Ctrl-C. Cost: about 1 ms, where an instance of its own takes 13 to start.
    """
    connection = _instance().cursor()
    # No dataset can have a name with a space, so it hides none.
    catalog = f'"session {next(_numbers)}"'
    try:
        _configure(connection)
        connection.execute(f"ATTACH ':memory:' AS {catalog}")
        try:
            connection.execute(f"USE {catalog}")
            yield connection
        finally:
            # After an interrupt it may refuse: then a few bytes stay until the process ends.
            with suppress(duckdb.Error):
                connection.execute("USE memory")
                connection.execute(f"DETACH {catalog}")
    except RuntimeError as error:
        # DuckDB 2.0.0 takes Ctrl-C from Python while a statement runs in the main thread.
        if str(error) == "Query interrupted":
            raise KeyboardInterrupt from error
        raise
    finally:
        connection.close()


def _instance() -> duckdb.DuckDBPyConnection:
    global _shared
    with _lock:
        if _shared is None:
            _shared = connect()
            # Else what was read stays in memory, up to most of the machine's, beside training.
            _shared.execute("SET enable_external_file_cache = false")
        return _shared


def _configure(connection: duckdb.DuckDBPyConnection) -> None:
    """Set what holds for one connection alone, and cursors do not inherit."""
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET enable_progress_bar = false")
    connection.execute(_DISCOUNTED_RETURN)


def _reset_after_fork() -> None:
    """Leave the parent's instance alone: its threads are not here, and closing it would wait."""
    global _shared, _lock
    _lock = threading.Lock()
    if _shared is not None:
        _inherited_connections.append(_shared)
        _shared = None


os.register_at_fork(after_in_child=_reset_after_fork)
