"""Uniform selection with replacement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from replaylake.datastore.errors import EmptyReplayError
from replaylake.datastore.replay.protocols import Candidates, SelectedItems
from replaylake.datastore.replay.randomness import random_stream
from replaylake.datastore.replay.saved_state import restore_generator


class UniformSelector:
    """Every candidate has the same chance in each draw."""

    can_prefetch = True

    def __init__(self, *, seed: int) -> None:
        """Take the seed. Raises: ConfigInvalidError for one below 0."""
        self._rng = random_stream(seed, "uniform sampler")

    def select(self, candidates: Candidates, num: int) -> SelectedItems:
        """Draw `num` with replacement. Raises: EmptyReplayError."""
        low, high = candidates.bounds()
        if low == high:
            raise EmptyReplayError(
                "uniform sampler: found nothing to sample, expected at least one item. "
                "Wait for steps, or widen the selection."
            )
        # Scaling random() is exact enough far beyond 1e9 candidates and takes half of integers().
        numbers = (self._rng.random(num) * (high - low)).astype(np.int64)
        return SelectedItems(numbers + low if low else numbers)

    def describe(self) -> dict[str, Any]:
        return {"selector": "uniform"}

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rng = restore_generator(state["rng"])
