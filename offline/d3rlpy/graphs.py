"""Graphs: the acting part of a d3rlpy algorithm as a module that exports.

d3rlpy's own `save_policy(".onnx")` fails for every algorithm on torch 2.13. These modules share the
learner's parameters, so they act as it does now.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from replaylake.datastore.policies.policy import PolicySpec
from replaylake.offline.action_scaling import ActionScaling, ScaledToEnvironment
from replaylake.offline.d3rlpy.table import D3rlpyAlgorithm
from replaylake.offline.networks import ObservationFeatures


def policy_module(
    algorithm: D3rlpyAlgorithm, impl: Any, spec: PolicySpec, scaling: ActionScaling | None
) -> nn.Module:
    """Return the module for the algorithm's head; see PolicyGraph for its inputs and outputs."""
    modules = impl.modules
    if algorithm.policy == "q_funcs":
        return _QValues(spec, modules.q_funcs)
    if algorithm.policy == "bcq":
        return _BCQValues(spec, modules.q_funcs, modules.imitator, impl._action_flexibility)
    network = getattr(modules, algorithm.policy)
    if scaling is None:
        return _Logits(spec, network)
    if algorithm.head == "squashed_gaussian":
        return _SquashedGaussian(spec, network)
    if algorithm.head == "gaussian":
        return _Gaussian(spec, network, scaling)
    return _Deterministic(spec, network, scaling)


class _Observing(nn.Module):
    """Turns the graph's inputs into the features that the networks were trained on."""

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        self._features = ObservationFeatures(spec.observation_space)

    def observed(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        features: torch.Tensor = self._features(self._features.nested(inputs))
        return features


class _QValues(_Observing):
    """The mean of the ensemble's action values, whose maximum d3rlpy's greedy action takes."""

    def __init__(self, spec: PolicySpec, q_funcs: nn.ModuleList) -> None:
        super().__init__(spec)
        self.q_funcs = q_funcs

    def q_values(self, features: torch.Tensor) -> torch.Tensor:
        return torch.stack([q_func(features).q_value for q_func in self.q_funcs]).mean(dim=0)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.q_values(self.observed(inputs)),)


class _BCQValues(_QValues):
    """Action values above their least, 0 where the imitated policy finds the action too unlikely.

    Fujimoto et al. 2019, "Benchmarking Batch Deep Reinforcement Learning Algorithms", eq. 9, in the
    form whose argmax is the same.
    """

    def __init__(
        self, spec: PolicySpec, q_funcs: nn.ModuleList, imitator: nn.Module, flexibility: float
    ) -> None:
        super().__init__(spec, q_funcs)
        self.imitator = imitator
        self._threshold = math.log(flexibility)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self.observed(inputs)
        log_probs = torch.log_softmax(_logits(self.imitator, features), dim=1)
        likely = log_probs - log_probs.amax(dim=1, keepdim=True) > self._threshold
        values = self.q_values(features)
        # Above 0 for the least value too, so that a likely action always beats an unlikely one.
        return ((values - values.amin(dim=1, keepdim=True) + 1e-5) * likely.float(),)


class _Logits(_Observing):
    def __init__(self, spec: PolicySpec, network: nn.Module) -> None:
        super().__init__(spec)
        self.network = network

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_logits(self.network, self.observed(inputs)),)


class _SquashedGaussian(_Observing):
    """The mean before the tanh, and the log_std: the head squashes and scales."""

    def __init__(self, spec: PolicySpec, network: nn.Module) -> None:
        super().__init__(spec)
        self.network = network

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = self.network(self.observed(inputs))
        return output.mu, output.logstd


class _Gaussian(_Observing):
    """A gaussian around the squashed mean, in the environment's units (d3rlpy's IQL and AWAC)."""

    def __init__(self, spec: PolicySpec, network: nn.Module, scaling: ActionScaling) -> None:
        super().__init__(spec)
        self.network = network
        self._scaled = ScaledToEnvironment(scaling)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = self.network(self.observed(inputs))
        log_stds = output.logstd + torch.zeros_like(output.mu)
        return self._scaled(output.squashed_mu), self._scaled.log_stds(log_stds)


class _Deterministic(_Observing):
    def __init__(self, spec: PolicySpec, network: nn.Module, scaling: ActionScaling) -> None:
        super().__init__(spec)
        self.network = network
        self._scaled = ScaledToEnvironment(scaling)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self._scaled(self.network(self.observed(inputs)).squashed_mu),)


def _logits(network: Any, features: torch.Tensor) -> torch.Tensor:
    """Return a CategoricalPolicy's logits without its Categorical, which cannot be traced."""
    logits: torch.Tensor = network._fc(network._encoder(features))
    return logits
