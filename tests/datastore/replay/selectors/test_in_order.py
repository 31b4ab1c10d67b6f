from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError, NotFoundError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.sampler import Sampler
from replaylake.datastore.replay.selectors.in_order import InOrderSampler
from replaylake.datastore.replay.view import ReplayView

Make = Callable[..., Episode]


def make_view(lake: Lake) -> ReplayView:
    return lake.dataset("d").snapshot().replay(cache=False)


@pytest.fixture
def view(lake: Lake, make_episode: Make) -> ReplayView:
    """100 transitions of three episodes in three shards; rewards 1, 2, ... in each."""
    for i, num in enumerate((60, 39, 1)):
        lake.dataset("d").append([make_episode(f"e{i}", num)])
    return make_view(lake)


REWARDS = [*range(1, 61), *range(1, 40), 1]


class MovingCandidates:
    """Items of a live view over a fixed one's records: those from low to high, but some gone."""

    is_fixed = False
    capacity = 1000

    def __init__(self, starts: Any) -> None:
        self.starts, self.low, self.high = starts, 0, 0
        self.gone: list[int] = []

    def bounds(self) -> tuple[int, int]:
        return self.low, self.high

    def positions(self, numbers: Any) -> Any:
        return np.where(
            (numbers < self.low) | np.isin(numbers, self.gone), -1, self.starts[numbers]
        )


def rewards(sampler: Sampler, num: int) -> list[float]:
    return [reward for _ in range(num) for reward in sampler.sample().rewards.tolist()]


def test_each_step_comes_once_in_order_and_then_nothing(view: ReplayView) -> None:
    sampler = view.in_order(8)
    assert sampler.last_key is None
    assert sampler.num_available == 100
    assert [len(sampler.sample()) for _ in range(12)] == [8] * 12
    assert (sampler.num_consumed, sampler.num_available) == (96, 4)
    assert len(sampler.sample()) == 4
    assert sampler.num_available == 0
    for _ in range(2):
        with pytest.raises(EmptyReplayError, match="found nothing after item 100"):
            sampler.sample()
    assert (sampler.num_consumed, sampler.num_missed) == (100, 0)
    assert rewards(view.in_order(8), 13) == REWARDS


@pytest.mark.parametrize("num_before", [0, 1, 7, 12, 13])
def test_the_cursor_holds_in_the_view_made_again(view: ReplayView, num_before: int) -> None:
    sampler = view.in_order(8)
    rewards(sampler, num_before)
    state = json.loads(json.dumps(sampler.state_dict()))
    restored = view.in_order(8)
    restored.load_state_dict(state)
    assert restored.state_dict() == state
    assert restored.num_available == max(0, 100 - 8 * num_before)
    assert restored.num_consumed == sampler.num_consumed == min(100, 8 * num_before)
    assert rewards(restored, 13 - num_before) == REWARDS[8 * num_before :]
    other_size = view.in_order(25)
    other_size.load_state_dict(state)
    if num_before < 13:
        assert rewards(other_size, 1) == REWARDS[8 * num_before :][:25]


def test_the_cursor_holds_after_compaction_and_in_a_later_version(
    view: ReplayView, lake: Lake, make_episode: Make
) -> None:
    sampler = view.in_order(8)
    rewards(sampler, 9)
    state = sampler.state_dict()
    lake.dataset("d").append([make_episode("e9", 3)])
    compact(lake, "d", open_s=0)
    later = make_view(lake).in_order(8)
    later.load_state_dict(state)
    assert rewards(later, 4) == [*REWARDS, 1, 2, 3][72:]
    assert later.num_consumed == 103
    after = make_view(lake).in_order(8, after=sampler.last_key)
    assert rewards(after, 4) == [*REWARDS, 1, 2, 3][72:]
    # Of other rows of the view, as the first is left out: found by its key.
    fewer = lake.dataset("d").snapshot().replay(where_steps="step > 0", cache=False).in_order(8)
    fewer.load_state_dict(state)
    assert rewards(fewer, 1) == REWARDS[72:80]


