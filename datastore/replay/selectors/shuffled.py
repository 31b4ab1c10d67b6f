"""Shuffled selection: without replacement, epoch after epoch, maybe divided among ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError
from replaylake.datastore.replay.arguments import check_batch_size, check_rank, check_seed
from replaylake.datastore.replay.protocols import Assembler, Candidates, SelectedItems
from replaylake.datastore.replay.randomness import random_stream
from replaylake.datastore.replay.sampler import Sampler

_NAME: Final = "shuffled sampler"
# Up to here the order itself is kept, in 512 KB: drawn by numpy, all N! orders are equally likely.
_MAX_KEPT: Final = 1 << 16
# Pairs of rounds. Of one, chi-square tells from chance where numbers and neighbors go; of two,
# still how far apart two go that are a power of two apart (N = 2^17: 14 standard deviations after
# 4e5 of them); of three, nothing of all that, for N from 70,000 to 1e8 (2026-11-21).
_NUM_PAIRS: Final = 3


@dataclass(frozen=True)
class RankShare:
    """What a rank draws of an epoch: `num` places of its permutation, from `first` on.

    num_batches: the same on all ranks. stops: after how many of its items a batch ends, full or
    not; the last one is num.
    """

    first: int
    num: int
    num_batches: int
    stops: tuple[int, ...]

    def end(self, taken: int, num: int) -> int:
        """Return how many are taken after `num` more, or fewer where a batch ends early."""
        return min(taken + num, next(stop for stop in self.stops if stop > taken))


class ShuffledSelector:
    """Takes each candidate once an epoch; each epoch is a new permutation of them.

    An epoch's permutation is that of (seed, epoch), whatever was drawn before. Candidates that a
    view gets meanwhile are in the next epoch, and those that it loses are passed over.
    """

    can_prefetch = True

    def __init__(
        self,
        batch_size: int,
        *,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
        drop_last: bool = False,
    ) -> None:
        """Take how to divide them. Raises: ConfigInvalidError."""
        self.epoch = 0
        self._batch_size = check_batch_size(_NAME, batch_size)
        self._seed = check_seed(_NAME, seed)
        self._rank, self._num_ranks = check_rank(_NAME, rank, num_ranks)
        self._drop_last = drop_last
        # Of the epoch under way: the candidates at its beginning (none: it has not begun), and how
        # many of this rank's share were taken.
        self._bounds = (0, 0)
        self._num_taken = 0
        self._order: Permutation | None = None
        self._share: RankShare | None = None

    def select(self, candidates: Candidates, num: int) -> SelectedItems:
        """Take the next `num` of the epoch, or fewer where a batch or the epoch ends early.

        Raises: EmptyReplayError without candidates; ConfigInvalidError if there are too few for the
        ranks.
        """
        while True:
            order, share = self.begin(candidates)
            position = self._num_taken
            end = share.end(position, num)
            numbers = order.numbers(share.first + position, share.first + end)
            if self._bounds[0]:
                numbers = numbers + self._bounds[0]
            self._num_taken = end
            if end == share.num:
                self._end_epoch()
            if not candidates.is_fixed:
                numbers = numbers[numbers >= candidates.bounds()[0]]
            if len(numbers):
                return SelectedItems(numbers)

    def share(self, candidates: Candidates) -> RankShare:
        """Return this rank's share of an epoch over the candidates that are there now.

        Raises: as select.
        """
        low, high = candidates.bounds()
        if low == high:
            raise EmptyReplayError(
                "shuffled sampler: found nothing to sample, expected at least one item. "
                "Wait for steps, or widen the selection."
            )
        if self._num_ranks > 1 and not candidates.is_fixed:
            raise ConfigInvalidError(
                f"shuffled sampler: found {self._num_ranks} ranks over a view that follows a "
                "dataset, expected one: each rank would see other steps. Shuffle a snapshot's "
                "view, or draw uniformly with another seed on each rank."
            )
        return self._share_of(high - low)

    def _share_of(self, num: int) -> RankShare:
        size, ranks, rank = self._batch_size, self._num_ranks, self._rank
        share, more = divmod(num, ranks)
        num_batches = share // size if self._drop_last else -(-(share + (more > 0)) // size)
        if num_batches < 1 or num_batches > share:
            raise ConfigInvalidError(
                f"shuffled sampler: found {num} items for {ranks} ranks in batches of {size}"
                f"{', the last dropped' if self._drop_last else ''}, expected as many batches on "
                "each rank, none of them empty. Use "
                f"{'smaller batches' if self._drop_last else 'drop_last=True'} or fewer ranks."
            )
        if self._drop_last:
            own = num_batches * size
            return RankShare(rank * own, own, num_batches, (own,))
        own = share + (rank < more)
        stops: tuple[int, ...] = (own,)
        if own == (num_batches - 1) * size:
            # An item less than other ranks, and so a batch less: the last full one is made two.
            stops = (own - size, own - size // 2, own)
        return RankShare(rank * share + min(rank, more), own, num_batches, stops)

    def begin(self, candidates: Candidates) -> tuple[Permutation, RankShare]:
        """Return the order and the share of the epoch under way, which begins if none is.

        Raises: as select; ConfigInvalidError if a restored state is that of other candidates.
        """
        if self._order is None or self._share is None:
            if self._bounds[0] == self._bounds[1]:
                self._share, self._bounds = self.share(candidates), candidates.bounds()
            else:
                self._share = self._restore_share(candidates)
            rng = random_stream(self._seed, _NAME, self.epoch)
            self._order = Permutation(self._bounds[1] - self._bounds[0], rng)
        return self._order, self._share

    def _restore_share(self, candidates: Candidates) -> RankShare:
        self._check_restored(self._bounds[1], candidates)
        return self._share_of(self._bounds[1] - self._bounds[0])

    def check_state(self, state: Mapping[str, Any], candidates: Candidates) -> None:
        """Look whether a saved epoch is of these candidates.

        Raises: ConfigInvalidError; KeyError, TypeError, ValueError if it is no state.
        """
        low, high = map(int, state["bounds"])
        if low < high:
            self._check_restored(high, candidates)
        num = self._share_of(high - low).num if low < high else 1
        if not 0 <= int(state["num_taken"]) < num:
            raise ValueError(f"num_taken is {state['num_taken']} of {num}")

    def _check_restored(self, num: int, candidates: Candidates) -> None:
        high = candidates.bounds()[1]
        if high < num or (candidates.is_fixed and high != num):
            raise ConfigInvalidError(
                f"shuffled sampler: found a state of an epoch over {num} items and a "
                f"view of {high}, expected the same. Restore it over the view that it was saved "
                "with, or begin anew."
            )

    def _end_epoch(self) -> None:
        self.epoch += 1
        self._bounds, self._num_taken = (0, 0), 0
        self._order = self._share = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, of this rank."""
        return {
            "seed": self._seed,
            "epoch": self.epoch,
            "bounds": list(self._bounds),
            "num_taken": self._num_taken,
            **self._division(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from it. Raises: ConfigInvalidError for one of another rank or batch size."""
        self.check_division(state)
        seed, epoch, num_taken = (int(state[name]) for name in ("seed", "epoch", "num_taken"))
        low, high = map(int, state["bounds"])
        self._seed, self.epoch = seed, epoch
        self._bounds, self._num_taken = (low, high), num_taken
        self._order = self._share = None

    def check_division(self, state: Mapping[str, Any]) -> None:
        """Raises: ConfigInvalidError for a state of another rank or batch size."""
        own = self._division()
        if differs := {name: state[name] for name in own if state[name] != own[name]}:
            raise ConfigInvalidError(
                f"shuffled sampler: found a state of {differs}, expected of {own}: they decide "
                "what each batch of an epoch holds. Save a state on each rank, and restore it into "
                "a sampler made in the same way."
            )

    def _division(self) -> dict[str, Any]:
        return {
            "batch_size": self._batch_size,
            "rank": self._rank,
            "num_ranks": self._num_ranks,
            "drop_last": self._drop_last,
        }

    def describe(self) -> dict[str, Any]:
        """Return what was asked for, JSON-able: enough to make it again."""
        return {
            "selector": "shuffled",
            "num_ranks": self._num_ranks,
            "drop_last": self._drop_last,
        }


class ShuffledSampler(Sampler):
    """Draws every item once an epoch."""

    def __init__(
        self,
        candidates: Candidates,
        selector: ShuffledSelector,
        assembler: Assembler,
        batch_size: int,
    ) -> None:
        """Look whether there is enough for an epoch.

        Raises: EmptyReplayError, ConfigInvalidError.
        """
        super().__init__(candidates, selector, assembler, batch_size)
        self._shuffled = selector
        selector.share(candidates)

    @property
    def epoch(self) -> int:
        """How many epochs were handed out to their end: that of the next batch, from 0 on."""
        number: int = self.state_dict()["selector"]["epoch"]
        return number

    def _position(self) -> dict[str, Any]:
        if self._candidates.is_fixed:
            # So that the state says what the epoch is of, also before its first batch.
            self._shuffled.begin(self._candidates)
        return super()._position()

    def _load(self, state: Mapping[str, Any]) -> None:
        self._shuffled.check_division(state["selector"])
        self._shuffled.check_state(state["selector"], self._candidates)
        super()._load(state)

    @property
    def num_batches(self) -> int:
        """Batches in an epoch over what is there now, the same on all ranks."""
        return self._shuffled.share(self._candidates).num_batches

    def rest_of_epoch(self) -> Iterator[Batch[Array]]:
        """Yield the batches that are left of this epoch: all of one, if none of it was drawn."""
        epoch = self.epoch
        while self.epoch == epoch:
            yield self.sample()


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
        if num <= _MAX_KEPT:
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
        numbers = self._permute(np.arange(start, stop))
        outside = np.flatnonzero(numbers >= self._num)
        while len(outside):
            turned = self._permute(numbers[outside])
            numbers[outside] = turned
            outside = outside[turned >= self._num]
        return numbers

    def _permute(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        high = numbers >> self._low_bits
        low = numbers & ((1 << self._low_bits) - 1)
        for of_low, of_high in self._rounds:
            high ^= of_low.take(low)
            low ^= of_high.take(high)
        high <<= self._low_bits
        high |= low
        return high
