from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.replay.layout import RecordLayout
from replaylake.datastore.replay.live.candidates import LiveCandidates
from replaylake.datastore.replay.live.ring import Ring
from replaylake.datastore.replay.protocols import OverwrittenError

Make = Callable[..., Episode]


@pytest.fixture
def ring() -> Ring:
    return Ring(RecordLayout(DatasetSpec(Box((2,)), Discrete(2)), {}), max_steps=1000)


def words(ring: Ring, num: int, value: int) -> Any:
    return np.full((num, ring.layout.num_words), value, np.uint64)


def test_a_record_lies_where_its_position_says(ring: Ring) -> None:
    for turn in range(1, 4):
        at = turn * ring.size + 7
        ring.write(at, words(ring, 3, turn), 0)
        found = ring.windows(np.array([at, at + 1]), 2)
        assert (found == turn).all()
        assert ring.overwritten == max(ring.size, at + 3 - ring.size)


def test_what_was_overwritten_is_not_returned(ring: Ring) -> None:
    ring.write(ring.size, words(ring, 10, 1), 0)
    positions = np.arange(ring.size, ring.size + 5)
    ring.windows(positions, 2)
    ring.write(2 * ring.size, words(ring, 1, 2), 0)
    with pytest.raises(OverwrittenError):
        ring.windows(positions, 2)
    with pytest.raises(OverwrittenError):
        ring.take("reward", positions)
    ring.windows(positions[1:], 2)
    # Room for more counts as written.
    ring.write(2 * ring.size + 1, words(ring, 1, 2), 3)
    with pytest.raises(OverwrittenError):
        ring.windows(positions[1:], 2)


def test_a_copy_during_an_edit_is_made_again(ring: Ring) -> None:
    """All records of a copy are of one moment, while another thread changes them together."""
    num = 400
    ring.write(ring.size, words(ring, num, 0), 0)
    positions = np.arange(ring.size, ring.size + num - 1)
    place, stop = ring.place(ring.size), threading.Event()

    def edit() -> None:
        value = 0
        while not stop.is_set():
            value += 1
            with ring.editing():
                # In parts, between which readers run.
                for start in range(place, place + num, 50):
                    ring.words[start : start + 50] = value
            stop.wait(1e-4)

    thread = threading.Thread(target=edit)
    thread.start()
    try:
        seen = {tuple(np.unique(ring.windows(positions, 2))) for _ in range(300)}
    finally:
        stop.set()
        thread.join()
    assert all(len(values) == 1 for values in seen)


def test_numbers_go_round(ring: Ring) -> None:
    candidates = LiveCandidates(ring, lambda *, wait=False: None)
    ring.startable[:] = True
    high = 0
    for _ in range(5):
        positions = np.arange(ring.size, ring.size + 900)
        candidates.add(positions)
        high += 900
        low, found = candidates.bounds()
        assert found == high
        assert high - low <= candidates.capacity
        numbers = np.arange(high - 900, high)
        assert (candidates.positions(numbers) == positions).all()
    assert low > 0
    # The number that had the place before is gone.
    assert candidates.positions(np.array([high - 1 - candidates.capacity]))[0] == -1
    ring.startable[ring.place(ring.size + 899)] = False
    assert candidates.positions(np.array([high - 1]))[0] == -1
    ring.low = ring.size + 100
    assert (candidates.positions(numbers)[:100] == -1).all()


def test_rows_that_were_overwritten_are_drawn_again(dataset: Dataset, make_told: Make) -> None:
    """A reader that was overtaken gets other rows, and as many."""
    dataset.append([make_told(n, 10, terminated=True) for n in range(20)])
    with dataset.follow(max_steps=1000) as view:
        sampler = view.uniform(64, seed=0)
        ring: Any = view.assembler(sampler._assembler._item).records
        overtaken = 0

        class Overtaken(type(sampler._assembler)):  # type: ignore[misc]
            def assemble(self, positions: Any, selected: Any, out: Any = None) -> Any:
                nonlocal overtaken
                if not overtaken:
                    overtaken = 1
                    ring.low = ring.overwritten = int(np.median(positions))
                return super().assemble(positions, selected, out)

        sampler._assembler.__class__ = Overtaken
        batch = sampler.sample()
        assert overtaken
        assert len(batch) == 64
        positions = view.candidates(sampler._assembler._item).positions(batch.indices)
        assert positions.min() >= ring.low
