"""What a server lets through: tokens, sizes, times and numbers, and what it writes down of each."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.serve.safety.access_log import STDOUT
from replaylake.serve.safety.hosts import check_host
from replaylake.serve.safety.tokens import Tokens, read_tokens, variable_of

_PREFIX: Final = "REPLAYLAKE_SERVE_"
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and all of them together.

    body_bytes: of one body; 8 MiB holds 256 Atari frames written as JSON. batch: observations a
    request. steps: of a request's episodes, together. body_timeout_s: from a request's head to the
    last of its body. deadline_s: until its answer, that included; work that holds the event loop is
    let finish. queue: requests that an endpoint works on at once. buffered_bytes: of all bodies
    that come in pieces, together.
    """

    body_bytes: int = 8 << 20
    batch: int = 4096
    steps: int = 65_536
    body_timeout_s: float = 10.0
    deadline_s: float = 15.0
    queue: int = 256
    buffered_bytes: int = 64 << 20


@dataclass(frozen=True)
class ConnectionLimits:
    """What a client may hold of a worker.

    num: connections at once; above it the one that idled longest goes, and if none does the new
    one is refused. head_timeout_s: from a head's first byte to its last. idle_timeout_s: without a
    request. unread_timeout_s: with an answer that the client does not take. head_bytes: of one
    head, give or take a packet.
    """

    num: int = 2048
    head_timeout_s: float = 10.0
    idle_timeout_s: float = 65.0
    unread_timeout_s: float = 10.0
    head_bytes: int = 1 << 16


@dataclass(frozen=True)
class Safety:
    """A server's protection.

    act_token_file, feedback_token_file, admin_token_file: tokens, one a line, of those who may act,
    feed back and look (/policy, /metrics); REPLAYLAKE_ACT_TOKEN and its kin hold them otherwise.
    roles_file: the role table, of hashes of further tokens and what they may do by dataset.
    insecure: serve other machines without tokens. access_log: a file that gets one line of JSON a
    request, or `-` for stdout. allowed_hosts: names and addresses that it answers to, beside
    loopback and the address that it listens on; `*` for any. The others are those of Limits and
    ConnectionLimits.
    """

    act_token_file: Path | None = None
    feedback_token_file: Path | None = None
    admin_token_file: Path | None = None
    roles_file: Path | None = None
    insecure: bool = False
    access_log: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    body_bytes: int = Limits.body_bytes
    body_timeout_s: float = Limits.body_timeout_s
    deadline_s: float = Limits.deadline_s
    queue: int = Limits.queue
    connections: int = ConnectionLimits.num
    idle_timeout_s: float = ConnectionLimits.idle_timeout_s

    def __post_init__(self) -> None:
        for host in self.allowed_hosts:
            check_host(host)
        for name in ("body_bytes", "body_timeout_s", "deadline_s", "queue", "connections"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigInvalidError(
                    f"serve: {name}: found {value}, expected a number above 0.", parameter=name
                )
        if not 1 <= self.idle_timeout_s < math.inf:
            raise ConfigInvalidError(
                f"serve: idle_timeout_s: found {self.idle_timeout_s}, expected 1 second or more.",
                parameter="idle_timeout_s",
            )

    @property
    def limits(self) -> Limits:
        """What a request may ask for. All bodies together may be eight of the largest."""
        return Limits(
            body_bytes=self.body_bytes,
            body_timeout_s=self.body_timeout_s,
            deadline_s=self.deadline_s,
            queue=self.queue,
            buffered_bytes=8 * self.body_bytes,
        )

    @property
    def connection_limits(self) -> ConnectionLimits:
        """What a client may hold."""
        return ConnectionLimits(
            num=self.connections,
            head_timeout_s=self.body_timeout_s,
            idle_timeout_s=self.idle_timeout_s,
            unread_timeout_s=self.body_timeout_s,
        )

    def tokens(self, dataset: str | None = None) -> Tokens:
        """Read the tokens of a server that logs to a dataset. Raises: ConfigInvalidError."""
        files = {
            "act": self.act_token_file,
            "feedback": self.feedback_token_file,
            "admin": self.admin_token_file,
        }
        return read_tokens(files, roles_file=self.roles_file, dataset=dataset)

    def to_environment(self) -> dict[str, str]:
        """Return the variables that a worker reads: paths made absolute, and no token."""
        texts: dict[str, str] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Path) or (
                field.name == "access_log" and value not in (None, STDOUT)
            ):
                value = Path(value).absolute()
            if isinstance(value, tuple):
                value = ",".join(value) or None
            if value is not None:
                text = str(int(value)) if isinstance(value, bool) else str(value)
                texts[_PREFIX + field.name.upper()] = text
        return texts

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Safety:
        """Read a worker's variables. Raises: ConfigInvalidError."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            text = environment.get(_PREFIX + field.name.upper())
            if text:
                values[field.name] = _read(field.name, text, field.default)
        return cls(**values)


def parse_number(name: str, text: str, kind: Callable[[str], _Number]) -> _Number:
    """Parse the text of the variable of this field.

    Raises: ConfigInvalidError, naming the variable, if the text is no number of this kind.
    """
    try:
        return kind(text)
    except ValueError as error:
        expected = "an integer" if kind is int else "a number"
        raise ConfigInvalidError(
            f"serve: the variable {_PREFIX}{name.upper()}: found {text!r}, expected {expected}.",
            parameter=name.lower(),
        ) from error


def _read(name: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        return text == "1"
    if isinstance(default, int | float):
        return parse_number(name, text, type(default))
    if isinstance(default, tuple):
        return tuple(filter(None, (part.strip() for part in text.split(","))))
    return Path(text) if name.endswith("_file") else text


def check_exposure(address: str, safety: Safety) -> Tokens:
    """Read the tokens, and refuse to serve other machines without any.

    Raises: ConfigInvalidError.
    """
    tokens = safety.tokens()
    is_loopback = ipaddress.ip_address(address).is_loopback
    if tokens.is_empty and not is_loopback and not safety.insecure:
        raise ConfigInvalidError(
            f"serve: host: found {address}, which other machines can reach, but no tokens. Set "
            f"{variable_of('act')} or `act_token_file` (and those of the roles feedback and "
            "admin) or `roles_file`, listen on 127.0.0.1, or allow requests without tokens with "
            "`insecure`.",
            parameter="host",
        )
    return tokens
