"""RMSProp: steps divided by a running root mean square of the gradient, without torch.optim.

As FusedAdam, to spare a process the import that the first torch.optim.Optimizer makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from replaylake.offline.learning.adam import OptimizerFunction, clip_gradients


def rmsprop(
    learning_rate: float,
    *,
    decay: float = 0.99,
    eps: float = 1e-5,
    max_gradient_norm: float | None = None,
) -> OptimizerFunction:
    """Return an optimizer function: RMSProp with one learning rate for all groups."""
    return lambda groups: RMSProp(
        groups, learning_rate, decay=decay, eps=eps, max_gradient_norm=max_gradient_norm
    )


class RMSProp:
    """Tieleman & Hinton 2012, lecture 6.5, without momentum, as torch.optim.RMSprop has it.

    groups: as FusedAdam's; all have one learning rate. A parameter without a gradient is not
    stepped.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        learning_rate: float,
        *,
        decay: float,
        eps: float,
        max_gradient_norm: float | None = None,
    ) -> None:
        self._parameters: list[torch.Tensor] = [p for group in groups for p in group["params"]]
        self._squares = [torch.zeros_like(p, requires_grad=False) for p in self._parameters]
        self._learning_rate, self._decay, self._eps = learning_rate, decay, eps
        self._max_norm = max_gradient_norm

    @torch.no_grad()
    def step(self) -> None:
        """Step each parameter that has a gradient."""
        clip_gradients(self._parameters, self._max_norm)
        for parameter, square in zip(self._parameters, self._squares, strict=True):
            if (gradient := parameter.grad) is None:
                continue
            square.mul_(self._decay).addcmul_(gradient, gradient, value=1 - self._decay)
            parameter.addcdiv_(gradient, square.sqrt().add_(self._eps), value=-self._learning_rate)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages; the options are the algorithm's."""
        return {"squares": self._squares}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue bit for bit (on the CPU) where state_dict was called."""
        for ours, theirs in zip(self._squares, state_dict["squares"], strict=True):
            ours.copy_(theirs)
