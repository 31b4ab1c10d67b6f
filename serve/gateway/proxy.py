"""Proxy: each request passed on to the engine, its answer passed back, and the call recorded.

The answer's last byte is sent after the call is written to the journal; of a stream, the event that
ends it. Earlier events are passed back at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

import orjson
from starlette.concurrency import run_in_threadpool

from replaylake.datastore.errors import StorageError
from replaylake.serve.gateway.anthropic_api import MessagesApi
from replaylake.serve.gateway.call_log import (
    PASS,
    CallLog,
    PassedCall,
    RecordFailedError,
)
from replaylake.serve.gateway.calls import (
    ABORTED,
    COMPLETED,
    FAILED,
    AnswerReader,
    Api,
    CallAnswer,
    CallRequest,
)
from replaylake.serve.gateway.config import GatewayConfig
from replaylake.serve.gateway.conversations import CallIdentity
from replaylake.serve.gateway.identity import (
    IDEMPOTENCY_KEY,
    PREFIX,
    TOKEN_HEADER,
    read_identity,
    split_path,
)
from replaylake.serve.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from replaylake.serve.gateway.openai_api import (
    AUTO,
    LLAMA_CPP,
    OPENAI,
    SGLANG,
    VLLM,
    ChatApi,
    CompletionsApi,
)
from replaylake.serve.gateway.responses_api import ResponsesApi
from replaylake.serve.gateway.retained_answers import RetainedAnswer
from replaylake.serve.gateway.routes import Route, Routes
from replaylake.serve.gateway.sse import EventSplitter, EventTooLongError
from replaylake.serve.gateway.upstream import Headers, UpstreamAnswer, UpstreamError
from replaylake.serve.http.connections import CONNECTION, LimitedProtocol
from replaylake.serve.http.deadlines import Deadlines, RequestDeadline
from replaylake.serve.http.request_handler import write_response, write_stream_start
from replaylake.serve.messages import JSON, RETRY_LATER, RequestRefusedError
from replaylake.serve.monitoring.rate_limited_log import RateLimitedLog
from replaylake.serve.recording.outcome_log import OutcomeLog
from replaylake.serve.safety.access_log import AccessLog, read_trace_id
from replaylake.serve.safety.tokens import Tokens

if TYPE_CHECKING:
    from replaylake.serve.monitoring.otlp_export import OtlpExport, RequestSpan

_logger = logging.getLogger(__name__)
APIS: Final[Mapping[str, Api]] = {
    "/v1/chat/completions": ChatApi(),
    "/v1/completions": CompletionsApi(),
    "/v1/messages": MessagesApi(),
    "/v1/responses": ResponsesApi(),
}
_PLAIN_PATHS: Final = {path.encode(): path for path in APIS}
# As clients with another base URL write them: answered by some engines, and not recorded.
_LIKE_APIS: Final = (*APIS, "/chat/completions", "/completions")
_OTHER: Final = "other"
_OWN_PATHS: Final = ("/livez", "/readyz", "/metrics", "/v1/feedback")
# Attributes of spans, with the fields of the APIs that have their values.
_USAGE: Final = {
    "gen_ai.usage.input_tokens": ("input_tokens", "prompt_tokens"),
    "gen_ai.usage.output_tokens": ("output_tokens", "completion_tokens"),
}
_OPERATIONS: Final = {CompletionsApi.name: "text_completion"}
_MAX_ID_BYTES: Final = 128
_CLIENT_GONE: Final = 499
# Hop-by-hop headers (RFC 9110, section 7.6.1), and those that each side sets itself.
_NOT_PASSED: Final = frozenset(
    (
        b"accept-encoding",
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_NOT_PASSED_BACK: Final = _NOT_PASSED | {b"date", b"server"}
# Owners in the engines' lists of models.
_OWNERS: Final = {"vllm": VLLM, "replaylake": VLLM, "sglang": SGLANG, "llamacpp": LLAMA_CPP}
_DETECT_TIMEOUT_S: Final = 5.0
# For how long an engine that does not list its models in time, or at all, is not asked again.
_DETECT_AGAIN_S: Final = 30.0
# Statuses by which engines refuse fields; how long what one refused is not requested again.
_REFUSALS: Final = (400, 422, 500)
_REFUSED_FOR_S: Final = 600.0
# Of a body that is hashed in the event loop: about a millisecond. A larger one takes a thread.
_MAX_HASHED_BYTES: Final = 1 << 20
# Paths that get the gateway's own key, besides the recorded ones: a token of the role act is for
# generation, and the key may permit much more.
_WITH_OUR_KEY: Final = {
    "GET": ("/health", "/v1/models", "/version"),
    "HEAD": ("/health", "/v1/models", "/version"),
    "POST": ("/detokenize", "/tokenize", "/v1/embeddings", "/v1/messages/count_tokens"),
}


@dataclass(slots=True)
class _Exchange:
    """The state of one request."""

    scope: Mapping[str, Any]
    send: Any
    headers: dict[bytes, bytes]
    api: str = _OTHER
    begun_s: float = field(default_factory=time.monotonic)
    first_byte_s: float | None = None
    status: int = _CLIENT_GONE
    url: str = ""
    is_begun: bool = False
    is_client_gone: bool = False
    retained: RetainedAnswer | None = None
    route: str = _OTHER
    num_bytes_in: int = 0
    num_bytes_out: int = 0
    span: RequestSpan | None = None


class Proxy:
    """The ASGI app behind the lifespan; one for a process."""

    def __init__(
        self,
        config: GatewayConfig,
        routes: Routes,
        log: CallLog,
        outcomes: OutcomeLog,
        metrics: GatewayMetrics,
        tokens: Tokens,
        access_log: AccessLog | None = None,
        telemetry: OtlpExport | None = None,
    ) -> None:
        self._access_log, self._telemetry = access_log, telemetry
        self._config, self._routes, self._log = config, routes, log
        self._outcomes, self._metrics, self._tokens = outcomes, metrics, tokens
        self._hosts = config.allowed_hosts
        self._key = config.read_upstream_key()
        self._user_header = (
            None if config.user_header is None else config.user_header.lower().encode()
        )
        self._engine = None if config.engine == AUTO else config.engine
        metrics.engine.labels(self._engine or "unknown").set(1)
        self._detect_at_s = -math.inf
        self._detecting = asyncio.Lock()
        self._refused: dict[_Added, float] = {}
        self._num_active = 0
        self._deadlines = Deadlines()
        # Calls whose record is written in the next round of the event loop, all at once.
        self._unwritten: list[tuple[_Call, PassedCall, asyncio.Future[None]]] = []
        self._complaints = RateLimitedLog(_logger, "gateway")

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Handle one request."""
        exchange = _Exchange(scope, send, dict(scope["headers"]))
        begun_s = time.perf_counter()
        exchange.route = _find_route(scope)
        if self._telemetry is not None:
            exchange.span = self._telemetry.start_span(scope, exchange.route, begun_s)
        try:
            await self._route(exchange, receive)
        except RequestRefusedError as error:
            await self._refuse(exchange, error)
        except UpstreamError as error:
            self._metrics.upstream_failures.inc()
            self._complaints.error(f"{exchange.url}: {error}")
            message = f"the engine gave no answer: {error}"
            await self._refuse(exchange, RequestRefusedError(502, "upstream", message))
        except Exception as error:
            self._complaints.error("unexpected error", error)
            message = "internal error; see the gateway's log"
            await self._refuse(exchange, RequestRefusedError(500, "gateway", message))
        finally:
            self._metrics.find_requests(exchange.api, exchange.status).inc()
            if self._access_log is not None:
                self._write_access(exchange, time.perf_counter() - begun_s)
            if exchange.span is not None:
                exchange.span.end(exchange.status, exchange.num_bytes_in, exchange.num_bytes_out)

    async def _route(self, exchange: _Exchange, receive: Any) -> None:
        scope = exchange.scope
        path = scope["path"]
        if path in ("/livez", "/readyz"):
            failure = self._log.journal.failure
            if path == "/readyz" and failure is not None and self._config.on_record_failure != PASS:
                raise RequestRefusedError(503, "record", f"no call can be recorded: {failure}")
            if path == "/readyz" and self._routes.failure is not None:
                raise RequestRefusedError(503, "engine", self._routes.failure)
            await self._respond(exchange, 200, b'{"status":"ok"}', JSON)
            return
        server = scope.get("server")
        self._hosts.check(
            exchange.headers.get(b"host"),
            exchange.headers.get(b"origin"),
            server[0] if server else None,
        )
        if path == "/metrics":
            self._check_token(exchange, "admin", "/metrics")
            await self._respond(exchange, 200, self._metrics.render(), CONTENT_TYPE)
            return
        if path == "/v1/feedback":
            await self._accept_feedback(exchange, receive)
            return
        in_path, path = _split_raw_path(scope)
        self._check_token(exchange, "act", "/act")
        api = APIS.get(unquote(path).rstrip("/")) if scope["method"] == "POST" else None
        if api is None and self._key is not None:
            _check_allowed(scope["method"], path)
        if api is not None:
            path = unquote(path).rstrip("/")  # of a trailing slash, engines make a redirect
        if self._num_active >= self._config.safety.queue:
            message = f"{self._num_active} calls in progress, the gateway's limit"
            raise RequestRefusedError(503, "gateway", message, headers=RETRY_LATER)
        self._num_active += 1
        try:
            body = await self._read_body(exchange, receive)
            if api is None:
                await self._pass_on(exchange, path, body)
            else:
                exchange.api = api.name
                identity = read_identity(in_path, exchange.headers, self._user_header)
                await self._call(exchange, api, path, body, identity)
        finally:
            self._num_active -= 1

    def _write_access(self, exchange: _Exchange, seconds: float) -> None:
        assert self._access_log is not None, "the caller looked"
        headers, client = exchange.headers, exchange.scope.get("client")
        request_id = headers.get(b"x-request-id", b"")[:_MAX_ID_BYTES].decode("latin-1")
        ours = None if exchange.span is None else exchange.span.trace_id
        self._access_log.write(
            route=exchange.route,
            method=exchange.scope["method"],
            status=exchange.status,
            seconds=round(seconds, 6),
            bytes_in=exchange.num_bytes_in,
            bytes_out=exchange.num_bytes_out,
            client=None if client is None else client[0],
            request_id=request_id or None,
            trace_id=ours or read_trace_id(headers.get(b"traceparent")),
        )

    async def _accept_feedback(self, exchange: _Exchange, receive: Any) -> None:
        exchange.api = "feedback"
        self._check_token(exchange, "feedback", "/feedback")
        if exchange.scope["method"] != "POST":
            raise RequestRefusedError(405, "method", "/v1/feedback takes POST")
        body = await self._read_body(exchange, receive)
        try:
            answer = self._outcomes.accept(orjson.loads(body))
        except orjson.JSONDecodeError as error:
            raise RequestRefusedError(400, "body", f"not JSON ({error})") from None
        except StorageError as error:
            self._complaints.error(f"feedback not written: {error}")
            message = "the report cannot be written; retry later"
            raise RequestRefusedError(503, "log", message, headers=RETRY_LATER) from error
        await self._respond(exchange, 202, orjson.dumps(answer), JSON)

    def _check_token(self, exchange: _Exchange, role: str, route: str) -> None:
        """Let a request in by its token. The header Authorization is the engine's."""
        if self._tokens.is_empty:
            return
        token = exchange.headers.get(TOKEN_HEADER)
        authorization = None if token is None else b"Bearer " + token
        if token is None and self._key is not None:
            # The engine gets the gateway's key, so a client's API key is the gateway's token.
            authorization = exchange.headers.get(b"authorization")
            if authorization is None and (key := exchange.headers.get(b"x-api-key")) is not None:
                authorization = b"Bearer " + key
        self._tokens.check(role, authorization, route)

    async def _read_body(self, exchange: _Exchange, receive: Any) -> bytes:
        limit, parts, size = self._config.safety.body_bytes, [], 0
        timeout_s = self._config.safety.body_timeout_s
        wait = RequestDeadline(time.perf_counter() + timeout_s)
        self._deadlines.enter(wait)
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RequestRefusedError(_CLIENT_GONE, "client", "gone")
                part = message.get("body", b"")
                size += len(part)
                exchange.num_bytes_in = size
                if size > limit:
                    raise RequestRefusedError(
                        413, "body", found=f"{size} bytes", expected=f"at most {limit} bytes"
                    )
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
        except asyncio.CancelledError:
            if not wait.is_overdue or wait.task.cancelling() > 1:
                raise
            message = f"request body not received within {timeout_s:g} s"
            raise RequestRefusedError(408, "body", message) from None
        finally:
            self._deadlines.leave(wait)

    async def _pass_on(
        self,
        exchange: _Exchange,
        path: str,
        body: bytes,
        *,
        unread: Exception | None = None,
    ) -> None:
        """Pass on a request that is not recorded; its answer is passed back as it comes.

        unread: why a request to a recorded path cannot be. The engine usually refuses it as well; a
        call that it answers is one that cannot be recorded. Raises: RequestRefusedError.
        """
        target = _target(path, exchange.scope)
        headers = self._passed_headers(exchange)
        method = exchange.scope["method"]
        route = self._routes.begin_other()
        exchange.url = route.url
        with _DisconnectWatch(exchange):
            try:
                answer = await route.upstream.request(method, target, headers, body)
                try:
                    if 200 <= answer.status < 300:
                        self._check_unrecorded(method, path, unread)
                    await self._begin(exchange, answer.status, answer.headers)
                    while part := await answer.read():
                        await self._continue(exchange, part)
                    await self._end(exchange, b"")
                finally:
                    answer.close()
            except asyncio.CancelledError:
                if not exchange.is_client_gone:
                    raise
            finally:
                route.end()

    def _check_unrecorded(self, method: str, path: str, unread: Exception | None) -> None:
        """Refuse or count an answered call that is not recorded. Raises: RequestRefusedError."""
        if unread is not None:
            self._refuse_or_count(RecordFailedError(f"the request cannot be read: {unread!r}"))
        elif method == "POST" and _is_like_call(unquote(path)):
            self._metrics.not_recorded.labels("passed").inc()
            known = ", ".join(APIS)
            self._complaints.warning(f"a call of {path[:200]!r} is not recorded, only {known}")

    async def _call(
        self,
        exchange: _Exchange,
        api: Api,
        path: str,
        body: bytes,
        identity: CallIdentity,
    ) -> None:
        """Pass on a call and record it."""
        try:
            fields = _parse_json(body)
            request = api.read_request(fields)
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            await self._pass_on(exchange, path, body, unread=error)
            return
        failure = self._log.journal.failure
        if failure is not None and self._config.on_record_failure != PASS:
            self._refuse_or_count(RecordFailedError(failure))
        engine = self._engine or await self._find_engine(exchange)
        key = exchange.headers.get(IDEMPOTENCY_KEY)
        if key is not None and await self._answer_again(exchange, key, path, body):
            return
        try:
            added = api.ask(fields, engine)
            about = (api.name, frozenset(added), request.is_stream, bool(request.tools))
            if self._refused.get(about, -math.inf) > time.monotonic():
                added = {}
            sent = _add_fields(body, added, fields)
            reader = api.reader(request, frozenset(added), engine)
            episode = self._log.find_episode(identity, request) if self._routes.is_split else None
            route = self._routes.begin(episode)
            exchange.url = route.url
            call = _Call(exchange, api, identity, request, reader, route, key)
            try:
                with _DisconnectWatch(exchange, ends=key is None):
                    await self._call_engine(call, path, body, sent, about, engine)
            finally:
                route.end()
        finally:
            if exchange.retained is not None:
                self._log.answers.settle(exchange.retained)

    async def _call_engine(
        self, call: _Call, path: str, body: bytes, sent: bytes, about: _Added, engine: str
    ) -> None:
        """Send a call, and pass back and record its answer.

        body: as the client sent it; sent: with added fields. If the engine refuses them it gets the
        client's own body.
        """
        exchange = call.exchange
        target = _target(path, exchange.scope)
        try:
            headers = self._passed_headers(exchange)
            upstream = call.route.upstream
            answer = await upstream.request("POST", target, headers, sent)
            if answer.status in _REFUSALS and sent is not body:
                refusal = await answer.read_all()
                answer.close()
                call.reader = call.api.reader(call.request, frozenset(), engine)
                answer = await upstream.request("POST", target, headers, body)
                if 200 <= answer.status < 300:
                    self._refused[about] = time.monotonic() + _REFUSED_FOR_S
                    self._complaints.warning(
                        f"the engine refuses {', '.join(sorted(about[1]))}, which token ids and "
                        f"log-probs need: {refusal[:300]!r}"
                    )
            try:
                await self._pass_back(call, answer)
            finally:
                answer.close()
        except asyncio.CancelledError:
            self._record_partial(call, ABORTED)
            if not exchange.is_client_gone:
                raise
        except UpstreamError as error:
            if not exchange.is_begun:
                raise
            self._metrics.upstream_failures.inc()
            self._complaints.error(f"{exchange.url}: {error} within an answer")
            self._record_partial(call, FAILED)
            self._cut(exchange)

    async def _pass_back(self, call: _Call, answer: UpstreamAnswer) -> None:
        exchange = call.exchange
        kind = next((v for n, v in answer.headers if n == b"content-type"), b"")
        if not 200 <= answer.status < 300:
            data = await answer.read_all()
            await self._begin(exchange, answer.status, answer.headers, len(data))
            await self._end(exchange, data)
            return
        if kind.split(b";")[0].strip() == b"text/event-stream":
            await self._pass_stream(call, answer)
        else:
            await self._pass_body(call, answer, kind)

    async def _pass_body(self, call: _Call, answer: UpstreamAnswer, kind: bytes) -> None:
        data = await answer.read_all()
        call.exchange.first_byte_s = time.monotonic()
        try:
            body = orjson.loads(data)
            is_changed = call.reader.read_body(body)
        except Exception as error:
            failure = RecordFailedError(f"the engine's answer cannot be read: {error}")
            self._refuse_or_count(failure)
            is_changed = False
        else:
            if is_changed:
                data = orjson.dumps(body)
            if call.exchange.retained is not None:
                _retain_head(call.exchange.retained, answer.status, answer.headers)
            await self._record(call, COMPLETED, data)
        exchange = call.exchange
        left = [name for name, _ in answer.headers if name not in _NOT_PASSED_BACK]
        is_plain = answer.status == 200 and left == [b"content-type"] and exchange.retained is None
        # Both parts of the answer in one system call, where there is nothing else to pass back.
        if is_plain and write_response(exchange.send, kind.decode("latin-1"), data):
            exchange.status, exchange.is_begun = answer.status, True
            exchange.num_bytes_out = len(data)
            return
        await self._begin(exchange, answer.status, answer.headers, len(data))
        await self._end(exchange, data)

    async def _pass_stream(self, call: _Call, answer: UpstreamAnswer) -> None:
        exchange, splitter = call.exchange, EventSplitter()
        # The head goes with the first event, if that has come with it.
        is_waiting = answer.has_body and answer.status == 200
        if not is_waiting:
            await self._begin(exchange, answer.status, answer.headers)
        held: list[bytes] = []
        while part := await answer.read():
            passed: list[bytes] = []
            try:
                events = splitter.feed(part)
            except EventTooLongError as error:
                raise UpstreamError(str(error)) from error
            for event in events:
                shown, is_last = self._read_event(call, event)
                if is_last or held:
                    held.append(shown)
                else:
                    passed.append(shown)
                    if exchange.first_byte_s is None and shown:
                        # At once: what else came with it takes a while to read.
                        exchange.first_byte_s = time.monotonic()
                        if is_waiting:
                            is_waiting = False
                            await self._begin_stream(exchange, answer.headers, passed.pop())
                        else:
                            await self._continue(exchange, passed.pop())
                        if event is not events[-1]:
                            # The first events of other streams go before the rest of this one.
                            await asyncio.sleep(0)
            if is_waiting:
                is_waiting = False
                await self._begin(exchange, answer.status, answer.headers)
            if held and answer.is_complete:
                # Send events that arrived with the end together with it: a system call takes as
                # long as reading several events.
                held[:0] = passed
            elif data := b"".join(passed):
                await self._continue(exchange, data)
        held.append(splitter.rest)
        last = b"".join(held)
        try:
            await self._record(call, COMPLETED, last)
        except RequestRefusedError:
            self._cut(exchange)
            return
        await self._end(exchange, last)

    def _read_event(self, call: _Call, event: bytes) -> tuple[bytes, bool]:
        try:
            return call.reader.read_event(event)
        except Exception:
            # An event of another shape than the API's: it is the client's, as it came.
            self._complaints.warning("an event of the engine's cannot be read")
            return event, False

    async def _record(self, call: _Call, status: str, last: bytes) -> None:
        """Write a call, together with others that have been answered by now.

        last: what is still to be sent of the answer.
        Raises: RequestRefusedError where it cannot be written and that is to refuse.
        """
        if call.is_recorded:
            return
        call.is_recorded = True
        loop = asyncio.get_running_loop()
        if not self._unwritten:
            loop.call_soon(self._write_all)
        done: asyncio.Future[None] = loop.create_future()
        passed = self._describe_call(call, status)
        if (retained := call.exchange.retained) is not None:
            retained.body = b"".join((*retained.parts, last))
            passed.retained = retained
        self._unwritten.append((call, passed, done))
        try:
            await done
        except RecordFailedError as error:
            self._refuse_or_count(error)

    def _record_partial(self, call: _Call, status: str) -> None:
        """Write a call whose client is not there to be refused."""
        if call.is_recorded:
            return
        call.is_recorded = True
        passed = self._describe_call(call, status)
        try:
            self._count_call(call, passed, self._log.write(passed))
        except RecordFailedError as error:
            with suppress(RequestRefusedError):
                self._refuse_or_count(error)

    def _write_all(self) -> None:
        waiting, self._unwritten = self._unwritten, []
        results = self._log.write_all([passed for _, passed, _ in waiting])
        for (call, passed, done), result in zip(waiting, results, strict=True):
            is_waiting = not done.done()  # else its client has gone meanwhile
            if isinstance(result, int):
                self._count_call(call, passed, result)
                if is_waiting:
                    done.set_result(None)
            elif is_waiting:
                done.set_exception(result)
            else:
                with suppress(RequestRefusedError):
                    self._refuse_or_count(result)

    def _describe_call(self, call: _Call, status: str) -> PassedCall:
        answer, exchange = call.reader.answer(), call.exchange
        if status == COMPLETED and not answer.is_complete:
            status = FAILED
        if exchange.span is not None:
            exchange.span.set_attributes(_describe_answer(call, answer, status))
        key = call.idempotency_key
        return PassedCall(
            call.api.name,
            call.identity,
            call.request,
            answer,
            status,
            exchange.begun_s,
            exchange.first_byte_s,
            time.monotonic(),
            None if key is None else key.decode("latin-1"),
            version=call.route.version,
            make_episode_id=call.route.make_episode_id,
        )

    def _count_call(self, call: _Call, passed: PassedCall, num: int) -> None:
        if num:
            self._metrics.find_calls(passed.api, passed.status).inc()
            self._count_tokens(passed.answer)
        if passed.first_byte_s is not None:
            seconds = passed.first_byte_s - passed.begun_s
            self._metrics.find_first_byte(call.api.name).observe(seconds)

    def _refuse_or_count(self, error: RecordFailedError) -> None:
        """Refuse a call that cannot be recorded, or count it. Raises: RequestRefusedError (503)."""
        self._complaints.error(f"call not recorded: {error}")
        if self._config.on_record_failure == PASS:
            self._metrics.not_recorded.labels("passed").inc()
            return
        self._metrics.not_recorded.labels("refused").inc()
        message = "the call cannot be recorded; see the gateway's log, and retry later"
        raise RequestRefusedError(503, "record", message, headers=RETRY_LATER) from error

    def _count_tokens(self, answer: CallAnswer) -> None:
        known = sum(len(one.token_ids) for one in answer.samples if one.token_ids is not None)
        if known:
            self._metrics.find_tokens("known").inc(known)
            return
        usage = answer.usage if isinstance(answer.usage, dict) else {}
        num = usage.get("completion_tokens", usage.get("output_tokens"))
        if type(num) is int and num > 0:
            self._metrics.find_tokens("unknown").inc(num)

    async def _answer_again(self, exchange: _Exchange, key: bytes, path: str, body: bytes) -> bool:
        """Answer a repeated request with the retained answer; else retain what the engine answers.

        A request is repeated if key, path, query, body, identity and credentials are the same.
        """
        if len(body) > _MAX_HASHED_BYTES:
            digest = await run_in_threadpool(self._digest, exchange, key, path, body)
        else:
            digest = self._digest(exchange, key, path, body)
        answers = self._log.answers
        while True:
            if (answer := answers.find(digest)) is not None:
                await self._begin(exchange, answer.status, answer.headers)
                await self._end(exchange, answer.body)
                return True
            if (answer := answers.find_in_progress(digest)) is None:
                exchange.retained = answers.begin(digest)
                return False
            with _DisconnectWatch(exchange):
                try:
                    await answer.done.wait()
                except asyncio.CancelledError:
                    if not exchange.is_client_gone:
                        raise
                    return True

    def _digest(self, exchange: _Exchange, key: bytes, path: str, body: bytes) -> bytes:
        names = (b"authorization", b"x-api-key", self._user_header)
        headers = sorted(
            (name, value)
            for name, value in exchange.scope["headers"]
            if name in names or name.startswith(PREFIX)
        )
        raw_path = exchange.scope.get("raw_path") or b""
        query = exchange.scope.get("query_string", b"")
        parts = (key, path.encode(), raw_path, query, body, *sum(headers, ()))
        return self._log.answers.hash_request(parts)

    async def _find_engine(self, exchange: _Exchange) -> str:
        """Return the engine whose fields are used, OPENAI while it is unknown.

        An engine that is not there yet, or refuses the key of this call, is asked again with the
        next call.
        """
        if self._engine is not None:
            return self._engine
        async with self._detecting:
            if self._engine is not None or time.monotonic() < self._detect_at_s:
                return self._engine or OPENAI
            try:
                async with asyncio.timeout(_DETECT_TIMEOUT_S):
                    self._engine = await self._detect(exchange)
            except TimeoutError:
                failure, again_s = f"no answer within {_DETECT_TIMEOUT_S:g} s", _DETECT_AGAIN_S
            except UpstreamError as error:
                failure, again_s = str(error), 0.0
            except _DetectionError as error:
                failure, again_s = str(error), error.again_s
            else:
                _logger.info("%s: engine %s", exchange.url, self._engine)
                self._metrics.engine.clear()
                self._metrics.engine.labels(self._engine).set(1)
                return self._engine
            self._detect_at_s = time.monotonic() + again_s
            self._complaints.warning(
                f"engine unknown (/v1/models: {failure}): calls are recorded with their texts, and "
                "without token ids. For ids, name the engine if it is vLLM, SGLang or llama.cpp; "
                "others return none, and nothing is lost"
            )
            return OPENAI

    async def _detect(self, exchange: _Exchange) -> str:
        """Find the engine by the list of its models, with the key of a call.

        Raises: UpstreamError, _DetectionError.
        """
        headers = [one for one in self._passed_headers(exchange) if one[0] != b"content-type"]
        route = self._routes.begin_other()
        exchange.url = route.url
        try:
            answer = await route.upstream.request("GET", "/v1/models", headers)
            try:
                data = await answer.read_all()
            finally:
                answer.close()
        finally:
            route.end()
        if answer.status != 200:
            is_absent = answer.status in (404, 405, 501)
            raise _DetectionError(f"status {answer.status}", _DETECT_AGAIN_S if is_absent else 0.0)
        try:
            owner = orjson.loads(data)["data"][0].get("owned_by")
        except (orjson.JSONDecodeError, AttributeError, LookupError, TypeError):
            raise _DetectionError("not a list of models", _DETECT_AGAIN_S) from None
        return _OWNERS.get(owner, OPENAI) if isinstance(owner, str) else OPENAI

    def _passed_headers(self, exchange: _Exchange) -> list[tuple[bytes, bytes]]:
        key = self._key
        keys = (b"authorization", b"x-api-key") if key is not None else ()
        connection = exchange.headers.get(b"connection")
        named = () if connection is None else _split_names(connection)
        passed = [
            (name, value)
            for name, value in exchange.scope["headers"]
            if name not in _NOT_PASSED
            and name not in keys
            and name not in named
            and not name.startswith(PREFIX)
        ]
        if key is not None:
            passed += [(b"authorization", b"Bearer " + key), (b"x-api-key", key)]
        if exchange.span is not None and (ours := exchange.span.make_headers()):
            # The engine's spans become children of ours.
            replaced = {name for name, _ in ours}
            passed = [*(one for one in passed if one[0] not in replaced), *ours]
        return passed

    async def _begin(
        self, exchange: _Exchange, status: int, headers: Headers, length: int | None = None
    ) -> None:
        left = [(name, value) for name, value in headers if name not in _NOT_PASSED_BACK]
        if length is not None:
            left.append((b"content-length", b"%d" % length))
        exchange.status, exchange.is_begun = status, True
        if exchange.retained is not None:
            _retain_head(exchange.retained, status, headers)
        await exchange.send({"type": "http.response.start", "status": status, "headers": left})

    async def _begin_stream(self, exchange: _Exchange, headers: Headers, data: bytes) -> None:
        """Send the head and the first bytes of a stream of status 200 at once."""
        left = [one for one in headers if one[0] not in _NOT_PASSED_BACK]
        if not write_stream_start(exchange.send, left, data):
            await self._begin(exchange, 200, headers)
            await self._continue(exchange, data)
            return
        exchange.status, exchange.is_begun = 200, True
        exchange.num_bytes_out += len(data)
        if exchange.retained is not None:
            _retain_head(exchange.retained, 200, headers)
            exchange.retained.parts.append(data)

    async def _continue(self, exchange: _Exchange, data: bytes) -> None:
        exchange.num_bytes_out += len(data)
        if exchange.retained is not None:
            exchange.retained.parts.append(data)
        await exchange.send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self, exchange: _Exchange, data: bytes) -> None:
        exchange.num_bytes_out += len(data)
        if exchange.retained is not None:
            exchange.retained.parts.append(data)
            exchange.retained.is_whole = True
        await exchange.send({"type": "http.response.body", "body": data})
        if exchange.is_client_gone:
            exchange.status = _CLIENT_GONE

    async def _respond(
        self, exchange: _Exchange, status: int, body: bytes, content_type: str
    ) -> None:
        await self._begin(exchange, status, [(b"content-type", content_type.encode())], len(body))
        await self._end(exchange, body)

    async def _refuse(self, exchange: _Exchange, error: RequestRefusedError) -> None:
        if error.status == _CLIENT_GONE:
            return
        if exchange.is_begun:
            self._cut(exchange)
            return
        # As OpenAI's and Anthropic's clients expect an error.
        about = {"type": "gateway_error", "field": error.field, "message": error.message}
        body = orjson.dumps({"type": "error", "error": about})
        headers = [(b"content-type", JSON.encode()), *error.headers]
        await self._begin(exchange, error.status, headers, len(body))
        await self._end(exchange, body)

    def _cut(self, exchange: _Exchange) -> None:
        """Close the connection within an answer: the client sees that it is not whole."""
        cycle = getattr(exchange.send, "__self__", None)
        if cycle is None or not hasattr(cycle, "transport"):
            raise ConnectionAbortedError("the answer was cut short")
        cycle.response_complete = True
        cycle.message_event.set()
        cycle.transport.close()


