"""Identity: the run, group, episode, agent and user that a request's path and headers name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from replaylake.serve.gateway.conversations import CallIdentity
from replaylake.serve.messages import RequestRefusedError

PREFIX: Final = b"x-replaylake-"
TOKEN_HEADER: Final = b"x-replaylake-token"
IDEMPOTENCY_KEY: Final = b"idempotency-key"
_FIELDS: Final = {
    "run": "run",
    "iteration": "iteration",
    "group": "group",
    "episode": "episode",
    "agent": "agent",
    "parent-agent": "parent_agent",
    "policy-version": "policy_version",
}
_HEADERS: Final = [(name, PREFIX + name.encode(), field) for name, field in _FIELDS.items()]
_HEADER_NAMES: Final = frozenset(header for _, header, _ in _HEADERS)
_NOBODY: Final = CallIdentity()
# Fields that may stand before /v1 in the path: some clients can only be given a base URL.
_IN_PATH: Final = ("run", "iteration", "group", "episode", "agent")
_NUMBERS: Final = ("iteration", "policy_version")
_MAX_CHARS: Final = 200
_MAX_NUMBER: Final = 2**63 - 1


def split_path(path: str) -> tuple[dict[str, str], str]:
    """Return the names in `/run/R/iteration/I/group/G/episode/E/agent/A`, and the path after it.

    Each of them may be absent. Raises: RequestRefusedError for one that is there twice.
    """
    found: dict[str, str] = {}
    while True:
        parts = path.split("/", 3)
        if len(parts) < 4 or parts[1] not in _IN_PATH:
            return found, path
        if parts[1] in found:
            message = f"{parts[1]} stands twice in the path; send it once"
            raise RequestRefusedError(400, "path", message)
        found[parts[1]] = parts[2]
        path = f"/{parts[3]}"


def read_identity(
    in_path: Mapping[str, str], headers: Mapping[bytes, bytes], user_header: bytes | None
) -> CallIdentity:
    """Return the names of a call; a header takes precedence over the path.

    Raises: RequestRefusedError (400) for a value that cannot be stored.
    """
    if not in_path and user_header is None and headers.keys().isdisjoint(_HEADER_NAMES):
        return _NOBODY
    values: dict[str, str | int | None] = {}
    for name, header, field in _HEADERS:
        raw = headers.get(header)
        text = in_path.get(name) if raw is None else _decode(raw)
        if text is not None:
            values[field] = _read(name, field, text)
    if user_header is not None and (raw := headers.get(user_header)) is not None:
        values["user"] = _read(user_header.decode(), "user", _decode(raw))
    return CallIdentity(**values)  # type: ignore[arg-type]


def _decode(raw: bytes) -> str:
    try:
        return raw.decode().strip()
    except UnicodeDecodeError:
        return raw.decode("latin-1").strip()


def _read(name: str, field: str, text: str) -> str | int:
    if field in _NUMBERS:
        if not text.isascii() or not text.isdecimal() or int(text) > _MAX_NUMBER:
            raise RequestRefusedError(
                400, name, found=repr(text[:_MAX_CHARS]), expected="a whole number of 0 or more"
            )
        return int(text)
    if field == "parent_agent" and not text:
        return text  # the agent without a name
    is_branch = field == "agent" and "~" in text  # the gateway names those
    if not text or len(text) > _MAX_CHARS or not text.isprintable() or is_branch:
        suffix = " without ~" if field == "agent" else ""
        raise RequestRefusedError(
            400,
            name,
            found=repr(text[:_MAX_CHARS]),
            expected=f"1 to {_MAX_CHARS} printable characters{suffix}",
        )
    return text
