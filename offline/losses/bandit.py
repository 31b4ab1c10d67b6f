"""Bandit: what a policy is worth by a log of one-step decisions. Pure, differentiable functions.

Each estimates the mean reward of the policy pi from rewards that mu's actions earned.
"""

from __future__ import annotations

from typing import Final

import torch

_MIN_SUM: Final = torch.finfo(torch.float32).tiny


def importance_weights(
    log_pi: torch.Tensor, log_mu: torch.Tensor, max_weight: float | None = None
) -> torch.Tensor:
    """Return pi(a|x) / mu(a|x), at most max_weight; float [B] of log-probabilities [B].

    A weight that is clipped no longer moves the policy: its gradient is 0.

    Source: Horvitz & Thompson 1952; clipped Ionides 2008, "Truncated Importance Sampling".
    """
    weights = torch.exp(log_pi - log_mu)
    return weights if max_weight is None else weights.clamp(max=max_weight)


def ips_value(r: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return mean(w r), scalar: unbiased where mu gave a chance to all that pi does.

    Source: Horvitz & Thompson 1952, "A Generalization of Sampling Without Replacement".
    """
    return (weights * r).mean()


def self_normalized_value(r: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return sum(w r) / sum(w), scalar: never outside of the rewards' range.

    Adding a constant to all rewards adds it to the value, so a policy cannot gain by leaving the
    logged actions (or keeping to them), as it can by ips_value.

    Source: Swaminathan & Joachims 2015, "The Self-Normalized Estimator for Counterfactual
    Learning".
    """
    # Where the policy gives no chance to any logged action there is nothing to learn, and no NaN.
    return (weights * r).sum() / weights.sum().clamp(min=_MIN_SUM)


def doubly_robust_values(
    r: torch.Tensor, weights: torch.Tensor, q_taken: torch.Tensor, v_pi: torch.Tensor
) -> torch.Tensor:
    """Return v_pi(x) + w (r - q(x, a)), [B], whose mean is the policy's value.

    Args:
        r: float [B].
        weights: float [B].
        q_taken: float [B], the reward model's for the logged action.
        v_pi: float [B], its mean over the policy's actions, sum_a pi(a|x) q(x, a).

    Source: Dudik et al. 2011, "Doubly Robust Policy Evaluation and Learning".
    """
    return v_pi + weights * (r - q_taken)
