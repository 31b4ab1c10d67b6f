from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.sampler import Sampler
from replaylake.datastore.replay.selectors.priorities import Priorities
from replaylake.datastore.replay.selectors.prioritized import (
    PrioritizedSampler,
    PrioritizedSelector,
)
from replaylake.datastore.replay.view import ReplayView

Make = Callable[..., Episode]
View = Callable[[int], ReplayView]


@pytest.fixture
def view_of(lake: Lake, make_episode: Make) -> View:
    """A view of one episode of so many steps; the reward of row i is i + 1."""

    def make(num_steps: int) -> ReplayView:
        dataset = lake.dataset("d")
        dataset.append([make_episode("e", num_steps)])
        return dataset.snapshot().replay(cache=False)

    return make


def with_priorities(
    view: ReplayView, priorities: list[float], **options: Any
) -> PrioritizedSampler:
    sampler = view.prioritized(100, seed=0, **options)
    sampler.update_priorities(np.arange(len(priorities)), np.array(priorities))
    return sampler


def shares(sampler: Sampler, num: int, num_batches: int) -> NDArray[np.float64]:
    """How often each of `num` candidates was drawn, as a share of all draws."""
    counts = np.zeros(num)
    for _ in range(num_batches):
        counts += np.bincount(sampler.sample().indices, minlength=num)
    return counts / counts.sum()


def test_rows_are_those_that_the_indices_name(view_of: View) -> None:
    batch = with_priorities(view_of(5), [1, 2, 3, 4, 5]).sample()
    assert batch.indices is not None
    assert (batch.rewards == batch.indices + 1).all()


def test_the_chance_is_the_priority_to_the_power_of_alpha(view_of: View) -> None:
    # sqrt: 1, 2, 3, 4 of 10.
    sampler = with_priorities(view_of(4), [1, 4, 9, 16], alpha=0.5)
    assert shares(sampler, 4, 200) == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=1e-3)


def test_a_uniform_fraction_is_mixed_in(view_of: View) -> None:
    """Vector per_sample_distribution, of dqn_zoo's PrioritizedDistributionTest."""
    sampler = with_priorities(view_of(3), [1.0, 4.0, 3.0], alpha=0.8, uniform_fraction=0.1)
    expected = [0.17309231205456332, 0.4570033320660184, 0.3699043558794184]
    assert shares(sampler, 3, 1000) == pytest.approx(expected, rel=0.01)


def test_where_all_priorities_are_zero_draws_are_uniform(view_of: View) -> None:
    """Vector per_all_zero_is_uniform, of dqn_zoo and reverb."""
    sampler = with_priorities(view_of(3), [0, 0, 0])
    assert shares(sampler, 3, 500) == pytest.approx([1 / 3] * 3, rel=0.01)
    assert (sampler.sample().weights == 1).all()


@pytest.mark.parametrize("priority", [-1.0, np.nan, np.inf])
def test_priorities_that_are_none(view_of: View, priority: float) -> None:
    """Vector per_rejects_bad_priorities, of dqn_zoo and reverb."""
    sampler = with_priorities(view_of(3), [1, 2, 3])
    before = sampler.state_dict()["priorities"]["leaves"]
    with pytest.raises(
        ConfigInvalidError, match=f"found {priority} for row 1, expected a finite number"
    ):
        sampler.update_priorities(np.array([0, 1, 2]), np.array([9.0, priority, 9.0]))
    assert (sampler.state_dict()["priorities"]["leaves"] == before).all()
    assert sampler.beta == 0.4


@pytest.mark.slow
def test_draws_follow_their_distribution(view_of: View) -> None:
    """Chi-square over 50 candidates, in batches of 1, which no stratum makes even.

    85.4 is exceeded by one in a thousand seeds.
    """
    view, num = view_of(50), 50
    priorities = np.random.default_rng(1).lognormal(0, 1, num)
    sampler = view.prioritized(1, seed=2, alpha=0.7, uniform_fraction=0.2)
    sampler.update_priorities(np.arange(num), priorities)
    chances = 0.8 * priorities**0.7 / (priorities**0.7).sum() + 0.2 / num
    counts = shares(sampler, num, 20_000) * 20_000
    assert ((counts - chances * 20_000) ** 2 / (chances * 20_000)).sum() < 85.4
    # The bound is one that another alpha, or no uniform share, exceeds.
    for others in (priorities / priorities.sum(), priorities**0.7 / (priorities**0.7).sum()):
        assert ((counts - others * 20_000) ** 2 / (others * 20_000)).sum() > 200


def test_each_batch_holds_each_row_about_as_often_as_its_chance_says(view_of: View) -> None:
    """Strata that a row covers whole draw it; at most one at each end may or may not."""
    sampler = with_priorities(view_of(4), [1, 2, 3, 4], alpha=1.0)
    for _ in range(50):
        counts = np.bincount(sampler.sample().indices, minlength=4)
        assert (np.abs(counts - [10, 20, 30, 40]) <= 1).all()


