from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EmptyReplayError,
    QueryError,
    SchemaMismatchError,
)
from replaylake.datastore.lake.holdout import Holdout, describe_where
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.query.expressions import canonical_condition, canonical_expression

Make = Callable[..., Episode]
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def ids(snapshot: Any, condition: str) -> set[str]:
    rows = snapshot.sql(f"select episode_id from episodes where {condition}")
    return set(rows["episode_id"].to_pylist())


def timestamps(start: datetime, num_steps: int = 3) -> np.ndarray:
    """Microseconds since 1970, a second apart."""
    return int(start.timestamp()) * 10**6 + np.arange(num_steps) * 10**6


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.5])
def test_a_fraction_is_near_what_was_asked_and_every_episode_is_on_one_side(
    lake: Lake, make_episode: Make, fraction: float
) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode(f"e{i}", 1) for i in range(4000)])
    snapshot, holdout = dataset.snapshot(), Holdout(fraction)
    held, kept = (ids(snapshot, holdout.condition(side)) for side in (True, False))
    assert not held & kept
    assert len(held) + len(kept) == 4000
    # Four standard deviations of a binomial.
    assert len(held) / 4000 == pytest.approx(fraction, abs=4 * (fraction / 4000) ** 0.5)


def test_an_episode_stays_on_its_side(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode(f"e{i}") for i in range(200)])
    holdout = Holdout(0.3)
    before = ids(dataset.snapshot(), holdout.condition(True))
    for first in range(200, 300, 20):
        dataset.append([make_episode(f"e{i}") for i in range(first, first + 20)])
    num_shards = len(dataset.snapshot().files)
    compact(lake, "d", open_s=0)
    assert len(dataset.snapshot().files) < num_shards
    after = ids(dataset.snapshot(), holdout.condition(True))
    first_ones = {f"e{i}" for i in range(200)}
    assert {name for name in after if name.rsplit("/", 1)[-1] in first_ones} == before
    # Another salt is another split; a larger share takes some more.
    assert ids(dataset.snapshot(), Holdout(0.3, salt="b").condition(True)) != after
    assert after < ids(dataset.snapshot(), Holdout(0.6).condition(True))


def test_the_split_is_that_of_md5(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode(f"e{i}", 1) for i in range(50)])
    snapshot = dataset.snapshot()
    by_hand = {
        name
        for name in ids(snapshot, "true")
        if int(hashlib.md5(f"it's:{name}".encode()).hexdigest(), 16) / 16**32 < 0.35
    }
    assert ids(snapshot, Holdout(0.35, salt="it's").condition(True)) == by_hand
    # "a:" and e1 give 94e94f1111231..., by md5sum.
    assert Holdout(0.5, salt="a").condition(True) == (
        "substr(md5(concat('a:', episode_id)), 1, 13) < '8000000000000'"
    )


def test_all_agents_of_an_episode_are_on_one_side(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode(f"e{i}", agent_id=a) for i in range(100) for a in ("a", "b")])
    snapshot = dataset.snapshot()
    held, kept = (ids(snapshot, Holdout(0.4).condition(side)) for side in (True, False))
    assert not held & kept
    Holdout(0.4).check(snapshot)


def test_by_time_the_later_ones_are_held_out(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    starts = [NOON + timedelta(hours=h) for h in (-2, -1, 0, 1)]
    dataset.append([make_episode(f"e{i}", timestamps=timestamps(t)) for i, t in enumerate(starts)])
    snapshot = dataset.snapshot()
    # The same moment, told in another zone.
    holdout = Holdout(after=NOON.astimezone(timezone(timedelta(hours=5))))
    holdout.check(snapshot)
    held, kept = (ids(snapshot, holdout.condition(side)) for side in (True, False))
    assert {name[-2:] for name in held} == {"e2", "e3"}
    assert {name[-2:] for name in kept} == {"e0", "e1"}


def test_unknown_beginnings_are_refused(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("a", timestamps=timestamps(NOON)), make_episode("b")])
    snapshot, holdout = dataset.snapshot(), Holdout(after=NOON)
    with pytest.raises(
        SchemaMismatchError, match="found 1 of 2 episodes without a timestamp, such as"
    ):
        holdout.check(snapshot)
    # Those that are not asked for do not matter; but then nothing is left to learn from.
    with pytest.raises(EmptyReplayError, match="found 1 of 1 episodes held out"):
        holdout.check(snapshot, "started_at IS NOT NULL -- a comment")


