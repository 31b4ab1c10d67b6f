"""Views: what makes the tables that a query names, and no others, over the files of a version."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import duckdb
import pyarrow as pa

from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.query import (
    episode_views,
    group_views,
    sequence_views,
    summaries,
)
from replaylake.datastore.query.scan import scan
from replaylake.datastore.query.statements import execute
from replaylake.datastore.storage.table.presence import check_shards_present
from replaylake.datastore.storage.table.shard import blob_of
from replaylake.datastore.storage.table.table import TableSnapshot

LAKE_VIEWS: Final = (
    "commits",
    "datasets",
    "evaluations",
    "metrics",
    "policies",
    "promotions",
    "runs",
    "shards",
)
STEP_VIEWS: Final = (
    "steps",
    "episodes",
    "games",
    "transitions",
    "sequences",
    "groups",
    "preference_pairs",
)
# Each of a table of its own.
_PLAIN_VIEWS: Final = ("decisions", "rewards", "received", "quarantine")
DATASET_VIEWS: Final = (*STEP_VIEWS, *_PLAIN_VIEWS)
# Whole rows of logs, as text: no part of it is of a column alone.
_UNDIVIDED_VIEWS: Final = ("quarantine",)
# Of each view that is computed, the columns of steps that its own columns depend on.
COLUMN_SOURCES: Final[Mapping[str, Mapping[str, Set[str]]]] = {
    "episodes": episode_views.EPISODE_SOURCES,
    "games": episode_views.GAME_SOURCES,
    "transitions": episode_views.TRANSITION_SOURCES,
    "sequences": sequence_views.SEQUENCE_SOURCES,
    "groups": group_views.GROUP_SOURCES,
    "preference_pairs": group_views.PAIR_SOURCES,
}


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

    def columns(self, dataset: str) -> Set[str] | None:
        """Return the only columns of a dataset that the query's author may read; None for all."""
        ...


@dataclass
class Views:
    """What makes the views that a query names: tables to register, statements to run.

    `names` are those of the views, (dataset or "", view); `paths` are all files that the statements
    read.
    """

    names: list[tuple[str, str]] = field(default_factory=list)
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

    def add(
        self,
        prefix: str,
        names: Collection[str],
        steps: TableSnapshot,
        columns: Set[str] | None = None,
    ) -> None:
        """Add views of steps, each called `<prefix><name>`.

        columns: the only columns of steps that may be read, and nothing that depends on others.
        Raises: NotFoundError, ShardCorruptError.
        """
        readable = [name for name in steps.schema.names if columns is None or name in columns]
        check_shards_present(steps)
        selects = {}
        if not {*STEP_VIEWS}.difference(("episodes", "games")).isdisjoint(names):
            source = self._scan(steps)
            selects = {
                "steps": f"SELECT * FROM {source}",
                "transitions": episode_views.transitions_sql(source),
            }
            if "sequences" in names:
                selects["sequences"] = sequence_views.sequences_sql(source, steps.schema, readable)
            if "groups" in names:
                selects["groups"] = group_views.groups_sql(source, readable)
            if "preference_pairs" in names:
                selects["preference_pairs"] = group_views.preference_pairs_sql(
                    source, steps.schema, readable
                )
        if "episodes" in names or "games" in names:
            groups = self._groups(prefix, steps)
            selects["episodes"] = episode_views.episodes_sql(groups)
            selects["games"] = episode_views.games_sql(groups)
        for name in names:
            select = selects[name]
            if columns is not None:
                visible = _list_visible(prefix, name, steps.schema, columns)
                select = f"SELECT {', '.join(visible)} FROM ({select})"
            self.statements.append(f"CREATE VIEW {prefix}{name} AS {select}")

    def add_plain(
        self, name: str, snapshot: TableSnapshot, columns: Set[str] | None = None
    ) -> None:
        """Add a view of a table's rows as they are, of these columns.

        Raises: NotFoundError, ShardCorruptError.
        """
        selected = "*"
        if columns is not None:
            dataset, _, view = name.partition(".")
            selected = ", ".join(_list_visible(f"{dataset}.", view, snapshot.schema, columns))
        check_shards_present(snapshot)
        self.statements.append(
            f"CREATE VIEW {name} AS SELECT {selected} FROM {self._scan(snapshot)}"
        )

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
                views.names.append(("", view))
            else:
                _refuse_without_dataset(view, catalog)
        elif view in DATASET_VIEWS:
            by_dataset.setdefault(dataset, []).append(view)
        elif dataset in catalog.datasets():
            raise _unknown_view_error(dataset, view, DATASET_VIEWS)
    for dataset, group in by_dataset.items():
        views.statements.append(f"CREATE SCHEMA {dataset}")
        of_steps = [view for view in group if view in STEP_VIEWS]
        # One look at the log: all views of a dataset are of one version.
        if of_steps and (steps := catalog.table(dataset, of_steps[0])) is not None:
            views.add(f"{dataset}.", of_steps, steps, catalog.columns(dataset))
            views.names += [(dataset, view) for view in of_steps]
        for view in group:
            if view in _PLAIN_VIEWS and (table := catalog.table(dataset, view)) is not None:
                views.add_plain(f"{dataset}.{view}", table, catalog.columns(dataset))
                views.names.append((dataset, view))
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


def _list_visible(prefix: str, view: str, schema: pa.Schema, columns: Set[str]) -> list[str]:
    """Return the columns of a view that depend on none but these, as identifiers.

    Raises: NotFoundError if the view has none of them.
    """
    names = _find_visible(view, schema, columns)
    if not names:
        others = [other for other in STEP_VIEWS if _find_visible(other, schema, columns)]
        raise _unknown_view_error(prefix.removesuffix("."), view, others)
    return ['"' + name.replace('"', '""') + '"' for name in names]


def _find_visible(view: str, schema: pa.Schema, columns: Set[str]) -> list[str]:
    if view in _UNDIVIDED_VIEWS:
        return []
    sources = COLUMN_SOURCES.get(view, {})
    if view == "sequences":
        sources = {**sources, **sequence_views.find_per_token_sources(schema)}
    has_own = view not in COLUMN_SOURCES or view == "transitions"
    # What a dataset lacks hides nothing.
    hidden = frozenset(schema.names) - columns
    return [
        *(name for name in schema.names if has_own and name in columns),
        *(name for name, needed in sources.items() if not needed & hidden),
    ]


def _unknown_view_error(dataset: str, view: str, views: Collection[str]) -> NotFoundError:
    expected = ", ".join(views) or "none: none of its columns may be read"
    return NotFoundError(f"{dataset}.{view}: found no such view, expected {expected}.")


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
