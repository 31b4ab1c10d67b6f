from dataclasses import replace

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.runs.timings import Timings
from replaylake.datastore.maintenance.compact import compact
from replaylake.offline.algorithms.catalog import make_learner
from replaylake.online.training.config import OnlineConfig
from replaylake.online.training.on_policy_batches import OnPolicyBatches

SPACES = (Box((3,)), Discrete(2))


def episode(number, num_steps=8):
    return Episode(
        f"test/{number}",
        observations=np.full((num_steps, 3), number, np.float32),
        actions=np.zeros(num_steps, np.int64),
        rewards=np.ones(num_steps),
        behavior_log_probs=np.zeros(num_steps, np.float32),
        policies=np.full(num_steps, "p", dtype=object),
        policy_versions=np.zeros(num_steps, np.int64),
        terminated=True,
    )


@pytest.fixture
def view(lake):
    dataset = lake.dataset("toys")
    dataset.create(*SPACES)
    dataset.append([episode(number) for number in range(6)])
    with dataset.follow(columns=["policy_version"]) as view:
        yield view


def supply(view, **given):
    options = {"hidden_sizes": [4], "num_sequences": 2, "length": 8, "minibatches": 1}
    learner = make_learner("ppo", *SPACES, options=options, seed=0)
    return OnPolicyBatches(
        view, learner, OnlineConfig("ppo", min_size=1, **given), Timings("trainer")
    )


def numbers(batch):
    return sorted(set(batch.observations[..., 0].ravel().tolist()))


def test_it_goes_on_after_what_was_taken_last(view):
    first = supply(view)
    assert numbers(first.sample()) == [0, 1]
    again = supply(view)
    again.load_state_dict(first.state_dict())
    assert numbers(again.sample()) == [2, 3]


def test_what_came_before_it_and_was_not_taken_is_taken_then(view):
    first = supply(view)
    first.sample()
    state = first.state_dict()
    # As where the first of them had come later.
    state["taken"] = {name: array[1:] for name, array in state["taken"].items()}
    again = supply(view)
    again.load_state_dict(state)
    batch = again.sample()
    assert (again.num_taken, batch.mask.sum(axis=1).tolist()) == (8, [8, 0])
    assert numbers(again.sample()) == [2, 3]


def test_it_begins_with_what_there_is_where_all_that_was_taken_is_gone(view):
    first = supply(view)
    first.sample()
    state = first.state_dict()
    state["taken"]["keys"][:] += np.uint64(1)
    again = supply(view)
    again.load_state_dict(state)
    assert numbers(again.sample()) == [0, 1]


def test_nothing_is_handed_out_where_all_there_is_was_taken(view):
    first = supply(view)
    while first.is_ready:
        assert first.sample() is not None
    again = supply(view)
    again.load_state_dict(first.state_dict())
    assert again.is_ready
    assert again.sample() is None
    assert (again.num_taken, again.is_ready) == (0, False)
    # And so the third time.
    third = supply(view)
    third.load_state_dict(again.state_dict())
    assert third.sample() is None


def test_it_remembers_what_a_view_can_have_and_no_more(view):
    first = supply(view, capacity=12)
    for _ in range(3):
        first.sample()
    # Batches of 16 steps: two of them have the 24 that are asked for.
    assert first.state_dict()["taken"]["lengths"].tolist() == [8] * 4


def pieces(rng, num_lanes=5, num_steps=600):
    """Yield rounds of pieces of lanes that go on at paces of their own, some of long episodes."""
    lanes = [[lane, 0, int(rng.integers(1, 90))] for lane in range(num_lanes)]
    made = 0
    while made < num_steps:
        parts = []
        for lane in lanes:
            number, at, length = lane
            num = min(int(rng.integers(0, 12)), length - at)
            if not num:
                continue
            whole = episode(number, length)
            ends = at + num == length
            parts.append(
                replace(
                    whole,
                    observations=np.arange(at, at + num)[:, None] + np.full(3, 1000 * number, "f4"),
                    actions=whole.actions[:num],
                    rewards=whole.rewards[:num],
                    behavior_log_probs=whole.behavior_log_probs[:num],
                    policies=whole.policies[:num],
                    policy_versions=whole.policy_versions[:num],
                    final_observation=np.full(3, 1000 * number + at + num, "f4"),
                    terminated=ends,
                    first_step=at,
                )
            )
            made += num
            lane[1] += num
            if ends:
                lane[:] = [number + num_lanes, 0, int(rng.integers(1, 90))]
        yield parts


