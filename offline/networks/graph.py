"""PolicyGraph: what a learner hands out to be exported, and the Policy that acts with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.lake.policies.graph_policy import GraphPolicy, graph_output_names
from replaylake.datastore.lake.policies.policy import PolicySpec


@dataclass(frozen=True)
class PolicyGraph:
    """A module and what its outputs mean.

    The module maps the inputs that `graph_policy.graph_inputs` makes (one tensor [N, ...] per leaf
    of the observation space, then the state of a policy that has one and the noise of a `sampled`
    head) to the tuple of outputs that `graph_policy.graph_output_names` lists, each [N, ...].
    """

    module: nn.Module
    spec: PolicySpec


class TorchPolicy(GraphPolicy):
    """Acts with a PolicyGraph as it is now: later updates of the learner show in its actions."""

    def __init__(self, graph: PolicyGraph, device: torch.device | str = "cpu") -> None:
        super().__init__(graph.spec, lambda inputs: run_graph(graph, inputs, device))


def run_graph(
    graph: PolicyGraph, inputs: dict[str, Array], device: torch.device | str = "cpu"
) -> dict[str, Array]:
    """Run the module on the graph's inputs by name; returns its outputs by name."""
    was_training = graph.module.training
    graph.module.eval()
    with torch.no_grad():
        outputs = graph.module(*(torch.from_numpy(array).to(device) for array in inputs.values()))
    graph.module.train(was_training)
    names = graph_output_names(graph.spec)
    return {name: tensor.cpu().numpy() for name, tensor in zip(names, outputs, strict=True)}
