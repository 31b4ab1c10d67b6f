"""LiveCandidates: the items of a view that grows, and of which the oldest fall out."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.replay.live.ring import Ring

# Looked at a time for the oldest that is still there.
_PROBE_SIZE: Final = 1024


class Refresh(Protocol):
    """Put what this process appended into the ring; `wait` for another thread that writes to it."""

    def __call__(self, *, wait: bool = False) -> None: ...


class LiveCandidates:
    """Numbers rise in order of arrival; the position of each lies at number % capacity.

    A step that could be bootstrapped only once its successor came has its number from then, so
    positions do not rise with the numbers.
    """

    is_fixed = False

    def __init__(self, ring: Ring, refresh: Refresh) -> None:
        """Take where items start; `refresh` is called before each draw, and may raise."""
        # A few more than can be in the ring, for those that are gone among those that are not.
        self.capacity = ring.size + ring.size // 8
        self._ring = ring
        self._refresh = refresh
        self._positions: NDArray[np.int64] = np.zeros(self.capacity, np.int64)
        # By place: whether the step there has a number.
        self._numbered: NDArray[np.bool_] = np.zeros(ring.size, np.bool_)
        # Replaced as one, so that both are of one moment.
        self._bounds = (0, 0)

    def bounds(self) -> tuple[int, int]:
        """Return low and high; what was appended by this process is in them."""
        self._refresh()
        low, high = self._bounds
        if low == high:
            # What was appended may be all that there is, and another thread about to write it.
            self._refresh(wait=True)
        return self._bounds

    def positions(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the records where items start, int64 [M]; -1 for those that are gone."""
        positions = self._positions.take(numbers % self.capacity)
        is_gone = ~self._ring.may_start(positions)
        # In this order: another candidate takes the place after `low` was raised.
        is_gone |= numbers < self._bounds[0]
        positions[is_gone] = -1
        return positions

    def add_new(self, positions: NDArray[np.int64]) -> None:
        """Give numbers to those candidates that have none yet."""
        self.add(positions[~self._numbered[self._ring.places(positions)]])

    def clear(self, places: slice) -> None:
        """Note that new records take some places of the ring."""
        self._numbered[places] = False

    def add(self, positions: NDArray[np.int64]) -> None:
        """Give numbers to new candidates."""
        self._numbered[self._ring.places(positions)] = True
        low, high = self._bounds
        num = len(positions)
        if (oldest := high + num - self.capacity) > low:
            low = oldest
            self._bounds = (low, high)
        at = high % self.capacity
        if at + num <= self.capacity:
            self._positions[at : at + num] = positions
        else:
            self._positions[np.arange(high, high + num) % self.capacity] = positions
        self._bounds = (low, high + num)

    def forget(self) -> None:
        """Raise `low` to the oldest candidate that is still there."""
        low, high = self._bounds
        while low < high:
            numbers = np.arange(low, min(low + _PROBE_SIZE, high))
            there = self.positions(numbers) >= 0
            if there.any():
                low += int(there.argmax())
                break
            low += len(numbers)
        self._bounds = (low, high)
