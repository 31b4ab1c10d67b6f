"""In-order selection: each item once, in the order of the records, for learners of fresh data.

Such as V-trace (Espeholt et al. 2018) and PPO, which correct for the policy that acted and take
each step no more than once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError, NotFoundError
from replaylake.datastore.replay.layout import KEY
from replaylake.datastore.replay.protocols import (
    Assembler,
    Candidates,
    Output,
    RandomAssembler,
    SelectedItems,
)
from replaylake.datastore.replay.sampler import Sampler
from replaylake.datastore.replay.saved_state import KIND

# Rows whose keys are looked at together.
_CHUNK: Final = 1 << 16


class InOrderSelector:
    """Takes the candidates one after another, from `next` on."""

    can_prefetch = True

    def __init__(self, next_number: int) -> None:
        self.next = next_number

    def select(self, candidates: Candidates, num: int) -> SelectedItems:
        """Take the next `num`, or as many as there are.

        Raises: EmptyReplayError where there is none.
        """
        low, high = candidates.bounds()
        start = max(self.next, low)
        self.next = min(start + num, high)
        if start >= high:
            self.next = start
            raise EmptyReplayError(
                f"in-order sampler: found nothing after item {start}, expected one that was not "
                "consumed. Wait for steps (live: view.wait_for), or make a view of a later version "
                "and go on there: view.in_order(..., after=sampler.last_key)."
            )
        return SelectedItems(np.arange(start, self.next))

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next candidate."""
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]

    def describe(self) -> dict[str, Any]:
        """Return what was asked for, JSON-able."""
        return {"selector": "in_order"}


