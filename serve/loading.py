"""From a ServeConfig to what a worker holds, and the checks before any worker starts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.episodes.spaces import Box, describe
from replaylake.datastore.errors import PackageInvalidError, ReplayLakeError, SpaceUnsupportedError
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.feedback.decisions import ensure_feedback_tables
from replaylake.datastore.feedback.journal import JournalConfig
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.exploration import Exploration, parse_exploration
from replaylake.datastore.lake.policies.package import check_package, load_policy
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.policies.registry import PolicyRef, Registry
from replaylake.datastore.storage.locations import check_shareable
from replaylake.serve.config import ServeConfig
from replaylake.serve.recording.decision_log import DecisionLog
from replaylake.serve.recording.feedback_join_process import FeedbackJoinProcess
from replaylake.serve.safety.access_log import AccessLog
from replaylake.serve.serving_state import ServingState
from replaylake.serve.versions.alias_follower import AliasFollower, FollowedAlias, parse_alias
from replaylake.serve.versions.router import Router, ServedPolicy, parse_canaries
from replaylake.serve.versions.smoke_test import check_same_spaces, smoke_test
from replaylake.serve.versions.state_tokens import StateSigner

# Without `log_to` nobody may feed back, so the key that signs ids need not outlive the process.
_UNLOGGED: Final = b"nothing is logged"
# A look at an object store costs two requests.
_METERED_FACTOR: Final = 10


def check_exploration(exploration: Exploration, spec: PolicySpec) -> None:
    """Refuse what the head cannot do, rather than serve without it.

    Raises: SpaceUnsupportedError.
    """
    if exploration.epsilon and isinstance(spec.action_space, Box):
        raise SpaceUnsupportedError(
            f"`explore`: found epsilon with actions {describe(spec.action_space)}, expected "
            "Discrete, MultiDiscrete or MultiBinary actions. Explore with a temperature, or serve "
            "without `explore`.",
            parameter="explore",
        )
    if exploration.temperature and spec.head in ("deterministic", "sampled"):
        raise SpaceUnsupportedError(
            f"`explore`: found temperature with a policy of head {spec.head}, expected a head with "
            "a density. Serve without `explore`, or train an algorithm whose policy is stochastic.",
            parameter="explore",
        )


def load_serving(config: ServeConfig) -> ServingState:
    """Load the policies and open the log: what each worker does when it starts.

    Raises: PackageInvalidError, NotFoundError, SchemaMismatchError, SpaceUnsupportedError,
    ConfigInvalidError.
    """
    exploration = parse_exploration(config.explore)
    reference = config.reference or f"{config.policy}:{config.version}"
    package = config.package, config.manifest_sha256
    main = _load_served(*package, config.policy, config.version, reference, exploration)
    common: dict[str, Any] = {
        "states": StateSigner(config.state_key.encode()),
        "takes_options": config.request_options,
    }
    if config.lake is None:
        signer = DecisionSigner(_UNLOGGED, config.policy)
        return ServingState(Router(main), signer, exploration=exploration, **common)
    lake = open_lake(config.lake)
    main = replace(main, promotion=_promotion(lake.registry, main.name, main.version))
    router = Router(main, _load_canaries(lake.registry, config, main, exploration))
    follower = _follower(lake, config, router, exploration)
    if config.log_to is None:
        signer = DecisionSigner(_UNLOGGED, config.policy)
        return ServingState(router, signer, exploration=exploration, follower=follower, **common)
    signer = DecisionSigner(lake.signing_key(), config.log_to)
    journal = JournalConfig(sync_every=config.sync_every)
    log = DecisionLog(
        lake.dataset(config.log_to),
        main.policy.spec,
        signer.worker,
        window_s=config.window_s,
        config=journal,
        on_failure=config.on_log_failure,
    )
    common |= {"states": StateSigner(lake.signing_key()), "registry": lake.registry}
    if config.join_every_s:
        common["feedback_join"] = FeedbackJoinProcess(
            log.dataset, config.lake, config.join_every_s, config.window_s
        )
    return ServingState(router, signer, log, exploration, follower=follower, **common)


def load_registered(
    ref: PolicyRef, reference: str, exploration: Exploration, beside: PolicySpec
) -> ServedPolicy:
    """Load a version of the lake, check it and warm it up: what it returns can answer.

    beside: the spec of what is served already. Raises: as load_serving.
    """
    # The package is whole in memory when this returns, so a copy in the cache may go.
    package = ref.path, ref.manifest_sha256
    return _load_served(*package, ref.name, ref.version, reference, exploration, beside)


def _load_served(
    package: Path,
    manifest_sha256: str | None,
    name: str,
    version: int,
    reference: str,
    exploration: Exploration,
    beside: PolicySpec | None = None,
) -> ServedPolicy:
    what = f"policy {name}:{version}"
    policy = load_policy(package, manifest_sha256)
    about = policy.manifest.body
    _check_identity(about, name, version, what)
    check_exploration(exploration, policy.spec)
    if beside is not None:
        check_same_spaces(policy.spec, beside, what)
    smoke_test(policy, exploration, what)
    since_ms = time.time_ns() // 1_000_000
    sha256 = policy.manifest.sha256
    return ServedPolicy(name, version, policy, reference, about, since_ms, sha256=sha256)


def _check_identity(about: Mapping[str, Any], name: str, version: int, what: str) -> None:
    """Refuse a package that says that it is another one; those from outside a lake say nothing."""
    number = about.get("version")
    if number is not None and (about.get("name"), number) != (name, version):
        raise PackageInvalidError(
            f"{what}: the manifest of its package names {about.get('name')}:{number}, expected "
            f"{name}:{version}. Register the policy again."
        )


def _load_canaries(
    registry: Registry, config: ServeConfig, main: ServedPolicy, exploration: Exploration
) -> list[tuple[ServedPolicy, float]]:
    loaded = []
    for canary in parse_canaries(config.canary):
        ref = registry.resolve(canary.reference)
        served = _load_registered(registry, ref, canary.reference, exploration, main.policy.spec)
        loaded.append((served, canary.weight))
    return loaded


def _load_registered(
    registry: Registry, ref: PolicyRef, reference: str, exploration: Exploration, spec: PolicySpec
) -> ServedPolicy:
    served = load_registered(ref, reference, exploration, spec)
    return replace(served, promotion=_promotion(registry, ref.name, ref.version))


def _promotion(registry: Registry, name: str, version: int) -> dict[str, Any] | None:
    """Return the last move of an alias to a version; /policy says it, and nothing depends on it."""
    with suppress(ReplayLakeError):
        moves = [move for move in registry.alias_history(name) if move.to_version == version]
        return moves[-1].to_json() if moves else None
    return None


def _follower(
    lake: Lake, config: ServeConfig, router: Router[ServedPolicy], exploration: Exploration
) -> AliasFollower[ServedPolicy] | None:
    """Return what keeps the router where its aliases are, having looked once; None for never.

    A worker that is started again, long after its server, so begins where the others are.
    """
    registry, spec = lake.registry, router.one.policy.spec

    def load(name: str, version: int, reference: str) -> ServedPolicy:
        ref = registry.resolve(f"{name}:{version}")
        return _load_registered(registry, ref, reference, exploration, spec)

    references = [config.reference, *(canary.reference for canary in parse_canaries(config.canary))]
    aliases = enumerate(map(parse_alias, references))
    followed = [FollowedAlias(arm, *alias) for arm, alias in aliases if alias is not None]
    if not followed or not config.follow_s:
        return None
    interval_s = config.follow_s * (_METERED_FACTOR if lake.storage.is_metered else 1)
    follower = AliasFollower(registry, router, load, followed, interval_s)
    follower.poll()
    return follower


def check_servable(config: ServeConfig) -> None:
    """Find out before any worker starts what would stop it. Raises: as load_serving."""
    if (target := config.safety.access_log) is not None:
        AccessLog(target).close()
    spec = check_package(config.package, config.manifest_sha256).spec
    exploration = parse_exploration(config.explore)
    check_exploration(exploration, spec)
    if config.lake is None:
        return
    check_shareable(config.lake, "serve")
    for canary in parse_canaries(config.canary):
        ref = open_lake(config.lake).registry.resolve(canary.reference)
        theirs = check_package(ref.path, ref.manifest_sha256).spec
        check_exploration(exploration, theirs)
        check_same_spaces(theirs, spec, f"canary {ref}")
    if config.log_to is not None:
        dataset = open_lake(config.lake).dataset(config.log_to)
        ensure_feedback_tables(dataset, spec.observation_space, spec.action_space, spec.encoding)