class _DetectionError(Exception):
    """The engine is not known by its answer; again_s: for how long it is not asked again."""

    def __init__(self, text: str, again_s: float) -> None:
        super().__init__(text)
        self.again_s = again_s


# Name of the API, fields that the gateway added, whether it is a stream, whether it has tools.
_Added = tuple[str, frozenset[str], bool, bool]


@dataclass(slots=True)
class _Call:
    exchange: _Exchange
    api: Api
    identity: CallIdentity
    request: CallRequest
    reader: AnswerReader
    route: Route
    idempotency_key: bytes | None
    is_recorded: bool = False


class _DisconnectWatch:
    """Ends the task that handles a request when its client is gone, where nothing else waits.

    The connection calls it: a second task, which waits for ASGI's message, costs more.
    """

    def __init__(self, exchange: _Exchange, *, ends: bool = True) -> None:
        self._exchange, self._ends = exchange, ends
        self._connection: LimitedProtocol = exchange.scope[CONNECTION]

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._connection.on_disconnect = self._on_disconnect
        if self._connection.transport.is_closing():
            self._on_disconnect()

    def __exit__(self, *_: Any) -> None:
        self._connection.on_disconnect = None
        if self._task is not None and self._exchange.is_client_gone:
            self._task.uncancel()

    def _on_disconnect(self) -> None:
        if self._exchange.is_client_gone:
            return
        self._exchange.is_client_gone = True
        if self._ends and self._task is not None:
            self._task.cancel()


