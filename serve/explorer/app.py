"""The explorer's ASGI app: who may read, which page an address is, and in which form."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qs, quote, unquote, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from replaylake.datastore.errors import (
    CommitConflictError,
    InvalidNameError,
    NotFoundError,
    ReplayLakeError,
    StorageError,
)
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.roles import LABELER, OPERATOR
from replaylake.serve.explorer.datasets.console_page import send_result, show_console
from replaylake.serve.explorer.datasets.dataset_page import show_dataset, show_diff
from replaylake.serve.explorer.datasets.lake_page import show_lake
from replaylake.serve.explorer.episodes.breakdown_page import show_breakdown
from replaylake.serve.explorer.episodes.compare_page import show_comparison
from replaylake.serve.explorer.episodes.conversation_panel import send_image
from replaylake.serve.explorer.episodes.episode_labels import open_next, write_label
from replaylake.serve.explorer.episodes.episode_page import send_frame, show_episode
from replaylake.serve.explorer.episodes.episodes_page import show_episodes
from replaylake.serve.explorer.episodes.group_page import show_group, show_groups
from replaylake.serve.explorer.episodes.outliers import TITLES
from replaylake.serve.explorer.policies.policies_page import list_policies, show_policy
from replaylake.serve.explorer.policies.promotion_form import cancel_promotion, start_promotion
from replaylake.serve.explorer.runs.runs_page import list_runs, open_comparison, show_run
from replaylake.serve.explorer.serving.decision_page import show_decision
from replaylake.serve.explorer.serving.serving_page import list_serving, show_serving
from replaylake.serve.explorer.visits.forms import TOKEN_FIELD, FormTokens, check_sender, read_form
from replaylake.serve.explorer.visits.live_pages import EVENT_STREAM, SEEN, LivePages, Rendering
from replaylake.serve.explorer.visits.page import (
    Download,
    Page,
    Panel,
    Redirect,
    draw_empty,
    render,
    to_csv,
    to_html,
    to_json,
)
from replaylake.serve.explorer.visits.profiles import ProfileMemory
from replaylake.serve.explorer.visits.promotions import Promote, Promotions
from replaylake.serve.explorer.visits.request_queue import RequestQueue
from replaylake.serve.explorer.visits.sessions import Session, Sessions
from replaylake.serve.explorer.visits.token_texts import TokenTexts
from replaylake.serve.explorer.visits.visit import Links, QueryMemory, Visit
from replaylake.serve.messages import RequestRefusedError
from replaylake.serve.pages.frame import FRAME_FILES, HTML, SECURITY_HEADERS, read_static
from replaylake.serve.pages.markup import tag
from replaylake.serve.safety.hosts import AllowedHosts
from replaylake.serve.safety.tokens import Tokens

_logger = logging.getLogger(__name__)
PageFunction = Callable[[Visit], Page | Download | Redirect]
WriteFunction = Callable[[Visit], Redirect]
_JSON: Final = "application/json"
_FORMS: Final = {
    ".json": _JSON,
    ".csv": "text/csv; charset=utf-8",
    ".parquet": "application/vnd.apache.parquet",
}
_COOKIE: Final = "replaylake_explorer"
# The reader's name, for the next form; a year.
_READER_COOKIE: Final = "replaylake_reader"
_READER_S: Final = 365 * 86400
_MAX_SIGN_IN_BYTES: Final = 4096
_MAX_FORM_BYTES: Final = 64 << 10
_CHECK_S: Final = 0.2
# A sandbox may take a gigabyte and two cores.
_MAX_SANDBOXES: Final = 4
# Our own queries of all steps hold up to a gigabyte, too, in this process.
_MAX_SCANS: Final = 2
# Each query takes 10 s at most: who comes last waits less than a minute.
_MAX_WAITING: Final = 16
_MAX_WAITING_IMAGES: Final = 64
# What a query may have as it is (RFC 3986), with the sign of what is quoted already.
_QUERY_SAFE: Final = "%/?:@!$&'()*+,;=~"
# In the order in which a page loads them.
_FILES: Final = ("uplot.css", "explorer.css", "uplot.js", "explorer.js")
_IMAGE: Final = "/datasets/{name}/image"
PAGES: Final[tuple[tuple[str, PageFunction], ...]] = (
    ("/", show_lake),
    ("/datasets/{name}", show_dataset),
    ("/datasets/{name}/breakdown", show_breakdown),
    ("/datasets/{name}/compare", show_comparison),
    ("/datasets/{name}/diff", show_diff),
    ("/datasets/{name}/episodes", show_episodes),
    ("/datasets/{name}/episode", show_episode),
    ("/datasets/{name}/frame", send_frame),
    (_IMAGE, send_image),
    ("/datasets/{name}/next", open_next),
    ("/datasets/{name}/group", show_group),
    ("/datasets/{name}/groups", show_groups),
    ("/decision", show_decision),
    ("/policies", list_policies),
    ("/policies/{name}", show_policy),
    ("/runs", list_runs),
    ("/runs/compare", open_comparison),
    ("/runs/{run}", show_run),
    ("/serving", list_serving),
    ("/serving/{name}", show_serving),
    ("/sql", show_console),
)
# Addresses that forms are sent to, and all that changes the lake; the role in the role table that
# this needs: for the dataset in the address, or for all datasets, as policies belong to none.
WRITES: Final[tuple[tuple[str, WriteFunction, str], ...]] = (
    ("/datasets/{name}/label", write_label, LABELER),
    ("/policies/{name}/cancel", cancel_promotion, OPERATOR),
    ("/policies/{name}/promote", start_promotion, OPERATOR),
)
# The role that the forms of a page need, by the beginning of its address.
_ROLES_OF_FORMS: Final = (("/datasets/{name}", LABELER), ("/policies/{name}", OPERATOR))
# Pages that run SQL of the reader's, or act with a policy, where their address has it, and in which
# parameter: so few at a time.
READERS_SQL: Final = {
    "/datasets/{name}/episodes": "where",
    "/datasets/{name}/episode": "where",
    "/datasets/{name}/breakdown": "where",
    "/datasets/{name}/next": "where",
    "/policies/{name}": "observation",
    "/sql": "q",
}
# Those that show what a link on another site asks for, without running it, themselves.
_HOLD_BACK: Final = ("/policies/{name}", "/sql")
# Pages that read all steps or decisions of a dataset, as lists by a measure do: _MAX_SCANS at once.
_SCANS: Final = (
    "/datasets/{name}/breakdown",
    "/datasets/{name}/group",
    "/datasets/{name}/groups",
    "/decision",
)


def create_explorer(
    lake: Lake,
    *,
    tokens: Tokens | None = None,
    allowed_hosts: AllowedHosts | None = None,
    path_prefix: str = "",
    read_only: bool = False,
    token_texts: TokenTexts | None = None,
    promote: Promote | None = None,
) -> Explorer:
    """Return the ASGI app of a lake's pages.

    read_only: no form is shown, and none is taken. promote: moves an alias through the gate; None
    where readers may not do that.
    """
    return Explorer(
        lake,
        tokens or Tokens(),
        allowed_hosts or AllowedHosts(),
        path_prefix,
        token_texts or TokenTexts(),
        read_only=read_only,
        promotions=None if promote is None or read_only else Promotions(lake, promote),
    )


class Explorer:
    """An ASGI app. Only forms that are sent to WRITES change the lake."""

    def __init__(
        self,
        lake: Lake,
        tokens: Tokens,
        hosts: AllowedHosts,
        prefix: str,
        token_texts: TokenTexts,
        *,
        read_only: bool,
        promotions: Promotions | None,
    ) -> None:
        self._lake = lake
        self._hosts = hosts
        self._prefix = prefix
        self._links = Links(prefix)
        self._memory = QueryMemory()
        self._profiles = ProfileMemory()
        self._token_texts = token_texts
        self.sandboxes = RequestQueue(_MAX_SANDBOXES, _MAX_WAITING)
        self.scans = RequestQueue(_MAX_SCANS, _MAX_WAITING, "pages")
        # A page requests several at once, and each needs a scan of the steps of its shard.
        self.images = RequestQueue(_MAX_SCANS, _MAX_WAITING_IMAGES, "images")
        # Labels of one shard that are written at once would be planned again after each other.
        self.writes = RequestQueue(1, _MAX_WAITING, "forms")
        self.live = LivePages()
        key = secrets.token_bytes(32)
        self._sessions = Sessions(tokens, key)
        self._form_tokens = FormTokens(key)
        self._read_only = read_only
        self._promotions = promotions
        self._pages = dict(PAGES)
        self._writes = {path: function for path, function, _ in WRITES}
        self._roles = {path: role for path, _, role in WRITES}
        self._routes = [
            Route(path, _refuse_call, name=path) for path in (*self._pages, *self._writes)
        ]
        self._files: dict[str, tuple[bytes, str]] = {}
        self._assets: dict[str, str] = {}
        for one in (
            *read_static("replaylake.serve.pages", FRAME_FILES),
            *read_static("replaylake.serve.explorer.static", _FILES),
        ):
            self._files[f"/static/{one.digest}/{one.name}"] = (one.content, one.media_type)
            self._assets[one.name] = self._links("static", one.digest, one.name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; of the lifespan, there is nothing to start or stop."""
        if scope["type"] == "lifespan":
            await _answer_lifespan(receive, send)
            return
        request = Request(scope, receive)
        response = await self._answer(request)
        for name, value in SECURITY_HEADERS.items():
            response.headers[name] = value
        response.headers.setdefault("cache-control", "no-store")
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = request.scope["path"]
        if self._prefix and path == self._prefix:
            return Response(status_code=308, headers={"location": self._links()})
        if self._prefix and not path.startswith(f"{self._prefix}/"):
            return self._error(request, path, 404, f"{path} is not below {self._prefix}/.")
        path = path[len(self._prefix) :]
        try:
            self._check_host(request)
            is_cross_site = _check_site(request)
            if path.startswith("/static/"):
                return self._send_file(request, path)
            if path == "/sign-in":
                return await self._sign_in(request)
            if path == "/sign-out":
                return self._sign_out(request)
            session = self._find_session(request)
            if session is None:
                return self._ask_for_token(request, _to_address(path, request.url.query))
            return await self._show(request, path, session, is_cross_site=is_cross_site)
        except RequestRefusedError as error:
            return self._error(request, path, error.status, f"{error.message}.")
        except ReplayLakeError as error:
            return self._error(request, path, _status_of(error), str(error))
        except Exception:
            number = secrets.token_hex(4)
            _logger.exception("error %s at %s", number, path)
            text = (
                f"This page could not be made: a fault in ReplayLake, number {number} in the log "
                "of `replaylake explore`. Other pages are not affected."
            )
            return self._error(request, path, 500, text)

    async def _show(
        self, request: Request, path: str, session: Session, *, is_cross_site: bool
    ) -> Response:
        suffix = next((form for form in _FORMS if path.endswith(form)), "")
        stem = path.removesuffix(suffix)
        stem = "/" if suffix and stem == "/index" else stem
        scope = {**request.scope, "path": stem, "root_path": ""}
        for route in self._routes:
            match, child = route.matches(scope)
            if match is Match.NONE or (suffix and route.path in self._writes):
                continue
            if route.path in self._writes:
                return await self._write(request, path, session, route.path, child["path_params"])
            if request.method not in ("GET", "HEAD"):
                text = f"{request.method} is not possible here: pages are only read, with GET."
                return self._error(request, path, 405, text)
            return await self._open(
                request,
                session,
                route.path,
                child["path_params"],
                stem,
                suffix,
                is_cross_site=is_cross_site,
            )
        return self._error(request, path, 404, f"There is no page {path}.")

    async def _open(
        self,
        request: Request,
        session: Session,
        route: str,
        parameters: Mapping[str, str],
        stem: str,
        suffix: str,
        *,
        is_cross_site: bool,
    ) -> Response:
        """Return a page in the form that was asked for, or the stream of what changes on it."""
        lists = parse_qs(request.url.query, keep_blank_values=True)
        values = {name: several[0] for name, several in lists.items()}
        function = self._find_page(route, suffix, values)
        reader = unquote(request.cookies.get(_READER_COOKIE, ""))

        def visit() -> Visit:
            return Visit(
                self._lake,
                self._links,
                self._memory,
                self._profiles,
                parameters,
                values,
                lists,
                is_cross_site=is_cross_site,
                form_token=self._issue_form_token(session, route, parameters),
                reader=reader,
                token_texts=self._token_texts,
                promotions=self._promotions if session.has_role(OPERATOR, None) else None,
            )

        runs_sql = values.get(READERS_SQL.get(route, ""))
        if runs_sql and is_cross_site and route not in _HOLD_BACK:
            held = self._ask_before_running(
                request, route, values[READERS_SQL[route]], stem, suffix
            )
            return await run_in_threadpool(self._render, request, held, suffix, stem)
        if EVENT_STREAM in request.headers.get("accept", "") and request.method == "GET":
            if suffix or runs_sql:
                # Nothing to follow, and no reason for a browser to ask again.
                return Response(status_code=204)
            seen = values.pop(SEEN, "")
            lists.pop(SEEN, None)
            return self.live.follow(
                f"{stem}?{urlencode(lists, doseq=True)}",
                (session.key, reader),
                lambda: run_in_threadpool(self._make_parts, visit(), function),
                seen,
            )
        queue = self._find_queue(route, values, runs_sql=bool(runs_sql))
        if queue is not None:
            async with queue.take_turn(request.is_disconnected):
                page = await _run_while_connected(request, visit(), function)
        else:
            page = await _run_while_connected(request, visit(), function)
        if isinstance(page, Download):
            return _send_download(request, page)
        if isinstance(page, Redirect):
            return Response(status_code=303, headers={"location": page.address})
        return await run_in_threadpool(self._render, request, page, suffix, stem)

    def _issue_form_token(
        self, session: Session, route: str, names: Mapping[str, str]
    ) -> str | None:
        """Return the token of a page's forms; None where the reader may send none."""
        role = next((one for start, one in _ROLES_OF_FORMS if route.startswith(start)), None)
        if self._read_only or role is None:
            return None
        can_write = session.has_role(role, _find_dataset(route, names))
        return self._form_tokens.issue(session.key) if can_write else None

    def _find_queue(
        self, route: str, values: Mapping[str, str], *, runs_sql: bool
    ) -> RequestQueue | None:
        """Return the queue in which a page has its turn; None for a page that is made at once."""
        if runs_sql:
            return self.sandboxes
        if route == _IMAGE:
            return self.images
        is_ranked = route in READERS_SQL and values.get("sort") in TITLES
        return self.scans if is_ranked or route in _SCANS else None

    def _ask_before_running(
        self, request: Request, route: str, text: str, stem: str, suffix: str
    ) -> Page:
        """Return a page in place of one to which a link on another site led, and which runs SQL.

        Whoever wrote the link chose the SQL: the reader decides whether it runs.
        """
        if suffix:
            message = (
                "a link on another site led to this file; open its page, and run the SQL there"
            )
            raise RequestRefusedError(403, "sec-fetch-site", message)
        address = self._prefix + _to_address(stem, request.url.query)
        body = [
            tag("p", "A link on another site led here. Read its SQL, which has not run yet:"),
            tag("p", tag("code", text)),
            tag("p", tag("a", "Run", href=address, class_="button")),
        ]
        parameter = READERS_SQL[route]
        return Page(
            "SQL of another site",
            section="datasets",
            panels=[Panel(parameter.capitalize(), body)],
            data={parameter: text},
        )

    async def _write(
        self, request: Request, path: str, session: Session, route: str, names: Mapping[str, str]
    ) -> Response:
        if request.method != "POST":
            text = f"{request.method} is not possible here: forms of pages are sent to this address"
            return self._error(request, path, 405, f"{text}, with POST.")
        if self._read_only:
            message = "this explorer was started to read the lake alone, and writes nothing"
            raise RequestRefusedError(403, "read_only", message)
        check_sender(request)
        form = await read_form(request, _MAX_FORM_BYTES)
        self._form_tokens.check(session.key, form.pop(TOKEN_FIELD, ""))
        session.require_role(self._roles[route], _find_dataset(route, names))
        visit = Visit(
            self._lake,
            self._links,
            self._memory,
            self._profiles,
            names,
            form,
            promotions=self._promotions,
            token_name=None if session.grant is None else session.grant.name,
        )
        try:
            async with self.writes.take_turn(request.is_disconnected):
                result = await run_in_threadpool(self._writes[route], visit)
        except ReplayLakeError as error:
            return self._error(request, path, _status_of(error), str(error), back=visit.back)
        response = Response(status_code=303, headers={"location": result.address})
        if result.reader is not None:
            response.set_cookie(
                _READER_COOKIE,
                quote(result.reader, safe=""),
                max_age=_READER_S,
                path=f"{self._prefix}/",
                httponly=True,
                secure=_is_secure(request),
                samesite="strict",
            )
        return response

    def _find_page(self, path: str, suffix: str, values: Mapping[str, str]) -> PageFunction:
        if path == "/sql" and suffix and values.get(READERS_SQL[path]):
            # The rows of a result alone, in the types that they have.
            return partial(send_result, form=suffix.removeprefix("."))
        return self._pages[path]

    def _make_parts(self, visit: Visit, function: PageFunction) -> Rendering:
        page = function(visit)
        if not isinstance(page, Page):
            raise NotFoundError("This address is no page, and is not followed.")
        return render(page, self._links)

    def _render(self, request: Request, page: Page, suffix: str, stem: str) -> Response:
        if suffix == ".json":
            return Response(to_json(page), page.status, media_type=_JSON)
        if suffix:
            if page.rows is None or suffix != ".csv":
                address = f"{stem}{suffix}"
                text = f"There is no {address}: this page has .json" + (
                    " alone." if page.rows is None else " and .csv."
                )
                return self._error(request, address, 404, text)
            return Response(to_csv(page), media_type=_FORMS[suffix])
        query = request.url.query
        address = f"{self._prefix}{stem}" + (f"?{query}" if query else "")
        return self._page(request, page, address, page.status)

    def _page(self, request: Request, page: Page, address: str, status: int = 200) -> Response:
        cookie = request.cookies.get(self._name_cookie(request), "")
        text = to_html(
            page,
            self._links,
            lake=self._lake.url,
            address=address,
            assets=self._assets,
            has_signed_in=self._sessions.find_by_cookie(cookie) is not None,
        )
        return Response(text.encode("utf-8", "replace"), status, media_type=HTML)

    def _send_file(self, request: Request, path: str) -> Response:
        if path not in self._files:
            return self._error(request, path, 404, f"There is no file {path}.")
        content, kind = self._files[path]
        # Its address has a digest of it.
        headers = {"cache-control": "public, max-age=31536000, immutable"}
        return Response(content, media_type=kind, headers=headers)

    def _check_host(self, request: Request) -> None:
        headers = dict(request.scope["headers"])
        server = request.scope.get("server")
        self._hosts.check(
            headers.get(b"host"), headers.get(b"origin"), None if server is None else server[0]
        )

    def _find_session(self, request: Request) -> Session | None:
        cookie = request.cookies.get(self._name_cookie(request), "")
        return self._sessions.find(cookie, request.headers.get("authorization"))

    def _name_cookie(self, request: Request) -> str:
        """Return a name that no other explorer of this host has: cookies know no ports."""
        _, port = request.scope.get("server") or ("", None)
        place = f"{self._lake.url} {self._prefix} {port}".encode()
        return f"{_COOKIE}_{hashlib.sha256(place).hexdigest()[:12]}"

    async def _sign_in(self, request: Request) -> Response:
        if request.method != "POST":
            return self._ask_for_token(request, "/", status=200)
        form = await read_form(request, _MAX_SIGN_IN_BYTES)
        to = form.get("to", "/")
        session = self._sessions.find_by_token(form.get("token", "").strip())
        if session is None:
            return self._ask_for_token(request, to, wrong=True)
        response = Response(status_code=303, headers={"location": self._find_target(to)})
        response.set_cookie(
            self._name_cookie(request),
            self._sessions.make_cookie(session),
            path=f"{self._prefix}/",
            httponly=True,
            secure=_is_secure(request),
            # A link in a chat leads to its page; what else other sites request is refused.
            samesite="lax",
        )
        return response

    def _sign_out(self, request: Request) -> Response:
        if request.method != "POST":
            text = f'{request.method} is not possible here: use the button "Sign out" of a page.'
            return self._error(request, "/sign-out", 405, text)
        response = Response(status_code=303, headers={"location": self._links("sign-in")})
        for name in (self._name_cookie(request), _READER_COOKIE):
            response.delete_cookie(name, path=f"{self._prefix}/", httponly=True)
        return response

    def _find_target(self, to: str) -> str:
        """Return the address to go to after signing in: a page of the explorer, and none other."""
        path, _, query = to.partition("?")
        address = _to_address(unquote(path), query)
        scope = {"type": "http", "method": "GET", "path": unquote(path), "root_path": ""}
        is_page = any(
            route.matches(scope)[0] is Match.FULL and route.path in self._pages
            for route in self._routes
        )
        return f"{self._prefix}{address}" if is_page else self._links()

    def _ask_for_token(
        self, request: Request, to: str, *, wrong: bool = False, status: int = 401
    ) -> Response:
        if to.partition("?")[0].endswith(tuple(_FORMS)):
            text = "This lake needs a token: send it as `Authorization: Bearer TOKEN`."
            return self._error(request, to.partition("?")[0], 401, text)
        form = tag(
            "form",
            tag("label", "Token", for_="token"),
            tag(
                "input",
                type="password",
                id="token",
                name="token",
                required=True,
                autofocus=True,
                autocomplete="current-password",
            ),
            tag("input", type="hidden", name="to", value=to),
            tag("button", "Sign in", type="submit"),
            tag("p", "That is none of this explorer's tokens.", class_="wrong", role="alert")
            if wrong
            else None,
            method="post",
            action=self._links("sign-in"),
            class_="sign-in",
        )
        lead = "Whoever started this explorer has its token."
        page = Page("Sign in", section="sign-in", lead=lead, panels=[Panel("Token", form)])
        text = to_html(page, self._links, lake="", address=self._links(), assets=self._assets)
        return Response(text, status, media_type=HTML)

    def _error(
        self, request: Request, path: str, status: int, text: str, *, back: str | None = None
    ) -> Response:
        phrase = HTTPStatus(status).phrase
        if path.endswith(tuple(_FORMS)):
            page = Page(phrase, data={"error": {"status": status, "message": text}})
            return Response(to_json(page), status, media_type=_JSON)
        hint = tag("a", "Go to the lake", href=self._links())
        if back is not None:
            hint = tag("a", "Back to the page of the form", href=back)
        body = draw_empty(text, hint=hint)
        page = Page(phrase, section="error", panels=[Panel("Why", body)])
        return self._page(request, page, self._links(), status)


