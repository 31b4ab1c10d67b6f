"""Merge makes one dataset of several in one commit; split several of one, whole episodes each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from deltalake import DeltaTable

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    AlreadyExistsError,
    ConfigInvalidError,
    EmptyReplayError,
    SchemaMismatchError,
)
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.merge import merge
from replaylake.datastore.maintenance.split import split_by_condition, split_by_fraction

Make = Callable[..., Episode]


@pytest.fixture
def two(lake: Lake, make_episode: Make) -> Lake:
    """Datasets a (episodes 1, 2) and b (2, 3, with `note`); all of two steps."""
    lake.dataset("a").append([make_episode(name, 2) for name in "12"])
    lake.dataset("b").create(Box((2,)), Discrete(2))
    lake.dataset("b").append([make_episode("2", 2)])
    notes = {"note": np.array(["x", "y"], object)}
    lake.dataset("b").append([make_episode("3", 2, extras=notes)])
    return lake


def ids(lake: Lake, name: str) -> list[str]:
    rows = lake.sql(f"select distinct episode_id as e from {name}.steps order by e")
    return [str(row["e"]) for row in rows.to_pylist()]


def test_merge(two: Lake) -> None:
    receipt = merge(two, ["a", "b@2"], "c")
    assert (receipt.version, receipt.num_steps) == (1, 6)
    assert [(s.source, s.num_steps, s.num_already_present_steps) for s in receipt.sources] == [
        ("a@1", 4, 0),
        ("b@2", 2, 2),
    ]
    assert ids(two, "c") == ["1", "2", "3"]
    notes = two.sql("select note from c.steps order by episode_id, step")["note"].to_pylist()
    assert notes == [None] * 4 + ["x", "y"]
    info = two.dataset("c").commit_info(1)
    assert (info["operation"], info["num_already_present_steps"]) == ("MERGE", 2)
    assert [(s["dataset"], s["version"]) for s in info["sources"]] == [("a", 1), ("b", 2)]
    assert fsck(two, ["c"]).is_clean
    assert DeltaTable(str(two.dataset("c").path)).to_pyarrow_table().num_rows == 6
    again = merge(two, ["a", "b@2"], "c")
    assert (again.version, two.dataset("c").snapshot().version) == (None, 1)
    with pytest.raises(AlreadyExistsError, match="a dataset of 6 steps"):
        merge(two, ["b", "a"], "c")


def test_what_cannot_be_merged_writes_nothing(two: Lake, make_episode: Make) -> None:
    two.dataset("wide").create(Box((3,)), Discrete(2))
    with pytest.raises(SchemaMismatchError, match="the observation space is"):
        merge(two, ["a", "wide"], "c")
    numbers = {"note": np.array([1, 2])}
    two.dataset("other").create(Box((2,)), Discrete(2))
    two.dataset("other").append([make_episode("9", 2, extras=numbers)])
    with pytest.raises(SchemaMismatchError, match="merge b@2 and other@1: column 'note'"):
        merge(two, ["b", "other"], "c")
    with pytest.raises(ConfigInvalidError, match="two or more different"):
        merge(two, ["a", "a@1"], "c")
    assert not two.dataset("c").exists()


def test_bounds_and_unknown_rewards_of_both_hold(lake: Lake, make_episode: Make) -> None:
    lake.dataset("a").create(Box((2,), low=0.0, high=9.0), Discrete(2))
    lake.dataset("b").create(Box((2,), low=-9.0, high=0.0), Discrete(2), rewards_optional=True)
    unknown = np.array([np.nan, 1.0])
    lake.dataset("b").append([make_episode("1", 2, rewards=unknown, observations=np.zeros((2, 2)),
                                           final_observation=None)])  # fmt: skip
    merge(lake, ["a", "b"], "c")
    spec = lake.dataset("c").spec
    assert spec.rewards_optional
    assert isinstance(spec.observation_space, Box)
    assert (np.min(spec.observation_space.low), np.max(spec.observation_space.high)) == (-9, 9)
    assert lake.sql("select count(reward) as n from c.steps")["n"].to_pylist() == [1]


@pytest.fixture
def many(lake: Lake, make_episode: Make) -> Lake:
    """Episodes e00..e39 of one step in two shards; two agents in `game`."""
    names = [f"e{number:02}" for number in range(40)]
    lake.dataset("d").create(Box((2,)), Discrete(2))
    lake.dataset("d").append([make_episode(name, 1) for name in names[:20]])
    game: list[Any] = [make_episode("game", n, agent_id=agent) for n, agent in ((1, "p"), (2, "q"))]
    lake.dataset("d").append([make_episode(name, 1) for name in names[20:]] + game)
    return lake


@pytest.mark.slow
def test_split_by_fraction(many: Lake, make_episode: Make) -> None:
    receipt = split_by_fraction(many, "d", {"train": 0.7, "test": 0.3}, seed=3)
    parts = ids(many, "train"), ids(many, "test")
    assert sorted(parts[0] + parts[1]) == ids(many, "d")
    assert 20 < len(parts[0]) < 38
    assert sum(part.num_steps for part in receipt.parts) == 43
    again = split_by_fraction(many, "d", {"train": 0.7, "test": 0.3}, seed=3)
    assert [part.version for part in again.parts] == [None, None]
    many.dataset("d").append([make_episode("new", 1)])
    split_by_fraction(many, "d", {"train2": 0.7, "test2": 0.3}, seed=3)
    assert set(parts[0]) <= set(ids(many, "train2"))
    split_by_fraction(many, "d", {"train3": 0.7, "test3": 0.3}, seed=4)
    assert set(ids(many, "train3")) != set(ids(many, "train2"))
    info = many.dataset("test").commit_info(1)
    assert (info["operation"], info["split"]["seed"], info["split"]["version"]) == ("SPLIT", 3, 2)
    assert fsck(many, ["train", "test"]).is_clean


def test_split_by_condition(many: Lake) -> None:
    receipt = split_by_condition(many, "d", "any(reward = 2)", ["long", "short"])
    assert ids(many, "long") == ["game"]
    assert len(ids(many, "short")) == 40
    assert [(part.num_episodes, part.num_steps) for part in receipt.parts] == [(2, 3), (40, 40)]


def test_a_split_that_was_killed_is_continued(many: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = type(many.dataset("d").table).commit
    left = [1]

    def fail(self: Any, *args: Any, **options: Any) -> Any:
        if options.get("operation") == "SPLIT" and not left:
            raise KeyboardInterrupt
        left.pop()
        return commit(self, *args, **options)

    monkeypatch.setattr(type(many.dataset("d").table), "commit", fail)
    with pytest.raises(KeyboardInterrupt):
        split_by_condition(many, "d", "num_steps = 2", ["long", "short"])
    monkeypatch.undo()
    receipt = split_by_condition(many, "d", "num_steps = 2", ["long", "short"])
    assert [part.version for part in receipt.parts] == [None, 1]
    assert len(ids(many, "long")) + len(ids(many, "short")) == 41


def test_what_cannot_be_split_writes_nothing(many: Lake) -> None:
    with pytest.raises(ConfigInvalidError, match=r"sum is 1\.1"):
        split_by_fraction(many, "d", {"x": 0.9, "y": 0.2})
    with pytest.raises(EmptyReplayError, match="no episode for x"):
        split_by_condition(many, "d", "num_steps = 99", ["x", "y"])
    with pytest.raises(ConfigInvalidError, match="expected two with `where`"):
        split_by_condition(many, "d", "true", ["x", "y", "z"])
    with pytest.raises(AlreadyExistsError, match="a dataset of 43 steps"):
        split_by_condition(many, "d", "num_steps = 2", ["x", "d"])
    assert not many.dataset("y").exists()


def test_merge_takes_the_other_rows_of_a_shard_that_is_there_in_part(
    lake: Lake, make_episode: Make
) -> None:
    lake.dataset("a").append([make_episode("1", 2)])
    lake.dataset("b").append([make_episode("1", 2), make_episode("2", 2)])
    assert merge(lake, ["a", "b"], "c").num_steps == 4
    assert ids(lake, "c") == ["1", "2"]
