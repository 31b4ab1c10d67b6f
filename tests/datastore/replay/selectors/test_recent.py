from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.sampler import Sampler
from replaylake.datastore.replay.selectors.recent import RecentSelector, VersionIndex
from replaylake.datastore.replay.view import ReplayView

Make = Callable[..., Episode]


@pytest.fixture
def view(lake: Lake, make_episode: Make) -> ReplayView:
    """12 transitions with rewards 1 to 12, by versions 3 1 2 none 3 1 2 none 3 1 2 none."""
    dataset = lake.dataset("d")
    for first in (0, 4, 8):
        known = make_episode(
            "e", 3, first_step=first, policy_versions=[3, 1, 2], final_observation=None
        )
        dataset.append([known, make_episode("e", 1, first_step=first + 3)])
    return dataset.snapshot().replay(columns=["policy_version"], cache=False)


def rewards(sampler: Sampler, num_batches: int = 20) -> dict[int, float]:
    drawn = np.concatenate([sampler.sample().rewards for _ in range(num_batches)])
    values, counts = np.unique(drawn, return_counts=True)
    return {int(v): c / len(drawn) for v, c in zip(values, counts, strict=True)}


def same(one: Batch, other: Batch) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("observations", "indices", "keys")
    )


@pytest.mark.parametrize(
    ("current", "max_staleness", "expected"),
    [
        (3, 0, {1, 5, 9}),
        (3, 1, {1, 3, 5, 7, 9, 11}),
        (3, 9, {1, 2, 3, 5, 6, 7, 9, 10, 11}),
        (2, 0, {1, 3, 5, 7, 9, 11}),
        (None, 0, {1, 5, 9}),
    ],
)
def test_only_steps_of_recent_versions_are_drawn(
    view: ReplayView, current: int | None, max_staleness: int, expected: set[int]
) -> None:
    sampler = view.recent(64, max_staleness=max_staleness, policy_version=current, seed=0)
    assert set(rewards(sampler)) == expected


def test_all_that_are_recent_have_the_same_chance(view: ReplayView) -> None:
    """Chi-square over 6 steps: 20.5 is exceeded by one in a thousand seeds."""
    found = rewards(view.recent(100, max_staleness=1, seed=1), 100)
    assert sum((share - 1 / 6) ** 2 * 6 for share in found.values()) * 10_000 < 20.5
    assert len(found) == 6


def test_the_learner_s_version_may_rise(view: ReplayView) -> None:
    sampler = view.recent(8, max_staleness=1, policy_version=2, seed=0)
    assert set(rewards(sampler)) == {1, 2, 3, 5, 6, 7, 9, 10, 11}
    sampler.set_policy_version(4)
    assert set(rewards(sampler)) == {1, 5, 9}
    version = 3
    sampler.set_policy_version(lambda: version)
    assert set(rewards(sampler)) == {1, 3, 5, 7, 9, 11}
    version = 5
    with pytest.raises(
        EmptyReplayError, match="found version 3 at most, expected 4 or more: at most 1 be"
    ):
        sampler.sample()
    version = 4
    assert set(rewards(sampler)) == {1, 5, 9}


def test_no_known_version(lake: Lake, make_episode: Make) -> None:
    lake.dataset("d").append([make_episode("e", 3)])
    view = lake.dataset("d").snapshot().replay(columns=["policy_version"], cache=False)
    sampler = view.recent(8, max_staleness=1, policy_version=0, seed=0)
    with pytest.raises(EmptyReplayError, match="found no step of a known version, expected 0 or"):
        sampler.sample()


def test_a_view_without_versions(lake: Lake, make_episode: Make) -> None:
    lake.dataset("d").append([make_episode("e", 3)])
    view = lake.dataset("d").snapshot().replay(cache=False)
    with pytest.raises(
        ConfigInvalidError, match=r"Make the view with columns=\['policy_version'\]"
    ):
        view.recent(8, max_staleness=1, seed=0)


def test_options_out_of_range(view: ReplayView) -> None:
    with pytest.raises(
        ConfigInvalidError, match="found max_staleness -1, expected a whole number of 0"
    ):
        view.recent(8, max_staleness=-1, seed=0)


def test_a_saved_sampler_goes_on_bit_for_bit(view: ReplayView) -> None:
    sampler = view.recent(8, max_staleness=1, seed=0)
    sampler.set_policy_version(4)
    sampler.sample()
    saved = json.loads(json.dumps(sampler.state_dict()))
    expected = [sampler.sample() for _ in range(100)]
    resumed = view.recent(8, max_staleness=1, seed=99)
    resumed.load_state_dict(saved)
    assert all(same(batch, resumed.sample()) for batch in expected)


