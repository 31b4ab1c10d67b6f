"""Connections: one DuckDB for the process, in which sessions do not see each other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import duckdb
import pytest

from replaylake.datastore.query import connections
from replaylake.datastore.query.connections import limit_threads, session


def test_a_session_has_what_queries_need() -> None:
    with session() as connection:
        assert connection.execute("SELECT current_setting('TimeZone')").fetchall() == [("UTC",)]
        secret = [1]
        with pytest.raises(duckdb.Error, match="secret"):
            connection.execute("SELECT * FROM secret")
        assert secret


def test_sessions_at_once_keep_their_views_to_themselves() -> None:
    def ask(number: int) -> list[tuple[int]]:
        with session() as connection:
            connection.execute("CREATE SCHEMA d")
            connection.execute(f"CREATE VIEW d.steps AS SELECT {number} AS x")
            return connection.execute("SELECT x FROM d.steps").fetchall()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(200))) == [[(number,)] for number in range(200)]


def test_a_session_leaves_nothing_behind() -> None:
    def attached() -> list[tuple[str]]:
        with session() as connection:
            return connection.execute("SELECT count(*) FROM duckdb_databases()").fetchall()

    before = attached()
    with session() as connection:
        connection.execute("CREATE VIEW x AS SELECT 1")
    with pytest.raises(ZeroDivisionError), session():
        raise ZeroDivisionError
    with pytest.raises(duckdb.Error), session() as connection:
        connection.execute("SELECT * FROM x")
    assert attached() == before


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # from Python 3.12 on
def test_a_forked_process_gets_an_instance_of_its_own() -> None:
    """The parent's threads are not there to run its queries."""
    with session() as connection:
        assert connection.execute("SELECT sum(range) FROM range(1000000)").fetchone()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with session() as connection:
                rows = connection.execute("SELECT sum(range) FROM range(1000000)").fetchone()
                code = 0 if rows == (499999500000,) else 2
        finally:
            os._exit(code)
    for _ in range(1200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the query in the forked process did not end")


@pytest.mark.parametrize(
    ("rows", "gamma", "expected"),
    [
        ("(1.0, 0), (2.0, 1), (4.0, 2)", 0.5, 1 + 1 + 1),
        # Counted from the first step that is there, and a missing step takes its time all the same.
        ("(1.0, 7), (4.0, 9)", 0.5, 1 + 1),
        ("(4.0, 9), (1.0, 7)", 0.5, 1 + 1),
        ("(3.0, 5), (8.0, 6)", 0.0, 3),
        ("(3.0, 5), (8.0, 6)", 1.0, 11),
        # 0.9 ** 100000 is 0 in floats.
        ("(1.0, 100000), (1.0, 100001)", 0.9, 1.9),
    ],
)
def test_discounted_returns(rows: str, gamma: float, expected: float) -> None:
    with session() as connection:
        found = connection.execute(
            f"SELECT discounted_return(r, s, {gamma}) FROM (VALUES {rows}) t(r, s)"
        ).fetchone()
    assert found == (pytest.approx(expected),)


def test_what_duckdb_raises_for_ctrl_c_is_a_keyboard_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), session():
        raise RuntimeError("Query interrupted")
    with pytest.raises(RuntimeError, match="another"), session():
        raise RuntimeError("another")


@pytest.mark.slow
def test_ctrl_c_ends_a_query_again_and_again() -> None:
    # In a process of its own, whose main thread gets the signals.
    code = (
        "import os, signal, threading\n"
        "from replaylake.datastore.query.connections import session\n"
        "from replaylake.datastore.query.statements import execute_interruptibly\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "query = 'SELECT sum(hash(a.range, b.range)) FROM range(1000000) a, range(1000000) b'\n"
        "for _ in range(4):\n"
        "    try:\n"
        "        with session() as connection:\n"
        "            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "            execute_interruptibly(connection, query)\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted')\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "interrupted\n" * 4


def test_sessions_use_as_many_threads_as_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_shared", {})
    monkeypatch.setattr(connections, "_num_threads", None)

    def count(keeps_order: bool) -> int:
        with session(keeps_order=keeps_order) as connection:
            ((num,),) = connection.execute("SELECT current_setting('threads')").fetchall()
            return int(num)

    assert count(True) >= 1
    for num in (3, 1):
        limit_threads(num)
        assert (count(True), count(False)) == (num, num)


def test_a_process_with_a_limit_of_threads_keeps_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_shared", {})
    monkeypatch.setattr(connections, "_num_threads", None)
    query = "SELECT current_setting('allocator_flush_threshold') AS kept"
    with session() as connection:
        before = connection.execute(query).fetchall()
    connections.limit_threads(1)
    for keeps_order in (True, False):
        with session(keeps_order=keeps_order) as connection:
            assert connection.execute(query).fetchall() != before
