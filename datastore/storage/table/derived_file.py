"""DerivedFile: one file of a table with what was made from its shards, each shard once.

Shards never change, so what was made from one holds for every version that has it. Nothing depends
on the file: what it lacks is made again, and it may be deleted at any time.

It is `<folder>/<ulid>-<sha256>.parquet`; the last by name counts. Purge removes the shards first
and these files (`delete`) afterwards: who writes meanwhile looks at the shards again once the file
is there. Several processes may write at the same time: the last one wins, and what it lacks is made
again.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Generic, Protocol, Self, TypeVar

from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.arrow_values import release_unused_memory
from replaylake.datastore.storage.storage import Storage


class ShardData(Protocol):
    """What was made from some shards of a table."""

    @property
    def shards(self) -> tuple[str, ...]:
        """The paths of these shards, below the table."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        ...

    def select_shards(self, places: Sequence[int]) -> Self:
        """Return that of some of its shards, by their places in `shards`, which ascend."""
        ...


_Data = TypeVar("_Data", bound=ShardData)


class DerivedFile(Generic[_Data]):
    """The files of one kind, of all tables, and what this process remembers of them.

    Safe from several threads.
    """

    def __init__(
        self,
        folder: str,
        encode: Callable[[_Data], bytes],
        decode: Callable[[bytes], _Data | None],
        *,
        max_cached_bytes: int,
    ) -> None:
        """`folder` is below the table. `decode` returns None for what another release wrote."""
        self.folder = folder
        self._encode, self._decode = encode, decode
        self._max_cached_bytes = max_cached_bytes
        self._lock = threading.Lock()
        # By the lake's URL and the table's root: the name of the last file when it was read, and
        # what it held, with what was not or could not be written.
        self._cache: OrderedDict[tuple[str, str], tuple[str, _Data]] = OrderedDict()

    def load(self, storage: Storage, root: str) -> _Data | None:
        """Return what the newest file that can be read holds; from memory if it was read before.

        Also what was remembered since. None if there is nothing.
        """
        names = storage.names(f"{root}/{self.folder}")
        last = names[-1] if names else ""
        with self._lock:
            known = self._cache.get((storage.url, root))
            if known is not None and known[0] == last:
                self._cache.move_to_end((storage.url, root))
                return known[1]
        for name in reversed(names):
            # Deleted meanwhile, or damaged: it is derived, and the one before may do.
            content = storage.get(f"{root}/{self.folder}/{name}")
            if content is None or hashlib.sha256(content).hexdigest() not in name:
                continue
            if (data := self._decode(content)) is not None:
                del content
                self._put_in_cache(storage, root, (last, data))
                release_unused_memory()
                return data
        return None

    def save(self, storage: Storage, root: str, data: _Data) -> bool:
        """Write the file where that is allowed; remember `data` in any case.

        Returns whether it was written: not in a lake that we may only read, or on a full disk.
        """
        try:
            written = self._write(storage, root, data)
        except (ReplayLakeError, OSError):
            self.remember(storage, root, data)
            return False
        self._put_in_cache(storage, root, written)
        release_unused_memory()
        return True

    def remember(self, storage: Storage, root: str, data: _Data) -> None:
        """Let `load` return this until another process writes a file."""
        names = storage.names(f"{root}/{self.folder}")
        self._put_in_cache(storage, root, (names[-1] if names else "", data))

    def delete(self, storage: Storage, root: str) -> None:
        """Delete a table's files, and what this process remembers. Raises: StorageError."""
        names = storage.names(f"{root}/{self.folder}")
        storage.delete([f"{root}/{self.folder}/{name}" for name in names])
        self._put_in_cache(storage, root, None)

    def delete_gone(self, storage: Storage, root: str) -> None:
        """Let no file of a table tell of shards that are gone. Raises: StorageError."""
        names = storage.names(f"{root}/{self.folder}")
        data = self.load(storage, root)
        there = set() if data is None else _filter_existing(storage, root, data.shards)
        if data is not None and there and len(names) == 1 and len(there) == len(data.shards):
            return
        # Written without them; where that is not possible, not kept either.
        if data is None or not there or not self.save(storage, root, data):
            self.delete(storage, root)

    def forget(self) -> None:
        """Forget what this process remembers, of all tables."""
        with self._lock:
            self._cache.clear()

    def _write(self, storage: Storage, root: str, data: _Data) -> tuple[str, _Data]:
        """Write a file in the place of older ones; return the last one's name, and what it holds.

        The file of this call is deleted again where a shard went meanwhile.
        """
        folder = f"{root}/{self.folder}"
        older = storage.names(folder)
        there = _filter_existing(storage, root, data.shards)
        places = [place for place, path in enumerate(data.shards) if path in there]
        # Of shards that are gone nothing is kept: they may have been purged.
        kept = data if len(places) == len(data.shards) else data.select_shards(places)
        content = self._encode(kept)
        # The last name counts: after those that are there, even if the clock was set back since.
        last = max(older, default="")
        name = f"{new_ulid(after=last)}-{hashlib.sha256(content).hexdigest()}.parquet"
        storage.put(f"{folder}/{name}", content)
        if len(_filter_existing(storage, root, kept.shards)) < len(kept.shards):
            storage.delete([f"{folder}/{name}"])
            names = storage.names(folder)
            return (names[-1] if names else ""), kept
        storage.delete([f"{folder}/{old}" for old in older if old < name])
        return name, kept

    def _put_in_cache(self, storage: Storage, root: str, known: tuple[str, _Data] | None) -> None:
        """Keep what is known of a table in memory, within the bound for all tables."""
        with self._lock:
            self._cache.pop((storage.url, root), None)
            if known is not None:
                self._cache[storage.url, root] = known
            cached = self._cache
            while cached and sum(d.num_bytes for _, d in cached.values()) > self._max_cached_bytes:
                cached.popitem(last=False)


def _filter_existing(storage: Storage, root: str, shards: Sequence[str]) -> set[str]:
    """Return those of the shards whose files are there."""
    folders = {str(PurePosixPath(path).parent) for path in shards}
    there = {
        str(PurePosixPath(folder, name))
        for folder in folders
        for name in storage.names(f"{root}/{folder}")
    }
    return there.intersection(shards)
