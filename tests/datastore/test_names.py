from __future__ import annotations

import re
import time

import duckdb
import pytest

from replaylake.datastore.errors import InvalidNameError
from replaylake.datastore.names import (
    check_alias,
    check_dataset_name,
    check_policy_name,
    content_ulid,
    is_column_name,
    new_ulid,
    new_ulids,
    parse_snapshot,
    parse_version,
)

OUTSIDE = ["", "..", ".", "a/b", "a/../b", "/etc", "a%2e", "a\0b", "a'b", 'a"b', "ä", "a b", "a\n"]


@pytest.mark.parametrize("name", ["a", "cartpole", "cartpole_v1", "x" * 63])
def test_dataset_names_that_sql_says_unquoted(name: str) -> None:
    assert check_dataset_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *OUTSIDE,
        *["Cartpole", "_a", "1a", "a-b", "x" * 64],
        *["main", "temp", "system", "memory", "information_schema", "pg_catalog", "lake"],
        *["select", "order", "table", "left", "values"],
    ],
)
def test_other_dataset_names_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidNameError, match="dataset name: found"):
        check_dataset_name(name)


def test_every_word_that_duckdb_reserves_is_refused() -> None:
    words = duckdb.sql(
        "SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category <> 'unreserved'"
    ).fetchall()
    assert len(words) > 50
    for (word,) in words:
        with pytest.raises(InvalidNameError):
            check_dataset_name(word)


def test_policies_may_have_a_dash_but_not_a_reserved_word() -> None:
    assert check_policy_name("cql-small") == "cql-small"
    for name in [*OUTSIDE, "run", "random", "Champion"]:
        with pytest.raises(InvalidNameError):
            check_policy_name(name)


@pytest.mark.parametrize("alias", [*OUTSIDE, "A"])
def test_aliases_outside_the_pattern_are_refused(alias: str) -> None:
    with pytest.raises(InvalidNameError):
        check_alias(alias)


def test_versions_are_digits_that_fit_a_number() -> None:
    assert parse_version("0") == 0
    assert parse_version("9" * 18) == 10**18 - 1
    for text in ("", "-1", "1.0", " 1", "1\n", "\u0661", "9" * 19, "9" * 5000, "newest"):
        assert parse_version(text) is None
    assert parse_snapshot("cartpole@12") == ("cartpole", 12)
    with pytest.raises(InvalidNameError, match="expected a version such as cartpole@12"):
        parse_snapshot("cartpole@" + "9" * 5000)


def test_column_names() -> None:
    assert is_column_name("Camera_1")
    assert not is_column_name("camera.front")
    assert not is_column_name("1st")


def test_ulids_sort_by_time_and_never_repeat() -> None:
    first = new_ulid()
    time.sleep(0.002)
    later = [new_ulid() for _ in range(1000)]
    assert all(first < ulid for ulid in later)
    assert len({*later, first}) == 1001
    assert {len(ulid) for ulid in later} == {26}


def test_the_same_content_has_the_same_name() -> None:
    ones = ["0" * 64, "f" * 64, "0123456789abcdef" * 4]
    named = [content_ulid(sha256) for sha256 in ones]
    assert len(set(named)) == 3
    assert all(re.fullmatch("[0-9a-hjkmnp-tv-z]{26}", name) for name in named)
    assert named == [content_ulid(sha256) for sha256 in ones]


def test_many_ulids_are_like_one() -> None:
    before, many, after = new_ulid(), new_ulids(1000), new_ulid()
    assert len(set(many)) == 1000
    assert all(re.fullmatch(r"[0-9a-hjkmnp-tv-z]{26}", ulid) for ulid in many)
    assert before[:10] <= many[0][:10] <= after[:10]
    # Each of the 16 random digits takes every one of its 32 values.
    assert {len({ulid[place] for ulid in many}) for place in range(10, 26)} == {32}
    assert new_ulids(0) == []
