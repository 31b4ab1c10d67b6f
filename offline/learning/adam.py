"""FusedAdam: Adam in one kernel a parameter group, without torch.optim.

The first torch.optim.Optimizer of a process imports torch._dynamo: 0.95 s of the second that passes
until the first update (2 cores, 2026-11-22). The kernel is torch's own, and so are its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

_BETAS: Final = (0.9, 0.999)
_EPS: Final = 1e-8


class Optimizer(Protocol):
    """What steps parameters down their gradients; torch's optimizers are such too."""

    def step(self) -> Any:
        """Step each parameter that has a gradient."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what later steps depend on."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Continue from what state_dict returned."""
        ...


# Given one dict a parameter group, with its `name` and its `params`.
OptimizerFunction = Callable[[list[dict[str, Any]]], Optimizer]


def adam(
    learning_rate: float, *, eps: float = _EPS, max_gradient_norm: float | None = None
) -> OptimizerFunction:
    """Return an optimizer function: Adam with one learning rate for all groups.

    max_gradient_norm: of all groups' gradients together; see clip_gradients.
    """
    return lambda groups: FusedAdam(
        groups, learning_rate, eps=eps, max_gradient_norm=max_gradient_norm
    )


def adam_by_group(rates: Mapping[str, float]) -> OptimizerFunction:
    """Return an optimizer function: Adam with a learning rate for each parameter group by name."""
    return lambda groups: FusedAdam(
        [{**group, "lr": rates[group["name"]]} for group in groups], max(rates.values())
    )


def adam_with_decay(learning_rate: float, weight_decay: float) -> OptimizerFunction:
    """Return an optimizer function: Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""
    return lambda groups: FusedAdam(groups, learning_rate, weight_decay=weight_decay)


def clip_gradients(parameters: Sequence[torch.Tensor], max_norm: float | None) -> None:
    """Scale all gradients by one number, in place, so that their norm is `max_norm` at most.

    Source: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks",
    algorithm 1. Cost: a pass over each, and another one to scale it.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if max_norm is None or not gradients:
        return
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp_(max=1.0))


@dataclass
class _Moments:
    """One parameter's averages of its gradient and of its square, and its number of steps."""

    mean: torch.Tensor
    square: torch.Tensor
    steps: torch.Tensor


class FusedAdam:
    """Adam (Kingma & Ba 2015, algorithm 1), with a learning rate for each group.

    groups: dicts of `params`, a list of parameters, their `name`, and `lr` where it is not the
    common one. A parameter without a gradient is not stepped.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        learning_rate: float,
        *,
        betas: tuple[float, float] = _BETAS,
        eps: float = _EPS,
        weight_decay: float = 0.0,
        max_gradient_norm: float | None = None,
    ) -> None:
        self._max_norm = max_gradient_norm
        self._weight_decay = weight_decay
        self._groups = [(g["params"], float(g.get("lr", learning_rate))) for g in groups]
        self._betas, self._eps = betas, eps
        self._moments = [
            _Moments(
                torch.zeros_like(p, requires_grad=False),
                torch.zeros_like(p, requires_grad=False),
                torch.zeros((), dtype=torch.float32, device=p.device),
            )
            for params, _ in self._groups
            for p in params
        ]

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of all groups for the following steps."""
        self._groups = [(params, learning_rate) for params, _ in self._groups]

    @torch.no_grad()
    def step(self) -> None:
        """Step each parameter that has a gradient."""
        clip_gradients([p for params, _ in self._groups for p in params], self._max_norm)
        moments = iter(self._moments)
        for params, learning_rate in self._groups:
            due = [(p, m) for p, m in zip(params, moments, strict=False) if p.grad is not None]
            if not due:
                continue
            steps = [m.steps for _, m in due]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(  # which is Adam where nothing decays
                [p for p, _ in due],
                [p.grad for p, _ in due],
                [m.mean for _, m in due],
                [m.square for _, m in due],
                [],
                steps,
                lr=learning_rate,
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=self._weight_decay,
                eps=self._eps,
                amsgrad=False,
                maximize=False,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the moments; the learning rates are the algorithm's options."""
        return {"moments": [vars(m) for m in self._moments]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue bit for bit (on the CPU) where state_dict was called."""
        for ours, theirs in zip(self._moments, state_dict["moments"], strict=True):
            for name, tensor in vars(ours).items():
                tensor.copy_(theirs[name])
