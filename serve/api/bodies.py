"""Request bodies: from bytes to fields, and what a field may be, or a refusal that names it.

    application/json      an object
    application/msgpack   a map; an array in it may be a map {dtype, shape, data}
    application/x-npy     the observation as numpy.save writes it; every other field in the query

Nothing here unpickles or unpacks: other types are 415. So are those that a page of any website may
send without a CORS preflight (text/plain and the two of forms), and none at all.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl

import msgpack
import orjson

from replaylake.serve.api.arrays import is_array_map, read_map, read_npy
from replaylake.serve.api.values import invalid_value_error, shorten
from replaylake.serve.messages import JSON, Request, RequestRefusedError

MSGPACK: Final = "application/msgpack"
NPY: Final = "application/x-npy"
MAX_NAME_CHARS: Final = 256
_MSGPACK_TYPES: Final = frozenset({MSGPACK, "application/x-msgpack", "application/vnd.msgpack"})
_MAX_QUERY_FIELDS: Final = 32
# Elements that a list may claim to hold: its room is allocated at once and lists nest a thousand
# deep. Longer ones are sent as arrays.
_MAX_LIST: Final = 65_536


def read_fields(request: Request, in_query: Mapping[str, type] | None = None) -> dict[str, Any]:
    """Read a body's fields by its content type.

    in_query: the fields that the query may have, and their types. With any, a `.npy` body is
    accepted as the field `observation`. Raises: RequestRefusedError.
    """
    kind = request.content_type
    if kind == JSON:
        fields = parse_json(request.body)
    elif kind in _MSGPACK_TYPES:
        fields = parse_msgpack(request.body)
    elif kind == NPY and in_query is not None:
        fields = {"observation": read_npy(request.body)}
    else:
        types = f"{JSON} or {MSGPACK}" if in_query is None else f"{JSON}, {MSGPACK} or {NPY}"
        if not kind:
            raise RequestRefusedError(415, "content-type", f"content-type is missing; send {types}")
        raise RequestRefusedError(415, "content-type", found=shorten(kind), expected=types)
    if request.query and in_query is not None:
        _add_query(fields, request.query, in_query)
    return fields


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the body's JSON object.

    Raises: RequestRefusedError (NaN and Infinity are not JSON; nor may an object have a key twice,
    of which orjson would return the last).
    """
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefusedError(422, "body", f"not valid JSON: {error}") from None
    if type(parsed) is not dict:
        raise invalid_value_error("body", parsed, "a JSON object")
    # A key has a colon behind it: as many colons as keys, and none is there twice.
    num_colons = body.count(b":")
    if num_colons != len(parsed):
        try:
            if num_colons != _count_colons(parsed):
                _refuse_repeated_keys(body)
        except RecursionError:
            raise RequestRefusedError(422, "body", "JSON is nested too deeply") from None
    return parsed


def parse_msgpack(body: bytes) -> dict[str, Any]:
    """Return the body's map, arrays in it made. Raises: RequestRefusedError."""
    try:
        parsed = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            max_array_len=_MAX_LIST,
            object_hook=_hook,
            ext_hook=_refuse_extension,
        )
    except RequestRefusedError:
        raise
    except (ValueError, msgpack.UnpackException, TypeError, MemoryError) as error:
        message = shorten(f"not valid msgpack: {type(error).__name__} {error}")
        raise RequestRefusedError(422, "body", message) from None
    if type(parsed) is not dict:
        raise invalid_value_error("body", parsed, "a msgpack map")
    return parsed


def check_fields(fields: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Refuse a field that is not one of the allowed. Raises: RequestRefusedError."""
    for name in fields:
        if name not in allowed:
            message = f"unknown field; use {', '.join(sorted(allowed))}"
            raise RequestRefusedError(422, shorten(name), message)


def _count_colons(parsed: Any) -> int:
    """Return how many colons the JSON of a value has, or fewer: values like `1.5` are not read.

    A list is looked into if its first item could have colons.
    """
    kind = type(parsed)
    if kind is dict:
        return sum(key.count(":") + 1 + _count_colons(item) for key, item in parsed.items())
    if kind is list:
        has_colons = parsed and type(parsed[0]) in (dict, list, str)
        return sum(map(_count_colons, parsed)) if has_colons else 0
    return parsed.count(":") if kind is str else 0


def _refuse_repeated_keys(body: bytes) -> None:
    def check(pairs: list[tuple[str, Any]]) -> None:
        keys = set()
        for key, _ in pairs:
            if key in keys:
                message = "field is given twice; send it once"
                raise RequestRefusedError(422, shorten(key), message)
            keys.add(key)

    json.loads(body, object_pairs_hook=check)


def optional(fields: Mapping[str, Any], name: str, kind: type, expected: str) -> Any:
    """Return a field of a type, None where it is absent. Raises: RequestRefusedError."""
    value = fields.get(name)
    if value is not None and type(value) is not kind:
        raise invalid_value_error(name, value, expected)
    return value


def check_name(name: Any, place: str) -> None:
    """Refuse what cannot name an episode or a request; None can. Raises: RequestRefusedError."""
    if name is not None and (type(name) is not str or not 0 < len(name) <= MAX_NAME_CHARS):
        raise invalid_value_error(place, name, f"a string of 1 to {MAX_NAME_CHARS} characters")


def _hook(fields: dict[Any, Any]) -> Any:
    """Return a map, or the array that it stands for. Raises: RequestRefusedError.

    If a key is there twice the last value counts, as in JSON: the hook that gets all pairs
    allocates room for as many as the map claims to have, and maps nest a thousand deep.
    """
    for key in fields:
        if type(key) is not str:  # msgpack's own check lets bytes pass
            raise invalid_value_error("body", key, "strings as the keys of a map")
    return read_map(fields) if is_array_map(fields) else fields


def _refuse_extension(code: int, data: bytes) -> Any:
    message = f"msgpack extension type {code} is not supported; send plain values"
    raise RequestRefusedError(422, "body", message)


def _add_query(fields: dict[str, Any], query: bytes, kinds: Mapping[str, type]) -> None:
    """Add what the query says to what the body does. Raises: RequestRefusedError."""
    try:
        pairs = parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=True,
            errors="strict",
            max_num_fields=_MAX_QUERY_FIELDS,
        )
    except ValueError as error:
        message = shorten(f"not a query of name=value&name=value: {error}")
        raise RequestRefusedError(422, "query", message) from None
    for name, text in pairs:
        if name not in kinds:
            message = f"unknown query field; use {', '.join(sorted(kinds))}"
            raise RequestRefusedError(422, shorten(name), message)
        if name in fields:
            message = "field is given twice; send it once, in the body or in the query"
            raise RequestRefusedError(422, name, message)
        fields[name] = _parse_query_value(name, text, kinds[name])


def _parse_query_value(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text not in ("true", "false"):
            raise invalid_value_error(name, text, "true or false")
        return text == "true"
    try:
        return kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise invalid_value_error(name, text, expected) from None
