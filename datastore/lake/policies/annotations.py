"""Marks: what is said of a policy's version beside its own entry, and its deletion.

A version's entry is never written again: notes, protection and the record of what was deleted have
keys of their own (see entries.py).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from replaylake.datastore.errors import ConfigInvalidError, NotFoundError
from replaylake.datastore.lake.policies.entries import (
    deleted_key,
    list_aliases,
    note_prefix,
    now_ms,
    policy_key,
    protect_key,
)
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.log.commit_file import Intent
from replaylake.datastore.storage.log.commit_log import CommitLog
from replaylake.datastore.storage.log.state import LogState


@dataclass(frozen=True)
class Note:
    """What somebody noted of a version; at_ms since 1970."""

    text: str
    by: str | None
    at_ms: int


def read_notes(state: LogState, name: str, version: int) -> list[Note]:
    """Return the notes on a version, oldest first."""
    prefix = note_prefix(name, version)
    return [
        Note(**json.loads(text))
        for key, text in sorted(state.entries.items())
        if key.startswith(prefix)
    ]


def is_protected(state: LogState, name: str, version: int) -> bool:
    """Whether a version cannot be deleted."""
    return protect_key(name, version) in state.entries


class VersionNotes:
    """Notes on versions, their protection and deletion, in one lake."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log

    def add_note(self, name: str, version: int, text: str, *, by: str | None = None) -> Note:
        """Note something of a version.

        Raises: NotFoundError; ConfigInvalidError for a text of no words.
        """
        if not text.strip():
            raise ConfigInvalidError(
                f"note on {name}:{version}: found no text, expected some words."
            )
        note = Note(text.strip(), by, now_ms())
        ulid = new_ulid()

        def build(state: LogState) -> Intent:
            _entry(state, name, version)
            # Numbered, as two may be of one millisecond.
            number = len(read_notes(state, name, version))
            key = f"{note_prefix(name, version)}{number:06d}-{ulid}"
            entries = {key: json.dumps(asdict(note))}
            return Intent(f"note/{ulid}", 0, "NOTE POLICY", entries=entries)

        self._log.commit(build)
        return note

    def protect(
        self, name: str, version: int, is_on: bool = True, *, by: str | None = None
    ) -> bool:
        """Keep a version from deletion, or allow it again; return whether that changed anything.

        Raises: NotFoundError.
        """
        producer = f"protect/{new_ulid()}"
        text = json.dumps({"by": by, "at_ms": now_ms()}) if is_on else None
        if is_protected(self._log.newest(), name, version) == is_on:
            _entry(self._log.newest(), name, version)
            return False

        def build(state: LogState) -> Intent:
            _entry(state, name, version)
            operation = "PROTECT POLICY" if is_on else "UNPROTECT POLICY"
            return Intent(producer, 0, operation, entries={protect_key(name, version): text})

        self._log.commit(build)
        return True

    def check_deletable(self, name: str, version: int) -> None:
        """Raise what `delete` would."""
        _deletable(self._log.newest(), name, version)

    def delete(
        self, name: str, version: int, *, by: str | None = None, note: str | None = None
    ) -> dict[str, Any]:
        """Delete a version; its lineage stays on record, its number is not given again.

        Returns the record. The package's files go with the next vacuum. Raises: NotFoundError;
        ConfigInvalidError for a version that is protected, or that an alias points at.
        """
        producer = f"delete-policy/{new_ulid()}"
        record: dict[str, Any] = {}

        def build(state: LogState) -> Intent:
            nonlocal record
            intent = Intent(producer, 0, "DELETE POLICY")
            if intent.transaction in state.transactions:  # a lost reply
                return intent
            entry = _deletable(state, name, version)
            record = {**json.loads(entry), "deleted_ms": now_ms(), "deleted_by": by, "note": note}
            entries = {
                policy_key(name, version): None,
                deleted_key(name, version): json.dumps(record),
            }
            return Intent(producer, 0, "DELETE POLICY", entries=entries)

        self._log.commit(build)
        return record


def _entry(state: LogState, name: str, version: int) -> str:
    text = state.entries.get(policy_key(name, version))
    if text is None:
        raise NotFoundError(
            f"policy {name}:{version}: not in this lake, expected one of its versions. "
            "`replaylake policies list` names them."
        )
    return text


def _deletable(state: LogState, name: str, version: int) -> str:
    entry = _entry(state, name, version)
    if is_protected(state, name, version):
        raise ConfigInvalidError(
            f"policy {name}:{version}: is protected from deletion. "
            f"To delete it, run `replaylake policies unprotect {name}:{version}` first."
        )
    if aliases := list_aliases(state, name, version):
        raise ConfigInvalidError(
            f"policy {name}:{version}: found {', '.join(aliases)} pointing at it, expected no "
            "alias. Point it at another version with `replaylake promote` first."
        )
    return entry
