"""Configuration of an explorer."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.serve.safety.hosts import AllowedHosts, check_host
from replaylake.serve.safety.tokens import Tokens, read_tokens, variable_of

_PREFIX: Final = re.compile(r"(?:/[A-Za-z0-9._~-]+)*")
_ROLE: Final = "admin"
# By the address of all interfaces. An empty host is that of IPv4.
_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class ExplorerConfig:
    """One explorer.

    lake: a folder or URL. path_prefix: the path below which a proxy passes requests on, such as
    `/lake`; empty without one. admin_token_file: tokens, one per line; those in the variable
    REPLAYLAKE_ADMIN_TOKEN count, too. roles_file: the role table, with tokens that may do less.
    insecure: allow other machines without tokens. allowed_hosts: names to answer to besides
    loopback and the address itself. read_only: show no forms, and refuse what is sent to their
    addresses. tokenizers: files tokenizer.json, for the texts of token ids.
    """

    lake: str
    host: str = "127.0.0.1"
    port: int = 8080
    path_prefix: str = ""
    admin_token_file: Path | None = None
    roles_file: Path | None = None
    insecure: bool = False
    allowed_hosts: tuple[str, ...] = ()
    read_only: bool = False
    tokenizers: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        for host in self.allowed_hosts:
            check_host(host)
        if _PREFIX.fullmatch(self.path_prefix) is None:
            raise ConfigInvalidError(
                f"explore: path_prefix: found {self.path_prefix!r}, expected a path such as /lake, "
                "without a slash at its end.",
                parameter="path_prefix",
            )

    @property
    def url(self) -> str:
        """The address of the lake's page on this machine: loopback where it listens on all."""
        host = _LOOPBACK.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}{self.path_prefix}/"

    @property
    def hosts(self) -> AllowedHosts:
        """The hosts that it answers to: loopback, the one that it listens on, and allowed ones."""
        own = self.host.partition("%")[0]
        return AllowedHosts((*([own] if own else []), *self.allowed_hosts))

    def read_tokens(self, environment: Mapping[str, str]) -> Tokens:
        """Return the tokens with which the pages may be read. Raises: ConfigInvalidError."""
        named = {key: value for key, value in environment.items() if key == variable_of(_ROLE)}
        return read_tokens({_ROLE: self.admin_token_file}, named, roles_file=self.roles_file)

    def check_exposure(self, address: str, tokens: Tokens) -> None:
        """Refuse to show a lake to other machines without a token, and to let them write to it.

        Raises: ConfigInvalidError.
        """
        if not tokens.is_empty or ipaddress.ip_address(address).is_loopback:
            return
        if not self.insecure:
            raise ConfigInvalidError(
                f"explore: host: found {address}, which other machines can reach, but no tokens. "
                f"Set {variable_of(_ROLE)}, `admin_token_file` or `roles_file`, listen on "
                "127.0.0.1, or allow requests without tokens with `insecure`.",
                parameter="host",
            )
        if not self.read_only:
            raise ConfigInvalidError(
                f"explore: insecure: found {address}, from which anybody could write to the lake, "
                f"expected `read_only` beside it. Or set {variable_of(_ROLE)}, "
                "`admin_token_file` or `roles_file`.",
                parameter="insecure",
            )
