"""The HTTP API: one Starlette app, run by BentoML (serve/service.py) or any ASGI server as it is.

    POST /act        observation(s) in, action(s) with log-probabilities and decision ids out
    POST /feedback   what a decision led to
    GET  /policy     which policy answers, its spaces and its origin
    GET  /livez /readyz /metrics

Errors are `{"error": {"field", "found", "expected"}}`; only here do exceptions become statuses.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from replaylake.datastore.errors import EpisodeInvalid, StorageFailed
from replaylake.datastore.policies.exploration import Exploration
from replaylake.datastore.spaces import to_json
from replaylake.serve.feedback import Clock, Decided, json_log_probs
from replaylake.serve.metrics import CONTENT_TYPE, Metrics
from replaylake.serve.requests import ActRequest, RequestRefused, parse_act, parse_feedback
from replaylake.serve.serving import Served, Serving

Endpoint = Callable[[Request], Awaitable[Response]]

_JSON: Final = "application/json"
_METHODS: Final = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_ROUTES: Final = {
    "/act": "POST",
    "/feedback": "POST",
    "/policy": "GET",
    "/livez": "GET",
    "/readyz": "GET",
    "/metrics": "GET",
}
_logger = logging.getLogger(__name__)


def create_app(load: Callable[[], Serving]) -> Starlette:
    """Return the app; `load` runs when a worker starts, and what it returned closes at the end."""
    api = _Api()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        api.serving = await run_in_threadpool(load)
        app.state.is_ready = api.is_ready
        try:
            yield
        finally:
            serving, api.serving = api.serving, None
            if serving is not None:
                await run_in_threadpool(serving.close)

    routes = [
        Route("/act", api.guarded("/act", api.act), methods=["POST"]),
        Route("/feedback", api.guarded("/feedback", api.feedback), methods=["POST"]),
        Route("/policy", api.guarded("/policy", api.policy), methods=["GET"]),
        Route("/livez", api.guarded("/livez", api.livez), methods=["GET"]),
        Route("/readyz", api.guarded("/readyz", api.readyz), methods=["GET"]),
        Route("/metrics", api.guarded("/metrics", api.metrics_page), methods=["GET"]),
        # Also keeps BentoML's own pages, which load scripts from elsewhere, from being served.
        Route("/{path:path}", api.guarded("other", api.not_routed), methods=_METHODS),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.is_ready = lambda: False
    return app


class _Api:
    """The endpoints, with what they share."""

    def __init__(self) -> None:
        self.serving: Serving | None = None
        self._metrics = Metrics()
        self._clock = Clock()
        self._rng = np.random.default_rng()

    def is_ready(self) -> bool:
        """Whether requests can be answered and logged."""
        serving = self.serving
        return serving is not None and (serving.log is None or serving.log.failure is None)

    async def act(self, request: Request) -> Response:
        """Choose actions, write the decisions, then answer."""
        serving = self._serving()
        served, spec = serving.served, serving.served.policy.spec
        body = await _read_body(request, serving.limits.body_bytes)
        asked = parse_act(body, spec, serving.limits.batch)
        log = serving.log
        if asked.action_mask is not None and log is not None and not log.takes_masks:
            expected = f"none, because dataset {log.dataset.name} keeps no masks"
            raise RequestRefused(422, "action_mask", "a mask", expected)
        deterministic = asked.deterministic
        if deterministic is None:
            deterministic = not serving.exploration.is_on
        try:
            act = served.policy.act(
                asked.observations,
                rng=self._rng,
                action_mask=asked.action_mask,
                **_how(serving.exploration, deterministic),
            )
        except EpisodeInvalid as error:
            field = "observations" if asked.is_batch else "observation"
            expected = "what the policy can act on; /policy says its space"
            raise RequestRefused(422, field, str(error), expected) from error
        timestamp = self._clock.now()
        ids = serving.signer.issue(served.name, served.version, timestamp, len(asked.raw))
        if log is not None:
            log.write_decisions(
                Decided(asked, act, ids, timestamp, served.name, served.version, deterministic)
            )
            self._metrics.set_pending("decisions", log.decisions.num_pending)
        self._metrics.count_decisions(served.name, served.version, deterministic, len(ids))
        return _answer(served, asked, act.actions.tolist(), act.log_probs, ids)

    async def feedback(self, request: Request) -> Response:
        """Write a reward for one of our decisions; the join drops repeats."""
        serving = self._serving()
        body = await _read_body(request, serving.limits.body_bytes)
        given = parse_feedback(body, serving.served.policy.spec)
        if serving.log is None:
            raise RequestRefused(
                404, "decision_id", "a server that logs nothing", "one started with --log-to"
            )
        decision = serving.signer.read(given.decision_id)
        if decision is None:
            expected = f"one that /act answered for dataset {serving.log.dataset.name}"
            raise RequestRefused(404, "decision_id", "an id that is not ours", expected)
        timestamp = self._clock.now()
        if serving.log.is_too_old(decision, timestamp):
            age_s = (timestamp - decision.timestamp) / 1e6
            raise RequestRefused(
                410,
                "decision_id",
                f"a decision {age_s:.0f} s old",
                f"one of the last {serving.log.window_s:.0f} s, the reward window",
            )
        serving.log.write_reward(given, timestamp)
        self._metrics.count_feedback()
        self._metrics.set_pending("rewards", serving.log.rewards.num_pending)
        return _json(
            {
                "decision_id": given.decision_id,
                "policy": decision.policy,
                "version": decision.policy_version,
            }
        )

    async def policy(self, request: Request) -> Response:
        """Say which policy answers."""
        serving = self._serving()
        served, spec = serving.served, serving.served.policy.spec
        exploration = serving.exploration
        return _json(
            {
                "policy": served.name,
                "version": served.version,
                "reference": served.reference,
                "head": spec.head,
                "observation_space": to_json(spec.observation_space),
                "action_space": to_json(spec.action_space),
                "encoding": None if spec.encoding is None else spec.encoding.to_json(),
                "explore": {
                    "epsilon": exploration.epsilon,
                    "temperature": exploration.temperature,
                }
                if exploration.is_on
                else None,
                "log_to": serving.log.dataset.name if serving.log else None,
                "manifest": dict(served.about),
            }
        )

    async def livez(self, request: Request) -> Response:
        """Answer while the event loop turns."""
        return _json({"alive": True})

    async def readyz(self, request: Request) -> Response:
        """Answer 200 once requests can be answered and logged, else 503."""
        ready = self.is_ready()
        return _json({"ready": ready}, 200 if ready else 503)

    async def metrics_page(self, request: Request) -> Response:
        """Return the Prometheus text."""
        log = self.serving.log if self.serving else None
        if log is not None:
            self._metrics.set_pending("decisions", log.decisions.num_pending)
            self._metrics.set_pending("rewards", log.rewards.num_pending)
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def not_routed(self, request: Request) -> Response:
        """Answer a wrong path or method in the form of every other error."""
        path = request.url.path
        expected = _ROUTES.get(path)
        if expected is not None:
            raise RequestRefused(405, "method", f"{request.method} {path}", expected)
        raise RequestRefused(404, "path", path[:80], f"one of {', '.join(_ROUTES)}")

    def guarded(self, route: str, endpoint: Endpoint) -> Endpoint:
        """Count an endpoint's answers and turn what it raises into a status."""

        async def answer(request: Request) -> Response:
            began = time.perf_counter()
            try:
                response = await endpoint(request)
            except RequestRefused as error:
                response = _error(error.status, error.field, error.found, error.expected)
            except StorageFailed as error:
                _logger.error("%s: decision log: %s", route, error)
                self._metrics.count_log_failure()
                response = _error(503, "log", "a disk that refuses", "room to log; try again later")
            except ClientDisconnect:
                response = Response(status_code=499)  # nobody reads it; it is for the count
            except Exception:
                # Whatever we did not foresee is logged here, and the client learns no internals.
                _logger.exception("%s: unexpected error", route)
                response = _error(500, "server", "an internal error", "an answer; see its log")
            self._metrics.count_request(route, response.status_code, time.perf_counter() - began)
            return response

        return answer

    def _serving(self) -> Serving:
        if self.serving is None:
            raise RequestRefused(503, "server", "one that is starting or stopping", "a ready one")
        return self.serving


