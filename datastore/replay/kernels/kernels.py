"""Copying records, and which implementation of replay's hot loops runs: numba's or numpy's."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.replay.kernels import plain

# Importing numba and what it has in its cache takes half a second, more than opening a view, and
# saves 5 us of a gather of 256 transitions, 250 us of a prioritized batch (2 cores, 2026-11-21).
_CALLS_BEFORE_NUMBA: Final = 1000
_num_calls = 0


def gather(
    words: NDArray[np.uint64], positions: NDArray[np.int64], length: int, out: NDArray[np.uint64]
) -> None:
    """Copy `length` consecutive records from each of positions [M] into a row of out.

    words uint64 [N, W] are the records, in memory or in a file mapped for reading; positions int64
    [M]; out uint64 [M, length * W]; all C-contiguous, and out overlaps none of them.

    Raises: IndexError where a row would begin before the first record or end after the last one,
    and ValueError for another shape of out; nothing is written then. Cost: 256 rows of two records
    of 128 bytes among 1M take 4 us with numba, 12 with numpy (2 cores, 2026-11-21).
    """
    expected = (len(positions), length * words.shape[1])
    if out.shape != expected:
        raise ValueError(
            f"gather: out has shape {out.shape}, expected {expected}: a row of {length} records of "
            f"{words.shape[1]} words for each position. Allocate it with that shape."
        )
    row = select_kernels().gather(words, positions, length, out)
    if row >= 0:
        raise IndexError(
            f"gather: positions[{row}] is {positions[row]}, expected 0 to "
            f"{len(words) - length}, as rows of {length} are taken from {len(words)} records. "
            "Draw positions from the view that these records belong to."
        )


def copy_ranges(
    source: NDArray[np.uint8],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out: NDArray[np.uint8],
    places: NDArray[np.int64],
    widths: NDArray[np.int64],
) -> None:
    """Copy ranges of bytes [starts, starts + lengths) to `places` of out, zeros behind them.

    Each of the M ranges is given `widths` bytes of out, of which those past its length become 0.
    source uint8 [N], in memory or in a file mapped for reading; the others int64 [M]; out uint8.

    Raises: IndexError for a range outside of source or out; nothing is written then.
    """
    row = select_kernels().copy_ranges(source, starts, lengths, out, places, widths)
    if row >= 0:
        raise IndexError(
            f"copy ranges: range {row} has {lengths[row]} bytes from {starts[row]} to place "
            f"{places[row]} of {widths[row]}, expected it within {len(source)} bytes and its place "
            f"within {len(out)}. Draw sequences of the view that these arrays belong to."
        )


def n_steps(
    words: NDArray[np.uint64],
    places: NDArray[np.int64],
    n: int,
    stack: int,
    fields: NDArray[np.int64],
    discounted: NDArray[np.float64],
    out: NDArray[np.uint64],
    rewards: NDArray[np.float32],
    discounts: NDArray[np.float32],
) -> NDArray[np.int64]:
    """Sum up m steps from each place, copy both ends, and return m [M]: -1 where a link is reached.

    m is `n`, or what the run has left; one less, but not 0, where the last one has no successor.
    rewards float32 [M]: ((r_{m-1} g + r_{m-2}) g + ...) g + r_0 in float64, rounded once, where g
    is discounted[1]. discounts float32 [M]: discounted[m], or 0 where the m-th step terminated. A
    row of out uint64 [M, 2 * stack * W]: the `stack` records up to the place, then those up to the
    m-th after it. Where a run that is linked to another one has fewer than `n` steps left, only
    the first of those are right.

    words uint64 [N, W] are the records; places int64 [M]; fields: see Records;
    discounted float64 [n + 1].

    Raises: IndexError where a row would begin before the first record or reach `n` steps on past
    the last one; nothing is written then. Cost: 256 rows of 3 steps of 128 bytes among 1M take
    6.5 us with numba, 30 with numpy (2 cores, 2026-11-21).
    """
    nums = np.empty(len(places), np.int64)
    row = select_kernels().n_steps(
        words, places, n, stack, fields, discounted, out, rewards, discounts, nums
    )
    if row >= 0:
        raise IndexError(
            f"n steps: places[{row}] is {places[row]}, expected {stack - 1} to "
            f"{len(words) - n - 1}, as {n} steps are taken from {len(words)} records. "
            "Draw positions from the view that these records belong to."
        )
    return nums


def end_sequences(
    words: NDArray[np.uint64],
    before: int,
    fields: NDArray[np.int64],
    discount: float,
    mask: NDArray[np.bool_],
    discounts: NDArray[np.float32],
) -> None:
    """Fill in mask and discounts of windows along links, and put nothing past the end of each.

    words uint64 [M, (before + T + 1) * W]: T steps, `before` records before them and one after.
    mask bool [M, T] is true up to the end; discounts float32 [M, T] are `discount`, or 0 where the
    step terminated and past the end. Records after the one that follows the last step become 0, but
    for their action masks, which allow everything. fields: see Records.
    """
    select_kernels().end_sequences(words, before, fields, discount, mask, discounts)


def select_kernels() -> ModuleType:
    """Return what runs this call: plain.py at first and where there is no numba, then compiled.py.

    Both give the same results to the last bit, so nobody has to know which one it was.
    """
    global _num_calls
    if _num_calls < _CALLS_BEFORE_NUMBA:
        _num_calls += 1
        return plain
    return load()


@functools.cache
def load() -> ModuleType:
    """Import numba now, if it can be, for all calls from here on; return what runs them.

    Cost: half a second; 2.5 the first time on a machine, when numba compiles.
    """
    global _num_calls
    _num_calls = _CALLS_BEFORE_NUMBA
    try:
        from replaylake.datastore.replay.kernels import compiled
    except ImportError:
        return plain
    return compiled
