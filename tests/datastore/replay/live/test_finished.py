"""Whatever pieces come in whatever order, each step is in one sequence, and these are whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import EmptyReplayError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.selectors.in_order import InOrderSampler


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder: Path = tmp_path_factory.mktemp("lake")
    made = open_lake(folder / "lake", create=True).dataset("d")
    made.create(Box((2,)), Discrete(5))
    return made


def taken(sampler: InOrderSampler) -> Iterator[list[tuple[int, int]]]:
    """Yield (episode, step) of the steps to learn from of each sequence that is there."""
    while (num := sampler.num_available) > 0:
        batch: Any = sampler.sample()
        assert len(batch) == min(num, sampler.batch_size)
        for observations, mask in zip(batch.observations, batch.mask, strict=True):
            yield [(int(number), int(step)) for number, step in observations[mask]]
    with pytest.raises(EmptyReplayError):
        sampler.sample()


@st.composite
def arrivals(
    draw: st.DrawFn, *, any_order: bool
) -> tuple[dict[int, tuple[int, str]], list[list[tuple[int, int, int]]]]:
    """Lengths and ends of episodes, and puts of pieces: episode, first step, length."""
    episodes = {
        number: (draw(st.integers(1, 30)), draw(st.sampled_from(["terminated", "open"])))
        for number in range(draw(st.integers(1, 4)))
    }
    pieces: list[list[tuple[int, int, int]]] = []
    for number, (length, _) in episodes.items():
        cuts = sorted({0, length, *draw(st.lists(st.integers(1, 30), max_size=6))})
        cuts = [cut for cut in cuts if cut <= length]
        pieces.append([(number, a, b - a) for a, b in pairwise(cuts)])
    if any_order:
        order = draw(st.permutations([piece for some in pieces for piece in some]))
    else:
        order = []
        while any(pieces):
            order.append(draw(st.sampled_from([some for some in pieces if some])).pop(0))
    sizes = draw(st.lists(st.integers(1, 4), min_size=len(order), max_size=len(order)))
    ends = np.minimum(np.cumsum(sizes), len(order)).tolist()
    return episodes, [order[a:b] for a, b in zip([0, *ends], ends, strict=False) if b > a]


def piece(number: int, first: int, length: int, *, ends: bool) -> Episode:
    steps = np.arange(first, first + length + 1)
    observations = np.stack([np.full(length + 1, number), steps], 1).astype(np.float32)
    return Episode(
        episode_id=f"e{number}",
        first_step=first,
        observations=observations[:-1],
        actions=steps[:-1] % 5,
        rewards=steps[:-1] / 2,
        terminated=ends,
        final_observation=observations[-1],
    )


def num_finished(episodes: Any, there: dict[int, set[int]], length: int) -> int:
    """Count the sequences of which all steps came, by the steps from the first without a gap."""
    total = 0
    for number, steps in there.items():
        whole = next(step for step in range(len(steps) + 1) if step not in steps)
        is_ended = (whole, "terminated") == episodes[number]
        total += -(-whole // length) if is_ended else whole // length
    return total


def check(
    empty: Dataset,
    item: Sequences,
    episodes: dict[int, tuple[int, str]],
    puts: list[list[tuple[int, int, int]]],
) -> None:
    stride = item.length - item.overlap
    with empty.follow(max_steps=5000) as view:
        sampler = view.in_order(3, item)
        found: list[list[tuple[int, int]]] = []
        there: dict[int, set[int]] = {number: set() for number in episodes}
        for pieces in puts:
            view.put(
                [
                    piece(*one, ends=(one[1] + one[2], "terminated") == episodes[one[0]])
                    for one in pieces
                ]
            )
            found += taken(sampler)
            for number, first, num in pieces:
                there[number] |= set(range(first, first + num))
            if not (item.overlap or item.burn_in):
                assert len(found) == num_finished(episodes, there, item.length)
        assert sampler.num_missed == 0
        assert sampler.num_consumed == len(found)
    begins = [(sequence[0][0], sequence[0][1]) for sequence in found]
    assert len(set(begins)) == len(begins)
    for sequence in found:
        steps = [step for _, step in sequence]
        assert steps == list(range(steps[0], steps[0] + len(steps)))
        length, end = episodes[sequence[0][0]]
        full = item.length + (item.burn_in if steps[0] == 0 else 0)
        assert len(steps) == full or (end == "terminated" and steps[-1] == length - 1)
    if not item.overlap:
        times = Counter(step for sequence in found for step in sequence)
        if not item.burn_in:
            assert set(times.values()) <= {1}
        for number, (length, end) in episodes.items():
            num = sum(1 for n, _ in times if n == number)
            if end == "terminated":
                assert num == length
            else:
                # What is left of an open episode is less than a sequence.
                assert length - num < item.num_steps
    assert all((step - item.burn_in) % stride == 0 or step == 0 for _, step in begins)


@settings(max_examples=40, deadline=None)
@given(arrivals(any_order=False), st.integers(1, 9))
def test_each_step_is_in_one_sequence(empty: Dataset, arriving: Any, length: int) -> None:
    check(empty, Sequences(length), *arriving)


@settings(max_examples=40, deadline=None)
@given(arrivals(any_order=True), st.integers(1, 9))
def test_pieces_of_an_episode_in_any_order(empty: Dataset, arriving: Any, length: int) -> None:
    check(empty, Sequences(length), *arriving)


@settings(max_examples=30, deadline=None)
@given(arrivals(any_order=True), st.integers(2, 9), st.integers(0, 3), st.data())
def test_overlap_and_burn_in(
    empty: Dataset, arriving: Any, length: int, burn_in: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(0, length - 1))
    check(empty, Sequences(length, overlap, burn_in), *arriving)


def test_what_follows_a_gap_waits_for_a_quarter_of_the_view(empty: Dataset) -> None:
    with empty.follow(max_steps=8000) as view:
        sampler = view.in_order(3, Sequences(4))
        view.put([piece(0, 0, 6, ends=False), piece(0, 9, 5, ends=True)])
        assert list(taken(sampler)) == [[(0, step) for step in range(4)]]
        found: list[list[tuple[int, int]]] = []
        for number in range(1, 100):
            view.put([piece(number, 0, 400, ends=True)])
            found += [one for one in taken(sampler) if one[0][0] == 0]
            if found:
                break
        assert 2000 <= 400 * number <= 4000
        assert found == [[(0, 4), (0, 5)], [(0, s) for s in range(9, 13)], [(0, 13)]]


def test_what_was_missing_before_is_not_waited_for(empty: Dataset) -> None:
    with empty.follow(max_steps=8000) as view:
        view.put(
            [piece(0, 0, 6, ends=False), piece(0, 9, 5, ends=True), piece(1, 2, 3, ends=False)]
        )
        sampler = view.in_order(3, Sequences(4))
        zeros = [[(0, s) for s in some] for some in ((0, 1, 2, 3), (4, 5), (9, 10, 11, 12), (13,))]
        assert list(taken(sampler)) == zeros
        view.put([piece(1, 5, 5, ends=False)])
        assert list(taken(sampler)) == [[(1, s) for s in range(at, at + 4)] for at in (2, 6)]


def test_nothing_crosses_to_what_begins_elsewhere(empty: Dataset) -> None:
    """A piece that does not begin with the observation that the one before ended in."""
    with empty.follow() as view:
        sampler = view.in_order(3, Sequences(4))
        other = piece(0, 6, 5, ends=False)
        other.observations[0] = -1  # type: ignore[call-overload, index]
        view.put([piece(0, 0, 6, ends=False)])
        assert len(list(taken(sampler))) == 1
        view.put([other])
        assert [len(one) for one in taken(sampler)] == [2, 4]


@pytest.mark.slow
def test_what_fell_out_is_passed_over(empty: Dataset) -> None:
    with empty.follow(max_steps=100) as view:
        sampler = view.in_order(3, Sequences(8))
        view.put([piece(0, 0, 12, ends=False)])
        view.put([piece(1, 0, 90, ends=True)])
        # Of the open one steps 6 to 11 are there; what was finished of it is gone.
        view.put([piece(0, 12, 4, ends=True)])
        found = list(taken(sampler))
        assert [one for one in found if one[0][0] == 0] == [[(0, s) for s in range(8, 16)]]
        view.put([piece(2, 0, 20, ends=False)])
        view.put([piece(3, 0, 95, ends=True)])
        view.put([piece(2, 20, 3, ends=True)])
        # Its last sequence fell out in part: what is left begins one.
        found = [[step for _, step in one] for one in taken(sampler) if one[0][0] == 2]
        assert found == [[18, 19, 20, 21, 22]]
        # Episodes that are gone are forgotten.
        for number in range(4, 3000):
            view.put([piece(number, 0, 50, ends=True)])
        finished = view._contents.items._finished[Sequences(8)]
        assert len(finished._next) < 1100


def test_by_commits_and_by_streams_too(empty: Dataset) -> None:
    with empty.follow(since=empty.snapshot().version) as view:
        sampler = view.in_order(3, Sequences(8))
        stream = view.stream("e1")
        for first in range(0, 20, 5):
            version = empty.append([piece(0, first, 5, ends=first == 15)]).version
            for step in range(first, first + 5):
                stream.append(np.array([1, step], np.float32), 0, 0.0, terminated=step == 19)
            assert view.wait_for(version)
        found = sorted(taken(sampler))
        assert found == [
            [(number, step) for step in range(at, min(at + 8, 20))]
            for number in (0, 1)
            for at in (0, 8, 16)
        ]


def test_once_all_has_ended_they_are_those_of_other_samplers(empty: Dataset) -> None:
    with empty.follow() as view:
        view.put([piece(0, 0, 40, ends=False), piece(0, 53, 30, ends=False)])
        view.put(
            [piece(0, 83, 9, ends=True), piece(1, 7, 20, ends=True), piece(2, 4, 4, ends=True)]
        )
        for item in (Sequences(5), Sequences(5, 3, 2), Sequences(2, 0, 9), Sequences(9, 8)):
            positions = []
            for candidates in (view.find_finished_candidates(item), view.candidates(item)):
                found = candidates.positions(np.arange(*candidates.bounds()))
                positions.append(sorted(found[found >= 0]))
            assert positions[0] == positions[1]


def test_steps_that_are_removed_are_not_waited_for(empty: Dataset) -> None:
    with empty.follow(since=empty.snapshot().version) as view:
        sampler = view.in_order(1, Sequences(20))
        for first, length in ((0, 6), (6, 3), (9, 3)):
            version = empty.append([piece(5, first, length, ends=False)]).version
            assert view.wait_for(version)
        assert not list(taken(sampler))
        path = empty.snapshot().files[-2].path
        empty.table.commit([], producer="drop", sequence=0, removed=[path])
        version = empty.append([piece(5, 12, 19, ends=True)]).version
        assert view.wait_for(version)
        found = [[step for _, step in one] for one in taken(sampler)]
        assert found == [[*range(6)], [*range(9, 29)], [29, 30]]
