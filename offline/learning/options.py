"""Options: a flat mapping of keys, from TOML or `--set`, checked into a frozen dataclass."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from replaylake.datastore.errors import ConfigInvalidError

T = TypeVar("T")


def from_options(config: type[T], options: Mapping[str, Any], what: str) -> T:
    """Build a dataclass from options; what is not given keeps its default.

    Args:
        config: a dataclass whose fields are int, float, bool, str, Literal, a sequence or X | None.
        options: values by field name; an int may stand for a float, a list for a sequence.
        what: whose options these are, for error messages, such as `algorithm bc`.

    Raises: ConfigInvalidError for an unknown key (with the near matches) or a value of another
    type.
    """
    hints = get_type_hints(config)
    check_keys(options, hints, what)
    return config(
        **{key: cast(hints[key], value, f"{what}: {key}") for key, value in options.items()}
    )


def to_options(config: Any) -> dict[str, Any]:
    """Return every field of a dataclass as JSON has it: tuples are lists."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def check_keys(
    options: Mapping[str, Any], known: Iterable[str], what: str, others: Iterable[str] = ()
) -> None:
    """Refuse unknown keys. Raises: ConfigInvalidError with the near matches, or all that there are.

    `others` are keys that belong elsewhere, and are named where one resembles an unknown key.
    """
    known = sorted(known)
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, [*known, *others], n=3, cutoff=0.6)
            raise ConfigInvalidError(
                f"{what}: found option {key!r}, expected "
                f"{' or '.join(near) if near else 'one of ' + ', '.join(known)}. "
                "Correct the spelling or leave it out."
            )


def near_matches(name: str, known: Iterable[str]) -> str:
    """Return `a or b` for the names closest to this one, else `one of a, b, ...`: all of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return " or ".join(near) if near else f"one of {', '.join(known)}"


def expect(condition: bool, what: str, value: Any, expected: str) -> None:
    """Refuse a value out of range; for a config's __post_init__.

    what: whose value it is, and the field, as in `training: updates`.
    Raises: ConfigInvalidError.
    """
    if not condition:
        raise ConfigInvalidError(
            f"{what}: found {value!r}, expected {expected}.", parameter=what.rpartition(": ")[2]
        )


def cast(kind: Any, value: Any, what: str) -> Any:
    """Return the value as this type, where that changes nothing. Raises: ConfigInvalidError."""
    origin = get_origin(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        kinds = [part for part in get_args(kind) if part is not type(None)]
        return cast(kinds[0], value, what)
    if origin is Literal:
        expect(
            value in get_args(kind), what, value, f"one of {', '.join(map(str, get_args(kind)))}"
        )
        return value
    if origin in (tuple, Sequence) and isinstance(value, list | tuple):
        return tuple(cast(get_args(kind)[0], item, what) for item in value)
    if origin is not None:
        expected = "a list" if origin in (tuple, Sequence) else "a table"
        expect(origin in (dict, Mapping) and isinstance(value, dict), what, value, expected)
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    fits = isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)
    expect(fits, what, value, f"a value of type {kind.__name__}")
    return value