def steps(batch):
    return batch.observations[..., 0].numpy()[batch.mask.numpy()].astype(int).tolist()


@pytest.mark.parametrize("seed", range(6))
def test_each_step_is_taken_once_whatever_order_a_view_made_anew_has(lake, seed):
    rng = np.random.default_rng(seed)
    dataset = lake.dataset("toys")
    dataset.create(*SPACES)
    taken = []
    with dataset.follow(columns=["policy_version"], without_producers=["run"], since=0) as view:
        first = supply(view)
        waiting, states = [], []
        for parts in pieces(rng):
            view.put(parts)
            waiting += parts
            while first.is_ready and rng.random() < 0.8:
                taken += steps(first.sample())
            if rng.random() < 0.1:
                # Recorded together, in an order of their own.
                dataset.append([waiting[i] for i in rng.permutation(len(waiting))])
                waiting = []
                states.append((len(taken), first.state_dict()))
        if waiting:
            dataset.append(waiting)
        states.append((len(taken), first.state_dict()))
    if seed % 2:
        compact(lake, "toys")
    num_taken, state = states[int(rng.integers(len(states)))]
    taken = taken[:num_taken]
    with dataset.follow(columns=["policy_version"], since=0) as view:
        assert view.wait_for(dataset.snapshot().version)
        again = supply(view)
        again.load_state_dict(state)
        while again.is_ready:
            if (batch := again.sample()) is not None:
                taken += steps(batch)
    rows = lake.sql("select episode_id, num_steps, complete from toys.episodes").to_pylist()
    # Of an episode that nobody goes on with, what is less than a sequence is never one.
    there = {
        1000 * int(row["episode_id"].partition("/")[2]) + at
        for row in rows
        for at in range(row["num_steps"] if row["complete"] else row["num_steps"] // 8 * 8)
    }
    assert len(taken) == len(set(taken))
    assert set(taken) <= there
    # One that makes no batch is left.
    assert len(there - set(taken)) <= 8
    assert len(taken) > 300


def test_what_left_memory_after_it_was_ready_is_no_batch(lake, monkeypatch):
    dataset = lake.dataset("toys")
    dataset.create(*SPACES)
    with dataset.follow(columns=["policy_version"], since=0, max_steps=200) as view:
        batches = supply(view, capacity=200)
        for parts in pieces(np.random.default_rng(0)):
            view.put(parts)
        assert batches.is_ready
        # Whoever follows the dataset pushes all of them out before they are read.
        sampler = batches._sampler
        find = sampler._candidates.positions
        monkeypatch.setattr(sampler._candidates, "positions", lambda n: np.full_like(find(n), -1))
        assert batches.sample() is None
        assert batches.num_taken == 0


@pytest.mark.parametrize("seed", range(4))
def test_none_is_taken_twice_where_the_beginning_of_an_episode_is_no_longer_in_memory(lake, seed):
    dataset = lake.dataset("toys")
    dataset.create(*SPACES)
    taken = []
    with dataset.follow(
        columns=["policy_version"], without_producers=["run"], since=0, max_steps=200
    ) as view:
        first = supply(view, capacity=200)
        for parts in pieces(np.random.default_rng(seed)):
            view.put(parts)
            dataset.append(parts)
            while first.is_ready and len(taken) < 450:
                if (batch := first.sample()) is not None:
                    taken += steps(batch)
        state = first.state_dict()
    num_taken = len(taken)
    with dataset.follow(columns=["policy_version"], since=0, max_steps=200) as view:
        assert view.wait_for(dataset.snapshot().version)
        again = supply(view, capacity=200)
        again.load_state_dict(state)
        while again.is_ready:
            if (batch := again.sample()) is not None:
                taken += steps(batch)
    assert len(taken) > num_taken
    assert len(taken) == len(set(taken))
