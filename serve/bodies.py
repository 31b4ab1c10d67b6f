"""Request bodies: JSON in, checked values out, or a refusal that names the field."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
import orjson

from replaylake.datastore.policies.policy import PolicySpec
from replaylake.datastore.spaces import Array, Values, describe, num_actions
from replaylake.serve.exchange import RequestRefused
from replaylake.serve.values import encoded, read_values, shortened, wrong

_MAX_NAME_CHARS: Final = 256
_ACT_FIELDS: Final = {
    "observation": "observations",
    "episode_id": "episode_ids",
    "request_id": "request_ids",
    "action_mask": "action_masks",
}
_FEEDBACK_FIELDS: Final = ("decision_id", "reward", "terminated", "truncated", "final_observation")


@dataclass(frozen=True)
class ActRequest:
    """B observations to act on. Absent ids are None.

    raw: each for the log: as it came, or its vector where it came as named fields.
    """

    is_batch: bool
    observations: Values
    raw: list[Any]
    deterministic: bool | None
    episode_ids: list[str | None]
    request_ids: list[str | None]
    action_mask: Array | None


@dataclass(frozen=True)
class FeedbackRequest:
    """What one decision led to."""

    decision_id: str
    reward: float
    terminated: bool
    truncated: bool
    final_observation: Any


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the body's JSON object. Raises: RequestRefused (NaN and Infinity are not JSON)."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(422, "body", f"no JSON: {error}", "one JSON object") from None
    if type(parsed) is not dict:
        raise wrong("body", parsed, "a JSON object")
    return parsed


def parse_act(body: bytes, spec: PolicySpec, max_batch: int) -> ActRequest:
    """Read the body of POST /act. Raises: RequestRefused."""
    fields = parse_json(body)
    is_batch = "observations" in fields
    if is_batch == ("observation" in fields):
        found = "both" if is_batch else "neither"
        raise RequestRefused(
            422, "observation", found, "either observation (one) or observations (a list)"
        )
    names = {one: many if is_batch else one for one, many in _ACT_FIELDS.items()}
    allowed = {*names.values(), "deterministic", "episode_id", "request_id"}
    _check_fields(fields, allowed)
    raw = fields[names["observation"]]
    if not is_batch:
        raw = [raw]
    elif type(raw) is not list or not raw:
        raise wrong("observations", raw, f"a list of 1 to {max_batch} observations")
    elif len(raw) > max_batch:
        raise RequestRefused(413, "observations", f"{len(raw)}", f"at most {max_batch} a request")
    raw = encoded(spec.encoding, raw, names["observation"], is_batch)
    return ActRequest(
        is_batch=is_batch,
        observations=read_values(spec.observation_space, raw, names["observation"], is_batch),
        raw=raw,
        deterministic=_optional(fields, "deterministic", bool, "true or false"),
        episode_ids=_read_names(fields, "episode_id", len(raw), is_batch),
        request_ids=_read_names(fields, "request_id", len(raw), is_batch),
        action_mask=_read_mask(fields, names["action_mask"], spec, len(raw), is_batch),
    )


def parse_feedback(body: bytes, spec: PolicySpec) -> FeedbackRequest:
    """Read the body of POST /feedback. Raises: RequestRefused."""
    fields = parse_json(body)
    _check_fields(fields, _FEEDBACK_FIELDS)
    for name in ("decision_id", "reward"):
        if name not in fields:
            raise RequestRefused(422, name, "nothing", "a value")
    decision_id, reward = fields["decision_id"], fields["reward"]
    if type(decision_id) is not str:
        raise wrong("decision_id", decision_id, "the decision_id that /act answered")
    if type(reward) not in (int, float) or not math.isfinite(reward):
        raise wrong("reward", reward, "a finite number")
    final = fields.get("final_observation")
    if final is not None:
        (final,) = encoded(spec.encoding, [final], "final_observation", False)
        read_values(spec.observation_space, [final], "final_observation", False)
    return FeedbackRequest(
        decision_id=decision_id,
        reward=float(reward),
        terminated=bool(_optional(fields, "terminated", bool, "true or false")),
        truncated=bool(_optional(fields, "truncated", bool, "true or false")),
        final_observation=final,
    )


def _read_names(fields: Mapping[str, Any], one: str, num: int, is_batch: bool) -> list[str | None]:
    many = _ACT_FIELDS[one]
    if is_batch and many in fields:
        names = fields[many]
        if one in fields:
            raise RequestRefused(422, many, f"both {one} and {many}", "one of them")
        if type(names) is not list or len(names) != num:
            raise wrong(many, names, f"a list of {num}, one for each observation")
        for i, name in enumerate(names):
            _check_name(name, f"{many}[{i}]")
        return names
    name = fields.get(one)
    _check_name(name, one)
    if one == "request_id" and is_batch and name is not None:
        return [f"{name}/{row}" for row in range(num)]  # of rows of one name only one is a step
    return [name] * num


def _check_name(name: Any, place: str) -> None:
    if name is not None and (type(name) is not str or not 0 < len(name) <= _MAX_NAME_CHARS):
        raise wrong(place, name, f"a string of 1 to {_MAX_NAME_CHARS} characters")


def _read_mask(
    fields: Mapping[str, Any], field: str, spec: PolicySpec, num: int, is_batch: bool
) -> Array | None:
    raw = fields.get(field)
    if raw is None:
        return None
    num_allowed = num_actions(spec.action_space)
    if num_allowed is None:
        raise wrong(field, raw, f"nothing, because actions are {describe(spec.action_space)}")
    rows = raw if is_batch else [raw]
    if type(rows) is not list or len(rows) != num:
        raise wrong(field, raw, f"a list of {num} masks, one for each observation")
    for i, row in enumerate(rows):
        place = f"{field}[{i}]" if is_batch else field
        if type(row) is not list or len(row) != num_allowed or set(map(type, row)) != {bool}:
            raise wrong(place, row, f"{num_allowed} booleans")
        if not any(row):
            raise wrong(place, row, "at least one allowed action")
    return np.fromiter(chain.from_iterable(rows), bool, num * num_allowed).reshape(num, -1)


def _check_fields(fields: Mapping[str, Any], allowed: Iterable[str]) -> None:
    if not fields.keys() <= set(allowed):
        name = min(fields.keys() - set(allowed))
        raise RequestRefused(
            422, shortened(name), "an unknown field", f"only {', '.join(sorted(allowed))}"
        )


def _optional(fields: Mapping[str, Any], name: str, kind: type, expected: str) -> Any:
    value = fields.get(name)
    if value is not None and type(value) is not kind:
        raise wrong(name, value, expected)
    return value