def test_agents_that_began_on_either_side_are_refused(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    before = timestamps(NOON - timedelta(minutes=1))
    dataset.append(
        [
            make_episode("a", agent_id="x", timestamps=before),
            make_episode("a", agent_id="y", timestamps=timestamps(NOON)),
            make_episode("b", agent_id="x", timestamps=before),
        ]
    )
    with pytest.raises(
        SchemaMismatchError, match="1 of 2 episodes whose agents began before and after"
    ):
        Holdout(after=NOON).check(dataset.snapshot())


def test_a_split_with_an_empty_side_is_refused(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("only")])
    with pytest.raises(EmptyReplayError, match=r"fraction 0.2: found [01] of 1 episodes held out"):
        Holdout(0.2).check(dataset.snapshot())


def test_it_is_a_where_like_any_other(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode(f"e{i}", 1 + i % 4) for i in range(60)])
    snapshot = dataset.snapshot()
    sides = []
    for holdout in (Holdout(0.4, salt="it's"), Holdout(after=NOON)):
        for held_out in (True, False):
            text = holdout.within("num_steps > 2 or terminated -- long", held_out)
            canonical = canonical_expression(text)
            assert canonical_expression(canonical) == canonical
        sides.append(holdout)
    views = [snapshot.replay(sides[0].within("num_steps > 2", side)) for side in (True, False)]
    assert sum(view.num_episodes for view in views) == 30
    assert "md5" in str(views[0].selections[0].where)


def test_a_condition_cannot_reach_around_the_split(lake: Lake, make_episode: Make) -> None:
    lake.dataset("d").append([make_episode(f"e{i}") for i in range(30)])
    held = Holdout(0.4)
    sides = [ids(lake.snapshot("d"), held.within("true) OR (true", side)) for side in (True, False)]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 30
    with pytest.raises(QueryError, match="where"):
        held.within("num_steps >", True)


@pytest.mark.parametrize(
    "holdout", [Holdout(0.25, salt="s"), Holdout(after=NOON)], ids=["fraction", "after"]
)
def test_json_and_back(holdout: Holdout) -> None:
    assert Holdout.from_json(holdout.to_json()) == holdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "expected one of both"),
        ({"fraction": 0.1, "after": NOON}, "expected one of both"),
        ({"fraction": 0.0}, "found fraction 0.0"),
        ({"fraction": 1}, "found fraction 1"),
        ({"fraction": True}, "found fraction True"),
        ({"fraction": "0.1"}, "found fraction '0.1'"),
        ({"after": datetime(2026, 1, 1)}, "expected a time with its zone"),
        ({"after": NOON, "salt": "a"}, "none for a split by time"),
    ],
)
def test_what_is_no_split_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigInvalidError, match=message):
        Holdout(**arguments)


def test_json_of_another_release_is_refused() -> None:
    with pytest.raises(ConfigInvalidError, match="found strata, expected"):
        Holdout.from_json({"fraction": 0.1, "strata": 3})
    with pytest.raises(ConfigInvalidError, match="found after 'noon', expected a time"):
        Holdout.from_json({"after": "noon"})


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (None, "without the holdout of 0.2 by episode_id"),
        ("num_steps > 5", "(num_steps > 5), without the holdout of 0.2 by episode_id"),
        ("a = 1 OR b = 2", "((a = 1) OR (b = 2)), without the holdout of 0.2 by episode_id"),
        ("a = 1 AND b = 2", "(a = 1) AND (b = 2), without the holdout of 0.2 by episode_id"),
    ],
)
def test_a_holdout_of_lineage_is_described_in_words(where, words):
    stored = canonical_condition(Holdout(0.2).within(where, held_out=False))
    assert describe_where(stored) == words


def test_salt_and_side_are_described_and_other_conditions_left_alone():
    salted = canonical_condition(Holdout(0.25, salt="it's").condition(held_out=True))
    assert describe_where(salted) == 'in the holdout of 0.25 by episode_id with the salt "it\'s"'
    for other in ("(num_steps > 5)", "(started_at < CAST('2026-01-01' AS TIMESTAMPTZ))"):
        assert describe_where(other) == other
