from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, MultiBinary, Tuple
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EmptyReplayError,
    QueryRefusedError,
    SchemaMismatchError,
)
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.offline.dataset_statistics import DatasetStatistics, RewardScaling
from replaylake.offline.learning.normalization import fit_statistics

Make = Callable[..., Episode]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def episode(name: str, observations: Any, rewards: Any = None, actions: Any = None) -> Episode:
    num = len(observations)
    return Episode(
        episode_id=name,
        observations=np.asarray(observations, np.float32),
        actions=np.zeros((num, 1), np.float32) if actions is None else np.float32(actions),
        rewards=np.zeros(num) if rewards is None else np.asarray(rewards, float),
        terminated=True,
    )


def test_elements_are_measured_one_by_one(lake: Lake) -> None:
    dataset = lake.dataset("d")
    # The first element: 1, 3, 5, 7 has mean 4 and variance 5. The second is 2 throughout.
    dataset.append([episode("a", [[1, 2], [3, 2]]), episode("b", [[5, 2], [7, 2]])])
    facts = fit_statistics([dataset.snapshot()], observations=True)
    assert set(facts.observations) == {""}
    mean, std = facts.observations[""]
    assert mean.dtype == std.dtype == np.float32
    np.testing.assert_array_equal(mean, [4, 2])
    np.testing.assert_array_equal(std, np.float32([5**0.5, 1]))
    assert facts.rewards == RewardScaling()
    assert fit_statistics([dataset.snapshot()], actions=False) == DatasetStatistics()


def test_only_what_is_learned_from_is_measured(lake: Lake) -> None:
    dataset = lake.dataset("d")
    first = episode("a", [[1], [3], [100]], [1, 1, 5], [[-1], [2], [50]])
    dataset.append([first, episode("b", [[1000]], [1000], [[1000]])])
    facts = fit_statistics(
        [dataset.snapshot()],
        where="num_steps = 3",
        where_steps="observation[1] < 50",
        observations=True,
        rewards="std",
    )
    np.testing.assert_array_equal(facts.observations[""].mean, [2])
    np.testing.assert_array_equal(facts.observations[""].std, [1])
    # Its rewards are 1 and 1: of what never varies nothing is divided by zero.
    assert facts.rewards == RewardScaling(0.0, 1.0)
    assert facts.action_range is not None
    np.testing.assert_array_equal(facts.action_range, [[-1], [2]])


