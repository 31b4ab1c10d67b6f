"""JSON rows: values that a quarantine keeps as JSON, back in the types of their columns."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

_NAMED_FLOATS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_column(
    values: Sequence[Any], kind: pa.DataType, flawed: Sequence[bool]
) -> tuple[pa.Array, dict[int, Any]]:
    """Return values as a column, and by their index those that it does not hold, null in it.

    flawed: whether something was wrong with the value: then "NaN" is the text that the log has, and
    else the number.
    """
    misfits: dict[int, Any] = {}
    decoded: list[Any] = []
    for i, value in enumerate(values):
        try:
            decoded.append(_decode(value, kind, is_named=not flawed[i]))
        except _MisfitError:
            misfits[i] = value
            decoded.append(None)
    try:
        return _to_array(decoded, kind), misfits
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        pass
    # One by one: some value is of the kind and beyond its range.
    for i, value in enumerate(decoded):
        try:
            _to_array([value], kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            misfits[i], decoded[i] = values[i], None
    return _to_array(decoded, kind), misfits


class _MisfitError(Exception):
    """A value is of another kind than its column."""


def _to_array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if _is_from_text(kind):
        return pa.array(values, pa.string()).cast(kind)
    return pa.array(values, kind)


def _is_from_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_temporal(kind) or pa.types.is_decimal(kind))


def _decode(value: Any, kind: pa.DataType, *, is_named: bool) -> Any:
    types = pa.types
    if value is None:
        return None
    if types.is_floating(kind):
        if isinstance(value, str) and is_named and value in _NAMED_FLOATS:
            return _NAMED_FLOATS[value]
        return float(_expect(value, int | float))
    if types.is_integer(kind):
        return _expect(value, int)
    if types.is_boolean(kind):
        if not isinstance(value, bool):
            raise _MisfitError
        return value
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        try:
            return base64.b64decode(_expect(_expect(value, dict).get("base64"), str), validate=True)
        except binascii.Error as error:
            raise _MisfitError from error
    if types.is_map(kind):
        key, item = kind.key_type, kind.item_type
        pairs = [_expect(pair, list) for pair in _expect(value, list)]
        return [
            (_decode(k, key, is_named=is_named), _decode(v, item, is_named=is_named))
            for k, v in pairs
        ]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_decode(v, kind.value_type, is_named=is_named) for v in _expect(value, list)]
    if types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        if set(_expect(value, dict)) - {*names}:
            raise _MisfitError
        return {
            name: _decode(value.get(name), kind.field(i).type, is_named=is_named)
            for i, name in enumerate(names)
        }
    return _expect(value, str)


def _expect(value: Any, kind: Any) -> Any:
    """Return a value of a kind; a flag is no number."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _MisfitError
    return value
