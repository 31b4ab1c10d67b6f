"""Earlier versions: what they have that the newest has not, and which of them name some shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from replaylake.datastore.episodes.schema import EPISODE_ID, SOURCE_EPISODE_ID
from replaylake.datastore.feedback.decisions import DECISION_ID
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.tombstones import identify, merge_subjects
from replaylake.datastore.maintenance.delete import find_feedback, select_episode_ids
from replaylake.datastore.maintenance.episode_condition import EpisodeCondition
from replaylake.datastore.maintenance.removal import select_received
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_arrow,
    scan_connection,
)
from replaylake.datastore.storage.log.state import Change, FileEntry
from replaylake.datastore.storage.storage import Blob
from replaylake.datastore.storage.table.shard import FOLDER
from replaylake.datastore.storage.table.table import Table, TableSnapshot

# Finds the ids that a condition selects in a version.
Select = Callable[[TableSnapshot, EpisodeCondition], pa.Array]


def select_in_all_versions(
    table: Table, condition: EpisodeCondition, select: Select | None = None
) -> pa.Array:
    """Return the ids of the episodes that a condition selects, in the last version that has each.

    `select` is for a table of other rows than steps. Of a version of which shards are gone, what is
    left counts. Cost: a scan of the newest version, and one of the ids for each commit that took
    rows out.
    """
    newest = table.snapshot()
    select = select or select_episode_ids
    selections = [select(newest, condition)]
    decided = _ids(newest, newest.files)
    for before, after, removed in _removals(table):
        lost_ids = _without(_ids(before, removed), [decided, _ids(after, after.files)])
        if not len(lost_ids):
            continue
        decided = _union([decided, lost_ids])
        selection = select(before, condition)
        selections.append(selection.filter(pc.is_in(selection, value_set=lost_ids)))
    return _union(selections)


def find_feedback_in_all_versions(handle: Dataset, episodes: pa.Array) -> pa.Array:
    """Return the ids of the decisions of episodes, in any version.

    An old row of decisions that is in the newest version no more counts as theirs by its client's
    id alone: which of that client's episodes it was of cannot be told.
    """
    steps = _old_rows(handle.table, [EPISODE_ID, DECISION_ID, SOURCE_EPISODE_ID])
    mine = steps.filter(pc.is_in(steps.column(EPISODE_ID), value_set=episodes))
    columns = [find_feedback(handle, handle.table.snapshot(), episodes), _column(mine, DECISION_ID)]
    if handle.decisions.exists():
        clients = _column(mine, SOURCE_EPISODE_ID)
        rows = _old_rows(handle.decisions, [DECISION_ID, EPISODE_ID])
        same = rows.filter(pc.is_in(rows.column(EPISODE_ID), value_set=clients))
        live = handle.decisions.snapshot().read([DECISION_ID]).column(DECISION_ID)
        others = steps.filter(pc.invert(pc.is_in(steps.column(EPISODE_ID), value_set=episodes)))
        live_columns = [live.combine_chunks(), _column(others, DECISION_ID)]
        columns.append(_without(_column(same, DECISION_ID), live_columns))
    return _union(columns)


def select_waiting_in_all_versions(handle: Dataset, condition: EpisodeCondition) -> pa.Array:
    """Return received episodes that a condition selects, and of which no version has a step."""
    ids = select_in_all_versions(handle.received, condition, select_received)
    return _without(ids, [_column(_old_rows(handle.table, [EPISODE_ID]), EPISODE_ID)])


def find_identities_in_all_versions(handle: Dataset, episodes: pa.Array) -> dict[str, list[str]]:
    """Return the ids by which episodes can be told when they are sent again, in any version."""
    found = []
    for table in (handle.table, handle.received, handle.rejected):
        if table.exists():
            rows = _old_rows(table, [EPISODE_ID, SOURCE_EPISODE_ID])
            found.append(identify(rows.filter(pc.is_in(rows[EPISODE_ID], value_set=episodes))))
    return merge_subjects(*found)


def find_returned_in_all_versions(handle: Dataset) -> tuple[pa.Array, pa.Array]:
    """Return ids of episodes, and of decisions, that were deleted and are in some version again."""
    deleted = handle.tombstones
    episodes, decisions = [pa.array([], pa.string())], pa.array([], pa.string())
    for table in (handle.table, handle.received, handle.rejected):
        if len(deleted) and table.exists():
            rows = _old_rows(table, sorted({EPISODE_ID, *deleted.columns}))
            episodes.append(_column(rows.filter(pa.array(deleted.find(rows))), EPISODE_ID))
    if len(deleted) and handle.decisions.exists():
        rows = _old_rows(handle.decisions, [DECISION_ID, EPISODE_ID])
        gone = pa.array(deleted.find(rows, {SOURCE_EPISODE_ID: EPISODE_ID}))
        decisions = _column(rows.filter(gone), DECISION_ID)
    return _union(episodes), decisions


def list_named_paths(table: Table) -> set[str]:
    """Return the paths below the table of all shards that a version of its log names."""
    paths = set(table.log.at(table.log.oldest()).files)
    for change in _changes(table):
        paths |= {entry.path for entry in change.added}
    return paths


def find_versions_with(table: Table, paths: Collection[str]) -> tuple[tuple[int, int], ...]:
    """Return ranges (both ends in) of the versions that name one of these files of the lake."""
    relative = {path.removeprefix(f"{table.root}/") for path in paths}
    live = relative & set(table.log.at(table.log.oldest()).files)
    ranges: list[tuple[int, int]] = []
    begin = table.log.oldest() if live else None
    for change in _changes(table):
        live = live.difference(change.removed) | relative.intersection(e.path for e in change.added)
        if live and begin is None:
            begin = change.version
        elif not live and begin is not None:
            ranges.append((begin, change.version - 1))
            begin = None
    if begin is not None:
        ranges.append((begin, table.log.newest().version))
    return tuple(ranges)


def _changes(table: Table) -> Iterator[Change]:
    """Yield what each commit after the oldest version changed."""
    for version in range(table.log.oldest() + 1, table.log.newest().version + 1):
        yield table.log.read_change(version)


def _removals(
    table: Table,
) -> Iterator[tuple[TableSnapshot, TableSnapshot, list[FileEntry]]]:
    """Yield what is left of the versions before and after each commit that took rows out.

    Newest first, with the shards that it took out.
    """
    changes = list(_changes(table))
    present = {f"{FOLDER}/{name}" for name in table.storage.names(f"{table.root}/{FOLDER}")}
    for change in reversed(changes):
        removed = set(change.dropped_paths)
        if removed & present:
            before, after = (
                replace(one, files=tuple(e for e in one.files if e.path in present))
                for one in (table.snapshot(change.version - 1), table.snapshot(change.version))
            )
            yield before, after, [e for e in before.files if e.path in removed]


def _ids(snapshot: TableSnapshot, entries: Collection[FileEntry]) -> pa.Array:
    if not entries:
        return pa.array([], pa.string())
    with fetch_files(snapshot, list(entries)) as paths, scan_connection() as connection:
        query = f"SELECT DISTINCT {EPISODE_ID} AS key FROM {from_clause(snapshot, paths)}"
        return query_arrow(connection, query).column("key").combine_chunks()


def _old_rows(table: Table, columns: list[str]) -> pa.Table:
    """Return columns of all shards of a table that are there and can be read, as text."""
    schema = pa.schema([(name, pa.string()) for name in columns])
    tables = [schema.empty_table()]
    for name in table.storage.names(f"{table.root}/{FOLDER}"):
        path = f"{table.root}/{FOLDER}/{name}"
        blob = Blob(path)
        try:
            (local,) = table.storage.fetch([blob])
            with pq.ParquetFile(local) as file:
                present = [name for name in columns if name in file.schema_arrow.names]
                rows = file.read(columns=present)
        except (pa.ArrowException, OSError):
            continue  # whether it may stay is for the scan at the end to say
        finally:
            table.storage.release([blob])
        cells = [
            rows.column(name).cast(pa.string())
            if name in present
            else pa.nulls(rows.num_rows, pa.string())
            for name in columns
        ]
        tables.append(pa.table(cells, schema=schema))
    return pa.concat_tables(tables)


def _column(rows: pa.Table, name: str) -> pa.Array:
    return rows.column(name).combine_chunks().drop_null().unique()


def _union(arrays: list[pa.Array]) -> pa.Array:
    return pa.chunked_array(arrays, pa.string()).combine_chunks().unique()


def _without(array: pa.Array, others: list[pa.Array]) -> pa.Array:
    for other in others:
        array = array.filter(pc.invert(pc.is_in(array, value_set=other)))
    return array
