"""Folds: what is said of an episode comes from a model that was fitted on others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def episode_folds(num_episodes: int, num_folds: int, seed: int) -> NDArray[np.int64]:
    """Return each episode's fold, int64 [E]: as equal in size as can be, by `seed`.

    At most one fold an episode, and at least two of two or more.
    """
    num = max(1, min(num_folds, num_episodes))
    order = np.random.default_rng([seed, 7]).permutation(num_episodes)
    folds = np.empty(num_episodes, np.int64)
    folds[order] = np.arange(num_episodes) % num
    return folds


def each_fold(folds: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Yield each fold's number and which episodes are in it, bool [E]."""
    for number in range(int(folds.max()) + 1):
        yield number, folds == number
