"""Products: the matrix products of a perceptron, by the fastest library that torch has here.

torch multiplies float32 matrices on a CPU with MKL, which on processors that are not Intel's leaves
half of the machine unused: 256 x 256 x 256 takes 320 us where oneDNN, which torch ships too, takes
155 (AMD EPYC, one thread, 2026-11-22; on Intel's they are alike). Small products stay with MKL, as
oneDNN takes 10 us to be called. Both round to float32 after every operation; neither uses less.
"""

from __future__ import annotations

from typing import Any, Final

import torch

# Multiplications from which oneDNN pays: 256 x 64 x 64.
_LEAST_ONEDNN: Final = 1 << 20


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
    if _pays(x, weight.shape[0]):
        outputs: torch.Tensor = _LINEAR(x, weight, bias, "relu" if relu else "none", [], "")
        return outputs
    outputs = torch.addmm(bias, x, weight.t())
    return outputs.relu_() if relu else outputs


def times(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right: [N, K], [K, M] to [N, M]."""
    if _pays(left, right.shape[1]):
        product: torch.Tensor = _LINEAR(left, right.t(), None, "none", [], "")
        return product
    return torch.mm(left, right)


def put_outer(
    into: torch.Tensor, gradient: torch.Tensor, inputs: torch.Tensor, *, adds: bool
) -> None:
    """Put, or add, gradient^T @ inputs into a tensor: [N, out], [N, in] to [out, in]."""
    if inputs.shape[1] < _FEW_COLUMNS <= gradient.shape[1]:
        product = times(inputs.t(), gradient).t()
    elif _pays(gradient.t(), inputs.shape[1]):
        product = times(gradient.t(), inputs)
    else:
        torch.addmm(into, gradient.t(), inputs, beta=int(adds), out=into)
        return
    if adds:
        into.add_(product)
    else:
        into.copy_(product)


# A product of few columns takes half as long when it is computed transposed: 38 us instead of 83
# for [256, 256] x [256, 23].
_FEW_COLUMNS: Final = 64


def _pays(left: torch.Tensor, num_columns: int) -> bool:
    """Whether oneDNN is there and faster."""
    return (
        _LINEAR is not None
        and left.numel() * num_columns >= _LEAST_ONEDNN
        and left.device.type == "cpu"
        and left.dtype == torch.float32
    )
