"""GET /docs.json: the API as OpenAPI 3.1, with the served policy's own spaces.

https://spec.openapis.org/oas/v3.1.1. server_pages.py has it as a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
from starlette.concurrency import run_in_threadpool

from replaylake.datastore.episodes.episode import MAX_STEP
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Box, describe, num_actions
from replaylake.datastore.episodes.tokens import (
    ACTION_LOG_PROBS,
    ACTION_TOKENS,
    IS_CONTINUATION,
    IS_TRAINABLE,
    OBSERVATION_TOKENS,
    PARENT_AGENT_ID,
    PARENT_STEP,
)
from replaylake.datastore.feedback.reports import MAX_REWARD
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.version import VERSION
from replaylake.serve.api.bodies import MAX_NAME_CHARS, MSGPACK, NPY
from replaylake.serve.api.decisions import MAX_AGE_S, MAX_VERSION
from replaylake.serve.api.episodes import list_token_fields, takes_dialogues
from replaylake.serve.api.json_schema import Schema, example_of, observation_schema, schema_of
from replaylake.serve.api.open_inference import MODEL_PATHS, PARAMETERS, Model, find_models
from replaylake.serve.api.open_inference import PREFIX as INFERENCE
from replaylake.serve.api.tensors import OCTETS, TensorSpec
from replaylake.serve.messages import JSON, Request, Response, json_response
from replaylake.serve.monitoring.metrics import CONTENT_TYPE
from replaylake.serve.safety.tokens import role_of
from replaylake.serve.serving_state import ServingState

_MEANINGS: Final[Mapping[int, str]] = {
    400: "Host header missing, repeated or malformed.",
    401: "Token missing or unknown.",
    403: "The token lacks the role, or the request comes from another site's page.",
    404: "Unknown decision, or the server logs nothing.",
    408: "Request body not received in time.",
    409: "The report or step contradicts one received before.",
    410: "Expired: the reward window has passed, or the version is no longer served.",
    413: "The body, or a list in it, is too large.",
    415: "Content type not supported.",
    421: "Unknown host; the server's `allowed_hosts` adds one.",
    422: "A field is unknown, missing, or of the wrong shape, type or range.",
    500: "Internal error; the server's log has it.",
    503: "Starting or stopping, overloaded, or the log cannot be written; retry after Retry-After.",
    504: "Not answered in time.",
}
_PROBED: Final = (408, 413, 500, 503, 504)
_ALWAYS: Final = (400, 403, *_PROBED, 421)
_NAME: Final[Schema] = {
    "type": ["string", "null"],
    "minLength": 1,
    "maxLength": MAX_NAME_CHARS,
}
_STEP: Final[Schema] = {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_STEP}
_REWARDS: Final[Schema] = {"minimum": -MAX_REWARD, "maximum": MAX_REWARD}
_FLAG: Final[Schema] = {"type": ["boolean", "null"]}
_TOKEN: Final[Schema] = {"type": ["string", "null"], "minLength": 1}
_FIELD_NAMES: Final[Schema] = {
    "type": "array",
    "items": {"type": "string"},
    "description": "Fields of the observation whose text the policy does not know.",
}
_LOG_PROB: Final[Schema] = {
    "type": ["number", "null"],
    "description": "ln of the probability (density) of the action; null if there is none.",
}
_OPTIONS: Final[Mapping[str, Schema]] = {
    "deterministic": {**_FLAG, "description": "The mode instead of a draw."},
    "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 1e6},
    "epsilon": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
    "seed": {"type": ["integer", "null"], "minimum": 0, "maximum": 2**63 - 1},
    "q_values": {**_FLAG, "description": "Answer the q-values as well."},
}
_TOKEN_IDS: Final[Schema] = {
    "type": ["array", "null"],
    "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
}
# Of one step, by the field that has a list of them.
_TOKEN_COLUMNS: Final[Mapping[str, Schema]] = {
    OBSERVATION_TOKENS: {**_TOKEN_IDS, "description": "Token ids since the generation before."},
    ACTION_TOKENS: {**_TOKEN_IDS, "description": "Token ids of the generation."},
    ACTION_LOG_PROBS: {
        "type": ["array", "null"],
        "items": {"type": "number", "maximum": 0},
        "description": "ln of the probability of each token of the generation.",
    },
    PARENT_AGENT_ID: {"type": ["string", "null"], "description": "The agent it continues."},
    PARENT_STEP: {**_STEP, "description": "The step of that agent which it continues."},
    IS_CONTINUATION: {**_FLAG, "description": "Whether the tokens continue those of the parent."},
    IS_TRAINABLE: {**_FLAG, "description": "Whether it is to be trained on."},
}
_HEADER_LENGTH: Final[Mapping[str, Any]] = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "description": "How long the JSON is, if tensors as bytes follow it.",
    "schema": {"type": "integer", "minimum": 0},
}
_IN_QUERY: Final[Mapping[str, Schema]] = {
    **_OPTIONS,
    "episode_id": _NAME,
    "request_id": _NAME,
    "step": _STEP,
    "state": _TOKEN,
}


class Docs:
    """Answers with the document of what is served now."""

    def __init__(self, serving: Callable[[], ServingState]) -> None:
        self._serving = serving

    async def __call__(self, request: Request) -> Response:
        # In a thread: the columns of the dataset are read from storage.
        return json_response(await run_in_threadpool(document, self._serving()))


def document(serving: ServingState) -> dict[str, Any]:
    """Return the API of a server as OpenAPI 3.1. Raises: StorageError."""
    served = serving.router.one
    spec = served.policy.spec
    dataset = None if serving.log is None else serving.log.dataset
    columns = dataset.spec if dataset is not None and dataset.exists() else None
    document: dict[str, Any] = {
        "openapi": "3.1.1",
        "info": {
            "title": f"ReplayLake: {served.reference}",
            "version": VERSION,
            "description": "A served policy: ask for actions, report what they led to.",
        },
        "paths": {
            "/act": {"post": _act_operation(serving, spec)},
            "/decisions": {"post": _decisions_operation(serving, spec)},
            "/feedback": {"post": _feedback_operation(serving, spec)},
            "/episodes": {"post": _episodes_operation(serving, spec)},
            "/policy": {
                "get": _get_operation("Which policies answer, and what they take.", "Policy")
            },
            "/livez": {"get": _probe_operation("Whether the process lives.", "Alive")},
            "/readyz": {
                "get": _probe_operation("Whether requests can be answered and logged.", "Ready")
            },
            "/metrics": {"get": _metrics_operation()},
            "/docs.json": {"get": _get_operation("This document.", "Document")},
            **_inference_paths(serving),
        },
        "components": {"schemas": _schemas(spec, columns)},
    }
    if not serving.tokens.is_empty:
        _add_security(document)
    return document


def _add_security(document: dict[str, Any]) -> None:
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


def _act_operation(serving: ServingState, spec: PolicySpec) -> dict[str, Any]:
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
            "schema": drop_null(schema),
        }
        for name, schema in _IN_QUERY.items()
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


def _feedback_operation(serving: ServingState, spec: PolicySpec) -> dict[str, Any]:
    schema = {"oneOf": [ref("Report"), ref("Reports")]}
    content: dict[str, Any] = {kind: {"schema": schema} for kind in (JSON, MSGPACK)}
    example = {"episode_id": "visit-1", "step": 0, "reward": 1.0}
    content[JSON]["examples"] = {
        "by step": {"value": example},
        "the end": {"value": {**example, "terminated": True}},
        "many": {"value": {"feedback": [example, {**example, "step": 1}]}},
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


def _decisions_operation(serving: ServingState, spec: PolicySpec) -> dict[str, Any]:
    schema = object_of({"decisions": many_of(ref("Decision"))})
    content: dict[str, Any] = {kind: {"schema": schema} for kind in (JSON, MSGPACK)}
    decision = {
        "request_id": "click-17",
        "observation": example_of(spec.observation_space),
        "action": example_of(spec.action_space),
        "log_prob": -0.7,
        "policy": serving.router.one.name,
        "version": serving.router.one.version,
        "age_s": 2.5,
    }
    content[JSON]["examples"] = {"one": {"value": {"decisions": [decision]}}}
    ids: Schema = {"type": "array", "items": {"type": "string"}, "minItems": 1}
    return {
        "operationId": "decisions",
        "summary": "Log decisions that a client took while no server answered.",
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": _answer("Logged.", object_of({"decision_ids": ids})),
            **_refusals((*_ALWAYS, 404, 415, 422)),
        },
        "x-max-decisions": serving.limits.batch,
    }


def _episodes_operation(serving: ServingState, spec: PolicySpec) -> dict[str, Any]:
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


def _get_operation(summary: str, schema: str, statuses: Sequence[int] = _ALWAYS) -> dict[str, Any]:
    name = schema.lower()
    return {
        "operationId": name,
        "summary": summary,
        "responses": {"200": _answer(summary, ref(schema)), **_refusals(statuses)},
    }


def _probe_operation(summary: str, schema: str) -> dict[str, Any]:
    """Describe what machines ask, to whom the status says all; BentoML answers no more."""
    operation = _get_operation(summary, schema, _PROBED)
    empty = {"text/plain; charset=utf-8": {"schema": {"type": "string"}}}
    operation["responses"]["200"]["content"] |= empty
    refusal = _answer("Not now.", {"anyOf": [ref(schema), ref("Error")]})
    refusal["content"] |= empty
    operation["responses"]["503"] = refusal
    return operation


def _metrics_operation() -> dict[str, Any]:
    operation = _get_operation("Prometheus's text.", "Metrics")
    operation["responses"]["200"] = {
        "description": "Prometheus's text.",
        "content": {CONTENT_TYPE: {"schema": {"type": "string"}}},
    }
    return operation


def _inference_paths(serving: ServingState) -> dict[str, Any]:
    """Describe the routes of the Open Inference Protocol (open_inference.py)."""
    models = find_models(serving.router.arms)
    main = next(iter(models.values()))
    parameters = [
        _path_parameter("name", "A policy, or a reference to one.", list(models)),
        _path_parameter("version", "Of it.", [str(one.version) for one in main.versions]),
    ]
    paths: dict[str, Any] = {
        INFERENCE: {"get": _inference_operation("Which protocol this is.", "server", ())},
        f"{INFERENCE}/health/live": {
            "get": _inference_operation("Whether the process lives.", "live", ())
        },
        f"{INFERENCE}/health/ready": {
            "get": _inference_operation("Whether requests can be answered.", "ready", ())
        },
    }
    for path, own in zip(MODEL_PATHS, (parameters[:1], parameters), strict=True):
        suffix = "" if len(own) == 1 else "_version"
        summary = "What the model takes and returns."
        paths[path] = {"get": _inference_operation(summary, f"model{suffix}", own)}
        summary = "Whether requests to the model can be answered."
        paths[f"{path}/ready"] = {"get": _inference_operation(summary, f"model_ready{suffix}", own)}
        infer = _inference_operation("Choose actions for rows of tensors.", f"infer{suffix}", own)
        infer["parameters"] = [*own, _HEADER_LENGTH]
        infer["requestBody"] = _infer_body(main)
        infer["responses"]["200"]["content"][OCTETS] = {
            "schema": {"type": "string", "format": "binary"}
        }
        infer["responses"] |= _inference_refusals((410, 415))
        paths[f"{path}/infer"] = {"post": infer}
    return paths


def _path_parameter(name: str, description: str, values: Sequence[str]) -> dict[str, Any]:
    schema = {"type": "string", "enum": list(values)}
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": schema,
    }


def _inference_operation(
    summary: str, name: str, parameters: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"open_inference_{name}",
        "summary": summary,
        "responses": {
            "200": _answer(summary, {"type": "object"}),
            **_inference_refusals((*_ALWAYS, *((404,) if parameters else ()))),
        },
    }
    if parameters:
        operation["parameters"] = list(parameters)
    if "ready" in name:
        not_ready = object_of(
            {"name": {"type": "string"}, "ready": {"type": "boolean"}}, ("ready",)
        )
        refusal = {"anyOf": [not_ready, ref("InferenceError")]}
        operation["responses"]["503"] = _answer("Not ready.", refusal)
    return operation


def _inference_refusals(statuses: Sequence[int]) -> dict[str, Any]:
    meanings = {
        **_MEANINGS,
        400: f"{_MEANINGS[400][:-1]}, or a tensor, field or parameter is wrong.",
        404: "Unknown model or version.",
    }
    return {str(status): _answer(meanings[status], ref("InferenceError")) for status in statuses}


def _infer_body(model: Model) -> dict[str, Any]:
    tensors = [
        {**one.to_json(), "shape": [1, *one.shape], "data": _tensor_example(one)}
        for one in model.inputs.values()
        if not one.is_optional
    ]
    return {
        "required": True,
        "content": {
            JSON: {
                "schema": ref("InferenceRequest"),
                "examples": {"one row": {"value": {"inputs": tensors}}},
            },
            OCTETS: {"schema": {"type": "string", "format": "binary"}},
        },
    }


def _tensor_example(tensor: TensorSpec) -> list[Any]:
    if tensor.dtype is None:
        return [""]
    zeros: list[Any] = np.zeros(prod(tensor.shape), tensor.dtype).tolist()
    return zeros


def _inference_schemas() -> dict[str, Schema]:
    text: Schema = {"type": "string"}
    size: Schema = {"type": "integer", "minimum": 0}
    tensor = object_of(
        {
            "name": text,
            "shape": many_of({"type": "integer", "minimum": 0}),
            "datatype": text,
            "parameters": object_of({"binary_data_size": size}, ()),
            "data": {"type": "array", "items": {}},
        },
        ("name", "shape", "datatype"),
    )
    output = object_of(
        {"name": text, "parameters": object_of({"binary_data": {"type": "boolean"}}, ())}, ("name",)
    )
    parameters = {name: schema for name, schema in _IN_QUERY.items() if name in PARAMETERS} | {
        "binary_data_output": _FLAG
    }
    return {
        "InferenceRequest": object_of(
            {
                "id": text,
                "model_name": text,
                "parameters": object_of(parameters, ()),
                "inputs": many_of(tensor),
                "outputs": {"type": "array", "items": output},
            },
            ("inputs",),
        ),
        "InferenceError": object_of({"error": text}),
    }


def _answer(description: str, schema: Schema, kinds: Sequence[str] = (JSON,)) -> dict[str, Any]:
    return {"description": description, "content": {kind: {"schema": schema} for kind in kinds}}


def _refusals(statuses: Sequence[int]) -> dict[str, Any]:
    return {str(status): _answer(_MEANINGS[status], ref("Error")) for status in statuses}


def _schemas(spec: PolicySpec, columns: DatasetSpec | None) -> dict[str, Schema]:
    """Return the schemas of a policy; columns: the dataset's that is logged to, where it exists."""
    text: Schema = {"type": "string"}
    error = object_of(
        {"field": text, "message": text, "found": text, "expected": text},
        required=("field", "message"),
    )
    return {
        "Observation": observation_schema(spec.observation_space, spec.encoding),
        "Action": {
            **schema_of(spec.action_space),
            "description": f"{describe(spec.action_space)}, of the head {spec.head}",
        },
        **_act_request_schemas(spec),
        "Report": _report_schema(),
        "Reports": object_of({"feedback": many_of(ref("Report"))}),
        "Taken": {
            "type": "object",
            "properties": {
                "accepted": {"type": ["boolean", "integer"]},
                "decision_id": text,
                "policy": text,
                "version": {"type": "integer"},
            },
            "additionalProperties": False,
        },
        "Decision": _decision_schema(spec),
        "Episode": _episode_schema(spec, columns),
        "Policy": {
            "type": "object",
            "required": ["policy", "version", "observation_space", "action_space", "head"],
        },
        "Alive": object_of({"alive": {"type": "boolean"}}),
        "Ready": object_of(
            {
                "ready": {"type": "boolean"},
                "degraded": {"type": "array", "items": {"type": "string"}},
            }
        ),
        "Document": {"type": "object", "required": ["openapi", "paths"]},
        "Error": object_of({"error": error}),
        **_inference_schemas(),
    }


