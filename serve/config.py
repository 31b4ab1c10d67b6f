"""What a server is told: in Python as ServeConfig, across processes as environment variables."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.feedback.decisions import DEFAULT_WINDOW_S
from replaylake.datastore.lake.policies.exploration import parse_exploration
from replaylake.datastore.storage.locations import absolute_lake
from replaylake.serve.recording.decision_log import ON_LOG_FAILURE, REFUSE
from replaylake.serve.safety.hosts import AllowedHosts
from replaylake.serve.safety.limits import Safety, parse_number
from replaylake.serve.versions.router import parse_canaries

SERVERS: Final = ("bentoml", "uvicorn")
_STATE_KEY: Final = "REPLAYLAKE_SERVE_STATE_KEY"


def state_key() -> str:
    """Return the secret that the environment names, else a new one.

    From there and from no option, as tokens are: arguments are seen by everyone on the machine.
    """
    return os.environ.get(_STATE_KEY) or secrets.token_hex(32)


@dataclass(frozen=True)
class ServeConfig:
    """One server.

    package: the policy package's folder. policy and version: what it is called. lake (a folder or
    URL): where versions come from that are moved to; log_to: the dataset of it that decisions and
    rewards go to. explore: `epsilon=0.05` or
    `temperature=1`; without it requests get the mode. workers: processes, each with the policy in
    memory. window_s: how long a decision takes rewards. sync_every: fsync each decision before it
    is answered, instead of all of the last 5 ms at once. reference: what `version` was resolved
    from, such as `clone@champion`; /policy says it, and where it names an alias that is followed.
    follow_s: how often a worker looks where aliases point, in a lake that is a URL ten times as
    seldom; 0 for never. canary: `clone@challenger=0.1`, policies that take a share of the episodes.
    on_log_failure: what becomes of an observation whose decision cannot be logged: `refuse` it, or
    `serve` the action and count the loss. join_every_s: how often one of the workers has what
    was served joined with its rewards, in a process beside it; 0 for never.
    server: `bentoml`, or `uvicorn` for the same app without BentoML around it. safety: tokens,
    limits and the access log. state_key: what signs the state that clients carry for a policy that
    remembers, one for all workers, where no dataset is logged to (then it is the lake's); without
    REPLAYLAKE_SERVE_STATE_KEY a new one.
    request_options: whether a request may say how it is explored.
    manifest_sha256: what a registered policy's package is checked against, also by a worker that is
    started again; None for a package from outside of a lake.
    """

    package: Path
    policy: str
    version: int
    lake: str | Path | None = None
    log_to: str | None = None
    explore: str | None = None
    host: str = "127.0.0.1"
    port: int = 3000
    workers: int = 1
    window_s: float = DEFAULT_WINDOW_S
    sync_every: bool = False
    reference: str | None = None
    follow_s: float = 0.5
    canary: tuple[str, ...] = ()
    on_log_failure: str = REFUSE
    join_every_s: float = 0.0
    server: str = "bentoml"
    safety: Safety = field(default_factory=Safety)
    state_key: str = field(default_factory=state_key, repr=False, compare=False)
    request_options: bool = True
    manifest_sha256: str | None = None

    def __post_init__(self) -> None:
        if self.lake is None and (self.log_to is not None or self.canary):
            raise ConfigInvalidError(
                f"serve: lake: found none beside log_to {self.log_to} and canary "
                f"{list(self.canary)}, expected the lake that holds them.",
                parameter="lake",
            )
        if not 0 <= self.follow_s < float("inf"):
            raise ConfigInvalidError(
                f"serve: follow_s: found {self.follow_s}, expected a number of seconds, or 0 not "
                "to follow aliases.",
                parameter="follow_s",
            )
        parse_canaries(self.canary)
        if self.workers < 1:
            raise ConfigInvalidError(
                f"serve: workers: found {self.workers}, expected at least 1.", parameter="workers"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigInvalidError(
                f"serve: port: found {self.port}, expected 1 to 65535, or 0 for any free port.",
                parameter="port",
            )
        if self.on_log_failure not in ON_LOG_FAILURE:
            raise ConfigInvalidError(
                f"serve: on_log_failure: found {self.on_log_failure!r}, expected one of "
                f"{', '.join(ON_LOG_FAILURE)}.",
                parameter="on_log_failure",
            )
        if not 0 <= self.join_every_s < float("inf"):
            raise ConfigInvalidError(
                f"serve: join_every_s: found {self.join_every_s}, expected a number of seconds, or "
                "0 to run no join.",
                parameter="join_every_s",
            )
        if self.join_every_s and self.log_to is None:
            raise ConfigInvalidError(
                f"serve: join_every_s: found {self.join_every_s:g} s but no dataset to log to, "
                "expected decisions to join. Name the dataset with `log_to`.",
                parameter="join_every_s",
            )
        if self.server not in SERVERS:
            raise ConfigInvalidError(
                f"serve: server: found {self.server!r}, expected one of {', '.join(SERVERS)}.",
                parameter="server",
            )
        parse_exploration(self.explore)

    @property
    def url(self) -> str:
        """Where it answers, once `port` is the real one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def allowed_hosts(self) -> AllowedHosts:
        """What it answers to: loopback, its own address, and what it was told of."""
        # The zone of a link-local address is this machine's, and in no Host header.
        own = self.host.partition("%")[0]
        return AllowedHosts((*([own] if own else []), *self.safety.allowed_hosts))

    def to_environment(self) -> dict[str, str]:
        """Return the variables that a worker reads; `from_environment` is the reverse."""
        texts = {
            "PACKAGE": str(self.package.resolve()),
            "POLICY": self.policy,
            "VERSION": str(self.version),
            "MANIFEST_SHA256": self.manifest_sha256,
            "LAKE": None if self.lake is None else absolute_lake(self.lake),
            "LOG_TO": self.log_to,
            "EXPLORE": self.explore,
            "HOST": self.host,
            "PORT": str(self.port),
            "WORKERS": str(self.workers),
            "WINDOW_S": repr(self.window_s),
            "SYNC_EVERY": "1" if self.sync_every else None,
            "REFERENCE": self.reference,
            "FOLLOW_S": repr(self.follow_s),
            "CANARY": ",".join(self.canary) or None,
            "ON_LOG_FAILURE": self.on_log_failure,
            "JOIN_EVERY_S": repr(self.join_every_s),
            "SERVER": self.server,
            "STATE_KEY": self.state_key,
            "REQUEST_OPTIONS": None if self.request_options else "0",
        }
        variables = {f"REPLAYLAKE_SERVE_{name}": text for name, text in texts.items()}
        return {name: text for name, text in variables.items() if text is not None} | (
            self.safety.to_environment()
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ServeConfig:
        """Read a worker's variables. Raises: ConfigInvalidError if one is absent or wrong."""

        def read(name: str) -> str | None:
            return environment.get(f"REPLAYLAKE_SERVE_{name}") or None

        def read_int(name: str, default: int) -> int:
            return parse_number(name, read(name) or str(default), int)

        def read_float(name: str, default: float) -> float:
            return parse_number(name, read(name) or str(default), float)

        package, policy = read("PACKAGE"), read("POLICY")
        if package is None or policy is None:
            raise ConfigInvalidError(
                "serve: the variable REPLAYLAKE_SERVE_PACKAGE or REPLAYLAKE_SERVE_POLICY is not "
                "set, expected the directory of the policy package and the policy's name. "
                "`replaylake serve` sets both."
            )
        return cls(
            package=Path(package),
            policy=policy,
            version=read_int("VERSION", 1),
            lake=read("LAKE"),
            log_to=read("LOG_TO"),
            explore=read("EXPLORE"),
            host=read("HOST") or "127.0.0.1",
            port=read_int("PORT", 3000),
            workers=read_int("WORKERS", 1),
            window_s=read_float("WINDOW_S", DEFAULT_WINDOW_S),
            sync_every=read("SYNC_EVERY") == "1",
            reference=read("REFERENCE"),
            follow_s=read_float("FOLLOW_S", 0.5),
            canary=tuple(filter(None, (read("CANARY") or "").split(","))),
            on_log_failure=read("ON_LOG_FAILURE") or REFUSE,
            join_every_s=read_float("JOIN_EVERY_S", 0),
            server=read("SERVER") or "bentoml",
            safety=Safety.from_environment(environment),
            state_key=read("STATE_KEY") or secrets.token_hex(32),
            request_options=read("REQUEST_OPTIONS") != "0",
            manifest_sha256=read("MANIFEST_SHA256"),
        )
