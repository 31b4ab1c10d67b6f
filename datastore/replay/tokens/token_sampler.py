"""TokenSampler: batches of token sequences, padded or packed, whose order can be resumed.

An epoch is a permutation of units, each a sequence or a whole group. It is cut into windows, and a
window into batches: in order, by length, or so that they fill a budget of tokens. A window depends
on the seed, the epoch and its own number alone, so a position is three numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.replay.arguments import check_int, check_rank, check_seed
from replaylake.datastore.replay.randomness import random_stream
from replaylake.datastore.replay.saved_state import KIND, read_state
from replaylake.datastore.replay.selectors.shuffled import Permutation
from replaylake.datastore.replay.selectors.weighted import AliasTable
from replaylake.datastore.replay.tokens.token_batch import BatchMemory, TokenBatch

_NAME: Final = "token sampler"
# The kind of its saved states.
_KIND: Final = "token"
# Sequences that are packed together: of more the batches are hardly fuller.
_PACKED_AT_ONCE: Final = 1024
_ORDERED_AT_ONCE: Final = 4096
# Streams of random numbers: the order of an epoch, draws by weight, the order of batches.
_ORDER, _DRAWS, _BATCHES = range(3)


@dataclass(frozen=True)
class Units:
    """What is drawn: sequences, or whole groups of them.

    members int64: the sequences of all units, one unit after another; None: unit i is sequence i.
    offsets int64 [U + 1] into members. weights float64 [U], or None for an epoch of all units.
    """

    num: int
    members: NDArray[np.int64] | None = None
    offsets: NDArray[np.int64] | None = None
    weights: NDArray[np.float64] | None = None

    def find_members(self, units: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the sequences of some units, and the number of each unit's."""
        if self.members is None:
            return units, np.ones(len(units), np.int64)
        if self.offsets is None:
            return self.members[units], np.ones(len(units), np.int64)
        starts = self.offsets[units]
        nums = self.offsets[units + 1] - starts
        within = np.arange(int(nums.sum())) - np.repeat(np.cumsum(nums) - nums, nums)
        return self.members[np.repeat(starts, nums) + within], nums


