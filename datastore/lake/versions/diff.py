"""Diff: the episodes and steps by which two versions of a dataset differ.

Only shards that one of the two lacks are read, and of those none whose rows, by the log, were only
moved (compaction); first a fingerprint for each episode, then the steps of those that differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import duckdb
import pyarrow as pa

from replaylake.datastore.episodes import schema
from replaylake.datastore.errors import ConfigInvalidError, LogCorruptError, NotFoundError
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.connections import session
from replaylake.datastore.query.scan import scan
from replaylake.datastore.query.statements import execute
from replaylake.datastore.storage.log.commit_log import CommitLog
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.shard import blob_of
from replaylake.datastore.storage.table.table import TableSnapshot

_EPISODE: Final = f"{schema.EPISODE_ID}, {schema.AGENT_ID}"
_STEP: Final = f"{_EPISODE}, {schema.STEP}"
# An episode whose rows here are all that it can have: from step 0, without a gap, to its end.
_IS_WHOLE: Final = (
    f"min({schema.STEP}) = 0 AND max({schema.STEP}) = count(*) - 1 "
    f"AND bool_or({schema.TERMINATED} OR {schema.TRUNCATED})"
)


@dataclass(frozen=True)
class ChangeCounts:
    """Numbers of what is only in the second version, only in the first, and in both but unlike."""

    added: int = 0
    removed: int = 0
    changed: int = 0


@dataclass(frozen=True)
class EpisodeKey:
    """One episode of one agent."""

    episode_id: str
    agent_id: str


@dataclass(frozen=True)
class VersionDiff:
    """What changed from one version to another.

    An episode changed if it is in both and steps of it were added, removed or changed. Steps count
    those of added and removed episodes too. The lists of episodes are as long as `limit` lets them.
    """

    dataset: str
    from_version: int
    to_version: int
    shards: ChangeCounts
    episodes: ChangeCounts
    steps: ChangeCounts
    added: tuple[EpisodeKey, ...] = ()
    removed: tuple[EpisodeKey, ...] = ()
    changed: tuple[EpisodeKey, ...] = ()
    # Further columns that only one version has; of both, those whose values changed in some steps.
    columns_added: tuple[str, ...] = ()
    columns_removed: tuple[str, ...] = ()
    columns_changed: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether both versions hold the same steps and columns."""
        return self.steps == ChangeCounts() and not self.columns_added and not self.columns_removed


def diff(a: Snapshot, b: Snapshot, *, limit: int = 1000) -> VersionDiff:
    """Compare two versions of one dataset.

    Two rows of a step are equal if all columns of both versions are equal; a column that a version
    lacks is NULL in it. Float values are equal if they compare equal, or if both are NaN.

    Args:
        a: the version to compare from.
        b: the version to compare to.
        limit: the maximum number of episodes in each list.

    Cost: shards that both versions have are not read, unless an episode begins in such a shard and
    continues in another; then their two id columns are read. The other shards are read twice.
    Memory grows with the number of episodes in those shards, and with the number of steps in the
    episodes that differ.

    Raises: ConfigInvalidError for snapshots of two datasets, ShardCorruptError if a file is
    missing.
    """
    if a.dataset != b.dataset:
        raise ConfigInvalidError(
            f"diff {a.dataset}@{a.version} {b.dataset}@{b.version}: found two datasets, expected "
            f"two versions of one, such as {a.dataset}@{max(a.version - 1, 0)} "
            f"{a.dataset}@{a.version}."
        )
    only_a, only_b = _without(a.files, b.files), _without(b.files, a.files)
    names_a, names_b = set(a.table.schema.names), set(b.table.schema.names)
    basis = VersionDiff(
        dataset=a.dataset,
        from_version=a.version,
        to_version=b.version,
        shards=ChangeCounts(len(only_b), len(only_a)),
        episodes=ChangeCounts(),
        steps=ChangeCounts(),
        columns_added=tuple(sorted(names_b - names_a)),
        columns_removed=tuple(sorted(names_a - names_b)),
    )
    if only_a and only_b:
        moved = _find_moved_shards(a.table, b.table)
        only_a, only_b = (
            tuple(entry for entry in files if entry.path not in moved) for files in (only_a, only_b)
        )
    if not only_a and not only_b:
        return basis
    left, right = replace(a.table, files=only_a), replace(b.table, files=only_b)
    shared = replace(a.table, files=_without(a.files, only_a))
    with session() as connection, _release_on_exit(left, right):
        wide = _union(a.table.schema, b.table.schema)
        _compare(connection, replace(left, schema=wide), replace(right, schema=wide))
        _conclude(connection, shared)
        return replace(
            basis,
            episodes=_counts(connection, "differing_episodes"),
            steps=_counts(connection, "differing_steps"),
            added=_keys(connection, "added", limit),
            removed=_keys(connection, "removed", limit),
            changed=_keys(connection, "changed", limit),
            columns_changed=_count_changed_columns(connection, sorted(names_a | names_b)),
        )


