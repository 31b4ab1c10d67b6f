"""GET /docs.json: the API as OpenAPI 3.1, with the served policy's own spaces.

https://spec.openapis.org/oas/v3.1.1. There is no page of it: pages load scripts from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.version import VERSION
from replaylake.serve.api.api_schemas import (
    IN_QUERY,
    object_of,
    ref,
    schemas_of,
    without_null,
)
from replaylake.serve.api.bodies import MSGPACK, NPY
from replaylake.serve.api.json_schema import Schema, example_of
from replaylake.serve.exchange import JSON, Answer, Request, json_answer
from replaylake.serve.monitoring.metrics import CONTENT_TYPE
from replaylake.serve.safety.tokens import role_of
from replaylake.serve.serving import Serving

_MEANINGS: Final[Mapping[int, str]] = {
    400: "No Host header, or more than one.",
    401: "No token, or none of ours.",
    403: "A token of another role, or a page of another site.",
    404: "Not ours: another dataset's, or nothing is logged here.",
    408: "The body did not come in time.",
    409: "It contradicts what this worker was sent before.",
    410: "Too old: the reward window has closed, or the version is no longer served.",
    413: "The body, or what it lists, is too large.",
    415: "A content type that is not taken.",
    421: "A host that this server does not answer to; --allowed-host adds one.",
    422: "A field with the wrong shape, type or range, or an unknown one.",
    500: "An internal error; the server's log has it.",
    503: "Not ready, too many requests, or the log cannot be written. Retry-After says when.",
    504: "No answer in time.",
}
_PROBED: Final = (408, 413, 500, 503, 504)
_ALWAYS: Final = (400, 403, *_PROBED, 421)


class Docs:
    """Answers with the document of what is served now."""

    def __init__(self, serving: Callable[[], Serving]) -> None:
        self._serving = serving

    async def __call__(self, request: Request) -> Answer:
        """Answer one request. Raises: RequestRefused."""
        return json_answer(document(self._serving()))


def document(serving: Serving) -> dict[str, Any]:
    """Return the API of a server as OpenAPI 3.1."""
    served = serving.router.one
    spec = served.policy.spec
    document: dict[str, Any] = {
        "openapi": "3.1.1",
        "info": {
            "title": f"ReplayLake: {served.reference}",
            "version": VERSION,
            "description": "A served policy: ask for actions, report what they led to.",
        },
        "paths": {
            "/act": {"post": _act(serving, spec)},
            "/feedback": {"post": _feedback(serving, spec)},
            "/episodes": {"post": _episodes(serving, spec)},
            "/policy": {"get": _get("Which policies answer, and what they take.", "Policy")},
            "/livez": {"get": _probe("Whether the process lives.", "Alive")},
            "/readyz": {"get": _probe("Whether requests can be answered and logged.", "Ready")},
            "/metrics": {"get": _metrics()},
            "/docs.json": {"get": _get("This document.", "Document")},
        },
        "components": {"schemas": schemas_of(spec)},
    }
    if not serving.tokens.is_empty:
        _secure(document)
    return document


def _secure(document: dict[str, Any]) -> None:
    """Say which role's token each operation asks for."""
    schemes = {}
    for path, operations in document["paths"].items():
        role = role_of(path)
        if role is None:
            continue
        schemes[role] = {"type": "http", "scheme": "bearer", "description": f"A token for {role}."}
        for operation in operations.values():
            operation["security"] = [{role: []}]
            operation["responses"] |= _refusals((401, 403))
    document["components"]["securitySchemes"] = schemes


def _act(serving: Serving, spec: PolicySpec) -> dict[str, Any]:
    example = example_of(spec.observation_space)
    examples = {
        "one": {"value": {"observation": example, "episode_id": "visit-1", "step": 0}},
        "many": {"value": {"observations": [example, example]}},
    }
    content: dict[str, Any] = {
        kind: {"schema": {"oneOf": [ref("ActOne"), ref("ActMany")]}} for kind in (JSON, MSGPACK)
    }
    content[JSON]["examples"] = examples
    content[NPY] = {"schema": {"type": "string", "format": "binary"}}
    parameters = [
        {
            "name": name,
            "in": "query",
            "description": "As the field of this name; beside a body of application/x-npy.",
            "schema": without_null(schema),
        }
        for name, schema in IN_QUERY.items()
    ]
    return {
        "operationId": "act",
        "summary": "Choose an action for one observation, or for many by one more dimension.",
        "parameters": parameters,
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": _answer("The action, or the actions.", ref("Acted"), (JSON, MSGPACK)),
            **_refusals((*_ALWAYS, 410, 415, 422)),
        },
        "x-max-observations": serving.limits.batch,
    }


