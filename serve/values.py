"""Values of a space out of plain JSON ones, or a refusal that names the place.

Nothing is reshaped, rounded to an integer, or guessed. A number is a JSON number, never a boolean
or a string; integers are fine where the space holds floats.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import orjson

from replaylake.datastore.encoding import Encoding
from replaylake.datastore.errors import EpisodeInvalid
from replaylake.datastore.spaces import (
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
    value_dtype,
    value_shape,
)
from replaylake.serve.exchange import RequestRefused

_KINDS: Final[dict[str, set[type]]] = {"f": {int, float}, "i": {int}, "u": {int}, "b": {bool}}


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
            said = "nothing" if found is None else found_as(found)
            raise RequestRefused(422, shortened(f"{place}.{name}"), said, shortened(expected))
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
        raise RequestRefused(422, field, shortened(str(error)), describe(space)) from None


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
            found = shortened(orjson.dumps(value).decode())
            raise RequestRefused(
                422, place, found, f"numbers that {describe(space)} holds"
            ) from None


def _check_value(space: Space, value: Any, place: str) -> None:
    if isinstance(space, Dict):
        if type(value) is not dict or value.keys() != space.spaces.keys():
            found = sorted(value) if type(value) is dict else value
            raise wrong(place, found, f"an object with the keys {sorted(space.spaces)}")
        for key, sub in space.spaces.items():
            _check_value(sub, value[key], f"{place}.{key}")
    elif isinstance(space, Tuple):
        if type(value) is not list or len(value) != len(space.spaces):
            raise wrong(place, value, f"a list of {len(space.spaces)} values")
        for i, sub in enumerate(space.spaces):
            _check_value(sub, value[i], f"{place}[{i}]")
    elif isinstance(space, Text):
        if type(value) is not str:
            raise wrong(place, value, "a string")
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
            raise wrong(place, value, expected)
        return
    if type(value) is not list or len(value) != shape[0]:
        raise wrong(place, value, f"{expected}, here a list of {shape[0]}")
    if len(shape) > 1:
        for i, sub in enumerate(value):
            _check_numbers(sub, shape[1:], kinds, f"{place}[{i}]", expected)
    elif not kinds.issuperset(map(type, value)):
        i = next(i for i, element in enumerate(value) if type(element) not in kinds)
        raise wrong(f"{place}[{i}]", value[i], expected)


def _check_range(space: Space, value: Any, place: str) -> None:
    """Refuse a number that a discrete space lacks: a network would index past its table."""
    low, high = bounds(space)  # type: ignore[arg-type]
    flat = value if type(value) is list else [value]
    if any(not -(2**63) <= element < 2**63 for element in flat) or np.any(
        (np.asarray(value) < low) | (np.asarray(value) > high)
    ):
        raise wrong(place, value, describe(space))


def wrong(field: str, value: Any, expected: str) -> RequestRefused:
    return RequestRefused(422, field, found_as(value), expected)


def found_as(value: Any) -> str:
    """Describe a value without echoing more than a little of it."""
    if type(value) is list:
        return f"a list of {len(value)}"
    if type(value) is dict:
        return f"an object of {len(value)} fields"
    return shortened(orjson.dumps(value).decode() if not isinstance(value, float) else repr(value))


def shortened(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."