def _find_route(scope: Mapping[str, Any]) -> str:
    """Return the route of a request for labels, `other` for unknown paths, which may be many."""
    path: str = scope["path"]
    if path in _OWN_PATHS or path in APIS:
        return path
    return next((api for api in APIS if path.rstrip("/").endswith(api)), _OTHER)


def _describe_answer(call: _Call, answer: CallAnswer, status: str) -> dict[str, Any]:
    """Return attributes of a call, by the semantic conventions for generative AI."""
    request, usage = call.request, answer.usage if isinstance(answer.usage, dict) else {}
    found: dict[str, Any] = {
        "gen_ai.operation.name": _OPERATIONS.get(call.api.name, "chat"),
        "replaylake.call.status": status,
    }
    texts = {
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": answer.model,
        "gen_ai.response.id": answer.completion_id,
    }
    found |= {name: text for name, text in texts.items() if isinstance(text, str)}
    for name, keys in _USAGE.items():
        num = next((usage[key] for key in keys if key in usage), None)
        if type(num) is int:
            found[name] = num
    if "gen_ai.usage.output_tokens" not in found and answer.samples:
        # A stream has no usage unless the client requested it.
        counts = [len(one.token_ids) for one in answer.samples if one.token_ids is not None]
        if len(counts) == len(answer.samples):
            found["gen_ai.usage.output_tokens"] = sum(counts)
    if answer.policy_version is not None:
        found["replaylake.policy.version"] = answer.policy_version
    return found


