"""The HTTP API: one Starlette app, run by BentoML (serve/service.py) or any ASGI server as it is.

    POST /act        observation(s) in, action(s) with log-probabilities and decision ids out
    POST /feedback   what a decision led to
    GET  /policy     which policy answers, its spaces and its origin
    GET  /livez /readyz /metrics

Each route is an endpoint (one file each) behind a Door, which alone turns exceptions into statuses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from replaylake.serve.about import About
from replaylake.serve.act import ActEndpoint
from replaylake.serve.door import Door
from replaylake.serve.exchange import Answer, Endpoint, Request, RequestRefused
from replaylake.serve.feedback import FeedbackEndpoint
from replaylake.serve.metrics import Metrics
from replaylake.serve.serving import Limits, Serving

_METHODS: Final = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_BEFORE_START: Final = Limits()


def create_app(load: Callable[[], Serving]) -> Starlette:
    """Return the app; `load` runs when a worker starts, and what it returned closes at the end."""
    worker = _Worker()
    metrics = Metrics()
    about = About(worker.now, worker.is_ready, metrics)
    endpoints: dict[str, tuple[str, Endpoint]] = {
        "/act": ("POST", ActEndpoint(worker.now, metrics)),
        "/feedback": ("POST", FeedbackEndpoint(worker.now, metrics)),
        "/policy": ("GET", about.policy),
        "/livez": ("GET", about.livez),
        "/readyz": ("GET", about.readyz),
        "/metrics": ("GET", about.metrics_page),
    }

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        worker.serving = await run_in_threadpool(load)
        app.state.is_ready = worker.is_ready
        try:
            yield
        finally:
            serving, worker.serving = worker.serving, None
            if serving is not None:
                await run_in_threadpool(serving.close)

    def behind_door(route: str, endpoint: Endpoint) -> Door:
        return Door(route, endpoint, metrics, worker.limits)

    async def not_routed(request: Request) -> Answer:
        """Refuse a wrong path or method in the form of every other error."""
        if request.path in endpoints:
            method, _ = endpoints[request.path]
            raise RequestRefused(405, "method", f"{request.method} {request.path}", method)
        raise RequestRefused(404, "path", request.path[:80], f"one of {', '.join(endpoints)}")

    doors = {
        (path, method): behind_door(path, endpoint)
        for path, (method, endpoint) in endpoints.items()
    }
    routes = [Route(path, door, methods=[method]) for (path, method), door in doors.items()]
    # Also keeps BentoML's own pages, which load scripts from elsewhere, from being served.
    routes.append(Route("/{path:path}", behind_door("other", not_routed), methods=_METHODS))
    app = _App(doors, routes=routes, lifespan=lifespan)
    app.state.is_ready = lambda: False
    return app


class _App(Starlette):
    """Hands a request for a known route straight to its door.

    Starlette's middleware and router would take as long as the policy does (15 us, 2026-11), and a
    door needs neither. They get the rest: lifespan, HEAD, wrong paths and methods.
    """

    def __init__(self, doors: Mapping[tuple[str, str], Door], **options: Any) -> None:
        super().__init__(**options)
        self._doors = doors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            door = self._doors.get((scope["path"], scope["method"]))
            if door is not None:
                return await door(scope, receive, send)
        return await super().__call__(scope, receive, send)


class _Worker:
    """What this process serves, once it is loaded."""

    def __init__(self) -> None:
        self.serving: Serving | None = None

    def now(self) -> Serving:
        """Return it. Raises: RequestRefused (503)."""
        if self.serving is None:
            raise RequestRefused(503, "server", "one that is starting or stopping", "a ready one")
        return self.serving

    def is_ready(self) -> bool:
        """Whether requests can be answered and logged."""
        serving = self.serving
        return serving is not None and (serving.log is None or serving.log.failure is None)

    def limits(self) -> Limits:
        return _BEFORE_START if self.serving is None else self.serving.limits
