"""Column ranges from footers are those of the rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.storage.table import column_ranges as column_ranges_module
from replaylake.datastore.storage.table.column_ranges import column_ranges, select_shards


def test_ranges(lake: Lake, make_episode: Callable[..., Episode]) -> None:
    dataset = lake.dataset("d")
    dataset.create(Box((2,)), Discrete(2), rewards_optional=True)
    dataset.append([make_episode("a", 4, rewards=np.array([-2.5, np.nan, 7.0, 1.0]))])
    extras = {"user": np.array(["zoe", "ann", None], object), "tags": [["x"], [], ["y"]]}
    dataset.append([make_episode("b", 3, extras=extras)])
    found = column_ranges(dataset.snapshot().table)
    rows = dataset.snapshot().table.read()
    assert list(found) == rows.column_names
    assert (found["reward"].least, found["reward"].greatest) == (-2.5, 7.0)
    assert (found["observation"].least, found["observation"].greatest) == (-3, 3)
    assert (found["user"].least, found["user"].greatest) == ("ann", "zoe")
    assert found["tags"].missing is None
    for name in ("reward", "observation", "final_observation", "user", "policy", "step"):
        assert found[name].missing == pytest.approx(rows[name].null_count / 7), name
    assert (found["policy"].least, found["policy"].missing) == (None, 1.0)


def test_structs_have_no_range(lake: Lake) -> None:
    space = Dict({"x": Box((1,)), "y": Box((2,))})
    steps = {"x": np.zeros((2, 1), np.float32), "y": np.zeros((2, 2), np.float32)}
    lake.dataset("d").create(space, Discrete(2))
    lake.dataset("d").append([Episode("a", steps, np.zeros(2, int), np.zeros(2))])
    found = column_ranges(lake.dataset("d").snapshot().table)
    assert (found["observation"].least, found["observation"].missing) == (None, 0)
    assert found["final_observation"].missing == 1


def test_shards_are_selected_by_the_texts_that_they_may_hold(
    lake: Lake, make_episode: Callable[..., Episode], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = lake.dataset("d")
    dataset.create(Box((2,)), Discrete(2))
    for names in (["a/1", "a/2"], ["b/1"], ["a/3", "c/1"]):
        dataset.append([make_episode(name, 2) for name in names])
    snapshot = dataset.snapshot().table
    first, second, third = snapshot.files

    def select(least: str, below: str) -> list[object]:
        return list(select_shards(snapshot, "episode_id", least, below))

    assert select("a/", "a0") == [first, third]
    assert select("b/1", "b/1\0") == [second, third]  # the last may: it has texts on both sides
    assert select("a/2\0", "a/3") == []
    assert select("d", "e") == select("", "a") == []
    monkeypatch.setattr(column_ranges_module, "_END_BYTES", 64)  # less than a footer has
    assert select("b/", "b0") == [second, third]
    assert select("a/", "a0") == [first, third]
    (snapshot.storage.local(f"{snapshot.root}/{second.path}")).unlink()
    assert select("d", "e") == [second]  # whoever reads it says that it is missing
