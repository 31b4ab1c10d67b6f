from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.replay.records import PADDING, Records

Pack = Callable[..., Any]


def steps_of(log: Any, words: np.ndarray) -> list[list[list[int]]]:
    observations: np.ndarray = log.layout.rows(words)["observation"]
    found: list[list[list[int]]] = observations.astype(int).tolist()
    return found


def num_steps(rows: np.ndarray) -> np.ndarray:
    """How many steps of windows [M, length] have their successor in it too; the tail is next."""
    nums = []
    for left in rows["steps_left"].tolist():
        at = 0
        while at < len(left) - 1 and left[at]:
            at = min(at + left[at], len(left) - 1)
        nums.append(at)
    return np.array(nums)


def test_a_window_goes_on_along_links(pack_pieces: Pack) -> None:
    # The second piece lies before the first one, as in a view that they came to in that order.
    log = pack_pieces([(7, 2, 2, "terminated"), (8, 0, 3, "open"), (7, 0, 2, "open")])
    first = np.array([log.positions[7, 0], log.positions[8, 1]])
    words = log.packed.records.windows(first, 5)
    assert steps_of(log, words)[0] == [[7, 0], [7, 1], [7, 2], [7, 3], [7, 4]]
    assert steps_of(log, words)[1][:3] == [[8, 1], [8, 2], [8, 3]]
    records = log.packed.records
    assert num_steps(log.layout.rows(words)).tolist() == [4, 2]
    assert records.num_steps_left(first).tolist() == [4, 2]
    assert records.after(first, np.array([3, 2])).tolist() == [
        log.positions[7, 3],
        log.positions[8, 2] + 1,
    ]


def test_a_window_of_two_records_follows_no_link(pack_pieces: Pack) -> None:
    log = pack_pieces([(0, 0, 1, "open"), (0, 1, 1, "open"), (0, 2, 1, "open")])
    words = log.packed.records.windows(np.array([0, 2, 4]), 2)
    assert steps_of(log, words) == [[[0, t], [0, t + 1]] for t in range(3)]
    assert num_steps(log.layout.rows(words)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("length", [PADDING - 1, PADDING, PADDING + 2, 3 * PADDING])
def test_windows_longer_than_what_is_left(pack_pieces: Pack, length: int) -> None:
    log = pack_pieces([(0, 0, 3, "open"), (1, 0, 2, "open"), (0, 3, 2, "terminated")])
    records = log.packed.records
    out = np.full((7, length * log.layout.num_words), 1, np.uint64)
    words = records.windows(log.packed.steps, length, out)
    rows = log.layout.rows(words)
    assert num_steps(rows).tolist() == [5, 4, 3, 2, 1, 2, 1]
    for row, num in zip(steps_of(log, words), [5, 4, 3, 2, 1, 2, 1], strict=True):
        first = row[0]
        assert row[: num + 1] == [[first[0], first[1] + t] for t in range(num + 1)]
    # What is past the array is nothing's.
    past = len(records.words) - int(log.packed.steps[-1])
    assert not words.reshape(len(words), length, -1)[-1, past:].any()


def test_the_allowed_of_some_steps(pack_pieces: Pack) -> None:
    log = pack_pieces([(0, 0, 3, "open"), (1, 0, 2, "open")])
    packed = log.packed
    assert packed.filter_startable(np.array([0, 4])).tolist() == [0, 4]
    fewer = type(packed)(packed.records, packed.runs, np.array([1, 2]), packed.steps, 5, 2)
    assert fewer.filter_startable(np.array([0, 1, 2, 5])).tolist() == [1, 2]
    none = type(packed)(packed.records, packed.runs, np.array([], np.int64), packed.steps, 5, 2)
    assert none.filter_startable(np.array([0, 1])).tolist() == []


def test_where_episodes_begin(pack_pieces: Pack) -> None:
    log = pack_pieces([(0, 0, 2, "open"), (0, 2, 2, "open"), (1, 3, 1, "open"), (2, 0, 1, "open")])
    begin = log.packed.records.begin_episodes(log.packed.steps)
    assert log.packed.steps[begin].tolist() == [log.positions[0, 0], log.positions[2, 0]]
    alone = Records(log.layout, log.packed.records.words, has_links=True)
    assert not alone.begin_episodes(log.packed.steps).any()


def test_chains(pack_pieces: Pack) -> None:
    pieces = [(0, 0, 2, "open"), (0, 2, 3, "open"), (0, 6, 1, "open"), (1, 0, 1, "cut")]
    runs = pack_pieces(pieces).packed.runs
    assert runs.chain_heads().tolist() == [0, 2, 3]
    assert runs.chain_ends().tolist() == [1, 2, 3]
    nothing = pack_pieces([]).packed.runs
    assert nothing.chain_heads().tolist() == nothing.chain_ends().tolist() == []


@pytest.mark.slow
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(data=st.data(), length=st.integers(2, 14), frame_stack=st.integers(1, 4))
def test_windows_hold_the_episode_s_own_steps(
    pack_pieces: Pack, draw_pieces: Any, data: Any, length: int, frame_stack: int
) -> None:
    pieces = data.draw(st.permutations(draw_pieces(data)))
    log = pack_pieces(pieces, frame_stack)
    records, before = log.packed.records, frame_stack - 1
    first = np.array(list(log.positions.values()))
    words = records.windows(first - before, before + length)
    rows = log.layout.rows(words)
    found = num_steps(rows) - before
    left = records.num_steps_left(first)
    for i, (episode, step) in enumerate(log.positions):
        chain = log.chain(episode, step)
        assert left[i] == chain.end - step
        assert found[i] == min(chain.end - step, length - 1)
        frames = chain.frames(step + found[i], before + 1 + found[i])
        assert steps_of(log, words[i : i + 1])[0][: len(frames)] == frames
        assert rows[i, before : before + found[i]]["action"].tolist() == [
            1000 * episode + step + t for t in range(found[i])
        ]
        for more in range(left[i] + 1):
            place = records.after(first[i : i + 1], np.array([more]))
            assert records.take("observation", place).tolist() == chain.frames(step + more, 1)