def test_steps_that_came_in_between_are_not_silently_passed(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("open", 4), make_episode("other", 4)])
    sampler = make_view(lake).in_order(8)
    rewards(sampler, 1)
    dataset.append([make_episode("open", 2, first_step=4)])
    later = make_view(lake).in_order(8)
    with pytest.raises(
        ConfigInvalidError, match=r"found 10 items up to the one handed out last.* 8 "
    ):
        later.load_state_dict(sampler.state_dict())


def test_a_row_that_is_gone_is_named(view: ReplayView, lake: Lake) -> None:
    sampler = view.in_order(8)
    rewards(sampler, 1)
    other = lake.dataset("d").snapshot().replay("episode_id = 'e1'", cache=False).in_order(8)
    with pytest.raises(NotFoundError, match="among 39, expected the row"):
        other.load_state_dict(sampler.state_dict())
    with pytest.raises(NotFoundError, match=r"found no item of key 0{32}"):
        view.in_order(8, after=np.zeros(2, np.uint64))


def test_sequences_come_in_order_and_are_found_again(view: ReplayView) -> None:
    sampler = view.in_order(3, Sequences(10, burn_in=2))
    first = [sampler.sample() for _ in range(2)]
    restored = view.in_order(3, Sequences(10, burn_in=2))
    restored.load_state_dict(sampler.state_dict())
    one, other = sampler.sample(), restored.sample()
    assert np.array_equal(one.keys, other.keys)
    assert np.array_equal(first[1].keys[-1, 0], restored._key_before)


def live_sampler(view: ReplayView, size: int) -> tuple[MovingCandidates, InOrderSampler]:
    item = Transitions()
    candidates = MovingCandidates(item.starts(view.packed))
    return candidates, InOrderSampler(candidates, view.assembler(item), size)


def test_a_live_view_gives_what_is_there_and_more_when_it_comes(view: ReplayView) -> None:
    candidates, sampler = live_sampler(view, 8)
    with pytest.raises(EmptyReplayError):
        sampler.sample()
    candidates.high = 20
    assert rewards(sampler, 3) == REWARDS[:20]
    with pytest.raises(EmptyReplayError):
        sampler.sample()
    candidates.high = 28
    assert rewards(sampler, 1) == REWARDS[20:28]
    assert sampler.num_missed == 0


def test_what_was_evicted_before_it_was_consumed_is_counted(view: ReplayView) -> None:
    candidates, sampler = live_sampler(view, 8)
    candidates.high = 40
    assert rewards(sampler, 1) == REWARDS[:8]
    candidates.low = 14
    candidates.gone = [15, 17]
    assert rewards(sampler, 1) == [REWARDS[i] for i in (14, 16, 18, 19, 20, 21, 22, 23)]
    assert (sampler.num_consumed, sampler.num_missed) == (16, 8)
    state = sampler.state_dict()
    assert (state["num_consumed"], state["num_missed"]) == (16, 8)
    candidates.low = 40
    with pytest.raises(EmptyReplayError):
        sampler.sample()
    assert (sampler.num_consumed, sampler.num_missed) == (16, 24)
    # Made anew: it counts from where the view then begins.
    again, restored = live_sampler(view, 8)
    again.low, again.high = 20, 60
    restored.load_state_dict(state)
    assert rewards(restored, 1) == REWARDS[24:32]
    assert (restored.num_consumed, restored.num_missed) == (24, 8)


def test_following_a_dataset_each_step_comes_once(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("open", 20)])
    with dataset.follow(max_steps=1000) as live:
        live.wait_for(num_steps=20, timeout_s=10)
        sampler = live.in_order(8)
        assert rewards(sampler, 3) == [*range(1, 21)]
        with pytest.raises(EmptyReplayError):
            sampler.sample()
        # By arrival: more of the first episode after the second one.
        dataset.append([make_episode("other", 3)])
        live.wait_for(num_steps=23, timeout_s=10)
        dataset.append([make_episode("open", 4, first_step=20)])
        live.wait_for(num_steps=27, timeout_s=10)
        assert rewards(sampler, 1) == [1, 2, 3, 21, 22, 23, 24]
        assert (sampler.num_consumed, sampler.num_missed) == (27, 0)
