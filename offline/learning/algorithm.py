"""Algorithm: what a learning rule is. Three functions, and defaults for the rest.

    losses(networks, targets, batch, rng, due) -> Losses   one scalar per parameter group
    postprocess(networks, batch) -> Batch                  before the losses, without gradients
    optimizer(parameters) -> Optimizer

A parameter group is a key of `networks`: its loss moves that network's parameters and no others, so
an actor's loss may run through the critic without training it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.learning.adam import OptimizerFunction, adam
from replaylake.offline.learning.options import expect
from replaylake.offline.networks.features import nest_leaves
from replaylake.offline.networks.graph import PolicyGraph


class Losses(NamedTuple):
    """What a batch costs.

    groups: a scalar to minimize for each parameter group. priorities: float [B] for a prioritized
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


@dataclass(frozen=True)
class OnPolicy:
    """How an algorithm learns from what its own policy just did, each step of it once.

    length: T, the steps of a sequence. num_sequences: B of them make the batch of one update.
    epochs: how often the update goes through that batch, in another order each time. minibatches:
    parts that a pass is cut into, each of which is one optimizer step.
    """

    length: int
    num_sequences: int
    epochs: int = 1
    minibatches: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            expect(value >= 1, f"on-policy: {name}", value, "1 or more")


Networks = nn.ModuleDict
LossFunction = Callable[[Networks, Networks, Batch, torch.Generator, frozenset[str]], Losses]


def identity_postprocess(networks: Networks, batch: Batch) -> Batch:
    """Return the batch as it is: the default postprocess."""
    return batch


class PolicyModule(nn.Module):
    """The default exported graph: the network `policy`, whose outputs are the head's parameters."""

    def __init__(self, network: nn.Module, spec: PolicySpec) -> None:
        super().__init__()
        self.network = network
        self._space = spec.observation_space

    def nest(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the graph's inputs as the observation space nests them."""
        return nest_leaves(self._space, inputs)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.network(self.nest(inputs))
        return outputs if isinstance(outputs, tuple) else (outputs,)


@dataclass(frozen=True)
class Algorithm:
    """A learning rule for one pair of spaces, as a function in `algorithms/` returns it.

    spec: spaces and head of the policy that is learned. losses, postprocess, optimizer: see the
    module; `losses` gets tensors, the learner's own generator, and `due`: the groups that step in
    this update, so that nothing is computed for the others. `optimizer` gets one dict per group
    with its `name` and `params`. networks: makes the modules by group, called once under the
    learner's seed. targets: those that have target copies, by group. update_periods: groups whose
    loss is stepped down only every n-th update (TD3's actor), by group. policy: the exported graph.

    What its batches hold: needs_bootstrap, next observations (steps without one are left out);
    n_step, how far off they are; needs_returns, Monte-Carlo returns; needs_next_actions, the logged
    action that follows; needs_propensities, behavior_log_probs, all of them known.

    on_policy: None for one that learns from any log, over and over. Else its batches are sequences
    [B, T, ...] that are consumed once: `postprocess` gets such a batch whole, and returns one whose
    rows, sequences still or single steps, are shuffled and cut into the minibatches that `losses`
    gets. What it computes for them goes into the batch's `columns`. update_periods and the periods
    of targets then count minibatches.

    config: the options it was made with, for the manifest; normalization: likewise.
    """

    spec: PolicySpec
    losses: LossFunction
    networks: Callable[[], Networks]
    optimizer: OptimizerFunction = field(default_factory=lambda: adam(3e-4))
    postprocess: Callable[[Networks, Batch], Batch] = identity_postprocess
    targets: Mapping[str, Target] = field(default_factory=dict)
    update_periods: Mapping[str, int] = field(default_factory=dict)
    policy: Callable[[Networks], PolicyGraph] | None = None
    needs_bootstrap: bool = True
    n_step: int = 1
    needs_returns: bool = False
    needs_next_actions: bool = False
    needs_propensities: bool = False
    on_policy: OnPolicy | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    normalization: Mapping[str, Any] = field(default_factory=dict)

    def policy_graph(self, networks: Networks) -> PolicyGraph:
        """Return the graph to export: `policy`'s, else the network named `policy` itself."""
        if self.policy is not None:
            return self.policy(networks)
        return PolicyGraph(PolicyModule(networks["policy"], self.spec), self.spec)


def weighted_mean(loss_tm1: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Average [B] over the batch with the sampler's importance weights, to []."""
    return torch.dot(loss_tm1, tensor(batch.weights) / len(loss_tm1))


def tensor(values: Any) -> torch.Tensor:
    """Say for the type checker that a Batch from to_torch holds tensors."""
    result: torch.Tensor = values
    return result
