"""Records: packed steps, and the windows of consecutive ones that items are made of.

A run is a maximal stretch of consecutive steps of one episode and agent. It takes T + 1 records:
the last one, its tail, holds only the observation after the run, so the successor of record i is
i + 1. Where the episode goes on elsewhere, as a piece of it came later, the tail says where. It
does so only if that begins with the tail's own observation: nothing crosses from one piece into
another that does not continue it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.replay.kernels.kernels import gather
from replaylake.datastore.replay.layout import BOOTSTRAPPABLE, KEY, STEPS_LEFT, RecordLayout
from replaylake.datastore.replay.record_runs import Runs, returns_to_go

# Records after the last one, so that a window that starts at any step lies inside of the array.
PADDING: Final = 1024


@dataclass(frozen=True)
class Packed:
    """Packed steps with what is known of them. Positions are int64, ascending.

    steps: where items may start that need no successor. bootstrappable: those of them with a
    successor or a termination. num_steps counts also those at which `where_steps` lets none start.
    """

    records: Records
    runs: Runs
    steps: NDArray[np.int64]
    bootstrappable: NDArray[np.int64]
    num_steps: int
    num_episodes: int

    def __post_init__(self) -> None:
        self.records.runs = self.runs

    def filter_startable(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of some steps at which `where_steps` lets items start."""
        if len(self.steps) == self.num_steps:
            return positions
        places = np.searchsorted(self.steps, positions)
        places[places == len(self.steps)] = 0
        return positions[self.steps[places] == positions] if len(self.steps) else positions[:0]