def test_weights_undo_the_chances(view_of: View) -> None:
    # P = 1/10, 2/10, 3/10, 4/10 and N = 4: N P = 0.4, 0.8, 1.2, 1.6; to the power of -1: 2.5, 1.25,
    # 0.8333, 0.625; over the largest of them: 1, 1/2, 1/3, 1/4.
    view = view_of(4)
    batch = with_priorities(view, [1, 2, 3, 4], alpha=1.0, beta=1.0).sample()
    assert batch.weights.dtype == np.float32
    assert batch.weights == pytest.approx(1 / (batch.indices + 1))
    batch = with_priorities(view, [1, 4, 9, 16], alpha=0.5, beta=0.5).sample()
    assert batch.weights == pytest.approx((1 / (batch.indices + 1)) ** 0.5)
    assert (with_priorities(view, [1, 2, 3, 4], beta=0.0).sample().weights == 1).all()


def test_weights_with_a_uniform_fraction(view_of: View) -> None:
    # P = 0.5 * (0, 1/4, 3/4) + 0.5 / 3 = 1/6, 7/24, 13/24: over their inverses' largest, 6.
    sampler = with_priorities(view_of(3), [0, 1, 3], alpha=1.0, beta=1.0, uniform_fraction=0.5)
    batch = sampler.sample()
    assert batch.weights == pytest.approx(np.array([1, 4 / 7, 4 / 13])[batch.indices])
    assert set(batch.indices) == {0, 1, 2}


def test_beta_rises_with_the_updates(view_of: View) -> None:
    sampler = view_of(2).prioritized(4, seed=0, beta=0.4, beta_updates=3)
    found = []
    for _ in range(5):
        found.append(sampler.beta)
        sampler.sample()
        sampler.update_priorities(np.array([0]), np.array([1.0]))
    assert found == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.0])


def test_a_priority_of_zero_is_never_drawn(view_of: View) -> None:
    view = view_of(4)
    sampler = with_priorities(view, [0, 1, 0, 1e-30], alpha=0.0)
    assert shares(sampler, 4, 50) == pytest.approx([0, 0.5, 0, 0.5], abs=0.01)
    only_uniform = with_priorities(view, [0, 1, 0, 1], uniform_fraction=0.5)
    assert shares(only_uniform, 4, 50) == pytest.approx([0.125, 0.375] * 2, abs=0.01)


def test_of_the_same_row_twice_the_last_priority_counts(view_of: View) -> None:
    sampler = view_of(2).prioritized(8, seed=0, alpha=1.0)
    sampler.update_priorities([1, 0, 1], [5.0, 3.0, 0.0])
    assert sampler.state_dict()["priorities"]["leaves"].tolist() == [3.0, 0.0]


def test_a_saved_sampler_goes_on_bit_for_bit(
    view_of: View, same: Callable[[Batch, Batch], bool]
) -> None:
    """As after a crash: JSON and arrays are all that is left of the first sampler."""
    view = view_of(200)
    options: dict[str, Any] = {"beta_updates": 150, "uniform_fraction": 0.1}
    rng = np.random.default_rng(0)
    errors = [rng.lognormal(0, 2, 32) for _ in range(200)]

    def steps(sampler: PrioritizedSampler, start: int, num: int) -> list[Batch]:
        batches = []
        for error in errors[start : start + num]:
            batches.append(sampler.sample())
            assert batches[-1].indices is not None
            sampler.update_priorities(batches[-1].indices, error)
        return batches

    sampler = view.prioritized(32, seed=0, **options)
    steps(sampler, 0, 50)
    state = sampler.state_dict()
    leaves = state["priorities"]["leaves"].tobytes()
    kept = json.dumps({**state, "priorities": {**state["priorities"], "leaves": None}})
    expected = steps(sampler, 50, 100)
    state = json.loads(kept)
    state["priorities"]["leaves"] = np.frombuffer(leaves)
    resumed = view.prioritized(32, seed=99, **options)
    resumed.load_state_dict(state)
    found = steps(resumed, 50, 100)
    assert all(same(*pair) for pair in zip(expected, found, strict=True))
    assert resumed.beta == sampler.beta


def test_the_state_of_another_view(view_of: View, lake: Lake, make_episode: Make) -> None:
    state = view_of(3).prioritized(8, seed=0).state_dict()
    lake.dataset("d").append([make_episode("f", 1)])
    other = lake.dataset("d").snapshot().replay(cache=False)
    with pytest.raises(
        ConfigInvalidError, match=r"found the state of 3 candidates with alpha 0.6, expected 4 and"
    ):
        other.prioritized(8, seed=0).load_state_dict(state)
    with pytest.raises(ConfigInvalidError, match=r"expected 3 and 0.5"):
        lake.dataset("d").snapshot(1).replay(cache=False).prioritized(
            8, seed=0, alpha=0.5
        ).load_state_dict(state)


