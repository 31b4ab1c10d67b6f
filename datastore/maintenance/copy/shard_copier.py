"""Copy shards: one shard of a snapshot into another table, checked on the way."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.schema import AGENT_ID, EPISODE_ID
from replaylake.datastore.errors import NotFoundError, ShardCorruptError
from replaylake.datastore.names import content_ulid, new_ulid
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.storage import StoredFile
from replaylake.datastore.storage.table.shard import FOLDER, blob_of, read_shard
from replaylake.datastore.storage.table.table import Table, TableSnapshot, WrittenRows
from replaylake.datastore.storage.table.table_schema import conform, has_other_ids, merge_schemas

# A shard that an earlier copy put down, before it was killed, is used again while it is younger. An
# older one is left to vacuum, which may be about to delete it.
_REUSE_MS: Final = 86_400_000


class ShardCopier:
    """Puts shards of one snapshot durably into a table, for its `commit` to make readable."""

    def __init__(self, source: TableSnapshot, target: Table) -> None:
        self._source = source
        self._target = target
        self._remaining: dict[str, StoredFile] | None = None
        self._paths = set(target.log.newest().files)

    def copy_whole(self, entry: FileEntry) -> WrittenRows:
        """Put a shard into the target, as it is where its field ids are the target's too."""
        schema = self._source.schema
        if has_other_ids(merge_schemas(self._target.snapshot().schema, schema), schema):
            return self._target.write(conform(self.read(entry), schema))
        path, modified_ms = self._place(entry)
        if modified_ms is None:
            where = f"{self._source.root}/{entry.path}"
            data = self._source.storage.get(where)
            if data is None:
                raise NotFoundError(
                    f"copy {self._source.root}@{self._source.version}: found no {where}, "
                    "expected the shard that this version names: it was vacuumed meanwhile. Copy "
                    "the newest version."
                )
            if hashlib.sha256(data).hexdigest() != entry.sha256:
                raise ShardCorruptError(
                    f"{where}: found another sha256 than the log has. Nothing was added to the "
                    "target. `replaylake fsck --repair` removes the shard."
                )
            self._target.storage.put(f"{self._target.root}/{path}", data)
            modified_ms = time.time_ns() // 1_000_000
        moved = FileEntry(path, entry.size_bytes, entry.num_rows, entry.sha256, modified_ms)
        return WrittenRows(schema, (moved,))

    def _place(self, entry: FileEntry) -> tuple[str, int | None]:
        """Return a shard's path in the target, and since when (ms) it is there, None if it is not.

        Named by its content, so that a copy that was killed is found: files come whole or not at
        all. Under that name once; two shards of a source may have the same bytes.
        """
        if self._remaining is None:
            files = self._target.storage.files(f"{self._target.root}/{FOLDER}")
            self._remaining = {file.path: file for file in files}
        path = f"{FOLDER}/{content_ulid(entry.sha256)}.parquet"
        if path in self._paths:
            return f"{FOLDER}/{new_ulid()}.parquet", None
        self._paths.add(path)
        file = self._remaining.get(f"{self._target.root}/{path}")
        if file is None:
            return path, None
        is_young = file.modified_ms > time.time_ns() // 1_000_000 - _REUSE_MS
        if is_young and file.size_bytes == entry.size_bytes:
            return path, file.modified_ms
        return f"{FOLDER}/{new_ulid()}.parquet", None

    def copy_missing(
        self, entry: FileEntry, present: Sequence[int]
    ) -> tuple[int, WrittenRows] | None:
        """Write the rows that the target lacks, and count their episodes; None if it has all."""
        mask = np.ones(entry.num_rows, dtype=bool)
        mask[np.asarray(present, dtype=np.int64)] = False
        rows = self.read(entry).filter(pa.array(mask))
        if not rows.num_rows:
            return None
        num = rows.group_by([EPISODE_ID, AGENT_ID]).aggregate([]).num_rows
        return num, self._target.write(conform(rows, self._source.schema))

    def read(self, entry: FileEntry) -> pa.Table:
        """Read a shard of the source. Raises: ShardCorruptError."""
        storage, blob = self._source.storage, blob_of(self._source.root, entry)
        (path,) = storage.fetch([blob])
        try:
            return read_shard(path, entry)
        finally:
            storage.release([blob])
