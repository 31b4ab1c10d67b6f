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
from replaylake.serve.messages import RequestRefusedError

ROLES: Final = ("act", "feedback", "admin")
_MIN_CHARS: Final = 16
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750, section 2.1
_MAX_FILE_BYTES: Final = 1 << 16
# Probes carry no token, and a refusal of a path tells nothing. What is not listed is the admin's.
_ROLE_OF_ROUTE: Final[Mapping[str, str | None]] = {
    "/act": "act",
    "/feedback": "feedback",
    "/episodes": "feedback",
    "/livez": None,
    "/readyz": None,
    "other": None,
}


def role_of(route: str) -> str | None:
    """Return the role that may use a route; None means anybody."""
    return _ROLE_OF_ROUTE.get(route, "admin")


def variable_of(role: str) -> str:
    """Return the environment variable that holds a role's tokens."""
    return f"REPLAYLAKE_{role.upper()}_TOKEN"


@dataclass(frozen=True)
class Tokens:
    """Every token of every role, as bytes. Without any, nothing is asked for."""

    pairs: tuple[tuple[bytes, str], ...] = field(default=(), repr=False)

    @property
    def is_empty(self) -> bool:
        """Whether anybody may do anything."""
        return not self.pairs

    @property
    def roles(self) -> frozenset[str]:
        """The roles that have tokens; while there are any, a role without is closed."""
        return frozenset(role for _, role in self.pairs)

    def check(self, role: str, authorization: bytes | None) -> None:
        """Let a request in by its Authorization header, or not.

        Each token is compared with, and each comparison takes the same time whatever is presented.
        Raises: RequestRefusedError: 401 without a token of ours, 403 with one of another role.
        """
        if not self.pairs:
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
        if not is_known:
            raise _unauthorized_error("unknown token", role)
        if not is_allowed:
            raise RequestRefusedError(403, "token", f"token lacks role {role}")


def _unauthorized_error(cause: str, role: str) -> RequestRefusedError:
    challenge = (b"www-authenticate", b'Bearer realm="replaylake"')
    message = f"{cause}; send Authorization: Bearer with a token of role {role}"
    return RequestRefusedError(401, "token", message, headers=(challenge,))


def read_tokens(
    files: Mapping[str, Path | None], environment: Mapping[str, str] = os.environ
) -> Tokens:
    """Return the tokens of each role's file and variable (REPLAYLAKE_ACT_TOKEN and its kin).

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
    return Tokens(tuple(dict.fromkeys(pairs)))


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
