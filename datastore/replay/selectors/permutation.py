"""Permutation: a random order of 0 to N - 1, any part of which is had at once."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

# Up to here the order itself is kept, in 512 KB: drawn by numpy, all N! orders are equally likely.
_MOST_KEPT: Final = 1 << 16
# Pairs of rounds. Of one, chi-square tells from chance where numbers and neighbours go; of two,
# still how far apart two go that are a power of two apart (N = 2^17: 14 standard deviations after
# 4e5 of them); of three, nothing of all that, for N from 70,000 to 1e8 (2026-11-21).
_NUM_PAIRS: Final = 3


class Permutation:
    """A permutation of range(num), drawn by `rng`.

    Beyond 65,536 it is a Feistel network of six rounds (Luby and Rackoff 1988): a number is cut
    into two halves, each of which is exclusive-ored with a random function of the other in turn,
    which can be undone, so that no two numbers become one. The random functions are tables:
    numbers up to 1e8 have halves of 13 and 14 bits, so all of them take 0.6 MB, where the order
    itself would take 800. What comes out beyond num goes through it once more, until it lies within
    (Black and Rogaway 2002, "cycle walking"): less than two turns on average.
    """

    def __init__(self, num: int, rng: np.random.Generator) -> None:
        self._num = num
        self._order: NDArray[np.int64] | None = None
        if num <= _MOST_KEPT:
            self._order = rng.permutation(num)
            return
        bits = (num - 1).bit_length()
        self._low_bits = bits // 2
        low, high = 1 << self._low_bits, 1 << (bits - self._low_bits)
        # The halves that a round changes, by those that it looks at.
        self._rounds = [
            (rng.integers(high, size=low), rng.integers(low, size=high)) for _ in range(_NUM_PAIRS)
        ]

    def numbers(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return what the places from start up to stop hold: int64 [stop - start].

        Cost beyond 65,536: 25 to 60 ns each (2 cores, 2026-11-21), wherever they are.
        """
        if self._order is not None:
            return self._order[start:stop]
        found = self._turned(np.arange(start, stop))
        outside = np.flatnonzero(found >= self._num)
        while len(outside):
            turned = self._turned(found[outside])
            found[outside] = turned
            outside = outside[turned >= self._num]
        return found

    def _turned(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        high = numbers >> self._low_bits
        low = numbers & ((1 << self._low_bits) - 1)
        for of_low, of_high in self._rounds:
            high ^= of_low.take(low)
            low ^= of_high.take(high)
        high <<= self._low_bits
        high |= low
        return high
