"""The schemas of what is sent and answered, with a policy's own spaces, for /docs.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from replaylake.datastore.episodes.episode import MAX_STEP
from replaylake.datastore.episodes.spaces import Box, describe, num_actions
from replaylake.datastore.feedback.reports import MAX_REWARD
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.api.bodies import MAX_NAME_CHARS
from replaylake.serve.api.json_schema import Schema, observation_schema, schema_of

_NAME: Final[Schema] = {
    "type": ["string", "null"],
    "minLength": 1,
    "maxLength": MAX_NAME_CHARS,
}
_STEP: Final[Schema] = {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_STEP}
_REWARDS: Final[Schema] = {"minimum": -MAX_REWARD, "maximum": MAX_REWARD}
_FLAG: Final[Schema] = {"type": ["boolean", "null"]}
_TOKEN: Final[Schema] = {"type": ["string", "null"], "minLength": 1}
_LOG_PROB: Final[Schema] = {
    "type": ["number", "null"],
    "description": "ln of the probability (density) of the action; null if there is none.",
}
OPTIONS: Final[Mapping[str, Schema]] = {
    "deterministic": {**_FLAG, "description": "The mode instead of a draw."},
    "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 1e6},
    "epsilon": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
    "seed": {"type": ["integer", "null"], "minimum": 0, "maximum": 2**63 - 1},
    "q_values": {**_FLAG, "description": "Answer the q-values as well."},
}
IN_QUERY: Final[Mapping[str, Schema]] = {
    **OPTIONS,
    "episode_id": _NAME,
    "request_id": _NAME,
    "step": _STEP,
    "state": _TOKEN,
}


def schemas_of(spec: PolicySpec) -> dict[str, Schema]:
    text: Schema = {"type": "string"}
    error = object_of({"field": text, "found": text, "expected": text})
    return {
        "Observation": observation_schema(spec.observation_space, spec.encoding),
        "Action": {
            **schema_of(spec.action_space),
            "description": f"{describe(spec.action_space)}, of the head {spec.head}",
        },
        **_actschemas_of(spec),
        "Report": _report(),
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
        "Episode": _episode(spec),
        "Policy": {
            "type": "object",
            "required": ["policy", "version", "observation_space", "action_space", "head"],
        },
        "Alive": object_of({"alive": {"type": "boolean"}}),
        "Ready": object_of({"ready": {"type": "boolean"}}),
        "Document": {"type": "object", "required": ["openapi", "paths"]},
        "Error": object_of({"error": error}),
    }


def _actschemas_of(spec: PolicySpec) -> dict[str, Schema]:
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
    one = {"observation": observation, **OPTIONS, **rows, "action_mask": mask}
    many: dict[str, Schema] = {
        "observation": many_of(observation),
        "observations": many_of(observation),
        **OPTIONS,
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
        "Acted": {"anyOf": [_acted_one(), _actedmany_of()]},
    }


def _acted_one() -> Schema:
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
        },
        required=("policy", "version", "action", "log_prob", "decision_id"),
    )


def _actedmany_of() -> Schema:
    one = _acted_one()["properties"]
    columns = {f"{name}s": many_of(schema) for name, schema in one.items() if name != "q_values"}
    columns["policies"] = columns.pop("policys")
    columns["q_values"] = many_of(one["q_values"])
    columns["states"] = many_of({"type": ["string", "null"]})
    return object_of(
        {"policy": one["policy"], "version": one["version"], **columns},
        required=("actions", "log_probs", "decision_ids"),
    )


def _report() -> Schema:
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
    named = ("decision_id",), ("request_id",), ("episode_id", "step")
    return {**report, "oneOf": [{"required": list(names)} for names in named]}


def _episode(spec: PolicySpec) -> Schema:
    num = num_actions(spec.action_space)
    mask: Schema = {"type": "array", "items": {"type": "boolean"}, "minItems": num, "maxItems": num}
    time: Schema = {"type": "integer", "description": "Microseconds since 1970, UTC."}
    log_prob = dict(_LOG_PROB)
    if not isinstance(spec.action_space, Box):
        log_prob["maximum"] = 0
    columns = {"log_probs": log_prob, "timestamps": time}
    if num is not None:
        columns["action_masks"] = mask
    return object_of(
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
        },
        required=("episode_id", "observations", "actions", "rewards"),
    )


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


def without_null(schema: Schema) -> Schema:
    return {**schema, "type": schema["type"][0]}
