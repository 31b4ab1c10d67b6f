"""What replay's tests share: runs packed by hand, and what is in them, told without records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.replay.layout import KEY, STEPS_LEFT, RecordLayout
from replaylake.datastore.replay.record_runs import Runs
from replaylake.datastore.replay.records import PADDING, Packed, Records

# (episode, first step, steps, how it ends): "terminated", "truncated", "open" with the observation
# after it; "cut" (truncated) and "lost" without.
Piece = tuple[int, int, int, str]


@dataclass(frozen=True)
class Chain:
    """Steps of an episode without a gap, over one or several pieces."""

    episode: int
    first: int
    end: int
    ends_as: str

    @property
    def has_successor(self) -> bool:
        return self.ends_as in ("terminated", "truncated", "open")

    def frames(self, step: int, num: int) -> list[list[int]]:
        """The last `num` observations up to that before `step`, or the final one."""
        last = self.end if self.has_successor else self.end - 1
        steps = [min(max(t, self.first), last) for t in range(step - num + 1, step + 1)]
        return [[self.episode, t] for t in steps]


class Log:
    """Pieces packed in their order; those of one episode that adjoin are linked.

    Step t of episode e has observation [e, t], action 1000 e + t, reward e / 2 + t + 1, the mask
    [True, t is even], key [e + 1, t + 1] and "hidden" [t].
    """

    def __init__(self, pieces: Sequence[Piece], frame_stack: int = 1) -> None:
        self.pieces = list(pieces)
        self.frame_stack = frame_stack
        self.positions: dict[tuple[int, int], int] = {}
        self._by_start = {(e, first): i for i, (e, first, _, _) in enumerate(self.pieces)}
        spec = DatasetSpec(Box((2,)), Discrete(10**6), mask_size=2)
        hidden = {"hidden": pa.list_(pa.float32(), 1)}
        self.layout = RecordLayout(spec, hidden, frame_stack=frame_stack)
        self.packed = self._pack()

    def next_piece(self, piece: Piece) -> int | None:
        episode, first, num, end = piece
        return self._by_start.get((episode, first + num)) if end == "open" else None

    def chain(self, episode: int, step: int) -> Chain:
        """The chain that a step is in."""
        i = max(i for (e, f), i in self._by_start.items() if (e, f) in self._holding(episode, step))
        piece = self.pieces[i]
        while (before := self._before(piece)) is not None:
            piece = before
        first = piece[1]
        while (after := self.next_piece(piece)) is not None:
            piece = self.pieces[after]
        return Chain(episode, first, piece[1] + piece[2], piece[3])

    def _holding(self, episode: int, step: int) -> list[tuple[int, int]]:
        return [(e, f) for e, f, n, _ in self.pieces if e == episode and f <= step < f + n]

    def _before(self, piece: Piece) -> Piece | None:
        for other in self.pieces:
            following = self.next_piece(other)
            if following is not None and self.pieces[following] == piece:
                return other
        return None

    def _pack(self) -> Packed:
        before = self.frame_stack - 1
        total = sum(num + 1 + before for _, _, num, _ in self.pieces)
        words = np.zeros((total + PADDING, self.layout.num_words), np.uint64)
        rows = self.layout.rows(words)[:, 0]
        rows["action_mask"] = True
        starts = []
        at = 0
        for episode, first, num, end in self.pieces:
            at += before
            starts.append(at)
            for t in range(num):
                self._put(rows[at + t], episode, first + t, num - t)
                rows[at + t]["terminated"] = end == "terminated" and t == num - 1
                unknown = end in ("cut", "lost") and t == num - 1
                rows[at + t]["bootstrappable"] = not unknown
                self.positions[episode, first + t] = at + t
            last = first + num - (end in ("cut", "lost"))
            rows[at + num]["observation"] = [episode, last]
            at += num + 1
        for start, piece in zip(starts, self.pieces, strict=True):
            self._finish(rows, start, starts, piece)
        return self._packed(words, starts)

    def _put(self, row: np.void, episode: int, step: int, left: int) -> None:
        row["observation"] = [episode, step]
        row["action"] = 1000 * episode + step
        row["reward"] = episode / 2 + step + 1
        row["behavior_log_prob"] = -step - 1.0
        row["action_mask"] = [True, step % 2 == 0]
        row["column.hidden"] = [step]
        row[KEY] = [episode + 1, step + 1]
        row[STEPS_LEFT] = left

    def _finish(self, rows: np.ndarray, start: int, starts: list[int], piece: Piece) -> None:
        """Link a run to the next one, and put before it what its stacks need."""
        episode, first, num, _ = piece
        if (following := self.next_piece(piece)) is not None:
            rows[start + num][KEY] = [starts[following] + 1, 0]
            rows[start + num]["action_mask"] = rows[starts[following]]["action_mask"]
        chain = self.chain(episode, first)
        for j in range(1, self.frame_stack):
            rows[start - j]["observation"] = [episode, max(first - j, chain.first)]
            rows[start - j][STEPS_LEFT] = num + j

    def _packed(self, words: np.ndarray, starts: list[int]) -> Packed:
        offsets = [first - self.chain(e, first).first for e, first, _, _ in self.pieces]
        steps = np.array(sorted(self.positions.values()), np.int64)
        rows = self.layout.rows(words)[:, 0]
        ended = [end in ("terminated", "truncated", "cut") for *_, end in self.pieces]
        linked = any(self.next_piece(piece) is not None for piece in self.pieces)
        return Packed(
            records=Records(self.layout, words, has_links=linked),
            runs=Runs(
                np.array(starts, np.int64),
                np.array([num for _, _, num, _ in self.pieces], np.int64),
                np.array(offsets, np.int64),
                np.array([first for _, first, _, _ in self.pieces], np.int64),
                np.array(ended, np.int64),
            ),
            steps=steps,
            bootstrappable=steps[rows["bootstrappable"][steps]],
            num_steps=len(steps),
            num_episodes=len({episode for episode, *_ in self.pieces}),
        )


@pytest.fixture
def pack_pieces() -> Callable[..., Log]:
    """Return what packs pieces (episode, first step, steps, end): see Log."""
    return Log


def _draw_pieces(data: Any) -> list[Piece]:
    """Some episodes of some pieces each, in order, with gaps and every kind of end."""
    after = st.sampled_from(["open", "open", "gap", "lost"])
    part = st.tuples(st.integers(1, 6), after)
    ends = st.sampled_from(["terminated", "truncated", "open", "lost", "cut"])
    episode = st.tuples(st.integers(0, 2), st.lists(part, min_size=1, max_size=5), ends)
    pieces: list[Piece] = []
    for number, (first, parts, end) in enumerate(
        data.draw(st.lists(episode, min_size=1, max_size=4))
    ):
        step = first
        for num, comes in parts:
            pieces.append((number, step, num, "lost" if comes == "lost" else "open"))
            step += num + (comes != "open")
        pieces[-1] = (*pieces[-1][:3], end)
    return pieces


@pytest.fixture
def draw_pieces() -> Callable[[Any], list[Piece]]:
    """Return what draws pieces of several episodes out of hypothesis's data."""
    return _draw_pieces


@pytest.fixture(scope="session")
def same() -> Callable[[Batch, Batch], bool]:
    """Tell whether two batches hold the same values, bit for bit but for NaN."""

    def is_same(one: Batch, other: Batch) -> bool:
        return all(
            np.array_equal(value, getattr(other, name), equal_nan=value.dtype.kind == "f")
            for name, value in vars(one).items()
            if value is not None
        )

    return is_same
