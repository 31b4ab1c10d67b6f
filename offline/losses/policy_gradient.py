"""Policy gradients: losses of actions that were drawn, and what keeps a step from going too far.

Suffixes as in likelihood: `_tm1` is the step acted upon. One value per step, no reduction: the
algorithm weighs and averages. Advantages and targets are constants.
"""

from __future__ import annotations

import torch


def policy_gradient(log_probs_tm1: torch.Tensor, advantages_tm1: torch.Tensor) -> torch.Tensor:
    """Return -A ln pi(a|s), [B], whose gradient is the policy gradient's.

    Args:
        log_probs_tm1: float [B], ln pi of the actions taken.
        advantages_tm1: float [B], with the importance weight in it where another policy acted.

    Source: Williams 1992, "Simple Statistical Gradient-Following Algorithms"; with V-trace's
    advantages Espeholt et al. 2018, "IMPALA", section 4.2.
    """
    return -advantages_tm1 * log_probs_tm1


def clipped_surrogate(
    log_rho_tm1: torch.Tensor,
    advantages_tm1: torch.Tensor,
    epsilon: float,
    epsilon_high: float | None = None,
) -> torch.Tensor:
    """Return -min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A), [B].

    Args:
        log_rho_tm1: float [B], ln pi(a|s) - ln mu(a|s), mu being who acted.
        advantages_tm1: float [B].
        epsilon: the ratio is clipped at 1 - epsilon.
        epsilon_high: the ratio is clipped at 1 + epsilon_high; None: epsilon.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", eq. 7.
    """
    rho_tm1 = torch.exp(log_rho_tm1)
    high = epsilon if epsilon_high is None else epsilon_high
    clipped = rho_tm1.clamp(1 - epsilon, 1 + high)
    return -torch.minimum(rho_tm1 * advantages_tm1, clipped * advantages_tm1)


def value_loss(
    v_tm1: torch.Tensor,
    targets_tm1: torch.Tensor,
    before_tm1: torch.Tensor | None = None,
    epsilon: float | None = None,
) -> torch.Tensor:
    """Return half of the squared error, [B]; clipped, the greater one of it and of a near value's.

    Args:
        v_tm1: float [B].
        targets_tm1: float [B].
        before_tm1: float [B], what the values were before the update.
        epsilon: how far they may go from there where that pays, in units of return; None: anywhere.

    Source: Espeholt et al. 2018, section 4.2. Clipped, as in the code of Schulman et al. 2017;
    written down in Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients", sec. 3.
    """
    errors = (v_tm1 - targets_tm1).square()
    if epsilon is not None and before_tm1 is not None:
        near = before_tm1 + (v_tm1 - before_tm1).clamp(-epsilon, epsilon)
        errors = torch.maximum(errors, (near - targets_tm1).square())
    return 0.5 * errors
