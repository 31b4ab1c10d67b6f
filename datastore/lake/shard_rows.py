"""ShardRows: rows of some shards of a version, for another process to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes import schema
from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.expressions import canonical_condition, select_episode_keys
from replaylake.datastore.storage.locations import open_storage
from replaylake.datastore.storage.table.table import TableSnapshot

_KEY: Final = (schema.EPISODE_ID, schema.AGENT_ID)


@dataclass(frozen=True)
class ShardRows:
    """Some columns of some shards of one version. May be pickled, and read where the files are."""

    table: TableSnapshot
    columns: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all the shards."""
        return self.table.num_rows

    @property
    def schema(self) -> pa.Schema:
        """What `read` returns: the columns, dictionaries decoded."""
        return pa.schema([_plain(self.table.schema.field(name)) for name in self.columns])

    def __reduce__(self) -> tuple[Any, ...]:
        # Storage is connections and caches of this process: another one opens its own.
        table = self.table
        parts = {
            "version": table.version,
            "schema": table.schema,
            "files": table.files,
            "configuration": dict(table.configuration),
            "root": table.root,
        }
        return _rebuild, (table.storage.url, parts, self.columns)

    def split(self, num_parts: int) -> list[ShardRows]:
        """Return at most `num_parts` parts, each of neighboring shards, one at least."""
        files = self.table.files
        num_parts = max(1, min(num_parts, len(files)))
        bounds = [len(files) * number // num_parts for number in range(num_parts + 1)]
        return [
            replace(self, table=replace(self.table, files=files[start:end]))
            for start, end in pairwise(bounds)
        ]

    def read(self, episodes: pa.Array | None = None) -> Iterator[pa.Table]:
        """Yield the rows shard by shard, in the order written; absent columns are nulls.

        `episodes` are those to keep, as `episode_keys` has them. Raises: ShardCorruptError.
        """
        names = [
            *self.columns,
            *(n for n in _KEY if episodes is not None and n not in self.columns),
        ]
        for rows in self.table.batches(names):
            if episodes is not None:
                rows = rows.filter(pc.is_in(_keys(rows), value_set=episodes))
            plain = [_decode_dictionary(rows[name]) for name in self.columns]
            yield pa.Table.from_arrays(plain, schema=self.schema)


def shard_rows(snapshot: Snapshot, columns: Sequence[str] | None = None) -> ShardRows:
    """Return columns of a snapshot's rows, all of them by default. Raises: NotFoundError."""
    known = snapshot.table.schema.names
    if missing := [name for name in columns or () if name not in known]:
        raise NotFoundError(
            f"{snapshot.dataset}@{snapshot.version}: found no column {', '.join(missing)}, "
            f"expected some of {', '.join(known)}."
        )
    return ShardRows(snapshot.table, tuple(known if columns is None else columns))


def episode_keys(snapshot: Snapshot, where: str) -> pa.Array:
    """Return which episodes a condition over `episodes` selects, for `ShardRows.read`.

    Raises: QueryRefusedError where it cannot be reproduced, QueryError.
    """
    return _keys(select_episode_keys(snapshot.table, canonical_condition(where))).combine_chunks()


def _rebuild(url: str, parts: dict[str, Any], columns: tuple[str, ...]) -> ShardRows:
    return ShardRows(TableSnapshot(**parts, storage=open_storage(url)), columns)


def _keys(rows: pa.Table) -> pa.ChunkedArray:
    episode, agent = (rows[name].cast(pa.string()) for name in _KEY)
    return pc.binary_join_element_wise(episode, agent, "\0")


def _decode_dictionary(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    return column.cast(kind.value_type) if pa.types.is_dictionary(kind) else column


def _plain(field: pa.Field) -> pa.Field:
    kind = field.type
    return field.with_type(kind.value_type) if pa.types.is_dictionary(kind) else field