def test_every_item_can_be_prioritized(view_of: View) -> None:
    view = view_of(10)
    three = view.prioritized(50, Transitions(0.5, n_step=3), seed=0, alpha=1.0)
    three.update_priorities(np.arange(10), np.eye(10)[4])
    batch = three.sample()
    # Step 4 has reward 5: 5 + 6 / 2 + 7 / 4.
    assert batch.rewards == pytest.approx([9.75] * 50)
    sequences = view.prioritized(50, Sequences(4), seed=0, alpha=1.0)
    sequences.update_priorities([0, 1, 2], [1.0, 0.0, 3.0])
    batch = sequences.sample()
    counts = dict(zip(*np.unique(batch.rewards[:, 0], return_counts=True), strict=True))
    assert set(counts) == {1.0, 9.0}
    assert counts[9.0] == pytest.approx(37.5, abs=1)
    assert batch.weights.shape == (50,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, "found alpha 1.5, expected a number from 0 to 1"),
        ({"beta": -0.1}, "found beta -0.1, expected a number from 0 to 1"),
        ({"beta_updates": 0}, "found beta_updates 0, expected a whole number of 1 or more"),
        ({"uniform_fraction": 2.0}, "found uniform_fraction 2.0, expected a number from 0"),
        ({"initial_priority": 0.0}, "found initial_priority 0.0, expected a finite number"),
    ],
)
def test_options_out_of_range(view_of: View, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigInvalidError, match=message):
        view_of(2).prioritized(1, seed=0, **options)


def test_indices_of_no_batch(view_of: View) -> None:
    sampler = view_of(3).prioritized(4, seed=0)
    with pytest.raises(
        ConfigInvalidError, match=r"found indices of shape \(2,\) and priorities of \(1,\)"
    ):
        sampler.update_priorities([0, 1], [1.0])
    for index in (-1, 3):
        with pytest.raises(ConfigInvalidError, match="expected less than 3 and none below 0"):
            sampler.update_priorities([index], [1.0])
    sampler.update_priorities([], [])


class Moving:
    """Candidates of a view that follows a dataset: number i starts at record i."""

    is_fixed = False

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.low = self.high = 0
        self.gone: set[int] = set()

    def bounds(self) -> tuple[int, int]:
        return self.low, self.high

    def positions(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        gone = np.isin(numbers, list(self.gone)) | (numbers < self.low)
        return np.where(gone, -1, numbers)


def drawn(selector: PrioritizedSelector, moving: Moving, num: int = 1000) -> dict[int, float]:
    numbers, counts = np.unique(selector.select(moving, num).numbers, return_counts=True)
    return {int(n): count / num for n, count in zip(numbers, counts, strict=True)}


def selector_of(capacity: int, **options: Any) -> PrioritizedSelector:
    return PrioritizedSelector(Priorities(capacity, alpha=1.0, initial=1.0), seed=0, **options)


def near(**chances: float) -> Any:
    return pytest.approx({int(k[1:]): v for k, v in chances.items()}, abs=0.005)


def test_new_candidates_have_the_highest_priority_there_was() -> None:
    moving, selector = Moving(8), selector_of(8)
    moving.high = 2
    assert drawn(selector, moving) == near(n0=0.5, n1=0.5)
    selector.priorities.update(np.array([0, 1]), np.array([7.0, 0.0]))
    selector.priorities.update(np.array([0]), np.array([2.0]))
    moving.high = 4
    assert drawn(selector, moving) == near(n0=2 / 16, n2=7 / 16, n3=7 / 16)


@pytest.mark.parametrize("uniform_fraction", [0.0, 0.5])
def test_candidates_that_leave_are_never_drawn(uniform_fraction: float) -> None:
    moving = Moving(4)
    selector = selector_of(4, uniform_fraction=uniform_fraction)
    for low, high in [(0, 3), (1, 5), (3, 7), (6, 10), (50, 54), (53, 54)]:
        moving.low, moving.high = low, high
        expected = {n: 1 / (high - low) for n in range(low, high)}
        assert drawn(selector, moving) == pytest.approx(expected, abs=0.005)
    assert selector.priorities.tree.leaves.tolist() == [0, 1, 0, 0]


def test_priorities_for_rows_that_left_meanwhile_are_passed_over() -> None:
    moving, selector = Moving(4), selector_of(4)
    moving.high = 4
    selector.select(moving, 4)
    moving.low, moving.high = 2, 6
    selector.select(moving, 4)
    selector.priorities.update(np.array([0, 1, 3]), np.array([9.0, 9.0, 5.0]))
    # Numbers 4 and 5 lie where 0 and 1 were, and keep their own.
    assert selector.priorities.tree.leaves.tolist() == [1, 1, 1, 5]


def test_candidates_that_are_gone_are_replaced() -> None:
    moving, selector = Moving(4), selector_of(4, beta=1.0)
    moving.high, moving.gone = 4, {1, 2}
    selector.priorities.follow(0, 4)
    selector.priorities.update(np.arange(4), np.array([1.0, 5.0, 5.0, 3.0]))
    selected = selector.select(moving, 1000)
    assert selected.weights is not None
    assert set(selected.numbers) == {0, 3}
    assert selected.weights == pytest.approx(np.where(selected.numbers == 0, 1, 1 / 3))
    assert drawn(selector, moving) == near(n0=0.25, n3=0.75)


def test_nothing_to_draw() -> None:
    with pytest.raises(EmptyReplayError, match="prioritized sampler: found nothing to sample"):
        selector_of(4).select(Moving(4), 2)
