"""Priorities: how likely each candidate is drawn, followed as a view's candidates come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.replay.arguments import check_fraction, check_positive
from replaylake.datastore.replay.kernels.sum_tree import SumTree


class Priorities:
    """Each candidate's priority to the power of alpha, in a sum tree at number % capacity.

    Candidates that nobody gave a priority have the highest that there was so far, so that each is
    likely to be seen once (Schaul et al. 2016, algorithm 1, line 6); `initial` is that of the first
    ones. Raises: ConfigInvalidError for an alpha outside 0..1, or an initial priority that is no
    positive number. Memory: 9.2 bytes a candidate.
    """

    def __init__(self, capacity: int, *, alpha: float, initial: float) -> None:
        self.alpha = check_fraction("prioritized sampler: alpha", alpha)
        self.highest = check_positive(
            "prioritized sampler: initial_priority",
            initial,
            advice="Steps that are never drawn would never get another.",
        )
        self.tree = SumTree(capacity)
        self._capacity = capacity
        self._low = self._high = 0

    def follow(self, low: int, high: int) -> None:
        """Take in the candidates up to `high` and let those below `low` go.

        Cost: nothing where neither has moved, else in proportion to those that came and went.
        """
        if low == self._low and high == self._high:
            return
        # First those that go: one that comes may take their place.
        self._set_all(self._low, min(low, self._high), 0.0)
        self._set_all(max(self._high, low), high, self.highest**self.alpha)
        self._low, self._high = low, high

    def numbers(self, leaves: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the candidates whose leaves these are, int64 [M]."""
        if self._high <= self._capacity:
            return leaves
        return (leaves - self._low) % self._capacity + self._low

    def leaves(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the tree has candidates that are there, int64 [M]."""
        return numbers if self._high <= self._capacity else numbers % self._capacity

    def update(self, numbers: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        """Set the priorities of candidates; those that are gone are passed over, of equal the last.

        Both are as to_priority_arrays returns them. Raises, changing nothing: ConfigInvalidError
        for numbers that are no candidates'.
        """
        if not len(numbers):
            return
        highest = float(priorities.max())
        if self._low:
            there = numbers >= self._low
            if not there.all():
                numbers, priorities = numbers[there], priorities[there]
        if numbers.max(initial=0) >= self._high:
            raise self._no_candidate_error(numbers)
        try:
            self.tree.set(self.leaves(numbers), self._raise_to_alpha(priorities))
        except IndexError as error:
            raise self._no_candidate_error(numbers) from error
        self.highest = max(self.highest, highest)

    def restore(
        self, numbers: NDArray[np.int64], powered: NDArray[np.float64], *, highest: float
    ) -> None:
        """Set candidates to `powered`, priorities to the power of alpha; the rest to `highest`."""
        self.highest = highest
        self._set_all(self._low, self._high, self.highest**self.alpha)
        self.tree.set(self.leaves(numbers), powered)

    def remove(self, numbers: NDArray[np.int64]) -> None:
        """Let candidates go that are gone before `low` reached them."""
        self.tree.set(self.leaves(numbers), np.zeros(len(numbers)))

    def state_dict(self) -> dict[str, Any]:
        """Return all of it: `leaves` is float64 [capacity], a copy."""
        return {
            "leaves": self.tree.leaves,
            "alpha": self.alpha,
            "highest": self.highest,
            "low": self._low,
            "high": self._high,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from it.

        Raises: ConfigInvalidError if it is of another view or another alpha.
        """
        if len(state["leaves"]) != self._capacity or state["alpha"] != self.alpha:
            raise ConfigInvalidError(
                f"prioritized sampler: found the state of {len(state['leaves'])} candidates with "
                f"alpha {state['alpha']}, expected {self._capacity} and {self.alpha}. Load it into "
                "a sampler made alike; save_priorities keeps them for another view of the data."
            )
        highest, low, high = float(state["highest"]), int(state["low"]), int(state["high"])
        self.tree.fill(np.asarray(state["leaves"], np.float64))
        self.highest, self._low, self._high = highest, low, high

    def check(self, numbers: NDArray[np.int64]) -> None:
        """Raises: ConfigInvalidError for numbers [M] that are no candidates', nor were."""
        if numbers.min(initial=0) < 0 or numbers.max(initial=0) >= self._high:
            raise self._no_candidate_error(numbers)

    def _no_candidate_error(self, numbers: NDArray[np.int64]) -> ConfigInvalidError:
        return ConfigInvalidError(
            f"update_priorities: found indices {numbers.min()} to {numbers.max()}, expected less "
            f"than {self._high} and none below 0. Nothing was changed; pass batch.indices of a "
            "batch of this sampler."
        )

    def _raise_to_alpha(self, priorities: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.alpha == 1.0:
            return priorities
        if self.alpha == 0.0:
            # 0 ** 0 is 1, but a priority of 0 is never drawn.
            return (priorities > 0.0).astype(np.float64)
        powered: NDArray[np.float64] = priorities**self.alpha
        return powered

    def _set_all(self, start: int, stop: int, value: float) -> None:
        if stop <= start:
            return
        if stop - start == self._capacity:
            self.tree.fill(np.full(self._capacity, value))
        else:
            leaves = np.arange(start, stop) % self._capacity
            self.tree.set(leaves, np.full(len(leaves), value))


def to_priority_arrays(
    indices: ArrayLike, priorities: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return what update_priorities is given as arrays [B], int64 and float64.

    Raises: ConfigInvalidError for other shapes, indices that are no whole numbers, and priorities
    that are negative or not finite.
    """
    try:
        numbers, values = np.asarray(indices), np.asarray(priorities)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigInvalidError(
            f"update_priorities: found {error}, expected two arrays (B,). Pass batch.indices, and "
            "of tensors td_errors.detach().cpu(); a TorchSampler takes them as they are."
        ) from error
    if numbers.shape != values.shape or numbers.ndim != 1:
        raise ConfigInvalidError(
            f"update_priorities: found indices of shape {numbers.shape} and priorities of "
            f"{values.shape}, expected (B,) for both. Pass a priority for each of "
            "batch.indices."
        )
    if len(numbers) and (numbers.dtype.kind not in "iu" or values.dtype.kind not in "iuf"):
        raise ConfigInvalidError(
            f"update_priorities: found indices of {numbers.dtype} and priorities of "
            f"{values.dtype}, expected whole numbers and numbers. Pass batch.indices, and, say, "
            "|TD error| + 1e-6."
        )
    values = values.astype(np.float64, copy=False)
    # NaN is neither.
    if len(values) and not (values.min() >= 0.0 and values.max() < np.inf):
        row = int((~(np.isfinite(values) & (values >= 0.0))).argmax())
        raise ConfigInvalidError(
            f"update_priorities: found {values[row]} for row {row}, expected a finite "
            "number of at least 0, such as |TD error| + 1e-6. Nothing was changed."
        )
    return numbers.astype(np.int64, copy=False), values
