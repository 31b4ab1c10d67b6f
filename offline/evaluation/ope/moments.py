"""Moments: what logged observations, already in memory, are normalized by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Dict,
    Space,
    Tuple,
    Values,
    children,
    leaves,
)
from replaylake.offline.dataset_statistics import Moments

_ROWS_AT_ONCE: Final = 1 << 16


def observation_moments(
    space: Space, observations: Values, rows: NDArray[np.int64] | None = None
) -> dict[str, Moments]:
    """Return mean and standard deviation of each leaf of floats, by its dotted name.

    rows: the observations to use, by default all. The deviation of an element that hardly varies
    is 1. Memory: 65,536 observations as float64.
    """
    moments = {}
    for (name, leaf), array in zip(leaves(space), _leaf_arrays(space, observations), strict=True):
        if isinstance(leaf, Box) and np.dtype(leaf.dtype).kind == "f":
            mean, std = _mean_and_std(array, rows)
            std = np.where(std > 1e-6, std, 1.0)
            moments[name] = Moments(mean.astype(np.float32), std.astype(np.float32))
    return moments


def _mean_and_std(array: Array, rows: NDArray[np.int64] | None) -> tuple[Array, Array]:
    """Return float64 [*shape] each, of rows of [N, *shape]."""
    num = len(array) if rows is None else len(rows)

    def parts() -> Iterator[Array]:
        for start in range(0, num, _ROWS_AT_ONCE):
            some = slice(start, min(num, start + _ROWS_AT_ONCE))
            yield array[some] if rows is None else array[rows[some]]

    mean = sum(part.sum(axis=0, dtype=np.float64) for part in parts()) / num
    squares = sum(np.square(part - mean).sum(axis=0) for part in parts()) / num
    return mean, np.sqrt(squares)


def _leaf_arrays(space: Space, values: Any) -> list[Array]:
    if not isinstance(space, Dict | Tuple):
        return [values]
    return [
        array for key, sub in children(space).items() for array in _leaf_arrays(sub, values[key])
    ]
