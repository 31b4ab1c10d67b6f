"""Routed app: endpoints by path, each behind its request handler, as one ASGI app."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from replaylake.serve.http.request_handler import HandlerState, RequestHandler, RouteForm
from replaylake.serve.messages import Endpoint, Request, RequestRefusedError, Response


@dataclass(frozen=True)
class PageRoutes:
    """Pages for people, which requests get by GET or HEAD beside the endpoints.

    pages: by path; who does not name text/html in Accept gets what an unknown path gets.
    encode_error: makes the page of an error. files: what pages load, by path, for everybody.
    """

    pages: Mapping[str, Endpoint] = field(default_factory=dict)
    encode_error: Callable[[RequestRefusedError, str], Response] = RouteForm().encode_error
    files: Mapping[str, Endpoint] = field(default_factory=dict)


class RoutedApp(Starlette):
    """Hands a request for a known route straight to its handler.

    Starlette's middleware and router would take as long as the policy does (15 us, 2026-11), and a
    handler needs neither. They get the rest: lifespan, HEAD, wrong paths and methods.
    """

    def __init__(
        self,
        endpoints: Mapping[str, tuple[str, Endpoint]],
        state: HandlerState,
        forms: Mapping[str, RouteForm] | None = None,
        pages: PageRoutes | None = None,
        **options: Any,
    ) -> None:
        """Make the handlers.

        endpoints: by path, the method and who answers. forms: of paths that differ from others.
        pages: what a browser gets beside them; no error message lists these.
        options: Starlette's. A wrong path or method is refused in the form of every other error.
        """
        forms = forms or {}
        self._handlers = {
            (path, method): RequestHandler(path, endpoint, state, forms.get(path, RouteForm()))
            for path, (method, endpoint) in endpoints.items()
        }
        pages = pages or PageRoutes()
        form = RouteForm(encode_error=pages.encode_error)
        self._pages = {
            path: RequestHandler(path, endpoint, state, form)
            for path, endpoint in pages.pages.items()
        }
        self._files = {
            path: RequestHandler("/static", endpoint, state)
            for path, endpoint in pages.files.items()
        }

        async def handle_unrouted(request: Request) -> Response:
            if request.path in endpoints:
                method, _ = endpoints[request.path]
                message = f"{request.path} does not take {request.method[:20]}; use {method}"
                allow = ((b"allow", method.encode()),)
                raise RequestRefusedError(405, "method", message, headers=allow)
            message = f"unknown path {request.path[:80]}; use one of {', '.join(endpoints)}"
            raise RequestRefusedError(404, "path", message)

        routes = [
            Route(path, handler, methods=[method])
            for (path, method), handler in self._handlers.items()
        ]
        # Also keeps BentoML's own pages, which load scripts from elsewhere, from being served.
        routes.append(Route("/{path:path}", RequestHandler("other", handle_unrouted, state)))
        super().__init__(routes=routes, **options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            handler = self._handlers.get((scope["path"], scope["method"]))
            if handler is not None:
                return await handler(scope, receive, send)
            if scope["method"] in ("GET", "HEAD"):
                handler = self._files.get(scope["path"])
                if handler is None and _accepts_html(scope):
                    handler = self._pages.get(scope["path"])
                if handler is not None:
                    return await handler(scope, receive, send)
        return await super().__call__(scope, receive, send)


def _accepts_html(scope: Scope) -> bool:
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])
