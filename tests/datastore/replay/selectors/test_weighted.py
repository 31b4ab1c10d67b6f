from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import (
    ConfigInvalidError,
    QueryError,
    QueryRefusedError,
    SchemaMismatchError,
    ShardCorruptError,
)
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.sampler import Sampler
from replaylake.datastore.replay.selectors.weighted import AliasTable
from replaylake.datastore.replay.view import ReplayView, concatenate

Make = Callable[..., Episode]
CLONING = Transitions(only_bootstrappable=False)


@pytest.fixture
def view(lake: Lake, make_episode: Make) -> ReplayView:
    """Steps are told apart by their rewards, in two episodes over three shards.

    a: 1, 2, 3 by policy version 5, which ends. b: 10, 20, of no known version, and the last of them
    cannot be bootstrapped.
    """
    dataset = lake.dataset("d")
    unknown: dict[str, Any] = {"final_observation": None}
    dataset.append([make_episode("b", 2, rewards=[10.0, 20.0], **unknown)])
    five: dict[str, Any] = {"policy_versions": [5]}
    dataset.append([make_episode("a", 1, first_step=2, terminated=True, **five)])
    dataset.append([make_episode("a", 2, policy_versions=[5, 5], **unknown)])
    return dataset.snapshot().replay()


def shares(sampler: Sampler, num_batches: int = 200) -> dict[float, float]:
    """The share of all draws that the step of each reward has."""
    rewards = np.concatenate([sampler.sample().rewards for _ in range(num_batches)])
    values, counts = np.unique(rewards, return_counts=True)
    return dict(zip(values.tolist(), (counts / len(rewards)).tolist(), strict=True))


def near(expected: dict[float, float]) -> Any:
    total = sum(expected.values())
    return pytest.approx({key: value / total for key, value in expected.items()}, abs=0.01)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("reward", {1: 1, 2: 2, 3: 3, 10: 10}),
        # Of the episode; b's return is 30.
        ("return", {1: 6, 2: 6, 3: 6, 10: 30}),
        ("exp(return / 10) * (num_steps - step)", {1: 3, 2: 2, 3: 1, 10: 2 * np.exp(2.4)}),
        ("coalesce(policy_version, 0)", {1: 5, 2: 5, 3: 5}),
        ("(coalesce(policy_version, 9) > 5)::INT", {10: 1}),
        # What both have is the step's, unless it says so by its table.
        ("terminated::INT", {3: 1}),
        ("CASE WHEN episodes.complete THEN steps.reward ELSE 0 END", {1: 1, 2: 2, 3: 3}),
        ("observation[1] + 1 -- of the step", {1: 1, 2: 2, 3: 3, 10: 1}),
        ("1e300 * reward", {1: 1, 2: 2, 3: 3, 10: 10}),
    ],
)
def test_steps_are_drawn_by_what_sql_says(
    view: ReplayView, weight: str, expected: dict[float, float]
) -> None:
    sampler = view.weighted(64, weight=weight, seed=0)
    assert shares(sampler) == near(expected)
    assert (sampler.sample().weights == 1).all()


def test_draws_follow_their_distribution(lake: Lake, make_episode: Make) -> None:
    """Chi-square over 50 steps: 85.4 is exceeded by one in a thousand seeds."""
    weights = np.random.default_rng(5).lognormal(0, 1, 50)
    dataset = lake.dataset("d")
    dataset.append([make_episode("e", 50, rewards=weights)])
    sampler = dataset.snapshot().replay().weighted(100, weight="reward ** 2", seed=0)
    counts = np.zeros(50)
    for _ in range(200):
        counts += np.bincount(sampler.sample().indices, minlength=50)
    expected = 20_000 * weights**2 / (weights**2).sum()
    assert ((counts - expected) ** 2 / expected).sum() < 85.4
    others = 20_000 * weights / weights.sum()
    assert ((counts - others) ** 2 / others).sum() > 1000


def test_corrected_weights(view: ReplayView) -> None:
    # P = 1/16, 2/16, 3/16, 10/16, N = 4: 1 / (N P) = 4, 2, 4/3, 0.4; over the batch's largest.
    sampler = view.weighted(16, weight="reward", seed=0, correct=True)
    largest = set()
    for _ in range(50):
        batch = sampler.sample()
        assert batch.weights.dtype == np.float32
        assert batch.weights == pytest.approx(batch.rewards.min() / batch.rewards)
        largest.add(float(batch.rewards.min()))
    # Each batch's own, also of those that are drawn together.
    assert len(largest) > 1


def test_corrected_weights_are_unbiased(view: ReplayView) -> None:
    sampler = view.weighted(20_000, weight="1 + reward", seed=0, correct=True)
    batch = sampler.sample()
    mean = (batch.weights * batch.rewards).sum() / batch.weights.sum()
    assert mean == pytest.approx((1 + 2 + 3 + 10) / 4, rel=0.03)


def test_a_saved_sampler_goes_on_bit_for_bit(
    view: ReplayView, same: Callable[[Batch, Batch], bool]
) -> None:
    sampler = view.weighted(16, weight="reward", seed=0, correct=True)
    sampler.sample()
    saved = json.loads(json.dumps(sampler.state_dict()))
    expected = [sampler.sample() for _ in range(100)]
    resumed = view.weighted(16, weight="reward", seed=99, correct=True)
    resumed.load_state_dict(saved)
    assert all(same(batch, resumed.sample()) for batch in expected)