def _decision_schema(spec: PolicySpec) -> Schema:
    num = num_actions(spec.action_space)
    mask: Schema = {"type": ["array", "null"], "items": {"type": "boolean"}}
    mask = {"type": "null"} if num is None else {**mask, "minItems": num, "maxItems": num}
    return object_of(
        {
            "request_id": {**_NAME, "type": "string"},
            "episode_id": _NAME,
            "step": _STEP,
            "observation": ref("Observation"),
            "action": ref("Action"),
            "log_prob": _LOG_PROB,
            "policy": {"type": "string", "minLength": 1, "maxLength": 63},
            "version": {"type": "integer", "minimum": 0, "maximum": MAX_VERSION},
            "deterministic": {
                **_FLAG,
                "description": "Whether the decision was taken without sampling.",
            },
            "age_s": {
                "type": "number",
                "minimum": 0,
                "maximum": MAX_AGE_S,
                "description": "Seconds since the decision.",
            },
            "action_mask": mask,
            "package_sha256": {"type": ["string", "null"], "pattern": "^[0-9a-f]{64}$"},
        },
        required=("request_id", "observation", "action", "policy", "version", "age_s"),
    )


def _act_request_schemas(spec: PolicySpec) -> dict[str, Schema]:
    num = num_actions(spec.action_space)
    row: Schema = {"type": "array", "items": {"type": "boolean"}, "minItems": num, "maxItems": num}
    mask: Schema = {"type": "null"} if num is None else {**row, "type": ["array", "null"]}
    masks: Schema = {"type": ["array", "null"], "items": row}
    observation = ref("Observation")
    rows: Mapping[str, Schema] = {
        "episode_id": _NAME,
        "request_id": _NAME,
        "step": _STEP,
        "state": _TOKEN,
    }
    one = {"observation": observation, **_OPTIONS, **rows, "action_mask": mask}
    many: dict[str, Schema] = {
        "observation": many_of(observation),
        "observations": many_of(observation),
        **_OPTIONS,
    }
    for name, schema in rows.items():
        column: Schema = {"type": ["array", "null"], "items": schema}
        # One request_id or episode_id for all rows; a state is one row's own.
        many[name] = column if name == "state" else {"anyOf": [schema, column]}
        many[f"{name}s"] = column
    many |= {"action_mask": masks, "action_masks": masks} if num is not None else {}
    return {
        "ActOne": object_of(one, required=("observation",)),
        "ActMany": {
            **object_of(many, required=()),
            "oneOf": [{"required": ["observation"]}, {"required": ["observations"]}],
        },
        "Acted": {"anyOf": [_action_schema(), _actions_schema()]},
    }


