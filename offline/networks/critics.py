"""Critics: networks that say what states and actions are worth; and single learned numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from replaylake.datastore.episodes.spaces import Space
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.networks.actors import NO_STATISTICS
from replaylake.offline.networks.features import ObservationFeatures
from replaylake.offline.networks.mlp import MLP, EnsembleMLP


class Critics(nn.Module):
    """`num` action values of continuous actions: observations, actions [N, D] to [num, N]."""

    def __init__(
        self,
        space: Space,
        action_size: int,
        hidden_sizes: Sequence[int],
        facts: DatasetStatistics = NO_STATISTICS,
        num: int = 2,
    ) -> None:
        super().__init__()
        self.features = ObservationFeatures(space, facts.observations)
        self.body = EnsembleMLP(num, [self.features.num_features + action_size, *hidden_sizes, 1])

    def forward(self, observations: Any, actions: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.body(self._inputs(observations, actions))
        return values.squeeze(-1)

    def forward_frozen(
        self, observations: Any, actions: torch.Tensor, num: int | None = None
    ) -> torch.Tensor:
        """Return the same values, of the first `num` critics if it is given: [num, N].

        Gradients reach the actions, but no weight of the critics.
        """
        with torch.no_grad():
            features = self.features(observations)
        return self.body.forward_frozen(torch.cat([features, actions], dim=1), num).squeeze(-1)

    def _inputs(self, observations: Any, actions: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.features(observations), actions], dim=1)


class QNetworks(nn.Module):
    """`num` action values of every discrete action: observations to [num, N, A]."""

    def __init__(
        self,
        space: Space,
        num_actions: int,
        hidden_sizes: Sequence[int],
        facts: DatasetStatistics = NO_STATISTICS,
        num: int = 2,
    ) -> None:
        super().__init__()
        self.features = ObservationFeatures(space, facts.observations)
        self.body = EnsembleMLP(num, [self.features.num_features, *hidden_sizes, num_actions])

    def forward(self, observations: Any) -> torch.Tensor:
        values: torch.Tensor = self.body(self.features(observations))
        return values


class ValueNetwork(nn.Module):
    """State values: observations to [N]."""

    def __init__(
        self, space: Space, hidden_sizes: Sequence[int], facts: DatasetStatistics = NO_STATISTICS
    ) -> None:
        super().__init__()
        self.features = ObservationFeatures(space, facts.observations)
        self.body = MLP([self.features.num_features, *hidden_sizes, 1])

    def forward(self, observations: Any) -> torch.Tensor:
        values: torch.Tensor = self.body(self.features(observations))
        return values.squeeze(-1)


class Scalar(nn.Module):
    """One learned number, such as the logarithm of SAC's temperature: its `value`, float []."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))
