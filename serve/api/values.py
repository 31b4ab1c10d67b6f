"""Values of a space out of plain ones (JSON, msgpack), or a refusal that names the place.

Nothing is reshaped, rounded to an integer, or guessed. A number is a number, never a boolean or a
string; integers are fine where the space holds floats. Arrays may stand where lists of numbers do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import orjson

from replaylake.datastore.episodes.encoding import Encoding
from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Dict,
    Leaf,
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
from replaylake.datastore.errors import EpisodeInvalidError
from replaylake.serve.messages import RequestRefusedError

_FEW: Final = 32
_MAX_FLOAT32: Final = float(np.finfo(np.float32).max)
_KINDS: Final[dict[str, set[type]]] = {"f": {int, float}, "i": {int}, "u": {int}, "b": {bool}}
# What the numbers of an array may be; they are cast where that is exact.
_ARRAY_KINDS: Final = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}
# Widest of their kind: from these a cast tells what it would change.
_WIDE: Final = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}


def num_dims(space: Space) -> int:
    """Return how many lists lie around the first number or name of one value."""
    if isinstance(space, Dict | Text):
        return 0
    if isinstance(space, Tuple):
        return 1 + num_dims(space.spaces[0])
    return len(value_shape(space))


def depth_of(value: Any, of_object: int) -> int:
    """Return how many lists lie around the first of value's elements; an object counts as given."""
    depth = 0
    while type(value) is list and value:
        value, depth = value[0], depth + 1
    if type(value) is np.ndarray:
        return depth + value.ndim
    return depth + (of_object if type(value) is dict else type(value) is list)


def encode_observations(encoding: Encoding | None, raw: Any, field: str, is_batch: bool) -> Any:
    """Return observations with the vectors of those that came as named fields.

    Raises: RequestRefusedError naming the field that is unknown, absent or of the wrong type.
    """
    if encoding is None or not encoding.fields or dict not in set(map(type, raw)):
        return raw
    vectors = []
    for i, value in enumerate(raw):
        if type(value) is not dict:
            vectors.append(value)
            continue
        place = f"{field}[{i}]" if is_batch else field
        if (fault := encoding.find_mismatch(value)) is not None:
            name, found, expected = fault
            is_known = any(name == one.name for one in encoding.fields)
            name, expected = shorten(f"{place}.{name}"), shorten(expected)
            if found is None or not is_known:
                cause = "required field is missing" if is_known else "unknown field"
                raise RequestRefusedError(422, name, f"{cause}; send {expected}")
            raise invalid_value_error(name, found, expected)
        vectors.append(encoding.encode_one(value).tolist())
    return vectors


def read_values(space: Space, raw: Any, field: str, is_batch: bool) -> Values:
    """Read values of the space, one an element of raw: a list, or an array [B, *shape].

    Raises: RequestRefusedError at the first fault. Cost: 3 us for four numbers, 0.1 us a number.
    """
    values = _read(space, raw)
    if values is not None:
        return values
    places = [f"{field}[{i}]" for i in range(len(raw))] if is_batch else [field]
    for value, place in zip(raw, places, strict=True):
        _check_value(space, value, place)
    try:
        return as_values(space, gather(space, raw), field, len(raw))
    except EpisodeInvalidError as error:
        for value, place in zip(raw, places, strict=True):
            _check_lossless(space, value, place)
        message = f"{shorten(str(error))} The space is {describe(space)}."
        raise RequestRefusedError(422, field, message) from None


