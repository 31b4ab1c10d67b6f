"""The server of `replaylake serve` for language models: a gateway whose engines follow aliases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from replaylake.datastore.errors import ServeError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.package import check_package
from replaylake.datastore.storage.locations import check_shareable
from replaylake.serve.gateway.config import GatewayConfig
from replaylake.serve.gateway.server import DRAIN_S, create_gateway, open_call_log
from replaylake.serve.gateway.upstream import Upstream
from replaylake.serve.http.connections import limit_connections
from replaylake.serve.http.listener import open_server, run_app, shorten_thread_turns
from replaylake.serve.language.engine_process import EngineCommand, EngineProcess
from replaylake.serve.language.engine_routes import EngineRoutes, ServedEngine
from replaylake.serve.safety.access_log import AccessLog
from replaylake.serve.safety.limits import check_exposure
from replaylake.serve.versions.alias_follower import AliasFollower, FollowedAlias, parse_alias
from replaylake.serve.versions.router import Router, parse_canaries

# A look at an object store costs two requests.
_METERED_FACTOR: Final = 10
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LanguageServeConfig:
    """One server of a language policy.

    policy: `name:version`, `name@alias`, `name`, or the path of a package; version: what it means
    now. engine_url: an engine that runs this version already; None: engines are started.
    command: of an engine. canary: policies that take a share of the conversations. follow_s: how
    often aliases are looked at; 0: never.
    """

    gateway: GatewayConfig
    policy: str
    name: str
    version: int
    command: EngineCommand
    engine_url: str | None = None
    canary: tuple[str, ...] = field(default=())
    follow_s: float = 0.5


def run_language_server(
    config: LanguageServeConfig, on_ready: Callable[[GatewayConfig], None] | None = None
) -> int:
    """Answer and record calls until SIGINT or SIGTERM, then return 0.

    `on_ready` is called with the gateway's config and the port that it listens on, when all engines
    answer. Raises: ServeError if the port is in use or an engine does not start; PolicyKindError if
    a canary is no language model; otherwise as `run_gateway`.
    """
    gateway = config.gateway
    check_shareable(gateway.lake, "serve")
    if (target := gateway.safety.access_log) is not None:
        AccessLog(target).close()
    check = partial(check_exposure, safety=gateway.safety)
    with open_server("serve", gateway, on_ready, check_exposure=check) as server:
        gateway = server.config
        with _open_engines(config, open_lake(gateway.lake, create=True)) as router:
            log = open_call_log(gateway)
            shorten_thread_turns()
            limit_connections(gateway.safety.connection_limits)

            def announce() -> None:
                server.announce(
                    f"serving {config.name}:{config.version} on {gateway.url}, recording to "
                    f"{gateway.dataset}, ready after {server.elapsed_s:.1f} s"
                )

            app = create_gateway(gateway, log, announce, lambda: EngineRoutes(router))
            run_app(app, server.listener, lifespan="on", drain_s=DRAIN_S)
    return 0


@contextmanager
def _open_engines(config: LanguageServeConfig, lake: Lake) -> Iterator[Router[ServedEngine]]:
    """Start the engines of all arms, follow the aliases, and stop the engines at the end."""
    running: list[ServedEngine] = []
    follower: AliasFollower[ServedEngine] | None = None

    def start(name: str, version: int, policy: str, reference: str) -> ServedEngine:
        process = EngineProcess(policy, config.command)
        upstream = Upstream(process.url, silence_s=config.gateway.silence_s)
        engine = ServedEngine(name, version, reference, upstream, process.url, process)
        running.append(engine)
        return engine

    def load(name: str, version: int, reference: str) -> ServedEngine:
        ref = lake.registry.resolve(f"{name}:{version}")
        _ = check_package(ref.path, ref.manifest_sha256).language
        engine = start(name, version, str(ref), reference)
        assert engine.process is not None, "it was started"
        try:
            engine.process.wait_ready()
        except ServeError:
            engine.stop()
            raise
        return engine

    try:
        if config.engine_url is not None:
            upstream = Upstream(config.engine_url, silence_s=config.gateway.silence_s)
            main = ServedEngine(
                config.name, config.version, config.policy, upstream, config.engine_url
            )
        else:
            is_path = "/" in config.policy
            policy = config.policy if is_path else f"{config.name}:{config.version}"
            main = start(config.name, config.version, policy, config.policy)
        canaries = []
        for canary in parse_canaries(config.canary):
            ref = lake.registry.resolve(canary.reference)
            _ = check_package(ref.path, ref.manifest_sha256).language
            engine = start(ref.name, ref.version, str(ref), canary.reference)
            canaries.append((engine, canary.weight))
        # All of them load at the same time.
        for engine in running:
            assert engine.process is not None, "it was started"
            engine.process.wait_ready()
        router = Router(main, canaries)
        follower = _follow(config, lake, router, load)
        yield router
    finally:
        if follower is not None:
            follower.stop()
        for engine in running:
            engine.stop()


def _follow(
    config: LanguageServeConfig,
    lake: Lake,
    router: Router[ServedEngine],
    load: Callable[[str, int, str], ServedEngine],
) -> AliasFollower[ServedEngine] | None:
    """Start to follow the aliases among the references; None if there is none to follow."""
    if config.engine_url is not None or not config.follow_s:
        return None  # an engine of somebody else's keeps its weights
    references = [arm.served.reference for arm in router.arms]
    aliases = enumerate(None if "/" in one else parse_alias(one) for one in references)
    followed = [FollowedAlias(arm, *alias) for arm, alias in aliases if alias is not None]
    if not followed:
        return None
    interval_s = config.follow_s * (_METERED_FACTOR if lake.storage.is_metered else 1)
    follower = AliasFollower(lake.registry, router, load, followed, interval_s)
    follower.start()
    return follower
