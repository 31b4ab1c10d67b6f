"""Aliases: names for versions of a policy, moved by compare and set, each move on record.

A move and its record are one commit of the lake's log, so there is no move without one. Those made
before moves were recorded are read from the log's own commits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from replaylake.datastore.errors import CommitConflictError, NotFoundError
from replaylake.datastore.lake.policies.entries import (
    alias_key,
    alias_text,
    find_alias,
    find_versions,
    now_ms,
)
from replaylake.datastore.names import check_alias, check_policy_name, new_ulid
from replaylake.datastore.storage.log.commit_file import Intent, transaction_id
from replaylake.datastore.storage.log.commit_log import CommitLog
from replaylake.datastore.storage.log.state import LogState

# The operation in the commit's info, and in that of a release that kept no records of moves.
_OPERATION: Final = "SET ALIAS"
_PREFIX: Final = "promotion/"

Kind = Literal["alias", "promote", "rollback"]


@dataclass(frozen=True)
class Move:
    """One move of an alias.

    from_version: None where the alias was not set. at_ms: since 1970. by: who; None of a move from
    before they were recorded. gate: what the comparison said that was to allow it, None without
    one; forced: it was made although that said no.
    """

    policy: str
    alias: str
    from_version: int | None
    to_version: int
    kind: Kind
    at_ms: int
    by: str | None = None
    note: str | None = None
    forced: bool = False
    gate: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Aliases:
    """The aliases of one lake's policies."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log

    def version(self, name: str, alias: str) -> int | None:
        """Return the version that an alias points at; None if it is not set.

        Made to be polled: two reads of small files where nothing is new, 26 us in a local lake (2
        busy cores, 2026-11) and two requests side by side in a remote one.
        """
        return find_alias(self._log.newest(), name, alias)

    def move(
        self,
        name: str,
        alias: str,
        version: int,
        *,
        kind: Kind = "alias",
        expected: int | None = None,
        unmoved: Mapping[str, int | None] | None = None,
        by: str | None = None,
        note: str | None = None,
        forced: bool = False,
        gate: Mapping[str, Any] | None = None,
    ) -> Move:
        """Point an alias at a version, and record it in the same commit.

        With `expected`, only if it points there now; 0 stands for not set. `unmoved`: other aliases
        of the policy and where they still have to point for the move to make sense. Raises:
        InvalidNameError; NotFoundError if there is no such version; CommitConflictError if an alias
        points
        elsewhere: it says where.
        """
        check_policy_name(name)
        check_alias(alias)
        key = f"{_PREFIX}{new_ulid()}"
        record: Move | None = None

        def build(state: LogState) -> Intent:
            nonlocal record
            if version not in find_versions(state, name):
                raise NotFoundError(
                    f"policy {name}:{version}: not in this lake, expected a version to point "
                    f"{alias} at. `replaylake policies list` names them."
                )
            # After a lost reply this is called again, with the move made already.
            if record is None or transaction_id(key, 0) not in state.transactions:
                _check_unmoved(
                    state, name, {**(unmoved or {}), **_expected_entries(alias, expected)}
                )
                before = find_alias(state, name, alias)
                record = Move(name, alias, before, version, kind, now_ms(), by, note, forced, gate)
            entries = {alias_key(name, alias): alias_text(version), key: json.dumps(asdict(record))}
            return Intent(key, 0, _OPERATION, entries=entries)

        self._log.commit(build)
        assert record is not None, "the first build made it"
        return record

    def rollback(
        self,
        name: str,
        alias: str,
        *,
        to_version: int | None = None,
        expected: int | None = None,
        by: str | None = None,
        note: str | None = None,
    ) -> Move:
        """Point an alias back at the version before, or at `to_version`, if nobody moves it first.

        The version before is the one that was there until this one came; rolled back again, the one
        before that. With `expected`, only if the alias points there. Raises: NotFoundError if it is
        not set, or nothing is known to have been before; CommitConflictError.
        """
        current = self.version(name, alias)
        if current is None:
            raise NotFoundError(
                f"policy {name}@{alias}: no such alias, expected one to roll back. "
                f"`replaylake policies history {name}` has its moves."
            )
        if expected is not None and expected != current:
            raise _alias_moved_error(name, alias, current, expected)
        target = self._previous_version(name, alias, current) if to_version is None else to_version
        return self.move(name, alias, target, kind="rollback", expected=current, by=by, note=note)

    def history(self, name: str | None = None) -> list[Move]:
        """Return the moves of a policy's aliases, or of all, as they came.

        Cost: where an alias was set before moves were recorded, every commit of the lake's log.
        """
        state = self._log.newest()
        moves = [
            Move(**json.loads(text))
            for key, text in sorted(
                ((key, text) for key, text in state.entries.items() if key.startswith(_PREFIX)),
                # By the commit that made it: clocks of two machines may differ.
                key=lambda item: state.transactions.get(transaction_id(item[0], 0), -1),
            )
        ]
        if _is_whole(state, moves):
            earlier: list[Move] = []
        else:
            earlier = list(_earlier_moves(self._log))
        return [move for move in [*earlier, *moves] if name in (None, move.policy)]

    def _previous_version(self, name: str, alias: str, current: int) -> int:
        there = find_versions(self._log.newest(), name)
        stack = _stack([move for move in self.history(name) if move.alias == alias])
        for version in reversed(stack[:-1] if stack[-1:] == [current] else stack):
            if version in there and version != current:
                return version
        raise NotFoundError(
            f"policy {name}@{alias}: points at version {current}, found no version that it pointed "
            "at before, expected one to go back to. Name it with `to_version`."
        )


