"""From a ServeConfig to what a worker holds, and the checks before any worker starts."""

from __future__ import annotations

from typing import Final

from replaylake.datastore.errors import SpaceUnsupported
from replaylake.datastore.lake import open_lake
from replaylake.datastore.locations import check_shareable
from replaylake.datastore.policies.exploration import Exploration, parse_exploration
from replaylake.datastore.policies.package import check_package, load_policy
from replaylake.datastore.policies.policy import PolicySpec, check_stateless
from replaylake.datastore.sessions.decision_id import DecisionSigner
from replaylake.datastore.sessions.decisions import ensure_feedback_tables
from replaylake.datastore.sessions.journal import JournalConfig
from replaylake.datastore.spaces import Box, describe
from replaylake.serve.config import ServeConfig
from replaylake.serve.decision_log import DecisionLog
from replaylake.serve.router import Router, Served
from replaylake.serve.serving import Serving

# Without --log-to nobody may feed back, so the key that signs ids need not outlive the process.
_UNLOGGED: Final = b"nothing is logged"


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
        signer = DecisionSigner(_UNLOGGED, config.policy)
        return Serving(Router(served), signer, exploration=exploration)
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
    return Serving(Router(served), signer, log, exploration)


def check_servable(config: ServeConfig) -> None:
    """Find out before anything starts what a worker would stumble over. Raises: as load_serving."""
    spec = check_package(config.package).spec
    check_stateless(spec, f"policy {config.policy}:{config.version}")
    check_exploration(parse_exploration(config.explore), spec)
    if config.lake is not None and config.log_to is not None:
        check_shareable(config.lake, "serve")
        dataset = open_lake(config.lake).dataset(config.log_to)
        ensure_feedback_tables(dataset, spec.observation_space, spec.action_space, spec.encoding)
