"""Vectors: the numbers that a space's values are made of, named, counted and laid side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

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
from replaylake.datastore.lake.profile.column_statistics import ColumnStatistics, Dimension

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


class LeafStatistics:
    """The leaves of a space: numbers go to statistics, discrete values are counted too."""

    def __init__(self, space: Space, what: str, names: Sequence[str] = ()) -> None:
        """`names` are those of the numbers of a space that is one vector, where they have any."""
        self._space = space
        self.left_out: list[str] = []
        self._numeric: list[tuple[str, Leaf, int]] = []
        self._counts: dict[str, tuple[int, Array]] = {}
        all_names, names = names, []
        lows: list[Array] = []
        highs: list[Array] = []
        for dotted, leaf in leaves(space):
            name = f"{what}.{dotted}" if dotted else what
            size = int(np.prod(value_shape(leaf), dtype=np.int64))
            if isinstance(leaf, Text) or (isinstance(leaf, Box) and leaf.is_image):
                self.left_out.append(f"{name} ({'text' if isinstance(leaf, Text) else 'frames'})")
                continue
            if isinstance(leaf, Discrete) and leaf.n <= _MAX_VALUES:
                self._counts[name] = (leaf.start, np.zeros(leaf.n, np.int64))
            shown = min(size, MAX_DIMENSIONS - len(names))
            if shown < size:
                self.left_out.append(f"{name} ({size - shown} of its {size} numbers)")
            if not shown:
                continue
            low, high = (np.broadcast_to(b, value_shape(leaf)).reshape(-1) for b in bounds(leaf))
            self._numeric.append((name, leaf, shown))
            if len(all_names) == size and not dotted:
                names += all_names[:shown]
            else:
                names += [name] if size == 1 else [f"{name}[{i}]" for i in range(shown)]
            lows.append(low[:shown])
            highs.append(high[:shown])
        self._what = what
        self.names = names
        empty = [np.zeros(0)]
        self._columns = ColumnStatistics(
            names, np.concatenate(empty + lows), np.concatenate(empty + highs)
        )

    @property
    def width(self) -> int:
        """How many numbers a row are counted."""
        return len(self.names)

    def add(self, column: pa.ChunkedArray) -> Array:
        """Count a column without nulls; return its numbers as float64 [n, width]."""
        num = len(column)
        rows = np.zeros((num, self.width))
        if not num or not (self._numeric or self._counts):
            return rows
        values = to_numpy(self._space, column)
        start = 0
        for name, _, shown in self._numeric:
            part = np.asarray(_get_leaf(values, name, self._what))
            rows[:, start : start + shown] = part.reshape(num, -1)[:, :shown]
            start += shown
        for name, (first, counts) in self._counts.items():
            numbers = np.asarray(_get_leaf(values, name, self._what)).astype(np.int64) - first
            counts += np.bincount(numbers, minlength=len(counts))[: len(counts)]
        self._columns.add(rows)
        return rows

    def dimensions(self) -> tuple[Dimension, ...]:
        """Return the statistics of every number."""
        return self._columns.dimensions()

    def value_counts(self, names: Sequence[str] = ()) -> tuple[ValueCounts, ...]:
        """Return how often each discrete value occurs; `names` are those of a lone leaf."""
        return tuple(
            ValueCounts(
                name,
                start,
                tuple(counts.tolist()),
                tuple(names) if len(names) == len(counts) else (),
            )
            for name, (start, counts) in self._counts.items()
        )


def _get_leaf(values: Any, name: str, what: str) -> Any:
    for key in filter(None, name.removeprefix(what).split(".")):
        assert isinstance(values, Mapping)  # leaves() walked the same space
        values = values[key]
    return values
