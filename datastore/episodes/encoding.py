"""Encoding: named fields of a wide table, such as age, device and hour, as one float vector.

The rules are kept with the dataset and travel with the policies that are trained on it, so that a
field means the same at ingest and at `/act`. Nothing here imports pyarrow: a served policy encodes.

    number     as it is
    flag       0 or 1
    category   one element for each value of the vocabulary and, before them, one for all others
    time       sine and cosine of the time of day (to the minute) and of the weekday, in a time zone
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ConfigInvalidError, EpisodeInvalidError, FormatTooNewError

FORMAT_VERSION: Final = 1
NUMBER: Final = "number"
FLAG: Final = "flag"
CATEGORY: Final = "category"
TIME: Final = "time"
KINDS: Final = (NUMBER, FLAG, CATEGORY, TIME)

_EXPECTED: Final = {
    NUMBER: "a number",
    FLAG: "true or false",
    CATEGORY: "text",
    TIME: "a time with a zone, such as 2026-01-31T12:00:00Z",
}
_PARTS: Final = ("sin(time of day)", "cos(time of day)", "sin(weekday)", "cos(weekday)")
# Zones change their offset at multiples of this, so one look-up serves all times in between.
_SLOT_US: Final = 15 * 60 * 1_000_000
_MINUTE_US: Final = 60 * 1_000_000
_DAY_MINUTES: Final = 24 * 60
_MAX_FLOAT32: Final = float(np.finfo(np.float32).max)


def _circle(size: int) -> Array:
    angles = 2 * np.pi * np.arange(size) / size
    return np.stack([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


# Tables, and not sines of the times at hand: a vector of times and a single one give the same bits.
_DAY_CIRCLE: Final = _circle(_DAY_MINUTES)
_WEEK_CIRCLE: Final = _circle(7)


@dataclass(frozen=True)
class Field:
    """One column of the log, and what becomes of it.

    vocabulary: a category's known values, sorted. fill: what stands where there is no value; None
    if nothing does. timezone: in which a time's hour and weekday are told.
    """

    name: str
    kind: str
    vocabulary: tuple[str, ...] = ()
    fill: float | bool | str | None = None
    timezone: str = "UTC"

    @property
    def width(self) -> int:
        """How many elements of the vector it makes."""
        return {CATEGORY: len(self.vocabulary) + 1, TIME: len(_PARTS)}.get(self.kind, 1)

    @property
    def names(self) -> tuple[str, ...]:
        """What its elements are."""
        if self.kind == CATEGORY:
            return (f"{self.name}: other", *(f"{self.name} = {v}" for v in self.vocabulary))
        if self.kind == TIME:
            return tuple(f"{part} of {self.name}" for part in _PARTS)
        return (self.name,)

    @cached_property
    def _codes(self) -> dict[str, int]:
        return {value: code for code, value in enumerate(self.vocabulary, 1)}

    def codes(self, values: Sequence[Any]) -> Array:
        """Return the element of each text that is 1, int64 [n]; 0 for one not in the vocabulary."""
        known = self._codes
        return np.fromiter((known.get(v, 0) for v in values), np.int64, len(values))

    def write(self, values: Any, into: Array) -> None:
        """Write the elements of n values into float32 [n, width], which is 0.

        values: of a category codes, int64 [n]; of a time int64 [n], us since 1970, UTC; else
        numbers or bools.
        """
        if self.kind == CATEGORY:
            into[np.arange(len(into)), values] = 1
        elif self.kind == TIME:
            minutes = _local_minutes(np.asarray(values, np.int64), self.timezone)
            into[:, :2] = _DAY_CIRCLE[minutes % _DAY_MINUTES]
            # 1970-01-01 was a Thursday, day 3 of a week that begins on Monday.
            into[:, 2:] = _WEEK_CIRCLE[(minutes // _DAY_MINUTES + 3) % 7]
        else:
            into[:, 0] = values

    def explain_mismatch(self, value: Any) -> str | None:
        """Return what was expected instead of a JSON value, or None where it fits."""
        kinds: dict[str, tuple[type, ...]] = {NUMBER: (int, float), FLAG: (bool,)}
        fits = type(value) in kinds.get(self.kind, (str,))
        if fits and self.kind == NUMBER:
            fits = -_MAX_FLOAT32 <= value <= _MAX_FLOAT32
        if fits and self.kind == TIME:
            fits = _parse_time(value) is not None
        return None if fits else _EXPECTED[self.kind]

    def read(self, value: Any) -> Any:
        """Return a JSON value that has no `fault` as `write` takes it."""
        if self.kind == CATEGORY:
            return self._codes.get(value, 0)
        return _parse_time(value) if self.kind == TIME else value


@dataclass(frozen=True)
class Encoding:
    """What the elements of a dataset's observation are, and what its actions are called.

    fields: in order; none if the log has vectors of its own. action_names: of action 0, 1, ..., or
    None where actions are numbers. dtype: float32, or that of the columns where all are numbers.
    """

    fields: tuple[Field, ...] = ()
    action_names: tuple[str, ...] | None = None
    dtype: str = "float32"

    def __bool__(self) -> bool:
        return bool(self.fields) or self.action_names is not None

    @property
    def width(self) -> int:
        """The D of the vector."""
        return sum(one.width for one in self.fields)

    @cached_property
    def has_categories(self) -> bool:
        """Whether any field is categorical, so that its texts are stored as numbers."""
        return any(one.kind == CATEGORY for one in self.fields)

    @property
    def is_plain(self) -> bool:
        """Whether it only names numbers, which are as the log has them."""
        return self.action_names is None and all(one.kind == NUMBER for one in self.fields)

    @property
    def rules(self) -> Encoding | None:
        """What decides the values of vectors and actions, for comparing; None if nothing does."""
        if self.is_plain:
            return None
        return replace(self, fields=tuple(replace(one, fill=None) for one in self.fields))

    def names(self) -> tuple[str, ...]:
        """Return what the D elements are."""
        return tuple(name for one in self.fields for name in one.names)

    def action_name(self, action: int) -> str | None:
        """Return what an action is called; None where it has no name."""
        names = self.action_names or ()
        return names[action] if 0 <= action < len(names) else None

    def encode(self, columns: Mapping[str, Any]) -> Array:
        """Return vectors [n, D] of columns by field name, each as `Field.write` takes it."""
        num = len(next(iter(columns.values())))
        vectors = np.zeros((num, self.width), self.dtype)
        start = 0
        for one in self.fields:
            one.write(columns[one.name], vectors[:, start : start + one.width])
            start += one.width
        return vectors

    def find_mismatch(self, values: Mapping[str, Any]) -> tuple[str, Any, str] | None:
        """Return the first field of a JSON object that does not fit; None if all do.

        That is its name, what was found (None for nothing) and what was expected.
        """
        if unknown := sorted(values.keys() - {one.name for one in self.fields}):
            listed = ", ".join(one.name for one in self.fields)
            return unknown[0], values[unknown[0]], f"only the fields {listed}"
        for one in self.fields:
            value = _get_value(values, one)
            if value is None:
                if one.fill is None:
                    return one.name, None, _EXPECTED[one.kind]
            elif (expected := one.explain_mismatch(value)) is not None:
                return one.name, value, expected
            elif self.dtype != "float32" and value != np.asarray(value).astype(self.dtype):
                return one.name, value, f"a number that {self.dtype} holds"
        return None

    def find_unknown_categories(self, values: Mapping[str, Any]) -> list[str]:
        """Return the fields of a JSON object whose text is not in the vocabulary, but is encoded.

        The object has no mismatch. Cost: 0.2 us a field with a vocabulary.
        """
        return [
            one.name
            for one in self.fields
            if one.kind == CATEGORY
            and (value := _get_value(values, one)) is not None
            and not one.read(value)
        ]

    def encode_one(self, values: Mapping[str, Any]) -> Array:
        """Return the vector [D] of a JSON object. Raises: EpisodeInvalidError naming the field."""
        if (fault := self.find_mismatch(values)) is not None:
            name, found, expected = fault
            raise EpisodeInvalidError(
                f"observation.{name}: found {'nothing' if found is None else repr(found)}, "
                f"expected {expected}. Correct the field."
            )
        columns = {}
        for one in self.fields:
            value = _get_value(values, one)
            columns[one.name] = [one.read(one.fill if value is None else value)]
        vector: Array = self.encode(columns)[0]
        return vector

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; what is left out is as the defaults have it."""
        fields = []
        for one in self.fields:
            body: dict[str, Any] = {"name": one.name, "kind": one.kind}
            if one.kind == CATEGORY:
                body["vocabulary"] = list(one.vocabulary)
            if one.kind == TIME:
                body["timezone"] = one.timezone
            if one.fill is not None:
                body["fill"] = one.fill
            fields.append(body)
        names = None if self.action_names is None else list(self.action_names)
        return {
            "format_version": FORMAT_VERSION,
            "dtype": self.dtype,
            "fields": fields,
            "action_names": names,
        }


