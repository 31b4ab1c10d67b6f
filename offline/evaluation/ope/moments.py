"""Moments: what logged observations, already in memory, are normalized by."""

from __future__ import annotations

from typing import Any

import numpy as np

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


def observation_moments(space: Space, observations: Values) -> dict[str, Moments]:
    """Return mean and standard deviation of each leaf of floats, by its dotted name.

    The deviation of an element that hardly varies is 1.
    """
    moments = {}
    for (name, leaf), array in zip(leaves(space), _leaf_arrays(space, observations), strict=True):
        if isinstance(leaf, Box) and np.dtype(leaf.dtype).kind == "f":
            mean = array.mean(axis=0, dtype=np.float64).astype(np.float32)
            std = array.std(axis=0, dtype=np.float64)
            moments[name] = Moments(mean, np.where(std > 1e-6, std, 1.0).astype(np.float32))
    return moments


def _leaf_arrays(space: Space, values: Any) -> list[Array]:
    if not isinstance(space, Dict | Tuple):
        return [values]
    return [
        array for key, sub in children(space).items() for array in _leaf_arrays(sub, values[key])
    ]
