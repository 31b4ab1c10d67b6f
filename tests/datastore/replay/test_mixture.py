from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError, SchemaMismatchError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.mixture import mixture
from replaylake.datastore.replay.view import ReplayView

Make = Callable[..., Episode]


@pytest.fixture
def views(lake: Lake, make_episode: Make) -> list[ReplayView]:
    """Two datasets of 40 steps each; those of the first have rewards below 100, others above."""
    for name, first in (("offline", 0), ("online", 100)):
        rewards = np.arange(40) + first + 1.0
        lake.dataset(name).append([make_episode("e", 40, rewards=rewards)])
    return [lake.dataset(name).snapshot().replay(cache=False) for name in ("offline", "online")]


def num_of_second(batch: Batch) -> int:
    return int((batch.rewards > 100).sum())


def test_rows_are_by_ratio_in_each_batch_and_exactly_so_on_average(views: Any) -> None:
    samplers = [view.uniform(1, seed=0) for view in views]
    mixed = mixture(samplers, [7, 3], batch_size=32, seed=1)
    counts = []
    for _ in range(2000):
        batch = mixed.sample()
        assert len(batch) == 32
        counts.append(num_of_second(batch))
    # 9.6 of 32: 10 in 3 of 5 batches. The mean of 2,000 is off by 0.011 on average.
    assert set(counts) == {9, 10}
    assert np.mean(counts) == pytest.approx(9.6, abs=0.035)


def test_exact_shares_are_exact_and_nothing_is_never_drawn(views: Any) -> None:
    samplers = [view.uniform(1, seed=0) for view in (*views, views[0])]
    mixed = mixture(samplers, [0.5, 0.5, 0.0], batch_size=8, seed=1)
    assert {num_of_second(mixed.sample()) for _ in range(100)} == {4}
    small = mixture(samplers[:2], [99, 1], batch_size=1, seed=1)
    assert np.mean([num_of_second(small.sample()) for _ in range(5000)]) == pytest.approx(
        0.01, abs=0.006
    )


def test_rows_keep_what_they_are(views: Any) -> None:
    mixed = mixture(
        [v.uniform(1, seed=i) for i, v in enumerate(views)], [1, 1], batch_size=10, seed=0
    )
    keys = {r: k for v in views for r, k in zip(*_rewards_and_keys(v), strict=True)}
    for _ in range(20):
        batch = mixed.sample()
        assert [key.tobytes() for key in batch.keys] == [keys[r] for r in batch.rewards.tolist()]
        steps = (batch.rewards - 1) % 100
        assert np.array_equal(batch.observations, np.stack([steps, -steps], 1))
        assert np.array_equal(batch.actions, steps % 2)
        assert np.array_equal(batch.next_observations[:, 0], steps + 1)


def _rewards_and_keys(view: ReplayView) -> tuple[list[float], list[bytes]]:
    batch = view.in_order(100).sample()
    return batch.rewards.tolist(), [key.tobytes() for key in batch.keys]


@pytest.mark.parametrize("num_before", [0, 1, 30])
def test_resumes_bit_for_bit(
    views: Any, num_before: int, same: Callable[[Batch, Batch], bool]
) -> None:
    def make(seed: int) -> Any:
        offline, online = views
        return mixture(
            [offline.shuffled(7, seed=seed), online.uniform(1, seed=seed)],
            [2, 1],
            batch_size=16,
            seed=seed,
        )

    mixed = make(5)
    for _ in range(num_before):
        mixed.sample()
    state = json.loads(json.dumps(mixed.state_dict()))
    restored = make(99)
    restored.load_state_dict(state)
    for _ in range(100):
        assert same(restored.sample(), mixed.sample())
    with pytest.raises(ConfigInvalidError, match="found a state of 2 samplers, expected of 1"):
        mixture([views[0].uniform(1, seed=0)], [1], batch_size=4, seed=0).load_state_dict(state)


def test_epochs_go_on_and_what_is_consumed_runs_out(views: Any) -> None:
    offline, online = views
    mixed = mixture(
        [online.in_order(1), offline.shuffled(7, seed=0)], [1, 1], batch_size=20, seed=0
    )
    batches = [mixed.sample() for _ in range(4)]
    rewards = np.concatenate([batch.rewards for batch in batches])
    assert rewards[rewards > 100].tolist() == list(range(101, 141))
    assert sorted(rewards[rewards < 100].tolist()) == list(range(1, 41))
    for _ in range(2):
        state = mixed.state_dict()
        with pytest.raises(EmptyReplayError):
            mixed.sample()
        assert mixed.state_dict()["samplers"] == state["samplers"], "nothing was drawn"
    odd = mixture([online.in_order(1), offline.uniform(1, seed=0)], [3, 1], batch_size=20, seed=0)
    assert [len(odd.sample()) for _ in range(3)] == [20, 20, 15], "10 were left of 15"


