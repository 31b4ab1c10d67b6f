from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.replay.sampler import Sampler, split
from replaylake.datastore.replay.view import ReplayView

Make = Callable[..., Episode]


@pytest.fixture
def view(lake: Lake, make_episode: Make) -> ReplayView:
    """100 transitions, of rewards 1 to 100."""
    lake.dataset("d").append([make_episode("e", 100)])
    return lake.dataset("d").snapshot().replay(cache=False)


def make_batch(num: int) -> Batch:
    numbers = np.arange(num, dtype=np.float32)
    # Every other record, as views of packed ones are.
    strided = np.arange(6 * num).reshape(num, 6)[:, 1:4]
    return Batch(
        observations={"a": strided, "b": {"c": numbers}},
        actions=strided,
        rewards=numbers,
        discounts=numbers,
        next_observations={"a": strided, "b": {"c": numbers}},
        behavior_log_probs=numbers,
        weights=numbers,
        keys=np.stack([numbers, numbers], 1),
        columns={"x": numbers},
    )


@pytest.mark.parametrize("num", [1, 4, 5, 12, 40, 41])
@pytest.mark.parametrize("size", [1, 4, 5, 100])
def test_batches_are_split_without_a_copy(num: int, size: int) -> None:
    batch = make_batch(num)
    parts = split(batch, size)
    assert [len(part) for part in parts] == [min(size, num - i) for i in range(0, num, size)]
    for i, part in enumerate(parts):
        rows = slice(i * size, i * size + size)
        expected = Batch(
            **{
                **{
                    n: v if v is None or isinstance(v, dict) else v[rows]
                    for n, v in vars(batch).items()
                },
                "observations": {"a": batch.actions[rows], "b": {"c": batch.rewards[rows]}},
                "next_observations": {"a": batch.actions[rows], "b": {"c": batch.rewards[rows]}},
                "columns": {"x": batch.rewards[rows]},
            }
        )
        assert str(vars(part)) == str(vars(expected))
        assert np.shares_memory(part.actions, batch.actions)


def makers(view: ReplayView) -> dict[str, Callable[[int], Sampler]]:
    return {
        "uniform": lambda seed: view.uniform(7, seed=seed),
        "large": lambda seed: view.uniform(2000, seed=seed),
        "shuffled": lambda seed: view.shuffled(7, seed=seed),
        "prioritized": lambda seed: view.prioritized(7, seed=seed),
    }


@pytest.mark.parametrize("num_before", [0, 1, 45, 146, 147])
@pytest.mark.parametrize("kind", ["uniform", "large", "shuffled", "prioritized"])
def test_resumes_bit_for_bit_in_the_middle_of_a_block(
    view: ReplayView, kind: str, num_before: int, same: Callable[[Batch, Batch], bool]
) -> None:
    make = makers(view)[kind]
    sampler = make(1)
    for _ in range(num_before):
        sampler.sample()
    state = sampler.state_dict()
    if kind != "prioritized":
        state = json.loads(json.dumps(state))
    other = make(2)
    other.sample()
    other.load_state_dict(state)
    once_more = make(3)
    once_more.load_state_dict(other.state_dict())
    for _ in range(100):
        batch = sampler.sample()
        assert same(other.sample(), batch)
        assert same(once_more.sample(), batch)


def test_blocks_hold_what_samples_would(
    view: ReplayView, same: Callable[[Batch, Batch], bool]
) -> None:
    sampler, alone = view.uniform(7, seed=1), view.uniform(7, seed=1)
    out: Any = None
    for _ in range(3):
        out = sampler.block(out)
        parts = split(out.batch, 7)
        assert len(parts) == sampler.num_ahead > 1
        for part in parts[:-1]:
            assert same(part, alone.sample())
            sampler.mark_consumed()
        # The last one was not handed on: a saved position still holds it.
        restored = view.uniform(7, seed=2)
        restored.load_state_dict(sampler.state_dict())
        assert same(restored.sample(), parts[-1])
        assert same(parts[-1], alone.sample())
        sampler.mark_consumed()


def test_rows_are_drawn_whatever_the_batch_size_is(view: ReplayView) -> None:
    sampler, alone = view.uniform(7, seed=1), view.uniform(30, seed=1)
    rows = [sampler.draw(num).batch for num in (3, 20, 7)]
    assert [len(part) for part in rows] == [3, 20, 7]
    together = np.concatenate([part.rewards for part in rows])
    assert np.array_equal(together, alone.sample().rewards)


def test_a_position_of_another_batch_size_is_refused(
    view: ReplayView, same: Callable[[Batch, Batch], bool]
) -> None:
    one, other = view.uniform(7, seed=1), view.uniform(8, seed=1)
    expected = view.uniform(7, seed=1).sample()
    with pytest.raises(ConfigInvalidError, match="batch size is 8, not 7"):
        one.load_state_dict(other.state_dict())
    assert same(one.sample(), expected)


def test_a_batch_size_that_makes_no_sense_is_refused(view: ReplayView) -> None:
    with pytest.raises(ConfigInvalidError, match="found batch size 0"):
        view.uniform(0, seed=0)