class InOrderSampler(Sampler):
    """Draws each item once, in the order of the records; of a live view, as they arrived.

    Batches are full as long as there is enough; the last one before nothing is left is smaller, and
    then `sample` raises EmptyReplayError, until there is more.
    """

    def __init__(
        self,
        candidates: Candidates,
        assembler: Assembler,
        batch_size: int,
        after: NDArray[np.uint64] | None = None,
    ) -> None:
        """Begin with what follows the row of key `after` [2], or with the first there is.

        Raises: NotFoundError if there is no such row; ConfigInvalidError.
        """
        self._in_order = InOrderSelector(candidates.bounds()[0])
        super().__init__(candidates, self._in_order, assembler, batch_size)
        if isinstance(assembler, RandomAssembler):
            # The cursor is between any two batches, and what the item draws has to be there too.
            self._num_ahead = 1
        # Before the last draw: rows consumed, and the last one's key. Then the numbers of the rows
        # drawn, and the keys of the last rows of its batches.
        self._num_before = 0
        self._key_before: NDArray[np.uint64] | None = None
        self._numbers: NDArray[np.int64] = np.zeros(0, np.int64)
        self._keys: NDArray[np.uint64] = np.zeros((0, 2), np.uint64)
        if after is not None:
            self._key_before = _row_key(after)
            self._in_order.next = self._after(self._key_before)
        # The number that would be next, had nothing been consumed or missed.
        self._origin = self._in_order.next

    @property
    def num_consumed(self) -> int:
        """Rows handed out so far; by earlier samplers too, where their state was restored."""
        return self._num_before + self._num_handed

    @property
    def num_available(self) -> int:
        """Rows that could be drawn now, without those that left a live view. Raises: as sample."""
        low, high = self._candidates.bounds()
        drawn = len(self._numbers) - self._num_handed
        return drawn + max(0, high - max(self._in_order.next, low))

    @property
    def num_missed(self) -> int:
        """Items that left a live view before they were consumed."""
        return self._next - self._origin - self.num_consumed

    @property
    def last_key(self) -> NDArray[np.uint64] | None:
        """Key uint64 [2] of the row handed out last, by which any view that has it goes on.

        None before the first one.
        """
        handed = self._num_handed
        return self._keys[-(-handed // self.batch_size) - 1] if handed else self._key_before

    def draw(self, num: int, out: Output | None = None) -> Output:
        """Draw the next `num` rows, or as many as there are. Raises: EmptyReplayError."""
        self._num_before, self._key_before = self.num_consumed, self.last_key
        self._numbers = self._numbers[:0]
        output = super().draw(num, out)
        numbers: Any = output.batch.indices
        num_rows = len(numbers)
        ends = np.append(np.arange(self.batch_size, num_rows, self.batch_size), num_rows) - 1
        # Of sequences [M, T, 2], those of the first steps.
        self._keys = output.batch.keys.reshape(num_rows, -1, 2)[ends, 0]
        self._numbers = numbers.copy()
        return output

    @property
    def _num_handed(self) -> int:
        """Rows of the last draw that were handed on."""
        if self._num_left > 0:
            return self._num_taken * self.batch_size
        return len(self._numbers)

    @property
    def _next(self) -> int:
        """The first number that was neither handed on nor missed."""
        handed = self._num_handed
        return int(self._numbers[handed]) if handed < len(self._numbers) else self._in_order.next

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, JSON-able: that after the last batch handed out.

        It names a row, so it holds in any view that has this row: of a later version, or after
        compaction.
        """
        key = self.last_key
        state: dict[str, Any] = {
            KIND: self._kind,
            "last_key": None if key is None else key.tobytes().hex(),
            "next": self._next,
            "num_consumed": self.num_consumed,
            "num_missed": self.num_missed,
        }
        if isinstance(self._assembler, RandomAssembler):
            state["item"] = self._assembler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the row that was handed out last.

        Cost: none in the view of the same steps, else a pass over the keys of all items.
        Raises, changing nothing: NotFoundError if that row is not there; ConfigInvalidError if
        there are others before it that were never handed out, as pieces of earlier episodes came in
        between: in snapshots of a growing dataset steps are ordered by episode, in a live view by
        arrival.
        """
        super().load_state_dict(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        low = self._candidates.bounds()[0]
        key, found = None, low
        num_consumed = int(state["num_consumed"])
        num_passed = num_consumed + int(state["num_missed"])
        if state["last_key"] is not None:
            key = _row_key(np.frombuffer(bytes.fromhex(state["last_key"]), np.uint64))
            found = self._after(key, int(state["next"]))
        if found - low > num_passed:
            raise ConfigInvalidError(
                f"in-order sampler: found {found - low} items up to the one handed out last, "
                f"expected at most the {num_passed} that were handed out or missed: other steps "
                "came in between. Follow the dataset with a live view, or go on regardless with "
                "view.in_order(..., after=sampler.last_key)."
            )
        if isinstance(self._assembler, RandomAssembler):
            self._assembler.load_state_dict(state["item"])
        self._ready.clear()
        self._num_taken = self._num_left = 0
        self._numbers = self._numbers[:0]
        self._num_before, self._key_before = num_consumed, key
        self._in_order.next, self._origin = found, found - num_passed

    def _after(self, key: NDArray[np.uint64], expected: int = -1) -> int:
        """Return the number after that of the row of this key; `expected` is looked at first."""
        low, high = self._candidates.bounds()
        starts = [(start, min(start + _CHUNK, high)) for start in range(low, high, _CHUNK)]
        if low < expected <= high:
            starts.insert(0, (expected - 1, expected))
        for start, stop in starts:
            numbers = np.arange(start, stop)
            positions = self._candidates.positions(numbers)
            there = positions >= 0
            keys = self._assembler.records.take(KEY, positions[there])
            same = np.flatnonzero((keys == key).all(axis=1))
            if len(same):
                return int(numbers[there][same[0]]) + 1
        raise NotFoundError(
            f"in-order sampler: found no item of key {key.tobytes().hex()} among {high - low}, "
            "expected the row that was handed out last. Make the view as it was made then; if the "
            "row was trimmed or deleted since, begin anew, or after another row's key."
        )


def _row_key(value: object) -> NDArray[np.uint64]:
    """Return a row key uint64 [2], a copy. Raises: ConfigInvalidError."""
    try:
        key = np.array(value, np.uint64)
    except (OverflowError, TypeError, ValueError):
        key = np.zeros(0, np.uint64)
    if key.shape != (2,):
        raise ConfigInvalidError(
            f"in-order sampler: found row key {value!r}, expected two whole numbers (uint64 [2]). "
            "Pass sampler.last_key, or a row of batch.keys."
        )
    return key
