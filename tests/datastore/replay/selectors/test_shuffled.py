from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.sampler import FixedCandidates
from replaylake.datastore.replay.selectors.shuffled import Permutation, ShuffledSelector
from replaylake.datastore.replay.view import ReplayView

Make = Callable[..., Episode]


@pytest.fixture
def view(lake: Lake, make_episode: Make) -> ReplayView:
    """100 transitions in three episodes."""
    dataset = lake.dataset("d")
    dataset.append([make_episode(f"e{i}", num) for i, num in enumerate((60, 39, 1))])
    return dataset.snapshot().replay(cache=False)


class MovingCandidates:
    """Items of a live view: numbers from low to high."""

    is_fixed = False
    capacity = 1000

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def bounds(self) -> tuple[int, int]:
        return self.low, self.high

    def positions(self, numbers: Any) -> Any:
        return np.where(numbers < self.low, -1, numbers)


def drawn(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.indices.tolist()]


def epoch_of(selector: ShuffledSelector, num: int, size: int) -> list[list[int]]:
    """The batches of an epoch over `num` items, drawn some at once."""
    candidates, batches, epoch = FixedCandidates(np.arange(num)), [], selector.epoch
    while selector.epoch == epoch:
        numbers = selector.select(candidates, 3 * size).numbers.tolist()
        batches += [numbers[i : i + size] for i in range(0, len(numbers), size)]
    return batches


def test_every_item_comes_once_an_epoch_in_another_order_each(view: ReplayView) -> None:
    sampler = view.shuffled(8, seed=1)
    assert (sampler.epoch, sampler.num_batches) == (0, 13)
    epochs = []
    for epoch in range(3):
        batches = list(sampler.rest_of_epoch())
        assert [len(batch) for batch in batches] == [8] * 12 + [4]
        assert sampler.epoch == epoch + 1
        epochs.append(drawn(batches))
        assert sorted(epochs[-1]) == list(range(100))
        assert len({batch.keys[i].tobytes() for batch in batches for i in range(len(batch))}) == 100
    assert epochs[0] != epochs[1] != epochs[2]
    assert drawn(view.shuffled(8, seed=1).rest_of_epoch()) == epochs[0]
    assert drawn(view.shuffled(8, seed=2).rest_of_epoch()) != epochs[0]


def test_the_last_batch_can_be_dropped(view: ReplayView) -> None:
    sampler = view.shuffled(8, seed=1, drop_last=True)
    assert sampler.num_batches == 12
    batches = list(sampler.rest_of_epoch())
    assert [len(batch) for batch in batches] == [8] * 12
    left_out = set(range(100)) - set(drawn(batches))
    assert left_out != set(range(100)) - set(drawn(sampler.rest_of_epoch())), "others each epoch"


def test_whole_sequences_are_shuffled_too(view: ReplayView) -> None:
    sampler = view.shuffled(2, Sequences(10), seed=0)
    steps = [(k, m) for b in sampler.rest_of_epoch() for k, m in zip(b.keys, b.mask, strict=True)]
    assert len({key.tobytes() for keys, mask in steps for key in keys[mask]}) == 100