class Planner(ABC):
    """Cuts windows of units into batches."""

    @property
    @abstractmethod
    def window(self) -> int:
        """Units in a window."""

    @property
    @abstractmethod
    def needs_lengths(self) -> bool:
        """Whether batches depend on the sequences' lengths."""

    @abstractmethod
    def cut(
        self, members: NDArray[np.int64], nums: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> list[NDArray[np.int64]]:
        """Return the sequences of each batch.

        members: sequences, of which each unit has `nums`; lengths: tokens of each sequence.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what decides the batches, JSON-able."""


@dataclass(frozen=True)
class PaddedPlanner(Planner):
    """Batches of `batch_size` units; of fewer, where `max_tokens` limits rows times the longest.

    bucket_batches: batches in a window, whose units are sorted by length.
    """

    batch_size: int
    max_tokens: int | None
    bucket_batches: int

    @property
    def window(self) -> int:
        return self.batch_size * self.bucket_batches

    @property
    def needs_lengths(self) -> bool:
        return self.bucket_batches > 1 or self.max_tokens is not None

    def cut(
        self, members: NDArray[np.int64], nums: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> list[NDArray[np.int64]]:
        if not self.needs_lengths:
            return [members]
        ends = np.cumsum(nums)
        longest = np.maximum.reduceat(lengths, ends - nums)
        order = np.arange(len(nums))
        if self.bucket_batches > 1:
            order = np.argsort(longest, kind="stable")
        batches: list[NDArray[np.int64]] = []
        current: list[int] = []
        rows = width = 0
        for unit in order.tolist():
            num, length = int(nums[unit]), int(longest[unit])
            widest = max(width, length)
            is_beyond = self.max_tokens is not None and (rows + num) * widest > self.max_tokens
            if current and (len(current) == self.batch_size or is_beyond):
                batches.append(_join_units(members, ends, nums, current))
                current, rows, widest = [], 0, length
            current.append(unit)
            rows, width = rows + num, widest
        batches.append(_join_units(members, ends, nums, current))
        return batches

    def describe(self) -> dict[str, Any]:
        return {
            "layout": "padded",
            "batch_size": self.batch_size,
            "max_tokens": self.max_tokens,
            "bucket_batches": self.bucket_batches,
        }


@dataclass(frozen=True)
class PackedPlanner(Planner):
    """Batches of up to `max_tokens` tokens, filled by first-fit decreasing (Johnson 1973)."""

    max_tokens: int
    window_units: int = _PACKED_AT_ONCE

    @property
    def window(self) -> int:
        return self.window_units

    @property
    def needs_lengths(self) -> bool:
        return True

    def cut(
        self, members: NDArray[np.int64], nums: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> list[NDArray[np.int64]]:
        ends = np.cumsum(nums)
        sizes = np.add.reduceat(lengths, ends - nums)
        bins: list[list[int]] = []
        rooms = np.zeros(len(sizes), np.int64)
        for unit in np.argsort(-sizes, kind="stable").tolist():
            # The first bin with room; a new one has all of it.
            rooms[len(bins) : len(bins) + 1] = self.max_tokens
            place = int(np.argmax(rooms[: len(bins) + 1] >= sizes[unit]))
            if place == len(bins):
                bins.append([])
            bins[place].append(unit)
            rooms[place] -= sizes[unit]
        return [_join_units(members, ends, nums, units) for units in bins]

    def describe(self) -> dict[str, Any]:
        return {"layout": "packed", "max_tokens": self.max_tokens, "window": self.window_units}


def _join_units(
    members: NDArray[np.int64], ends: Array, nums: Array, units: Sequence[int]
) -> NDArray[np.int64]:
    return np.concatenate([members[ends[unit] - nums[unit] : ends[unit]] for unit in units])


class SequenceSource(Protocol):
    """Where a sampler's sequences come from: a TokenSequences."""

    def read_lengths(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of some sequences."""
        ...

    def gather(
        self,
        sequences: NDArray[np.int64],
        *,
        is_packed: bool,
        versions: bool,
        memory: BatchMemory | None,
    ) -> TokenBatch[Array]:
        """Copy some sequences into a batch."""
        ...


@dataclass
class _Window:
    """Batches of a window of an epoch, and how many of them were taken."""

    epoch: int = 0
    number: int = 0
    num_taken: int = 0
    batches: list[NDArray[np.int64]] | None = field(default=None, repr=False)


class TokenSampler:
    """Draws batches of token sequences; its position can be saved and restored.

    Without weights, an epoch has each unit once, in a new order each time. With weights, it has as
    many draws with replacement.
    """

    def __init__(
        self,
        source: SequenceSource,
        units: Units,
        planner: Planner,
        *,
        seed: int,
        versions: bool,
        reuse: int,
        rank: int,
        num_ranks: int,
        about: Mapping[str, Any],
    ) -> None:
        """Take what is drawn. about: what decides which units there are, JSON-able.

        reuse, rank, num_ranks: see TokenSequences.padded.

        Raises: ConfigInvalidError.
        """
        self._source, self._units, self._planner = source, units, planner
        self._seed = check_seed(_NAME, seed)
        self._versions = versions
        self._rank, self._num_ranks = check_rank(_NAME, rank, num_ranks)
        self._about = {
            **about,
            **planner.describe(),
            "num_units": units.num,
            "num_ranks": self._num_ranks,
        }
        self._weights = None if units.weights is None else AliasTable(units.weights)
        self.reuse = reuse = check_int(f"{_NAME}: reuse", reuse, advice="Leave reuse out.")
        # One more than may be in use: the oldest is written to.
        self._memories = deque(BatchMemory() for _ in range(reuse + 1 if reuse else 0))
        self._window = _Window()
        # The epoch's permutation, and what some of its places hold.
        self._order: tuple[int, Permutation] | None = None
        self._known = 0, 0, np.zeros(0, np.int64)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0 on."""
        return self._window.epoch

    @property
    def num_units(self) -> int:
        """Sequences, or groups, of an epoch."""
        return self._units.num

    @cached_property
    def sequences(self) -> NDArray[np.int64]:
        """The sequences that can be drawn, int64: rows of the view's `table`."""
        members = self._units.members
        return np.arange(self._units.num) if members is None else np.unique(members)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each of `sequences`."""
        return self._source.read_lengths(self.sequences)

    def describe(self) -> dict[str, Any]:
        """Return how sequences are chosen, JSON-able, for a policy's lineage."""
        return dict(self._about)

    def sample(self) -> TokenBatch[Array]:
        """Draw one batch; its arrays are its own, unless `reuse` says otherwise.

        Raises: ShardCorruptError.
        """
        before = replace(self._window)
        try:
            # All ranks pass over the same batches, so their positions are equal.
            batches = [self._take() for _ in range(self._num_ranks)]
            batch = self._source.gather(
                batches[self._rank],
                is_packed=isinstance(self._planner, PackedPlanner),
                versions=self._versions,
                memory=self._memories[0] if self._memories else None,
            )
        except BaseException:
            self._window = before
            raise
        self._memories.rotate(-1)
        return batch

    def _take(self) -> NDArray[np.int64]:
        """Return the sequences of the next batch."""
        window = self._window
        if window.batches is None:
            window.batches = self._plan(window)
        batch = window.batches[window.num_taken]
        window.num_taken += 1
        if window.num_taken == len(window.batches):
            self._window = self._next(window)
        return batch

    def rest_of_epoch(self) -> Iterator[TokenBatch[Array]]:
        """Yield the batches that are left of this epoch: all of one, if none of it was drawn.

        With several ranks each yields as many; the last ones may be of the next epoch.
        """
        epoch = self.epoch
        while self.epoch == epoch:
            yield self.sample()

    def __iter__(self) -> Iterator[TokenBatch[Array]]:
        while True:
            yield self.sample()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, JSON-able."""
        window = self._window
        return {
            KIND: _KIND,
            "about": self._about,
            "seed": self._seed,
            "epoch": window.epoch,
            "window": window.number,
            "num_taken": window.num_taken,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position: the next batch is the one that was next.

        Raises, changing nothing: ConfigInvalidError for what no sampler made in this way saved.
        """
        with read_state(_KIND, state):
            self._check_about(state["about"])
            seed = check_seed(_NAME, state["seed"])
            epoch, number, taken = (int(state[name]) for name in ("epoch", "window", "num_taken"))
            window = _Window(epoch, number, taken)
            if not (window.epoch >= 0 and 0 <= window.number < self._num_windows()):
                raise ValueError(f"window {window.number} of epoch {window.epoch}")
            before, self._seed, self._order = (self._seed, self._order), seed, None
            try:
                window.batches = self._plan(window)
                if not 0 <= window.num_taken < len(window.batches):
                    raise ValueError(f"num_taken is {window.num_taken} of {len(window.batches)}")
            except ValueError:
                self._seed, self._order = before
                raise
            self._window = window

    def _check_about(self, about: Mapping[str, Any]) -> None:
        differs = [name for name, value in self._about.items() if about.get(name) != value]
        if differs:
            found = {name: about.get(name) for name in differs}
            own = {name: self._about[name] for name in differs}
            raise ConfigInvalidError(
                f"{_NAME}: found a state of {found}, expected of {own}: they decide what each "
                "batch holds. Restore it into a sampler made in the same way, over the same "
                "snapshot."
            )

    def _num_windows(self) -> int:
        return -(-self._units.num // self._planner.window)

    def _next(self, window: _Window) -> _Window:
        if window.number + 1 < self._num_windows():
            return _Window(window.epoch, window.number + 1)
        return _Window(window.epoch + 1)

    def _plan(self, window: _Window) -> list[NDArray[np.int64]]:
        """Return the sequences of each batch of a window."""
        size = self._planner.window
        start, stop = window.number * size, min((window.number + 1) * size, self._units.num)
        # Making a generator takes 50 us, half of what a batch of 64 does: not for batches in order.
        if self._weights is not None:
            units = self._weights.draw(self._make_stream(window, _DRAWS), stop - start)
        else:
            units = self._find_order(window.epoch, start, stop)
        members, nums = self._units.find_members(units)
        lengths = self._source.read_lengths(members) if self._planner.needs_lengths else nums
        batches = self._planner.cut(members, nums, lengths)
        if len(batches) == 1:
            return batches
        # Sorted by length, they would come in that order.
        rng = self._make_stream(window, _BATCHES)
        return [batches[number] for number in rng.permutation(len(batches)).tolist()]

    def _make_stream(self, window: _Window, purpose: int) -> np.random.Generator:
        return random_stream(self._seed, _NAME, purpose, window.epoch, window.number)

    def _find_order(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return what the places from start up to stop of an epoch hold."""
        if self._order is None or self._order[0] != epoch:
            rng = random_stream(self._seed, _NAME, _ORDER, epoch)
            self._order = epoch, Permutation(self._units.num, rng)
            self._known = 0, 0, np.zeros(0, np.int64)
        first, last, numbers = self._known
        if not (first <= start and stop <= last):
            # 64 places take almost as long as 4,096 of a long permutation.
            first, last = start, min(max(stop, start + _ORDERED_AT_ONCE), self._units.num)
            numbers = self._order[1].numbers(first, last)
            self._known = first, last, numbers
        return numbers[start - first : stop - first]


def check_budget(what: str, value: object) -> int:
    """Return a budget of tokens. Raises: ConfigInvalidError."""
    return check_int(f"{_NAME}: {what}", value, minimum=1, advice="Give a number of tokens.")