def test_every_item_can_be_weighted(view: ReplayView) -> None:
    assert shares(view.weighted(64, CLONING, weight="reward", seed=0)) == near(
        {1: 1, 2: 2, 3: 3, 10: 10, 20: 20}
    )
    batch = view.weighted(640, Sequences(2), weight="step", seed=0).sample()
    # The sequences begin at rewards 1, 3 and 10, which are steps 0, 2 and 0.
    assert set(batch.rewards[:, 0]) == {3.0}


def test_a_view_from_the_cache_and_one_of_a_compacted_version(view: ReplayView, lake: Lake) -> None:
    assert view.wait_cached() is not None
    again = lake.dataset("d").snapshot().replay()
    compact(lake, "d", open_s=0)
    compacted = lake.dataset("d").snapshot()
    assert len(compacted.files) == 1
    for other in (again, compacted.replay(cache=False)):
        assert shares(other.weighted(64, weight="reward", seed=0)) == near(
            {1: 1, 2: 2, 3: 3, 10: 10}
        )


@pytest.mark.slow
def test_only_selected_episodes_are_weighted(view: ReplayView, lake: Lake) -> None:
    """What the expression would say of others does not matter."""
    selected = lake.dataset("d").snapshot().replay("complete -- a")
    sampler = selected.weighted(64, weight="1 / (10 - reward)", seed=0)
    assert set(shares(sampler)) == {1.0, 2.0, 3.0}
    with pytest.raises(
        SchemaMismatchError, match="found NULL for step 0 of episode 'b', the first of 1"
    ):
        view.weighted(64, weight="CASE WHEN reward < 10 THEN 1 END", seed=0)
    limited = lake.dataset("d").snapshot().replay(where_steps="reward > 1")
    assert shares(limited.weighted(64, weight="reward", seed=0)) == near({2: 2, 3: 3, 10: 10})


def test_several_datasets(view: ReplayView, lake: Lake, make_episode: Make) -> None:
    lake.dataset("more").append([make_episode("a", 2, rewards=[40.0, 50.0])])
    joined = concatenate([view, lake.dataset("more").snapshot().replay()])
    found = shares(joined.weighted(64, weight="return", seed=0))
    assert found == near({1: 6, 2: 6, 3: 6, 10: 30, 40: 90, 50: 90})


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("reward - 2", "found -1.0 for step 0 of episode 'a', the first of 1 of 4 steps, expected"),
        ("'inf'::DOUBLE", "found inf for step 0 of episode 'b', the first of 4 of 4 steps"),
        ("'nan'::DOUBLE", "found nan for step 0 of episode 'b', the first of 4 of 4 steps"),
        ("policy_version", "found NULL for step 0 of episode 'b', the first of 1 of 4 steps"),
        ("0 * reward", "found 0 for all of 4 steps, expected some that may be drawn"),
    ],
)
def test_weights_that_are_none(view: ReplayView, weight: str, message: str) -> None:
    with pytest.raises(SchemaMismatchError, match=message):
        view.weighted(8, weight=weight, seed=0)


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        ("random()", QueryRefusedError, "found random, whose value changes between runs"),
        ("(SELECT 1)", QueryRefusedError, "found a subquery"),
        ("row_number() OVER ()", QueryRefusedError, "found a window function"),
        ("unnest([1, 2])", QueryRefusedError, "found 10 values for 5 steps, expected one per step"),
        ("sum(reward)", QueryError, "GROUP BY"),
        ("no_such", QueryError, "no_such"),
        ("episode_id", QueryError, "Could not convert string"),
    ],
)
def test_expressions_that_are_no_weight(
    view: ReplayView, weight: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        view.weighted(8, weight=weight, seed=0)


def test_a_view_that_was_sent(view: ReplayView) -> None:
    sent = pickle.loads(pickle.dumps(view))
    with pytest.raises(ConfigInvalidError, match="found a view of d@3 that another process made"):
        sent.weighted(8, weight="reward", seed=0)


def chances(table: AliasTable) -> NDArray[np.float64]:
    """What the table's columns add up to for each item."""
    total = table.shares.copy()
    np.add.at(total, table.aliases, 1.0 - table.shares)
    return total / len(total)


WEIGHTS = st.lists(
    st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 1e-9, 1e9, 1e-300, 1e300]) | st.floats(0.0, 10.0),
    min_size=1,
    max_size=30,
).filter(any)


@given(WEIGHTS)
def test_an_alias_table_holds_the_weights(weights: list[float]) -> None:
    given = np.array(weights)
    table = AliasTable(given)
    assert ((table.shares >= 0) & (table.shares <= 1)).all()
    scaled = given / given.max()
    found = chances(table)
    assert found == pytest.approx(scaled / scaled.sum(), rel=1e-9, abs=1e-14)
    assert (found[given == 0] == 0).all()
    drawn = table.draw(np.random.default_rng(0), 1000)
    assert given[drawn].all()
    assert (np.bincount(drawn, minlength=len(given)) / 1000) == pytest.approx(found, abs=0.08)


def test_a_shard_that_is_gone(view: ReplayView, lake: Lake) -> None:
    for path in Path(lake.storage.url).glob("d/shards/*"):
        path.unlink()
    with pytest.raises(ShardCorruptError, match=r"expected the shard that the log names"):
        view.weighted(8, weight="reward + 1", seed=0)


def test_a_damaged_shard_gives_no_weights(view: ReplayView, lake: Lake) -> None:
    path = lake.dataset("d").snapshot().table.paths()[0]
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ShardCorruptError, match=path.name):
        view.weighted(4, weight="step + 1", seed=0)
