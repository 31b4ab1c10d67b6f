"""Losses: pure functions of tensors, one value per element of the batch.

Suffixes: `_tm1` is the step acted upon, `_t` the one it led to. No reduction here: the algorithm
weighs and averages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F


def categorical_nll(
    logits_tm1: torch.Tensor, a_tm1: torch.Tensor, mask_tm1: torch.Tensor | None = None
) -> torch.Tensor:
    """Return -ln pi(a|s) of a softmax policy, [B].

    Args:
        logits_tm1: float [B, A].
        a_tm1: int64 [B], in 0 .. A - 1.
        mask_tm1: bool [B, A], true where allowed; a disallowed action has probability 0, so the
            loss of one that was taken all the same is infinite.

    Source: Pomerleau 1991, "Efficient Training of Artificial Neural Networks for Autonomous
    Navigation": imitation as classification; the loss is the maximum-likelihood one.
    """
    if mask_tm1 is not None:
        logits_tm1 = logits_tm1.masked_fill(~mask_tm1, -math.inf)
    return F.cross_entropy(logits_tm1, a_tm1, reduction="none")


def multi_categorical_nll(
    logits_tm1: torch.Tensor, a_tm1: torch.Tensor, sizes: Sequence[int]
) -> torch.Tensor:
    """Return -ln pi(a|s) of independent softmax policies, one for each element of an action, [B].

    Args:
        logits_tm1: float [B, sum of sizes], one element's after another's.
        a_tm1: int64 [B, K], element k in 0 .. sizes[k] - 1.
        sizes: how many values each element has.
    """
    each = zip(torch.split(logits_tm1, list(sizes), dim=1), a_tm1.unbind(dim=1), strict=True)
    return torch.stack([categorical_nll(logits, a) for logits, a in each]).sum(dim=0)


def gaussian_nll(
    means_tm1: torch.Tensor,
    log_stds_tm1: torch.Tensor,
    a_tm1: torch.Tensor,
    beta: float = 0.0,
) -> torch.Tensor:
    """Return -ln N(a; mean, std^2) summed over the action's elements, [B].

    With beta > 0 each element is weighted by std^(2 beta), held constant: beta 1 gives the mean the
    gradient of a squared error, 0 that of the likelihood, which stops learning wherever the std was
    fitted small before the mean was right.

    Args:
        means_tm1: float [B, D].
        log_stds_tm1: float [B, D].
        a_tm1: float [B, D], in the units of the means.
        beta: 0 to 1.

    Source: Nix & Weigend 1994, "Estimating the Mean and Variance of the Target Probability
    Distribution", with its constant; beta Seitzer et al. 2022, "On the Pitfalls of Heteroscedastic
    Uncertainty Estimation with Probabilistic Neural Networks", beta-NLL.
    """
    z_tm1 = (a_tm1 - means_tm1) * torch.exp(-log_stds_tm1)
    nll_tm1 = 0.5 * z_tm1**2 + log_stds_tm1 + 0.5 * math.log(2 * math.pi)
    if beta:
        nll_tm1 = nll_tm1 * torch.exp(2 * beta * log_stds_tm1.detach())
    return nll_tm1.sum(dim=-1)


def squared_error(predicted_tm1: torch.Tensor, a_tm1: torch.Tensor) -> torch.Tensor:
    """Return the squared error averaged over the action's elements; float [B, D] to [B].

    Source: Fujimoto & Gu 2021, "A Minimalist Approach to Offline Reinforcement Learning", section
    5, its behavior cloning term.
    """
    return ((predicted_tm1 - a_tm1) ** 2).mean(dim=-1)
