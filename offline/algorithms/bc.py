"""Behaviour cloning: act as the log did. Maximum likelihood of the logged actions.

Pomerleau 1989, "ALVINN"; what it cannot do, drift away from the logged states, is bounded in Ross &
Bagnell 2010, "Efficient Reductions for Imitation Learning", theorem 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from replaylake.datastore.batch import Batch
from replaylake.datastore.errors import SpaceUnsupported
from replaylake.datastore.policies.policy import PolicySpec
from replaylake.datastore.spaces import Array, Box, Discrete, Space, describe
from replaylake.offline.action_scaling import ActionScaling, ScaledToEnvironment, action_scaling
from replaylake.offline.algorithm import Algorithm, Losses, Networks, PolicyModule, adam
from replaylake.offline.graph import PolicyGraph
from replaylake.offline.losses import categorical_nll, gaussian_nll, squared_error
from replaylake.offline.networks import (
    CategoricalNetwork,
    DeterministicNetwork,
    GaussianNetwork,
)
from replaylake.offline.options import expect, to_options


@dataclass(frozen=True)
class BCConfig:
    """Options of `bc`."""

    hidden_sizes: Sequence[int] = (256, 256)
    learning_rate: float = 1e-3
    # Of a Box action only. A gaussian has a density, which serving records and off-policy
    # evaluation needs; `deterministic` regresses the mean alone.
    head: Literal["gaussian", "deterministic"] = "gaussian"
    # Of the gaussian head, 0 to 1; see losses.gaussian_nll. Cloning a bang-bang Pendulum controller
    # of return -139 gave -860 and -833 at 0, -150 and -151 at 0.5, -163 and -150 at 1; RLlib's
    # smooth log -141 at each (2 seeds, 2,000 updates, 2026-11).
    beta: float = 0.5

    def __post_init__(self) -> None:
        expect(self.learning_rate > 0, "bc: learning_rate", self.learning_rate, "more than 0")
        expect(0 <= self.beta <= 1, "bc: beta", self.beta, "0 to 1")
        positive = all(size > 0 for size in self.hidden_sizes)
        expect(positive, "bc: hidden_sizes", self.hidden_sizes, "positive sizes")


def bc(
    observation_space: Space,
    action_space: Space,
    config: BCConfig,
    logged_actions: tuple[Array, Array] | None = None,
) -> Algorithm:
    """Return behaviour cloning for Discrete or float Box actions.

    Args:
        observation_space: any but images and text.
        action_space: Discrete: cross-entropy, honouring action masks. Box: gaussian likelihood or
            squared error of normalised actions.
        config: its options.
        logged_actions: least and greatest logged action, to normalise an unbounded Box by.

    Raises: SpaceUnsupported for other spaces.
    """
    if isinstance(action_space, Discrete):
        return _discrete(observation_space, action_space, config)
    if isinstance(action_space, Box):
        scaling = action_scaling(action_space, logged_actions)
        if config.head == "gaussian":
            return _gaussian(observation_space, action_space, config, scaling)
        return _deterministic(observation_space, action_space, config, scaling)
    raise SpaceUnsupported(
        f"bc: found action space {describe(action_space)}, expected Discrete or a float Box."
    )


def _discrete(observation_space: Space, action_space: Discrete, config: BCConfig) -> Algorithm:
    def losses(networks: Networks, targets: Networks, batch: Batch, rng: torch.Generator) -> Losses:
        logits_tm1 = networks["policy"](batch.observations)
        a_tm1 = _tensor(batch.actions) - action_space.start
        nll_tm1 = categorical_nll(logits_tm1, a_tm1, batch.action_masks)
        return _weighted(nll_tm1, batch)

    def networks() -> Networks:
        return Networks(
            {"policy": CategoricalNetwork(observation_space, action_space.n, config.hidden_sizes)}
        )

    return Algorithm(
        spec=PolicySpec(observation_space, action_space, "categorical"),
        losses=losses,
        networks=networks,
        optimizer=adam(config.learning_rate),
        needs_bootstrap=False,
        config=_resolved(config, Discrete),
    )


def _gaussian(
    observation_space: Space, action_space: Box, config: BCConfig, scaling: ActionScaling
) -> Algorithm:
    spec = PolicySpec(observation_space, action_space, "gaussian")

    def losses(networks: Networks, targets: Networks, batch: Batch, rng: torch.Generator) -> Losses:
        means_tm1, log_stds_tm1 = networks["policy"](batch.observations)
        a_tm1 = scaling.normalise(_tensor(batch.actions))
        return _weighted(gaussian_nll(means_tm1, log_stds_tm1, a_tm1, config.beta), batch)

    def networks() -> Networks:
        size = len(scaling.center)
        return Networks({"policy": GaussianNetwork(observation_space, size, config.hidden_sizes)})

    return Algorithm(
        spec=spec,
        losses=losses,
        networks=networks,
        optimizer=adam(config.learning_rate),
        policy=lambda nets: PolicyGraph(_GaussianGraph(nets["policy"], spec, scaling), spec),
        needs_bootstrap=False,
        config=_resolved(config, Box),
        normalisation={"actions": scaling.to_json()},
    )


def _deterministic(
    observation_space: Space, action_space: Box, config: BCConfig, scaling: ActionScaling
) -> Algorithm:
    spec = PolicySpec(observation_space, action_space, "deterministic")

    def losses(networks: Networks, targets: Networks, batch: Batch, rng: torch.Generator) -> Losses:
        predicted_tm1 = networks["policy"](batch.observations)
        return _weighted(
            squared_error(predicted_tm1, scaling.normalise(_tensor(batch.actions))), batch
        )

    def networks() -> Networks:
        size = len(scaling.center)
        return Networks(
            {"policy": DeterministicNetwork(observation_space, size, config.hidden_sizes)}
        )

    return Algorithm(
        spec=spec,
        losses=losses,
        networks=networks,
        optimizer=adam(config.learning_rate),
        policy=lambda nets: PolicyGraph(_DeterministicGraph(nets["policy"], spec, scaling), spec),
        needs_bootstrap=False,
        config=_resolved(config, Box),
        normalisation={"actions": scaling.to_json()},
    )


class _GaussianGraph(PolicyModule):
    """The gaussian network, its outputs in the environment's units."""

    def __init__(self, network: nn.Module, spec: PolicySpec, scaling: ActionScaling) -> None:
        super().__init__(network, spec)
        self._scaled = ScaledToEnvironment(scaling)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        means, log_stds = super().forward(*inputs)
        return self._scaled(means), self._scaled.log_stds(log_stds)


class _DeterministicGraph(PolicyModule):
    """The deterministic network, its output in the environment's units."""

    def __init__(self, network: nn.Module, spec: PolicySpec, scaling: ActionScaling) -> None:
        super().__init__(network, spec)
        self._scaled = ScaledToEnvironment(scaling)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self._scaled(actions) for actions in super().forward(*inputs))


def _weighted(loss_tm1: torch.Tensor, batch: Batch) -> Losses:
    """Average over the batch with the sampler's importance weights."""
    return Losses({"policy": (_tensor(batch.weights) * loss_tm1).mean()})


def _resolved(config: BCConfig, kind: type[Discrete | Box]) -> dict[str, Any]:
    options = to_options(config)
    if kind is Discrete:
        options["head"] = "categorical"
    return options


def _tensor(values: Any) -> torch.Tensor:
    """Say for the type checker that a Batch from to_torch holds tensors."""
    tensor: torch.Tensor = values
    return tensor
