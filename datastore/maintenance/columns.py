"""Columns: a further column of a dataset gets another name, or leaves it.

Each is one commit: the schema changes, and the shards that hold the column are written again.
Earlier versions keep their schema and their shards. A change of the schema alone would be cheaper,
but a reader of Delta without its column mapping, and every reader of a single shard, finds a column
by its name in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from replaylake.datastore.episodes.schema import (
    STANDARD_COLUMNS,
    check_names,
    read_unique_keys,
    unique_setting,
)
from replaylake.datastore.errors import (
    CommitConflictError,
    ConfigInvalidError,
    NotFoundError,
    SchemaMismatchError,
)
from replaylake.datastore.feedback.decisions import (
    DECISION_ID,
    REQUEST_ID,
    REWARD_LATE,
    REWARDED_AT,
)
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.log.state import FileEntry, LogState
from replaylake.datastore.storage.table.delta_schema import field_id
from replaylake.datastore.storage.table.shard import blob_of, verify_shard
from replaylake.datastore.storage.table.table import Table, TableSnapshot
from replaylake.datastore.storage.table.table_schema import read_configuration, table_schema

# The join of feedback finds decisions by these.
_SERVED: Final = (DECISION_ID, REQUEST_ID, REWARDED_AT, REWARD_LATE)
# Settings of a dataset that hold names of other things than columns.
_OTHER_SETTINGS: Final = frozenset(
    (
        "replaylake.action_space",
        "replaylake.arrow_schema",
        "replaylake.encoding",
        "replaylake.env_spec",
        "replaylake.observation_space",
        "replaylake.retention",
        "replaylake.score_reference",
        "replaylake.tokenizer",
        "replaylake.unique_keys",
        "replaylake.written_by",
    )
)


@dataclass(frozen=True)
class ColumnReceipt:
    """What a change of a column did, or with `dry_run` would do.

    to: the column's new name; None if it was dropped. num_shards, num_rows and num_bytes: of the
    shards that are written again.
    """

    dataset: str
    dry_run: bool
    version: int | None
    column: str
    to: str | None
    num_shards: int
    num_rows: int
    num_bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def rename_column(lake: Lake, dataset: str, column: str, to: str) -> ColumnReceipt:
    """Give a further column of a dataset another name, from a new version on.

    Raises: NotFoundError for an unknown dataset or column; SchemaMismatchError for a column that
    ReplayLake itself uses, a name that is taken, and a column that a setting of the dataset names;
    ShardCorruptError. Cost: writes the shards that hold the column.
    """
    check_names([to])
    if to == column:
        raise ConfigInvalidError(
            f"{dataset}: found {to!r} as the new name of {column!r}, expected another.",
            parameter="to",
        )
    return _change_column(lake, dataset, column, to, dry_run=False)


def drop_column(lake: Lake, dataset: str, column: str, *, dry_run: bool = False) -> ColumnReceipt:
    """Take a further column out of a dataset, from a new version on.

    Earlier versions retain it until vacuum. dry_run: only count. Raises and cost: as rename_column.
    """
    return _change_column(lake, dataset, column, None, dry_run=dry_run)


def _change_column(
    lake: Lake, dataset: str, column: str, to: str | None, *, dry_run: bool
) -> ColumnReceipt:
    handle = lake.dataset(dataset)
    producer = f"columns/{new_ulid()}"
    while True:
        snapshot = handle.snapshot().table
        _check_column(handle, snapshot, column, to)
        holders = _find_holders(snapshot, column)
        receipt = ColumnReceipt(
            dataset,
            dry_run,
            None,
            column,
            to,
            len(holders),
            sum(entry.num_rows for entry in holders),
            sum(entry.size_bytes for entry in holders),
        )
        if dry_run:
            return receipt
        if to is not None:
            # Before the commit: under the new name nobody may come in who was deleted by the old.
            handle.tombstones.add_renaming(column, to)
        try:
            version = _commit_change(handle.table, snapshot, holders, column, to, producer)
            return replace(receipt, version=version)
        except CommitConflictError:
            # Another writer was first: what it wrote may hold the column, too.
            continue


def _commit_change(
    table: Table,
    snapshot: TableSnapshot,
    holders: list[FileEntry],
    column: str,
    to: str | None,
    producer: str,
) -> int:
    schema = _changed_schema(snapshot.schema, column, to)
    change = _rename_in(column, to)
    written = [
        table.write(
            change(replace(snapshot, files=(entry,)).read()), since=entry.since, schema=schema
        )
        for entry in holders
    ]
    paths = {entry.path for entry in snapshot.files}

    def check(state: LogState) -> None:
        configuration = read_configuration(state)
        if (
            set(state.files) != paths
            or table_schema(state) != snapshot.schema
            or read_unique_keys(configuration) != read_unique_keys(snapshot.configuration)
        ):
            raise CommitConflictError(
                f"{table.root}: found other shards, columns or keys, expected those read."
            )

    return table.commit(
        written,
        producer=producer,
        sequence=0,
        operation="DROP COLUMN" if to is None else "RENAME COLUMN",
        info={"column": column, **({} if to is None else {"to": to})},
        removed=[entry.path for entry in holders],
        check=check,
        schema=schema,
        configuration=_renamed_key(snapshot, column, to),
    ).version


def _renamed_key(snapshot: TableSnapshot, column: str, to: str | None) -> dict[str, str]:
    """Return the setting of the unique key with the new name, if it names the column."""
    unique = read_unique_keys(snapshot.configuration)
    if unique is None or to is None or column not in (*unique.columns, *unique.late):
        return {}
    return unique_setting(unique.rename(column, to))


def _changed_schema(schema: pa.Schema, column: str, to: str | None) -> pa.Schema:
    fields = [field for field in schema if to is not None or field.name != column]
    # The field id stays: it is the same column.
    return pa.schema(
        [field.with_name(to) if to and field.name == column else field for field in fields]
    )


def _rename_in(column: str, to: str | None) -> Callable[[pa.Table], pa.Table]:
    if to is None:
        return lambda rows: rows.drop_columns([column])
    return lambda rows: rows.rename_columns({column: to})


def _check_column(handle: Dataset, snapshot: TableSnapshot, column: str, to: str | None) -> None:
    names = snapshot.schema.names
    further = [name for name in names if name not in STANDARD_COLUMNS]
    doing = "dropped" if to is None else "renamed"
    if column not in names:
        raise NotFoundError(
            f"{handle.name}: found no column {column!r}, expected one of "
            f"{', '.join(further) or 'none, as it has no further columns'}.",
            parameter="column",
        )
    if column in STANDARD_COLUMNS or column in _SERVED:
        raise SchemaMismatchError(
            f"{handle.name}: column {column!r} cannot be {doing}: replay, evaluation and the join "
            f"of feedback read it by this name. Expected a further column: "
            f"{', '.join(name for name in further if name not in _SERVED) or 'there is none'}."
        )
    taken = {name.lower(): name for name in names if name != column}
    if to is not None and to.lower() in taken:
        raise SchemaMismatchError(
            f"{handle.name}: found a column {taken[to.lower()]!r}, expected a name that no other "
            f"column has, without regard to case. Drop that one first, or choose another name."
        )
    unique = read_unique_keys(snapshot.configuration)
    if to is None and unique is not None and column in (*unique.columns, *unique.late):
        what = "unique by it" if column in unique.columns else "told to take late values in it"
        raise SchemaMismatchError(
            f"{handle.name}: column {column!r} cannot be dropped: the dataset is {what}. Rename "
            "it, or ingest what is left into a new dataset."
        )
    for key, text in snapshot.configuration.items():
        if key.startswith("replaylake.") and key not in _OTHER_SETTINGS and _names(text, column):
            raise SchemaMismatchError(
                f"{handle.name}: column {column!r} cannot be {doing}: the dataset's setting "
                f"{key.removeprefix('replaylake.')} names it. Change that setting first."
            )


def _names(text: str, column: str) -> bool:
    """Whether a setting, JSON or plain text, has a column's name as one of its texts."""
    try:
        body = json.loads(text)
    except ValueError:
        body = text
    waiting = [body]
    while waiting:
        one = waiting.pop()
        if one == column:
            return True
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one
    return False


def _find_holders(snapshot: TableSnapshot, column: str) -> list[FileEntry]:
    """Return the shards that have the column. Cost: reads the footer of each."""
    number = field_id(snapshot.schema.field(column))
    holders = []
    for entry in snapshot.files:
        blob = blob_of(snapshot.root, entry)
        (path,) = snapshot.storage.fetch([blob])
        try:
            verify_shard(path, entry)
            schema = pq.read_schema(path)
        finally:
            snapshot.storage.release([blob])
        if any(field_id(field) == number for field in schema):
            holders.append(entry)
    return holders
