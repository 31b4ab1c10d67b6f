"""Bearer tokens: who may act, who may report feedback, and who may read operational endpoints.

Each role has tokens of its own, several at a time so that they can be changed without a gap. They
come from a file, one a line, or from the environment; never from arguments, which others can read.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.roles import (
    LABELER,
    OPERATOR,
    READER,
    WRITER,
    RoleTable,
    read_role_table,
)
from replaylake.serve.messages import RequestRefusedError

ROLES: Final = ("act", "feedback", "admin")
_MIN_CHARS: Final = 16
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750, section 2.1
_MAX_FILE_BYTES: Final = 1 << 16
# Roles of the role table by route, of which one suffices; of others a reader or an operator.
_TABLE_ROLES_OF_ROUTE: Final[Mapping[str, tuple[str, ...]]] = {
    "/act": (WRITER,),
    "/decisions": (WRITER,),
    "/episodes": (WRITER,),
    "/feedback": (LABELER,),
    "/v1/traces": (WRITER,),
    "/watermark": (WRITER,),
    "/v2/models/{name}/infer": (WRITER,),
    "/v2/models/{name}/versions/{version}/infer": (WRITER,),
    # What infer takes: for who sends it, and for who reads /policy.
    "/v2/models/{name}": (WRITER, READER, OPERATOR),
    "/v2/models/{name}/ready": (WRITER, READER, OPERATOR),
    "/v2/models/{name}/versions/{version}": (WRITER, READER, OPERATOR),
    "/v2/models/{name}/versions/{version}/ready": (WRITER, READER, OPERATOR),
}
_OTHER_TABLE_ROLES: Final = (READER, OPERATOR)
# Probes carry no token, and a refusal of a path tells nothing. What is not listed is the admin's.
_ROLE_OF_ROUTE: Final[Mapping[str, str | None]] = {
    "/act": "act",
    # As /episodes: whoever has it writes what was done elsewhere, under any policy's name.
    "/decisions": "feedback",
    "/feedback": "feedback",
    "/episodes": "feedback",
    "/v1/traces": "feedback",
    "/watermark": "feedback",
    "/v2": None,
    "/v2/health/live": None,
    "/v2/health/ready": None,
    "/v2/models/{name}": "act",
    "/v2/models/{name}/ready": "act",
    "/v2/models/{name}/infer": "act",
    "/v2/models/{name}/versions/{version}": "act",
    "/v2/models/{name}/versions/{version}/ready": "act",
    "/v2/models/{name}/versions/{version}/infer": "act",
    "/livez": None,
    "/readyz": None,
    "/static": None,
    "other": None,
}


def role_of(route: str) -> str | None:
    """Return the role that may use a route; None means anybody."""
    return _ROLE_OF_ROUTE.get(route, "admin")


def variable_of(role: str) -> str:
    """Return the environment variable that holds a role's tokens."""
    return f"REPLAYLAKE_{role.upper()}_TOKEN"


def table_roles_of(route: str) -> tuple[str, ...]:
    """Return the roles of the role table of which one lets a token use a route."""
    return _TABLE_ROLES_OF_ROUTE.get(route, _OTHER_TABLE_ROLES)


