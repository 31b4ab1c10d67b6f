"""Row check: steps across shards: each once, in order, none after the end of its episode."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final

import duckdb
import pyarrow as pa

from replaylake.datastore.maintenance.fsck.finding import ERROR, NOTE
from replaylake.datastore.maintenance.fsck.shard_check import run_schema
from replaylake.datastore.query.connections import connect

# DuckDB spills to disk above it. A run is a few dozen bytes; most episodes have one.
_MEMORY: Final = "512MB"
_FETCH_ROWS: Final = 4096

# Rows of one episode and agent by step: `reached` is the highest step before a run, `ended_at` the
# lowest step at which the episode ended before it.
_PROBLEMS: Final = """
SELECT episode, agent, first, last, shard, reached, ended_at
FROM (
    SELECT *,
           max(last) OVER earlier AS reached,
           min(CASE WHEN ended THEN last END) OVER earlier AS ended_at
    FROM runs
    WINDOW earlier AS (
        PARTITION BY episode, agent ORDER BY first, shard, row
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    )
)
WHERE first <> coalesce(reached, -1) + 1 OR last > ended_at
"""


class RowCheck:
    """Collects the runs of all shards of a table, or the ids of decisions. A context manager."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="replaylake-fsck-")
        self._connection: duckdb.DuckDBPyConnection = connect()
        self._connection.execute(f"SET memory_limit = '{_MEMORY}'")
        self._connection.execute("SET threads = 2")
        self._connection.execute("SET temp_directory = $1", [self._folder.name])
        self._connection.register("nothing", run_schema().empty_table())
        self._connection.execute("CREATE TABLE runs AS SELECT * FROM nothing")
        self._connection.execute("CREATE TABLE ids (id VARCHAR)")

    def __enter__(self) -> RowCheck:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.close()
        self._folder.cleanup()

    def add_runs(self, runs: pa.Table) -> None:
        """Take the runs of one shard."""
        self._insert("runs", runs)

    def add_ids(self, ids: pa.Table) -> None:
        """Take the ids of one shard."""
        self._insert("ids", ids)

    def problems(self) -> Iterator[dict[str, Any]]:
        """Yield the runs that do not follow what comes before them in their episode."""
        for batch in self._batches(_PROBLEMS):
            yield from batch.to_pylist()

    def duplicate_ids(self) -> Iterator[tuple[str, int]]:
        """Yield ids that more than one row has, and how many rows."""
        query = "SELECT id, count(*) AS n FROM ids GROUP BY id HAVING n > 1 ORDER BY id"
        for batch in self._batches(query):
            for row in batch.to_pylist():
                yield row["id"], row["n"]

    def doubled_rows(self) -> dict[int, list[int]]:
        """Return by shard the rows whose step an earlier row has too, shards in number order."""
        overlapping = f"SELECT DISTINCT episode, agent FROM ({_PROBLEMS}) WHERE first <= reached"
        query = (
            f"SELECT episode, agent, first, last, shard, row FROM runs SEMI JOIN ({overlapping}) "
            "USING (episode, agent) ORDER BY episode, agent, shard, row"
        )
        doubled: dict[int, list[int]] = {}
        seen: set[int] = set()
        current = None
        for batch in self._batches(query):
            for run in batch.to_pylist():
                if (run["episode"], run["agent"]) != current:
                    current, seen = (run["episode"], run["agent"]), set()
                for i, step in enumerate(range(run["first"], run["last"] + 1)):
                    if step in seen:
                        doubled.setdefault(run["shard"], []).append(run["row"] + i)
                    seen.add(step)
        return doubled

    def _batches(self, query: str) -> Iterator[pa.RecordBatch]:
        relation = self._connection.sql(query)
        yield from relation.to_arrow_reader(_FETCH_ROWS) if relation is not None else ()

    def _insert(self, table: str, rows: pa.Table) -> None:
        if rows.num_rows:
            self._connection.register("incoming", rows)
            self._connection.execute(f"INSERT INTO {table} SELECT * FROM incoming")
            self._connection.unregister("incoming")


def faults_of(run: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield severity, check and message of what is wrong with one of the `problems`."""
    first, last, reached, ended_at = (
        run[name] for name in ("first", "last", "reached", "ended_at")
    )
    if reached is None and first > 0:
        yield (
            NOTE,
            "gap",
            f"begins at step {first}, steps 0..{first - 1} are missing. Nothing bootstraps across.",
        )
    elif reached is not None and first > reached + 1:
        missing = f"steps {reached + 1}..{first - 1} are missing after step {reached}"
        yield NOTE, "gap", f"{missing}. Step {reached} has no next observation, or its own."
    elif reached is not None and first <= reached:
        twice = f"found steps {first}..{min(last, reached)} a second time, expected each once"
        yield ERROR, "duplicate", f"{twice}. --repair keeps those that came first."
    if ended_at is not None and last > ended_at:
        after = f"found steps {max(first, ended_at + 1)}..{last} after step {ended_at} ended it"
        advice = "`replaylake delete` the episode, or restore it from where it came"
        yield ERROR, "after_end", f"{after}, expected none. {advice}."