def _check_site(request: Request) -> bool:
    """Return whether a link on another site led here; refuse its other requests.

    A browser says where a request comes from (Fetch Metadata) also where it sends no Origin, as for
    images. Raises: RequestRefusedError.
    """
    headers = request.headers
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return False
    is_link = (
        headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    )
    if not is_link or request.method not in ("GET", "HEAD"):
        message = "a page of another site sent this request; open its address in the browser"
        raise RequestRefusedError(403, "sec-fetch-site", message)
    return True


def _find_dataset(route: str, names: Mapping[str, str]) -> str | None:
    """Return the dataset that an address is of; None for other pages."""
    return names["name"] if route.startswith("/datasets/{name}") else None


def _is_secure(request: Request) -> bool:
    """Whether the browser reached the page over HTTPS, perhaps that of a proxy.

    It says in Origin how, also where the proxy speaks HTTP with us.
    """
    is_https = request.headers.get("origin", "").startswith("https://")
    return is_https or request.url.scheme == "https"


def _to_address(path: str, query: str) -> str:
    """Return a path, which is not quoted, and a query, which is, as an address in ASCII."""
    return quote(path, safe="/@:~") + (f"?{quote(query, safe=_QUERY_SAFE)}" if query else "")


async def _run_while_connected(
    request: Request, visit: Visit, function: PageFunction
) -> Page | Download | Redirect:
    """Make a page in a thread. If the reader leaves, the query that it waits for is cancelled."""
    work = asyncio.ensure_future(run_in_threadpool(function, visit))
    while not work.done():
        await asyncio.wait([work], timeout=_CHECK_S)
        if not work.done() and await request.is_disconnected():
            visit.cancellation.cancel()
    return work.result()


def _send_download(request: Request, file: Download) -> Response:
    headers = {}
    if file.name is not None:
        headers["content-disposition"] = f'attachment; filename="{file.name}"'
    if file.is_fixed:
        headers["cache-control"] = "private, max-age=600"
    if file.digest is not None:
        headers["etag"] = f'"{file.digest}"'
        known = request.headers.get("if-none-match", "")
        if headers["etag"] in (one.strip() for one in known.split(",")):
            return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message: Mapping[str, Any] = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _refuse_call(request: Request) -> Response:
    raise AssertionError("routes are only matched")


def _status_of(error: ReplayLakeError) -> int:
    if isinstance(error, NotFoundError | InvalidNameError):
        return 404
    if isinstance(error, CommitConflictError):
        return 409
    return 503 if isinstance(error, StorageError) else 400
