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
# Of the shared instances; None: DuckDB's own default, one for each core.
_num_threads: int | None = None
# By whether results are in the order of the rows read.
_shared: dict[bool, duckdb.DuckDBPyConnection] = {}
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


def limit_threads(num_threads: int) -> None:
    """Let the queries of this process's sessions use so many threads, all together.

    For a process that runs beside others that have to be fast: DuckDB then also returns memory
    after each query; by default, it retains up to 128 MiB for each thread.
    """
    global _num_threads
    with _lock:
        _num_threads = num_threads
        for instance in _shared.values():
            _limit_instance(instance, num_threads)


@contextmanager
def session(*, keeps_order: bool = True) -> Iterator[duckdb.DuckDBPyConnection]:
    """Lend a connection to a DuckDB that the process shares: its views are no other session's.

    Without `keeps_order`, rows of a query without ORDER BY come in any order, which costs less
    memory. Safe from any thread. Raises: KeyboardInterrupt, also where DuckDB raises something
    else for Ctrl-C. Cost: about 1 ms, where an instance of its own takes 13 to 35 ms to start.
    """
    connection = _instance(keeps_order).cursor()
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


def _instance(keeps_order: bool) -> duckdb.DuckDBPyConnection:
    with _lock:
        if keeps_order not in _shared:
            instance = connect()
            # Else what was read stays in memory, up to most of the machine's, beside training.
            instance.execute("SET enable_external_file_cache = false")
            instance.execute(f"SET preserve_insertion_order = {str(keeps_order).lower()}")
            if _num_threads is not None:
                _limit_instance(instance, _num_threads)
            _shared[keeps_order] = instance
        return _shared[keeps_order]


def _limit_instance(instance: duckdb.DuckDBPyConnection, num_threads: int) -> None:
    instance.execute(f"SET threads = {num_threads}")
    for name in ("allocator_flush_threshold", "allocator_bulk_deallocation_flush_threshold"):
        instance.execute(f"SET {name} = '1MB'")
    instance.execute("SET allocator_background_threads = true")


def _configure(connection: duckdb.DuckDBPyConnection) -> None:
    """Set what holds for one connection alone, and cursors do not inherit."""
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET enable_progress_bar = false")
    connection.execute(_DISCOUNTED_RETURN)


def _reset_after_fork() -> None:
    """Leave the parent's instance alone: its threads are not here, and closing it would wait."""
    global _lock
    _lock = threading.Lock()
    _inherited_connections.extend(_shared.values())
    _shared.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
