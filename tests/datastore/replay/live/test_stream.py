from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete
from replaylake.datastore.errors import ConfigInvalidError, EpisodeInvalidError, SchemaMismatchError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.replay.items.episodes import Episodes
from replaylake.datastore.replay.items.hindsight import Hindsight
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.live.live_view import LiveView
from replaylake.datastore.replay.live.stream import Stream
from replaylake.datastore.replay.protocols import Item, SelectedItems

Make = Callable[..., Episode]
Check = Callable[..., None]


def append(stream: Stream, number: int, step: int, **fields: Any) -> None:
    stream.append(
        np.array([number, step], np.float32), (number + step) % 5, number + step / 1000, **fields
    )


def drawn(view: LiveView, item: Item) -> Any:
    candidates = view.candidates(item)
    numbers = np.arange(*candidates.bounds())
    positions = candidates.positions(numbers)
    return view.assembler(item).assemble(positions[positions >= 0], SelectedItems(numbers)).batch


def test_a_goal_is_of_the_same_episode_while_that_grows(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its end was there is a step by now, whose key is no link."""
    goal = Box((1,))
    dataset = lake.dataset("goals")
    dataset.create(Dict({"achieved_goal": goal, "desired_goal": goal}), Discrete(2))
    with dataset.follow() as view:
        stream = view.stream("e")

        def steps(first: int, num: int) -> None:
            for step in range(first, first + num):
                achieved = np.array([step], np.float32)
                stream.append({"achieved_goal": achieved, "desired_goal": achieved}, 0, 0.0)

        steps(0, 6)
        item = Hindsight(
            compute_reward=lambda achieved, desired, info: np.zeros(len(achieved)),
            seed=0,
            fraction=1.0,
            strategy="final",
        )
        sampler = view.uniform(4, item, seed=0)
        sampler.sample()
        ring = view.assembler(item).records
        take = ring.take

        def take_and_grow(field: str, positions: Any) -> Any:
            monkeypatch.setattr(ring, "take", take)
            found = take(field, positions)
            steps(6, 4)
            view.wait_for(num_steps=9)
            return found

        monkeypatch.setattr(ring, "take", take_and_grow)
        assert (sampler.sample().observations["desired_goal"] == 9).all()


def test_steps_can_be_sampled_at_the_next_draw(dataset: Dataset, check_told: Check) -> None:
    with dataset.follow() as view:
        sampler = view.uniform(64, seed=0)
        three = view.uniform(64, Transitions(n_step=3), seed=0)
        stream = view.stream("e7")
        for step in range(40):
            append(stream, 7, step)
            if step:
                batch = sampler.sample()
                check_told(batch)
                # The one before the last, as what follows the last is not known yet.
                assert view.num_steps == view.num_transitions == step
                check_told(three.sample(), n_step=3)
        assert set(drawn(view, Transitions()).observations[:, 1]) == set(range(39))
        append(stream, 7, 40, terminated=True)
        assert view.num_steps == view.num_transitions == 41
        last = drawn(view, Transitions(0.5))
        assert (last.discounts == 0).sum() == 1
        with pytest.raises(ConfigInvalidError, match="found a step after its end"):
            append(stream, 7, 41)


def test_as_if_it_had_been_committed(dataset: Dataset, make_told: Make) -> None:
    """Several episodes at once, in pieces of any size, make the items that a commit makes."""
    items = (Transitions(n_step=3), Sequences(5, overlap=2, burn_in=1), Episodes())
    lengths = [1, 2, 37, 300, 70]
    with dataset.follow(frame_stack=3) as view, dataset.follow(frame_stack=3) as other:
        for item in items:
            view.candidates(item)
        sampler = view.uniform(8, seed=0)
        streams = [view.stream(f"e{number}") for number in range(len(lengths))]
        rng = np.random.default_rng(0)
        for step in range(max(lengths)):
            for number, length in enumerate(lengths):
                if step < length:
                    final = np.array([number, length], np.float32) if step + 1 == length else None
                    ends = {"truncated": step + 1 == length, "final_observation": final}
                    append(streams[number], number, step, **ends)
            if step and rng.random() < 0.3:
                sampler.sample()
        version = dataset.append(
            [make_told(n, length, truncated=True) for n, length in enumerate(lengths)]
        ).version
        assert other.wait_for(version)
        for item in items:
            one, two = drawn(view, item), drawn(other, item)
            assert len(one) == len(two)
            assert rows(one) == rows(two)
        # The commit brings nothing new to the view that has the steps already.
        assert view.wait_for(version)
        assert view.num_steps == view.num_transitions == other.num_steps == sum(lengths)


def rows(batch: Any) -> list[Any]:
    names = ("keys", "observations", "actions", "rewards", "next_observations", "discounts")
    # How a sum is rounded differs with the number of rows.
    arrays = [np.round(getattr(batch, name).reshape(len(batch), -1), 4) for name in names]
    # Padding at the end differs with the longest row of the batch.
    found = zip(*arrays, strict=True)
    return sorted(tuple(tuple(v for v in part if v) for part in row) for row in found)


def test_a_commit_that_is_ahead_of_the_stream(dataset: Dataset, make_told: Make) -> None:
    with dataset.follow() as view:
        sampler = view.uniform(8, seed=0)
        stream = view.stream("e1")
        for step in range(5):
            append(stream, 1, step)
        sampler.sample()
        version = dataset.append([make_told(1, 8, final_observation=None)]).version
        assert view.wait_for(version)
        for step in range(5, 12):
            append(stream, 1, step)
        append(stream, 1, 12, final_observation=np.array([1, 13], np.float32))
        assert view.num_steps == view.num_transitions == 13
        batch = view.uniform(64, Transitions(n_step=30), seed=0).sample()
        assert (batch.next_observations[:, 1] == 13).all()


def test_ends_of_all_kinds(dataset: Dataset) -> None:
    with dataset.follow() as view:
        truncated, closed, cut = (view.stream(f"e{number}") for number in range(3))
        append(truncated, 0, 0)
        append(truncated, 0, 1, truncated=True)
        append(closed, 1, 0)
        append(closed, 1, 1)
        closed.close()
        append(cut, 2, 0, final_observation=np.array([2, 1], np.float32))
        append(cut, 2, 1, final_observation=np.array([2, 9], np.float32))
        append(cut, 2, 2, terminated=True)
        # Without what followed them: the truncated one, and the one after which nothing came.
        assert (view.num_steps, view.num_transitions) == (7, 5)
        batch = drawn(view, Transitions(n_step=5))
        reached = {
            (int(o[0]), int(o[1])): (n[1], d > 0)
            for o, n, d in zip(
                batch.observations, batch.next_observations, batch.discounts, strict=True
            )
        }
        assert reached == {
            (0, 0): (1, True),
            (1, 0): (1, True),
            # What the log says was seen after step 1 is not where step 2 begins.
            (2, 0): (9, True),
            (2, 1): (9, True),
            (2, 2): (2, False),
        }


def test_masks_log_probabilities_and_columns(lake: Lake) -> None:
    dataset = lake.dataset("d")
    space = Dict({"near": Box((2,)), "far": Discrete(4)})
    extras = {"hidden": pa.list_(pa.float32(), 2), "value": pa.float64(), "flag": pa.bool_()}
    dataset.create(space, Box((2,)), mask_size=3, extras=extras)
    with dataset.follow(columns=["hidden", "value", "policy_version"]) as view:
        stream = view.stream("e")
        near = np.zeros(2, np.float32)
        for step in range(4):
            near[:] = step
            given: dict[str, Any] = {}
            if step >= 2:
                given["action_mask"] = [True, False, True]
                given["columns"] = {"hidden": [step, 0.5], "policy_version": 7}
            stream.append(
                {"near": near, "far": step},
                [0.5, step],
                1,
                behavior_log_prob=-step,
                terminated=step == 3,
                **given,
            )
        batch = drawn(view, Transitions())
        assert batch.observations["near"].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
        assert batch.next_observations["far"].tolist() == [1, 2, 3, 3]
        assert batch.actions[:, 1].tolist() == [0, 1, 2, 3]
        assert batch.behavior_log_probs.tolist() == [0, -1, -2, -3]
        assert batch.action_masks.all(axis=1).tolist() == [True, True, False, False]
        assert batch.next_action_masks.all(axis=1).tolist() == [True, False, False, True]
        assert batch.columns["policy_version"].tolist() == [-1, -1, 7, 7]
        assert batch.columns["hidden"][2:].tolist() == [[2, 0.5], [3, 0.5]]
        assert np.isnan(batch.columns["hidden"][:2]).all()
        with pytest.raises(EpisodeInvalidError, match="found columns flag, expected some of"):
            view.stream("f").append({"near": near, "far": 0}, near, 0.0, columns={"flag": True})
    with dataset.follow(columns=["flag"]) as view:
        stream = view.stream("e")
        stream.append({"near": near, "far": 0}, near, 0.0)
        with pytest.raises(SchemaMismatchError, match="column 'flag': found 1 nulls"):
            stream.close()


@pytest.mark.parametrize(
    ("observation", "action", "reward", "expected"),
    [
        ([1.0, 2.0, 3.0], 1, 0.0, r"step 4 of the stream: observation: found shape \[3\]"),
        (1.0, 1, 0.0, r"step 4 of the stream: observation: found shape \[\]"),
        ([1.0, np.nan], 1, 0.0, "step 4 of the stream: observation at step 0: found .*nan"),
        ([1.0, 2.0], 1.5, 0.0, "step 4 of the stream: action"),
        ([1.0, 2.0], [1, 1], 0.0, r"step 4 of the stream: action: found shape \[2\]"),
        ([1.0, 2.0], None, 0.0, "step 4 of the stream: action"),
        ([1.0, 2.0], 1, np.inf, "step 4 of the stream: reward: found inf"),
        ([1.0, 2.0], 1, [1.0, 2.0], "step 4 of the stream: reward"),
        ([1.0, 2.0], 1, "much", "step 4 of the stream: reward: found 'much'"),
    ],
)
def test_what_does_not_fit_is_named(
    dataset: Dataset, observation: Any, action: Any, reward: Any, expected: str
) -> None:
    with dataset.follow() as view:
        stream = view.stream("e3")
        for step in range(4):
            append(stream, 3, step)
        stream.append(observation, action, reward)
        append(stream, 3, 5)
        sampler = view.uniform(4, seed=0)
        with pytest.raises(EpisodeInvalidError, match=expected):
            sampler.sample()
        # Once; the steps that were packed with it are left out, and those after it come.
        append(stream, 3, 6, terminated=True)
        assert view.num_steps == 2
        assert sampler.sample().observations[:, 1].min() == 5


def test_what_the_caller_changes_afterwards_is_not_seen(dataset: Dataset) -> None:
    with dataset.follow() as view:
        stream = view.stream("e")
        observation = np.zeros(2, np.float32)
        for step in range(300):
            observation[1] = step
            stream.append(observation, 0, 0.0)
        observation[:] = 99
        stream.close()
        batch = drawn(view, Transitions())
        assert sorted(batch.observations[:, 1].tolist()) == list(range(299))


def test_who_samples_may_be_another_thread(dataset: Dataset, check_told: Check) -> None:
    with dataset.follow() as view, ThreadPoolExecutor(1) as pool:
        sampler = view.uniform(32, seed=0)
        stream = view.stream("e1")
        for step in range(3):
            append(stream, 1, step)
        drawing = pool.submit(lambda: [check_told(sampler.sample()) for _ in range(1000)])
        step = 2
        while not drawing.done():
            step += 1
            append(stream, 1, step)
        drawing.result()
        stream.close()
        assert set(drawn(view, Transitions()).observations[:, 1]) == set(range(step))
        assert view.num_steps == step + 1


def test_a_draw_waits_for_another_thread_where_there_is_nothing_else(
    dataset: Dataset, check_told: Check
) -> None:
    """What holds the lock for a moment, such as a decoder, does not make the view look empty."""
    with dataset.follow() as view, ThreadPoolExecutor(1) as pool:
        sampler = view.uniform(32, seed=0)
        stream = view.stream("e1")
        for step in range(3):
            append(stream, 1, step)
        with view._follower.arrived:
            drawing = pool.submit(sampler.sample)
            with pytest.raises(TimeoutError):
                drawing.result(timeout=0.2)
        check_told(drawing.result(timeout=60))
        stream.close()


@pytest.mark.slow
def test_steps_fall_out_while_they_are_appended(dataset: Dataset, check_told: Check) -> None:
    with dataset.follow(max_steps=300) as view:
        sampler = view.uniform(32, Transitions(n_step=4), seed=0)
        number, num_steps = 0, 0
        streams = [view.stream(f"e{n}") for n in range(3)]
        numbers = list(range(3))
        at = [0, 0, 0]
        for tick in range(1000):
            for i in range(3):
                ends = (tick * (i + 1)) % 83 == 82
                final = np.array([numbers[i], at[i] + 1], np.float32) if ends else None
                append(streams[i], numbers[i], at[i], truncated=ends, final_observation=final)
                at[i] += 1
                if ends:
                    number += 1
                    numbers[i], at[i] = number + 10, 0
                    streams[i] = view.stream(f"e{numbers[i]}")
            if tick > 2:
                check_told(sampler.sample(), n_step=4)
                num_steps = view.num_steps
                assert num_steps <= 300
        assert num_steps >= 297
        assert view.num_transitions == len(drawn(view, Transitions()))
