"""Features: observations as d3rlpy's encoders take them, vectors or frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from replaylake.datastore.episodes.spaces import Box, Space, describe, leaves
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.offline.d3rlpy.algorithms import D3RLPY_ALGORITHMS, D3rlpyAlgorithm
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.networks import encoders
from replaylake.offline.networks.features import ObservationFeatures


class Frames(encoders.Frames):
    """Maps uint8 frames of 2 or 3 dims to float [N, C, H, W] in 0..1, for d3rlpy's convolutions."""

    def nest(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the only leaf."""
        return inputs[0]


Features = ObservationFeatures | Frames


def observation_features(
    algorithm: D3rlpyAlgorithm, space: Space, facts: DatasetStatistics
) -> tuple[Features, tuple[int, ...]]:
    """Return what makes features of observations, and their shape without the leading dim.

    Raises: SpaceUnsupportedError for text, for frames of more than three dims or beside other
    leaves, and for frames where the algorithm takes none, naming those that do.
    """
    if isinstance(space, Box) and space.is_image and len(space.shape) <= 3:
        if not algorithm.takes_images:
            able = sorted(
                {
                    row.name
                    for row in D3RLPY_ALGORITHMS
                    if row.takes_images and row.actions == algorithm.actions
                }
            )
            raise SpaceUnsupportedError(
                f"algorithm d3rlpy:{algorithm.name}: found observation {describe(space)} (an "
                "image), expected a Box of numbers: it searches for neighbors of vectors. "
                f"Algorithms of d3rlpy that take it: {', '.join(able)}."
            )
        frames = Frames(space)
        return frames, frames.shape
    for name, leaf in leaves(space):
        if isinstance(leaf, Box) and leaf.is_image:
            raise SpaceUnsupportedError(
                f"algorithm d3rlpy:{algorithm.name}: found image {describe(leaf)} at observation"
                f"{'.' + name if name else ''}, expected a single image of 2 or 3 dims and "
                "nothing else, as d3rlpy's convolutions require. Leave the rest out, or use one "
                "of replaylake's algorithms."
            )
    features = ObservationFeatures(space, facts.observations)
    return features, (features.num_features,)
