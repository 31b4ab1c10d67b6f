"""Networks: observations to features, and the multi-layer perceptrons behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from replaylake.datastore.errors import SpaceUnsupported
from replaylake.datastore.spaces import (
    Box,
    Dict,
    Discrete,
    Leaf,
    MultiBinary,
    MultiDiscrete,
    Space,
    Tuple,
    children,
    describe,
    leaves,
)

# In units of a normalised action: e^-5 of its half range at the least, as in SAC's reference code;
# below it a density explodes on actions that the log repeats exactly.
LOG_STD_RANGE: Final = (-5.0, 2.0)


class ObservationFeatures(nn.Module):
    """Turns observations of any space but images and text into float features [N, num_features].

    A Box is flattened, discrete kinds become one-hot vectors, and the leaves of a Dict or Tuple are
    joined in order. Raises: SpaceUnsupported for an image or a Text.
    """

    def __init__(self, space: Space) -> None:
        super().__init__()
        self._space = space
        for name, leaf in leaves(space):
            _check_leaf(name, leaf)
        self.num_features = sum(_num_features(leaf) for _, leaf in leaves(space))

    def forward(self, observations: Any) -> torch.Tensor:
        """Map a tensor [N, *obs], or a mapping of them as the space nests, to [N, num_features]."""
        parts = [
            _leaf_features(leaf, tensor)
            for leaf, tensor in _with_tensors(self._space, observations)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def nested(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the leaves' tensors, in order, as the space nests them."""
        return _nested(self._space, iter(inputs))


class MLP(nn.Sequential):
    """Linear layers with ReLU between them: [N, sizes[0]] to [N, sizes[-1]]."""

    def __init__(self, sizes: Sequence[int]) -> None:
        layers: list[nn.Module] = []
        for size_in, size_out in pairwise(sizes):
            layers += [nn.Linear(size_in, size_out), nn.ReLU()]
        super().__init__(*layers[:-1])


class CategoricalNetwork(nn.Module):
    """Observations to logits [N, A] (or to q_values, which have the same shape)."""

    def __init__(self, space: Space, num_actions: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        self.features = ObservationFeatures(space)
        self.body = MLP([self.features.num_features, *hidden_sizes, num_actions])

    def forward(self, observations: Any) -> torch.Tensor:
        logits: torch.Tensor = self.body(self.features(observations))
        return logits


class GaussianNetwork(nn.Module):
    """Observations to means and log_stds [N, D] of normalised actions."""

    def __init__(self, space: Space, action_size: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        self.features = ObservationFeatures(space)
        self.body = MLP([self.features.num_features, *hidden_sizes, 2 * action_size])

    def forward(self, observations: Any) -> tuple[torch.Tensor, torch.Tensor]:
        means, log_stds = self.body(self.features(observations)).chunk(2, dim=-1)
        return means, log_stds.clamp(*LOG_STD_RANGE)


class DeterministicNetwork(nn.Module):
    """Observations to normalised actions [N, D] in (-1, 1)."""

    def __init__(self, space: Space, action_size: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        self.features = ObservationFeatures(space)
        self.body = MLP([self.features.num_features, *hidden_sizes, action_size])

    def forward(self, observations: Any) -> torch.Tensor:
        return torch.tanh(self.body(self.features(observations)))


def _check_leaf(name: str, leaf: Leaf) -> None:
    if isinstance(leaf, Discrete | MultiDiscrete | MultiBinary):
        return
    if isinstance(leaf, Box) and not leaf.is_image:
        return
    where = f"observation.{name}" if name else "observation"
    raise SpaceUnsupported(
        f"{where}: found {describe(leaf)}{' (an image)' if isinstance(leaf, Box) else ''}, "
        "expected a Box of numbers, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of "
        "these."
    )


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


def _with_tensors(space: Space, observations: Any) -> list[tuple[Leaf, torch.Tensor]]:
    if not isinstance(space, Dict | Tuple):
        return [(space, observations)]
    assert isinstance(observations, Mapping)
    return [
        pair
        for key, sub in children(space).items()
        for pair in _with_tensors(sub, observations[key])
    ]


def _nested(space: Space, inputs: Any) -> Any:
    if not isinstance(space, Dict | Tuple):
        return next(inputs)
    return {key: _nested(sub, inputs) for key, sub in children(space).items()}