def _expected_entries(alias: str, expected: int | None) -> dict[str, int | None]:
    return {} if expected is None else {alias: expected or None}


def _check_unmoved(state: LogState, name: str, claims: Mapping[str, int | None]) -> None:
    for alias, expected in claims.items():
        current = find_alias(state, name, alias)
        if current != expected:
            raise _alias_moved_error(name, alias, current, expected)


def _alias_moved_error(
    name: str, alias: str, found: int | None, expected: int | None
) -> CommitConflictError:
    texts = [
        "not set" if version is None else f"version {version}" for version in (found, expected)
    ]
    return CommitConflictError(
        f"policy {name}@{alias}: found {texts[0]}, expected {texts[1]}: somebody else moved "
        f"the alias. See `replaylake policies history {name}`, and repeat the command."
    )


def _stack(moves: Sequence[Move]) -> list[int]:
    """Return the versions that led to where an alias is: a rollback takes away what it undid."""
    stack: list[int] = []
    for move in moves:
        if not stack and move.from_version is not None:
            stack.append(move.from_version)
        if move.kind == "rollback" and move.to_version in stack:
            while stack[-1] != move.to_version:
                stack.pop()
        elif stack[-1:] != [move.to_version]:
            stack.append(move.to_version)
    return stack


def _is_whole(state: LogState, moves: Sequence[Move]) -> bool:
    """Whether the records account for every alias from when it was first set."""
    first: dict[str, Move] = {}
    for move in moves:
        first.setdefault(alias_key(move.policy, move.alias), move)
    set_now = (key for key in state.entries if key.startswith("alias/"))
    return all(key in first and first[key].from_version is None for key in set_now)


def _earlier_moves(log: CommitLog) -> Iterator[Move]:
    """Yield the moves that a release without records made, as far as the log still has them."""
    where: dict[str, int] = {}
    for info in log.history():
        if info.get("operation") != _OPERATION or info["producer"].startswith(_PREFIX):
            continue
        try:
            change = log.read_change(info["version"])
        except NotFoundError:  # dropped from the log, which remembers that it was there
            continue
        for key, text in change.entries.items():
            if not key.startswith("alias/") or text is None:
                continue
            _, name, alias = key.split("/")
            version = int(json.loads(text)["version"])
            before = where.get(key)
            where[key] = version
            yield Move(name, alias, before, version, "alias", change.timestamp_ms)