def test_priorities_go_to_the_sampler_that_drew_the_row(views: Any) -> None:
    offline, online = views
    prioritized = online.prioritized(1, seed=0)
    other = offline.prioritized(1, seed=0)
    samplers = [offline.uniform(1, seed=0), prioritized, other]
    mixed = mixture(samplers, [1, 1, 1], batch_size=120, seed=0)
    batch = mixed.sample()
    number_of = {101.0 + i: i for i in range(40)}
    mixed.update_priorities(batch.indices, np.where(batch.rewards == 120.0, 1.0, 0.0))
    rows = [number_of[r] for r in batch.rewards.tolist() if r > 100]
    assert number_of[120.0] in rows
    assert set(rows) == set(range(40)), "each was drawn, as strata are of one each"
    later = mixed.sample()
    assert set(later.rewards[later.rewards > 100].tolist()) == {120.0}
    with pytest.raises(ConfigInvalidError, match="found no sampler that draws by priorities"):
        mixture(samplers[:1], [1], batch_size=4, seed=0).update_priorities([0], [1.0])


def test_where_one_has_masks_those_of_the_other_are_all_true(
    lake: Lake, make_episode: Make
) -> None:
    masks = np.tile([[True, False], [False, True]], (5, 1))
    lake.dataset("masked").append([make_episode("e", 10, action_masks=masks)])
    lake.dataset("plain").append([make_episode("e", 10, rewards=np.arange(10) + 101.0)])
    samplers = [lake.dataset(n).snapshot().replay().uniform(1, seed=0) for n in ("masked", "plain")]
    for item in (samplers, samplers[::-1]):
        batch = mixture(item, [1, 1], batch_size=8, seed=0).sample()
        plain = batch.rewards > 100
        assert batch.action_masks[plain].all()
        assert batch.action_masks[~plain].sum(axis=1).tolist() == [1] * 4
        assert batch.next_action_masks.shape == (8, 2)


def test_what_does_not_go_together_is_refused(views: Any, lake: Lake, make_episode: Make) -> None:
    def refused(samplers: list[Any], match: str) -> None:
        with pytest.raises(SchemaMismatchError, match=match):
            mixture(samplers, [1, 1], batch_size=8, seed=0).sample()

    first = views[0].uniform(1, seed=0)
    lake.dataset("other").append([make_episode(actions=[0, 1, 2])])
    other = lake.dataset("other").snapshot().replay(cache=False)
    refused([first, other.uniform(1, seed=0)], "the action space is Discrete")
    stacked = lake.dataset("online").snapshot().replay(frame_stack=2, cache=False)
    refused([first, stacked.uniform(1, seed=0)], "frame_stack is 1 and 2")
    wide = lake.dataset("online").snapshot().replay(columns=["policy_version"], cache=False)
    refused([first, wide.uniform(1, seed=0)], "column.policy_version is not there and int64")
    long = views[1].uniform(1, Sequences(4), seed=0)
    refused([first, long], "mixture: observations of a row has shapes")
    refused([views[0].uniform(1, Sequences(5), seed=0), long], "expected one")


@pytest.mark.parametrize("ratios", [[1], [1, -1], [0, 0], [1, float("nan")], [1, 2, 3]])
def test_ratios_that_make_no_sense_are_refused(views: Any, ratios: list[float]) -> None:
    samplers = [view.uniform(1, seed=0) for view in views]
    with pytest.raises(ConfigInvalidError, match="mixture: found"):
        mixture(samplers, ratios, batch_size=4, seed=0)
    with pytest.raises(ConfigInvalidError, match="found 0 samplers"):
        mixture([], [], batch_size=4, seed=0)
    with pytest.raises(ConfigInvalidError, match="batch size 0"):
        mixture(samplers, [1, 1], batch_size=0, seed=0)


def test_items_of_one_sampler_need_not_be_those_of_another(views: Any) -> None:
    samplers = [
        views[0].uniform(1, Transitions(0.9, n_step=3), seed=0),
        views[1].uniform(1, Transitions(0.9), seed=0),
    ]
    batch = mixture(samplers, [1, 1], batch_size=8, seed=0).sample()
    assert batch.discounts[-4:].tolist() == [np.float32(0.9)] * 4


def test_returns_are_of_all_samplers_or_of_none(views: Any) -> None:
    item = Transitions(1.0, returns=True, next_actions=True)
    both = mixture([view.uniform(1, item, seed=0) for view in views], [1, 1], batch_size=8, seed=1)
    batch = both.sample()
    # Of 40 steps that earn 1 more each time, to 40 or 140: both episodes end with the last.
    last = np.where(batch.rewards > 100, 140, 40)
    num_left = last - batch.rewards + 1
    np.testing.assert_allclose(batch.returns, num_left * (batch.rewards + last) / 2)
    assert batch.next_actions.dtype == batch.actions.dtype
    samplers = [views[0].uniform(1, item, seed=0), views[1].uniform(1, seed=0)]
    with pytest.raises(SchemaMismatchError, match=r"found returns in batches of 1 of 2 samplers"):
        mixture(samplers, [1, 1], batch_size=8, seed=1).sample()
