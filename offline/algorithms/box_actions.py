"""Box actions: what the actor-critic algorithms of continuous actions have in common.

Their networks see actions normalized to [-1, 1]; the graphs here bring a head's parameters back to
the environment's units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Box, Space, describe
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.algorithms.network_options import check_sizes
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.action_scaling import (
    ActionScaling,
    ActionUnscaler,
    action_scaling,
)
from replaylake.offline.learning.algorithm import (
    Losses,
    Networks,
    PolicyModule,
    weighted_mean,
)
from replaylake.offline.learning.options import expect
from replaylake.offline.networks.actors import DeterministicNetwork
from replaylake.offline.networks.critics import Critics, Scalar
from replaylake.offline.networks.graph import PolicyGraph

Gaussian = tuple[torch.Tensor, torch.Tensor]  # means [N, D] and log_stds, [N, D] or [D]


class ActorCriticOptions(Protocol):
    """The options that every algorithm of this kind has."""

    @property
    def hidden_sizes(self) -> Sequence[int]: ...
    @property
    def actor_learning_rate(self) -> float: ...
    @property
    def critic_learning_rate(self) -> float: ...
    @property
    def tau(self) -> float: ...
    @property
    def num_critics(self) -> int: ...
    @property
    def n_step(self) -> int: ...


def check_actor_critic(name: str, config: ActorCriticOptions) -> None:
    """Refuse common options out of range. Raises: ConfigInvalidError."""
    check_sizes(name, config.hidden_sizes)
    for option in ("actor_learning_rate", "critic_learning_rate"):
        rate = getattr(config, option)
        expect(rate > 0, f"{name}: {option}", rate, "more than 0")
    expect(0 < config.tau <= 1, f"{name}: tau", config.tau, "more than 0, at most 1")
    expect(config.num_critics >= 1, f"{name}: num_critics", config.num_critics, "1 or more")
    expect(config.n_step >= 1, f"{name}: n_step", config.n_step, "1 or more")


class TemperatureOptions(Protocol):
    """The options of a learned temperature."""

    @property
    def initial_temperature(self) -> float: ...
    @property
    def temperature_learning_rate(self) -> float: ...


def check_temperature(name: str, config: TemperatureOptions) -> None:
    """Refuse a temperature's options out of range. Raises: ConfigInvalidError."""
    initial, rate = config.initial_temperature, config.temperature_learning_rate
    expect(initial > 0, f"{name}: initial_temperature", initial, "more than 0")
    expect(rate >= 0, f"{name}: temperature_learning_rate", rate, "0 or more")


def box_scaling(
    name: str, action_space: Space, facts: DatasetStatistics
) -> tuple[Box, ActionScaling]:
    """Return the action space, known to be a Box, and its scaling.

    Raises: SpaceUnsupportedError.
    """
    if not isinstance(action_space, Box):
        raise SpaceUnsupportedError(
            f"{name}: found action space {describe(action_space)}, expected a float Box."
        )
    return action_space, action_scaling(action_space, facts.action_range)


def critics_of(networks: Networks) -> Critics:
    """Return the critics, of the networks or the targets."""
    critics = networks["critics"]
    assert isinstance(critics, Critics)
    return critics


def policy_of(networks: Networks, observations: Any) -> Gaussian:
    """Return the policy's means and log_stds in these observations."""
    policy: Gaussian = networks["policy"](observations)
    return policy


def get_scalar(networks: Networks, group: str) -> torch.Tensor:
    """Return the value [] of a group that is a single number."""
    scalar = networks[group]
    assert isinstance(scalar, Scalar)
    return scalar.value


def critic_losses(
    q_tm1: torch.Tensor, target_tm1: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the critics' loss [] and the batch's priorities [B], the mean |TD error|.

    The loss is the sum over the critics of their mean squared TD error, weighted as the sampler
    says. q_tm1 float [num, B]; target_tm1 float [B], held constant.
    """
    errors = q_tm1 - target_tm1
    loss = weighted_mean(errors.square().sum(dim=0), batch)
    return loss, errors.detach().abs().mean(dim=0)


def with_metrics(
    groups: Mapping[str, torch.Tensor], priorities: torch.Tensor, q_tm1: torch.Tensor
) -> Losses:
    """Return the losses, with the mean value of the logged actions as a metric."""
    return Losses(groups, priorities, {"q_mean": q_tm1.detach().mean()})


def q_of_many(critics: Critics, observations: Any, actions: torch.Tensor) -> torch.Tensor:
    """Return the values of several actions [N, K, D] in each of N observations: [num, N, K]."""
    num, num_actions, _ = actions.shape
    if num_actions == 1:
        one: torch.Tensor = critics(observations, actions[:, 0])
        return one.unsqueeze(-1)
    features = critics.features(observations)
    repeated = features[:, None].expand(-1, num_actions, -1)
    pairs = torch.cat([repeated, actions], dim=-1).reshape(num * num_actions, -1)
    values: torch.Tensor = critics.body(pairs)
    return values.view(-1, num, num_actions)


class BoundedMeanNetwork(nn.Module):
    """Observations to means [N, D] in (-1, 1), and log_stds [D], the same for all observations.

    ln std lies between the two of `log_std_range`, in units of a normalized action, and begins
    half-way. It is d3rlpy's form of the policies that are fitted to weighted logged actions: a
    spread that cannot depend on the observation cannot collapse on the actions seen there.
    """

    def __init__(
        self,
        space: Space,
        action_size: int,
        hidden_sizes: Sequence[int],
        facts: DatasetStatistics,
        log_std_range: tuple[float, float],
    ) -> None:
        super().__init__()
        self.mean = DeterministicNetwork(space, action_size, hidden_sizes, facts)
        self.log_std_logits = nn.Parameter(torch.zeros(action_size))
        self._log_std_range = log_std_range

    def forward(self, observations: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.mean(observations), self._log_stds()

    def compute_pre_tanh(self, observations: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the means before the tanh, and log_stds."""
        return self.mean.outputs(observations), self._log_stds()

    def _log_stds(self) -> torch.Tensor:
        low, high = self._log_std_range
        return low + (high - low) * torch.sigmoid(self.log_std_logits)


def deterministic_graph(
    network: nn.Module, spec: PolicySpec, scaling: ActionScaling
) -> PolicyGraph:
    """Return the graph of a network of normalized actions [N, D]."""
    return PolicyGraph(_DeterministicGraph(network, spec, scaling), spec)


def gaussian_graph(network: nn.Module, spec: PolicySpec, scaling: ActionScaling) -> PolicyGraph:
    """Return the graph of a network of normalized means [N, D] and log_stds, [N, D] or [D]."""
    return PolicyGraph(_GaussianGraph(network, spec, scaling), spec)


def tanh_gaussian_graph(network: nn.Module, spec: PolicySpec) -> PolicyGraph:
    """Return the graph of a network of means and log_stds [N, D]: the head squashes and scales."""
    return PolicyGraph(PolicyModule(network, spec), spec)


class _DeterministicGraph(PolicyModule):
    def __init__(self, network: nn.Module, spec: PolicySpec, scaling: ActionScaling) -> None:
        super().__init__(network, spec)
        self._scaled = ActionUnscaler(scaling)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self._scaled(actions) for actions in super().forward(*inputs))


class _GaussianGraph(_DeterministicGraph):
    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        means, log_stds = self.network(self.nest(inputs))
        return self._scaled(means), self._scaled.log_stds(log_stds) + torch.zeros_like(means)