@settings(max_examples=200, deadline=None)
@given(
    num=st.integers(1, 400),
    size=st.integers(1, 20),
    num_ranks=st.integers(1, 7),
    drop_last=st.booleans(),
)
def test_ranks_divide_an_epoch(num: int, size: int, num_ranks: int, drop_last: bool) -> None:
    """Each item once over all ranks, in as many batches on each, none of them empty."""
    options: dict[str, Any] = {"seed": 3, "num_ranks": num_ranks, "drop_last": drop_last}
    selectors = [ShuffledSelector(size, rank=rank, **options) for rank in range(num_ranks)]
    try:
        batches = [epoch_of(selector, num, size) for selector in selectors]
    except ConfigInvalidError:
        # Refused by all, and only where some rank would have nothing for a batch.
        for selector in selectors:
            with pytest.raises(ConfigInvalidError, match=rf"{num} items for {num_ranks} ranks"):
                selector.share(FixedCandidates(np.arange(num)))
        least = num // num_ranks
        assert least < size if drop_last else least < -(-num // (num_ranks * size)), "not needed"
        return
    assert len({len(own) for own in batches}) == 1
    numbers = [number for own in batches for batch in own for number in batch]
    assert len(set(numbers)) == len(numbers)
    if drop_last:
        assert len(numbers) == num // num_ranks // size * size * num_ranks
        assert all(len(batch) == size for own in batches for batch in own)
    else:
        assert sorted(numbers) == list(range(num))
        assert all(0 < len(batch) <= size for own in batches for batch in own)


def test_ranks_of_a_view_get_disjoint_parts(view: ReplayView) -> None:
    parts = [
        drawn(view.shuffled(8, seed=5, rank=rank, num_ranks=3).rest_of_epoch()) for rank in range(3)
    ]
    assert sorted(number for part in parts for number in part) == list(range(100))


def test_each_item_is_as_likely_at_each_place(view: ReplayView) -> None:
    """Chi-square of 20 items over 20 places, 361 free: 451 is exceeded once in a thousand."""
    counts = np.zeros((20, 20))
    selector = ShuffledSelector(20, seed=7)
    candidates = FixedCandidates(np.arange(20))
    for _ in range(2000):
        counts[np.arange(20), selector.select(candidates, 20).numbers] += 1
    assert ((counts - 100) ** 2 / 100).sum() < 451


@pytest.mark.parametrize("num_before", [0, 5, 12, 13, 40])
@pytest.mark.parametrize("rank", [0, 1])
def test_resumes_bit_for_bit(
    view: ReplayView, num_before: int, rank: int, same: Callable[[Batch, Batch], bool]
) -> None:
    def make(seed: int) -> Any:
        return view.shuffled(8, seed=seed, rank=rank, num_ranks=2)

    sampler = make(3)
    for _ in range(num_before):
        sampler.sample()
    state = json.loads(json.dumps(sampler.state_dict()))
    restored = make(99)
    restored.load_state_dict(state)
    assert restored.state_dict() == state
    for _ in range(100):
        assert restored.epoch == sampler.epoch
        assert same(restored.sample(), sampler.sample())


def test_a_state_that_does_not_fit_is_refused(view: ReplayView, lake: Lake, make_episode: Make):
    sampler = view.shuffled(8, seed=3, num_ranks=2)
    sampler.sample()
    state = sampler.state_dict()
    for other in (
        view.shuffled(9, seed=3, num_ranks=2),
        view.shuffled(8, seed=3),
        view.shuffled(8, seed=3, rank=1, num_ranks=2),
    ):
        with pytest.raises(ConfigInvalidError, match="found a state of"):
            other.load_state_dict(state)
    lake.dataset("d").append([make_episode("more", 5)])
    grown = lake.dataset("d").snapshot().replay(cache=False)
    other = grown.shuffled(8, seed=3, num_ranks=2)
    with pytest.raises(ConfigInvalidError, match="over 100 items and a view of 105"):
        other.load_state_dict(state)


def test_ranks_that_make_no_sense_are_refused(view: ReplayView) -> None:
    for rank, num_ranks in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(ConfigInvalidError, match=f"found rank {rank} of {num_ranks}"):
            view.shuffled(8, seed=0, rank=rank, num_ranks=num_ranks)
    with pytest.raises(ConfigInvalidError, match="found 100 items for 101 ranks"):
        view.shuffled(8, seed=0, num_ranks=101)


def test_what_a_live_view_loses_is_passed_over_and_what_it_gets_comes_next() -> None:
    candidates = MovingCandidates(100, 140)
    selector = ShuffledSelector(10, seed=0)
    first = selector.select(candidates, 10).numbers.tolist()
    candidates.low, candidates.high = 120, 180
    rest = []
    while selector.epoch == 0:
        rest += selector.select(candidates, 10).numbers.tolist()
    assert sorted(n for n in first + rest if n >= 120) == list(range(120, 140))
    assert min(rest) >= 120
    following = []
    while selector.epoch == 1:
        following += selector.select(candidates, 10).numbers.tolist()
    assert sorted(following) == list(range(120, 180))
    candidates.low = 180
    with pytest.raises(EmptyReplayError):
        selector.select(candidates, 10)
    candidates.high = 200
    with pytest.raises(ConfigInvalidError, match="a view that follows a dataset"):
        ShuffledSelector(10, seed=0, num_ranks=2).select(candidates, 10)


# The network is used beyond this many.
KEPT = 1 << 16


def deviations(counts: NDArray[np.float64]) -> float:
    """How many standard deviations chi-square is above its mean, if all are equally likely."""
    expected = counts.sum() / counts.size
    free = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - free) / np.sqrt(2 * free))


@settings(max_examples=30, deadline=None)
@given(num=st.integers(1, 3 * KEPT), seed=st.integers(0, 1000))
def test_every_number_is_there_once(num: int, seed: int) -> None:
    found = Permutation(num, np.random.default_rng(seed)).numbers(0, num)
    assert found.dtype == np.int64
    assert np.array_equal(np.sort(found), np.arange(num))


@settings(max_examples=30, deadline=None)
@given(num=st.integers(KEPT - 2, KEPT + 2000), data=st.data())
def test_any_part_is_that_of_the_whole(num: int, data: st.DataObject) -> None:
    order = Permutation(num, np.random.default_rng(1))
    start = data.draw(st.integers(0, num))
    stop = data.draw(st.integers(start, num))
    assert np.array_equal(order.numbers(start, stop), order.numbers(0, num)[start:stop])


def test_of_a_hundred_million_a_part_is_had_without_the_rest() -> None:
    order = Permutation(10**8, np.random.default_rng(0))
    found = order.numbers(10**8 - 5000, 10**8)
    assert len(np.unique(found)) == 5000
    assert 0 <= found.min() < found.max() < 10**8


@pytest.mark.slow
@pytest.mark.parametrize("num", [KEPT // 2, KEPT + 1, 1 << 17, 1_000_003, 10**8])
def test_places_neighbours_and_distances_are_as_likely_as_each_other(num: int) -> None:
    """Over 40 seeds and 800,000 numbers; below 4 standard deviations but once in 30,000 times."""
    places, neighbours = np.zeros((2, 16, 16))
    distances = {step: np.zeros(256) for step in (1, 8, 256, 4096, 65536) if step < num // 4}
    for seed in range(40):
        order = Permutation(num, np.random.default_rng((seed, 0)))
        rng = np.random.default_rng(seed)
        start = int(rng.integers(num - 10_000 - max(distances)))
        found = order.numbers(start, start + 10_000)
        spread = rng.integers(num, size=1000)
        scattered = np.concatenate([order.numbers(i, i + 1) for i in spread])
        np.add.at(places, (spread * 16 // num, scattered * 16 // num), 1)
        np.add.at(neighbours, (found[:-1] * 16 // num, found[1:] * 16 // num), 1)
        for step, counts in distances.items():
            apart = (order.numbers(start + step, start + step + 10_000) - found) % num
            np.add.at(counts, apart * 256 // num, 1)
    results = {"places": deviations(places), "neighbours": deviations(neighbours)}
    results |= {f"{step} apart": deviations(counts) for step, counts in distances.items()}
    assert max(results.values()) < 4, results
