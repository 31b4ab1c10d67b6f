"""Candidate values: a field of the records where candidates start, of those that are there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.replay.protocols import Candidates, OverwrittenError
from replaylake.datastore.replay.records import Records


def read_values(
    candidates: Candidates, records: Records, numbers: NDArray[np.int64], field: str
) -> tuple[NDArray[np.int64], Array]:
    """Return which of the candidates [M] are there, int64 [N], and their values [N, ...]."""
    while True:
        positions = candidates.positions(numbers)
        there = positions >= 0
        try:
            return numbers[there], records.take(field, positions[there])
        except OverwrittenError:
            # Meanwhile some went: `positions` says now which.
            continue
