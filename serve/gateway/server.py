"""The server of `replaylake gateway`: one process, from its listening socket to its end."""

from __future__ import annotations

import gc
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.feedback.journal import JournalConfig
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.storage.locations import check_shareable
from replaylake.serve.gateway.call_log import CallLog
from replaylake.serve.gateway.config import GatewayConfig
from replaylake.serve.gateway.metrics import GatewayMetrics
from replaylake.serve.gateway.proxy import Proxy
from replaylake.serve.gateway.routes import Routes, SingleRoute
from replaylake.serve.gateway.upstream import Upstream
from replaylake.serve.http.connections import limit_connections
from replaylake.serve.http.listener import open_server, run_app, shorten_thread_turns
from replaylake.serve.monitoring.telemetry import open_telemetry
from replaylake.serve.recording.outcome_log import OutcomeLog
from replaylake.serve.safety.access_log import AccessLog
from replaylake.serve.safety.limits import check_exposure

# How long calls in progress may take to end once the gateway is told to stop; they are cut then,
# and recorded as aborted.
DRAIN_S: Final = 30
# Of garbage collections. One of everything takes 0.1 s with 100,000 steps in the index (2 cores,
# 2026-11-28): by default there is one whenever a quarter has been added, with these one in millions
# of calls. Those of young objects take about 2 ms at most. The index has no garbage with cycles.
_GC_THRESHOLDS: Final = (2_000, 2, 3_000)
_logger = logging.getLogger(__name__)


def create_gateway(
    config: GatewayConfig,
    log: CallLog,
    on_ready: Callable[[], None] = lambda: None,
    make_routes: Callable[[], Routes] | None = None,
) -> Starlette:
    """Return the ASGI app, which closes `log` when it ends.

    make_routes: returns the engines, in the event loop; None: that of the config's `upstream`.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if make_routes is None:
            routes: Routes = SingleRoute(config.upstream, config.silence_s)
        else:
            routes = make_routes()
        metrics = GatewayMetrics(lambda: log.journal.num_pending, lambda: len(log.conversations))
        tokens = config.safety.tokens(config.dataset)
        outcomes = await run_in_threadpool(
            partial(
                OutcomeLog,
                log.dataset,
                secrets.token_hex(8),
                log.clock,
                names=("completion_id", "episode_id"),
                flush=log.journal.flush,
                config=log.journal.config,
                on_report=log.close_reported,
            )
        )
        outcomes.start()
        telemetry = await run_in_threadpool(
            open_telemetry,
            "replaylake-gateway",
            secrets.token_hex(8),
            metrics.collect,
            os.environ,
            {"replaylake.dataset": config.dataset},
        )
        target = config.safety.access_log
        access_log = None if target is None else AccessLog(target)
        app.state.proxy = Proxy(
            config, routes, log, outcomes, metrics, tokens, access_log, telemetry
        )
        # What is loaded stays: a collection need not walk through it.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        on_ready()
        try:
            yield
        finally:
            routes.close()
            await outcomes.stop()
            try:
                await run_in_threadpool(log.close)
                await run_in_threadpool(outcomes.close)
            except ReplayLakeError as error:
                _logger.error("not committed at the end, the next start does it: %s", error)
            if access_log is not None:
                access_log.close()
            if telemetry is not None:
                await run_in_threadpool(telemetry.close)

    return _App(lifespan=lifespan)


class _App(Starlette):
    """Hands requests to the proxy; Starlette has the lifespan."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            proxy: Proxy = self.state.proxy
            return await proxy(scope, receive, send)
        return await super().__call__(scope, receive, send)


def open_call_log(config: GatewayConfig) -> CallLog:
    """Open the journal, in a lake and a dataset that are created where they are absent.

    Raises: SchemaMismatchError, ConfigInvalidError, StorageError.
    """
    lake = open_lake(config.lake, create=True)
    return CallLog(
        lake.dataset(config.dataset),
        secrets.token_hex(8),
        lake.signing_key(),
        idle_s=config.idle_s,
        config=JournalConfig(sync_every=config.sync_every),
        redact=config.load_redact(),
    )


def run_gateway(
    config: GatewayConfig, on_ready: Callable[[GatewayConfig], None] | None = None
) -> int:
    """Pass calls on and record them until SIGINT or SIGTERM, then return 0.

    One line on stderr says when it is ready, and where; `on_ready` is then called with the config
    and the port that it listens on. Raises: ServeError if the port is in use; ConfigInvalidError if
    other machines could reach it without a token; whatever `open_call_log` raises.
    """
    check_shareable(config.lake, "gateway")
    Upstream(config.upstream)
    config.read_upstream_key()
    config.load_redact()
    if (target := config.safety.access_log) is not None:
        AccessLog(target).close()
    check = partial(check_exposure, safety=config.safety)
    with open_server("gateway", config, on_ready, check_exposure=check) as server:
        config = server.config
        # Before uvicorn starts: it would say what is wrong in a traceback.
        log = open_call_log(config)
        shorten_thread_turns()
        limit_connections(config.safety.connection_limits)

        def announce() -> None:
            server.announce(
                f"recording to {config.dataset} on {config.url}, upstream {config.upstream}, "
                f"ready after {server.elapsed_s:.1f} s"
            )

        app = create_gateway(config, log, announce)
        run_app(app, server.listener, lifespan="on", drain_s=DRAIN_S)
    return 0
