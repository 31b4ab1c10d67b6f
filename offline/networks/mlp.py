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
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

# Rows that pass through all layers before the next do. What each layer leaves then stays in the
# cache, and memory of its size is at hand, where 8 MB at a time are fetched from the system anew:
# an update of CQL, whose critics see 7,936 rows, takes 52 ms instead of 68 (2 cores, 2026-11-22).
_PART_ROWS: Final = 512
# Multiplications from which oneDNN pays: 256 x 64 x 64.
_MIN_ONEDNN: Final = 1 << 20
# A product of few columns takes half as long when it is computed transposed: 38 us instead of 83
# for [256, 256] x [256, 23].
_FEW_COLUMNS: Final = 64


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

    def sink_parameters(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients go to the sink, in its order."""
        # Not `parameters()`, nor attributes, which torch looks up in Python: a tenth of the time of
        # a small network's pass.
        layers = self.layers._modules.values()
        return [p for layer in layers if layer for p in layer._parameters.values() if p is not None]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self._outputs(features, self.sink_parameters())

    def forward_frozen(self, features: torch.Tensor) -> torch.Tensor:
        """Return the same values; gradients reach the features, but no weight."""
        return self._outputs(features, [p.detach() for p in self.sink_parameters()])

    def _outputs(self, features: torch.Tensor, parameters: list[Any]) -> torch.Tensor:
        if is_tracing():
            return _traceable(features, parameters)
        return _apply_function(_SingleMLP, self.sink, features, parameters)


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

    def sink_parameters(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients go to the sink, in its order."""
        return [p for layer in zip(self.weights, self.biases, strict=True) for p in layer]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self._outputs(features, self.sink_parameters())

    def forward_frozen(self, features: torch.Tensor, num: int | None = None) -> torch.Tensor:
        """Return the same values, of the first `num` members if it is given: [num, N, out].

        Gradients reach the features, but no weight.
        """
        return self._outputs(features, [p[:num].detach() for p in self.sink_parameters()])

    def _outputs(self, features: torch.Tensor, parameters: list[Any]) -> torch.Tensor:
        if is_tracing():
            members = [[p[e] for p in parameters] for e in range(len(parameters[0]))]
            return torch.stack([_traceable(features, member) for member in members])
        kind = _BatchedMLP if features.is_cuda else _MLPLoop
        return _apply_function(kind, self.sink, features, parameters)


def _apply_function(
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


class _MLPFunction(torch.autograd.Function):
    """What perceptrons have in common: where their gradients go, and what autograd is told."""

    @staticmethod
    def gradient_targets(ctx: Any) -> tuple[Sequence[torch.Tensor], bool]:
        """Return where weights' gradients go, and whether they are added to what is there."""
        sink: GradientSink = ctx.sink
        if sink.is_open:
            adds, sink.is_written = sink.is_written, True
            return sink.views, adds
        ctx.made = [torch.empty_like(p) for p in ctx.parameters]
        return ctx.made, False


class _SingleMLP(_MLPFunction):
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
        into, adds = _MLPFunction.gradient_targets(ctx) if needs_weights else ((), False)
        of_features = backward_pass(
            gradient, ctx.inputs, ctx.parameters, into, adds, needs_features=needs_features
        )
        return (None, of_features, *ctx.made)


class _MLPLoop(_MLPFunction):
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
        into, adds = _MLPFunction.gradient_targets(ctx) if needs_weights else ((), False)
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


class _BatchedMLP(_MLPFunction):
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
        into, adds = _MLPFunction.gradient_targets(ctx) if needs_weights else ((), False)
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
    gradients = []
    sizes = [len(part[0]) for part in inputs]
    for rows, part in zip(torch.split(gradient, sizes), inputs, strict=True):
        of_features = _part_backward(
            rows, part, parameters, into, adds, needs_features=needs_features
        )
        adds = True
        if of_features is not None:
            gradients.append(of_features)
    return torch.cat(gradients) if gradients else None


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
            write_outer_product(into[2 * layer], gradient, inputs[layer], adds=adds)
            of_bias = into[2 * layer + 1]
            if adds:
                of_bias.add_(gradient.sum(dim=0))
            else:
                torch.sum(gradient, dim=0, out=of_bias)
        if layer == 0 and not needs_features:
            return None
        gradient = matmul(gradient, parameters[2 * layer])
        if layer:
            relu_gradient(gradient, inputs[layer])
    return gradient


def relu_gradient(gradient: torch.Tensor, outputs: torch.Tensor) -> None:
    """Set the gradient to 0, in place, where the unit's output is."""
    torch.ops.aten.threshold_backward.grad_input(gradient, outputs, 0, grad_input=gradient)


def _onednn_linear() -> Any:
    """Return oneDNN's fused linear layer, or None where this torch has none."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


_LINEAR: Final = _onednn_linear()


def affine(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, relu: bool
) -> torch.Tensor:
    """Return x @ weight^T + bias, and relu of that: [N, in], [out, in], [out] to [N, out]."""
    if _is_onednn_faster(x, weight.shape[0]):
        outputs: torch.Tensor = _LINEAR(x, weight, bias, "relu" if relu else "none", [], "")
        return outputs
    outputs = torch.addmm(bias, x, weight.t())
    return outputs.relu_() if relu else outputs


def matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right: [N, K], [K, M] to [N, M]."""
    if _is_onednn_faster(left, right.shape[1]):
        product: torch.Tensor = _LINEAR(left, right.t(), None, "none", [], "")
        return product
    return torch.mm(left, right)


def write_outer_product(
    into: torch.Tensor, gradient: torch.Tensor, inputs: torch.Tensor, *, adds: bool
) -> None:
    """Put, or add, gradient^T @ inputs into a tensor: [N, out], [N, in] to [out, in]."""
    if inputs.shape[1] < _FEW_COLUMNS <= gradient.shape[1]:
        product = matmul(inputs.t(), gradient).t()
    elif _is_onednn_faster(gradient.t(), inputs.shape[1]):
        product = matmul(gradient.t(), inputs)
    else:
        torch.addmm(into, gradient.t(), inputs, beta=int(adds), out=into)
        return
    if adds:
        into.add_(product)
    else:
        into.copy_(product)


def _is_onednn_faster(left: torch.Tensor, num_columns: int) -> bool:
    """Whether oneDNN is there and faster."""
    return (
        _LINEAR is not None
        and left.numel() * num_columns >= _MIN_ONEDNN
        and left.device.type == "cpu"
        and left.dtype == torch.float32
    )
