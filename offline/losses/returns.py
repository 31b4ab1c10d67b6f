"""Returns: values of sequences [B, T] by recursion from their end. Pure functions.

Suffixes: `_tm1` is the step acted upon, `_t` the one it led to. Column k of r_t, discount_t and v_t
belongs to the transition that step k began: its reward, gamma (0 where it terminated) and the value
of the observation that it led to. Cost: a short loop over T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


def discounted_returns(
    r_t: torch.Tensor, discount_t: torch.Tensor, bootstrap: torch.Tensor
) -> torch.Tensor:
    """Return G_k = r_{k+1} + gamma_{k+1} G_{k+1}, float [B, T], from what follows the last step.

    Args:
        r_t: float [B, T].
        discount_t: float [B, T].
        bootstrap: float [B], the value after the last step.

    Source: Sutton & Barto 2018, "Reinforcement Learning", eq. 3.9, with discounts of each step.
    """
    return lambda_returns(r_t, discount_t, _shift(torch.zeros_like(r_t), bootstrap), 1.0)


def lambda_returns(
    r_t: torch.Tensor,
    discount_t: torch.Tensor,
    v_t: torch.Tensor,
    lambda_: float | torch.Tensor = 1.0,
) -> torch.Tensor:
    """Return G_k = r_{k+1} + gamma_{k+1} ((1 - lambda) v_{k+1} + lambda G_{k+1}), float [B, T].

    Args:
        r_t: float [B, T].
        discount_t: float [B, T].
        v_t: float [B, T]; what follows the last step is worth v_t[:, -1].
        lambda_: 0 to 1, or float [B, T].

    Source: Sutton & Barto 2018, eq. 12.18, with discounts of each step.
    """
    one_step_t = r_t + discount_t * (1 - lambda_) * v_t
    return _scan(one_step_t, (discount_t * lambda_).expand_as(r_t), v_t[:, -1])


def n_step_returns(
    r_t: torch.Tensor, discount_t: torch.Tensor, v_t: torch.Tensor, n: int
) -> torch.Tensor:
    """Return the sum of n discounted rewards and the discounted value after them, float [B, T].

    Near the end of the sequence there are fewer than n, and the last value stands behind them.

    Args:
        r_t: float [B, T].
        discount_t: float [B, T].
        v_t: float [B, T].
        n: 1 or more.

    Source: Sutton & Barto 2018, eq. 7.1. Cost: n operations on all of [B, T].
    """
    num_steps = r_t.shape[1]
    last = torch.arange(num_steps, device=r_t.device)
    returns = v_t[:, (last + n - 1).clamp(max=num_steps - 1)]
    for k in reversed(range(n)):
        # Step t + k is the k-th of the window from t; windows reaching past the end are shorter.
        inside = last + k < num_steps
        at = (last + k).clamp(max=num_steps - 1)
        returns = torch.where(inside, r_t[:, at] + discount_t[:, at] * returns, returns)
    return returns


def generalized_advantages(
    r_t: torch.Tensor, discount_t: torch.Tensor, values: torch.Tensor, lambda_: float | torch.Tensor
) -> torch.Tensor:
    """Return A_k = delta_k + gamma_{k+1} lambda A_{k+1}, delta_k the TD error; float [B, T].

    Args:
        r_t: float [B, T].
        discount_t: float [B, T].
        values: float [B, T + 1], of every observation and of the one after the last step.
        lambda_: 0 to 1, or float [B, T].

    Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation", eq. 16.
    """
    delta_t = r_t + discount_t * values[:, 1:] - values[:, :-1]
    return _scan(delta_t, (discount_t * lambda_).expand_as(r_t), torch.zeros_like(values[:, -1]))


class VTrace(NamedTuple):
    """What V-trace gives of a sequence, each float [B, T].

    targets: vs, what v_tm1 is to become. td_errors: targets - v_tm1. advantages: of the policy
    gradient, clipped importance weight included.
    """

    targets: torch.Tensor
    td_errors: torch.Tensor
    advantages: torch.Tensor


def v_trace(
    v_tm1: torch.Tensor,
    v_t: torch.Tensor,
    r_t: torch.Tensor,
    discount_t: torch.Tensor,
    log_rho_tm1: torch.Tensor,
    *,
    lambda_: float = 1.0,
    clip_rho: float = 1.0,
    clip_pg_rho: float = 1.0,
) -> VTrace:
    """Correct the value targets of a sequence that another policy wrote.

    Args:
        v_tm1: float [B, T], values of the observations acted upon.
        v_t: float [B, T], values of those that followed.
        r_t: float [B, T].
        discount_t: float [B, T].
        log_rho_tm1: float [B, T], ln pi(a|s) - ln mu(a|s).
        lambda_: 0 to 1, on the traces.
        clip_rho: greatest weight of a TD error, the paper's rho-bar; traces are cut at 1.
        clip_pg_rho: greatest weight of an advantage.

    Source: Espeholt et al. 2018, "IMPALA", eq. 1 and section 4.2 (with the lambda of remark 2).
    """
    rho_tm1 = torch.exp(log_rho_tm1)
    trace_tm1 = lambda_ * rho_tm1.clamp(max=1.0)
    delta_tm1 = rho_tm1.clamp(max=clip_rho) * (r_t + discount_t * v_t - v_tm1)
    # vs - V(s) obeys the recursion of remark 1: e_k = delta_k + gamma c_k e_{k+1}.
    errors_tm1 = _scan(delta_tm1, discount_t * trace_tm1, torch.zeros_like(v_tm1[:, -1]))
    targets_tm1 = v_tm1 + errors_tm1
    # Behind the last step stands its value. Before it vs of what followed, mixed as the traces are.
    target_t = _shift(targets_tm1, v_t[:, -1])
    mixed_t = (1 - lambda_) * v_t + lambda_ * target_t
    advantages = rho_tm1.clamp(max=clip_pg_rho) * (r_t + discount_t * mixed_t - v_tm1)
    return VTrace(targets_tm1, errors_tm1, advantages)


def retrace(
    q_tm1: torch.Tensor,
    v_t: torch.Tensor,
    r_t: torch.Tensor,
    discount_t: torch.Tensor,
    log_rho_tm1: torch.Tensor,
    lambda_: float = 1.0,
) -> torch.Tensor:
    """Return Retrace(lambda)'s targets of the taken actions' values, float [B, T].

    Args:
        q_tm1: float [B, T], Q of the actions taken.
        v_t: float [B, T], E_pi Q(s, .) of the observations that followed.
        r_t: float [B, T].
        discount_t: float [B, T].
        log_rho_tm1: float [B, T], ln pi(a|s) - ln mu(a|s) of the actions taken; the first column
            does not matter, as the first action is the one whose value is estimated.
        lambda_: 0 to 1.

    Source: Munos et al. 2016, "Safe and Efficient Off-Policy Reinforcement Learning", eq. 3, with
    traces c = lambda min(1, pi / mu) of the later steps.
    """
    delta_tm1 = r_t + discount_t * v_t - q_tm1
    trace_t = _shift(lambda_ * torch.exp(log_rho_tm1).clamp(max=1.0), torch.zeros_like(q_tm1[:, 0]))
    return q_tm1 + _scan(delta_tm1, discount_t * trace_t, torch.zeros_like(q_tm1[:, -1]))


def _scan(x: torch.Tensor, decay: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return y_k = x_k + decay_k y_{k+1} of [B, T], where `after` [B] follows the last."""
    results = []
    for x_k, decay_k in zip(reversed(x.unbind(1)), reversed(decay.unbind(1)), strict=True):
        after = x_k + decay_k * after
        results.append(after)
    return torch.stack(results[::-1], dim=1)


def _shift(x: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return columns 1 .. T - 1 of [B, T] and then `last` [B]."""
    return torch.cat([x[:, 1:], last[:, None]], dim=1)
