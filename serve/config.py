"""What a server is told: in Python as ServeConfig, across processes as environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from replaylake.datastore.errors import ConfigInvalid
from replaylake.datastore.locations import absolute_lake
from replaylake.datastore.policies.exploration import parse_exploration
from replaylake.datastore.sessions.decisions import DEFAULT_WINDOW_S


@dataclass(frozen=True)
class ServeConfig:
    """One server.

    package: the policy package's folder. policy and version: what it is called. lake (a folder or
    URL) and log_to: where decisions and rewards go, both or neither. explore: `epsilon=0.05` or
    `temperature=1`; without it requests get the mode. workers: processes, each with the policy in
    memory. window_s: how long a decision takes rewards. sync_every: fsync each decision before it
    is answered, instead of all of the last 5 ms at once. reference: what `version` was resolved
    from, such as `clone@champion`; /policy says it.
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

    def __post_init__(self) -> None:
        if (self.log_to is None) != (self.lake is None):
            raise ConfigInvalid(
                f"serve: found lake {self.lake} and log_to {self.log_to}, expected both or neither."
            )
        if self.workers < 1 or not 0 <= self.port <= 65535:
            raise ConfigInvalid(
                f"serve: found {self.workers} workers and port {self.port}, expected at least 1 "
                "worker and a port of 0 (any free one) to 65535."
            )
        parse_exploration(self.explore)

    @property
    def url(self) -> str:
        """Where it answers, once `port` is the real one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def to_environment(self) -> dict[str, str]:
        """Return the variables that a worker reads; `from_environment` is the reverse."""
        given = {
            "PACKAGE": str(self.package.resolve()),
            "POLICY": self.policy,
            "VERSION": str(self.version),
            "LAKE": None if self.lake is None else absolute_lake(self.lake),
            "LOG_TO": self.log_to,
            "EXPLORE": self.explore,
            "HOST": self.host,
            "PORT": str(self.port),
            "WORKERS": str(self.workers),
            "WINDOW_S": repr(self.window_s),
            "SYNC_EVERY": "1" if self.sync_every else None,
            "REFERENCE": self.reference,
        }
        return {
            f"REPLAYLAKE_SERVE_{name}": text for name, text in given.items() if text is not None
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ServeConfig:
        """Read a worker's variables. Raises: ConfigInvalid if one is absent or wrong."""

        def read(name: str) -> str | None:
            return environment.get(f"REPLAYLAKE_SERVE_{name}") or None

        package, policy = read("PACKAGE"), read("POLICY")
        if package is None or policy is None:
            raise ConfigInvalid(
                "serve: found no REPLAYLAKE_SERVE_PACKAGE or REPLAYLAKE_SERVE_POLICY, expected the "
                "policy package's folder and its name. `replaylake serve` sets both."
            )
        try:
            return cls(
                package=Path(package),
                policy=policy,
                version=int(read("VERSION") or 1),
                lake=read("LAKE"),
                log_to=read("LOG_TO"),
                explore=read("EXPLORE"),
                host=read("HOST") or "127.0.0.1",
                port=int(read("PORT") or 3000),
                workers=int(read("WORKERS") or 1),
                window_s=float(read("WINDOW_S") or DEFAULT_WINDOW_S),
                sync_every=read("SYNC_EVERY") == "1",
                reference=read("REFERENCE"),
            )
        except ValueError as error:
            raise ConfigInvalid(f"REPLAYLAKE_SERVE_*: {error}; expected a number.") from error
