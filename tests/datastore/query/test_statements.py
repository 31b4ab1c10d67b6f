"""Statements: which tables a query names, with WITH in scope and out of it."""

from __future__ import annotations

import pytest

from replaylake.datastore.query.connections import session
from replaylake.datastore.query.statements import find_tables


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("SELECT * FROM runs", {"runs"}),
        ("WITH runs AS (SELECT 1) SELECT * FROM runs", set()),
        # Its own name is not in scope in a definition.
        ("WITH runs AS (SELECT * FROM runs) SELECT * FROM runs", {"runs"}),
        ("WITH RECURSIVE runs AS (SELECT * FROM runs) SELECT * FROM runs", {"runs"}),
        # But in the repeated part of a recursive one it is.
        (
            "WITH RECURSIVE runs AS (SELECT 1 AS a UNION ALL SELECT a + 1 FROM runs WHERE a < 3) "
            "SELECT * FROM runs",
            set(),
        ),
        (
            "WITH RECURSIVE runs AS (SELECT a FROM runs UNION ALL SELECT a + 1 FROM runs) "
            "SELECT * FROM runs",
            {"runs"},
        ),
        # Only what was defined before is.
        ("WITH a AS (SELECT * FROM runs), runs AS (SELECT 1) SELECT * FROM a, runs", {"runs"}),
        ("WITH runs AS (SELECT 1), a AS (SELECT * FROM runs) SELECT * FROM a", set()),
        # Only below its WITH.
        (
            "SELECT * FROM (WITH runs AS (SELECT 1) SELECT * FROM runs) x, runs",
            {"runs"},
        ),
        ("WITH runs AS (SELECT 1) SELECT (SELECT max(a) FROM runs)", set()),
        ("(WITH s AS (SELECT 1) SELECT * FROM s) UNION ALL SELECT * FROM s", {"s"}),
        ("WITH s AS (SELECT 1) SELECT * FROM s UNION ALL SELECT * FROM s", set()),
        # A name with a dataset before it is never WITH's own.
        ("WITH steps AS (SELECT 1) SELECT * FROM d.steps, steps", {"d.steps"}),
        ("WITH runs AS (SELECT 1) SELECT * FROM main.runs", {"runs"}),
        ("WITH Runs AS (SELECT 1) SELECT * FROM RUNS", set()),
    ],
)
def test_named_tables(query: str, named: set[str]) -> None:
    with session() as connection:
        found = find_tables(connection, query)
        assert {f"{schema}.{name}".lstrip(".") for schema, name in found} == named
