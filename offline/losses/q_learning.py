"""Q-learning: temporal-difference errors and losses of discrete actions. Pure functions.

Suffixes: `_tm1` is the step acted upon, `_t` the one it led to. One value per element of the batch;
the algorithm weighs and averages.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

# Less than any value, yet finite: a terminated step may have no allowed action after it, and its
# discount of 0 times an infinity would be NaN.
_WORST: Final = torch.finfo(torch.float32).min


def greedy_values(
    q_t: torch.Tensor,
    mask_t: torch.Tensor | None = None,
    q_t_selector: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the value of the best allowed action, [B]: max_a q_t, or q_t[argmax_a q_t_selector].

    Args:
        q_t: float [B, A].
        mask_t: bool [B, A], true where allowed; None: all are.
        q_t_selector: float [B, A], whose greedy action is taken in place of q_t's own.

    Source: Mnih et al. 2015, "Human-level control through deep reinforcement learning"; with a
    selector van Hasselt et al. 2016, "Deep Reinforcement Learning with Double Q-learning", eq. 4.
    """
    if q_t_selector is None:
        return _mask_forbidden(q_t, mask_t).amax(dim=-1)
    a_t = _mask_forbidden(q_t_selector, mask_t).argmax(dim=-1, keepdim=True)
    return q_t.gather(-1, a_t).squeeze(-1)


def gather_values(q_tm1: torch.Tensor, a_tm1: torch.Tensor) -> torch.Tensor:
    """Return the values of the actions taken: of float [B, A] at int64 [B], float [B]."""
    return q_tm1.gather(-1, a_tm1.unsqueeze(-1)).squeeze(-1)


def td_errors(
    q_tm1: torch.Tensor,
    a_tm1: torch.Tensor,
    r_t: torch.Tensor,
    discount_t: torch.Tensor,
    v_t: torch.Tensor,
) -> torch.Tensor:
    """Return r + gamma v - q(s, a), [B]; the target r + gamma v is held constant.

    Args:
        q_tm1: float [B, A].
        a_tm1: int64 [B], in 0 .. A - 1.
        r_t: float [B]; of n steps their discounted sum.
        discount_t: float [B]; of n steps gamma^n.
        v_t: float [B], the value of what followed, such as greedy_values.

    Source: Watkins & Dayan 1992, "Q-learning", eq. 1.
    """
    target_tm1 = torch.addcmul(r_t, discount_t, v_t).detach()
    return target_tm1 - gather_values(q_tm1, a_tm1)


def huber(errors: torch.Tensor, delta: float = 1.0) -> torch.Tensor:
    """Return 0.5 x^2 where |x| < delta, else delta (|x| - 0.5 delta), element by element.

    Source: Huber 1964, "Robust Estimation of a Location Parameter"; in DQN Mnih et al. 2015.
    """
    return F.huber_loss(errors, torch.zeros_like(errors), reduction="none", delta=delta)


def conservative_gap(
    q_tm1: torch.Tensor, a_tm1: torch.Tensor, mask_tm1: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ln sum_a exp q(s, a) - q(s, logged a), [B], at least 0 where the action was allowed.

    Args:
        q_tm1: float [B, A].
        a_tm1: int64 [B], in 0 .. A - 1.
        mask_tm1: bool [B, A], the actions that the sum is over; None: all.

    Source: Kumar et al. 2020, "Conservative Q-Learning for Offline Reinforcement Learning", eq. 4.
    """
    # The cross-entropy of a softmax over the values is just that.
    return F.cross_entropy(_mask_forbidden(q_tm1, mask_tm1), a_tm1, reduction="none")


def quantile_regression(
    quantiles_tm1: torch.Tensor,
    tau_tm1: torch.Tensor,
    samples_t: torch.Tensor,
    huber_delta: float = 0.0,
) -> torch.Tensor:
    """Return sum_i mean_j |tau_i - 1{u < 0}| L(u), u = sample_j - quantile_i; [B].

    Args:
        quantiles_tm1: float [B, N], what is fitted.
        tau_tm1: float [B, N], 0 to 1, their levels.
        samples_t: float [B, M] of the target distribution, held constant.
        huber_delta: L is Huber's loss of this delta, or |u| where it is 0.

    Source: Dabney et al. 2018, "Distributional Reinforcement Learning with Quantile Regression",
    eq. 8 and 10.
    """
    u = samples_t.detach()[:, None, :] - quantiles_tm1[:, :, None]
    weights = (tau_tm1[:, :, None] - (u.detach() < 0).to(u.dtype)).abs()
    losses = huber(u, huber_delta) if huber_delta > 0 else u.abs()
    return (weights * losses).mean(dim=-1).sum(dim=-1)


def _mask_forbidden(q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return q if mask is None else q.masked_fill(~mask, _WORST)
