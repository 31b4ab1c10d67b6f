"""Flat parameters: a network's weights side by side in one tensor, and their gradients likewise.

An optimizer then steps one tensor a group, a target follows in one operation, and learners that
work together exchange one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.offline.networks.mlp import MLP, EnsembleMLP


class FlatGroup:
    """The parameters of one module as views of `flat`, float32 [P], and of `gradients` [P].

    flat is what an optimizer steps. It must not be shared with another module.
    """

    def __init__(self, module: nn.Module, gradients: torch.Tensor | None = None) -> None:
        self.parameters = list(module.parameters())
        flat = [p.detach().reshape(-1) for p in self.parameters]
        memory = torch.cat(flat) if flat else torch.empty(0)
        for parameter, view in zip(self.parameters, self._views(memory), strict=True):
            parameter.data = view
        self.flat = nn.Parameter(memory, requires_grad=gradients is not None)
        if gradients is None:
            return
        self.gradients = gradients
        views = self._views(gradients)
        by_id = dict(zip(map(id, self.parameters), views, strict=True))
        perceptrons = [m for m in module.modules() if isinstance(m, MLP | EnsembleMLP)]
        self._sinks = [perceptron.sink for perceptron in perceptrons]
        for perceptron in perceptrons:
            perceptron.sink.views = [by_id[id(p)] for p in perceptron.sink_parameters()]
        self._frozen = [
            [by_id[id(parameter)] for parameter in perceptron.sink_parameters()]
            for perceptron in perceptrons
        ]
        sunk = {id(p) for perceptron in perceptrons for p in perceptron.sink_parameters()}
        # Those whose gradients autograd returns, and where they go.
        self._others = [by_id[id(p)] for p in self.parameters if id(p) not in sunk]
        self._are_others = [id(p) not in sunk for p in self.parameters]

    def differentiate(self, loss: torch.Tensor, *, retain_graph: bool) -> None:
        """Put the gradients of a loss into `gradients`, 0 for what it does not depend on."""
        for sink in self._sinks:
            sink.open()
        try:
            gradients = torch.autograd.grad(
                loss, self.parameters, retain_graph=retain_graph, allow_unused=True
            )
        finally:
            written = [sink.close() for sink in self._sinks]
        for views, is_written in zip(self._frozen, written, strict=True):
            if not is_written:
                torch._foreach_zero_(views)
        others = [g for g, is_other in zip(gradients, self._are_others, strict=True) if is_other]
        for view, gradient in zip(self._others, others, strict=True):
            view.zero_() if gradient is None else view.copy_(gradient)

    def _views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(memory, [p.numel() for p in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]


def flatten_parameters(
    networks: Mapping[str, nn.Module],
) -> tuple[dict[str, FlatGroup], torch.Tensor]:
    """Return the groups of some networks, and the memory that holds all their gradients.

    Raises: ConfigInvalidError for a parameter that two of them share, or that is not float32.
    """
    _check_parameters(networks)
    sizes = [sum(p.numel() for p in module.parameters()) for module in networks.values()]
    device = next((p.device for m in networks.values() for p in m.parameters()), None)
    gradients = torch.zeros(sum(sizes), device=device)
    parts = torch.split(gradients, sizes)
    items = zip(networks.items(), parts, strict=True)
    return {name: FlatGroup(module, part) for (name, module), part in items}, gradients


def _check_parameters(networks: Mapping[str, nn.Module]) -> None:
    owners: dict[int, str] = {}
    for group, module in networks.items():
        for name, parameter in module.named_parameters():
            if parameter.dtype != torch.float32:
                raise ConfigInvalidError(
                    f"networks: found {group}.{name} of {parameter.dtype}, expected torch.float32. "
                    "Keep numbers that are not learned in a buffer."
                )
            if (owner := owners.setdefault(id(parameter), group)) != group:
                raise ConfigInvalidError(
                    f"networks: found parameter {group}.{name} in group {owner!r} too, expected "
                    "one group per parameter, because each loss updates only its own group. Put "
                    "shared parameters into one network, or give each group its own."
                )
