"""PolicyGraph: what a learner hands out to be exported, and the Policy that acts with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from replaylake.datastore.policies.heads import act_from_head
from replaylake.datastore.policies.log_probs import (
    action_probs_of,
    check_has_density,
    log_probs_of,
)
from replaylake.datastore.policies.package import graph_inputs
from replaylake.datastore.policies.policy import HEAD_OUTPUTS, Act, PolicySpec
from replaylake.datastore.spaces import Array, Values


@dataclass(frozen=True)
class PolicyGraph:
    """A module and what its outputs mean.

    The module maps the inputs that `package.graph_inputs` makes (one tensor [N, ...] per leaf of
    the observation space, then the noise of a `sampled` head) to the tuple of outputs that
    `policy.HEAD_OUTPUTS` lists for the head, each [N, ...].
    """

    module: nn.Module
    spec: PolicySpec


class TorchPolicy:
    """Acts with a PolicyGraph as it is now: later updates of the learner show in its actions."""

    def __init__(self, graph: PolicyGraph, device: torch.device | str = "cpu") -> None:
        self._graph = graph
        self._device = device

    @property
    def spec(self) -> PolicySpec:
        """Spaces and head."""
        return self._graph.spec

    def initial_state(self, n: int) -> Any:
        """Return None: stateless."""
        return None

    def act(
        self,
        observations: Values,
        state: Any = None,
        *,
        rng: np.random.Generator | None = None,
        deterministic: bool = True,
        temperature: float = 1.0,
        epsilon: float = 0.0,
        action_mask: Array | None = None,
    ) -> Act:
        """Choose actions; see Policy.act."""
        inputs = graph_inputs(self.spec, observations, rng)
        return act_from_head(
            self.spec,
            run_graph(self._graph, inputs, self._device),
            rng,
            deterministic=deterministic,
            temperature=temperature,
            epsilon=epsilon,
            mask=action_mask,
        )

    def action_probs(
        self,
        observations: Values,
        state: Any = None,
        *,
        deterministic: bool = True,
        temperature: float = 1.0,
        epsilon: float = 0.0,
        action_mask: Array | None = None,
    ) -> Array:
        """Return the probability of each action; see Policy.action_probs."""
        return action_probs_of(
            self.spec,
            run_graph(self._graph, graph_inputs(self.spec, observations), self._device),
            deterministic=deterministic,
            temperature=temperature,
            epsilon=epsilon,
            mask=action_mask,
        )

    def log_probs(
        self,
        observations: Values,
        actions: Values,
        state: Any = None,
        *,
        deterministic: bool = True,
        temperature: float = 1.0,
        epsilon: float = 0.0,
        action_mask: Array | None = None,
    ) -> Array:
        """Return log-probabilities of given actions; see Policy.log_probs."""
        # Before the graph is run, whose noise nobody has drawn.
        check_has_density(self.spec, deterministic=deterministic, temperature=temperature)
        return log_probs_of(
            self.spec,
            run_graph(self._graph, graph_inputs(self.spec, observations), self._device),
            actions,
            deterministic=deterministic,
            temperature=temperature,
            epsilon=epsilon,
            mask=action_mask,
        )

    def observe(self, state: Any, rewards: Array) -> Any:
        """Return the state unchanged."""
        return state


def run_graph(
    graph: PolicyGraph, inputs: dict[str, Array], device: torch.device | str = "cpu"
) -> dict[str, Array]:
    """Run the module on the graph's inputs by name; returns the head's parameters."""
    was_training = graph.module.training
    graph.module.eval()
    with torch.no_grad():
        outputs = graph.module(*(torch.from_numpy(array).to(device) for array in inputs.values()))
    graph.module.train(was_training)
    names = HEAD_OUTPUTS[graph.spec.head]
    return {name: tensor.cpu().numpy() for name, tensor in zip(names, outputs, strict=True)}
