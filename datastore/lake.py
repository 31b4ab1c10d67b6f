"""Lake: the folder where episodes and policies are at rest, and the way into all of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa

from replaylake.datastore.dataset import Dataset
from replaylake.datastore.errors import NameRefused, NotFound, StorageFailed
from replaylake.datastore.log.commit_log import CommitLog
from replaylake.datastore.names import parse_snapshot
from replaylake.datastore.policies.registry import LAKE_ROOT, Registry
from replaylake.datastore.query import query, relations
from replaylake.datastore.snapshot import Snapshot
from replaylake.datastore.storage import LocalStorage
from replaylake.datastore.table import TableSnapshot
from replaylake.datastore.tags import Tags

_KEY_PATH: Final = "_lake/keys/signing"
_KEY_BYTES: Final = 32


def open_lake(path: str | Path, *, create: bool = False) -> Lake:
    """Open a lake folder, or with `create` make one where there is none.

    Raises: NotFound if it is not a lake, FormatTooNew if a newer ReplayLake wrote it.
    """
    lake = Lake(LocalStorage(Path(path)))
    if not lake.registry.exists():
        if not create:
            raise NotFound(
                f"lake {path}: found none there. `replaylake ingest` makes one, --lake DIR or "
                "REPLAYLAKE_LAKE names another, and in Python rl.open(path, create=True) makes it."
            )
        lake.registry.create()
    lake.registry.check()
    return lake


class Lake:
    """Datasets, policies and runs below one folder."""

    def __init__(self, storage: LocalStorage) -> None:
        self._storage = storage
        log = CommitLog(storage, LAKE_ROOT)
        self.registry = Registry(storage, log)
        self.tags = Tags(log)
        self._handles: dict[str, Dataset] = {}

    @property
    def path(self) -> Path:
        """The folder."""
        return self._storage.root

    def dataset(self, name: str) -> Dataset:
        """Return a handle; the dataset need not exist yet. Raises: NameRefused."""
        # Kept, because a handle remembers the log that it has read.
        if (handle := self._handles.get(name)) is None:
            handle = self._handles.setdefault(name, Dataset(self._storage, name))
        return handle

    def snapshot(self, text: str) -> Snapshot:
        """Pin `NAME`, at its newest version, `NAME@VERSION` or `NAME@TAG`.

        Raises: NotFound, NameRefused.
        """
        name, at = parse_snapshot(text)
        version = self.tags.version(name, at) if isinstance(at, str) else at
        return self.dataset(name).snapshot(version)

    def datasets(self) -> list[str]:
        """Return the names of the datasets, sorted."""
        names = []
        for name in self._storage.names(""):
            # Other files may lie beside the datasets, and links that lead out of the lake.
            with suppress(NameRefused):
                if self.dataset(name).exists():
                    names.append(name)
        return names

    def sql(self, text: str, parameters: Mapping[str, object] | None = None) -> pa.Table:
        """Run one SELECT over the views of datasets and of the lake, and return its rows.

        A dataset has `<dataset>.steps`, `.episodes`, `.transitions`, `.decisions` and `.rewards`;
        the lake has `commits`, `datasets`, `policies`, `runs` and `shards`. `$name` in the text
        takes its value from `parameters`.
        Raises: QueryRefused, QueryFailed, NotFound for an unknown dataset.
        """
        return query.run(text, self, parameters)

    def signing_key(self, *, create: bool = True) -> bytes:
        """Return the 32 bytes that sign decision ids, made once for the lake.

        Raises: NotFound if there is none and `create` is false, StorageFailed.
        """
        key = self._storage.get(_KEY_PATH)
        if key is None and not create:
            raise NotFound(
                f"lake {self.path}: found no signing key, expected one: nothing was served with "
                "--log-to from this lake. Check --lake."
            )
        if key is None:
            self._storage.put_new(_KEY_PATH, os.urandom(_KEY_BYTES), private=True)
            key = self._storage.get(_KEY_PATH)
        if key is None or len(key) != _KEY_BYTES:
            raise StorageFailed(
                f"{self._storage.local(_KEY_PATH)}: found {len(key or b'')} bytes, expected the "
                f"{_KEY_BYTES} of the signing key. Restore the file from a copy of the lake, or "
                "remove it: decision ids given out before are then refused."
            )
        return key

    def table(self, dataset: str, view: str) -> TableSnapshot | None:
        """Return the newest files behind a view, for query.run. Raises: NotFound."""
        handle = self.dataset(dataset)
        if view in ("decisions", "rewards"):
            log = handle.decisions if view == "decisions" else handle.rewards
            if not log.exists():
                raise NotFound(
                    f"{dataset}.{view}: nothing was served into dataset {dataset!r} yet. "
                    f"`replaylake serve POLICY --log-to {dataset}` does."
                )
            return log.snapshot()
        return handle.snapshot().table

    def relation(self, name: str) -> pa.Table | None:
        """Return a lake-wide relation, for query.run."""
        if name == "policies":
            return relations.policies(self.registry)
        if name == "runs":
            return relations.runs(self.registry)
        makers = {
            "commits": relations.commits,
            "datasets": relations.datasets,
            "shards": relations.shards,
        }
        return makers[name](map(self.dataset, self.datasets())) if name in makers else None
