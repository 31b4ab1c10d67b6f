"""Algorithm: what a learning rule is. Three functions, and defaults for the rest.

    losses(networks, targets, batch, rng) -> Losses        one scalar per parameter group
    postprocess(networks, batch) -> Batch                  before the losses, without gradients
    optimizer(parameters) -> torch.optim.Optimizer

A parameter group is a key of `networks`: its loss moves that network's parameters and no others, so
an actor's loss may run through the critic without training it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from replaylake.datastore.batch import Batch
from replaylake.datastore.policies.policy import PolicySpec
from replaylake.offline.graph import PolicyGraph
from replaylake.offline.networks import ObservationFeatures
from replaylake.offline.options import expect


class Losses(NamedTuple):
    """What a batch costs.

    groups: a scalar to minimise for each parameter group. priorities: float [B] for a prioritized
    sampler, or None if the algorithm has none. metrics: further scalars worth watching.
    """

    groups: Mapping[str, torch.Tensor]
    priorities: torch.Tensor | None = None
    metrics: Mapping[str, torch.Tensor] = {}


@dataclass(frozen=True)
class Target:
    """How a network's target copy follows it.

    Every `period` updates: target <- (1 - tau) * target + tau * network. (1, n) copies every n
    updates (Mnih et al. 2015); (0.005, 1) averages (Lillicrap et al. 2016).
    """

    tau: float = 1.0
    period: int = 1

    def __post_init__(self) -> None:
        expect(0 < self.tau <= 1, "target: tau", self.tau, "more than 0, at most 1")
        expect(self.period >= 1, "target: period", self.period, "1 or more")


Networks = nn.ModuleDict
LossFunction = Callable[[Networks, Networks, Batch, torch.Generator], Losses]


def unchanged(networks: Networks, batch: Batch) -> Batch:
    """Return the batch as it is: the default postprocess."""
    return batch


def adam(learning_rate: float) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """Return an optimizer function: Adam (Kingma & Ba 2015), fused over all parameters."""

    def make(parameters: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=learning_rate, fused=True)

    return make


class PolicyModule(nn.Module):
    """The default exported graph: the network `policy`, whose outputs are the head's parameters."""

    def __init__(self, network: nn.Module, spec: PolicySpec) -> None:
        super().__init__()
        self.network = network
        self._features = ObservationFeatures(spec.observation_space)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.network(self._features.nested(inputs))
        return outputs if isinstance(outputs, tuple) else (outputs,)


@dataclass(frozen=True)
class Algorithm:
    """A learning rule for one pair of spaces, as a function in `algorithms/` returns it.

    spec: spaces and head of the policy that is learned. losses, postprocess, optimizer: see the
    module; `losses` gets tensors and the learner's own generator. `optimizer` gets one dict per
    group with its `name` and `params`. networks: makes the modules by group, called once under the
    learner's seed. targets: those that have target copies, by group. update_periods: groups whose
    loss is stepped down only every n-th update (TD3's actor), by group. policy: the exported graph.
    needs_bootstrap: whether it looks at next observations, so that steps without one are left out.
    config: the options it was made with, for the manifest; normalisation: likewise.
    """

    spec: PolicySpec
    losses: LossFunction
    networks: Callable[[], Networks]
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = field(
        default_factory=lambda: adam(3e-4)
    )
    postprocess: Callable[[Networks, Batch], Batch] = unchanged
    targets: Mapping[str, Target] = field(default_factory=dict)
    update_periods: Mapping[str, int] = field(default_factory=dict)
    policy: Callable[[Networks], PolicyGraph] | None = None
    needs_bootstrap: bool = True
    config: Mapping[str, Any] = field(default_factory=dict)
    normalisation: Mapping[str, Any] = field(default_factory=dict)

    def policy_graph(self, networks: Networks) -> PolicyGraph:
        """Return the graph to export: `policy`'s, else the network named `policy` itself."""
        if self.policy is not None:
            return self.policy(networks)
        return PolicyGraph(PolicyModule(networks["policy"], self.spec), self.spec)
