"""Estimators that weight logged rewards by importance ratios, and use no model.

rho_t = pi(a_t | s_t) / mu(a_t | s_t); rho_0:t is their product up to step t; n episodes; G an
episode's discounted return. On a one-step log rho_0:t is rho_0, and the estimators of whole
episodes go by their names from the bandit literature: `ips`, `snips`, `clipped_ips`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.offline.evaluation.ope.logged_episodes import LoggedEpisodes
from replaylake.offline.evaluation.ope.statistic import (
    Bounds,
    Statistic,
    mean_of,
    ratio_of,
    ratio_per_step,
)
from replaylake.offline.evaluation.ope.weights import (
    EstimatorInputs,
    Weights,
    largest_ratio,
    summary,
)


def importance_sampling(inputs: EstimatorInputs) -> Statistic:
    """(1/n) sum of rho_0:T G: `is`, `ips`.

    Unbiased. Source: Horvitz & Thompson 1952; of episodes Precup, Sutton & Singh 2000, section 3.
    """
    episodes, weights = inputs.episodes, inputs.weights
    weights.check_any()
    known = largest_ratio(episodes)
    cap = weights.whole_episodes.max_weight if known is None else known
    bounds = _bounds(episodes, cap, known is not None)
    weighted = weights.final * episodes.returns
    return mean_of(weighted, weights.whole_episodes, bounds, _rounding(weights, weighted))


def clipped_importance_sampling(inputs: EstimatorInputs) -> Statistic:
    """(1/n) sum of min(rho_0:T, clip) G: `clipped_is`, `clipped_ips`.

    Leans towards 0 by what is cut off; with clip = sqrt(n) that vanishes as n grows.
    Source: Ionides 2008, "Truncated Importance Sampling", section 2.
    """
    episodes, weights = inputs.episodes, inputs.weights
    weights.check_any()
    applied = np.minimum(weights.final, inputs.clip)
    bounds = _bounds(episodes, inputs.clip, known_cap=True)
    weighted = applied * episodes.returns
    return mean_of(weighted, summary(applied), bounds, _rounding(weights, weighted))


def weighted_importance_sampling(inputs: EstimatorInputs) -> Statistic:
    """Sum of rho_0:T G / sum of rho_0:T: `wis`, `snips`.

    Consistent, biased by O(1/n), and never outside the returns that were logged.
    Source: Precup, Sutton & Singh 2000, section 3; Swaminathan & Joachims 2015, "The
    Self-Normalized Estimator for Counterfactual Learning", section 5.
    """
    episodes, weights = inputs.episodes, inputs.weights
    weights.check_any()
    spread, returns = weights.whole_episodes, episodes.returns
    ratio = ratio_of(
        weights.final * returns, weights.final, spread, rounding=weights.final_rounding
    )
    # An episode contributes value + w (G - value) / mean w.
    cap = spread.max_weight / float(weights.final.mean())
    low = ratio.value + cap * (float(returns.min()) - ratio.value)
    high = ratio.value + cap * (float(returns.max()) - ratio.value)
    return replace(ratio, bounds=Bounds(low, high, known=False))


def per_decision_importance_sampling(inputs: EstimatorInputs) -> Statistic:
    """(1/n) sum over t of gamma^t rho_0:t r_t: `pdis`.

    Unbiased: a reward is weighted by the actions before it only.
    Source: Precup, Sutton & Singh 2000, section 4.
    """
    episodes, weights = inputs.episodes, inputs.weights
    weights.check_any()
    rewards = episodes.discounts * weights.cumulative * episodes.rewards
    bounds = _bounds(episodes, weights.worst_step.max_weight, known_cap=False)
    moved = float((weights.rounding * np.abs(rewards)).sum()) / episodes.num_episodes
    return mean_of(episodes.sum_by_episode(rewards), weights.worst_step, bounds, moved)


def weighted_per_decision_importance_sampling(inputs: EstimatorInputs) -> Statistic:
    """Sum over t of gamma^t (sum of rho_0:t r_t / sum of rho_0:t): `wpdis`.

    Consistent. Normalized at each step by the weights of that step (also called CWPDIS).
    Source: Thomas 2015, "Safe Reinforcement Learning", chapter 3, on CWPDIS.
    """
    episodes, weights = inputs.episodes, inputs.weights
    weights.check_any()
    rewards = episodes.discounts * weights.cumulative * episodes.rewards
    return ratio_per_step(
        episodes, rewards, weights.cumulative, weights.worst_step, weights.rounding
    )


def _rounding(weights: Weights, weighted: Array) -> float:
    """Return by how much float32 log-probs can have moved the mean of weighted values [E]."""
    return float((weights.final_rounding * np.abs(weighted)).mean())


def _bounds(episodes: LoggedEpisodes, cap: float, known_cap: bool) -> Bounds:
    """Bounds of an episode's weighted rewards, weights in [0, cap]."""
    if episodes.reward_range is not None and episodes.is_one_step:
        low, high = episodes.reward_range
        return Bounds(cap * min(low, 0.0), cap * max(high, 0.0), known_cap)
    rewards = episodes.discounts * episodes.rewards
    low = float(episodes.sum_by_episode(np.minimum(rewards, 0)).min())
    high = float(episodes.sum_by_episode(np.maximum(rewards, 0)).max())
    return Bounds(cap * low, cap * high, known=False)