def _split_names(value: bytes) -> set[bytes]:
    return {name.strip().lower() for name in value.split(b",")}


def _split_raw_path(scope: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Return the identity in a request's path, unescaped, and the path after it, still escaped.

    Raises: RequestRefusedError (400) for segments `.` and `..`, which an engine could resolve to
    another path than the one that was checked here.
    """
    raw = scope.get("raw_path")
    if (known := _PLAIN_PATHS.get(raw or b"")) is not None:
        return {}, known
    text = raw.decode("latin-1") if isinstance(raw, bytes) else quote(scope["path"])
    in_path, path = split_path(text)
    if any(part in (".", "..") for part in unquote(path).split("/")):
        message = "the path has a segment . or ..; send the path that it leads to"
        raise RequestRefusedError(400, "path", message)
    return {name: unquote(value) for name, value in in_path.items()}, path


def _check_allowed(method: str, path: str) -> None:
    """Refuse a request that is not for our key. Raises: RequestRefusedError (403)."""
    allowed = _WITH_OUR_KEY.get(method, ())
    path = unquote(path)
    if path in allowed or (method == "GET" and path.startswith("/v1/models/")):
        return
    message = (
        f"{method} {path[:200]} is not passed on with the engine's key of the gateway; send it to "
        "the engine, with a key of your own"
    )
    raise RequestRefusedError(403, "path", message)


def _retain_head(answer: RetainedAnswer, status: int, headers: Headers) -> None:
    answer.status = status
    answer.headers = [one for one in headers if one[0] not in _NOT_PASSED_BACK]


def _target(path: str, scope: Mapping[str, Any]) -> str:
    query = scope.get("query_string", b"")
    return f"{path}?{query.decode('latin-1')}" if query else path


def _is_like_call(path: str) -> bool:
    path = path.rstrip("/")
    return path.endswith(_LIKE_APIS) or path in ("/messages", "/responses")


def _parse_json(body: bytes) -> Any:
    """Return a request's JSON, also what orjson refuses and engines read.

    These are a byte order mark, NaN, and escapes of half a surrogate pair, which become U+FFFD.
    Raises: ValueError, RecursionError.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        text = json.dumps(json.loads(body), ensure_ascii=False)
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.loads(text, parse_int=_parse_int)


def _parse_int(text: str) -> int | float:
    """Return a number as orjson does."""
    value = int(text)
    return value if -(2**63) <= value < 2**64 else float(text)


def _add_fields(body: bytes, added: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes:
    """Return a request's body with added fields, all others as the client wrote them.

    fields: those of the client. Decoding and encoding the body would change whole numbers above 64
    bits, and takes longer.
    """
    if not added:
        return body
    text = body.rstrip()
    if text.lstrip()[:1] == b"{" and text[-1:] == b"}" and not added.keys() & fields.keys():
        return text[:-1] + b"," + orjson.dumps(added)[1:]
    return json.dumps({**json.loads(body), **added}).encode()
