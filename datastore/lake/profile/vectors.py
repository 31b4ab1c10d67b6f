"""Vectors: the numbers that a space's values are made of, named, counted and laid side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.schema import to_numpy
from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Discrete,
    Leaf,
    Space,
    Text,
    bounds,
    leaves,
    value_shape,
)

# More numbers a row are counted, but not drawn: nobody looks at a hundred histograms.
MAX_DIMENSIONS: Final = 64
# Values of a Discrete space that are counted one by one.
_MAX_VALUES: Final = 10_000


@dataclass(frozen=True)
class ValueCounts:
    """How often each value of a Discrete space occurs: `counts` of start, start + 1, ...

    names: of these values, in their order, where they have any.
    """

    name: str
    start: int
    counts: tuple[int, ...]
    names: tuple[str, ...] = ()


class SpaceNumbers:
    """The numbers that values of a space are made of, W a row, and its discrete leaves.

    names: of the numbers. low, high: float64 [W], infinite where a number has no bound. left_out:
    what is neither a number nor counted, with the reason. discrete: (name, first value, number of
    values) of each leaf whose values are counted.
    """

    def __init__(self, space: Space, what: str, names: Sequence[str] = ()) -> None:
        """`names` are those of the numbers of a space that is one vector, where they have any."""
        self.left_out: list[str] = []
        self.names: list[str] = []
        self.discrete: list[tuple[str, int, int]] = []
        # Of each leaf that is read: its path, itself, how many of its numbers are taken, and its
        # place in `discrete`.
        self._leaves: list[tuple[str, Leaf, int, int | None]] = []
        lows: list[Array] = [np.zeros(0)]
        highs: list[Array] = [np.zeros(0)]
        for dotted, leaf in leaves(space):
            name = f"{what}.{dotted}" if dotted else what
            size = int(np.prod(value_shape(leaf), dtype=np.int64))
            if isinstance(leaf, Text) or (isinstance(leaf, Box) and leaf.is_image):
                self.left_out.append(f"{name} ({'text' if isinstance(leaf, Text) else 'frames'})")
                continue
            place = None
            if isinstance(leaf, Discrete) and leaf.n <= _MAX_VALUES:
                place = len(self.discrete)
                self.discrete.append((name, leaf.start, leaf.n))
            shown = min(size, MAX_DIMENSIONS - len(self.names))
            if shown < size:
                self.left_out.append(f"{name} ({size - shown} of its {size} numbers)")
            if shown or place is not None:
                self._leaves.append((dotted, leaf, shown, place))
            low, high = (np.broadcast_to(b, value_shape(leaf)).reshape(-1) for b in bounds(leaf))
            if len(names) == size and not dotted:
                self.names += names[:shown]
            else:
                self.names += [name] if size == 1 else [f"{name}[{i}]" for i in range(size)][:shown]
            lows.append(low[:shown])
            highs.append(high[:shown])
        self.low, self.high = np.concatenate(lows), np.concatenate(highs)

    @property
    def width(self) -> int:
        """W, how many numbers a row has."""
        return len(self.names)

    @property
    def is_empty(self) -> bool:
        """Whether nothing of a column is read."""
        return not self._leaves

    def read(self, column: pa.ChunkedArray) -> tuple[Array, list[Array]]:
        """Return the numbers of a column without nulls, float64 [n, W], and the counts of values.

        The counts are int64 [number of values] for each of `discrete`.
        """
        num = len(column)
        rows = np.zeros((num, self.width))
        counts = [np.zeros(n, np.int64) for _, _, n in self.discrete]
        start = 0
        for dotted, leaf, shown, place in self._leaves if num else ():
            # Not the whole column: frames beside it take long to decode.
            values = np.asarray(to_numpy(leaf, _get_leaf(column, dotted))).reshape(num, -1)
            rows[:, start : start + shown] = values[:, :shown]
            start += shown
            if place is not None:
                _, first, n = self.discrete[place]
                counts[place] += np.bincount(values[:, 0].astype(np.int64) - first, minlength=n)[:n]
        return rows, counts

    def value_counts(
        self, counts: Sequence[Array], names: Sequence[str] = ()
    ) -> tuple[ValueCounts, ...]:
        """Return how often each discrete value occurs; `names` are those of a lone leaf."""
        return tuple(
            ValueCounts(name, start, tuple(of.tolist()), tuple(names) if len(names) == n else ())
            for (name, start, n), of in zip(self.discrete, counts, strict=True)
        )


def _get_leaf(column: pa.ChunkedArray, dotted: str) -> pa.Array:
    part = column.combine_chunks()
    for key in filter(None, dotted.split(".")):
        part = pc.struct_field(part, key)
    return part
