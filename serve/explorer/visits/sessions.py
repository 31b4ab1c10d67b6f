"""Sessions: with which token a reader signed in, and what it allows.

A token of role admin allows everything. One of the role table reads where it has the role reader
for all datasets, and writes what its other roles allow.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Final

from replaylake.datastore.lake.roles import ALL_DATASETS, READER, Grant
from replaylake.serve.messages import RequestRefusedError
from replaylake.serve.safety.tokens import Tokens

_ADMIN: Final = "admin"


@dataclass(frozen=True)
class Session:
    """A reader, as its token says.

    key: names the token, for cookies and forms; empty where no token is needed. grant: its entry in
    the role table; None for one that may do everything.
    """

    key: bytes
    grant: Grant | None = None

    def has_role(self, role: str, dataset: str | None) -> bool:
        """Return whether it has a role of the table for a dataset; None is all datasets."""
        if self.grant is None:
            return True
        if dataset is None:
            return ALL_DATASETS in self.grant.datasets.get(role, ())
        return role in self.grant.roles(dataset)

    def require_role(self, role: str, dataset: str | None) -> None:
        """Refuse what needs a role of the table. Raises: RequestRefusedError, 403."""
        if self.grant is None or self.has_role(role, dataset):
            return
        where = "all datasets" if dataset is None else f"dataset {dataset}"
        needed = ALL_DATASETS if dataset is None else dataset
        message = (
            f"token {self.grant.name!r} has no role {role} for {where}; add "
            f'{role} = ["{needed}"] to it in the role table, and start the explorer again'
        )
        raise RequestRefusedError(403, "token", message)


class Sessions:
    """The readers of one process: after a restart, everybody signs in again."""

    def __init__(self, tokens: Tokens, key: bytes) -> None:
        """key: secret of the process, from which cookies are computed."""
        self._tokens = tokens
        self._key = key

    def find(self, cookie: str, authorization: str | None) -> Session | None:
        """Return whose request this is, by its cookie or its header; None for an unknown reader.

        Raises: RequestRefusedError: 401 for a header without a token of ours, 403 for a token that
        may not read all of the lake.
        """
        if self._tokens.is_empty:
            return Session(b"")
        if (session := self.find_by_cookie(cookie)) is not None:
            return session
        if authorization is None:
            return None
        scheme, _, presented = authorization.partition(" ")
        session = self.find_by_token(presented.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            expected = f"role {_ADMIN}"
            if self._tokens.table is not None:
                expected += f", or of {READER} for all datasets in the role table"
            message = f"unknown token; send Authorization: Bearer with a token of {expected}"
            raise RequestRefusedError(401, "token", message)
        return session

    def find_by_cookie(self, cookie: str) -> Session | None:
        """Return the session of a cookie; None for one that this process did not set."""
        found = None
        for session in self._list_all():
            if hmac.compare_digest(self.make_cookie(session).encode(), cookie.encode()):
                found = session
        return found

    def find_by_token(self, presented: str) -> Session | None:
        """Return the session of a token; None for an unknown one.

        Raises: RequestRefusedError, 403, for a token that may not read all of the lake.
        """
        token = presented.encode("utf-8", "replace")
        found = None
        for one, role in self._tokens.pairs:
            if role == _ADMIN and hmac.compare_digest(one, token):
                found = Session(one)
        if found is not None or self._tokens.table is None:
            return found
        grant = self._tokens.table.find(token)
        if grant is None:
            return None
        if not grant.can_read_all():
            message = (
                f"token {grant.name!r} may not read every column of every dataset, and pages show "
                f'all of the lake; add {READER} = ["{ALL_DATASETS}"] to it in the role table, '
                "without columns"
            )
            raise RequestRefusedError(403, "token", message)
        return _open_session(grant)

    def make_cookie(self, session: Session) -> str:
        """Return the value of the cookie of a session, which does not tell its token."""
        return hmac.new(self._key, b"session\0" + session.key, hashlib.sha256).hexdigest()

    def _list_all(self) -> list[Session]:
        grants = () if self._tokens.table is None else self._tokens.table.grants
        return [
            *(Session(token) for token, role in self._tokens.pairs if role == _ADMIN),
            *(_open_session(grant) for grant in grants if grant.can_read_all()),
        ]


def _open_session(grant: Grant) -> Session:
    return Session(b"sha256:" + grant.token_sha256.encode(), grant)