NO_ENCODING: Final = Encoding()


def from_json(data: Mapping[str, Any]) -> Encoding:
    """Read what `to_json` wrote.

    Raises: FormatTooNewError; KeyError, TypeError on anything else.
    """
    version = int(data["format_version"])
    if version > FORMAT_VERSION:
        raise FormatTooNewError(
            f"encoding: found format {version}, this ReplayLake reads up to {FORMAT_VERSION}. "
            "Install a later one."
        )
    fields = [
        Field(
            name=str(one["name"]),
            kind=str(one["kind"]),
            vocabulary=tuple(map(str, one.get("vocabulary", ()))),
            fill=one.get("fill"),
            timezone=str(one.get("timezone", "UTC")),
        )
        for one in data["fields"]
    ]
    if wrong := [one.kind for one in fields if one.kind not in KINDS]:
        raise KeyError(f"encoding: found fields of the kind {wrong[0]!r}, expected {KINDS}.")
    names = data["action_names"]
    return Encoding(
        tuple(fields), None if names is None else tuple(map(str, names)), str(data["dtype"])
    )


def check_timezone(name: str) -> None:
    """Refuse a zone that this machine does not know. Raises: ConfigInvalidError."""
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ConfigInvalidError(
            f"timezone: found {name!r}, expected a zone such as Europe/Berlin or UTC.",
            parameter="timezone",
        ) from error


