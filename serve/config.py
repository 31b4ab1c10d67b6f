"""What a server is told: in Python as ServeConfig, across processes as environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from replaylake.datastore.errors import ConfigInvalid, SpaceUnsupported
from replaylake.datastore.lake import open_lake
from replaylake.datastore.locations import absolute_lake, check_shareable
from replaylake.datastore.policies.exploration import Exploration, parse_exploration
from replaylake.datastore.policies.package import check_package, load_policy
from replaylake.datastore.policies.policy import PolicySpec, check_stateless
from replaylake.datastore.sessions.decision_id import DecisionSigner
from replaylake.datastore.sessions.decisions import DEFAULT_WINDOW_S, ensure_feedback_tables
from replaylake.datastore.sessions.journal import JournalConfig
from replaylake.datastore.spaces import Box, describe
from replaylake.serve.feedback import DecisionLog
from replaylake.serve.serving import Limits, Served, Serving

# Without --log-to nobody may feed back, so the key that signs ids need not outlive the process.
_UNLOGGED: Final = b"nothing is logged"


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


def check_exploration(exploration: Exploration, spec: PolicySpec) -> None:
    """Refuse what the head cannot do, rather than serve without it. Raises: SpaceUnsupported."""
    if exploration.epsilon and isinstance(spec.action_space, Box):
        raise SpaceUnsupported(
            f"--explore epsilon: found actions {describe(spec.action_space)}, expected countable "
            "ones: Discrete, MultiDiscrete or MultiBinary. Explore with a temperature, or serve "
            "without."
        )
    if exploration.temperature and spec.head in ("deterministic", "sampled"):
        raise SpaceUnsupported(
            f"--explore temperature: found head {spec.head}, expected one with a density. "
            "Serve without --explore, or train an algorithm whose policy is stochastic."
        )


def load_serving(config: ServeConfig) -> Serving:
    """Load the policy and open the log: what each worker does when it starts.

    Raises: PackageInvalid, NotFound, SchemaMismatch, SpaceUnsupported, ConfigInvalid.
    """
    policy = load_policy(config.package)
    check_stateless(policy.spec, f"policy {config.policy}:{config.version}")
    exploration = parse_exploration(config.explore)
    check_exploration(exploration, policy.spec)
    reference = config.reference or f"{config.policy}:{config.version}"
    served = Served(config.policy, config.version, policy, reference, policy.manifest.body)
    if config.lake is None or config.log_to is None:
        return Serving(
            served, DecisionSigner(_UNLOGGED, config.policy), None, exploration, Limits()
        )
    lake = open_lake(config.lake)
    signer = DecisionSigner(lake.signing_key(), config.log_to)
    journal = JournalConfig(sync_every=config.sync_every)
    log = DecisionLog(
        lake.dataset(config.log_to),
        policy.spec,
        signer.worker,
        window_s=config.window_s,
        config=journal,
    )
    return Serving(served, signer, log, exploration, Limits())


def check_servable(config: ServeConfig) -> None:
    """Find out before anything starts what a worker would stumble over. Raises: as load_serving."""
    spec = check_package(config.package).spec
    check_stateless(spec, f"policy {config.policy}:{config.version}")
    check_exploration(parse_exploration(config.explore), spec)
    if config.lake is not None and config.log_to is not None:
        check_shareable(config.lake, "serve")
        dataset = open_lake(config.lake).dataset(config.log_to)
        ensure_feedback_tables(dataset, spec.observation_space, spec.action_space, spec.encoding)
