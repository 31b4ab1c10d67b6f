"""Encoding: vectors worked out by hand, and the same bits for one row and for many."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaylake.datastore.episodes.encoding import (
    CATEGORY,
    FLAG,
    NUMBER,
    TIME,
    Encoding,
    Field,
    check_timezone,
    from_json,
)
from replaylake.datastore.errors import ConfigInvalidError, EpisodeInvalidError, FormatTooNewError

WIDE = Encoding(
    (
        Field("age", NUMBER),
        Field("member", FLAG),
        Field("device", CATEGORY, ("android", "ios")),
        Field("hour", TIME),
    ),
    ("buy", "wait"),
)
ROOT = np.float32(math.sqrt(0.5))


def test_a_row_by_hand() -> None:
    # 2026-01-31 is a Saturday, day 5 of a week that begins on Monday; 15:00 is 225 degrees.
    row = {"age": 31, "member": True, "device": "ios", "hour": "2026-01-31T15:00:00Z"}
    week = 2 * math.pi * 5 / 7
    expected = [31, 1, 0, 0, 1, -ROOT, -ROOT, math.sin(week), math.cos(week)]
    found = WIDE.encode_one(row)
    assert found.dtype == np.float32
    assert np.array_equal(found, np.array(expected, np.float32))


def test_an_unknown_category_is_the_first_element() -> None:
    row = {"age": 0.5, "member": False, "device": "vr", "hour": "1970-01-01T00:00:00Z"}
    thursday = 2 * math.pi * 3 / 7
    expected = [0.5, 0, 1, 0, 0, 0, 1, math.sin(thursday), math.cos(thursday)]
    assert np.array_equal(WIDE.encode_one(row), np.array(expected, np.float32))


def test_each_element_has_a_name() -> None:
    assert WIDE.names() == (
        "age",
        "member",
        "device: other",
        "device = android",
        "device = ios",
        "sin(time of day) of hour",
        "cos(time of day) of hour",
        "sin(weekday) of hour",
        "cos(weekday) of hour",
    )
    assert WIDE.width == len(WIDE.names())


@pytest.mark.parametrize(
    ("moment", "hour", "weekday"),
    [
        ("2026-01-31T23:30:00Z", 0.5, 6),  # in Berlin it is Sunday, 0:30
        ("2026-07-01T10:00:00Z", 12, 2),  # in summer two hours ahead: Wednesday noon
        ("2026-07-01T12:00:00+02:00", 12, 2),
        ("1969-12-31T22:59:59Z", 23 + 59 / 60, 2),
    ],
)
def test_times_are_told_in_their_zone(moment: str, hour: float, weekday: int) -> None:
    encoding = Encoding((Field("at", TIME, timezone="Europe/Berlin"),))
    angles = 2 * math.pi * hour / 24, 2 * math.pi * weekday / 7
    expected = [f(angle) for angle in angles for f in (math.sin, math.cos)]
    assert encoding.encode_one({"at": moment}) == pytest.approx(expected, abs=1e-6)


@given(
    st.lists(
        st.datetimes(datetime(1971, 1, 1), datetime(2090, 1, 1), timezones=st.just(UTC)), min_size=1
    ),
    st.sampled_from(["UTC", "Europe/Berlin", "Asia/Kathmandu", "Australia/Lord_Howe"]),
)
def test_many_times_are_each_as_alone(moments: list[datetime], zone: str) -> None:
    encoding = Encoding((Field("at", TIME, timezone=zone),))
    since = [(m - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) for m in moments]
    together = encoding.encode({"at": np.array(since)})
    alone = [encoding.encode_one({"at": moment.isoformat()}) for moment in moments]
    assert np.array_equal(together, np.stack(alone))
    local = moments[0].astimezone(ZoneInfo(zone))
    minute = 2 * math.pi * (local.hour * 60 + local.minute) / 1440
    week = 2 * math.pi * local.weekday() / 7
    expected = [math.sin(minute), math.cos(minute), math.sin(week), math.cos(week)]
    assert together[0] == pytest.approx(expected, abs=1e-6)


ROW = {"age": 31, "member": True, "device": "ios", "hour": "2026-01-31T15:00:00Z"}


@pytest.mark.parametrize(
    ("changed", "field", "expected"),
    [
        ({"agee": 3}, "agee", "only the fields age, member, device, hour"),
        ({"age": "31"}, "age", "a number"),
        ({"age": True}, "age", "a number"),
        ({"age": 1e39}, "age", "a number"),
        ({"age": None}, "age", "a number"),
        ({"member": 1}, "member", "true or false"),
        ({"device": 3}, "device", "text"),
        ({"device": ""}, "device", "text"),
        ({"hour": "2026-01-31T15:00:00"}, "hour", "a time with a zone"),
        ({"hour": "noon"}, "hour", "a time with a zone"),
        ({"hour": 1769871600}, "hour", "a time with a zone"),
    ],
)
def test_a_field_that_does_not_fit_is_named(changed: dict, field: str, expected: str) -> None:
    fault = WIDE.find_mismatch({**ROW, **changed})
    assert fault is not None
    assert fault[0] == field
    assert expected in fault[2]
    with pytest.raises(EpisodeInvalidError, match=field):
        WIDE.encode_one({**ROW, **changed})


def test_a_fill_stands_for_what_is_absent() -> None:
    fields = (
        Field("age", NUMBER, fill=40.0),
        Field("member", FLAG, fill=False),
        Field("device", CATEGORY, ("none",), fill="none"),
        Field("at", TIME, fill="1970-01-01T06:00:00Z"),
    )
    encoding = Encoding(fields)
    assert encoding.encode_one({})[:6].tolist() == pytest.approx([40, 0, 0, 1, 1, 0])
    assert encoding.encode_one({"age": None, "device": ""})[:4].tolist() == [40, 0, 0, 1]


def test_numbers_alone_keep_their_dtype() -> None:
    encoding = Encoding((Field("a", NUMBER), Field("b", NUMBER)), dtype="int64")
    assert encoding.is_plain
    assert encoding.rules is None
    assert encoding.encode_one({"a": 1, "b": 2}).dtype == np.int64
    assert encoding.find_mismatch({"a": 1, "b": 2.5}) == ("b", 2.5, "a number that int64 holds")


def test_json_there_and_back() -> None:
    fields = (*WIDE.fields, Field("x", NUMBER, fill=0.5), Field("t", TIME, timezone="Asia/Tokyo"))
    encoding = Encoding(fields, WIDE.action_names)
    assert from_json(json.loads(json.dumps(encoding.to_json()))) == encoding
    plain = Encoding((Field("a", NUMBER),), dtype="float64")
    assert from_json(plain.to_json()) == plain


def test_a_newer_format_is_refused() -> None:
    with pytest.raises(FormatTooNewError, match="2"):
        from_json({**WIDE.to_json(), "format_version": 2})


def test_names_of_actions() -> None:
    assert [WIDE.action_name(i) for i in (0, 1, 2)] == ["buy", "wait", None]


@pytest.mark.parametrize("name", ["Europe/Nowhere", "", "../etc/passwd"])
def test_a_zone_that_is_none(name: str) -> None:
    with pytest.raises(ConfigInvalidError, match="timezone"):
        check_timezone(name)
