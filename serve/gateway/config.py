"""Configuration of a gateway."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from typing import Any, Final

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.serve.gateway.call_log import ON_RECORD_FAILURE, REFUSE, Redact
from replaylake.serve.gateway.openai_api import AUTO, ENGINES
from replaylake.serve.safety.hosts import AllowedHosts
from replaylake.serve.safety.limits import Safety

_SECRET_HEADERS: Final = (
    "authorization",
    "cookie",
    "proxy-authorization",
    "x-api-key",
    "x-replaylake-token",
)
DEFAULT_IDLE_S: Final = 86_400.0
# Dialogues with images in them are longer than observations, and take longer to send.
MAX_BODY_BYTES: Final = 64 << 20
BODY_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True)
class GatewayConfig:
    """One gateway.

    upstream: base URL of the engine. lake (a folder or URL) and dataset: where calls are recorded;
    both are created where they are absent. engine: whose fields request ids and log-probs; `auto`
    detects it. on_record_failure: the reaction to a call that cannot be recorded: `refuse` its
    answer, or `pass` it on and count the loss. idle_s: after how long without a call an episode
    is closed to further ones. user_header: the header whose value is the column user_id. redact:
    `module:function` that every call goes through before it is written. upstream_key_env: the
    variable with the key that the engine gets instead of the caller's. silence_s: how long the
    engine may take until its first byte, and between two. sync_every: fsync each call before its
    answer ends, instead of all of the last 5 ms at once.
    """

    upstream: str
    lake: str
    dataset: str
    host: str = "127.0.0.1"
    port: int = 4000
    engine: str = AUTO
    on_record_failure: str = REFUSE
    idle_s: float = DEFAULT_IDLE_S
    user_header: str | None = None
    redact: str | None = None
    upstream_key_env: str | None = None
    silence_s: float = 600.0
    sync_every: bool = False
    safety: Safety = field(
        default_factory=lambda: Safety(body_bytes=MAX_BODY_BYTES, body_timeout_s=BODY_TIMEOUT_S)
    )

    def __post_init__(self) -> None:
        for name, known in (("engine", ENGINES), ("on_record_failure", ON_RECORD_FAILURE)):
            if (value := getattr(self, name)) not in known:
                raise ConfigInvalidError(
                    f"gateway: {name}: found {value!r}, expected one of {', '.join(known)}.",
                    parameter=name,
                )
        header = (self.user_header or "").strip().lower()
        if header in _SECRET_HEADERS:
            raise ConfigInvalidError(
                f"gateway: user_header: found {self.user_header!r}, whose values are credentials, "
                "expected a header that identifies a user. It is stored in the dataset.",
                parameter="user_header",
            )
        for name in ("idle_s", "silence_s"):
            if not 0 < (value := getattr(self, name)) < float("inf"):
                raise ConfigInvalidError(
                    f"gateway: {name}: found {value}, expected a number of seconds above 0.",
                    parameter=name,
                )

    @property
    def url(self) -> str:
        """Where it answers, once `port` is the real one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def allowed_hosts(self) -> AllowedHosts:
        """Host names to answer to: loopback, the listening address, and those of `safety`."""
        own = self.host.partition("%")[0]
        return AllowedHosts((*([own] if own else []), *self.safety.allowed_hosts))

    def read_upstream_key(self) -> bytes | None:
        """Return the key of our own for the engine, None where callers send theirs.

        Raises: ConfigInvalidError if the variable is not set.
        """
        if self.upstream_key_env is None:
            return None
        key = os.environ.get(self.upstream_key_env, "").strip()
        if not key or not key.isprintable() or not key.isascii():
            raise ConfigInvalidError(
                f"gateway: upstream_key_env: found no key in the variable {self.upstream_key_env}, "
                "expected the engine's key. Set it, or let callers send theirs.",
                parameter="upstream_key_env",
            )
        return key.encode()

    def load_redact(self) -> Redact | None:
        """Import the function that redacts. Raises: ConfigInvalidError."""
        if self.redact is None:
            return None
        module, _, name = self.redact.partition(":")
        try:
            function: Any = getattr(importlib.import_module(module), name or "redact")
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigInvalidError(
                f"gateway: redact: found {self.redact!r} ({error}), expected module:function that "
                "can be imported.",
                parameter="redact",
            ) from error
        if not callable(function):
            raise ConfigInvalidError(
                f"gateway: redact: found {self.redact!r}, which is no function, expected "
                "module:function.",
                parameter="redact",
            )
        redact: Redact = function
        return redact
