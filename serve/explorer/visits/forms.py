"""Forms: what a request has to show before it may write to the lake.

A page of another site can make a browser send a form here, with the cookies of this one. Two checks
are made, each of which would be enough: the browser names the page that sent the form (Origin,
Sec-Fetch-Site), and the form has a token that only pages of this explorer have.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import Request

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.names import parse_version
from replaylake.serve.messages import RequestRefusedError

TOKEN_FIELD: Final = "form_token"
_CONTENT_TYPE: Final = "application/x-www-form-urlencoded"
_RELOAD: Final = "reload the page that has it, and send it again"


class FormTokens:
    """Tokens of the forms of one process, each for one session."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def issue(self, session: bytes) -> str:
        """Return the token of a session's forms. session: what the reader signed in with."""
        return hmac.new(self._key, b"form\0" + session, hashlib.sha256).hexdigest()

    def check(self, session: bytes, token: str) -> None:
        """Refuse a form of another site, session or process. Raises: RequestRefusedError, 403."""
        if not token:
            message = f"this form has no token of the explorer; {_RELOAD}"
            raise RequestRefusedError(403, TOKEN_FIELD, message)
        if not hmac.compare_digest(self.issue(session).encode(), token.encode()):
            message = (
                "this form's token is not valid: the explorer was started again, or somebody else "
                f"signed in; {_RELOAD}"
            )
            raise RequestRefusedError(403, TOKEN_FIELD, message)


def check_sender(request: Request) -> None:
    """Refuse a form that no page of this explorer sent, as the browser says.

    Every browser sends Origin with a form; over HTTPS and to loopback also Sec-Fetch-Site, which
    holds behind a proxy that changes Host. Raises: RequestRefusedError, 403.
    """
    site = request.headers.get("sec-fetch-site")
    if site == "same-origin":
        return
    origin = request.headers.get("origin")
    if site is None and origin is not None:
        host = request.headers.get("host", "")
        if urlsplit(origin).netloc.lower() == host.lower():
            return
    is_unknown = site in (None, "none") and origin is None
    found = "does not say which page sent it" if is_unknown else "is from another site"
    message = (
        f"this form {found}, and only pages of this explorer may write to the lake; open the page "
        "in a browser, and send the form from there"
    )
    raise RequestRefusedError(403, "origin", message)


async def read_form(request: Request, max_bytes: int) -> dict[str, str]:
    """Return the fields of a form, of each name the last.

    Raises: RequestRefusedError: 413 for a larger one, 415 for another content type, 400 for text
    that is not UTF-8.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _CONTENT_TYPE:
        raise RequestRefusedError(
            415, "content-type", found=repr(kind[:80]), expected=f"a form as {_CONTENT_TYPE}"
        )
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            message = f"the form has more than {max_bytes:,} bytes; shorten its texts"
            raise RequestRefusedError(413, "body", message)
    try:
        pairs = parse_qsl(
            body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=100
        )
    except (UnicodeDecodeError, ValueError) as error:
        message = f"the form cannot be read ({error}); send its fields as UTF-8"
        raise RequestRefusedError(400, "body", message) from error
    return dict(pairs)


def read_version(form: Mapping[str, str], field: str) -> int:
    """Return the version that a field names. Raises: ConfigInvalidError."""
    text = form.get(field, "")
    number = parse_version(text)
    if number is None:
        raise ConfigInvalidError(
            f"{field}: found {text[:40]!r}, expected the number of a version.", parameter=field
        )
    return number
