"""Passes: forwards and backwards through a perceptron's layers, some of the rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from replaylake.offline.networks.products import affine, put_outer, times

# Rows that pass through all layers before the next do. What each layer leaves then stays in the
# cache, and memory of its size is at hand, where 8 MB at a time are fetched from the system anew:
# an update of CQL, whose critics see 7,936 rows, takes 52 ms instead of 68 (2 cores, 2026-11-22).
_PART_ROWS: Final = 512


def forward_pass(
    features: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Return the outputs [N, out], and for each part of the rows each layer's inputs.

    features [N, in]; parameters alternate: weight [out, in], bias [out].
    """
    if len(features) <= _PART_ROWS or features.is_cuda:
        outputs, inputs = _part_forward(features, parameters)
        return outputs, [inputs]
    passed = [_part_forward(part, parameters) for part in torch.split(features, _PART_ROWS)]
    return torch.cat([outputs for outputs, _ in passed]), [inputs for _, inputs in passed]


def _part_forward(
    features: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    inputs = [features]
    for first in range(0, len(parameters) - 2, 2):
        inputs.append(affine(inputs[-1], parameters[first], parameters[first + 1], relu=True))
    return affine(inputs[-1], parameters[-2], parameters[-1], relu=False), inputs


def backward_pass(
    gradient: torch.Tensor,
    inputs: Sequence[Sequence[torch.Tensor]],
    parameters: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor],
    adds: bool,
    *,
    needs_features: bool,
) -> torch.Tensor | None:
    """Put the weights' gradients into `into`, unless that is empty; return the features'.

    gradient [N, out] is that of the outputs, inputs what forward_pass left. adds: to what is there.
    """
    if len(inputs) == 1:
        return _part_backward(
            gradient, inputs[0], parameters, into, adds, needs_features=needs_features
        )
    found = []
    sizes = [len(part[0]) for part in inputs]
    for rows, part in zip(torch.split(gradient, sizes), inputs, strict=True):
        of_features = _part_backward(
            rows, part, parameters, into, adds, needs_features=needs_features
        )
        adds = True
        if of_features is not None:
            found.append(of_features)
    return torch.cat(found) if found else None


def _part_backward(
    gradient: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor],
    adds: bool,
    *,
    needs_features: bool,
) -> torch.Tensor | None:
    for layer in reversed(range(len(inputs))):
        if into:
            put_outer(into[2 * layer], gradient, inputs[layer], adds=adds)
            of_bias = into[2 * layer + 1]
            if adds:
                of_bias.add_(gradient.sum(dim=0))
            else:
                torch.sum(gradient, dim=0, out=of_bias)
        if layer == 0 and not needs_features:
            return None
        gradient = times(gradient, parameters[2 * layer])
        if layer:
            relu_gradient(gradient, inputs[layer])
    return gradient


def relu_gradient(gradient: torch.Tensor, outputs: torch.Tensor) -> None:
    """Set the gradient to 0, in place, where the unit's output is."""
    torch.ops.aten.threshold_backward.grad_input(gradient, outputs, 0, grad_input=gradient)