def _without(files: Sequence[FileEntry], others: Sequence[FileEntry]) -> tuple[FileEntry, ...]:
    paths = {entry.path for entry in others}
    return tuple(entry for entry in files if entry.path not in paths)


def _find_moved_shards(a: TableSnapshot, b: TableSnapshot) -> set[str]:
    """Return the shards of both whose rows the commits in between only moved.

    Cost: the commits between the two are read. Where the log no longer has them, nothing is known.
    """
    first, last = sorted((a, b), key=lambda table: table.version)
    log = CommitLog(first.storage, first.root)
    # By path: the shards of the first version that it came from, and all that became of them.
    groups = {entry.path: {entry.path} for entry in first.files}
    removed: set[str] = set()
    try:
        for version in range(first.version + 1, last.version + 1):
            change = log.read_change(version)
            paths = set(change.removed)
            if change.changes_rows or not paths <= groups.keys():
                continue
            group = {entry.path for entry in change.added}.union(*(groups[path] for path in paths))
            groups |= dict.fromkeys(group, group)
            removed |= paths
    except (NotFoundError, LogCorruptError):
        return set()
    live = {entry.path for entry in last.files}
    return {path for path, group in groups.items() if group - removed <= live}


@contextmanager
def _release_on_exit(*tables: TableSnapshot) -> Iterator[None]:
    """Let local copies of remote files go afterwards."""
    try:
        yield
    finally:
        for table in tables:
            table.storage.release([blob_of(table.root, entry) for entry in table.files])


def _compare(connection: duckdb.DuckDBPyConnection, a: TableSnapshot, b: TableSnapshot) -> None:
    """Make the tables `counts`, of episodes, and `unlike_steps`, of steps that both sides name."""
    wide = a.schema
    for name, table in (("a", a), ("b", b)):
        execute(connection, f"CREATE VIEW rows_{name} AS SELECT * FROM {scan(table)}")
    values = ", ".join(f'"{column}"' for column in wide.names)
    _count_episodes(connection)
    # Values are read only of episodes that both sides have here: of none, where all was appended.
    for name in ("a", "b"):
        execute(
            connection,
            f"CREATE TABLE prints_{name} AS SELECT {_EPISODE}, count(*) AS n, "
            f"sum(hash({values})) AS print FROM rows_{name} "
            f"SEMI JOIN in_both USING ({_EPISODE}) GROUP BY {_EPISODE}",
        )
    execute(
        connection,
        f"CREATE TABLE suspects AS SELECT {_EPISODE} FROM prints_a JOIN prints_b "
        f"USING ({_EPISODE}) WHERE prints_a.n <> prints_b.n OR prints_a.print <> prints_b.print",
    )
    columns = [c for c in wide.names if c not in _STEP.split(", ")]
    # Eight bytes a value, be it a number or a frame: these are what the join holds in memory.
    hashes = ", ".join(f'hash("{c}") AS "{c}"' for c in columns)
    for name in ("a", "b"):
        execute(
            connection,
            f"CREATE VIEW steps_{name} AS SELECT {_STEP}, {hashes} FROM rows_{name} "
            f"SEMI JOIN suspects USING ({_EPISODE})",
        )
    unlike = " OR ".join(f'a."{c}" IS DISTINCT FROM b."{c}"' for c in columns)
    execute(
        connection,
        f"CREATE TABLE unlike_steps AS SELECT {_STEP}, CASE WHEN a.{schema.REWARD} IS NULL "
        f"THEN 'added' WHEN b.{schema.REWARD} IS NULL THEN 'removed' ELSE 'changed' END AS kind, "
        + ", ".join(f'a."{c}" IS DISTINCT FROM b."{c}" AS "{c}"' for c in columns)
        + f" FROM steps_a a FULL JOIN steps_b b USING ({_STEP}) WHERE {unlike}",
    )


