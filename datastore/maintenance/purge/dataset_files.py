"""Dataset files: all that lies in a dataset's folder, looked through and cleared of ids."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from replaylake.datastore.feedback.journal_scrub import drop_damaged, find_journals
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.key_files import drop_gone_keys
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.profile.shard_statistics import delete_statistics
from replaylake.datastore.maintenance.fsck.quarantine import FOLDER as QUARANTINE
from replaylake.datastore.maintenance.purge.past_versions import list_named_paths
from replaylake.datastore.maintenance.purge.traces import IdSearch, Trace, find_traces
from replaylake.datastore.names import LAKE_ROOT
from replaylake.datastore.query import summaries
from replaylake.datastore.replay.cache.view_cache import FOLDER as VIEWS
from replaylake.datastore.replay.cache.view_cache import ViewCache
from replaylake.datastore.storage.storage import StoredFile

LIVE: Final = "live"
JOURNAL: Final = "journal"
# Work lists of purges: the one place in which ids of theirs stand while they go on.
WORK_LISTS: Final = f"{LAKE_ROOT}/purge"
# A file that no version names and that is younger may belong to a commit that is being made.
_IN_FLIGHT_MS: Final = 3_600_000
# Called with (files done, files).
OnFile = Callable[[int, int], None]


class DatasetFiles:
    """The files of a dataset: of its tables, derived from them, in quarantine, left by crashes."""

    def __init__(self, lake: Lake, handle: Dataset) -> None:
        self._storage = lake.storage
        self._name = handle.name
        self._handle = handle
        self.tables = handle.tables()

    def find_deletable(self, search: IdSearch, on_file: OnFile | None = None) -> list[str]:
        """Return the files that hold a row of it and may go: no version needs them any more."""
        live = self._live()
        paths = {f"{t.root}/{path}" for t in self.tables for path in list_named_paths(t)}
        return [
            file.path
            for file, trace in self.find_inside(search, on_file)
            if file.path not in live
            and (
                file.path.startswith(f"{self._name}/{QUARANTINE}/")
                or (trace.kind == "rows" and (file.path in paths or _is_old(file)))
            )
        ]

    def delete(self, doomed: list[str]) -> None:
        """Delete these files, and all that is derived from the dataset or left by crashes."""
        records = [f"{path}.json" for path in doomed if f"/{QUARANTINE}/" in path]
        self._storage.delete([*doomed, *records])
        # Copies of shards that are long gone from the lake may still be here.
        paths = [f"{t.root}/{path}" for t in self.tables for path in list_named_paths(t)]
        self._storage.forget(sorted({*doomed, *paths} - self._live()))
        # After the shards: who writes one now looks at them again.
        summaries.delete_summaries(self._storage, self._name)
        delete_statistics(self._storage, self._name)
        drop_gone_keys(self._handle)
        ViewCache(self._storage, self._name).clear()
        derived = self._storage.files(f"{self._name}/_derived")
        # What crashes left unfinished may be any shard; nothing reads it.
        leftovers = (file for file in self._storage.files(f"{LAKE_ROOT}/tmp") if _is_old(file))
        self._storage.delete([file.path for file in (*derived, *leftovers)])

    def find_remaining(
        self, search: IdSearch, on_file: OnFile | None = None
    ) -> tuple[int, list[Trace]]:
        """Look into every file of the dataset; return how many, and those with a trace."""
        num_scanned = len(self._files())
        live = self._live()
        traces = [
            replace(trace, kind=LIVE) if file.path in live and trace.kind == "rows" else trace
            for file, trace in self.find_inside(search, on_file)
        ]
        for table in self.tables:
            journals = find_journals(table, search.is_in_text)
            traces += [Trace(str(path), JOURNAL) for path in journals]
        return num_scanned, traces

    def find_outside(self, search: IdSearch) -> Iterator[tuple[StoredFile, Trace]]:
        """Look into the lake's own files: its log, and the packages of policies."""
        files = (
            file
            for file in self._storage.files(LAKE_ROOT)
            if not file.path.startswith(
                (f"{WORK_LISTS}/", f"{LAKE_ROOT}/tmp/", f"{LAKE_ROOT}/keys/")
            )
        )
        return find_traces(self._storage, files, search)

    def find_inside(
        self, search: IdSearch, on_file: OnFile | None = None
    ) -> Iterator[tuple[StoredFile, Trace]]:
        """Look into the files of the dataset, but for its journals.

        on_file: called with (files done, files) before each and after the last.
        """
        files = self._files()

        def advance() -> Iterator[StoredFile]:
            for i, file in enumerate(files):
                if on_file is not None:
                    on_file(i, len(files))
                yield file
            if on_file is not None:
                on_file(len(files), len(files))

        return find_traces(self._storage, advance(), search)

    def scrub_damaged(self, search: IdSearch) -> None:
        """Take ids out of the journals' records that were kept because no row can hold them."""
        for table in self.tables:
            drop_damaged(table, search.is_in_text)

    def _files(self) -> list[StoredFile]:
        """Return the files of the dataset but for its journals, which may lie elsewhere.

        Nor replay views, which hold no ids but rows of any episode, may be larger than memory, and
        all go.
        """
        views = f"{self._name}/{VIEWS}"
        return [
            file
            for file in self._storage.files(self._name)
            if "/_journal/" not in file.path and not file.path.startswith(views)
        ]

    def _live(self) -> set[str]:
        return {
            f"{table.root}/{path}" for table in self.tables for path in table.log.newest().files
        }


def _is_old(file: StoredFile) -> bool:
    return file.modified_ms < time.time_ns() // 1_000_000 - _IN_FLIGHT_MS