def _how(exploration: Exploration, deterministic: bool) -> dict[str, Any]:
    """Return act()'s arguments: the mode, the mode with epsilon, or a draw at a temperature."""
    if deterministic:
        return {"deterministic": True}
    if exploration.epsilon > 0:
        return {"deterministic": True, "epsilon": exploration.epsilon}
    temperature = 1.0 if exploration.temperature is None else exploration.temperature
    return {"deterministic": False, "temperature": temperature}


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body without ever holding more than the limit. Raises: RequestRefused (413)."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise RequestRefused(413, "body", f"more than {max_bytes} bytes", "a smaller request")
        chunks.append(chunk)
    return b"".join(chunks)


def _answer(
    served: Served, asked: ActRequest, actions: list[Any], log_probs: Any, ids: list[str]
) -> Response:
    answer: dict[str, Any] = {"policy": served.name, "version": served.version}
    values = json_log_probs(log_probs, len(ids))
    if asked.is_batch:
        answer |= {"actions": actions, "log_probs": values, "decision_ids": ids}
    else:
        answer |= {"action": actions[0], "log_prob": values[0], "decision_id": ids[0]}
    encoding = served.policy.spec.encoding
    if encoding is not None and encoding.action_names is not None:
        named = [encoding.action_name(action) for action in actions]
        answer |= {"action_names": named} if asked.is_batch else {"action_name": named[0]}
    return _json(answer)


def _error(status: int, field: str, found: str, expected: str) -> Response:
    return _json({"error": {"field": field, "found": found, "expected": expected}}, status)


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type=_JSON)
