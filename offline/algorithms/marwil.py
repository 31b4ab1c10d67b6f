"""MARWIL: cloning that weighs each logged action by how much better it did than expected.

Wang et al. 2018, "Exponentially Weighted Imitation Learning for Batched Historical Data",
algorithm 1. It learns from Monte-Carlo returns and never asks what unlogged actions are worth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Box, Discrete, Space, describe
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.algorithms.box_actions import (
    box_scaling,
    gaussian_graph,
)
from replaylake.offline.algorithms.discrete_actions import action_indices
from replaylake.offline.algorithms.network_options import check_network
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.adam import adam
from replaylake.offline.learning.algorithm import (
    Algorithm,
    Losses,
    Networks,
    tensor,
    weighted_mean,
)
from replaylake.offline.learning.options import expect, to_options
from replaylake.offline.losses.likelihood import categorical_nll, gaussian_nll
from replaylake.offline.networks.actors import NO_STATISTICS, CategoricalNetwork, GaussianNetwork
from replaylake.offline.networks.critics import ValueNetwork

# The policy network and a batch, to -ln pi(a|s) of the logged actions, [B].
_NegativeLogLikelihood = Callable[[Any, Batch], torch.Tensor]


@dataclass(frozen=True)
class MARWILConfig:
    """Options of `marwil`."""

    hidden_sizes: Sequence[int] = (256, 256)
    learning_rate: float = 1e-3
    # How much better-than-expected actions count; 0 is `bc`, and learns from no reward.
    beta: float = 1.0
    # Greatest weight of an action; one lucky return would outweigh the batch.
    max_weight: float = 20.0
    # How fast the average squared advantage follows the batches'; the mean of all of them until
    # there are 1 / rate, so that no scale of rewards has to be told beforehand.
    norm_rate: float = 0.01
    # Of a Box action only: bc's `beta`, how far a mean is fitted as by squared errors.
    variance_weight: float = 0.5

    def __post_init__(self) -> None:
        check_network("marwil", self)
        expect(self.beta >= 0, "marwil: beta", self.beta, "0 or more")
        expect(self.max_weight >= 1, "marwil: max_weight", self.max_weight, "1 or more")
        expect(0 < self.norm_rate <= 1, "marwil: norm_rate", self.norm_rate, "0 to 1, not 0")
        weight = self.variance_weight
        expect(0 <= weight <= 1, "marwil: variance_weight", weight, "0 to 1")


def marwil(
    observation_space: Space,
    action_space: Space,
    config: MARWILConfig,
    facts: DatasetStatistics = NO_STATISTICS,
) -> Algorithm:
    """Return MARWIL for Discrete actions, honoring action masks, or for a float Box.

    Raises: SpaceUnsupportedError for other spaces.
    """
    if isinstance(action_space, Discrete):
        return _discrete(observation_space, action_space, config, facts)
    if isinstance(action_space, Box):
        return _box(observation_space, action_space, config, facts)
    raise SpaceUnsupportedError(
        f"marwil: found action space {describe(action_space)}, expected Discrete or a float Box."
    )


def _discrete(
    observation_space: Space, space: Discrete, config: MARWILConfig, facts: DatasetStatistics
) -> Algorithm:
    def nll(network: Any, batch: Batch) -> torch.Tensor:
        logits_tm1 = network(batch.observations)
        return categorical_nll(logits_tm1, action_indices(batch, space), batch.action_masks)

    def policy() -> CategoricalNetwork:
        return CategoricalNetwork(observation_space, space.n, config.hidden_sizes, facts)

    return Algorithm(
        spec=PolicySpec(observation_space, space, "categorical"),
        losses=_losses(nll, config),
        networks=_networks(policy, observation_space, config, facts),
        optimizer=adam(config.learning_rate),
        needs_bootstrap=False,
        needs_returns=config.beta > 0,
        config=to_options(config),
    )


def _box(
    observation_space: Space, action_space: Box, config: MARWILConfig, facts: DatasetStatistics
) -> Algorithm:
    space, scaling = box_scaling("marwil", action_space, facts)
    spec = PolicySpec(observation_space, space, "gaussian")

    def nll(network: Any, batch: Batch) -> torch.Tensor:
        means_tm1, log_stds_tm1 = network(batch.observations)
        a_tm1 = scaling.normalize(tensor(batch.actions))
        return gaussian_nll(means_tm1, log_stds_tm1, a_tm1, config.variance_weight)

    def policy() -> GaussianNetwork:
        return GaussianNetwork(observation_space, len(scaling.center), config.hidden_sizes, facts)

    return Algorithm(
        spec=spec,
        losses=_losses(nll, config),
        networks=_networks(policy, observation_space, config, facts),
        optimizer=adam(config.learning_rate),
        policy=lambda nets: gaussian_graph(nets["policy"], spec, scaling),
        needs_bootstrap=False,
        needs_returns=config.beta > 0,
        config=to_options(config),
        normalization={"actions": scaling.to_json()},
    )


class _NormalizedValueNetwork(ValueNetwork):
    """State values [N], and the average squared advantage, kept with the weights.

    squared_norm: float [], c^2. num_batches: float [], how many it is of.
    """

    squared_norm: torch.Tensor
    num_batches: torch.Tensor

    def __init__(self, space: Space, config: MARWILConfig, facts: DatasetStatistics) -> None:
        super().__init__(space, config.hidden_sizes, facts)
        self.register_buffer("squared_norm", torch.zeros(()))
        self.register_buffer("num_batches", torch.zeros(()))
        self._rate = config.norm_rate

    @torch.no_grad()
    def update_norm(self, advantages: torch.Tensor) -> torch.Tensor:
        """Take a batch's advantages [B] into the norm; return c^2, float []."""
        # c^2 <- c^2 + rate (mean A^2 - c^2)
        self.num_batches.add_(1)
        rate = self.num_batches.reciprocal().clamp(min=self._rate)
        return self.squared_norm.lerp_(advantages.square().mean(), rate)


def _networks(
    policy: Callable[[], torch.nn.Module],
    observation_space: Space,
    config: MARWILConfig,
    facts: DatasetStatistics,
) -> Callable[[], Networks]:
    def networks() -> Networks:
        modules = {"policy": policy()}
        if config.beta:
            modules["value"] = _NormalizedValueNetwork(observation_space, config, facts)
        return Networks(modules)

    return networks


def _losses(nll: _NegativeLogLikelihood, config: MARWILConfig) -> Any:
    def losses(networks: Networks, targets: Networks, batch: Batch, *_: Any) -> Losses:
        nll_tm1 = nll(networks["policy"], batch)
        if not config.beta:
            return Losses({"policy": weighted_mean(nll_tm1, batch)})
        value: Any = networks["value"]
        # A = R - V(s)
        advantages = tensor(batch.returns) - value(batch.observations)
        constant = advantages.detach()
        norm = value.update_norm(constant).sqrt().clamp(min=1e-8)
        # w = exp(beta A / c), the advantage in units of c
        weights = torch.exp(constant * (config.beta / norm)).clamp(max=config.max_weight)
        return Losses(
            {
                "policy": weighted_mean(weights * nll_tm1, batch),
                "value": weighted_mean(0.5 * advantages.square(), batch),
            },
            priorities=constant.abs(),
            metrics={"advantage_norm": norm, "weight_mean": weights.mean()},
        )

    return losses
