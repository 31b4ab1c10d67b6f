"""Encoders: frames of uint8 to float features, by convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

from replaylake.datastore.episodes.spaces import Box, describe
from replaylake.datastore.errors import SpaceUnsupportedError

# (channels, kernel, stride) of each layer, and what they end in: Mnih et al. 2015, "Human-level
# control through deep reinforcement learning", methods; its first frames of 84 x 84 become 7 x 7.
_NATURE: Final = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
_NATURE_FEATURES: Final = 512
# Of a side below this one, nothing is left of it after those.
_MIN_NATURE_SIDE: Final = 36
_SMALL_CHANNELS: Final = (32, 64)
_SMALL_FEATURES: Final = 256
# A side that is halved by each layer, and not by the last one alone.
_MIN_HALVED_SIDE: Final = 16


class Frames(nn.Module):
    """Maps frames of any layout to float [N, C, H, W] in 0..1.

    The layouts are uint8 [N, H, W], [N, C, H, W], [N, H, W, C], and stacks of K of the last two,
    [N, K, ...], whose K C channels are one after another. The channels are the last dim where that
    is smaller than the first one of a frame. Raises: SpaceUnsupportedError for what is no such
    frame.
    """

    def __init__(self, space: Box, name: str = "observation") -> None:
        super().__init__()
        if not space.is_image or len(space.shape) > 4 or 0 in space.shape:
            raise SpaceUnsupportedError(
                f"{name}: found {describe(space)}, expected frames of 2 or 3 dims, or a stack of "
                "frames of 3. Flatten other arrays, or store them as floats, which are used as "
                "plain numbers."
            )
        frame = space.shape[-3:] if len(space.shape) > 2 else (1, *space.shape)
        self._has_channels_last = frame[-1] < frame[0]
        if self._has_channels_last:
            frame = (frame[2], frame[0], frame[1])
        stacked = space.shape[0] if len(space.shape) == 4 else 1
        self.shape: tuple[int, int, int] = (stacked * frame[0], frame[1], frame[2])

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        if self._has_channels_last:
            # Not movedim, of which the exporter writes a negative axis.
            axes = (0, 3, 1, 2) if observations.dim() == 4 else (0, 1, 4, 2, 3)
            observations = observations.permute(axes)
        return observations.reshape(-1, *self.shape).float() / 255


class FrameEncoder(nn.Module):
    """Maps uint8 frames to features [N, num_features], all of them 0 or more.

    Of 36 x 36 and more by the convolutions of Mnih et al. 2015 and their layer of 512 units; of
    smaller ones by two layers of 3 x 3, each of which halves the frame (of sides below 16 only the
    second), and 256 units.
    """

    def __init__(self, space: Box, name: str = "observation") -> None:
        super().__init__()
        self._frames = Frames(space, name)
        channels, *sides = self._frames.shape
        is_small = min(sides) < _MIN_NATURE_SIDE
        layers = _small_layers(channels, sides) if is_small else _nature_layers(channels)
        self._convolutions = nn.ModuleList(layers)
        for layer in layers:
            sides = [_side_after(side, layer) for side in sides]
            channels = layer.out_channels
        self.num_features = _SMALL_FEATURES if is_small else _NATURE_FEATURES
        self._linear = nn.Linear(channels * math.prod(sides), self.num_features)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        features = self._frames(observations)
        for layer in self._convolutions:
            features = F.relu(layer(features))
        return F.relu(self._linear(features.flatten(start_dim=1)))


def _nature_layers(channels: int) -> list[nn.Conv2d]:
    inputs = [channels, *(size for size, _, _ in _NATURE)]
    return [
        nn.Conv2d(before, size, kernel, stride)
        for before, (size, kernel, stride) in zip(inputs, _NATURE, strict=False)
    ]


def _small_layers(channels: int, sides: Sequence[int]) -> list[nn.Conv2d]:
    first, second = _SMALL_CHANNELS
    stride = 1 if min(sides) < _MIN_HALVED_SIDE else 2
    return [nn.Conv2d(channels, first, 3, stride, 1), nn.Conv2d(first, second, 3, 2, 1)]


def _side_after(side: int, layer: nn.Conv2d) -> int:
    padding = layer.padding[0]
    assert isinstance(padding, int)  # no layer here is padded by name
    return (side + 2 * padding - layer.kernel_size[0]) // layer.stride[0] + 1
