"""Entries: what a state of the lake's log says of policies, aliases, notes and runs.

An entry is a key and a JSON text:

    policy/<name>/<version>        a version: its package with the sha256 of its manifest, run and
                                   lineage; never written again, but for a hash that it lacks
    deleted/<name>/<version>       the same of one that was deleted, and who did it
    alias/<name>/<alias>           the version that an alias points at
    promotion/<ulid>               one move of an alias, written in the move's own commit
    note/<name>/<version>/<ulid>   what somebody noted of a version
    protect/<name>/<version>       who protected it from deletion
    run/<id>                       a run's record
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from replaylake.datastore.storage.log.state import LogState


def policy_key(name: str, version: int) -> str:
    return f"policy/{name}/{version}"


def deleted_key(name: str, version: int) -> str:
    return f"deleted/{name}/{version}"


def alias_key(name: str, alias: str) -> str:
    return f"alias/{name}/{alias}"


def protect_key(name: str, version: int) -> str:
    return f"protect/{name}/{version}"


def note_prefix(name: str, version: int) -> str:
    return f"note/{name}/{version}/"


def run_key(run_id: str) -> str:
    return f"run/{run_id}"


def run_text(run_id: str, body: Mapping[str, Any]) -> str:
    return json.dumps({"run_id": run_id, **body})


def alias_text(version: int) -> str:
    return json.dumps({"version": version})


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def iter_versions(state: LogState, kind: str = "policy") -> Iterator[tuple[str, int]]:
    """Yield name and version of each `policy`, or of each `deleted` one, in no certain order."""
    prefix = f"{kind}/"
    for key in state.entries:
        if key.startswith(prefix):
            _, name, version = key.split("/")
            yield name, int(version)


def find_versions(state: LogState, name: str, kind: str = "policy") -> dict[int, dict[str, Any]]:
    """Return the entries of a policy's versions, or of its `deleted` ones."""
    return {
        version: json.loads(state.entries[f"{kind}/{name}/{version}"])
        for policy, version in iter_versions(state, kind)
        if policy == name
    }


def find_alias(state: LogState, name: str, alias: str) -> int | None:
    """Return the version that an alias points at; None if it is not set."""
    text = state.entries.get(alias_key(name, alias))
    return None if text is None else int(json.loads(text)["version"])


def list_aliases(state: LogState, name: str, version: int) -> list[str]:
    """Return the aliases that point at a version, sorted."""
    return sorted(_aliases(state).get((name, version), []))


def make_row(state: LogState, name: str, version: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `policies list` says of a version, which may be deleted."""
    return _row(name, version, entry, list_aliases(state, name, version))


def make_rows(state: LogState) -> list[dict[str, Any]]:
    """Return the rows of all versions that are there, by name and version."""
    aliases = _aliases(state)
    return [
        _row(
            name,
            version,
            json.loads(state.entries[policy_key(name, version)]),
            sorted(aliases.get((name, version), [])),
        )
        for name, version in sorted(iter_versions(state))
    ]


def _aliases(state: LogState) -> dict[tuple[str, int], list[str]]:
    """Return the aliases that point at each version."""
    aliases: dict[tuple[str, int], list[str]] = {}
    for key, text in state.entries.items():
        if key.startswith("alias/"):
            _, name, alias = key.split("/")
            aliases.setdefault((name, int(json.loads(text)["version"])), []).append(alias)
    return aliases


def _row(
    name: str, version: int, entry: Mapping[str, Any], aliases: Sequence[str]
) -> dict[str, Any]:
    return {
        "policy": name,
        "version": version,
        "aliases": list(aliases),
        "run_id": entry["run_id"],
        "created_ms": entry["created_ms"],
        "path": entry["path"],
    }
