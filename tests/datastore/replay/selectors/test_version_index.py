from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylake.datastore.replay.selectors.recent import VersionIndex

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