class Records:
    """words uint64 [num_records + PADDING, num_words]: in memory, or mapped from a file.

    runs: those that the records lie in, where all of them are known: not in a view that grows.
    fields int64 [6]: where a record's values lie that kernels.py computes with, from its beginning:
    reward and steps_left, counted in items of four bytes; then, in bytes, terminated,
    bootstrappable, and the first of the action mask and what follows its last. A link is the first
    word.
    """

    def __init__(self, layout: RecordLayout, words: NDArray[np.uint64], *, has_links: bool) -> None:
        self.layout = layout
        self.words = words
        self.has_links = has_links
        self.runs: Runs | None = None
        self.fields = _fields(layout)
        # By discount: see returns.
        self._returns: dict[float, NDArray[np.float32]] = {}

    @property
    def rows(self) -> NDArray[np.void]:
        """All records [num_records + PADDING] as a structured array, without a copy."""
        return self.layout.rows(self.words)[:, 0]

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which of `words` the records at some positions are: the same, but in a ring."""
        return positions

    def take(self, field: str, positions: NDArray[np.int64]) -> Array:
        """Return one field of the records at positions int64 [...]: [..., *field]."""
        values: Array = self.rows[field][self.places(positions)]
        return values

    def moment(self) -> int:
        """Return what is the same after several reads, if all of them were of the same records."""
        return 0

    def windows(
        self, positions: NDArray[np.int64], length: int, out: NDArray[np.uint64] | None = None
    ) -> NDArray[np.uint64]:
        """Copy `length` consecutive records from each position, along links: [M, length * words].

        Past the end of an episode, and the tail after it, a window holds records not its own.
        `positions` int64 [M] are those of steps, or of what is kept before a run for its stacks.
        Cost: one contiguous copy a row, and one of each further run that it reaches into.
        """
        if out is None:
            out = np.empty((len(positions), length * self.layout.num_words), np.uint64)
        places = self.places(positions)
        if length <= PADDING:
            gather(self.words, places, length, out)
        else:
            self._gather_long(places, length, out)
        if self.has_links:
            self._follow_links(out, length)
        return out

    def num_steps_left(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the steps from each of positions [M] to the end of its chain: int64 [M].

        Cost: two reads a row and run.
        """
        steps = self.take(STEPS_LEFT, positions).astype(np.int64)
        if self.has_links:
            rows, tails = np.arange(len(steps)), positions + steps
            while len(rows):
                heads = self._find_linked(tails)
                rows, heads = rows[heads >= 0], heads[heads >= 0]
                more = self.take(STEPS_LEFT, heads).astype(np.int64)
                steps[rows] += more
                tails = heads + more
        return steps

    def after(
        self, positions: NDArray[np.int64], num_steps: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return where the observation lies that follows each of positions [M] by some steps.

        num_steps int64 [M], 0 to num_steps_left. That of a linked tail is the tail's.
        Cost: as that of num_steps_left.
        """
        places = positions + num_steps
        if self.has_links:
            left = self.take(STEPS_LEFT, positions)
            rows = np.flatnonzero(num_steps > left)
            tails, rest = (positions + left)[rows], (num_steps - left)[rows]
            while len(rows):
                heads = self._find_linked(tails)
                places[rows] = heads + rest
                more = self.take(STEPS_LEFT, heads)
                beyond = rest > more
                rows, rest = rows[beyond], (rest - more)[beyond]
                tails = (heads + more)[beyond]
        return places

    def begin_episodes(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of positions [M] are the first steps of episodes: bool [M].

        False where that is not known. Cost: a binary search a row.
        """
        if self.runs is None:
            return np.zeros(len(positions), np.bool_)
        run = np.searchsorted(self.runs.starts, positions)
        run[run == len(self.runs)] = 0
        is_first: NDArray[np.bool_] = self.runs.starts[run] == positions
        is_first &= (self.runs.offsets[run] == 0) & (self.runs.first_steps[run] == 0)
        return is_first

    def returns(self, discount: float) -> NDArray[np.float32]:
        """Return what each step earned from there on, discounted: float32 [num_records + PADDING].

        To the end of its chain; see returns_to_go. Summed up once a discount, and kept: 4 bytes a
        record. Raises: ConfigInvalidError in a view that grows, where no end is known.
        """
        if self.runs is None:
            raise ConfigInvalidError(
                "returns: found a view that grows, expected one of a snapshot: there the rewards "
                "to come are not known yet. Use dataset.snapshot().replay(...)."
            )
        if discount not in self._returns:
            rewards: Any = self.rows[schema.REWARD]
            self._returns[discount] = returns_to_go(rewards, self.runs, discount)
        return self._returns[discount]

    def _find_linked(self, tails: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the episode goes on after some tails, or -1."""
        heads: NDArray[np.int64] = self.take(KEY, tails)[:, 0].astype(np.int64) - 1
        return heads

    def _gather_long(self, places: NDArray[np.int64], length: int, out: NDArray[np.uint64]) -> None:
        """Copy windows that may reach past the padding; a record of zeros leads nowhere."""
        last = len(self.words) - length
        if last >= 0:
            gather(self.words, np.minimum(places, last), length, out)
        words = out.reshape(len(out), length, self.layout.num_words)
        for row in np.flatnonzero(places > last):
            record = self.words[places[row] :]
            words[row, : len(record)] = record
            words[row, len(record) :] = 0

    def _follow_links(self, out: NDArray[np.uint64], length: int) -> None:
        """Put what follows each link that lies inside of a window in its place.

        All rows at once, run by run: of each as much as it has, so no record is copied for nothing.
        """
        rows: Any = self.layout.rows(out)
        left, links = rows[STEPS_LEFT], rows[KEY][..., 0]
        words = out.reshape(len(out) * length, self.layout.num_words)
        found = np.flatnonzero(left[:, 0] < length - 1)
        at = left[found, 0].astype(np.int64)
        while len(found):
            heads = links[found, at].astype(np.int64) - 1
            found, at, heads = found[heads >= 0], at[heads >= 0], heads[heads >= 0]
            num = np.minimum(self.take(STEPS_LEFT, heads) + 1, length - at)
            row = np.repeat(np.arange(len(found)), num)
            within = np.arange(len(row)) - np.repeat(np.cumsum(num) - num, num)
            words[(found * length + at)[row] + within] = self.words[
                self.places(heads)[row] + within
            ]
            at += num - 1
            found, at = found[at < length - 1], at[at < length - 1]


def _fields(layout: RecordLayout) -> NDArray[np.int64]:
    """Return Records.fields."""
    places: Any = layout.dtype.fields
    # Where kernels look for links.
    assert places[KEY][1] == 0
    flags = places[schema.ACTION_MASK][1] if layout.spec.mask_size is not None else 0
    return np.array(
        [
            places[schema.REWARD][1] // 4,
            places[STEPS_LEFT][1] // 4,
            places[schema.TERMINATED][1],
            places[BOOTSTRAPPABLE][1],
            flags,
            flags + (layout.spec.mask_size or 0),
        ]
    )
