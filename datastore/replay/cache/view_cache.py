"""View cache: the decoded views of one dataset that this machine keeps.

    <home>/<key>/        a view (cached_view.py) or token sequences (cached_sequences.py), named by
                         what it was made from (view_query.py)
    <home>/spelt/<key>   the key of a query as it was given, and in it that of DuckDB's spelling
    <home>/tmp/<ulid>/   being written (draft.py); renamed once it is on disk

The home is `<dataset>/_derived/replay` in a lake that is a folder, and the same below this
machine's state folder for a remote one. Everything here may be deleted at any time: a process that
has a view open keeps its files. A purge removes the shards first and then the views (`forget`); who
finishes one meanwhile looks at the shards again once it has its name.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from replaylake.datastore.errors import NotFoundError, StorageError
from replaylake.datastore.names import new_ulid
from replaylake.datastore.replay.array_allocator import DISK_RESERVE, no_room_error
from replaylake.datastore.replay.cache.cached_sequences import (
    find_sequence_damage,
    is_sequence_folder,
)
from replaylake.datastore.replay.cache.cached_view import (
    ViewMetadata,
    find_damage,
    last_use_s,
    open_cached,
    read_shards,
    write_durably,
)
from replaylake.datastore.replay.cache.draft import Draft, find_abandoned_drafts
from replaylake.datastore.replay.layout import RecordLayout
from replaylake.datastore.replay.records import Packed
from replaylake.datastore.storage.seals import read_bytes, seal_bytes
from replaylake.datastore.storage.storage import Storage, fsync_folder, make_folder
from replaylake.datastore.storage.table.presence import missing_files

FOLDER: Final = "_derived/replay"
# As many bytes of views as this machine keeps of a remote lake's shards by default.
MAX_BYTES: Final = 20 * 10**9
_SPELLINGS: Final = "spelt"
_KEY: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class StaleView:
    """A folder that nobody can use any more: a view whose shards are gone, or half of one.

    name: below the cache's home.
    """

    name: str
    folder: Path
    size_bytes: int


class ViewCache:
    """The views of one dataset. Safe for threads and for several processes at once."""

    def __init__(self, storage: Storage, root: str, *, max_bytes: int = MAX_BYTES) -> None:
        """Take the table; nothing is made yet.

        max_bytes: above it the least recently opened views go, whenever another is added.
        """
        self.home = storage.state_folder(f"{root}/{FOLDER}")
        self._storage, self._root = storage, root
        self._max_bytes = max_bytes

    def open(self, key: str, layout: RecordLayout) -> tuple[Packed, ViewMetadata] | None:
        """Map a view; None if it is not there or not whole."""
        return open_cached(self.folder(key), layout)

    def folder(self, key: str) -> Path:
        """Return where a view is, if it is here."""
        return self.home / key

    def find_canonical(self, key: str) -> str:
        """Return the key of the canonical query, given that of the query as it was written."""
        with suppress(OSError, ValueError):
            data = (self.home / _SPELLINGS / key).read_bytes()
            text = read_bytes(data, is_required=True).decode()
            if _KEY.fullmatch(text):
                return text
        return key

    def record_canonical(self, key: str, canonical: str) -> None:
        """Keep which canonical query another spelling stands for, where we may write."""
        if key == canonical:
            return
        path = self.home / _SPELLINGS / key
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(new_ulid())
            write_durably(temporary, seal_bytes(canonical.encode()))
            os.replace(temporary, path)

    def draft(self, needed: int) -> Draft:
        """Return a folder for a view of that many bytes; older views go where the disk is full.

        Raises: StorageError if there is no room all the same; OSError where we may not write.
        """
        make_folder(self.home)
        for folder in find_abandoned_drafts(self.home):
            _remove(folder)
        for _, _, folder in sorted(self._views()):
            if self._free_bytes() >= needed + DISK_RESERVE:
                break
            _remove(folder)
        if (free := self._free_bytes()) < needed + DISK_RESERVE:
            raise no_room_error(self.home, free, needed, "Free disk space")
        return Draft(self.home)

    def publish(
        self, draft: Draft, key: str, shards: Sequence[str], is_whole: Callable[[Path], bool]
    ) -> Path:
        """Give a complete draft its name; where another process was first, the draft goes.

        is_whole: says of the folder of that process whether it can be opened.
        Raises: OSError, also where the draft was removed; NotFoundError if one of the shards was.
        """
        target = self.folder(key)
        while not _try_rename(draft.folder, target):
            if is_whole(target):
                draft.discard()
                return target
            with suppress(FileNotFoundError):
                shutil.rmtree(target)  # half of a view; where we may not remove it, for good
        draft.close()
        fsync_folder(self.home)
        if lost := missing_files(self._storage, self._root, shards):
            _remove(target)
            raise NotFoundError(
                f"replay view of {self._root}: found that {len(lost)} of its {len(shards)} shards "
                "were removed while it was written, expected all of them: it is not kept."
            )
        self._trim(target)
        return target

    def iter_stale(self, is_gone: Callable[[str], bool]) -> Iterator[StaleView]:
        """Yield what can be of no use: views of shards that are gone, and what crashes left.

        `is_gone` says it of a shard's path below the dataset.
        """
        for _, size, folder in self._views():
            shards = read_shards(folder)
            if shards is None or any(is_gone(path) for path in shards):
                yield StaleView(folder.name, folder, size)
        for folder in find_abandoned_drafts(self.home):
            yield StaleView(str(folder.relative_to(self.home)), folder, _size(folder))

    def iter_damaged(self) -> Iterator[tuple[str, StaleView]]:
        """Yield what is wrong, and the view, for each that differs from its checksums.

        Cost: reads all of them.
        """
        for _, size, folder in self._views():
            find = find_sequence_damage if is_sequence_folder(folder) else find_damage
            if fault := find(folder):
                yield fault, StaleView(folder.name, folder, size)

    def remove(self, views: Iterable[StaleView]) -> None:
        """Remove such folders, and the spellings of views that are not here."""
        for view in views:
            _remove(view.folder)
        with suppress(OSError):
            for path in (self.home / _SPELLINGS).iterdir():
                if not self.folder(self.find_canonical(path.name)).exists():
                    path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all that is here, durably. Raises: StorageError."""
        parent, name = self.home.parent, self.home.name
        try:
            if self.home.exists():
                # Under another name first: then nobody finds half of a view, or adds one.
                os.rename(self.home, parent / f"{name}-{new_ulid()}")
            for doomed in parent.glob(f"{name}-*"):
                shutil.rmtree(doomed)
                fsync_folder(parent)
        except OSError as error:
            raise StorageError(
                f"{self.home}: {error.strerror or error}, expected to remove the replay views "
                "there. Remove the folder."
            ) from error

    def _trim(self, added: Path) -> None:
        """Remove the views that were not opened for the longest time, beyond the limit."""
        views = sorted(self._views(), reverse=True)
        budget = self._max_bytes - _size(added)
        for _, size, folder in views:
            if folder != added:
                budget -= size
                if budget < 0:
                    _remove(folder)

    def _views(self) -> Iterator[tuple[float, int, Path]]:
        """Yield (last use, bytes, folder) of each view, whole or not."""
        with suppress(OSError):
            for folder in self.home.iterdir():
                if _KEY.fullmatch(folder.name):
                    yield last_use_s(folder), _size(folder), folder

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.home).free


def _try_rename(folder: Path, target: Path) -> bool:
    """Rename a folder, unless there is one of that name."""
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _size(folder: Path) -> int:
    size = 0
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                size += path.stat().st_size
    return size