def _action_schema() -> Schema:
    text: Schema = {"type": "string"}
    whole: Schema = {"type": "integer"}
    return object_of(
        {
            "policy": text,
            "version": whole,
            "action": ref("Action"),
            "log_prob": _LOG_PROB,
            "decision_id": text,
            "state": text,
            "q_values": {"type": "array", "items": {"type": "number"}},
            "action_name": {"type": ["string", "null"]},
            "unknown_categories": _FIELD_NAMES,
        },
        required=("policy", "version", "action", "log_prob", "decision_id"),
    )


def _actions_schema() -> Schema:
    one = _action_schema()["properties"]
    columns = {f"{name}s": many_of(schema) for name, schema in one.items() if name != "q_values"}
    columns["policies"] = columns.pop("policys")
    columns["unknown_categories"] = columns.pop("unknown_categoriess")
    columns["q_values"] = many_of(one["q_values"])
    columns["states"] = many_of({"type": ["string", "null"]})
    return object_of(
        {"policy": one["policy"], "version": one["version"], **columns},
        required=("actions", "log_probs", "decision_ids"),
    )


def _report_schema() -> Schema:
    report = object_of(
        {
            "decision_id": {"type": ["string", "null"]},
            "request_id": _NAME,
            "episode_id": _NAME,
            "step": _STEP,
            "reward": {"type": "number", **_REWARDS},
            "mode": {"enum": ["last", "sum"], "description": "Replace what was said, or add."},
            "feedback_id": _NAME,
            "terminated": _FLAG,
            "truncated": _FLAG,
            "final_observation": {"anyOf": [ref("Observation"), {"type": "null"}]},
        },
        required=("reward",),
    )
    keys = ("decision_id",), ("request_id",), ("episode_id", "step")
    return {**report, "oneOf": [{"required": list(names)} for names in keys]}


