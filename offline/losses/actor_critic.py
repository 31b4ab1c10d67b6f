"""Actor-critic: what critics, actors and temperatures are fitted to.

Pure functions. Suffixes: `_tm1` is the step acted upon, `_t` the one it led to. Several critics are
the leading dim [num]. Box actions are normalized to [-1, 1]. One value per element of the batch,
unless said otherwise; the algorithm weighs and averages.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as F

_HALF_LN_2PI: Final = 0.5 * math.log(2 * math.pi)


def clipped_double_target(
    r_t: torch.Tensor,
    discount_t: torch.Tensor,
    q_t: torch.Tensor,
    entropy_cost_t: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """Return r + gamma (min_i q_i(s', a') - entropy cost), [B]: what every critic is fitted to.

    Args:
        r_t: float [B], of n steps their discounted sum.
        discount_t: float [B], gamma^n, 0 where the episode terminated.
        q_t: float [num, B], of the target critics.
        entropy_cost_t: float [B], temperature * ln pi(a'|s'), where entropy is rewarded.

    Source: Fujimoto et al. 2018, "Addressing Function Approximation Error in Actor-Critic Methods",
    eq. 10; the entropy Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications",
    eq. 2 and 3.
    """
    return torch.addcmul(r_t, discount_t, q_t.amin(dim=0) - entropy_cost_t)


def soft_values(
    q: torch.Tensor, log_probs: torch.Tensor, temperature: torch.Tensor | float
) -> torch.Tensor:
    """Return sum_a pi(a|s) (min_i q(s, a) - temperature ln pi(a|s)), [B], of discrete actions.

    Args:
        q: float [num, B, A].
        log_probs: float [B, A], ln pi; very negative but finite where an action is forbidden.
        temperature: reward per nat of entropy.

    Source: Christodoulou 2019, "Soft Actor-Critic for Discrete Action Settings", eq. 10; less it is
    what the policy minimizes, eq. 12.
    """
    values = q.amin(dim=0) - temperature * log_probs
    return (torch.exp(log_probs) * values).sum(dim=-1)


def smooth_actions(
    a_t: torch.Tensor, noise: torch.Tensor, sigma: float, clip: float
) -> torch.Tensor:
    """Return the target policy's actions with clipped noise, kept in [-1, 1]; [B, D].

    Args:
        a_t: float [B, D].
        noise: float [B, D], standard normal.
        sigma: its standard deviation, in units of a normalized action.
        clip: the most of it, likewise.

    Source: Fujimoto et al. 2018, algorithm 1, target policy smoothing.
    """
    return (noise * sigma).clamp_(-clip, clip).add_(a_t).clamp_(-1, 1)


def behavior_regularized_value(q_tm1: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return -lambda q(s, pi(s)), [B], with lambda = alpha / mean |q| held constant.

    Args:
        q_tm1: float [B], of one critic at the policy's actions.
        alpha: how much a value counts against an error of 1 in imitation.

    Source: Fujimoto & Gu 2021, "A Minimalist Approach to Offline Reinforcement Learning", section
    5; their mean |q| is that of the logged actions, their code's that of the policy's, as here.
    """
    return q_tm1 * (-alpha / q_tm1.detach().abs().mean())


def expectile_loss(difference: torch.Tensor, expectile: float) -> torch.Tensor:
    """Return |expectile - 1{u < 0}| u^2, element by element.

    Args:
        difference: float, u = q(s, a) - v(s).
        expectile: 0.5 fits the mean, towards 1 the best action that was logged.

    Source: Kostrikov et al. 2021, "Offline Reinforcement Learning with Implicit Q-Learning", eq. 5.
    """
    # u^2 is e (u+)^2 + (1 - e) (u-)^2; the root of the weights goes inside, which saves two passes.
    slope = math.sqrt((1 - expectile) / expectile)
    return F.leaky_relu(difference, slope).square() * expectile


def advantage_weights(
    advantages: torch.Tensor, inverse_temperature: float, max_weight: float
) -> torch.Tensor:
    """Return min(exp(beta A), max_weight), element by element: how much an action is imitated.

    Source: Kostrikov et al. 2021, eq. 7; the clip Peng et al. 2019, "Advantage-Weighted Regression:
    Simple and Scalable Off-Policy Reinforcement Learning".
    """
    return torch.exp(advantages * inverse_temperature).clamp_(max=max_weight)


def normalized_advantage_weights(advantages: torch.Tensor, lam: float) -> torch.Tensor:
    """Return B softmax(A / lam) of the batch, [B]: mean 1, so no clip is needed.

    Source: Nair et al. 2020, "AWAC: Accelerating Online Reinforcement Learning with Offline
    Datasets", eq. 13, its partition function estimated from the batch.
    """
    return torch.softmax(advantages / lam, dim=0) * len(advantages)


def sample_squashed(
    means: torch.Tensor, log_stds: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return actions tanh(mean + std noise) [..., D] and their log-probabilities [...].

    Args:
        means: float [..., D], before the tanh.
        log_stds: float [..., D], likewise.
        noise: float [..., D], standard normal.

    Source: Haarnoja et al. 2018, "Soft Actor-Critic: Off-Policy Maximum Entropy Deep Reinforcement
    Learning with a Stochastic Actor", appendix C, eq. 21, with ln(1 - tanh(u)^2) written as
    2 (ln 2 - u - softplus(-2 u)), which does not underflow.
    """
    u = torch.addcmul(means, torch.exp(log_stds), noise)
    # ln N(u; mean, std) is -noise^2 / 2 - ln std - ln(2 pi) / 2, whatever the mean is.
    log_probs = 2 * (u + F.softplus(-2 * u)) - log_stds - 0.5 * noise.square()
    constant = means.shape[-1] * (_HALF_LN_2PI + 2 * math.log(2))
    return torch.tanh(u), log_probs.sum(dim=-1) - constant


def temperature_loss(
    log_temperature: torch.Tensor, log_probs: torch.Tensor, target_entropy: float
) -> torch.Tensor:
    """Return -temperature (ln pi + target_entropy), [B]; the policy is held constant.

    Args:
        log_temperature: float [].
        log_probs: float [B], of actions that the policy drew.
        target_entropy: nats; -D for actions of D elements.

    Source: Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", eq. 18.
    """
    return -torch.exp(log_temperature) * (log_probs.detach() + target_entropy)


def conservative_gap(
    q_tm1: torch.Tensor, log_probs: torch.Tensor, logged_q_tm1: torch.Tensor
) -> torch.Tensor:
    """Return ln sum_a exp q(s, a), estimated from sampled actions, less q(s, logged a); [num, B].

    Args:
        q_tm1: float [num, B, K], at K actions drawn from any densities.
        log_probs: float [B, K], the densities that they were drawn with, held constant.
        logged_q_tm1: float [num, B].

    Source: Kumar et al. 2020, "Conservative Q-Learning for Offline Reinforcement Learning", eq. 4
    and appendix F: each term is divided by its density; the constant ln K is left out, as it is
    there.
    """
    return torch.logsumexp(q_tm1 - log_probs.detach(), dim=-1) - logged_q_tm1
