"""Randomness: a stream of random numbers for each thing that draws, given one seed for all."""

from __future__ import annotations

import zlib

import numpy as np

from replaylake.datastore.replay.arguments import check_seed


def random_stream(seed: int, purpose: str, *parts: int) -> np.random.Generator:
    """Return what draws for one purpose; parts, such as the epoch, give it one stream each.

    Whoever draws has a stream of its own, so a sampler, its item and a mixture may get the same
    seed. With the same numbers, uniform sampling of row u N and hindsight that replaces a goal
    where u < 0.8 would never touch the goals of the last fifth of the rows.

    Raises: ConfigInvalidError for what is no seed.
    """
    # Not hash(), which differs from process to process.
    key = (zlib.crc32(purpose.encode()), *parts)
    return np.random.default_rng(np.random.SeedSequence(check_seed(purpose, seed), spawn_key=key))
