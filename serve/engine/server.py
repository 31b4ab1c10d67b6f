"""The server of `replaylake engine`: one process with one model, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import orjson
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.serve.engine.answers import AnswerWriter
from replaylake.serve.engine.generation import Generation, GenerationQueue, TokenModel
from replaylake.serve.engine.requests import read_completion_request
from replaylake.serve.http.connections import limit_connections
from replaylake.serve.http.listener import open_server, run_app
from replaylake.serve.messages import JSON, RequestRefusedError
from replaylake.serve.safety.hosts import AllowedHosts
from replaylake.serve.safety.limits import Safety, check_exposure
from replaylake.serve.safety.tokens import Tokens

# How long generations in progress may take to end once the engine is told to stop.
DRAIN_S: Final = 30
# By this owner in the list of models, a gateway knows which fields to use: vLLM's.
OWNER: Final = "replaylake"
# Sampling defaults that the engine cannot apply, with the values that change nothing.
_NEUTRAL: Final = {
    "min_p": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "repetition_penalty": 1,
    "typical_p": 1,
}
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineConfig:
    """One engine.

    name, version: of the policy; version is None for a model that is none of a lake. descriptor: of
    a listening socket to use instead of host and port. safety: tokens and limits; `queue` is the
    number of requests that wait or run at once.
    """

    name: str
    version: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    descriptor: int | None = None
    safety: Safety = field(default_factory=Safety)

    @property
    def url(self) -> str:
        """Where it answers, once `port` is the real one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        return (self.name, *(() if self.version is None else (f"{self.name}:{self.version}",)))


def create_engine(
    config: EngineConfig, model: TokenModel, on_ready: Callable[[], None] = lambda: None
) -> Starlette:
    """Return the ASGI app."""
    engine = _Engine(config, model)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        _warn_of_defaults(model)
        on_ready()
        yield
        await run_in_threadpool(engine.queue.close)

    chat, completions = (partial(engine.complete, is_chat=is_chat) for is_chat in (True, False))
    routes = [
        Route("/health", engine.report_health),
        Route("/v1/models", engine.list_models),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={RequestRefusedError: _refuse},
    )


def run_engine(
    config: EngineConfig,
    load: Callable[[], TokenModel],
    on_ready: Callable[[EngineConfig], None] | None = None,
) -> int:
    """Serve a model until SIGINT or SIGTERM, then return 0.

    load: returns the model; connections wait meanwhile. `on_ready` is called with the config and
    the port that it listens on. Raises: ServeError if the port is in use; ConfigInvalidError if
    other machines could reach it without a token; whatever `load` raises.
    """
    check = partial(check_exposure, safety=config.safety)
    listener = None if config.descriptor is None else socket.socket(fileno=config.descriptor)
    with open_server("engine", config, on_ready, check_exposure=check, listener=listener) as server:
        config = server.config
        model = load()
        limit_connections(config.safety.connection_limits)

        def announce() -> None:
            name = config.names[-1]
            server.announce(
                f"engine of {name} on {config.url}, ready after {server.elapsed_s:.1f} s"
            )

        run_app(
            create_engine(config, model, announce), server.listener, lifespan="on", drain_s=DRAIN_S
        )
    return 0


