"""Replay's hot loops, compiled by numba. Without numba plain.py does the same.

The only file that imports numba; kernels.py says when. All compiled code is in this one file, the
intrinsics too: numba's cache looks at no other file's changes, and would run old code. (FAN_OUT is
compiled in: when it changes, so must this file.) Each function has one signature, compiled
(or loaded from numba's cache) when this module is imported, so that no call waits for a compiler:
read-only, unaligned arrays, which every contiguous array converts to. Results equal plain.py's to
the last bit: LLVM keeps the order of additions unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from replaylake.datastore.replay.kernels.plain import FAN_OUT

if config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, and interpreted these loops would take seconds")

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Records are prefetched 16 rows ahead of the copy, up to 16 cache lines of each and the line of its
# last word, as records seldom begin with a line: a longer row the hardware sees coming by itself.
# Of 1M records of 128 bytes, 256 rows of 2 take 4.1 us, 12 rows ahead and without the last line
# 5.4; 256 rows of 4 take 6.5 and 7.0. Of 5 frames of 7 kB they take 370 in both ways, without any
# prefetching a third more, with that of all lines a fifth (2 cores, 2026-11-21).
_ROWS_AHEAD: Final = 16
_LINES_AHEAD: Final = 16
_LINE_WORDS: Final = 8
# Bytes of the next range that are prefetched while one is copied, because the hardware cannot
# predict it. 64 random ranges of 8 KiB take 26 us with prefetching and 39 us without; of 2 KiB
# 6.4 and 12 us; of 64 KiB 147 and 163 us; of 256 bytes 2.7 and 2.5 us (least of 60 alternating
# rounds, 2 busy cores, 2026-11-28).
_RANGE_AHEAD: Final = 4096
# Targets that descend the tree together, so that their cache misses overlap; 32 to 256 are alike.
_GROUP: Final = 256


def _array(dtype: Any, ndim: int, *, written: bool = False) -> Any:
    return types.Array(dtype, ndim, "C", readonly=not written, aligned=False)


_INT: Final = types.int64
_FLOAT: Final = types.float64
_INTS: Final = _array(types.int64, 1)
_FLOATS: Final = _array(types.float64, 1)
_NODES: Final = _array(types.float64, 1, written=True)
_FOUND: Final = _array(types.int64, 1, written=True)
_WORDS: Final = _array(types.uint64, 2)
_MEMORY: Final = _array(types.uint64, 1)
_WRITTEN_WORDS: Final = _array(types.uint64, 2, written=True)
_BYTES: Final = _array(types.uint8, 1)
_WRITTEN_BYTES: Final = _array(types.uint8, 1, written=True)
_SINGLES: Final = _array(types.float32, 1, written=True)
_SINGLE_ROWS: Final = _array(types.float32, 2, written=True)
_FLAGS: Final = _array(types.boolean, 2, written=True)


def _compile(signature: Any) -> Callable[[_Function], _Function]:
    def compile_now(function: _Function) -> _Function:
        try:
            compiled: _Function = njit(signature, cache=True, nogil=True)(function)
        except (RuntimeError, OSError):
            # numba found no folder for its cache, or could not write there. Every process compiles.
            compiled = njit(signature, nogil=True)(function)
        return compiled

    return compile_now


def _prefetch_code(_: Any, words: Any, index: Any) -> Any:
    """Tell numba how to ask the processor for the cache line of words[index]; words is 1-D."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.voidptr_t)
        number = ir.IntType(32)
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch",
            [cgutils.voidptr_t],
            ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number]),
        )
        # To read (0), into the nearest cache (3), of data (1).
        builder.call(prefetch, [address, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(words, index), code


def _copy_code(_: Any, out: Any, to: Any, words: Any, start: Any, count: Any) -> Any:
    """Tell numba how to copy words[start : start + count] to out[to:] with memcpy; both are 1-D.

    A loop of assignments may not become a memcpy, as the arrays might overlap: four times as long.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def address(array: int, index: int) -> Any:
            struct = context.make_array(signature.args[array])(context, builder, arguments[array])
            return builder.gep(struct.data, [arguments[index]])

        size = signature.args[0].dtype.bitwidth // 8
        cgutils.raw_memcpy(builder, address(0, 1), address(2, 3), arguments[4], size)
        return context.get_dummy_value()

    return types.void(out, to, words, start, count), code


_prefetch: Final = intrinsic(_prefetch_code)
_copy: Final = intrinsic(_copy_code)


@_compile(types.void(_MEMORY, _INT, _INT))
def _prefetch_lines(source: NDArray[np.uint64], start: int, count: int) -> None:
    for word in range(0, count, _LINE_WORDS):
        _prefetch(source, start + word)
    _prefetch(source, start + count - 1)


@_compile(_INT(_WORDS, _INTS, _INT, _WRITTEN_WORDS))
def gather(
    words: NDArray[np.uint64], positions: NDArray[np.int64], length: int, out: NDArray[np.uint64]
) -> int:
    num_records, width = words.shape
    num_rows = len(positions)
    row_words = length * width
    for row in range(num_rows):
        if positions[row] < 0 or positions[row] > num_records - length:
            return row
    source = words.reshape(-1)
    target = out.reshape(-1)
    lines = min(row_words, _LINES_AHEAD * _LINE_WORDS)
    for row in range(-_ROWS_AHEAD, num_rows):
        ahead = row + _ROWS_AHEAD
        if ahead < num_rows:
            _prefetch_lines(source, positions[ahead] * width, lines)
        if row >= 0:
            _copy(target, row * row_words, source, positions[row] * width, row_words)
    return -1


@_compile(_INT(_BYTES, _INTS, _INTS, _WRITTEN_BYTES, _INTS, _INTS))
def copy_ranges(
    source: NDArray[np.uint8],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out: NDArray[np.uint8],
    places: NDArray[np.int64],
    widths: NDArray[np.int64],
) -> int:
    for row in range(len(starts)):
        start, length, place = starts[row], lengths[row], places[row]
        if start < 0 or length < 0 or start > len(source) - length:
            return row
        if place < 0 or widths[row] < length or place > len(out) - widths[row]:
            return row
    for row in range(len(starts)):
        length, place = lengths[row], places[row]
        if row + 1 < len(starts):
            for byte in range(0, min(lengths[row + 1], _RANGE_AHEAD), _LINE_WORDS * 8):
                _prefetch(source, starts[row + 1] + byte)
        _copy(out, place, source, starts[row], length)
        for index in range(place + length, place + widths[row]):
            out[index] = 0
    return -1


@_compile(
    _INT(_WORDS, _INTS, _INT, _INT, _INTS, _FLOATS, _WRITTEN_WORDS, _SINGLES, _SINGLES, _FOUND)
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
    nums: NDArray[np.int64],
) -> int:
    num_records, width = words.shape
    num_rows, stack_words = len(places), stack * width
    for row in range(num_rows):
        if places[row] < stack - 1 or places[row] >= num_records - n:
            return row
    source, target = words.reshape(-1), out.reshape(-1)
    reward, left, flags = source.view(np.float32), source.view(np.int32), source.view(np.uint8)
    lines = min(stack_words, _LINES_AHEAD * _LINE_WORDS)
    for step in range(-_ROWS_AHEAD, num_rows):
        if step + _ROWS_AHEAD < num_rows:
            # As if `n` steps were there, which is so in most rows.
            ahead = places[step + _ROWS_AHEAD]
            _prefetch_lines(source, (ahead - stack + 1) * width, lines)
            _prefetch_lines(source, (ahead + n - stack + 1) * width, lines)
            for k in range(min(n, _LINES_AHEAD)):
                _prefetch(source, (ahead + k) * width + fields[0] // 2)
            _prefetch(source, ahead * width + fields[1] // 2)
        if step < 0:
            continue
        place = places[step]
        num = int(left[place * 2 * width + fields[1]])
        linked, ended = False, False
        if num > n:
            num = n
        else:
            while num < n:
                more = int(left[(place + num) * 2 * width + fields[1]])
                if more == 0:
                    break
                num = min(num + more, n)
            linked = num < n and int(source[(place + num) * width]) != 0
            last = (place + max(num, 1) - 1) * 8 * width
            ended = bool(flags[last + fields[2]])
            if flags[last + fields[3]] == 0 and num > 1:
                num -= 1
        at = place * 2 * width + fields[0]
        total = np.float64(reward[at + (max(num, 1) - 1) * 2 * width])
        for k in range(num - 2, -1, -1):
            total = total * discounted[1] + np.float64(reward[at + k * 2 * width])
        rewards[step] = total
        discounts[step] = 0.0 if ended else discounted[num]
        nums[step] = -1 if linked else num
        begin = step * 2 * stack_words
        _copy(target, begin, source, (place - stack + 1) * width, stack_words)
        _copy(target, begin + stack_words, source, (place + num - stack + 1) * width, stack_words)
    return -1


@_compile(types.void(_WRITTEN_WORDS, _INT, _INTS, _FLOAT, _FLAGS, _SINGLE_ROWS))
def end_sequences(
    words: NDArray[np.uint64],
    before: int,
    fields: NDArray[np.int64],
    discount: float,
    mask: NDArray[np.bool_],
    discounts: NDArray[np.float32],
) -> None:
    num_rows, num_steps = mask.shape
    length = before + num_steps + 1
    width = words.shape[1] // length
    memory = words.reshape(-1)
    left, flags = memory.view(np.int32), memory.view(np.uint8)
    for row in range(num_rows):
        first = row * length + before
        num = min(int(left[first * 2 * width + fields[1]]), num_steps)
        while num < num_steps:
            more = int(left[(first + num) * 2 * width + fields[1]])
            if more == 0:
                break
            num = min(num + more, num_steps)
        for step in range(num_steps):
            terminated = flags[(first + step) * 8 * width + fields[2]] != 0
            mask[row, step] = step < num
            discounts[row, step] = 0.0 if terminated or step >= num else discount
        if num == num_steps:
            continue
        for word in range((first + num + 1) * width, (first + num_steps + 1) * width):
            memory[word] = 0
        for step in range(num + 1, num_steps + 1):
            byte = (first + step) * 8 * width
            for action in range(byte + fields[4], byte + fields[5]):
                flags[action] = 1


@_compile(_INT(_FLOATS, _INTS, _FLOATS, _FOUND))
def find_leaves(
    nodes: NDArray[np.float64],
    starts: NDArray[np.int64],
    targets: NDArray[np.float64],
    found: NDArray[np.int64],
) -> int:
    root = len(starts) - 1
    for i in range(len(targets)):
        if not 0.0 <= targets[i] < nodes[starts[root]]:
            return i
    rest = np.empty(_GROUP)
    for first in range(0, len(targets), _GROUP):
        group = found[first : first + _GROUP]
        for i in range(len(group)):
            rest[i] = targets[first + i]
            group[i] = 0
        for level in range(root - 1, -1, -1):
            below = starts[max(level - 1, 0)]
            for i in range(len(group)):
                start = starts[level] + group[i] * FAN_OUT
                children = nodes[start : start + FAN_OUT]
                before, cumulated, child = 0.0, 0.0, 0
                for j in range(FAN_OUT - 1):
                    cumulated += children[j]
                    if cumulated <= rest[i]:
                        before, child = cumulated, j + 1
                group[i] = group[i] * FAN_OUT + child
                _prefetch(nodes, below + group[i] * FAN_OUT)
                # The largest float below the child's sum: its bits, taken as an integer, less one.
                # np.nextafter is a call, which doubles the time of all this.
                bits = np.float64(children[child]).view(np.int64) - 1
                rest[i] = min(rest[i] - before, np.int64(bits).view(np.float64))
    return -1


@_compile(_INT(_FLOATS, _INTS, _INT, _NODES))
def leaf_values(
    nodes: NDArray[np.float64],
    leaves: NDArray[np.int64],
    num_leaves: int,
    out: NDArray[np.float64],
) -> int:
    for i in range(len(leaves)):
        if not 0 <= leaves[i] < num_leaves:
            return i
        out[i] = nodes[leaves[i]]
    return -1


@_compile(types.void(_NODES, _INT, _INT, _INT))
def _sum_children(nodes: NDArray[np.float64], children: int, parents: int, parent: int) -> None:
    start = children + parent * FAN_OUT
    values = nodes[start : start + FAN_OUT]
    total = values[0]
    for j in range(1, FAN_OUT):
        total += values[j]
    nodes[parents + parent] = total


@_compile(types.void(_NODES, _INTS))
def sum_all(nodes: NDArray[np.float64], starts: NDArray[np.int64]) -> None:
    for level in range(len(starts) - 1):
        for parent in range((starts[level + 1] - starts[level]) // FAN_OUT):
            _sum_children(nodes, starts[level], starts[level + 1], parent)


@_compile(_INT(_NODES, _INTS, _INTS, _FLOATS, _INT, _FLOAT))
def set_leaves(
    nodes: NDArray[np.float64],
    starts: NDArray[np.int64],
    leaves: NDArray[np.int64],
    values: NDArray[np.float64],
    num_leaves: int,
    limit: float,
) -> int:
    for i in range(len(leaves)):
        if not (0 <= leaves[i] < num_leaves and 0.0 <= values[i] <= limit):
            return i
        _prefetch(nodes, leaves[i])
    for i in range(len(leaves)):
        nodes[leaves[i]] = values[i]
    span = 1
    for level in range(len(starts) - 1):
        span *= FAN_OUT
        num_parents = (starts[level + 1] - starts[level]) // FAN_OUT
        if num_parents <= len(leaves):
            for parent in range(num_parents):
                _sum_children(nodes, starts[level], starts[level + 1], parent)
        else:
            for i in range(len(leaves)):
                _sum_children(nodes, starts[level], starts[level + 1], leaves[i] // span)
    return -1