def _read(space: Space, raw: Any) -> Values | None:
    """Read values without a word on what is wrong with them: None, and the slow way says it."""
    if type(raw) is list and type(space) is Box and type(raw[0]) is list:
        return _read_lists(space, raw)  # the usual one
    if isinstance(space, Dict):
        if set(map(type, raw)) != {dict} or any(one.keys() != space.spaces.keys() for one in raw):
            return None
        return _read_parts(
            {key: (sub, [one[key] for one in raw]) for key, sub in space.spaces.items()}
        )
    if isinstance(space, Tuple):
        if set(map(type, raw)) != {list} or set(map(len, raw)) != {len(space.spaces)}:
            return None
        columns = zip(space.spaces, zip(*raw, strict=True), strict=True)
        return _read_parts({f"_{i}": (sub, column) for i, (sub, column) in enumerate(columns)})
    if isinstance(space, Text):
        return np.array(raw, object) if set(map(type, raw)) == {str} else None
    if type(raw) is np.ndarray:
        return _read_array(space, raw)
    if type(raw[0]) is np.ndarray:
        if any(type(one) is not np.ndarray or one.shape != raw[0].shape for one in raw):
            return None
        return _read_array(space, np.stack(raw))
    return _read_lists(space, raw)


def _read_parts(parts: Mapping[str, tuple[Space, Sequence[Any]]]) -> Values | None:
    values = {key: _read(sub, column) for key, (sub, column) in parts.items()}
    return None if any(part is None for part in values.values()) else values


def _read_lists(space: Leaf, raw: Sequence[Any]) -> Array | None:
    """Check nested lists a level at a time, all rows at once."""
    if type(space) is Box and space.dtype == "float32" and len(raw) == len(space.shape) == 1:
        quick = _read_few(space.shape[0], raw[0])
        if quick is not None:
            return quick
    shape, dtype = value_shape(space), value_dtype(space)
    level: Any = raw
    for size in shape:
        if set(map(type, level)) != {list} or set(map(len, level)) != {size}:
            return None
        level = level[0] if len(level) == 1 else list(chain.from_iterable(level))
    if not _KINDS[dtype.kind].issuperset(map(type, level)):
        return None
    try:
        wide: Array = np.array(level, _WIDE[dtype.kind])
    except OverflowError:
        return None
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            cast = wide.astype(dtype)
        fits = np.isfinite(cast)
    else:
        cast = wide.astype(dtype)
        fits = cast == wide
    if not np.logical_and.reduce(fits):
        return None
    return _in_range(space, cast.reshape(len(raw), *shape))


def _read_few(size: int, row: Any) -> Array | None:
    """Read one vector of a few numbers as float32 [1, size], without numpy's checks (5 us).

    None where it has to be looked at more closely.
    """
    if type(row) is not list or len(row) != size or size > _FEW:
        return None
    for number in row:
        if type(number) is not float and type(number) is not int:
            return None
        if not -_MAX_FLOAT32 <= number <= _MAX_FLOAT32:  # NaN is not, either
            return None
    return np.array([row], np.float64).astype(np.float32)


def _read_array(space: Leaf, array: Array) -> Array | None:
    if array.shape[1:] != value_shape(space):
        return None
    if array.dtype.kind not in _ARRAY_KINDS[value_dtype(space).kind]:
        return None
    try:
        return _in_range(space, as_values(space, array, "values"))  # type: ignore[arg-type]
    except EpisodeInvalidError:
        return None


def _in_range(space: Leaf, array: Array) -> Array | None:
    """Return the array unless a discrete space lacks one of its numbers."""
    if isinstance(space, Box):
        return array  # what a Box says of its bounds is often only what one log held
    low, high = bounds(space)
    return array if ((array >= low) & (array <= high)).all() else None


def _check_lossless(space: Space, value: Any, place: str) -> None:
    """Refuse the leaf whose numbers do not fit its dtype, such as 1e39 or 256 in uint8."""
    if isinstance(space, Dict):
        for key, sub in space.spaces.items():
            _check_lossless(sub, value[key], f"{place}.{key}")
    elif isinstance(space, Tuple):
        for i, sub in enumerate(space.spaces):
            _check_lossless(sub, value[i], f"{place}[{i}]")
    else:
        try:
            as_values(space, gather(space, [value]), place, 1)
        except EpisodeInvalidError:
            expected = f"numbers within the dtype of {describe(space)}"
            raise RequestRefusedError(
                422, place, found=_as_text(value), expected=expected
            ) from None