def test_every_item_can_be_recent(view: ReplayView) -> None:
    batch = view.recent(64, Sequences(3), max_staleness=0, seed=0).sample()
    # They begin at rewards 1, 4, 7 and 10.
    assert set(batch.rewards[:, 0]) == {1.0}


class Moving:
    """Candidates of a view that follows a dataset; number i starts at the i-th step, and round."""

    is_fixed = False

    def __init__(self, view: ReplayView) -> None:
        self._steps = view.packed.steps
        self.capacity = len(self._steps)
        self.low = self.high = 0
        self.gone: set[int] = set()

    def bounds(self) -> tuple[int, int]:
        return self.low, self.high

    def positions(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        gone = np.isin(numbers, list(self.gone)) | (numbers < self.low)
        return np.where(gone, -1, self._steps[numbers % self.capacity])

    def there(self, oldest: int) -> set[int]:
        versions = [3, 1, 2, -1]
        numbers = set(range(self.low, self.high)) - self.gone
        return {n for n in numbers if versions[n % 4] >= oldest}


@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    moves=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 3), st.booleans()),
        max_size=12,
    )
)
def test_candidates_that_come_and_go(
    view: ReplayView, moves: list[tuple[int, int, int, bool]]
) -> None:
    moving = Moving(view)
    selector = RecentSelector(view.packed.records, max_staleness=0, policy_version=0, seed=0)
    for come, leave, oldest, one_is_gone in moves:
        moving.high += come
        moving.low = min(moving.high, max(moving.low + leave, moving.high - moving.capacity))
        if one_is_gone:
            moving.gone.add((moving.low + moving.high) // 2)
        selector.set_policy_version(oldest)
        expected = moving.there(oldest)
        if expected:
            assert set(selector.select(moving, 300).numbers.tolist()) == expected
        else:
            with pytest.raises(EmptyReplayError):
                selector.select(moving, 300)


def test_those_that_go_leave_the_others_their_chances(view: ReplayView) -> None:
    """Chi-square over 4 candidates: 16.3 is exceeded by one in a thousand seeds."""
    moving = Moving(view)
    selector = RecentSelector(view.packed.records, max_staleness=1, policy_version=3, seed=0)
    moving.high = 12
    selector.select(moving, 4)
    moving.low, moving.high, moving.gone = 4, 14, {6}
    numbers = np.concatenate([selector.select(moving, 10).numbers for _ in range(1000)])
    values, counts = np.unique(numbers, return_counts=True)
    assert values.tolist() == [4, 8, 10, 12]
    assert ((counts - 2500) ** 2 / 2500).sum() < 16.3


def test_selectors_that_followed_otherwise_agree_once_consolidated(view: ReplayView) -> None:
    moving = Moving(view)
    one, other = (
        RecentSelector(view.packed.records, max_staleness=1, policy_version=3, seed=0)
        for _ in range(2)
    )
    for high in (3, 5, 12):
        moving.high = high
        one.select(moving, 5)
    moving.low, moving.high = 2, 14
    one.consolidate(moving)
    other.load_state_dict(one.state_dict())
    other.consolidate(moving)
    for _ in range(100):
        assert (one.select(moving, 9).numbers == other.select(moving, 9).numbers).all()


MOVES = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 4), st.booleans(), st.integers(0, 4)), max_size=15
)


@settings(deadline=None)
@given(MOVES, st.integers(0, 9))
def test_every_recent_candidate_has_one_place(
    moves: list[tuple[int, int, bool, int]], seed: int
) -> None:
    """Against a plain table of numbers and versions."""
    rng = np.random.default_rng(seed)
    index, expected, high = VersionIndex(), dict[int, int](), 0
    for num, highest, drop, oldest in moves:
        numbers, versions = np.arange(high, high + num), rng.integers(0, highest + 1, num)
        high += num
        index.add(numbers, versions)
        expected |= dict(zip(numbers.tolist(), versions.tolist(), strict=True))
        if drop:
            index.keep(index.numbers % 3 != 0)
            expected = {n: v for n, v in expected.items() if n % 3}
        assert sorted(index.numbers.tolist()) == sorted(expected)
        assert len(index) == len(expected)
        assert index.newest() == max(expected.values(), default=None)
        recent = sorted(n for n, v in expected.items() if v >= oldest)
        assert sorted(index.draw(Ranks(len(recent)), len(recent), oldest).tolist()) == recent


class Ranks(np.random.Generator):
    """Draws each of `num` equal parts of [0, 1) once, in the middle of it."""

    def __new__(cls, num: int) -> Ranks:
        return super().__new__(cls)

    def __init__(self, num: int) -> None:
        super().__init__(np.random.PCG64())
        self._num = num

    def random(self, size: int) -> np.ndarray:  # type: ignore[override]
        assert size == self._num
        return (np.arange(size) + 0.5) / max(1, size)
