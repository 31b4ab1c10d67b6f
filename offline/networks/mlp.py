"""Perceptrons with their backward pass written out: one, or several of the same shape at once.

Autograd makes a node of each layer, and gradients that are allocated, copied into place and found
one by one by the optimizer. Here a perceptron is one node, and its weights' gradients go straight
to where the optimizer reads them (see GradientSink). The mathematics are those of Linear and ReLU
layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from replaylake.offline.networks.passes import backward_pass, forward_pass, relu_gradient


class GradientSink:
    """Where a perceptron's backward pass puts its weights' gradients while it is open.

    views: one for each parameter, in the order of `sunk()`. Open, gradients of one loss are summed
    up there and autograd is told of none; closed, autograd has them as usual.
    """

    def __init__(self) -> None:
        self.views: Sequence[torch.Tensor] = ()
        self.is_open = False
        self.is_written = False

    def open(self) -> None:
        """Take gradients from now on, the first ones in place of what is there."""
        self.is_open, self.is_written = True, False

    def close(self) -> bool:
        """Take no more; return whether any came."""
        self.is_open = False
        return self.is_written


class MLP(nn.Module):
    """Linear layers with ReLU between them: [N, sizes[0]] to [N, sizes[-1]].

    Differentiable once. Weights are made as nn.Linear makes them.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.sink = GradientSink()

    def sunk(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients go to the sink, in its order."""
        # Not `parameters()`, nor attributes, which torch looks up in Python: a tenth of the time of
        # a small network's pass.
        layers = self.layers._modules.values()
        return [p for layer in layers if layer for p in layer._parameters.values() if p is not None]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self._outputs(features, self.sunk())

    def frozen(self, features: torch.Tensor) -> torch.Tensor:
        """Return the same values; gradients reach the features, but no weight."""
        return self._outputs(features, [p.detach() for p in self.sunk()])

    def _outputs(self, features: torch.Tensor, parameters: list[Any]) -> torch.Tensor:
        if is_tracing():
            return _traceable(features, parameters)
        return _applied(_Perceptron, self.sink, features, parameters)


class EnsembleMLP(nn.Module):
    """`num` perceptrons of the same sizes, each with its own weights: [N, in] to [num, N, out].

    Weights are [num, out, in]: one product for all members on a GPU. Differentiable once.
    """

    def __init__(self, num: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.num = num
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for size_in, size_out in pairwise(sizes):
            # As nn.Linear makes them: uniform within 1 / sqrt(size_in).
            bound = 1 / math.sqrt(size_in)
            self.weights.append(torch.empty(num, size_out, size_in).uniform_(-bound, bound))
            self.biases.append(torch.empty(num, size_out).uniform_(-bound, bound))
        self.sink = GradientSink()

    def sunk(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients go to the sink, in its order."""
        return [p for layer in zip(self.weights, self.biases, strict=True) for p in layer]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self._outputs(features, self.sunk())

    def frozen(self, features: torch.Tensor, num: int | None = None) -> torch.Tensor:
        """Return the same values, of the first `num` members if it is given: [num, N, out].

        Gradients reach the features, but no weight.
        """
        return self._outputs(features, [p[:num].detach() for p in self.sunk()])

    def _outputs(self, features: torch.Tensor, parameters: list[Any]) -> torch.Tensor:
        if is_tracing():
            members = [[p[e] for p in parameters] for e in range(len(parameters[0]))]
            return torch.stack([_traceable(features, member) for member in members])
        kind = _Stacked if features.is_cuda else _Members
        return _applied(kind, self.sink, features, parameters)


def _applied(
    kind: type[torch.autograd.Function],
    sink: GradientSink,
    features: torch.Tensor,
    parameters: Sequence[torch.Tensor],
) -> torch.Tensor:
    outputs: torch.Tensor = kind.apply(sink, features, *parameters)  # type: ignore[no-untyped-call]
    return outputs


def is_tracing() -> bool:
    """Whether the graph is being exported."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def _traceable(features: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the outputs by operations that ONNX has."""
    layers = list(zip(parameters[::2], parameters[1::2], strict=True))
    for weight, bias in layers[:-1]:
        features = F.relu(F.linear(features, weight, bias))
    return F.linear(features, *layers[-1])


class _Layered(torch.autograd.Function):
    """What perceptrons have in common: where their gradients go, and what autograd is told."""

    @staticmethod
    def into(ctx: Any) -> tuple[Sequence[torch.Tensor], bool]:
        """Return where weights' gradients go, and whether they are added to what is there."""
        sink: GradientSink = ctx.sink
        if sink.is_open:
            adds, sink.is_written = sink.is_written, True
            return sink.views, adds
        ctx.made = [torch.empty_like(p) for p in ctx.parameters]
        return ctx.made, False


class _Perceptron(_Layered):
    """One: features [N, in] to [N, out]; parameters alternate: weight [out, in], bias [out]."""

    @staticmethod
    def forward(
        ctx: Any, sink: GradientSink, features: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.sink, ctx.parameters, ctx.made = sink, parameters, [None] * len(parameters)
        outputs, ctx.inputs = forward_pass(features, parameters)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        _, needs_features, needs_weights, *_ = ctx.needs_input_grad
        into, adds = _Layered.into(ctx) if needs_weights else ((), False)
        of_features = backward_pass(
            gradient, ctx.inputs, ctx.parameters, into, adds, needs_features=needs_features
        )
        return (None, of_features, *ctx.made)


class _Members(_Layered):
    """E of the same features, one after another: [N, in] to [E, N, out]."""

    @staticmethod
    def forward(
        ctx: Any, sink: GradientSink, features: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.sink, ctx.parameters, ctx.made = sink, parameters, [None] * len(parameters)
        ctx.members = list(zip(*(p.unbind() for p in parameters), strict=True))
        outputs, ctx.inputs = zip(*(forward_pass(features, m) for m in ctx.members), strict=True)
        return torch.stack(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[Any, ...]:
        _, needs_features, needs_weights, *_ = ctx.needs_input_grad
        into, adds = _Layered.into(ctx) if needs_weights else ((), False)
        of_features: torch.Tensor | None = None
        for e, (gradient, inputs, member) in enumerate(
            zip(gradients.unbind(), ctx.inputs, ctx.members, strict=True)
        ):
            part = backward_pass(
                gradient,
                inputs,
                member,
                [view[e] for view in into],
                adds,
                needs_features=needs_features,
            )
            of_features = part if of_features is None or part is None else of_features.add_(part)
        return (None, of_features, *ctx.made)


class _Stacked(_Layered):
    """E of the same features, in one product a layer: for a GPU."""

    @staticmethod
    def forward(
        ctx: Any, sink: GradientSink, features: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.sink, ctx.parameters, ctx.made = sink, parameters, [None] * len(parameters)
        ctx.inputs = [features.expand(len(parameters[0]), -1, -1)]
        for first in range(0, len(parameters), 2):
            weight, bias = parameters[first : first + 2]
            outputs = torch.baddbmm(bias[:, None], ctx.inputs[-1], weight.mT)
            ctx.inputs.append(outputs if first == len(parameters) - 2 else outputs.relu_())
        last: torch.Tensor = ctx.inputs.pop()
        return last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        _, needs_features, needs_weights, *_ = ctx.needs_input_grad
        into, adds = _Layered.into(ctx) if needs_weights else ((), False)
        for layer in reversed(range(len(ctx.inputs))):
            if into:
                view, of_bias = into[2 * layer : 2 * layer + 2]
                torch.baddbmm(view, gradient.mT, ctx.inputs[layer], beta=int(adds), out=view)
                # Not 0 times what is there, as beta is: memory that is fresh may hold NaN.
                if adds:
                    of_bias.add_(gradient.sum(dim=1))
                else:
                    torch.sum(gradient, dim=1, out=of_bias)
            if layer == 0 and not needs_features:
                return (None, None, *ctx.made)
            gradient = torch.bmm(gradient, ctx.parameters[2 * layer])
            if layer:
                relu_gradient(gradient, ctx.inputs[layer])
        return (None, gradient.sum(dim=0), *ctx.made)
