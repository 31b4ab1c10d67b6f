"""Ring: records of which new ones take the place of the oldest, read without a lock.

Positions rise for good: the record at p lies at p % size. One thread at a time writes, any number
read, and none waits for another. What makes that safe:
    - `low`, below which nothing may start, is raised before anything below it is overwritten, and
      stays some records ahead of what is. A reader that was slower than that finds out by
      `overwritten` once it has copied, and draws again.
    - Records that can be reached are changed seldom: a run is linked to the one that continues it,
      a label changes a reward. Meanwhile a count is odd, and afterwards it is another; a reader
      that sees either copies again. (A sequence lock, as in Linux; Lameter 2005.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.replay.layout import RecordLayout
from replaylake.datastore.replay.protocols import OverwrittenError
from replaylake.datastore.replay.records import PADDING, Records

# How far apart `low` and what is overwritten are kept, and the most that is written at once: a
# reader of 4,096 transitions takes 0.2 ms, and in that time nobody writes as much.
_MIN_MARGIN: Final = 1024
_MAX_MARGIN: Final = 65_536


class Ring(Records):
    """Room for `max_steps` steps in runs of at least four; of shorter ones for fewer.

    low: nothing below this position may start an item. overwritten: nor be read. startable bool
    [size]: whether `where_steps` lets an item start at a record, and it was not removed. first:
    whether a record is the first step of an episode. All by place.
    """

    def __init__(self, layout: RecordLayout, max_steps: int) -> None:
        self.margin = min(max(max_steps // 16, _MIN_MARGIN), _MAX_MARGIN)
        self.margin += layout.frame_stack
        self.size = max_steps + max_steps // 4 + 2 * self.margin
        # Not touched, and so no memory, until records come.
        words = np.zeros((self.size + PADDING, layout.num_words), np.uint64)
        super().__init__(layout, words, has_links=True)
        # From the second round on: no position is one that some arithmetic with -1 gives.
        self.low = self.overwritten = self.size
        self.startable: NDArray[np.bool_] = np.zeros(self.size, np.bool_)
        self.first: NDArray[np.bool_] = np.zeros(self.size, np.bool_)
        self._num_edits = 0

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where records lie."""
        return positions % self.size

    def place(self, position: int) -> int:
        """Return where one record lies."""
        return position % self.size

    def moment(self) -> int:
        """Return the count once nobody edits: it is another after the next edit."""
        while (count := self._num_edits) % 2:
            # Whoever edits may be waiting for the interpreter, which sleeping yields.
            time.sleep(0)
        return count

    def windows(
        self, positions: NDArray[np.int64], length: int, out: NDArray[np.uint64] | None = None
    ) -> NDArray[np.uint64]:
        """Copy as Records does, all as of one moment. Raises: Overwritten."""
        while True:
            moment = self.moment()
            out = super().windows(positions, length, out)
            if self._num_edits == moment:
                self._check_intact(positions)
                return out

    def take(self, field: str, positions: NDArray[np.int64]) -> Array:
        """Return a field as Records does. Raises: Overwritten."""
        values = super().take(field, positions)
        self._check_intact(positions)
        return values

    def begin_episodes(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of positions [M] are the first steps of episodes: bool [M]."""
        is_first: NDArray[np.bool_] = self.first[self.places(positions)]
        return is_first

    def may_start(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return at which of positions [M] items may start now: bool [M]."""
        allowed = self.startable[self.places(positions)]
        # In this order: what takes a place comes after `low` was raised.
        allowed &= positions >= self.low
        return allowed

    def write(self, position: int, words: NDArray[np.uint64], room: int) -> None:
        """Put new records at a position, with room for more after them. Cost: one copy."""
        place, num = self.place(position), len(words)
        self.overwritten = max(self.overwritten, position + num + room - self.size)
        self.startable[place : place + num + room] = False
        self.first[place : place + num + room] = False
        self.words[place : place + num] = words

    @contextmanager
    def editing(self) -> Iterator[NDArray[np.void]]:
        """Change records that others may be reading: keep it short."""
        self._num_edits += 1
        try:
            yield self.rows
        finally:
            self._num_edits += 1

    def _check_intact(self, positions: NDArray[np.int64]) -> None:
        if len(positions) and positions.min() < self.overwritten:
            raise OverwrittenError
