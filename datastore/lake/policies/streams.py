"""Streams: one source of randomness for many episodes that are acted for in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import SpaceUnsupportedError


class EpisodeStreams:
    """Stands in for a numpy Generator in `Policy.act`: row i is drawn from episode i's own stream.

    So what an episode draws does not depend on which others share its batch. Only the draws that
    policies make are here, each of a size with leading dim [N].
    """

    def __init__(self, streams: Sequence[np.random.Generator]) -> None:
        self.streams = streams

    def random(self, size: Any) -> Array:
        """Draw uniformly from [0, 1): float64 of shape `size`."""
        drawn = self._empty(size)
        for row, stream in zip(_rows(drawn), self.streams, strict=True):
            stream.random(out=row)
        return drawn

    def standard_normal(self, size: Any) -> Array:
        """Draw from N(0, 1): float64 of shape `size`."""
        drawn = self._empty(size)
        for row, stream in zip(_rows(drawn), self.streams, strict=True):
            stream.standard_normal(out=row)
        return drawn

    def uniform(self, low: Any, high: Any, size: Any) -> Array:
        """Draw uniformly from [low, high): float64 of shape `size`."""
        scale: Array = np.asarray(high) - np.asarray(low)
        return low + scale * self.random(size)  # type: ignore[no-any-return]

    def _empty(self, size: Any) -> Array:
        drawn = np.empty(size)
        if drawn.shape[:1] != (len(self.streams),):
            raise SpaceUnsupportedError(
                f"act: found a random draw of shape {list(drawn.shape)}, expected "
                f"{len(self.streams)} rows, one per episode. Draw with the number of observations "
                "as the first dim."
            )
        return drawn


def _rows(drawn: Array) -> Array:
    return drawn.reshape(len(drawn), -1)
