"""Version index: candidates by policy version, so that recent ones need no search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class VersionIndex:
    """Candidates' numbers in parts, each of them sorted by version and then by number.

    Those of at least some version are the ends of the parts, so one of them is drawn by an offset.
    A part is merged with the one before it once it is half as large, so there are about log2(N)
    parts, and each candidate is moved about as often. Memory: 16 to 32 bytes a candidate.
    """

    def __init__(self) -> None:
        self._numbers = np.empty(0, np.int64)
        self._versions = np.empty(0, np.int64)
        # Where parts end; the first begins at 0.
        self._ends: list[int] = []
        self._oldest: int | None = None
        self._totals = np.zeros(0, np.int64)
        self._shifts = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The numbers of all candidates, int64 [N]."""
        return self._numbers[: len(self)]

    def add(self, numbers: NDArray[np.int64], versions: NDArray[np.int64]) -> None:
        """Take in candidates [M], whose numbers are above all others, with their versions [M]."""
        if not len(numbers):
            return
        start, end = len(self), len(self) + len(numbers)
        if end > len(self._numbers):
            # Twice as much each time, so that a candidate is copied about once.
            room = np.empty(max(end, 2 * len(self._numbers) if start else 0), np.int64)
            room[:start] = self._numbers[:start]
            self._numbers = room
            room = np.empty_like(room)
            room[:start] = self._versions[:start]
            self._versions = room
        self._numbers[start:end] = numbers
        self._versions[start:end] = versions
        self._ends.append(end)
        starts = [0, *self._ends][:-1]
        while len(starts) > 1 and starts[-1] - starts[-2] <= 2 * (end - starts[-1]):
            starts.pop()
            self._ends.pop(-2)
        # Stable, so numbers of one version stay in order; of parts that are sorted, it is a merge.
        order = np.argsort(self._versions[starts[-1] : end], kind="stable")
        for values in (self._numbers, self._versions):
            values[starts[-1] : end] = values[starts[-1] : end][order]
        self._oldest = None

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Let go of the `numbers` where kept [N] is false, and make one part of the others."""
        numbers, versions = self.numbers[kept], self._versions[: len(self)][kept]
        # The parts came one after another, so those of one version are in order already.
        order = np.argsort(versions, kind="stable")
        self._numbers, self._versions = numbers[order], versions[order]
        self._ends = [len(numbers)] if len(numbers) else []
        self._oldest = None

    def newest(self) -> int | None:
        """Return the highest version of a candidate, None without any."""
        return max((int(self._versions[end - 1]) for end in self._ends), default=None)

    def draw(self, rng: np.random.Generator, num: int, oldest: int) -> NDArray[np.int64]:
        """Return `num` numbers of candidates of at least a version, uniformly; none without any."""
        if oldest != self._oldest:
            self._find(oldest)
        total = int(self._totals[-1]) if len(self._totals) else 0
        if not total:
            return np.empty(0, np.int64)
        ranks = (rng.random(num) * total).astype(np.int64)
        if len(self._shifts) == 1:
            ranks += self._shifts[0]
        else:
            ranks += self._shifts[np.searchsorted(self._totals, ranks, side="right")]
        return self._numbers.take(ranks)

    def _find(self, oldest: int) -> None:
        """Note how many of the parts up to each are recent, and where the k-th of all lies."""
        starts = [0, *self._ends][:-1]
        firsts = [
            start + int(np.searchsorted(self._versions[start:end], oldest))
            for start, end in zip(starts, self._ends, strict=True)
        ]
        self._totals = np.cumsum(np.array(self._ends, np.int64) - np.array(firsts, np.int64))
        self._shifts = np.array(self._ends, np.int64) - self._totals
        self._oldest = oldest