def _check_value(space: Space, value: Any, place: str) -> None:
    if isinstance(space, Dict):
        if type(value) is not dict or value.keys() != space.spaces.keys():
            found = sorted(value) if type(value) is dict else value
            raise invalid_value_error(
                place, found, f"an object with the keys {sorted(space.spaces)}"
            )
        for key, sub in space.spaces.items():
            _check_value(sub, value[key], f"{place}.{key}")
    elif isinstance(space, Tuple):
        if type(value) is not list or len(value) != len(space.spaces):
            raise invalid_value_error(place, value, f"a list of {len(space.spaces)} values")
        for i, sub in enumerate(space.spaces):
            _check_value(sub, value[i], f"{place}[{i}]")
    elif isinstance(space, Text):
        if type(value) is not str:
            raise invalid_value_error(place, value, "a string")
    elif type(value) is np.ndarray:
        _check_array(space, value, place)
    else:
        kinds = _KINDS[value_dtype(space).kind]
        _check_numbers(value, value_shape(space), kinds, place, describe(space))
        if not isinstance(space, Box):
            _check_range(space, value, place)


def _check_array(space: Leaf, array: Array, place: str) -> None:
    if array.shape != value_shape(space):
        raise invalid_value_error(place, array, describe(space))
    if array.dtype.kind not in _ARRAY_KINDS[value_dtype(space).kind]:
        expected = f"{describe(space)}, or a dtype that it represents exactly"
        raise invalid_value_error(place, array, expected)
    if not isinstance(space, Box):
        _check_range(space, array.tolist(), place)


def _check_numbers(
    value: Any, shape: tuple[int, ...], kinds: set[type], place: str, expected: str
) -> None:
    """Check nested lists level by level; the innermost one in bulk, since it holds the numbers."""
    if not shape:
        if type(value) not in kinds:
            raise invalid_value_error(place, value, expected)
        return
    if type(value) is not list or len(value) != shape[0]:
        raise invalid_value_error(place, value, f"a list of {shape[0]}, as in {expected}")
    if len(shape) > 1:
        for i, sub in enumerate(value):
            _check_numbers(sub, shape[1:], kinds, f"{place}[{i}]", expected)
    elif not kinds.issuperset(map(type, value)):
        i = next(i for i, element in enumerate(value) if type(element) not in kinds)
        raise invalid_value_error(f"{place}[{i}]", value[i], expected)


def _check_range(space: Space, value: Any, place: str) -> None:
    """Refuse a number that a discrete space lacks: a network would index past its table."""
    low, high = bounds(space)  # type: ignore[arg-type]
    flat = value if type(value) is list else [value]
    if any(not -(2**63) <= element < 2**63 for element in flat) or np.any(
        (np.asarray(value) < low) | (np.asarray(value) > high)
    ):
        raise invalid_value_error(place, value, describe(space))


def invalid_value_error(field: str, value: Any, expected: str) -> RequestRefusedError:
    """Return a refusal (422) of a value."""
    return RequestRefusedError(422, field, found=describe_value(value), expected=expected)


def describe_value(value: Any) -> str:
    """Describe a value without echoing more than a little of it."""
    if type(value) is list:
        return f"a list of {len(value)}"
    if type(value) is dict:
        return f"an object of {len(value)} fields"
    if type(value) is np.ndarray:
        return f"an array {value.dtype.name}{list(value.shape)}"
    if type(value) is bytes:
        return f"{len(value)} bytes"
    return _as_text(value)


def _as_text(value: Any) -> str:
    if type(value) is float:
        return repr(value)  # JSON has no NaN
    try:
        return shorten(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode())
    except TypeError:  # what msgpack has and JSON has not
        return shorten(repr(value))


def shorten(text: str) -> str:
    """Cut a text to 120 characters."""
    return text if len(text) <= 120 else f"{text[:117]}..."
