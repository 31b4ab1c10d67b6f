"""JSON Schema (2020-12) of the values of a space, and an example of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from replaylake.datastore.episodes.encoding import CATEGORY, FLAG, NUMBER, TIME, Encoding, Field
from replaylake.datastore.episodes.spaces import (
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
    describe,
)

Schema = dict[str, Any]


def schema_of(space: Space) -> Schema:
    """Return what JSON values of a space look like.

    A Box's bounds are left out, as the server takes what overshoots them; its dtype's are in.
    """
    if isinstance(space, Dict):
        parts = {key: schema_of(sub) for key, sub in space.spaces.items()}
        return {
            "type": "object",
            "properties": parts,
            "required": list(parts),
            "additionalProperties": False,
        }
    if isinstance(space, Tuple):
        return _row([schema_of(sub) for sub in space.spaces])
    if isinstance(space, Text):
        return {"type": "string"}
    if isinstance(space, Discrete):
        return _whole(space.start, space.start + space.n - 1)
    if isinstance(space, MultiDiscrete):
        return _row([_whole(0, int(num) - 1) for num in space.nvec])
    if isinstance(space, MultiBinary):
        return _list(_whole(0, 1), space.n)
    schema = _number(np.dtype(space.dtype))
    for size in reversed(space.shape):
        schema = _list(schema, size)
    return {**schema, "description": describe(space)}


def observation_schema(space: Space, encoding: Encoding | None) -> Schema:
    """Return that of an observation: a value of the space, or named fields where there are some."""
    vector = schema_of(space)
    if encoding is None or not encoding.fields:
        return vector
    fields = {one.name: _of_field(one) for one in encoding.fields}
    by_name = {
        "type": "object",
        "properties": fields,
        "required": [one.name for one in encoding.fields if one.fill is None],
        "additionalProperties": False,
    }
    return {"anyOf": [by_name, vector]}


def example_of(space: Space) -> Any:
    """Return a JSON value of a space: zeros, as far as it has them."""
    if isinstance(space, Dict):
        return {key: example_of(sub) for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return [example_of(sub) for sub in space.spaces]
    if isinstance(space, Text):
        return ""
    if isinstance(space, Discrete):
        return int(space.start)
    if isinstance(space, MultiDiscrete):
        return [0] * len(space.nvec)
    if isinstance(space, MultiBinary):
        return [0] * space.n
    return np.zeros(space.shape, space.dtype).tolist()


def example_of_fields(fields: Sequence[Field]) -> dict[str, Any]:
    """Return JSON values of named fields: zeros, and the first value of each vocabulary."""
    kinds: dict[str, Any] = {NUMBER: 0, FLAG: False, TIME: "2026-01-31T12:00:00Z"}
    return {
        one.name: (one.vocabulary[0] if one.vocabulary else "")
        if one.kind == CATEGORY
        else kinds[one.kind]
        for one in fields
    }


def _number(dtype: np.dtype[Any]) -> Schema:
    if dtype.kind == "b":
        return {"type": "boolean"}
    if dtype.kind == "f":
        limits = np.finfo(dtype)
        return {"type": "number", "minimum": float(limits.min), "maximum": float(limits.max)}
    bounds = np.iinfo(dtype)
    return _whole(int(bounds.min), int(bounds.max))


def _whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": int(low), "maximum": int(high)}


def _list(items: Schema, num: int) -> Schema:
    return {"type": "array", "items": items, "minItems": num, "maxItems": num}


def _row(parts: list[Schema]) -> Schema:
    num = len(parts)
    if all(part == parts[0] for part in parts):
        return _list(parts[0], num)
    return {"type": "array", "prefixItems": parts, "minItems": num, "maxItems": num}


def _of_field(one: Field) -> Schema:
    kinds: dict[str, Schema] = {
        NUMBER: _number(np.dtype(np.float32)),
        FLAG: {"type": "boolean"},
        CATEGORY: {"type": "string", "description": f"one of {len(one.vocabulary)}, or other"},
        TIME: {"type": "string", "format": "date-time"},
    }
    schema = dict(kinds[one.kind])
    if one.kind == CATEGORY:
        schema["examples"] = list(one.vocabulary[:3])
    if one.fill is None:
        return schema
    return {"anyOf": [schema, {"type": "null"}], "default": one.fill}
