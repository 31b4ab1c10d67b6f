"""The views `groups` and `preference_pairs`, with numbers that were worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Text
from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.lake.lake import Lake

Make = Callable[..., Episode]


def _samples(make: Make, group: str | None, rewards: list[float], **fields: Any) -> list[Episode]:
    named = {"extras": {"group_id": [group]}}
    return [
        make(f"{group}{i}", 1, rewards=[reward], **named, **fields)
        for i, reward in enumerate(rewards)
    ]


def test_groups(lake: Lake, make_dialogue: Make) -> None:
    unknown = float("nan")
    lake.dataset("talks").append(
        [
            *_samples(make_dialogue, "half", [1, 0, 0, 1]),
            *_samples(make_dialogue, "none", [-1, unknown, -3]),
            *_samples(make_dialogue, "one", [2]),
            *_samples(make_dialogue, None, [5]),
            # Two agents of one episode are one sample.
            *_samples(make_dialogue, "two", [1, 1], agent_id="x"),
            *_samples(make_dialogue, "two", [1, -1], agent_id="y"),
        ],
        spec=DatasetSpec(Text(), Text(), rewards_optional=True),
    )
    rows = {row["group_id"]: row for row in lake.sql("SELECT * FROM talks.groups").to_pylist()}
    assert {*rows} == {"half", "none", "one", "two"}
    half = rows["half"]
    # 1 - C(2, 2) / C(4, 2) is 5/6; two of three samples cannot both be wrong, nor of four.
    assert half["pass_at_k"] == pytest.approx([1 / 2, 5 / 6, 1, 1], abs=1e-12)
    assert (half["n"], half["num_passed"], half["mean"]) == (4, 2, 0.5)
    assert half["std"] == pytest.approx((1 / 3) ** 0.5)
    # Of equal returns the first id.
    assert (half["best_episode_id"], half["worst_episode_id"]) == ("half0", "half1")
    none = rows["none"]
    assert (none["num_episodes"], none["n"], none["best"], none["worst"]) == (3, 2, -1, -3)
    assert (none["best_episode_id"], none["worst_episode_id"]) == ("none0", "none2")
    assert none["pass_at_k"] == [0, 0]
    assert (rows["one"]["std"], rows["one"]["pass_at_k"]) == (None, [1])
    assert (rows["two"]["n"], rows["two"]["best"], rows["two"]["worst"]) == (2, 2, 0)


def test_many_samples(lake: Lake, make_dialogue: Make) -> None:
    lake.dataset("talks").append(_samples(make_dialogue, "g", [1.0] * 3 + [0.0] * 197))
    (row,) = lake.sql("SELECT pass_at_k[100] AS p FROM talks.groups").to_pylist()
    # 1 - (100 * 99 * 98) / (200 * 199 * 198)
    assert row["p"] == pytest.approx(1 - 970_200 / 7_880_400, abs=1e-12)


def test_a_dataset_without_groups_has_none(lake: Lake, make_episode: Make) -> None:
    lake.dataset("plain").append([make_episode("a")])
    for view in ("groups", "preference_pairs"):
        with pytest.raises(NotFoundError, match=f"{view}: found no column group_id, expected"):
            lake.sql(f"SELECT * FROM plain.{view}")


def _pairs(lake: Lake, where: str = "true") -> list[tuple[Any, ...]]:
    query = (
        "SELECT group_id, pair, chosen_episode_id, rejected_episode_id, margin "
        f"FROM talks.preference_pairs WHERE {where} ORDER BY group_id, pair"
    )
    return [tuple(row.values()) for row in lake.sql(query).to_pylist()]


def test_preference_pairs(lake: Lake, make_dialogue: Make) -> None:
    unknown = float("nan")
    lake.dataset("talks").append(
        [
            # 0, 2 and 4 are best, 3 is worst: of equals the first by id comes first.
            *_samples(make_dialogue, "a", [1, 0.5, 1, -1, 1]),
            *_samples(make_dialogue, "b", [2, unknown, 3]),
            # None is better than another.
            *_samples(make_dialogue, "equal", [1, 1, 1]),
            *_samples(make_dialogue, "one", [1]),
            *_samples(make_dialogue, None, [1, 2]),
            # The return of an episode is that of all its agents: 0 and 3.
            *_samples(make_dialogue, "two", [1, 1], agent_id="x"),
            *_samples(make_dialogue, "two", [-1, 2], agent_id="y"),
        ],
        spec=DatasetSpec(Text(), Text(), rewards_optional=True),
    )
    assert _pairs(lake) == [
        ("a", 1, "a0", "a3", 2.0),
        ("a", 2, "a2", "a1", 0.5),
        ("b", 1, "b2", "b0", 1.0),
        ("two", 1, "two1", "two0", 3.0),
    ]
    assert _pairs(lake, "margin > 1 AND pair = 1") == [
        ("a", 1, "a0", "a3", 2.0),
        ("two", 1, "two1", "two0", 3.0),
    ]
    query = "SELECT * FROM talks.preference_pairs WHERE group_id = 'two'"
    (row,) = lake.sql(query).to_pylist()
    # A generation of an agent has one token, and the text `answer 0`.
    assert (row["chosen_return"], row["rejected_return"]) == (3, 0)
    assert (row["chosen_num_tokens"], row["rejected_num_chars"]) == (2, 16)


def test_preference_pairs_use_an_episode_once(lake: Lake, make_dialogue: Make) -> None:
    rng = np.random.default_rng(0)
    episodes = []
    for number in range(40):
        rewards = rng.integers(0, 4, rng.integers(1, 12)).astype(float).tolist()
        episodes += _samples(make_dialogue, f"g{number}-", rewards)
    lake.dataset("talks").append(episodes)
    rows = lake.sql("SELECT * FROM talks.preference_pairs").to_pylist()
    used = [row[f"{side}_episode_id"] for row in rows for side in ("chosen", "rejected")]
    assert rows
    assert len({*used}) == len(used)
    assert all(row["margin"] > 0 for row in rows)
    # In another order, and several shards, they are the same.
    for part in (episodes[::-2], episodes[-2::-2]):
        lake.dataset("shuffled").append(part)
    again = lake.sql("SELECT * FROM shuffled.preference_pairs ORDER BY ALL").to_pylist()
    assert again == lake.sql("SELECT * FROM talks.preference_pairs ORDER BY ALL").to_pylist()


def test_preference_pairs_of_actions_without_texts(lake: Lake, make_episode: Make) -> None:
    named = {"extras": {"group_id": ["g"] * 3}}
    episodes = [
        make_episode(name, rewards=[0, 0, reward], **named) for name, reward in (("a", 1), ("b", 2))
    ]
    lake.dataset("plain").append(episodes)
    (row,) = lake.sql("SELECT * FROM plain.preference_pairs").to_pylist()
    assert (row["chosen_episode_id"], row["margin"]) == ("b", 1)
    assert (row["chosen_num_tokens"], row["chosen_num_chars"]) == (None, None)
