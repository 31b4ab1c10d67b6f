"""TableSnapshot: the files of one version of a table, and its rows as Arrow."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.storage import Blob, Storage
from replaylake.datastore.storage.table.shard import blob_of, decode_shard, verify_shard
from replaylake.datastore.storage.table.table_schema import conform

_FETCH_BATCH: Final = 16


@dataclass(frozen=True)
class TableSnapshot:
    """The files of one version, those with the oldest rows first. Never changes."""

    version: int
    schema: pa.Schema
    files: tuple[FileEntry, ...]
    configuration: Mapping[str, str]
    storage: Storage
    root: str

    @property
    def num_rows(self) -> int:
        """Rows in all files."""
        return sum(entry.num_rows for entry in self.files)

    def paths(self) -> list[Path]:
        """Return local paths, in the order of `files`."""
        return self.storage.fetch([blob_of(self.root, entry) for entry in self.files])

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read and verify shard by shard; absent columns come as nulls.

        While one is decoded and used, the next is hashed. Raises: ShardCorruptError.
        """
        names = list(self.schema.names if columns is None else columns)
        schema = self.select_fields(names)
        for path in self.iter_verified():
            yield conform(decode_shard(path, names), schema)

    def iter_verified(self) -> Iterator[Path]:
        """Return the shards' paths, each once its sha256 was checked. Raises: ShardCorruptError."""
        if len(self.files) == 1:
            for path, entry in self._copies():
                verify_shard(path, entry)
                yield path
            return
        with ThreadPoolExecutor(1, "replaylake-hash") as pool, closing(self._copies()) as copies:
            # One ahead and no more: a shard is best decoded while the page cache still has it.
            checks = ((path, pool.submit(verify_shard, path, entry)) for path, entry in copies)
            following = next(checks, None)
            while following is not None:
                (path, check), following = following, next(checks, None)
                check.result()
                yield path

    def _copies(self) -> Generator[tuple[Path, FileEntry], None, None]:
        """Yield the files, a few fetched at a time: a remote table may be larger than this disk.

        A group is let go two groups later, when nobody who reads one ahead has any of it.
        """
        batches: deque[list[Blob]] = deque()
        try:
            for start in range(0, len(self.files), _FETCH_BATCH):
                entries = self.files[start : start + _FETCH_BATCH]
                blobs = [blob_of(self.root, entry) for entry in entries]
                paths = self.storage.fetch(blobs)
                batches.append(blobs)
                if len(batches) > 2:
                    self.storage.release(batches.popleft())
                yield from zip(paths, entries, strict=True)
        finally:
            for blobs in batches:
                self.storage.release(blobs)

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Read all rows. Raises: ShardCorruptError."""
        names = list(self.schema.names if columns is None else columns)
        tables = list(self.batches(names))
        schema = self.select_fields(names)
        return pa.concat_tables(tables) if tables else schema.empty_table()

    def select_fields(self, names: Sequence[str]) -> pa.Schema:
        """Return the fields of some columns. Raises: NotFoundError naming those that are absent."""
        if missing := [name for name in names if name not in self.schema.names]:
            raise NotFoundError(
                f"{self.root}: found no column {', '.join(missing)}, expected some of "
                f"{', '.join(self.schema.names)}."
            )
        return pa.schema([self.schema.field(name) for name in names])