def test_several_datasets_count_as_one(lake: Lake) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(100, 3, (60, 3)).astype(np.float32)
    rewards = rng.normal(size=60)
    sizes = [1, 9, 50]
    datasets = []
    for number, (stop, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        dataset = lake.dataset(f"d{number}")
        some = slice(stop - size, stop)
        dataset.append([episode("e", rows[some], rewards[some], rows[some, :1])])
        datasets.append(dataset.snapshot())
    facts = fit_statistics(datasets, observations=True, rewards="mean_std")
    exact = rows.astype(np.float64)
    np.testing.assert_allclose(facts.observations[""].mean, exact.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(facts.observations[""].std, exact.std(axis=0), rtol=1e-6)
    assert facts.rewards == pytest.approx((rewards.mean(), rewards.std()), rel=1e-12)
    assert facts.action_range is not None
    np.testing.assert_array_equal(facts.action_range[0], rows[:, 0].min())
    np.testing.assert_array_equal(facts.action_range[1], rows[:, 0].max())
    again = fit_statistics(datasets, observations=True, rewards="mean_std")
    assert again.to_json() == facts.to_json()


def test_boxes_within_dicts_and_tuples_and_nothing_else(lake: Lake) -> None:
    space = Dict(
        {
            "camera": Box((4, 4), "uint8", 0, 255),
            "arm": Tuple((Box((2, 2)), Discrete(3))),
            "height": Box(()),
            "flags": MultiBinary(2),
            "counts": Box((2,), "int16"),
            "on": Box((2,), "bool", 0, 1),
        }
    )
    dataset = lake.dataset("d")
    dataset.create(space, Discrete(2))
    arm = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    observations = {
        "camera": np.zeros((2, 4, 4), np.uint8),
        "arm": {"_0": arm, "_1": np.array([0, 2])},
        "height": np.array([10.0, 30.0], np.float32),
        "flags": np.zeros((2, 2), np.int64),
        "counts": np.array([[0, 5], [4, 5]], np.int16),
        "on": np.array([[True, False]] * 2),
    }
    dataset.append(
        [
            Episode(
                episode_id="e",
                observations=observations,
                actions=np.array([0, 1]),
                rewards=np.array([1.0, -1.0]),
                terminated=True,
            )
        ]
    )
    facts = fit_statistics([dataset.snapshot()], observations=True)
    assert set(facts.observations) == {"arm._0", "height", "counts"}
    np.testing.assert_array_equal(facts.observations["arm._0"].mean, arm.mean(axis=0))
    np.testing.assert_array_equal(facts.observations["arm._0"].std, np.full((2, 2), 2))
    assert facts.observations["height"].mean.shape == ()
    assert facts.observations["height"] == (20, 10)
    np.testing.assert_array_equal(facts.observations["counts"].mean, [2, 5])
    np.testing.assert_array_equal(facts.observations["counts"].std, [2, 1])
    assert facts.action_range is None


def test_rewards(lake: Lake) -> None:
    dataset = lake.dataset("d")
    # Returns 4 and 12; all rewards have mean 4 and variance (9 + 1 + 1 + 9) / 4 = 5.
    dataset.append([episode("a", [[0], [0]], [1, 3]), episode("b", [[0], [0]], [5, 7])])
    snapshots = [dataset.snapshot()]
    assert fit_statistics(snapshots, rewards="std").rewards == pytest.approx((0, 5**0.5))
    assert fit_statistics(snapshots, rewards="mean_std").rewards == pytest.approx((4, 5**0.5))
    assert fit_statistics(snapshots, rewards="return_range").rewards == (0, 8 / 1000)
    doubled = fit_statistics(snapshots, reward="2 * reward", rewards="return_range")
    assert doubled.rewards == (0, 16 / 1000)
    one = fit_statistics(snapshots, where='"return" > 5', rewards="return_range")
    assert one.rewards == RewardScaling(0, 1)


def test_what_hardly_varies_is_not_blown_up(lake: Lake) -> None:
    dataset = lake.dataset("d")
    dataset.append([episode("a", [[1.0, 1e-5], [1.0, -1e-5]])])
    _, std = fit_statistics([dataset.snapshot()], observations=True).observations[""]
    np.testing.assert_array_equal(std, np.float32([1, 1e-3]))


def test_far_from_zero_the_spread_is_still_exact(lake: Lake) -> None:
    dataset = lake.dataset("d")
    # A sum of squares in float64 would leave 0 of it, or less.
    values = 1e6 + np.array([0, 1, 2, 3])
    dataset.append([episode("a", values[:, None], values * 1e3)])
    facts = fit_statistics([dataset.snapshot()], observations=True, rewards="std")
    np.testing.assert_allclose(facts.observations[""].std, [1.25**0.5], rtol=1e-6)
    assert facts.rewards.scale == pytest.approx(1000 * 1.25**0.5, rel=1e-9)


@pytest.fixture
def dataset(lake: Lake) -> Dataset:
    dataset = lake.dataset("d")
    dataset.append([episode("a", [[1], [2]], [1, 2])])
    return dataset


def test_refusals(dataset: Dataset) -> None:
    snapshots = [dataset.snapshot()]
    with pytest.raises(
        ConfigInvalidError, match="found rewards 'minmax', expected one of none, std"
    ):
        fit_statistics(snapshots, rewards="minmax")  # type: ignore[arg-type]
    with pytest.raises(EmptyReplayError, match=r"normalization of d@1: found no observation"):
        fit_statistics(snapshots, where="num_steps > 9", observations=True)
    with pytest.raises(EmptyReplayError, match=r"found no return"):
        fit_statistics(snapshots, where="num_steps > 9", rewards="return_range", actions=False)
    with pytest.raises(QueryRefusedError, match=r"reward: .*random"):
        fit_statistics(snapshots, reward="random()", rewards="std")
    with pytest.raises(SchemaMismatchError, match="found a reward that is not finite"):
        fit_statistics(snapshots, reward="'inf'::double", rewards="std")