def _feedback(serving: Serving, spec: PolicySpec) -> dict[str, Any]:
    schema = {"oneOf": [ref("Report"), ref("Reports")]}
    content: dict[str, Any] = {kind: {"schema": schema} for kind in (JSON, MSGPACK)}
    named = {"episode_id": "visit-1", "step": 0, "reward": 1.0}
    content[JSON]["examples"] = {
        "by step": {"value": named},
        "the end": {"value": {**named, "terminated": True}},
        "many": {"value": {"feedback": [named, {**named, "step": 1}]}},
    }
    return {
        "operationId": "feedback",
        "summary": "Report what decisions led to, now, later, or again.",
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": _answer("Taken; the decisions are ours.", ref("Taken")),
            "202": _answer("Taken; whose they are is found when they are joined.", ref("Taken")),
            **_refusals((*_ALWAYS, 404, 409, 410, 415, 422)),
        },
        "x-max-reports": serving.limits.batch,
    }


def _episodes(serving: Serving, spec: PolicySpec) -> dict[str, Any]:
    schema = object_of({"episodes": {"type": "array", "items": ref("Episode"), "minItems": 1}})
    content: dict[str, Any] = {kind: {"schema": schema} for kind in (JSON, MSGPACK)}
    observation, action = example_of(spec.observation_space), example_of(spec.action_space)
    episode = {
        "episode_id": "robot-7",
        "observations": [observation, observation],
        "actions": [action, action],
        "rewards": [0.0, 1.0],
        "log_probs": [-0.7, None],
        "terminated": True,
        "final_observation": observation,
    }
    content[JSON]["examples"] = {"whole": {"value": {"episodes": [episode]}}}
    counts: Schema = {"type": "integer", "minimum": 1}
    return {
        "operationId": "episodes",
        "summary": "Send whole episodes, or pieces of them, that were acted elsewhere.",
        "requestBody": {"required": True, "content": content},
        "responses": {
            "202": _answer("Taken.", object_of({"episodes": counts, "steps": counts})),
            **_refusals((*_ALWAYS, 404, 409, 415, 422)),
        },
        "x-max-steps": serving.limits.steps,
    }


def _get(summary: str, schema: str, refusals: Sequence[int] = _ALWAYS) -> dict[str, Any]:
    name = schema.lower()
    return {
        "operationId": name,
        "summary": summary,
        "responses": {"200": _answer(summary, ref(schema)), **_refusals(refusals)},
    }


def _probe(summary: str, schema: str) -> dict[str, Any]:
    """Describe what machines ask, to whom the status says all; BentoML answers no more."""
    operation = _get(summary, schema, _PROBED)
    empty = {"text/plain; charset=utf-8": {"schema": {"type": "string"}}}
    operation["responses"]["200"]["content"] |= empty
    refused = _answer("Not now.", {"anyOf": [ref(schema), ref("Error")]})
    refused["content"] |= empty
    operation["responses"]["503"] = refused
    return operation


def _metrics() -> dict[str, Any]:
    operation = _get("Prometheus's text.", "Metrics")
    operation["responses"]["200"] = {
        "description": "Prometheus's text.",
        "content": {CONTENT_TYPE: {"schema": {"type": "string"}}},
    }
    return operation


def _answer(description: str, schema: Schema, kinds: Sequence[str] = (JSON,)) -> dict[str, Any]:
    return {"description": description, "content": {kind: {"schema": schema} for kind in kinds}}


def _refusals(statuses: Sequence[int]) -> dict[str, Any]:
    return {str(status): _answer(_MEANINGS[status], ref("Error")) for status in statuses}