def _get_value(values: Mapping[str, Any], one: Field) -> Any:
    """Return a field's value, or None where there is none; an empty text is none, as in a CSV."""
    value = values.get(one.name)
    return None if value == "" and one.kind in (CATEGORY, TIME) else value


def _local_minutes(times: Array, timezone: str) -> Array:
    """Return whole minutes since 1970 of local time, int64 [n], for us of UTC."""
    slots, rows = np.unique(times // _SLOT_US, return_inverse=True)
    offsets = [_offset_minutes(int(slot), timezone) for slot in slots]
    return np.asarray(times // _MINUTE_US + np.asarray(offsets, np.int64)[rows])


@lru_cache(maxsize=65_536)
def _offset_minutes(slot: int, timezone: str) -> int:
    if timezone == "UTC":
        return 0
    try:
        moment = datetime.fromtimestamp(slot * _SLOT_US // 1_000_000, UTC)
        offset = moment.astimezone(ZoneInfo(timezone)).utcoffset()
    except (OverflowError, ValueError, OSError):
        return 0  # beyond the years 1 to 9999 no zone has rules
    return 0 if offset is None else math.floor(offset.total_seconds() / 60)


def _parse_time(text: str) -> int | None:
    """Return us since 1970, UTC, of an ISO time with a zone; None for another text."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        return None
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
