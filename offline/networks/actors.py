"""Actors: networks whose outputs are the parameters of a policy's head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from replaylake.datastore.episodes.spaces import Space
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.networks.features import ObservationFeatures
from replaylake.offline.networks.mlp import MLP

# In units of a normalized action: e^-5 of its half range at the least, as in SAC's reference code;
# below it a density explodes on actions that the log repeats exactly.
LOG_STD_RANGE: Final = (-5.0, 2.0)
NO_STATISTICS: Final = DatasetStatistics()


class _Actor(nn.Module):
    def __init__(
        self, space: Space, num_outputs: int, hidden_sizes: Sequence[int], facts: DatasetStatistics
    ) -> None:
        super().__init__()
        self.features = ObservationFeatures(space, facts.observations)
        self.body = MLP([self.features.num_features, *hidden_sizes, num_outputs])

    def outputs(self, observations: Any) -> torch.Tensor:
        outputs: torch.Tensor = self.body(self.features(observations))
        return outputs


class CategoricalNetwork(_Actor):
    """Observations to logits [N, A] (or to q_values, which have the same shape)."""

    def __init__(
        self,
        space: Space,
        num_actions: int,
        hidden_sizes: Sequence[int],
        facts: DatasetStatistics = NO_STATISTICS,
    ) -> None:
        super().__init__(space, num_actions, hidden_sizes, facts)

    def forward(self, observations: Any) -> torch.Tensor:
        return self.outputs(observations)


class DuelingNetwork(_Actor):
    """Observations to q_values [N, A] = v + a - mean(a) (Wang et al. 2016, eq. 9)."""

    def __init__(
        self,
        space: Space,
        num_actions: int,
        hidden_sizes: Sequence[int],
        facts: DatasetStatistics = NO_STATISTICS,
    ) -> None:
        super().__init__(space, 1 + num_actions, hidden_sizes, facts)

    def forward(self, observations: Any) -> torch.Tensor:
        outputs = self.outputs(observations)
        values, advantages = outputs[:, :1], outputs[:, 1:]
        return values + advantages - advantages.mean(dim=1, keepdim=True)


class GaussianNetwork(_Actor):
    """Observations to means and log_stds [N, D] of normalized actions."""

    def __init__(
        self,
        space: Space,
        action_size: int,
        hidden_sizes: Sequence[int],
        facts: DatasetStatistics = NO_STATISTICS,
        log_std_range: tuple[float, float] = LOG_STD_RANGE,
    ) -> None:
        super().__init__(space, 2 * action_size, hidden_sizes, facts)
        self._log_std_range = log_std_range

    def forward(self, observations: Any) -> tuple[torch.Tensor, torch.Tensor]:
        means, log_stds = self.outputs(observations).chunk(2, dim=-1)
        return means, log_stds.clamp(*self._log_std_range)


class DeterministicNetwork(_Actor):
    """Observations to normalized actions [N, D] in (-1, 1)."""

    def __init__(
        self,
        space: Space,
        action_size: int,
        hidden_sizes: Sequence[int],
        facts: DatasetStatistics = NO_STATISTICS,
    ) -> None:
        super().__init__(space, action_size, hidden_sizes, facts)

    def forward(self, observations: Any) -> torch.Tensor:
        return torch.tanh(self.outputs(observations))
