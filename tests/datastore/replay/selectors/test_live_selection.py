"""Prioritized and recent selection over a view that follows a dataset."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.replay.sampler import Sampler

Make = Callable[..., Episode]


def rewards(sampler: Sampler, num_batches: int = 10) -> dict[float, float]:
    drawn = np.concatenate([sampler.sample().rewards for _ in range(num_batches)])
    values, counts = np.unique(drawn, return_counts=True)
    return dict(zip(values.tolist(), (counts / len(drawn)).tolist(), strict=True))


def test_new_steps_come_with_the_highest_priority(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("a", 2)])
    with dataset.follow() as view:
        sampler = view.prioritized(100, seed=0, alpha=1.0)
        batch = sampler.sample()
        sampler.update_priorities(batch.indices, np.where(batch.rewards == 1, 4.0, 1.0))
        dataset.append([make_episode("b", 1, rewards=[30.0])])
        assert view.wait_for(2)
        expected = {1.0: 4 / 9, 2.0: 1 / 9, 30.0: 4 / 9}
        assert rewards(sampler) == pytest.approx(expected, abs=0.01)
        stale = sampler.sample()
        delete(lake, "d", "episode_id = 'a'")
        assert view.wait_for(3)
        sampler.update_priorities(stale.indices, np.ones(100))
        assert rewards(sampler) == {30.0: 1.0}


@pytest.mark.slow
def test_old_steps_that_fall_out(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("e0", 50, rewards=np.full(50, 0.0))])
    with dataset.follow(max_steps=100) as view:
        sampler = view.prioritized(400, seed=0)
        rng = np.random.default_rng(0)
        for number in range(1, 60):
            dataset.append([make_episode(f"e{number}", 50, rewards=np.full(50, float(number)))])
            assert view.wait_for(number + 1)
            batch = sampler.sample()
            assert set(batch.rewards.tolist()) == {number - 1.0, float(number)}
            sampler.update_priorities(batch.indices, rng.random(400))


def test_only_recent_steps_of_those_that_came(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("e0", 1, rewards=[0.0], policy_versions=[0])])
    with dataset.follow(columns=["policy_version"]) as view:
        sampler = view.recent(100, max_staleness=1, seed=0)
        assert set(rewards(sampler)) == {0.0}
        for version in (1, 3, 2, 4):
            dataset.append(
                [make_episode(f"e{version}", 1, rewards=[version], policy_versions=[version])]
            )
        assert view.wait_for(5)
        assert rewards(sampler) == pytest.approx({3.0: 0.5, 4.0: 0.5}, abs=0.1)
        delete(lake, "d", "episode_id = 'e4'")
        assert view.wait_for(6)
        assert set(rewards(sampler)) == {3.0}
        sampler.set_policy_version(3)
        assert set(rewards(sampler)) == {2.0, 3.0}
