import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.online.collecting.rollout_batch import RolloutBatch
from replaylake.online.recording.episode_committer import EpisodeCommitter
from replaylake.online.recording.feed import ArrivedSteps, DirectFeed, LakeFeed


def episode(number, num_steps=4):
    return Episode(
        f"test/{number}",
        observations=np.full((num_steps, 3), number, np.float32),
        actions=np.zeros(num_steps, np.int64),
        rewards=np.ones(num_steps),
        terminated=True,
    )


@pytest.fixture
def dataset(lake):
    dataset = lake.dataset("toys")
    dataset.create(Box((3,)), Discrete(2))
    return dataset


def test_steps_arrive_once_they_are_committed_and_in_the_view(dataset):
    with dataset.follow() as view, EpisodeCommitter(dataset, "run", interval_s=0.01) as recorder:
        feed = LakeFeed(view, recorder)
        for number in range(3):
            feed.add(RolloutBatch(0, written=dataset.write([episode(number)]), num_steps=4))
        assert feed.drain(10)
        assert feed.take_arrived() == [ArrivedSteps(4, None)] * 3
        assert feed.take_arrived() == []
        assert view.num_steps == 12


def test_what_was_put_has_arrived_at_once(dataset):
    with dataset.follow(without_producers=["run"]) as view:
        feed = DirectFeed(view, None)
        feed.add(RolloutBatch(0, pieces=[episode(0)], num_steps=4))
        assert (feed.take_arrived(), view.num_steps) == ([ArrivedSteps(4, None)], 4)


@pytest.mark.parametrize("is_direct", [True, False])
def test_steps_whose_rewards_are_not_known_yet_keep_nobody_waiting(dataset, is_direct):
    """As of a game that is slow: a worker's time is over after a step of one of two agents."""
    with dataset.follow() as view, EpisodeCommitter(dataset, "run", interval_s=0.01) as recorder:
        feed = DirectFeed(view, recorder) if is_direct else LakeFeed(view, recorder)
        feed.add(RolloutBatch(0, num_steps=2))
        assert feed.drain(10)
        assert feed.take_arrived() == [ArrivedSteps(2, None)]
