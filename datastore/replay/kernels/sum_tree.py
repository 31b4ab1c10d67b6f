"""SumTree: draws a leaf with the probability that its priority has in the sum of all.

Proportional prioritization, Schaul et al. 2016 (arXiv:1511.05952), section 3.3 and appendix B.2.1.
"""

from __future__ import annotations

import sys
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.replay.kernels import kernels
from replaylake.datastore.replay.kernels.plain import FAN_OUT

_Number = TypeVar("_Number", bound=np.generic)
_LINE_BYTES: Final = 64


class SumTree:
    """Priorities float64 >= 0 of `num_leaves` leaves, 0 at first, and their sums by families of 8.

    A sum is always added up from its children anew, so it does not drift, and two trees of the same
    leaves have the same sums to the last bit, however they came to them, with numba or without.
    Not for use by several threads at once. Cost: 9.2 bytes a leaf; of 1M leaves, `find`, `get` and
    `set` of 256 take 16 us together with numba, 270 with numpy (2 cores, 2026-11-21).

    Raises: ConfigInvalidError for less than one leaf.
    """

    def __init__(self, num_leaves: int) -> None:
        if num_leaves < 1:
            raise ConfigInvalidError(
                f"sum tree: found {num_leaves} leaves, expected 1 or more. "
                "Select at least one step to prioritize."
            )
        self.num_leaves = num_leaves
        # So that no sum can overflow: found - before would be NaN in an infinite family.
        self._limit = sys.float_info.max / (2 * num_leaves)
        self._starts, num_nodes = _layout(num_leaves)
        self._nodes = _make_aligned_zeros(num_nodes)

    @property
    def total(self) -> float:
        """The sum of all priorities, as the tree adds them up."""
        return float(self._nodes[self._starts[-1]])

    @property
    def leaves(self) -> NDArray[np.float64]:
        """A copy of all priorities, float64 [num_leaves]."""
        return self._nodes[: self.num_leaves].copy()

    def get(self, leaves: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the priorities float64 [M] of leaves int64 [M].

        Raises: IndexError for a leaf outside 0 to num_leaves - 1.
        """
        leaves = _vector(leaves, np.int64, "leaves")
        values = np.empty(len(leaves))
        bad_row = kernels.select_kernels().leaf_values(self._nodes, leaves, self.num_leaves, values)
        if bad_row >= 0:
            raise self._leaf_error(leaves, bad_row)
        return values

    def find(self, targets: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the leaf int64 [M] of each target float64 [M].

        It is the one with before <= target < before + its priority, where `before` sums up the
        priorities left of it. At a boundary rounding may lead to the leaf beside it, but never to
        one of priority 0. Targets need no order.

        Raises: ConfigInvalidError for a target outside 0 <= target < total.
        """
        targets = _vector(targets, np.float64, "targets")
        found = np.empty(len(targets), np.int64)
        bad_row = kernels.select_kernels().find_leaves(self._nodes, self._starts, targets, found)
        if bad_row >= 0:
            raise ConfigInvalidError(
                f"sum tree: targets[{bad_row}] is {targets[bad_row]}, expected 0 <= target < "
                f"{self.total}, the sum of the priorities. Draw it below `total`, and set a "
                "priority above 0 first if that is 0."
            )
        return found

    def set(self, leaves: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Set leaves int64 [M] to priorities float64 [M], those that occur twice to the last one.

        Raises, changing nothing: IndexError for a leaf outside 0 to num_leaves - 1,
        ConfigInvalidError for a priority that is negative, not finite, or so large that the sum
        might overflow.
        """
        leaves = _vector(leaves, np.int64, "leaves")
        values = _vector(values, np.float64, "values")
        if len(leaves) != len(values):
            raise ConfigInvalidError(
                f"sum tree: found {len(leaves)} leaves and {len(values)} values, expected as many "
                "of both. Pass a priority for each leaf."
            )
        bad_row = kernels.select_kernels().set_leaves(
            self._nodes, self._starts, leaves, values, self.num_leaves, self._limit
        )
        if bad_row >= 0:
            if not 0 <= leaves[bad_row] < self.num_leaves:
                raise self._leaf_error(leaves, bad_row)
            raise self._value_error(int(leaves[bad_row]), float(values[bad_row]))

    def fill(self, values: NDArray[np.float64]) -> None:
        """Set the first n priorities to values float64 [n], n <= num_leaves, and all others to 0.

        Cost: one pass over the tree. Raises, changing nothing: ConfigInvalidError for more values
        than leaves, or a priority that `set` refuses.
        """
        values = _vector(values, np.float64, "values")
        if len(values) > self.num_leaves:
            raise ConfigInvalidError(
                f"sum tree: found {len(values)} values, expected at most {self.num_leaves}, one a "
                "leaf. Make a larger tree."
            )
        refused = ~((values >= 0.0) & (values <= self._limit))
        if refused.any():
            leaf = int(refused.argmax())
            raise self._value_error(leaf, float(values[leaf]))
        self._nodes[: len(values)] = values
        self._nodes[len(values) : self.num_leaves] = 0.0
        kernels.select_kernels().sum_all(self._nodes, self._starts)

    def _leaf_error(self, leaves: NDArray[np.int64], refused: int) -> IndexError:
        return IndexError(
            f"sum tree: leaves[{refused}] is {leaves[refused]}, expected 0 to "
            f"{self.num_leaves - 1}. Nothing was changed; pass leaves of this tree."
        )

    def _value_error(self, leaf: int, value: float) -> ConfigInvalidError:
        return ConfigInvalidError(
            f"sum tree: found priority {value} for leaf {leaf}, expected a number from 0 to "
            f"{self._limit:g}. Nothing was changed; look for what made it so, such as a loss that "
            "is not finite."
        )


def _vector(values: NDArray[Any], dtype: type[_Number], name: str) -> NDArray[_Number]:
    """Return values as a contiguous vector [M] of dtype, where that loses nothing."""
    if values.ndim != 1 or not (values.dtype == dtype or np.can_cast(values.dtype, dtype)):
        raise ConfigInvalidError(
            f"sum tree: {name} is {values.dtype} of shape {values.shape}, expected "
            f"{np.dtype(dtype)} of shape (M,). Convert it first."
        )
    return np.ascontiguousarray(values, dtype)


def _layout(num_leaves: int) -> tuple[NDArray[np.int64], int]:
    """Return where each level starts, leaves first, and the number of nodes of all."""
    starts, start, num_nodes = [0], 0, num_leaves
    while num_nodes > 1 or len(starts) == 1:
        num_families = -(-num_nodes // FAN_OUT)
        start += num_families * FAN_OUT
        starts.append(start)
        num_nodes = num_families
    return np.array(starts, np.int64), start + 1


def _make_aligned_zeros(num: int) -> NDArray[np.float64]:
    """Return float64 zeros that begin at a cache line, so that each family is one line."""
    item = np.dtype(np.float64).itemsize
    raw = np.zeros(num + _LINE_BYTES // item)
    first = -raw.ctypes.data % _LINE_BYTES // item
    return raw[first : first + num]
