"""Replay's hot loops in numpy: what compiled.py does, to the same bits, and without numba.

Each function that can refuse returns the index of the first item it refuses, before it changes
anything, or -1; whoever calls it (kernels.py, sum_tree.py) makes the error of it.

A sum tree is one array of nodes, level after level: level 0, the leaves, begins at starts[0] = 0,
and at starts[-1] is the root. Node i of a level is the sum of nodes 8 i to 8 i + 7 of the level
before it (a family), added from left to right; zeros fill up each level to whole families.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

# Eight float64 are one cache line. With 16, finding takes a quarter longer and setting a third;
# with 32 both take twice as long, as do binary steps in a line (1M leaves, 2 cores, 2026-11-21).
FAN_OUT: Final = 8
# From here on records are copied one by one: a copy of whole rows is copied once more, into `out`.
_LONG_RECORD_BYTES: Final = 1024


def gather(
    words: NDArray[np.uint64], positions: NDArray[np.int64], length: int, out: NDArray[np.uint64]
) -> int:
    """Copy `length` records from each position into a row of out; see kernels.gather."""
    if len(positions) == 0:
        return -1
    num_windows = max(len(words) - length + 1, 0)
    # As unsigned numbers negative ones are the largest: one pass instead of two.
    unsigned = positions.view(np.uint64)
    if unsigned.max() >= num_windows:
        return int((unsigned >= num_windows).argmax())
    if out.size == 0:
        return -1
    if length == 1 or words.itemsize * words.shape[1] >= _LONG_RECORD_BYTES:
        records = positions[:, None] + np.arange(length)
        # The range is checked above; in "raise" mode numpy would copy `out` to and fro.
        words.take(records, axis=0, out=out.reshape(*records.shape, -1), mode="clip")
    else:
        row = np.dtype((np.void, words.itemsize * out.shape[1]))
        windows = np.ndarray(num_windows, row, words, strides=words.strides[:1])
        out.view(row)[:, 0] = windows[positions]
    return -1


def copy_ranges(
    source: NDArray[np.uint8],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out: NDArray[np.uint8],
    places: NDArray[np.int64],
    widths: NDArray[np.int64],
) -> int:
    """Copy ranges of bytes to places of out, and zeros behind them; see kernels.copy_ranges."""
    is_outside = (starts < 0) | (lengths < 0) | (starts > len(source) - lengths)
    is_outside |= (places < 0) | (widths < lengths) | (places > len(out) - widths)
    if is_outside.any():
        return int(is_outside.argmax())
    # Memoryviews are cut and copied in half the time that arrays take.
    data, target = source.data, out.data
    for start, length, place, width in zip(
        starts.tolist(), lengths.tolist(), places.tolist(), widths.tolist(), strict=True
    ):
        target[place : place + length] = data[start : start + length]
        if width > length:
            out[place + length : place + width] = 0
    return -1


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
    nums: NDArray[np.int64],
) -> int:
    """Sum up `n` steps or fewer from each place, and copy both ends; see kernels.n_steps."""
    if len(places) == 0:
        return -1
    is_outside = (places < stack - 1) | (places >= len(words) - n)
    if is_outside.any():
        return int(is_outside.argmax())
    reward, left, terminated, bootstrappable = (
        words.view(dtype)[:, field]
        for dtype, field in zip((np.float32, np.int32, np.uint8, np.uint8), fields, strict=False)
    )
    # As if `n` steps were there, which is so in most rows; what is copied is read from there.
    width = stack * words.shape[1]
    ends = np.stack([places, places + n], axis=1).reshape(-1) - (stack - 1)
    gather(words, ends, stack, out.reshape(len(ends), width))
    before = 2 * (width - words.shape[1])
    nums[:] = n
    linked = near = np.flatnonzero(out.view(np.int32)[:, before + fields[1]] <= n)
    values = np.empty((n, len(places)))
    values[0] = out.view(np.float32)[:, before + fields[0]]
    values[1:] = reward[places + np.arange(1, n)[:, None]]
    # Past a run's end there may be anything, which is not used.
    with np.errstate(all="ignore"):
        rewards[:] = _sum_discounted(values, nums, discounted[1])
    discounts[:] = discounted[n]
    if len(near):
        at = places[near]
        num = left[at].astype(np.int64)
        going_on = np.flatnonzero(num < n)
        while len(going_on):
            more = left[at[going_on] + num[going_on]]
            num[going_on] = np.minimum(num[going_on] + more, n)
            going_on = going_on[(more > 0) & (num[going_on] < n)]
        linked = near[(num < n) & (words[at + num, 0] != 0)]
        last = at + np.maximum(num, 1) - 1
        ended = terminated[last] != 0
        num -= (bootstrappable[last] == 0) & (num > 1)
        with np.errstate(all="ignore"):
            rewards[near] = _sum_discounted(values[:, near], num, discounted[1])
        discounts[near] = np.where(ended, 0.0, discounted[num])
        nums[near] = num
        again = np.empty((len(near), width), np.uint64)
        gather(words, at + num - (stack - 1), stack, again)
        out[near, width:] = again
    nums[linked] = -1
    return -1


def _sum_discounted(
    values: NDArray[np.float64], nums: NDArray[np.int64], discount: float
) -> NDArray[np.float64]:
    """Return ((v_{m-1} g + v_{m-2}) g + ...) g + v_0 of values [n, M], m being nums [M], or 1."""
    total: NDArray[np.float64] = values[-1].copy()
    is_short = bool((nums < len(values)).any())
    for k in range(len(values) - 2, -1, -1):
        total *= discount
        total += values[k]
        if is_short:
            np.copyto(total, values[k], where=np.maximum(nums, 1) == k + 1)
    return total


def end_sequences(
    words: NDArray[np.uint64],
    before: int,
    fields: NDArray[np.int64],
    discount: float,
    mask: NDArray[np.bool_],
    discounts: NDArray[np.float32],
) -> None:
    """Fill in mask and discounts, and put nothing past ends; see kernels.end_sequences."""
    num_rows, num_steps = mask.shape
    if num_rows == 0:
        return
    length = before + num_steps + 1
    records = words.reshape(num_rows, length, -1)
    left = records.view(np.int32)[:, :, fields[1]]
    terminated = records.view(np.uint8)[:, before:-1, fields[2]]
    np.multiply(terminated == 0, np.float32(discount), out=discounts)
    mask[:] = True
    nums = np.minimum(left[:, before], num_steps)
    short = found = np.flatnonzero(nums < num_steps)
    while len(found):
        more = left[found, before + nums[found]]
        nums[found] = np.minimum(nums[found] + more, num_steps)
        found = found[(more > 0) & (nums[found] < num_steps)]
    short = short[nums[short] < num_steps]
    if len(short):
        ahead = np.arange(num_steps + 1) - nums[short, None]
        mask[short] = ahead[:, :-1] < 0
        discounts[short] *= mask[short]
        # The record at 0 is the tail, which holds the final observation and nothing else.
        row, record = np.nonzero(ahead > 0)
        row, record = short[row], record + before
        records[row, record] = 0
        start, stop = fields[4:]
        if stop > start:
            # A policy's probabilities over no allowed action would be NaN.
            records.view(np.uint8)[row, record, start:stop] = 1


def find_leaves(
    nodes: NDArray[np.float64],
    starts: NDArray[np.int64],
    targets: NDArray[np.float64],
    found: NDArray[np.int64],
) -> int:
    """Put into found [M] the leaf of each target [M]; refuses targets outside 0 <= target < root.

    In each family: the child k with before_k <= rest < before_{k + 1}, where before_k is the sum of
    the children left of it; then rest - before_k goes down to it. Where rounding leaves it at the
    child's own sum or above, the largest float below that goes on. So rest < sum of the family in
    each, hence before_{k + 1} > before_k, and no leaf of value 0 is ever found.
    """
    refused = ~((targets >= 0.0) & (targets < nodes[starts[-1]]))
    if refused.any():
        return int(refused.argmax())
    rest = targets
    found[:] = 0
    rows = np.arange(len(targets))
    for level in range(len(starts) - 2, -1, -1):
        families = nodes[starts[level] : starts[level + 1]].reshape(-1, FAN_OUT)[found]
        before = np.zeros_like(families)
        np.cumsum(families[:, :-1], axis=1, out=before[:, 1:])
        child = (before[:, 1:] <= rest[:, None]).sum(axis=1)
        below = np.nextafter(families[rows, child], 0.0)
        rest = np.minimum(rest - before[rows, child], below)
        found *= FAN_OUT
        found += child
    return -1


def leaf_values(
    nodes: NDArray[np.float64],
    leaves: NDArray[np.int64],
    num_leaves: int,
    out: NDArray[np.float64],
) -> int:
    """Put the values of leaves [M] into out [M]; refuses leaves outside 0 <= leaf < num_leaves."""
    refused = (leaves < 0) | (leaves >= num_leaves)
    if refused.any():
        return int(refused.argmax())
    nodes.take(leaves, out=out, mode="clip")
    return -1


def set_leaves(
    nodes: NDArray[np.float64],
    starts: NDArray[np.int64],
    leaves: NDArray[np.int64],
    values: NDArray[np.float64],
    num_leaves: int,
    limit: float,
) -> int:
    """Set leaves [M] to values [M], of equal ones the last, and sum up their ancestors.

    Refuses leaves outside 0 <= leaf < num_leaves and values outside 0 <= value <= limit.
    """
    refused = (leaves < 0) | (leaves >= num_leaves) | ~((values >= 0.0) & (values <= limit))
    if refused.any():
        return int(refused.argmax())
    nodes[leaves] = values
    parents = leaves
    for level in range(len(starts) - 1):
        parents = parents // FAN_OUT
        families = nodes[starts[level] : starts[level + 1]].reshape(-1, FAN_OUT)
        sums = nodes[starts[level + 1] :][: len(families)]
        if len(families) <= len(leaves):
            sums[:] = _sums(families)
        else:
            sums[parents] = _sums(families[parents])
    return -1


def sum_all(nodes: NDArray[np.float64], starts: NDArray[np.int64]) -> None:
    """Sum up every family, from the leaves on."""
    for level in range(len(starts) - 1):
        families = nodes[starts[level] : starts[level + 1]].reshape(-1, FAN_OUT)
        nodes[starts[level + 1] :][: len(families)] = _sums(families)


def _sums(families: NDArray[np.float64]) -> NDArray[np.float64]:
    # Not np.sum, which adds in an order of its own.
    total = families[:, 0].copy()
    for child in range(1, FAN_OUT):
        total += families[:, child]
    return total
