"""Registry: named policy versions, aliases and runs, as entries of the lake's own log.

An entry is a key and a JSON text: `policy/<name>/<version>`, `alias/<name>/<alias>`,
`run/<id>`. A version is never overwritten: its key has to be free when it is committed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.errors import CommitConflict, NotFound, StorageFailed
from replaylake.datastore.log.commit_file import Intent
from replaylake.datastore.log.commit_log import CommitLog
from replaylake.datastore.log.state import LogState
from replaylake.datastore.names import check_alias, check_policy_name, new_ulid
from replaylake.datastore.policies.manifest import (
    MANIFEST,
    fetch_package,
    read_checked,
    stamped,
)
from replaylake.datastore.storage import Storage
from replaylake.datastore.table_schema import new_metadata

CHAMPION: Final = "champion"
LAKE_ROOT: Final = "_lake"
_Rows = list[dict[str, Any]]  # named here, where `list` is not yet a method
_REFERENCE: Final = re.compile(r"([^:@]+)(?::([0-9]+)|@([^:@]+))?")


@dataclass(frozen=True)
class PolicyRef:
    """A version of a policy, and what chose it; `folder` is where the lake has the package."""

    name: str
    version: int
    folder: str
    selected_by: str
    storage: Storage = field(repr=False, compare=False)

    @property
    def path(self) -> Path:
        """A local folder that holds the package, to be read and never written.

        The lake's own, or where the lake is remote a copy, checked as it was made. Raises:
        StorageFailed; NotFound or PackageInvalid if the package is not whole.
        """
        return fetch_package(self.storage, self.folder)

    def __str__(self) -> str:
        return f"{self.name}:{self.version}"


class Registry:
    """Policies, aliases and runs of one lake."""

    def __init__(self, storage: Storage, log: CommitLog) -> None:
        self._storage = storage
        self._log = log

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
        """Read the log. Raises: FormatTooNew, LogCorrupt."""
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

        Raises: NameRefused, StorageFailed; CommitConflict where the record is another, and the copy
        is left to vacuum; NotFound, PackageInvalid or FormatTooNew if `package` is
        not one, before anything is copied.
        """
        check_policy_name(name)
        manifest, files = read_checked(Path(package))
        folder = f"{LAKE_ROOT}/policies/{name}/{new_ulid()}"
        self._put(folder, files)
        body = {
            "path": folder,
            "run_id": run_id,
            "created_ms": time.time_ns() // 1_000_000,
            "lineage": dict(lineage),
        }
        version = 0

        def build(state: LogState) -> Intent:
            nonlocal version
            versions = _versions(state, name)
            # After a lost reply this is called again, with the version committed already.
            mine = [known for known, entry in versions.items() if entry["path"] == folder]
            version = mine[0] if mine else max(versions, default=0) + 1
            key = f"policy/{name}/{version}"
            entries: dict[str, str | None] = {key: json.dumps(body)}
            expected: dict[str, str | None] = {key: None}
            if replaces is not None:
                expected[_run_key(run_id)] = _run_text(run_id, replaces)
            if run is not None:
                made = {"policy": name, "policy_version": version}
                entries[_run_key(run_id)] = _run_text(run_id, {**run, **made})
            # Before the commit, so that whoever sees the version finds it stamped.
            self._storage.put(f"{folder}/{MANIFEST}", stamped(manifest, name, version))
            return Intent(
                f"register/{folder}",
                0,
                "REGISTER POLICY",
                entries=entries,
                expected=expected,
            )

        self._commit_run(run_id, build)
        return PolicyRef(name, version, folder, "version", self._storage)

    def _put(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Write a package's files; where the store refuses one, the others go again."""
        try:
            for file, data in files.items():
                self._storage.put(f"{folder}/{file}", data)
        except StorageFailed:
            with suppress(StorageFailed):
                self._storage.delete(f"{folder}/{file}" for file in files)
            raise

    def resolve(self, text: str) -> PolicyRef:
        """Find `name:version`, `name@alias`, or `name` (its champion if set, else the newest).

        Raises: NameRefused, NotFound.
        """
        match = _REFERENCE.fullmatch(text)
        name = check_policy_name(match.group(1) if match else text)
        alias = match.group(3) if match else None
        if alias is not None:
            check_alias(alias)
        state = self._log.newest()
        versions = _versions(state, name)
        if not match or not versions:
            known = sorted({policy for policy, _ in _policies(state)})
            raise NotFound(
                f"policy {text!r}: not in this lake, which has {', '.join(known) or 'none'}. "
                "`replaylake train offline` makes one."
            )
        if match.group(2):
            version, selected_by = int(match.group(2)), "version"
        elif alias is not None:
            version, selected_by = self._aliased(state, name, alias), f"alias {alias}"
        elif (champion := _alias(state, name, CHAMPION)) is not None:
            version, selected_by = champion, f"alias {CHAMPION}"
        else:
            version, selected_by = max(versions), "newest"
        if version not in versions:
            raise NotFound(
                f"policy {text!r}: version {version} is not there, found {min(versions)}.."
                f"{max(versions)}. `replaylake policies list` names them."
            )
        return PolicyRef(name, version, versions[version]["path"], selected_by, self._storage)

    def show(self, ref: PolicyRef) -> dict[str, Any]:
        """Return the registry's entry: lineage, run, aliases."""
        return self.entry(ref.name, ref.version)

    def entry(self, name: str, version: int) -> dict[str, Any]:
        """Return what `show` does. Raises: NotFound."""
        state = self._log.newest()
        entry = _versions(state, name).get(version)
        if entry is None:
            raise NotFound(
                f"policy {name}:{version}: not in this lake. `replaylake policies list` names them."
            )
        return {**_row(state, name, version, entry), "lineage": entry["lineage"]}

    def list(self) -> _Rows:
        """Return one row per policy version, by name and version."""
        state = self._log.newest()
        return [
            _row(state, name, version, entry)
            for name in sorted({policy for policy, _ in _policies(state)})
            for version, entry in sorted(_versions(state, name).items())
        ]

    def lineages(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Return what each version of each policy came from, by name and version."""
        state = self._log.newest()
        return {
            (name, int(version)): json.loads(state.entries[f"policy/{name}/{version}"])["lineage"]
            for name, version in _policies(state)
        }

    def set_alias(
        self, name: str, alias: str, version: int, *, expected: int | None = None
    ) -> int | None:
        """Point an alias at a version and return the one it pointed at; None if it was not set.

        With `expected`, only if it points there now (compare and set); 0 stands for not set.
        Raises: NotFound, NameRefused, CommitConflict.
        """
        check_alias(alias)
        ref = self.resolve(f"{name}:{version}")
        key = f"alias/{ref.name}/{alias}"
        expectation: dict[str, str | None] = {}
        if expected is not None:
            expectation[key] = _alias_body(expected) if expected else None
        producer = f"alias/{new_ulid()}"
        previous: int | None = None

        def build(state: LogState) -> Intent:
            nonlocal previous
            previous = _alias(state, ref.name, alias)
            entries = {key: _alias_body(ref.version)}
            return Intent(producer, 0, "SET ALIAS", entries=entries, expected=expectation)

        self._log.commit(build)
        return previous

    def record_run(
        self, run_id: str, body: Mapping[str, Any], *, replaces: Mapping[str, Any] | None = None
    ) -> None:
        """Write or replace a run's record; with `replaces`, only if that is the record now.

        Raises: StorageFailed, CommitConflict.
        """
        key = _run_key(run_id)
        entries = {key: _run_text(run_id, body)}
        expected = {} if replaces is None else {key: _run_text(run_id, replaces)}
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
        except CommitConflict as error:
            raise CommitConflict(
                f"run {run_id}: found that another process has changed its record, expected it as "
                "it was read. Leave the run to the other; `replaylake runs show` says how it is."
            ) from error

    def _aliased(self, state: LogState, name: str, alias: str) -> int:
        version = _alias(state, name, alias)
        if version is None:
            raise NotFound(
                f"policy {name}@{alias}: no such alias. `replaylake policies alias {name} {alias}` "
                "sets it."
            )
        return version


def _run_key(run_id: str) -> str:
    return f"run/{run_id}"


def _run_text(run_id: str, body: Mapping[str, Any]) -> str:
    return json.dumps({"run_id": run_id, **body})


def _policies(state: LogState) -> Iterator[tuple[str, str]]:
    for key in state.entries:
        if key.startswith("policy/"):
            _, name, version = key.split("/")
            yield name, version


def _versions(state: LogState, name: str) -> dict[int, dict[str, Any]]:
    return {
        int(version): json.loads(state.entries[f"policy/{name}/{version}"])
        for policy, version in _policies(state)
        if policy == name
    }


def _alias(state: LogState, name: str, alias: str) -> int | None:
    text = state.entries.get(f"alias/{name}/{alias}")
    return None if text is None else int(json.loads(text)["version"])


def _alias_body(version: int) -> str:
    return json.dumps({"version": version})


def _row(state: LogState, name: str, version: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    prefix = f"alias/{name}/"
    aliases = [
        key.removeprefix(prefix)
        for key, text in state.entries.items()
        if key.startswith(prefix) and json.loads(text)["version"] == version
    ]
    return {
        "policy": name,
        "version": version,
        "aliases": sorted(aliases),
        "run_id": entry["run_id"],
        "created_ms": entry["created_ms"],
        "path": entry["path"],
    }