@dataclass(frozen=True)
class Tokens:
    """Every token of every role, as bytes, and the role table. Without any, nothing is asked for.

    dataset: which one the server logs to, for the table; None if it logs to none.
    """

    pairs: tuple[tuple[bytes, str], ...] = field(default=(), repr=False)
    table: RoleTable | None = field(default=None, repr=False)
    dataset: str | None = field(default=None, repr=False)

    @property
    def is_empty(self) -> bool:
        """Whether anybody may do anything."""
        return not self.pairs and self.table is None

    @property
    def roles(self) -> frozenset[str]:
        """The roles that have tokens; while there are any, a role without is closed."""
        roles = {role for _, role in self.pairs}
        for grant in self.table.grants if self.table is not None else ():
            granted = grant.roles(self.dataset)
            roles |= {
                role
                for route, role in (("/act", "act"), ("/feedback", "feedback"), ("", "admin"))
                if granted & set(table_roles_of(route))
            }
        return frozenset(roles)

    def check(self, role: str, authorization: bytes | None, route: str | None = None) -> None:
        """Let a request in by its Authorization header, or not.

        route: decides which roles of the table suffice; None for none of them. Each token is
        compared with, and each comparison takes the same time whatever is presented.
        Raises: RequestRefusedError: 401 without a token of ours, 403 with one of another role.
        """
        if self.is_empty:
            return
        scheme, _, presented = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            cause = "token missing" if authorization is None else "authorization is not Bearer"
            raise _unauthorized_error(cause, role)
        presented = presented.strip()
        is_known = is_allowed = False
        for token, its_role in self.pairs:
            if hmac.compare_digest(token, presented):
                is_known = True
                is_allowed |= its_role == role
        asked = ""
        if self.table is not None and route is not None:
            enough = table_roles_of(route)
            asked = f", or {' or '.join(enough)} in the role table"
            asked += "" if self.dataset is None else f" for dataset {self.dataset}"
            if (grant := self.table.find(presented)) is not None:
                is_known = True
                is_allowed |= bool(grant.roles(self.dataset) & set(enough))
        if not is_known:
            raise _unauthorized_error("unknown token", f"{role}{asked}")
        if not is_allowed:
            raise RequestRefusedError(403, "token", f"token lacks role {role}{asked}")


def _unauthorized_error(cause: str, role: str) -> RequestRefusedError:
    challenge = (b"www-authenticate", b'Bearer realm="replaylake"')
    message = f"{cause}; send Authorization: Bearer with a token of role {role}"
    return RequestRefusedError(401, "token", message, headers=(challenge,))


def read_tokens(
    files: Mapping[str, Path | None],
    environment: Mapping[str, str] = os.environ,
    *,
    roles_file: Path | None = None,
    dataset: str | None = None,
) -> Tokens:
    """Return the tokens of each role's file and variable (REPLAYLAKE_ACT_TOKEN and its kin).

    roles_file: the role table; dataset: which one the server logs to.

    Raises: ConfigInvalidError, naming the file or variable and never what is in it.
    """
    pairs: list[tuple[bytes, str]] = []
    for role in ROLES:
        path = files.get(role)
        if path is not None:
            name = f"{role}_token_file"
            text = _read(path, name)
            pairs += ((token, role) for token in _parse(text, f"{name}: {path}", name))
        variable = variable_of(role)
        if variable in environment:
            pairs += ((token, role) for token in _parse(environment[variable], variable, None))
    table = None if roles_file is None else read_role_table(roles_file)
    return Tokens(tuple(dict.fromkeys(pairs)), table, dataset)


def _read(path: Path, name: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigInvalidError(
            f"serve: {name}: {path}: {error.strerror}, expected a readable file with one token "
            "per line.",
            parameter=name,
        ) from error
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigInvalidError(
            f"serve: {name}: {path}: found more than {_MAX_FILE_BYTES} bytes, expected a few "
            "tokens, one per line.",
            parameter=name,
        )
    return content.decode("latin-1")


def _parse(text: str, source: str, name: str | None) -> list[bytes]:
    lines = [line.strip() for line in text.splitlines()]
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise ConfigInvalidError(
            f"serve: {source}: found no token, expected one per line.", parameter=name
        )
    for number, token in enumerate(tokens, 1):
        if len(token) < _MIN_CHARS or _TOKEN.fullmatch(token) is None:
            raise ConfigInvalidError(
                f"serve: {source}: token {number} has {len(token)} characters, expected at least "
                f"{_MIN_CHARS} of A-Z a-z 0-9 . _ ~ + / - (then =). "
                "`python -c 'import secrets; print(secrets.token_urlsafe(32))'` prints one.",
                parameter=name,
            )
    return [token.encode() for token in tokens]
