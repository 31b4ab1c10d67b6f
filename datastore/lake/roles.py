"""RoleTable: which bearer token may do what with which dataset; the table holds hashes of tokens.

One table for everything that asks for tokens. A role does not include another:

    reader    reads the dataset, and queries it with SQL
    labeler   annotates it, and reports rewards of its decisions
    writer    writes episodes and decisions into it
    operator  promotes policies, deletes, and maintains

A token may be limited to some columns of a dataset, which counts for SQL.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.errors import ConfigInvalidError, QueryRefusedError

READER: Final = "reader"
LABELER: Final = "labeler"
WRITER: Final = "writer"
OPERATOR: Final = "operator"
TABLE_ROLES: Final = (READER, LABELER, WRITER, OPERATOR)
ALL_DATASETS: Final = "*"
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MAX_FILE_BYTES: Final = 1 << 20
# Shorter ones can be guessed; the empty one is what a header without a token has.
_MIN_TOKEN_BYTES: Final = 16
_EMPTY: Final = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class Grant:
    """One token: its name, which may be printed, its hash, and by role the datasets.

    columns: by dataset, the only columns that SQL shows; "*" stands for datasets without a list.
    """

    name: str
    token_sha256: str = field(repr=False)
    datasets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    columns: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def roles(self, dataset: str | None) -> frozenset[str]:
        """Return its roles for a dataset; for None those that it has for any."""
        return frozenset(
            role
            for role, names in self.datasets.items()
            if names and (dataset is None or dataset in names or ALL_DATASETS in names)
        )

    def can_read(self, dataset: str) -> bool:
        """Return whether the token has the role reader for a dataset."""
        return READER in self.roles(dataset)

    def can_read_all(self) -> bool:
        """Return whether the token may read every column of every dataset."""
        return ALL_DATASETS in self.datasets.get(READER, ()) and not self.columns

    def readable_columns(self, dataset: str) -> frozenset[str] | None:
        """Return the columns of a dataset that SQL shows; None for all."""
        return self.columns.get(dataset, self.columns.get(ALL_DATASETS))


@dataclass(frozen=True)
class RoleTable:
    """The grants of all tokens."""

    grants: tuple[Grant, ...] = ()

    def find(self, token: bytes) -> Grant | None:
        """Return the grant of a token; None for one of fewer than 16 bytes.

        Compares with each, in the same time whatever it is.
        """
        if len(token) < _MIN_TOKEN_BYTES:
            return None
        hashed = hashlib.sha256(token).hexdigest()
        found = None
        for grant in self.grants:
            if hmac.compare_digest(grant.token_sha256, hashed):
                found = grant
        return found

    def find_reader(self, token: bytes) -> Grant:
        """Return the grant of a token that has the role reader, for SQL.

        Raises: QueryRefusedError for an unknown token, and one without the role.
        """
        grant = self.find(token)
        if grant is None:
            raise QueryRefusedError(
                "token: found one that is not in the role table, expected a token with the role "
                f"{READER}."
            )
        if READER not in grant.roles(None):
            raise QueryRefusedError(
                f"token {grant.name!r}: found no role {READER}, expected it for SQL. Add "
                f"{READER} with its datasets to the role table."
            )
        return grant


def read_role_table(path: Path) -> RoleTable:
    """Read a TOML file with a table `[[tokens]]` for each token.

    Each has `name`, `sha256` (of the token, 64 hex digits), for each of its roles the list of
    datasets, of which "*" stands for all, and maybe `columns`: the lists of columns that SQL shows,
    by dataset. Raises: ConfigInvalidError.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        body = tomllib.loads(data.decode()) if len(data) <= _MAX_FILE_BYTES else None
    except OSError as error:
        raise _invalid_error(path, f"{error.strerror}, expected a readable TOML file") from error
    except ValueError as error:  # UnicodeDecodeError and TOMLDecodeError are ones
        raise _invalid_error(path, f"{error}, expected TOML") from error
    if body is None:
        raise _invalid_error(path, f"found more than {_MAX_FILE_BYTES} bytes, expected fewer")
    entries = body.get("tokens")
    if set(body) != {"tokens"} or not isinstance(entries, list) or not entries:
        found = ", ".join(sorted(body)) or "nothing"
        raise _invalid_error(path, f"found {found}, expected one or more tables [[tokens]] alone")
    grants = tuple(_grant(path, number, entry) for number, entry in enumerate(entries, 1))
    for what in ("name", "token_sha256"):
        values = [getattr(grant, what) for grant in grants]
        if twice := next((g.name for g in grants if values.count(getattr(g, what)) > 1), None):
            raise _invalid_error(
                path, f"found the {what.removeprefix('token_')} of {twice!r} twice, expected once"
            )
    return RoleTable(grants)


def _grant(path: Path, number: int, entry: Any) -> Grant:
    where = f"token {number}"
    if not isinstance(entry, dict):
        raise _invalid_error(path, f"{where}: found {type(entry).__name__}, expected a table")
    name, hashed = entry.get("name"), entry.get("sha256")
    if not isinstance(name, str) or not name.strip():
        raise _invalid_error(path, f"{where}: found no name, expected a text that tells it apart")
    if not isinstance(hashed, str) or _SHA256.fullmatch(hashed) is None:
        # What is there may be the token itself, and is not repeated.
        raise _invalid_error(
            path, f"token {name!r}: expected `sha256`, the token's SHA-256 as 64 hex digits"
        )
    if hashed == _EMPTY:
        raise _invalid_error(
            path, f"token {name!r}: found the SHA-256 of no text at all, expected that of a token"
        )
    roles = {k: value for k, value in entry.items() if k not in ("name", "sha256", "columns")}
    if unknown := sorted(set(roles) - set(TABLE_ROLES)):
        raise _invalid_error(
            path,
            f"token {name!r}: found {', '.join(unknown)}, expected the roles "
            f"{', '.join(TABLE_ROLES)}",
        )
    for role, names in roles.items():
        if not _is_list_of_names(names):
            raise _invalid_error(
                path,
                f'token {name!r}: {role}: found {names!r}, expected a list of datasets, or ["*"] '
                "for all",
            )
    if not roles:
        raise _invalid_error(path, f"token {name!r}: found no role, expected at least one")
    columns = _columns(path, f"token {name!r}: columns", entry, roles.get(READER, ()))
    return Grant(name, hashed, {role: tuple(names) for role, names in roles.items()}, columns)


def _columns(
    path: Path, where: str, entry: Mapping[str, Any], readable: Collection[str]
) -> dict[str, frozenset[str]]:
    """Return the columns by dataset. Raises: ConfigInvalidError."""
    columns = entry.get("columns", {})
    if not isinstance(columns, dict) or ("columns" in entry and not columns):
        raise _invalid_error(
            path, f"{where}: found {columns!r}, expected lists of columns by dataset"
        )
    for dataset, names in columns.items():
        if dataset != ALL_DATASETS and dataset not in readable and ALL_DATASETS not in readable:
            raise _invalid_error(
                path, f"{where}: found {dataset!r}, expected a dataset of the role {READER}"
            )
        if not _is_list_of_names(names):
            raise _invalid_error(
                path, f"{where}: {dataset}: found {names!r}, expected a list of columns"
            )
    return {dataset: frozenset(names) for dataset, names in columns.items()}


def _is_list_of_names(names: Any) -> bool:
    return isinstance(names, list) and bool(names) and all(isinstance(n, str) for n in names)


def _invalid_error(path: Path, message: str) -> ConfigInvalidError:
    return ConfigInvalidError(
        f"roles_file: {path}: {message}. docs/HTTP.md has an example.", parameter="roles_file"
    )
