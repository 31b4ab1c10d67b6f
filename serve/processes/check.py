"""Check: everything that would keep a server from starting, without starting one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.compatibility import find_encoding_mismatch, is_compatible
from replaylake.datastore.episodes.spaces import describe, take
from replaylake.datastore.errors import ReplayLakeError, SchemaMismatchError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.exploration import parse_exploration
from replaylake.datastore.lake.policies.package import check_package, load_policy
from replaylake.datastore.storage.locations import check_shareable
from replaylake.serve.config import ServeConfig
from replaylake.serve.http.listener import open_listener, resolve_host
from replaylake.serve.loading import check_exploration, load_registered
from replaylake.serve.monitoring.drift import training_moments
from replaylake.serve.processes.server import check_installed
from replaylake.serve.safety.limits import check_exposure
from replaylake.serve.safety.tokens import ROLES
from replaylake.serve.versions.alias_follower import parse_alias
from replaylake.serve.versions.router import parse_canaries
from replaylake.serve.versions.smoke_test import sample_values, smoke_test

_NUM_TIMED: Final = 50


@dataclass(frozen=True)
class CheckResult:
    """One thing that was looked at: whether it is as it has to be, and what was found."""

    what: str
    is_ok: bool
    found: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_server(config: ServeConfig) -> list[CheckResult]:
    """Look at all that `serve` with this config needs; raises nothing of what it finds.

    Writes nothing: a dataset that is absent stays so. Cost: as a worker's start, under a second
    beside the imports.
    """
    checks: list[tuple[str, Callable[[ServeConfig], str]]] = [
        ("package", _package),
        ("policy", _policy),
        ("exploration", _exploration),
        ("speed", _speed),
        ("drift", _drift),
        ("versions", _versions),
        *((f"canary {text}", _canary(number)) for number, text in enumerate(config.canary)),
        ("log", _log),
        ("tokens", _tokens),
        ("server", _server),
        ("port", _port),
    ]
    return [_run_check(what, check, config) for what, check in checks]


def _run_check(what: str, check: Callable[[ServeConfig], str], config: ServeConfig) -> CheckResult:
    try:
        return CheckResult(what, True, check(config))
    except ReplayLakeError as error:
        return CheckResult(what, False, str(error))


def _package(config: ServeConfig) -> str:
    manifest = check_package(config.package, config.manifest_sha256)
    found = f"sha256 {manifest.sha256[:16]}, every file matches its hash"
    return f"{config.policy}:{config.version}, {found}"


def _policy(config: ServeConfig) -> str:
    policy = load_policy(config.package, config.manifest_sha256)
    num = smoke_test(policy, parse_exploration(None), f"policy {config.policy}:{config.version}")
    spec = policy.spec
    return (
        f"{spec.head}, {describe(spec.observation_space)} to {describe(spec.action_space)}; acts "
        f"on {num} samples"
    )


def _exploration(config: ServeConfig) -> str:
    exploration = parse_exploration(config.explore)
    policy = load_policy(config.package, config.manifest_sha256)
    check_exploration(exploration, policy.spec)
    smoke_test(policy, exploration, f"policy {config.policy}:{config.version}")
    if exploration.is_on:
        return f"{config.explore}, with its log-probability"
    if config.log_to is not None:
        return "none: off-policy evaluation of what is logged will be unsupported"
    return "none"


def _speed(config: ServeConfig) -> str:
    policy = load_policy(config.package, config.manifest_sha256)
    values = sample_values(policy.spec.observation_space, 1, np.random.default_rng(0))
    state, times = policy.initial_state(1), []
    for _ in range(_NUM_TIMED):
        start = time.perf_counter()
        policy.act(take(values, slice(0, 1)), state)
        times.append(time.perf_counter() - start)
    return f"{np.median(times) * 1e3:.3f} ms for one observation, the policy alone"


def _drift(config: ServeConfig) -> str:
    manifest = check_package(config.package, config.manifest_sha256)
    moments = training_moments(manifest.body, manifest.spec)
    if moments is None:
        return "not measured: the package does not say what its training observations were"
    return f"measured of {len(moments.labels)} elements"


def _versions(config: ServeConfig) -> str:
    alias = parse_alias(config.reference)
    if alias is None or config.lake is None or not config.follow_s:
        return f"version {config.version} for good"
    version = open_lake(config.lake).registry.alias_version(*alias)
    name = "@".join(alias)
    if version is None:
        return f"{name} is followed, and is not set yet"
    return f"{name} is followed, and is version {version}"


def _canary(number: int) -> Callable[[ServeConfig], str]:
    def check(config: ServeConfig) -> str:
        assert config.lake is not None, "the config saw to it"
        canary = parse_canaries(config.canary)[number]
        ref = open_lake(config.lake).registry.resolve(canary.reference)
        main = check_package(config.package, config.manifest_sha256).spec
        exploration = parse_exploration(config.explore)
        load_registered(ref, canary.reference, exploration, main)
        return f"{ref}, {canary.weight:.0%} of the episodes, the same spaces; acts"

    return check


def _log(config: ServeConfig) -> str:
    if config.lake is None or config.log_to is None:
        return "nothing is logged"
    check_shareable(config.lake, "serve")
    dataset = open_lake(config.lake).dataset(config.log_to)
    if not dataset.exists():
        return f"{config.log_to} is not there yet: it is made when the server starts"
    theirs, ours = dataset.spec, check_package(config.package, config.manifest_sha256).spec
    for what in ("observation_space", "action_space"):
        if not is_compatible(getattr(theirs, what), getattr(ours, what)):
            raise SchemaMismatchError(
                f"dataset {config.log_to}: found the {what.replace('_', ' ')} "
                f"{describe(getattr(theirs, what))}, expected the policy's "
                f"{describe(getattr(ours, what))}. Log to another dataset."
            )
    if (difference := find_encoding_mismatch(theirs.encoding, ours.encoding)) is not None:
        raise SchemaMismatchError(
            f"dataset {config.log_to}: its encoding of observations differs from the policy's: "
            f"{difference}. Log to another dataset."
        )
    return f"{config.log_to} has the policy's spaces"


def _tokens(config: ServeConfig) -> str:
    check_exposure(resolve_host(config.host), config.safety)
    tokens = config.safety.tokens(config.log_to)
    if tokens.is_empty:
        return "none: every client may use every endpoint"
    shut = sorted(set(ROLES) - tokens.roles)
    return f"for {', '.join(sorted(tokens.roles))}" + (
        f"; closed without: {', '.join(shut)}" if shut else ""
    )


def _server(config: ServeConfig) -> str:
    check_installed(config.server)
    return f"{config.server}, {config.workers} worker{'s' if config.workers > 1 else ''}"


def _port(config: ServeConfig) -> str:
    address = resolve_host(config.host)
    with open_listener(address, config.port) as listener:
        port = listener.getsockname()[1]
    free = "any free one" if config.port == 0 else f"{port} is free"
    return f"{free}, on {address}"
