"""Copy shards: one shard of a snapshot into another table, checked on the way."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.errors import NotFound, ShardCorrupt
from replaylake.datastore.log.state import FileEntry
from replaylake.datastore.schema import AGENT_ID, EPISODE_ID
from replaylake.datastore.shard import FOLDER, blob_of, read_shard
from replaylake.datastore.storage import StoredFile
from replaylake.datastore.table import Table, TableSnapshot, WrittenRows
from replaylake.datastore.table_schema import conform, has_other_ids, merged_schema

# A shard that an earlier copy put down, before it was killed, is used again while no vacuum can
# have taken it for an orphan.
_REUSE_MS: Final = 86_400_000


class ShardMover:
    """Puts shards of one snapshot durably into a table, for its `commit` to make readable."""

    def __init__(self, source: TableSnapshot, target: Table) -> None:
        self._source = source
        self._target = target
        self._left: dict[str, StoredFile] | None = None

    def whole(self, entry: FileEntry) -> WrittenRows:
        """Put a shard into the target, as it is where its field ids are the target's too."""
        schema = self._source.schema
        if has_other_ids(merged_schema(self._target.snapshot().schema, schema), schema):
            return self._target.write(conform(self._read(entry), schema))
        path = f"{FOLDER}/{entry.sha256[:40]}.parquet"
        now_ms = time.time_ns() // 1_000_000
        if not self._is_there(path, entry, now_ms):
            where = f"{self._source.root}/{entry.path}"
            data = self._source.storage.get(where)
            if data is None:
                raise NotFound(
                    f"copy {self._source.root}@{self._source.version}: found no {where}, "
                    "expected the shard that this version names: it was vacuumed meanwhile. Copy "
                    "the newest version."
                )
            if hashlib.sha256(data).hexdigest() != entry.sha256:
                raise ShardCorrupt(
                    f"{where}: found another sha256 than the log has. Nothing was added to the "
                    "target. `replaylake fsck --repair` takes the shard out."
                )
            self._target.storage.put(f"{self._target.root}/{path}", data)
        moved = FileEntry(path, entry.size_bytes, entry.num_rows, entry.sha256, now_ms)
        return WrittenRows(schema, (moved,))

    def _is_there(self, path: str, entry: FileEntry, now_ms: int) -> bool:
        """Whether a copy that was killed left this shard here: files come whole or not at all."""
        if self._left is None:
            files = self._target.storage.files(f"{self._target.root}/{FOLDER}")
            self._left = {file.path: file for file in files}
        file = self._left.get(f"{self._target.root}/{path}")
        return (
            file is not None
            and file.size_bytes == entry.size_bytes
            and file.modified_ms > now_ms - _REUSE_MS
        )

    def without(self, entry: FileEntry, present: Sequence[int]) -> tuple[int, WrittenRows] | None:
        """Write the rows that the target lacks, and count their episodes; None if it has all."""
        kept = np.ones(entry.num_rows, dtype=bool)
        kept[np.asarray(present, dtype=np.int64)] = False
        rows = self._read(entry).filter(pa.array(kept))
        if not rows.num_rows:
            return None
        num = rows.group_by([EPISODE_ID, AGENT_ID]).aggregate([]).num_rows
        return num, self._target.write(conform(rows, self._source.schema))

    def _read(self, entry: FileEntry) -> pa.Table:
        storage, blob = self._source.storage, blob_of(self._source.root, entry)
        (path,) = storage.fetch([blob])
        try:
            return read_shard(path, entry)
        finally:
            storage.release([blob])
