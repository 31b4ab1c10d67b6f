"""Views: what makes the tables that a query names, and no others, over the files of a version."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import duckdb
import pyarrow as pa

from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.query import episode_views, summaries
from replaylake.datastore.query.scan import scan
from replaylake.datastore.query.statements import execute
from replaylake.datastore.storage.table.presence import check_shards_present
from replaylake.datastore.storage.table.shard import blob_of
from replaylake.datastore.storage.table.table import TableSnapshot

LAKE_VIEWS: Final = (
    "commits",
    "datasets",
    "metrics",
    "policies",
    "promotions",
    "runs",
    "shards",
)
STEP_VIEWS: Final = ("steps", "episodes", "games", "transitions")
# Each of a table of its own.
_PLAIN_VIEWS: Final = ("decisions", "rewards", "received", "quarantine")
DATASET_VIEWS: Final = (*STEP_VIEWS, *_PLAIN_VIEWS)


class Catalog(Protocol):
    """Finds what a query names."""

    def datasets(self) -> list[str]:
        """Return the names of all datasets."""
        ...

    def table(self, dataset: str, view: str) -> TableSnapshot | None:
        """Return the pinned table behind a view (of steps, or one of its own); None if none."""
        ...

    def relation(self, name: str) -> pa.Table | None:
        """Return a lake-wide relation such as `policies`; None if there is no such name."""
        ...


@dataclass
class Views:
    """What makes the views that a query names: tables to register, statements to run.

    `paths` are all files that the statements read.
    """

    statements: list[str] = field(default_factory=list)
    relations: dict[str, pa.Table] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    _fetched: list[TableSnapshot] = field(default_factory=list)

    def create(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Make the views in a connection. Raises: QueryError."""
        for name, table in self.relations.items():
            connection.register(name, table)
        for statement in self.statements:
            execute(connection, statement)

    def release(self) -> None:
        """Say that the files are no longer read: local copies of remote ones may go."""
        for snapshot in self._fetched:
            blobs = [blob_of(snapshot.root, entry) for entry in snapshot.files]
            snapshot.storage.release(blobs)

    def add(self, prefix: str, names: Collection[str], steps: TableSnapshot) -> None:
        """Add views of steps, each called `<prefix><name>`.

        Raises: NotFoundError, ShardCorruptError.
        """
        check_shards_present(steps)
        selects = {}
        if "steps" in names or "transitions" in names:
            source = self._scan(steps)
            selects = {
                "steps": f"SELECT * FROM {source}",
                "transitions": episode_views.transitions_sql(source),
            }
        if "episodes" in names or "games" in names:
            groups = self._groups(prefix, steps)
            selects["episodes"] = episode_views.episodes_sql(groups)
            selects["games"] = episode_views.games_sql(groups)
        for name in names:
            self.statements.append(f"CREATE VIEW {prefix}{name} AS {selects[name]}")

    def add_plain(self, name: str, snapshot: TableSnapshot) -> None:
        """Add a view of a table's rows as they are. Raises: NotFoundError, ShardCorruptError."""
        check_shards_present(snapshot)
        self.statements.append(f"CREATE VIEW {name} AS SELECT * FROM {self._scan(snapshot)}")

    def _groups(self, prefix: str, steps: TableSnapshot) -> str:
        """Return a SELECT of episodes and agents, of their summary as far as there is one."""
        known = summaries.read_coverage(steps)
        if known is None:
            return episode_views.group_rows_sql(self._scan(steps))
        table = f"pieces of {prefix or 'episodes'}"
        self.relations[table] = known.pieces
        pieces = f'SELECT * FROM "{table}"'
        if known.rest:
            rest = self._scan(replace(steps, files=known.rest))
            pieces += f" UNION ALL {episode_views.group_rows_sql(rest)}"
        elif known.is_distinct:
            return pieces
        return episode_views.group_pieces_sql(pieces)

    def _scan(self, snapshot: TableSnapshot) -> str:
        paths = [str(path) for path in snapshot.paths()]
        self._fetched.append(snapshot)
        self.paths += paths
        return scan(snapshot, paths)


def plan_views(names: Iterable[tuple[str, str]], catalog: Catalog) -> Views:
    """Find what makes the views of these names, as `find_tables` gives them.

    A name that is neither a view nor like one is left for DuckDB to refuse. Raises: NotFoundError,
    ShardCorruptError.
    """
    views = Views()
    by_dataset: dict[str, list[str]] = {}
    for dataset, view in dict.fromkeys(names):
        if not dataset:
            relation = catalog.relation(view) if view in LAKE_VIEWS else None
            if relation is not None:
                views.relations[view] = relation
            else:
                _refuse_without_dataset(view, catalog)
        elif view in DATASET_VIEWS:
            by_dataset.setdefault(dataset, []).append(view)
        elif dataset in catalog.datasets():
            raise NotFoundError(
                f"{dataset}.{view}: found no such view, expected {', '.join(DATASET_VIEWS)}."
            )
    for dataset, group in by_dataset.items():
        views.statements.append(f"CREATE SCHEMA {dataset}")
        of_steps = [view for view in group if view in STEP_VIEWS]
        # One look at the log: all views of a dataset are of one version.
        if of_steps and (steps := catalog.table(dataset, of_steps[0])) is not None:
            views.add(f"{dataset}.", of_steps, steps)
        for view in group:
            if view in _PLAIN_VIEWS and (table := catalog.table(dataset, view)) is not None:
                views.add_plain(f"{dataset}.{view}", table)
    return views


def create_dataset_views(
    connection: duckdb.DuckDBPyConnection, prefix: str, steps: TableSnapshot
) -> None:
    """Create steps and episodes, each named `<prefix><view>`, from the steps and nothing derived.

    Raises: NotFoundError, ShardCorruptError.
    """
    source = scan(steps)
    groups = episode_views.group_rows_sql(source)
    execute(connection, f"CREATE VIEW {prefix}steps AS SELECT * FROM {source}")
    execute(connection, f"CREATE VIEW {prefix}episodes AS {episode_views.episodes_sql(groups)}")


def _refuse_without_dataset(view: str, catalog: Catalog) -> None:
    """Refuse a dataset's view, or a dataset, alone: DuckDB would suggest tables of its own."""
    names = catalog.datasets()
    if view not in (*DATASET_VIEWS, *names):
        return
    if view in names:
        expected = f"one of its views, such as {view}.steps"
    elif names:
        expected = f"the dataset before it: {', '.join(f'{name}.{view}' for name in names[:5])}"
    else:
        expected = f"<dataset>.{view}, and this lake has no dataset yet: ingest one"
    raise NotFoundError(f"{view}: found no such view of the lake, expected {expected}.")
