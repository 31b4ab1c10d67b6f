"""Request bodies: JSON in, checked values out, or a refusal that names the field.

Nothing is reshaped, rounded to an integer, or guessed. A number is a JSON number, never a boolean
or a string; integers are fine where the space holds floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
import orjson

from replaylake.datastore.encoding import Encoding
from replaylake.datastore.errors import EpisodeInvalid
from replaylake.datastore.policies.policy import PolicySpec
from replaylake.datastore.spaces import (
    Array,
    Box,
    Dict,
    Space,
    Text,
    Tuple,
    Values,
    as_values,
    bounds,
    describe,
    gather,
    num_actions,
    value_dtype,
    value_shape,
)

_MAX_NAME_CHARS: Final = 256
_ACT_FIELDS: Final = {
    "observation": "observations",
    "episode_id": "episode_ids",
    "request_id": "request_ids",
    "action_mask": "action_masks",
}
_KINDS: Final[dict[str, set[type]]] = {"f": {int, float}, "i": {int}, "u": {int}, "b": {bool}}
_FEEDBACK_FIELDS: Final = ("decision_id", "reward", "terminated", "truncated", "final_observation")


class RequestRefused(Exception):
    """A request that gets an error status; `serve/app.py` alone turns it into a response."""

    def __init__(self, status: int, field: str, found: str, expected: str) -> None:
        super().__init__(f"{field}: found {found}, expected {expected}")
        self.status, self.field, self.found, self.expected = status, field, found, expected


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
        raise _wrong("body", parsed, "a JSON object")
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
        raise _wrong("observations", raw, f"a list of 1 to {max_batch} observations")
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
        raise _wrong("decision_id", decision_id, "the decision_id that /act answered")
    if type(reward) not in (int, float) or not math.isfinite(reward):
        raise _wrong("reward", reward, "a finite number")
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


def encoded(encoding: Encoding | None, raw: list[Any], field: str, is_batch: bool) -> list[Any]:
    """Return observations with the vectors of those that came as named fields.

    Raises: RequestRefused naming the field that is unknown, absent or of the wrong type.
    """
    if encoding is None or not encoding.fields or dict not in set(map(type, raw)):
        return raw
    vectors = []
    for i, value in enumerate(raw):
        if type(value) is not dict:
            vectors.append(value)
            continue
        place = f"{field}[{i}]" if is_batch else field
        if (fault := encoding.find_fault(value)) is not None:
            name, found, expected = fault
            said = "nothing" if found is None else _found(found)
            raise RequestRefused(422, _short(f"{place}.{name}"), said, _short(expected))
        vectors.append(encoding.encode_one(value).tolist())
    return vectors


def read_values(space: Space, raw: list[Any], field: str, is_batch: bool) -> Values:
    """Read JSON values of the space. Raises: RequestRefused with the place of the first fault."""
    places = [f"{field}[{i}]" for i in range(len(raw))] if is_batch else [field]
    for value, place in zip(raw, places, strict=True):
        _check_value(space, value, place)
    try:
        return as_values(space, gather(space, raw), field, len(raw))
    except EpisodeInvalid as error:
        for value, place in zip(raw, places, strict=True):
            _find_loss(space, value, place)
        raise RequestRefused(422, field, _short(str(error)), describe(space)) from None


def _find_loss(space: Space, value: Any, place: str) -> None:
    """Refuse the leaf whose numbers do not fit its dtype, such as 1e39 or 256 in uint8."""
    if isinstance(space, Dict):
        for key, sub in space.spaces.items():
            _find_loss(sub, value[key], f"{place}.{key}")
    elif isinstance(space, Tuple):
        for i, sub in enumerate(space.spaces):
            _find_loss(sub, value[i], f"{place}[{i}]")
    else:
        try:
            as_values(space, gather(space, [value]), place, 1)
        except EpisodeInvalid:
            found = _short(orjson.dumps(value).decode())
            raise RequestRefused(
                422, place, found, f"numbers that {describe(space)} holds"
            ) from None


def _check_value(space: Space, value: Any, place: str) -> None:
    if isinstance(space, Dict):
        if type(value) is not dict or value.keys() != space.spaces.keys():
            found = sorted(value) if type(value) is dict else value
            raise _wrong(place, found, f"an object with the keys {sorted(space.spaces)}")
        for key, sub in space.spaces.items():
            _check_value(sub, value[key], f"{place}.{key}")
    elif isinstance(space, Tuple):
        if type(value) is not list or len(value) != len(space.spaces):
            raise _wrong(place, value, f"a list of {len(space.spaces)} values")
        for i, sub in enumerate(space.spaces):
            _check_value(sub, value[i], f"{place}[{i}]")
    elif isinstance(space, Text):
        if type(value) is not str:
            raise _wrong(place, value, "a string")
    else:
        kinds = _KINDS[value_dtype(space).kind]
        _check_numbers(value, value_shape(space), kinds, place, describe(space))
        if not isinstance(space, Box):
            _check_range(space, value, place)


def _check_numbers(
    value: Any, shape: tuple[int, ...], kinds: set[type], place: str, expected: str
) -> None:
    """Check nested lists level by level; the innermost one in bulk, since it holds the numbers."""
    if not shape:
        if type(value) not in kinds:
            raise _wrong(place, value, expected)
        return
    if type(value) is not list or len(value) != shape[0]:
        raise _wrong(place, value, f"{expected}, here a list of {shape[0]}")
    if len(shape) > 1:
        for i, sub in enumerate(value):
            _check_numbers(sub, shape[1:], kinds, f"{place}[{i}]", expected)
    elif not kinds.issuperset(map(type, value)):
        i = next(i for i, element in enumerate(value) if type(element) not in kinds)
        raise _wrong(f"{place}[{i}]", value[i], expected)


def _check_range(space: Space, value: Any, place: str) -> None:
    """Refuse a number that a discrete space lacks: a network would index past its table."""
    low, high = bounds(space)  # type: ignore[arg-type]
    flat = value if type(value) is list else [value]
    if any(not -(2**63) <= element < 2**63 for element in flat) or np.any(
        (np.asarray(value) < low) | (np.asarray(value) > high)
    ):
        raise _wrong(place, value, describe(space))


def _read_names(fields: Mapping[str, Any], one: str, num: int, is_batch: bool) -> list[str | None]:
    many = _ACT_FIELDS[one]
    if is_batch and many in fields:
        names = fields[many]
        if one in fields:
            raise RequestRefused(422, many, f"both {one} and {many}", "one of them")
        if type(names) is not list or len(names) != num:
            raise _wrong(many, names, f"a list of {num}, one for each observation")
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
        raise _wrong(place, name, f"a string of 1 to {_MAX_NAME_CHARS} characters")


def _read_mask(
    fields: Mapping[str, Any], field: str, spec: PolicySpec, num: int, is_batch: bool
) -> Array | None:
    raw = fields.get(field)
    if raw is None:
        return None
    num_allowed = num_actions(spec.action_space)
    if num_allowed is None:
        raise _wrong(field, raw, f"nothing, because actions are {describe(spec.action_space)}")
    rows = raw if is_batch else [raw]
    if type(rows) is not list or len(rows) != num:
        raise _wrong(field, raw, f"a list of {num} masks, one for each observation")
    for i, row in enumerate(rows):
        place = f"{field}[{i}]" if is_batch else field
        if type(row) is not list or len(row) != num_allowed or set(map(type, row)) != {bool}:
            raise _wrong(place, row, f"{num_allowed} booleans")
        if not any(row):
            raise _wrong(place, row, "at least one allowed action")
    return np.fromiter(chain.from_iterable(rows), bool, num * num_allowed).reshape(num, -1)


def _check_fields(fields: Mapping[str, Any], allowed: Iterable[str]) -> None:
    if not fields.keys() <= set(allowed):
        name = min(fields.keys() - set(allowed))
        raise RequestRefused(
            422, _short(name), "an unknown field", f"only {', '.join(sorted(allowed))}"
        )


def _optional(fields: Mapping[str, Any], name: str, kind: type, expected: str) -> Any:
    value = fields.get(name)
    if value is not None and type(value) is not kind:
        raise _wrong(name, value, expected)
    return value


def _wrong(field: str, value: Any, expected: str) -> RequestRefused:
    return RequestRefused(422, field, _found(value), expected)


def _found(value: Any) -> str:
    """Describe a value without echoing more than a little of it."""
    if type(value) is list:
        return f"a list of {len(value)}"
    if type(value) is dict:
        return f"an object of {len(value)} fields"
    return _short(orjson.dumps(value).decode() if not isinstance(value, float) else repr(value))


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."