def _episode_schema(spec: PolicySpec, columns_of: DatasetSpec | None) -> Schema:
    num = num_actions(spec.action_space)
    mask: Schema = {"type": "array", "items": {"type": "boolean"}, "minItems": num, "maxItems": num}
    time: Schema = {"type": "integer", "description": "Microseconds since 1970, UTC."}
    log_prob = dict(_LOG_PROB)
    if not isinstance(spec.action_space, Box):
        log_prob["maximum"] = 0
    columns = {"log_probs": log_prob, "timestamps": time}
    if num is not None:
        columns["action_masks"] = mask
    tokens = {} if columns_of is None else _token_schemas(columns_of)
    episode = object_of(
        {
            "episode_id": {**_NAME, "type": "string"},
            "agent_id": {"type": ["string", "null"], "maxLength": MAX_NAME_CHARS},
            "first_step": _STEP,
            "observations": many_of(ref("Observation")),
            "actions": many_of(ref("Action")),
            "rewards": many_of({"type": ["number", "null"], **_REWARDS}),
            "terminated": {**_FLAG, "description": "Whether the last step ended the episode."},
            "truncated": {**_FLAG, "description": "Whether it was cut off after the last step."},
            "final_observation": {"anyOf": [ref("Observation"), {"type": "null"}]},
            "policy": _NAME,
            "policy_version": {"type": ["integer", "null"], "minimum": 0, "maximum": 2**63 - 1},
            **{name: {**many_of(one), "type": ["array", "null"]} for name, one in columns.items()},
            **tokens,
        },
        required=("episode_id", "observations", "actions", "rewards"),
    )
    if columns_of is None or not takes_dialogues(columns_of):
        return episode
    dialogue: Schema = {
        "type": "object",
        "description": "A dialogue, in any form of the format `transcripts`.",
        "properties": {
            "episode_id": {**_NAME, "type": "string"},
            "messages": many_of({"type": "object"}),
            **tokens,
        },
        "required": ["episode_id"],
        "not": {"required": ["observations"]},
    }
    return {"oneOf": [episode, dialogue]}


def _token_schemas(spec: DatasetSpec) -> dict[str, Schema]:
    """Return the schemas of the fields of tokens that a dataset has; one value for each step."""
    return {name: many_of(dict(_TOKEN_COLUMNS[name])) for name in list_token_fields(spec)}


def object_of(properties: Mapping[str, Schema], required: Sequence[str] | None = None) -> Schema:
    schema: Schema = {
        "type": "object",
        "properties": dict(properties),
        "additionalProperties": False,
    }
    names = list(properties) if required is None else list(required)
    return {**schema, "required": names} if names else schema


def many_of(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def drop_null(schema: Schema) -> Schema:
    return {**schema, "type": schema["type"][0]}