def _count_episodes(connection: duckdb.DuckDBPyConnection) -> None:
    """Make `counts`: the rows of each episode on each side; and `in_both`."""
    for name in ("a", "b"):
        execute(
            connection,
            f"CREATE TABLE counts_{name} AS SELECT {_EPISODE}, count(*) AS n, "
            f"{_IS_WHOLE} AS is_whole FROM rows_{name} GROUP BY {_EPISODE}",
        )
    execute(
        connection,
        f"CREATE TABLE counts AS SELECT {_EPISODE}, coalesce(a.n, 0) AS n_a, coalesce(b.n, 0) "
        "AS n_b, coalesce(a.is_whole, b.is_whole) AS is_whole "
        f"FROM counts_a a FULL JOIN counts_b b USING ({_EPISODE})",
    )
    execute(
        connection,
        f"CREATE VIEW in_both AS SELECT {_EPISODE} FROM counts WHERE n_a > 0 AND n_b > 0",
    )


def _conclude(connection: duckdb.DuckDBPyConnection, shared: TableSnapshot) -> None:
    """Make `differing_steps` and `differing_episodes`: a `kind`, and how many, `n`.

    An episode that came or went is told from one that goes on in a shard of both versions.
    """
    parts = execute(
        connection,
        f"SELECT {_EPISODE} FROM counts WHERE (n_a = 0 OR n_b = 0) AND NOT is_whole",
    )
    connection.register("parts", parts)
    if parts.num_rows and shared.files:
        with _release_on_exit(shared):
            execute(
                connection,
                f"CREATE TABLE going_on AS SELECT DISTINCT {_EPISODE} "
                f"FROM {scan(shared)} SEMI JOIN parts USING ({_EPISODE})",
            )
    else:
        execute(connection, f"CREATE TABLE going_on AS SELECT {_EPISODE} FROM counts LIMIT 0")
    execute(
        connection,
        f"""
        CREATE TABLE differing_episodes AS
        SELECT {_EPISODE}, 1 AS n, CASE WHEN going_on THEN 'changed'
                                        WHEN n_a = 0 THEN 'added' ELSE 'removed' END AS kind
        FROM (
            SELECT counts.*, ({_EPISODE}) IN (SELECT ({_EPISODE}) FROM going_on) AS going_on
            FROM counts WHERE n_a = 0 OR n_b = 0
        )
        UNION ALL SELECT DISTINCT {_EPISODE}, 1, 'changed' FROM unlike_steps
        """,
    )
    execute(
        connection,
        """
        CREATE TABLE differing_steps AS
        SELECT CASE WHEN n_a = 0 THEN 'added' ELSE 'removed' END AS kind, n_a + n_b AS n
        FROM counts WHERE n_a = 0 OR n_b = 0
        UNION ALL SELECT kind, 1 FROM unlike_steps
        """,
    )


def _counts(connection: duckdb.DuckDBPyConnection, table: str) -> ChangeCounts:
    rows = execute(connection, f"SELECT kind, sum(n) AS n FROM {table} GROUP BY kind").to_pylist()
    return ChangeCounts(**{row["kind"]: int(row["n"]) for row in rows})


def _keys(connection: duckdb.DuckDBPyConnection, kind: str, limit: int) -> tuple[EpisodeKey, ...]:
    rows = execute(
        connection,
        f"SELECT {_EPISODE} FROM differing_episodes WHERE kind = $kind ORDER BY ALL LIMIT $limit",
        {"kind": kind, "limit": limit},
    ).to_pylist()
    return tuple(EpisodeKey(row[schema.EPISODE_ID], row[schema.AGENT_ID]) for row in rows)


def _count_changed_columns(
    connection: duckdb.DuckDBPyConnection, names: Sequence[str]
) -> dict[str, int]:
    columns = [name for name in names if name not in _STEP.split(", ")]
    counts = ", ".join(f'count(*) FILTER ("{c}") AS "{c}"' for c in columns)
    query = f"SELECT {counts} FROM unlike_steps WHERE kind = 'changed'"
    row: dict[str, Any] = execute(connection, query).to_pylist()[0]
    return {name: number for name, number in row.items() if number}


def _union(a: pa.Schema, b: pa.Schema) -> pa.Schema:
    """Return the columns of both, found by the field ids that they have for life."""
    longer, other = (a, b) if len(a) >= len(b) else (b, a)
    return pa.schema([*longer, *(f for f in other if f.name not in longer.names)])
