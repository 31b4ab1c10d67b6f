"""Features: observations of any space as float vectors, normalized where the data was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from replaylake.datastore.episodes.spaces import (
    Box,
    Dict,
    Discrete,
    Leaf,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
    children,
    describe,
    leaves,
)
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.offline.dataset_statistics import Moments
from replaylake.offline.networks.encoders import FrameEncoder

_NONE: Final[Mapping[str, Moments]] = {}


class ObservationFeatures(nn.Module):
    """Turns observations of any space but text into float features [N, num_features].

    A Box is flattened, discrete kinds become one-hot vectors, frames go through convolutions that
    are learned with what comes behind (FrameEncoder), and the leaves of a Dict or Tuple are joined
    in order. A Box leaf whose moments are given becomes (x - mean) / std; they are buffers, so that
    they go with the weights and into the exported graph. Raises: SpaceUnsupportedError for a Text,
    and for frames that are none.
    """

    def __init__(self, space: Space, moments: Mapping[str, Moments] = _NONE) -> None:
        super().__init__()
        self._space = space
        self._encoders = nn.ModuleDict()
        self.num_features = 0
        for number, (name, leaf) in enumerate(leaves(space)):
            _check_leaf(name, leaf)
            if _is_image(leaf):
                encoder = FrameEncoder(leaf, _name_of(name))
                self._encoders[str(number)] = encoder
                self.num_features += encoder.num_features
            else:
                self.num_features += _num_features(leaf)
        self._is_normalized = [name in moments for name, _ in leaves(space)]
        for number, (name, _) in enumerate(leaves(space)):
            if name in moments:
                mean, std = (torch.from_numpy(a.reshape(1, -1).copy()) for a in moments[name])
                self.register_buffer(f"mean_{number}", mean.float())
                self.register_buffer(f"inverse_std_{number}", 1 / std.float())

    def forward(self, observations: Any) -> torch.Tensor:
        """Map a tensor [N, *obs], or a mapping of them as the space nests, to [N, num_features]."""
        parts = []
        for number, (leaf, tensor) in enumerate(_pair_tensors(self._space, observations)):
            if _is_image(leaf):
                parts.append(self._encoders[str(number)](tensor))
                continue
            part = _leaf_features(leaf, tensor)
            if self._is_normalized[number]:
                mean, inverse_std = self._moments(number)
                part = (part - mean) * inverse_std
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _moments(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.get_buffer(f"mean_{number}"), self.get_buffer(f"inverse_std_{number}")

    def nest(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the leaves' tensors, in order, as the space nests them."""
        return nest_leaves(self._space, inputs)


def nest_leaves(space: Space, inputs: Sequence[torch.Tensor]) -> Any:
    """Return the leaves' tensors, in order, as the space nests them."""
    return _nest_leaves(space, iter(inputs))


def _check_leaf(name: str, leaf: Leaf) -> None:
    if isinstance(leaf, Text):
        raise SpaceUnsupportedError(
            f"{_name_of(name)}: found {describe(leaf)}, expected a Box, Discrete, MultiDiscrete, "
            "MultiBinary, or a Dict or Tuple of these."
        )


def _name_of(name: str) -> str:
    return f"observation.{name}" if name else "observation"


def _is_image(leaf: Leaf) -> TypeGuard[Box]:
    return isinstance(leaf, Box) and leaf.is_image


def _num_features(leaf: Leaf) -> int:
    if isinstance(leaf, Discrete | MultiBinary):
        return leaf.n
    if isinstance(leaf, MultiDiscrete):
        return sum(leaf.nvec)
    assert isinstance(leaf, Box)
    size = 1
    for dim in leaf.shape:
        size *= dim
    return size


def _leaf_features(leaf: Leaf, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(leaf, Discrete):
        return F.one_hot(tensor.long() - leaf.start, leaf.n).float()
    if isinstance(leaf, MultiDiscrete):
        columns = [F.one_hot(tensor[:, i].long(), n) for i, n in enumerate(leaf.nvec)]
        return torch.cat(columns, dim=1).float()
    return tensor.flatten(start_dim=1).float() if tensor.dim() > 1 else tensor[:, None].float()


def _pair_tensors(space: Space, observations: Any) -> list[tuple[Leaf, torch.Tensor]]:
    if not isinstance(space, Dict | Tuple):
        return [(space, observations)]
    assert isinstance(observations, Mapping)
    return [
        pair
        for key, sub in children(space).items()
        for pair in _pair_tensors(sub, observations[key])
    ]


def _nest_leaves(space: Space, inputs: Any) -> Any:
    if not isinstance(space, Dict | Tuple):
        return next(inputs)
    return {key: _nest_leaves(sub, inputs) for key, sub in children(space).items()}
