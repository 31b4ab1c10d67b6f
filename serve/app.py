"""The HTTP API: one Starlette app, run by BentoML (serve/service.py) or any ASGI server as it is.

    POST /act        observation(s) in, action(s) with log-probabilities and decision ids out
    POST /decisions  decisions that a client took while no server answered
    POST /feedback   what a decision led to
    POST /episodes   episodes that were acted elsewhere
    GET  /policy     which policy answers, its spaces and its origin
    GET  /livez /readyz /metrics
    GET  /docs.json  all of this as OpenAPI, with the policy's spaces
    /v2/...          the same policies by the Open Inference Protocol (api/open_inference.py)
    GET  / and /docs pages of it, for requests whose Accept names text/html

Each route is an endpoint (one file each) behind a RequestHandler, which alone turns exceptions into
statuses.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool

from replaylake.serve.api.about import About
from replaylake.serve.api.act import ActEndpoint
from replaylake.serve.api.decisions import DecisionsEndpoint
from replaylake.serve.api.episodes import EpisodesEndpoint
from replaylake.serve.api.feedback import FeedbackEndpoint
from replaylake.serve.api.open_inference import PREFIX, OpenInference, encode_error
from replaylake.serve.api.openapi import Docs
from replaylake.serve.api.tensors import HEADER_LENGTH
from replaylake.serve.http.connections import NUM_REFUSED, RECEIVED
from replaylake.serve.http.request_handler import HandlerState, RouteForm
from replaylake.serve.http.routed_app import PageRoutes, RoutedApp
from replaylake.serve.messages import (
    RETRY_AFTER_S,
    RETRY_LATER,
    Endpoint,
    Request,
    RequestRefusedError,
    Response,
)
from replaylake.serve.monitoring.metrics import Metrics
from replaylake.serve.monitoring.telemetry import open_telemetry
from replaylake.serve.recording.decision_log import Clock
from replaylake.serve.serving_state import ServingState

if TYPE_CHECKING:
    from replaylake.serve.api.server_pages import ServerPages
    from replaylake.serve.monitoring.otlp_export import OtlpExport

_INFERENCE_FORM: Final = RouteForm(encode_error=encode_error, headers=frozenset((HEADER_LENGTH,)))


def create_app(load: Callable[[], ServingState]) -> Starlette:
    """Return the app; `load` runs when a worker starts, and what it returned closes at the end."""
    worker = _LoadedServing()
    metrics = Metrics()
    clock = Clock()
    about = About(worker.get, worker.is_ready, metrics)
    act = ActEndpoint(worker.get, metrics, clock)
    inference = OpenInference(worker.get, worker.is_ready, act).endpoints()
    endpoints: dict[str, tuple[str, Endpoint]] = {
        "/act": ("POST", act),
        "/decisions": ("POST", DecisionsEndpoint(worker.get, metrics, clock)),
        "/feedback": ("POST", FeedbackEndpoint(worker.get, metrics, clock)),
        "/episodes": ("POST", EpisodesEndpoint(worker.get, metrics, clock)),
        "/policy": ("GET", about.policy),
        "/livez": ("GET", about.livez),
        "/readyz": ("GET", about.readyz),
        "/metrics": ("GET", about.metrics_page),
        "/docs.json": ("GET", Docs(worker.get)),
        **inference,
    }
    pages = _LazyPages(worker.get)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        metrics.count_start()
        serving = worker.serving = await run_in_threadpool(load)
        metrics.watch(
            serving,
            lambda: handler_state.num_active,
            NUM_REFUSED,
            lambda: (RECEIVED.seconds, RECEIVED.num, RECEIVED.num_bytes),
        )
        fresh = asyncio.create_task(metrics.keep_fresh())
        serving.start()
        handler_state.telemetry = await run_in_threadpool(_open_telemetry, serving, metrics)
        # What is loaded stays: a collection set off by a large request need not walk through it.
        gc.collect()
        gc.freeze()
        app.state.is_ready = worker.is_ready
        try:
            yield
        finally:
            worker.serving = None
            fresh.cancel()
            await run_in_threadpool(serving.close)
            if handler_state.telemetry is not None:
                await run_in_threadpool(handler_state.telemetry.close)

    handler_state = HandlerState(lambda: worker.serving, metrics)

    app = RoutedApp(
        endpoints,
        handler_state,
        dict.fromkeys(inference, _INFERENCE_FORM),
        pages=PageRoutes(
            {"/": pages.show_server, "/docs": pages.show_api},
            pages.send_file,
            pages.encode_error,
        ),
        unrouted_forms={PREFIX: _INFERENCE_FORM},
        lifespan=lifespan,
    )
    app.state.is_ready = lambda: False
    return app


def _open_telemetry(serving: ServingState, metrics: Metrics) -> OtlpExport | None:
    log = serving.log
    attributes = {} if log is None else {"replaylake.dataset": log.dataset.name}
    return open_telemetry(
        "replaylake-serve", serving.worker, metrics.collect_own, os.environ, attributes
    )


class _LoadedServing:
    """What this process serves, once it is loaded."""

    def __init__(self) -> None:
        self.serving: ServingState | None = None

    def get(self) -> ServingState:
        """Return it. Raises: RequestRefusedError (503)."""
        if self.serving is None:
            message = f"starting or stopping; retry in {RETRY_AFTER_S} s"
            raise RequestRefusedError(503, "server", message, headers=RETRY_LATER)
        return self.serving

    def is_ready(self) -> bool:
        """Whether observations can be acted on, and the decisions logged."""
        serving = self.serving
        return serving is not None and (serving.log is None or not serving.log.refuses)


class _LazyPages:
    """Pages for browsers, loaded with the first request for one and written in a thread.

    So a server starts no later for them, and other requests do not wait.
    """

    def __init__(self, serving: Callable[[], ServingState]) -> None:
        self._serving, self._since_s = serving, time.time()
        self._pages: ServerPages | None = None

    async def show_server(self, request: Request) -> Response:
        return await run_in_threadpool(lambda: self._load().show_server())

    async def show_api(self, request: Request) -> Response:
        return await run_in_threadpool(lambda: self._load().show_api())

    async def send_file(self, request: Request) -> Response:
        return await run_in_threadpool(lambda: self._load().send_file(request.path))

    def encode_error(self, error: RequestRefusedError, content_type: str) -> Response:
        return self._load().show_error(error)

    def _load(self) -> ServerPages:
        if self._pages is None:
            # Not on top: 5 ms and 0.3 MB of each worker, whether anybody opens a page or not.
            from replaylake.serve.api.server_pages import ServerPages

            self._pages = ServerPages(self._serving, self._since_s)
        return self._pages
