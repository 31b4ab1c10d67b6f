"""Rewrite: change rows of a table by writing the shards that hold them again, in one commit.

Annotation, deletion and trimming are of this shape. Earlier versions keep their shards, and so
their rows. Other writers may append meanwhile; where one replaces a shard that is to be rewritten,
the change is planned again on the newest version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaylake.datastore.errors import CommitConflictError
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.table import Table, TableCommit, TableSnapshot

# The rows of one shard to the rows that take their place; no rows at all removes the shard.
ChangeRows = Callable[[pa.Table], pa.Table]


@dataclass(frozen=True)
class RewritePlan:
    """Which shards change, and how; `info` goes to the commit. Without changes nothing is done.

    `dropped` are shards of which no row stays, where that is known without reading them; `added`
    are rows that come in the same commit.
    """

    changes: Mapping[FileEntry, ChangeRows]
    info: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[FileEntry, ...] = ()
    added: pa.Table | None = None


def rewrite(
    table: Table,
    plan: Callable[[TableSnapshot], RewritePlan],
    *,
    producer: str,
    sequence: int,
    operation: str,
    shard_bytes: int | None = None,
) -> TableCommit | None:
    """Plan a change on the newest version and commit it; None if it changes nothing.

    `plan` is called again when another writer was first. The same (producer, sequence) again
    changes nothing. `shard_bytes`: as Table.write takes it. Memory: one shard before and after its
    change.

    Raises: ShardCorruptError before anything changes, SchemaMismatchError, and what `plan` raises.
    """
    if (version := table.find_commit(producer, sequence)) is not None:
        return TableCommit(version, True, 0, 0, 0)
    while True:
        snapshot = table.snapshot()
        planned = plan(snapshot)
        if not planned.changes and not planned.dropped and planned.added is None:
            return None
        written = []
        for entry, change in planned.changes.items():
            rows = change(replace(snapshot, files=(entry,)).read())
            if rows.num_rows:
                written.append(table.write(rows, since=entry.since, shard_bytes=shard_bytes))
        if planned.added is not None:
            written.append(table.write(planned.added))
        try:
            return table.commit(
                written,
                producer=producer,
                sequence=sequence,
                operation=operation,
                info=planned.info,
                removed=[entry.path for entry in (*planned.changes, *planned.dropped)],
            )
        except CommitConflictError:
            # A compactor or another rewrite replaced one of these shards: its rows are elsewhere.
            continue


def with_values(rows: pa.Table, name: str, at: NDArray[np.int64], values: pa.Array) -> pa.Table:
    """Return rows with `values` at the places `at` of a column; a new one is null elsewhere.

    Values of a column that is there have its type.
    """
    if name not in rows.column_names:
        rows = rows.append_column(name, pa.nulls(rows.num_rows, values.type))
    # Taken from both, because replace_with_mask knows no lists, structs or dictionaries.
    column = rows.column(name)
    both = pa.chunked_array([*column.chunks, values], column.type).unify_dictionaries()
    place = np.arange(rows.num_rows)
    place[at] = rows.num_rows + np.arange(len(values))
    taken = both.combine_chunks().take(pa.array(place))
    number = rows.schema.get_field_index(name)
    return rows.set_column(number, rows.schema.field(name), taken)
