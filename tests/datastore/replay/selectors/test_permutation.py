from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from replaylake.datastore.replay.selectors.shuffled import Permutation

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
