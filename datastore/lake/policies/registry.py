"""Registry: named policy versions, aliases and runs, as entries of the lake's own log.

entries.py has their keys. A version is never overwritten: its key has to be free when it is
committed, and the number of one that was deleted is not given again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.errors import (
    CommitConflictError,
    NotFoundError,
    PackageInvalidError,
    StorageError,
)
from replaylake.datastore.lake.policies.aliases import Aliases, Move
from replaylake.datastore.lake.policies.annotations import VersionNotes, is_protected, read_notes
from replaylake.datastore.lake.policies.entries import (
    find_alias,
    find_versions,
    iter_versions,
    make_row,
    make_rows,
    now_ms,
    policy_key,
    run_key,
    run_text,
)
from replaylake.datastore.lake.policies.evaluations import Evaluations
from replaylake.datastore.lake.policies.manifest import (
    LANGUAGE,
    MANIFEST,
    Manifest,
    fetch_package,
    iter_verified,
    stamp_manifest,
    verify_package,
)
from replaylake.datastore.names import LAKE_ROOT, check_alias, check_policy_name, new_ulid
from replaylake.datastore.storage.log.commit_file import Intent
from replaylake.datastore.storage.log.commit_log import CommitLog
from replaylake.datastore.storage.log.state import LogState
from replaylake.datastore.storage.storage import Storage
from replaylake.datastore.storage.table.table_schema import new_metadata

CHAMPION: Final = "champion"
_Rows = list[dict[str, Any]]  # named here, where `list` is not yet a method
_Moves = list[Move]
_REFERENCE: Final = re.compile(r"([^:@]+)(?::([0-9]+)|@([^:@]+))?")


@dataclass(frozen=True)
class PolicyRef:
    """A version of a policy, and what chose it; `folder` is where the lake has the package.

    manifest_sha256: of the package's manifest.json, in hex, as it was registered; None of versions
    from before that was recorded. Whoever loads the package later gives it along.
    """

    name: str
    version: int
    folder: str
    selected_by: str
    storage: Storage = field(repr=False, compare=False)
    manifest_sha256: str | None = field(default=None, repr=False)

    @property
    def path(self) -> Path:
        """A local folder that holds the package, to be read and never written.

        The lake's own, or where the lake is remote a copy, checked as it was made; its manifest is
        checked each time. Raises: StorageError; NotFoundError or PackageInvalidError if the package
        is not whole.
        """
        return fetch_package(self.storage, self.folder, self.manifest_sha256)

    def __str__(self) -> str:
        return f"{self.name}:{self.version}"


class Registry:
    """Policies and runs of one lake.

    `aliases` moves those; `marks` notes, protects and deletes; `evaluations` saves reports.
    """

    def __init__(self, storage: Storage, log: CommitLog) -> None:
        self._storage = storage
        self._log = log
        self.aliases = Aliases(log)
        self.marks = VersionNotes(log)
        self.evaluations = Evaluations(storage)

    def exists(self) -> bool:
        """Whether the lake has been created."""
        return self._log.exists()

    def create(self) -> None:
        """Commit version 0 of the lake's log; nothing happens if another process has done it."""
        schema = pa.schema([pa.field("key", pa.string())])
        metadata = new_metadata(schema, {}, has_entries=True)

        def build(state: LogState) -> Intent:
            is_new = state.version < 0
            return Intent("create", 0, "CREATE LAKE", metadata=metadata if is_new else None)

        self._log.commit(build)

    def check(self) -> None:
        """Read the log. Raises: FormatTooNewError, LogCorruptError."""
        self._log.newest()

    def register(
        self,
        name: str,
        package: Path,
        *,
        run_id: str,
        lineage: Mapping[str, Any],
        run: Mapping[str, Any] | None = None,
        replaces: Mapping[str, Any] | None = None,
    ) -> PolicyRef:
        """Copy a policy package into the lake as the next version of `name`, durably.

        The package is checked, and the copy's manifest says that name and version. With `run`, the
        run's record is committed in the same moment, `policy` and `policy_version` added; with
        `replaces`, only if that is its record then.

        Raises: InvalidNameError, StorageError; CommitConflictError where the record is another, and
        the copy is left to vacuum; NotFoundError, PackageInvalidError or FormatTooNewError if
        `package` is not one, before anything is copied.
        """
        check_policy_name(name)
        manifest = verify_package(Path(package))
        return self._register(name, Path(package), manifest, run_id, lineage, run, replaces)

    def register_model(
        self,
        name: str,
        directory: Path,
        manifest: Manifest,
        *,
        run_id: str,
        lineage: Mapping[str, Any],
        run: Mapping[str, Any] | None = None,
        replaces: Mapping[str, Any] | None = None,
    ) -> PolicyRef:
        """Copy a language model into the lake as the next version of `name`, durably.

        directory: the files that the manifest lists, which `describe_model` made; it need not have
        a manifest.json. run_id: empty for a model that no run of this lake trained. Otherwise, and
        in what it raises, as `register`.
        """
        check_policy_name(name)
        return self._register(name, directory, manifest, run_id, lineage, run, replaces)

    def _register(
        self,
        name: str,
        directory: Path,
        manifest: Manifest,
        run_id: str,
        lineage: Mapping[str, Any],
        run: Mapping[str, Any] | None,
        replaces: Mapping[str, Any] | None,
    ) -> PolicyRef:
        folder = f"{LAKE_ROOT}/policies/{name}/{new_ulid()}"
        self._put(folder, directory, manifest)
        body = {
            "path": folder,
            "run_id": run_id,
            "created_ms": now_ms(),
            "lineage": dict(lineage),
            # So that a reader need not copy a large model to see what it is.
            **({"kind": LANGUAGE} if manifest.is_language else {}),
        }
        version, sha256 = 0, ""

        def build(state: LogState) -> Intent:
            nonlocal version, sha256
            versions = find_versions(state, name)
            # After a lost reply this is called again, with the version committed already.
            mine = [known for known, entry in versions.items() if entry["path"] == folder]
            numbers = [*versions, *find_versions(state, name, "deleted")]
            version = mine[0] if mine else max(numbers, default=0) + 1
            key = policy_key(name, version)
            data = stamp_manifest(manifest, name, version)
            sha256 = hashlib.sha256(data).hexdigest()
            described = json.dumps({**body, "manifest_sha256": sha256})
            entries: dict[str, str | None] = {key: described}
            expected: dict[str, str | None] = {key: None}
            if replaces is not None:
                expected[run_key(run_id)] = run_text(run_id, replaces)
            if run is not None:
                fields = {"policy": name, "policy_version": version}
                entries[run_key(run_id)] = run_text(run_id, {**run, **fields})
            # Before the commit, so that whoever sees the version finds it stamped.
            self._storage.put(f"{folder}/{MANIFEST}", data)
            return Intent(
                f"register/{folder}",
                0,
                "REGISTER POLICY",
                entries=entries,
                expected=expected,
            )

        self._commit_run(run_id, build)
        return PolicyRef(name, version, folder, "version", self._storage, sha256)

    def record_manifest(self, ref: PolicyRef, sha256: str) -> None:
        """Record the sha256 of a version's manifest, where none is: from now on it is checked.

        Raises: NotFoundError, StorageError; CommitConflictError where the entry changed meanwhile.
        """
        key = policy_key(ref.name, ref.version)
        state = self._log.newest()
        before = state.entries.get(key)
        if before is None:
            raise NotFoundError(f"policy {ref}: not in this lake any more.")
        entries = {key: json.dumps({**json.loads(before), "manifest_sha256": sha256})}
        producer = f"record-manifest/{new_ulid()}"
        self._log.commit(
            lambda state: Intent(
                producer, 0, "RECORD MANIFEST", entries=entries, expected={key: before}
            )
        )

    def _put(self, folder: str, directory: Path, manifest: Manifest) -> None:
        """Write a package's files; if one cannot be read or written, the others are removed."""
        try:
            for file, data in iter_verified(directory, manifest):
                self._storage.put(f"{folder}/{file}", data)
        except (StorageError, PackageInvalidError):
            with suppress(StorageError):
                self._storage.delete(f"{folder}/{file}" for file in manifest.body["files"])
            raise

    def resolve(self, text: str) -> PolicyRef:
        """Find `name:version`, `name@alias`, or `name` (its champion if set, else the newest).

        Raises: InvalidNameError, NotFoundError.
        """
        match = _REFERENCE.fullmatch(text)
        name = check_policy_name(match.group(1) if match else text)
        alias = match.group(3) if match else None
        if alias is not None:
            check_alias(alias)
        state = self._log.newest()
        versions = find_versions(state, name)
        if not match or not versions:
            known = sorted({policy for policy, _ in iter_versions(state)})
            raise NotFoundError(
                f"policy {text!r}: not in this lake, which has {', '.join(known) or 'none'}. "
                "`replaylake train offline` makes one; of a language model, `replaylake policies "
                "register` does."
            )
        if match.group(2):
            version, selected_by = int(match.group(2)), "version"
        elif alias is not None:
            version, selected_by = self._resolve_alias(state, name, alias), f"alias {alias}"
        elif (champion := find_alias(state, name, CHAMPION)) is not None:
            version, selected_by = champion, f"alias {CHAMPION}"
        else:
            version, selected_by = max(versions), "newest"
        if version not in versions:
            tombstones = find_versions(state, name, "deleted")
            was = ", and that one was deleted" if version in tombstones else ""
            raise NotFoundError(
                f"policy {text!r}: version {version} is not there, found {min(versions)}.."
                f"{max(versions)}{was}. `replaylake policies list` names them."
            )
        entry = versions[version]
        sha256 = entry.get("manifest_sha256")
        return PolicyRef(name, version, entry["path"], selected_by, self._storage, sha256)

    def newest(self, name: str) -> PolicyRef:
        """Find the newest version of a policy, wherever its aliases point.

        Raises: NotFoundError.
        """
        ref = self.resolve(name)
        version = max(find_versions(self._log.newest(), ref.name))
        return replace(self.resolve(f"{name}:{version}"), selected_by="newest")

    def show(self, ref: PolicyRef) -> dict[str, Any]:
        """Return the registry's entry: lineage, run, aliases, notes, whether it is protected.

        `kind` is LANGUAGE of a language model, else None.
        """
        return self.entry(ref.name, ref.version)

    def entry(self, name: str, version: int) -> dict[str, Any]:
        """Return what `show` does, of a deleted version too: that has `deleted_ms`, else None.

        Raises: NotFoundError.
        """
        state = self._log.newest()
        entry = find_versions(state, name).get(version)
        if entry is None:
            entry = find_versions(state, name, "deleted").get(version)
        if entry is None:
            raise NotFoundError(
                f"policy {name}:{version}: not in this lake. `replaylake policies list` names them."
            )
        return {
            **make_row(state, name, version, entry),
            "manifest_sha256": entry.get("manifest_sha256"),
            "kind": entry.get("kind"),
            "lineage": entry["lineage"],
            "notes": [asdict(note) for note in read_notes(state, name, version)],
            "protected": is_protected(state, name, version),
            "deleted_ms": entry.get("deleted_ms"),
            "deleted_by": entry.get("deleted_by"),
        }

    def list(self) -> _Rows:
        """Return one row per policy version that is there, by name and version."""
        return make_rows(self._log.newest())

    def lineages(self, *, deleted: bool = False) -> dict[tuple[str, int], dict[str, Any]]:
        """Return what each version of each policy came from, by name and version.

        With `deleted` that of deleted versions, too: what they learned, they may still show
        somewhere.
        """
        state = self._log.newest()
        return {
            (name, version): json.loads(state.entries[f"{kind}/{name}/{version}"])["lineage"]
            for kind in ("policy", "deleted")[: 1 + deleted]
            for name, version in iter_versions(state, kind)
        }

    def alias_version(self, name: str, alias: str) -> int | None:
        """Return the version that an alias points at, None if unset; cheap: see Aliases.version."""
        return self.aliases.version(name, alias)

    def alias_history(self, name: str | None = None) -> _Moves:
        """Return the moves of a policy's aliases, or of all, as they came."""
        return self.aliases.history(name)

    def set_alias(
        self, name: str, alias: str, version: int, *, expected: int | None = None
    ) -> int | None:
        """Point an alias at a version and return the one it pointed at; None if it was not set.

        With `expected`, only if it points there now (compare and set); 0 stands for not set.
        Raises: NotFoundError, InvalidNameError, CommitConflictError.
        """
        ref = self.resolve(f"{name}:{version}")
        return self.aliases.move(ref.name, alias, ref.version, expected=expected).from_version

    def record_run(
        self, run_id: str, body: Mapping[str, Any], *, replaces: Mapping[str, Any] | None = None
    ) -> None:
        """Write or replace a run's record; with `replaces`, only if that is the record now.

        Raises: StorageError, CommitConflictError.
        """
        key = run_key(run_id)
        entries = {key: run_text(run_id, body)}
        expected = {} if replaces is None else {key: run_text(run_id, replaces)}
        producer = f"run/{new_ulid()}"
        self._commit_run(
            run_id,
            lambda state: Intent(producer, 0, "RECORD RUN", entries=entries, expected=expected),
        )

    def runs(self) -> _Rows:
        """Return every run's record, oldest first."""
        entries = self._log.newest().entries.items()
        runs = [json.loads(text) for key, text in entries if key.startswith("run/")]
        return sorted(runs, key=lambda run: (run.get("started_ms") or 0, run["run_id"]))

    def _commit_run(self, run_id: str, build: Callable[[LogState], Intent]) -> None:
        try:
            self._log.commit(build)
        except CommitConflictError as error:
            raise CommitConflictError(
                f"run {run_id}: found that another process has changed its record, expected it as "
                "it was read. Leave the run to the other; `replaylake runs show` says how it is."
            ) from error

    def _resolve_alias(self, state: LogState, name: str, alias: str) -> int:
        version = find_alias(state, name, alias)
        if version is None:
            raise NotFoundError(
                f"policy {name}@{alias}: no such alias. `replaylake promote {name} --to "
                f"{alias}` sets it."
            )
        return version
