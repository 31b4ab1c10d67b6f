"""Lake: where episodes and policies are at rest, and the way into all of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa

from replaylake.datastore.errors import InvalidNameError, NotFoundError, StorageError
from replaylake.datastore.lake.catalog import LakeCatalog, check_readable
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.policies.registry import Registry
from replaylake.datastore.lake.roles import Grant
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.lake.versions.tags import Tags, tag_snapshot
from replaylake.datastore.lake.webhooks import Webhooks
from replaylake.datastore.names import LAKE_ROOT, check_dataset_name, parse_snapshot
from replaylake.datastore.query import query
from replaylake.datastore.query.statements import Cancellation
from replaylake.datastore.query.untrusted import (
    QueryLimits,
    UntrustedResult,
    run_untrusted,
)
from replaylake.datastore.storage.locations import open_storage
from replaylake.datastore.storage.log.commit_log import CommitLog
from replaylake.datastore.storage.log.purges import Purges
from replaylake.datastore.storage.storage import Storage

KEYS: Final = f"{LAKE_ROOT}/keys"
_KEY_PATH: Final = f"{KEYS}/signing"
_KEY_DIGEST_PATH: Final = f"{KEYS}/signing.sha256"
_KEY_BYTES: Final = 32


def open_lake(path: str | Path, *, create: bool = False) -> Lake:
    """Open a lake in a directory or at a URL; with `create`, create it if it does not exist.

    A URL is for example s3://bucket/prefix. Raises: NotFoundError if there is no lake;
    FormatTooNewError if a newer ReplayLake wrote it; ConfigInvalidError for an unknown URL scheme;
    ExtraMissingError or StorageError if its store cannot be reached.
    """
    lake = Lake(open_storage(path))
    if not lake.registry.exists():
        if not create:
            raise NotFoundError(
                f"lake {path}: found none there. `replaylake ingest` makes one, `lake` or "
                "REPLAYLAKE_LAKE names another, and in Python rl.open(path, create=True) makes it."
            )
        lake.registry.create()
    lake.registry.check()
    return lake


class Lake:
    """Datasets, policies and runs below one directory or object-store prefix."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        log = CommitLog(storage, LAKE_ROOT)
        self.registry = Registry(storage, log)
        self.tags = Tags(log)
        self.purges = Purges(log)
        self.webhooks = Webhooks(storage, log)
        self._handles: dict[str, Dataset] = {}

    def __repr__(self) -> str:
        return f"Lake({self.url!r})"

    @property
    def url(self) -> str:
        """The path or URL with which any process that can reach the lake opens it."""
        return self._storage.url

    @property
    def storage(self) -> Storage:
        """The storage of all files of the lake, which maintenance uses."""
        return self._storage

    @property
    def path(self) -> Path:
        """The directory of the lake. Raises: NotFoundError if the lake is on an object store."""
        folder = self._storage.local_folder("")
        if folder is None:
            raise NotFoundError(
                f"lake {self.url}: found no folder of this machine, expected one. Use `url`."
            )
        return folder

    def dataset(self, name: str) -> Dataset:
        """Return a handle on a dataset that may not exist yet. Raises: InvalidNameError."""
        # Kept, because a handle remembers the log that it has read.
        if (handle := self._handles.get(name)) is None:
            handle = self._handles.setdefault(name, Dataset(self._storage, name))
        return handle

    def snapshot(self, text: str) -> Snapshot:
        """Return a snapshot of `NAME` (its newest version), `NAME@VERSION` or `NAME@TAG`.

        Raises: NotFoundError, InvalidNameError.
        """
        name, at = parse_snapshot(text)
        version = self.tags.version(name, at) if isinstance(at, str) else at
        return self.dataset(name).snapshot(version)

    def tag(self, text: str, name: str, *, replace: bool = False) -> int | None:
        """Set a tag on `NAME`, `NAME@VERSION` or `NAME@TAG`; vacuum retains the version's files.

        Returns the version that the tag pointed to before, or None if the tag is new. Raises:
        NotFoundError if the version does not exist or its files were deleted; AlreadyExistsError if
        the tag points to another version and `replace` is false; InvalidNameError.
        """
        return tag_snapshot(self.tags, self.snapshot(text), name, replace=replace)

    def datasets(self) -> list[str]:
        """Return the names of the datasets, sorted."""
        names = []
        for name in self._storage.names(""):
            # Other files may lie beside the datasets, and links that lead out of the lake.
            with suppress(InvalidNameError):
                if self.dataset(name).exists():
                    names.append(name)
        return names

    def sql(
        self,
        text: str,
        parameters: Mapping[str, object] | None = None,
        *,
        at: Mapping[str, str | int] | None = None,
        cancellation: Cancellation | None = None,
    ) -> pa.Table:
        """Run one SELECT over the views of datasets and of the lake, and return its rows.

        A dataset has `<dataset>.steps`, `.episodes`, `.games`, `.transitions`, `.quarantine`,
        `.decisions`, `.rewards` and `.received`; the lake has `commits`, `datasets`,
        `evaluations`, `metrics`, `policies`, `promotions`, `runs` and `shards`.

        Args:
            text: the SELECT statement.
            parameters: values of the parameters `$name` in the text.
            at: the version or tag to read, by dataset; the newest by default.
                `{"before": "cartpole@12"}` reads a version under another name, so that two versions
                can be compared.
            cancellation: ends the query if `cancel` is called in another thread.

        Raises: QueryRefusedError; QueryError, including after a cancellation; NotFoundError for an
        unknown dataset or version.
        """
        return query.run_query(text, self.catalog(at), parameters, cancellation=cancellation)

    def sql_untrusted(
        self,
        text: str,
        parameters: Mapping[str, object] | None = None,
        *,
        at: Mapping[str, str | int] | None = None,
        limits: QueryLimits | None = None,
        reader: Grant | None = None,
        cancellation: Cancellation | None = None,
    ) -> UntrustedResult:
        """Run one SELECT from an untrusted author in a separate process, within limits.

        It can read the same views as `sql`, at the same versions, and nothing else on this machine.

        Args:
            text: the SELECT statement.
            parameters: values of the parameters `$name` in the text.
            at: the version or tag to read, by dataset, as for `sql`.
            limits: of time, memory and rows.
            reader: whose query it is, as `RoleTable.find_reader` finds it by a token: for it there
                are only the datasets and columns that the role table grants. Without one, all.
            cancellation: ends the query if `cancel` is called in another thread.

        Raises: as sql; QueryError with the limit that was exceeded, or as it was cancelled.
        """
        return run_untrusted(
            text,
            self.catalog(at, reader),
            parameters,
            limits=limits,
            cancellation=cancellation,
        )

    def catalog(
        self, at: Mapping[str, str | int] | None = None, reader: Grant | None = None
    ) -> LakeCatalog:
        """Return the tables that SQL can read, with datasets at the versions in `at`.

        Raises: NotFoundError, InvalidNameError.
        """
        pinned = {name: self._pin(name, version, reader) for name, version in (at or {}).items()}
        return LakeCatalog(
            self._storage, self.registry, self.tags, self._existing, self.dataset, pinned, reader
        )

    def signing_key(self, *, create: bool = True) -> bytes:
        """Return the 32 bytes that sign decision ids, which are created once per lake.

        Raises: NotFoundError if there is no key and `create` is false, StorageError.
        """
        key = self._storage.get(_KEY_PATH)
        if key is None and not create:
            raise NotFoundError(
                f"lake {self.url}: found no signing key, expected one: nothing was served with "
                "`log_to` from this lake. Check `lake`."
            )
        if key is None:
            self._storage.put_if_absent(_KEY_PATH, os.urandom(_KEY_BYTES), private=True)
            key = self._storage.get(_KEY_PATH)
        digest = self._storage.get(_KEY_DIGEST_PATH)
        if key is None or len(key) != _KEY_BYTES:
            raise StorageError(
                f"{self.url}/{_KEY_PATH}: found {len(key or b'')} bytes, expected the "
                f"{_KEY_BYTES} of the signing key. Restore the file from a copy of the lake, or "
                "remove it: decision ids given out before are then refused."
            )
        found = hashlib.sha256(key).hexdigest()
        if digest is None and create:
            # Of a key that an earlier release made, too. A lake that we may only read has none.
            with suppress(StorageError):
                self._storage.put_if_absent(_KEY_DIGEST_PATH, found.encode(), private=True)
        elif digest is not None and digest != found.encode():
            raise StorageError(
                f"{self.url}/{_KEY_PATH}: found a key of sha256 {found[:16]}, expected "
                f"{digest[:16]!r} as {_KEY_DIGEST_PATH} says: with another key, the decision ids "
                "given out before are refused. Restore both files from a copy of the lake. If "
                "there is none, remove both: a new key is made, and those ids are refused."
            )
        return key

    def _existing(self) -> dict[str, Dataset]:
        return {name: self.dataset(name) for name in self.datasets()}

    def _pin(self, name: str, at: str | int, reader: Grant | None) -> Snapshot:
        """Return the snapshot that `at` gives a name: a version or tag, or another's `NAME@AT`."""
        check_dataset_name(name)
        if not isinstance(at, str) or "@" not in at:
            check_readable(reader, name)
            return self.snapshot(f"{name}@{at}")
        dataset, _ = parse_snapshot(at)
        check_readable(reader, dataset)
        # A name of a dataset that the reader may not read is free.
        is_taken = reader is None or reader.can_read(name)
        if dataset != name and is_taken and self.dataset(name).exists():
            raise InvalidNameError(
                f"at {name}={at}: found a dataset {name} in the lake, expected a further name for "
                f"{dataset}. Choose another, such as before={at}."
            )
        return self.snapshot(at)