class _Engine:
    """The endpoints."""

    def __init__(self, config: EngineConfig, model: TokenModel) -> None:
        self._config, self._model = config, model
        self._tokens: Tokens = config.safety.tokens()
        own = config.host.partition("%")[0]
        self._hosts = AllowedHosts((*([own] if own else []), *config.safety.allowed_hosts))
        self.queue = GenerationQueue(model, config.safety.queue)

    async def report_health(self, request: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type=JSON)

    async def list_models(self, request: Request) -> Response:
        self._check(request)
        config = self._config
        models = [
            {
                "id": config.name,
                "object": "model",
                "created": 0,
                "owned_by": OWNER,
                "root": config.names[-1],
                "max_model_len": self._model.spec.context_tokens,
            }
        ]
        return _respond({"object": "list", "data": models})

    async def complete(self, request: Request, *, is_chat: bool) -> Response:
        self._check(request)
        data = await self._read_body(request)
        try:
            body = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise RequestRefusedError(400, "body", f"not JSON ({error})") from None
        # In a thread: long prompts take a while, and other requests' tokens wait for nobody.
        asked = await run_in_threadpool(
            partial(read_completion_request, body, self._model, self._config.names, is_chat=is_chat)
        )
        config = self._config
        writer = AnswerWriter(asked, self._model, config.name, config.version)
        generation = self.queue.submit(asked.generation)
        if asked.is_stream:
            return _EventStream(generation, writer)
        try:
            return await _answer_whole(request, generation, writer)
        finally:
            generation.close()

    def _check(self, request: Request) -> None:
        """Check host, origin and token. Raises: RequestRefusedError."""
        headers, server = request.headers, request.scope.get("server")
        host, origin = (headers.get(name) for name in ("host", "origin"))
        self._hosts.check(
            None if host is None else host.encode("latin-1"),
            None if origin is None else origin.encode("latin-1"),
            server[0] if server else None,
        )
        authorization = headers.get("authorization")
        self._tokens.check(
            "act", None if authorization is None else authorization.encode("latin-1"), "/act"
        )

    async def _read_body(self, request: Request) -> bytes:
        safety, parts, size = self._config.safety, [], 0
        try:
            async with asyncio.timeout(safety.body_timeout_s):
                async for part in request.stream():
                    size += len(part)
                    if size > safety.body_bytes:
                        raise RequestRefusedError(
                            413,
                            "body",
                            found=f"{size} bytes",
                            expected=f"at most {safety.body_bytes} bytes",
                        )
                    parts.append(part)
        except TimeoutError:
            message = f"request body not received within {safety.body_timeout_s:g} s"
            raise RequestRefusedError(408, "body", message) from None
        return b"".join(parts)


class _EventStream(StreamingResponse):
    """The events of a generation, which ends with the response: also if the client leaves."""

    def __init__(self, generation: Generation, writer: AnswerWriter) -> None:
        super().__init__(_iter_events(generation, writer), media_type="text/event-stream")
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


async def _iter_events(generation: Generation, writer: AnswerWriter) -> AsyncIterator[bytes]:
    for event in writer.iter_first_events():
        yield _encode_event(event)
    try:
        async for pieces in generation:
            for event in writer.iter_events(pieces):
                yield _encode_event(event)
    except Exception as error:
        _logger.exception("generation failed")
        about = {"message": f"{type(error).__name__}: {error}", "type": "engine_error"}
        yield _encode_event({"error": about})
        return
    for event in writer.iter_last_events():
        yield _encode_event(event)


async def _answer_whole(request: Request, generation: Generation, writer: AnswerWriter) -> Response:
    async def collect() -> None:
        async for pieces in generation:
            writer.add(pieces)

    collection = asyncio.create_task(collect())
    departure = asyncio.create_task(_wait_for_departure(request))
    try:
        await asyncio.wait({collection, departure}, return_when=asyncio.FIRST_COMPLETED)
        if not collection.done():
            return Response(status_code=499)  # nobody reads it
        await collection
    except ConfigInvalidError as error:
        raise RequestRefusedError(400, error.parameter or "prompt", str(error)) from error
    except Exception as error:
        _logger.exception("generation failed")
        message = f"{type(error).__name__}: {error}"
        raise RequestRefusedError(500, "engine", message) from error
    finally:
        for task in (collection, departure):
            task.cancel()
        await asyncio.gather(collection, departure, return_exceptions=True)
    return _respond(writer.make_body())


def _warn_of_defaults(model: TokenModel) -> None:
    """Log the sampling defaults of a model that are not applied."""
    generation = model.spec.generation
    found = {
        name: generation[name]
        for name, neutral in _NEUTRAL.items()
        if generation.get(name) not in (None, neutral)
    }
    if found:
        _logger.warning(
            "defaults of generation_config.json that are not applied: %s",
            ", ".join(f"{name} {value}" for name, value in found.items()),
        )


async def _wait_for_departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _encode_event(event: Any) -> bytes:
    data = event.encode() if isinstance(event, str) else orjson.dumps(event)
    return b"data: " + data + b"\n\n"


def _respond(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type=JSON)


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer as OpenAI's clients expect an error."""
    assert isinstance(error, RequestRefusedError)
    kind = "invalid_request_error" if error.status < 500 else "engine_error"
    about = {"message": str(error), "type": kind, "param": error.field, "code": None}
    response = _respond({"error": about}, error.status)
    for name, value in error.headers:
        response.headers[name.decode("latin-1")] = value.decode("latin-1")
    return response
