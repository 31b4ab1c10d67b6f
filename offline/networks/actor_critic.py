"""Actor-critics: a policy's parameters and state values, of one module that one loss moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from replaylake.datastore.episodes.spaces import Space
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.networks.actors import CategoricalNetwork
from replaylake.offline.networks.critics import ValueNetwork
from replaylake.offline.networks.features import ObservationFeatures
from replaylake.offline.networks.mlp import MLP
from replaylake.offline.networks.recurrent import make_core

# Of the policy's last layer: at first all actions are about as likely, whatever is observed.
# Andrychowicz et al. 2021, "What Matters In On-Policy Reinforcement Learning?", section 3.2.
_FIRST_SCALE: Final = 0.01
# Before the tanh. Beyond 4, where tanh is 0.9993, float32 actions say less and less of what was
# drawn: at 8 its density is off by a seventh.
_MAX_MEAN: Final = 4.0
_LOG_STD_RANGE: Final = (-5.0, 0.5)
# At first the std is 1, so that squashed actions are spread about evenly.
_FIRST_LOG_STD: Final = 0.0
# Of a core without a hidden layer behind it.
_CORE_SIZE: Final = 64


class Outputs(NamedTuple):
    """What M observations give: the head's parameters, each [M, ...], and values [M]."""

    parameters: tuple[torch.Tensor, ...]
    values: torch.Tensor


class BoundedOutputs(nn.Module):
    """A network's outputs [M, P] as a head's parameters: logits, or means and log_stds [M, D].

    Of a gaussian the means lie in +-4 before the tanh, and there is one std for all observations.
    """

    def __init__(self, num_stds: int) -> None:
        super().__init__()
        low, high = _LOG_STD_RANGE
        share = (_FIRST_LOG_STD - low) / (high - low)
        self.log_std_logits: nn.Parameter | None = None
        if num_stds:
            logits = torch.full((num_stds,), math.log(share / (1 - share)))
            self.log_std_logits = nn.Parameter(logits)

    def forward(self, outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.log_std_logits is None:
            return (outputs,)
        low, high = _LOG_STD_RANGE
        log_stds = low + (high - low) * torch.sigmoid(self.log_std_logits)
        means = _MAX_MEAN * torch.tanh(outputs / _MAX_MEAN)
        return means, log_stds + torch.zeros_like(means)


class _PolicyNetwork(nn.Module):
    """The part of an actor-critic that acts: observations to the head's parameters."""

    def __init__(self, network: nn.Module, bounded: BoundedOutputs, num_outputs: int) -> None:
        super().__init__()
        self.network = network
        self.bounded = bounded
        self._num = num_outputs

    def forward(self, observations: Any) -> tuple[torch.Tensor, ...]:
        return tuple(self.bounded(self.network(observations)[:, : self._num]))


class SeparateActorCritic(nn.Module):
    """A network for the policy, and one for the values."""

    def __init__(
        self,
        space: Space,
        num_outputs: int,
        num_stds: int,
        hidden_sizes: Sequence[int],
        facts: DatasetStatistics,
    ) -> None:
        super().__init__()
        actor = CategoricalNetwork(space, num_outputs, hidden_sizes, facts)
        scale_down(actor.body, num_outputs)
        self.actor = _PolicyNetwork(actor, BoundedOutputs(num_stds), num_outputs)
        self.critic = ValueNetwork(space, hidden_sizes, facts)

    def forward(self, observations: Any) -> Outputs:
        return Outputs(self.actor(observations), self.critic(observations))

    def compute_values(self, observations: Any) -> torch.Tensor:
        values: torch.Tensor = self.critic(observations)
        return values

    def policy_network(self) -> nn.Module:
        """Return the policy's part: observations to the head's parameters."""
        return self.actor


class SharedActorCritic(nn.Module):
    """One network for both, up to its last layer."""

    def __init__(
        self,
        space: Space,
        num_outputs: int,
        num_stds: int,
        hidden_sizes: Sequence[int],
        facts: DatasetStatistics,
    ) -> None:
        super().__init__()
        self._num = num_outputs
        self.both = CategoricalNetwork(space, num_outputs + 1, hidden_sizes, facts)
        self.bounded = BoundedOutputs(num_stds)
        scale_down(self.both.body, num_outputs)

    def forward(self, observations: Any) -> Outputs:
        outputs = self.both(observations)
        return Outputs(self.bounded(outputs[:, : self._num]), outputs[:, self._num])

    def compute_values(self, observations: Any) -> torch.Tensor:
        values: torch.Tensor = self.both(observations)[:, self._num]
        return values

    def policy_network(self) -> nn.Module:
        """Return the policy's part: observations to the head's parameters."""
        return _PolicyNetwork(self.both, self.bounded, self._num)


class RecurrentActorCritic(nn.Module):
    """Features, a recurrent core, and one perceptron for policy and values.

    What is remembered is one state, float32 [N, state_size], zeros where an episode begins.
    """

    def __init__(
        self,
        space: Space,
        num_outputs: int,
        num_stds: int,
        hidden_sizes: Sequence[int],
        facts: DatasetStatistics,
        core: str,
    ) -> None:
        super().__init__()
        self._num = num_outputs
        self.features = ObservationFeatures(space, facts.observations)
        width = max(hidden_sizes, default=_CORE_SIZE)
        self.core = make_core(core, self.features.num_features, width)
        self.body = MLP([width, *hidden_sizes, num_outputs + 1])
        self.bounded = BoundedOutputs(num_stds)
        self.state_size = self.core.state_size
        scale_down(self.body, num_outputs)

    def forward(self, observations: Any, state: torch.Tensor) -> Outputs:
        """Go over sequences [B, T, *obs], from the states [B, S] before them: M = B T outputs."""
        flat = map_leaves(observations, lambda values: values.flatten(0, 1))
        features = self.features(flat)
        remembered, _ = self.core(features.view(len(state), -1, features.shape[1]), state)
        outputs = self.body(remembered.flatten(0, 1))
        return Outputs(self.bounded(outputs[:, : self._num]), outputs[:, self._num])

    def step(self, observations: Any, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the head's parameters in [N, *obs], and at last the next state [N, S]."""
        remembered, state = self.core.step(self.features(observations), state)
        return (*self.bounded(self.body(remembered)[:, : self._num]), state)


def map_leaves(values: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Convert the tensor of each leaf of observations."""
    if isinstance(values, Mapping):
        return {key: map_leaves(value, convert) for key, value in values.items()}
    return convert(values)


def scale_down(body: MLP, num_outputs: int) -> None:
    """Make the first outputs of a perceptron small, whatever its input is."""
    last = list(body.layers)[-1]
    with torch.no_grad():
        for parameter in last.parameters():
            parameter[:num_outputs] *= _FIRST_SCALE
