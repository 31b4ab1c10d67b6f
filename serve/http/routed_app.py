"""Routed app: endpoints by path, each behind its request handler, as one ASGI app."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route, compile_path
from starlette.types import Receive, Scope, Send

from replaylake.serve.http.request_handler import HandlerState, RequestHandler, RouteForm
from replaylake.serve.messages import Endpoint, Request, RequestRefusedError, Response


@dataclass(frozen=True)
class PageRoutes:
    """Pages for people, which requests get by GET or HEAD beside the endpoints.

    pages: by path; who does not name text/html in Accept gets what an unknown path gets. file: of
    what pages load, below /static/, for everybody. encode_error: makes the page of an error.
    """

    pages: Mapping[str, Endpoint]
    file: Endpoint
    encode_error: Callable[[RequestRefusedError, str], Response]


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
        unrouted_forms: Mapping[str, RouteForm] | None = None,
        **options: Any,
    ) -> None:
        """Make the handlers.

        endpoints: by path, the method and who answers; a path may have parts such as `{name}`, of
        any characters but `/`. forms: of paths that differ from others.
        pages: what a browser gets beside them; no error message lists these.
        unrouted_forms: of wrong paths and methods, by the first part of the path, such as `/v2`.
        options: Starlette's. A wrong path or method is refused in the form of every other error.
        """
        forms = forms or {}
        self._handlers = {
            (path, method): RequestHandler(path, endpoint, state, forms.get(path, RouteForm()))
            for path, (method, endpoint) in endpoints.items()
        }
        self._templates = [
            (compile_path(path)[0], path, method)
            for path, (method, _) in endpoints.items()
            if "{" in path
        ]
        self._pages: dict[str, RequestHandler] = {}
        self._file: RequestHandler | None = None
        if pages is not None:
            form = RouteForm(encode_error=pages.encode_error)
            self._file = RequestHandler("/static", pages.file, state)
            self._pages = {
                path: RequestHandler(path, endpoint, state, form)
                for path, endpoint in pages.pages.items()
            }

        def refuse_unrouted(paths: Sequence[str]) -> Endpoint:
            async def refuse(request: Request) -> Response:
                method = self._find_method(request.path)
                if method is not None:
                    message = f"{request.path} does not take {request.method[:20]}; use {method}"
                    allow = ((b"allow", method.encode()),)
                    raise RequestRefusedError(405, "method", message, headers=allow)
                message = f"unknown path {request.path[:80]}; use one of {', '.join(paths)}"
                raise RequestRefusedError(404, "path", message)

            return refuse

        routes = [
            Route(path, handler, methods=[method])
            for (path, method), handler in self._handlers.items()
        ]
        others = list(endpoints)
        for prefix, prefix_form in (unrouted_forms or {}).items():
            paths = [path for path in others if path.startswith(prefix)]
            others = [path for path in others if path not in paths]
            unrouted = RequestHandler("other", refuse_unrouted(paths), state, prefix_form)
            routes += [Route(prefix, unrouted), Route(f"{prefix}/{{path:path}}", unrouted)]
        # Also keeps BentoML's own pages, which load scripts from elsewhere, from being served.
        routes.append(
            Route("/{path:path}", RequestHandler("other", refuse_unrouted(others), state))
        )
        super().__init__(routes=routes, **options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            handler = self._handlers.get((scope["path"], scope["method"]))
            if handler is not None:
                return await handler(scope, receive, send)
            if scope["method"] in ("GET", "HEAD") and (page := self._find_page(scope)):
                return await page(scope, receive, send)
            for pattern, path, method in self._templates:
                if method == scope["method"] and pattern.fullmatch(scope["path"]):
                    return await self._handlers[path, method](scope, receive, send)
        return await super().__call__(scope, receive, send)

    def _find_page(self, scope: Scope) -> RequestHandler | None:
        if self._file is not None and scope["path"].startswith("/static/"):
            return self._file
        return self._pages.get(scope["path"]) if _accepts_html(scope) else None

    def _find_method(self, path: str) -> str | None:
        """Return the method that a path takes, or None if it is unknown."""
        exact = next((method for known, method in self._handlers if known == path), None)
        by_template = (method for pattern, _, method in self._templates if pattern.fullmatch(path))
        return exact or next(by_template, None)


def _accepts_html(scope: Scope) -> bool:
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])
