"""The view `groups`: the samples of a prompt, with numbers that were worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    assert half["best_episode_id"] in ("half0", "half3")
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
    with pytest.raises(NotFoundError, match="groups: found no column group_id, expected"):
        lake.sql("SELECT * FROM plain.groups")
