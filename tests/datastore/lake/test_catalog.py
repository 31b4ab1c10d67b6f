"""Pinned: SQL at versions and tags, alone and side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import InvalidNameError, NotFoundError, QueryRefusedError
from replaylake.datastore.lake.lake import Lake

Make = Callable[..., Episode]
COUNT = "SELECT count(*) AS n FROM d.steps"


@pytest.fixture
def filled(lake: Lake, make_episode: Make) -> Lake:
    """Dataset `d` has 3 steps at version 1, tagged `paper`, and 7 at 2; `e` has 1."""
    lake.dataset("d").append([make_episode("a", 3)])
    lake.tags.set("d", "paper", 1)
    lake.dataset("d").append([make_episode("b", 4)])
    lake.dataset("e").append([make_episode("a", 1)])
    return lake


def number(lake: Lake, query: str, **at: Any) -> int:
    (n,) = lake.sql(query, at=at)["n"].to_pylist()
    return int(n)


@pytest.mark.parametrize(
    ("version", "num"), [(0, 0), (1, 3), ("1", 3), ("paper", 3), ("d@paper", 3), (2, 7)]
)
def test_a_version_or_a_tag(filled: Lake, version: str | int, num: int) -> None:
    assert number(filled, COUNT, d=version) == num
    assert number(filled, "SELECT count(*) AS n FROM e.steps", d=version) == 1
    assert number(filled, COUNT) == 7, "and the newest again afterwards"


def test_versions_side_by_side(filled: Lake) -> None:
    query = (
        "SELECT count(*) AS n FROM d.steps "
        "ANTI JOIN before.steps USING (episode_id, agent_id, step)"
    )
    assert number(filled, query, before="d@paper") == 4
    query = (
        "SELECT 100 * (SELECT count(*) FROM one.episodes) + 10 * (SELECT count(*) FROM two.games) "
        "+ (SELECT count(*) FROM d.episodes) AS n"
    )
    assert number(filled, query, one="d@0", two="d@1") == 12


def test_what_is_of_the_lake(filled: Lake) -> None:
    found = filled.sql(
        "SELECT dataset, version, num_steps FROM datasets ORDER BY dataset",
        at={"d": 1, "old": "d@0"},
    ).to_pylist()
    assert [tuple(row.values()) for row in found] == [("d", 1, 3), ("e", 1, 1), ("old", 0, 0)]
    assert number(filled, "SELECT count(*) AS n FROM shards WHERE dataset = 'd'", d=1) == 1
    assert number(filled, "SELECT count(*) AS n FROM commits WHERE dataset = 'd'", d=1) == 3
    assert number(filled, "SELECT tags['paper'] AS n FROM datasets WHERE dataset = 'd'") == 1
    assert number(filled, "SELECT max(since) AS n FROM shards WHERE dataset = 'd'") == 2


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ({"nothing": 1}, "dataset 'nothing': not in this lake"),
        ({"d": 3}, r"found no version 3, expected 0\.\.2"),
        ({"d": "golden"}, "tag d@golden: found none of that name"),
        ({"e": "d@1"}, "at e=d@1: found a dataset e in the lake, expected a further name for d"),
        ({"D E": "d@1"}, "dataset"),
        ({"d": "d@../x"}, "expected a version such as d@12"),
    ],
)
def test_what_cannot_be_pinned(filled: Lake, at: dict[str, Any], message: str) -> None:
    with pytest.raises((NotFoundError, InvalidNameError), match=message):
        filled.sql(COUNT, at=at)


def test_feedback_has_versions_of_its_own(filled: Lake) -> None:
    schema = pa.schema([pa.field("decision_id", pa.string(), False)])
    filled.dataset("d").decisions.create(schema)
    query = "SELECT count(*) AS n FROM d.decisions"
    assert number(filled, query, e=1) == 0
    with pytest.raises(QueryRefusedError, match=r"d\.decisions: found d pinned at version 1"):
        filled.sql(query, at={"d": 1})
