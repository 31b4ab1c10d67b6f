"""Estimators that use a model of values: alone, or corrected by importance ratios.

q_t = q(s_t, a_t) of the logged action and v_t, its mean over the target policy's actions, come from
a model fitted elsewhere; rho_0:t as in importance.py. With the right ratios the corrected ones are
right whatever the model is, and the better the model the less they vary. On a one-step log the
sequential forms are the bandit ones: `wdr` is `sndr`.
"""

from __future__ import annotations

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.offline.evaluation.ope.statistic import (
    Statistic,
    mean_of,
    ratio_of,
    ratio_per_step,
    total_of,
)
from replaylake.offline.evaluation.ope.weights import EstimatorInputs, summary


def direct_method(inputs: EstimatorInputs) -> Statistic:
    """(1/n) sum of v(s_0): `dm`; `fqe` with v by fitted Q evaluation.

    As right as the model, whose error its intervals do not know.
    Source: Dudik, Langford & Li 2011, section 2; Le, Voloshin & Yue 2019, algorithm 3.
    """
    _, values = inputs.model
    return mean_of(values[inputs.episodes.offsets[:-1]])


def doubly_robust(inputs: EstimatorInputs) -> Statistic:
    """(1/n) sum over t of gamma^t (rho_0:t-1 v_t + rho_0:t (r_t - q_t)): `dr`.

    The recursion V_t = v_t + rho_t (r_t + gamma V_t+1 - q_t), written out.
    Source: Jiang & Li 2016, eq. 10; of one step Dudik, Langford & Li 2011, eq. 1.
    """
    episodes, weights = inputs.episodes, inputs.weights
    q, v = inputs.model
    rows = weights.previous * v + weights.cumulative * (episodes.rewards - q)
    values = episodes.sum_by_episode(episodes.discounts * rows)
    # Ordered by weight, as wdr has it: what one that is rounded moves.
    moved = float((weights.rounding * np.abs(_corrections(inputs))).sum()) / episodes.num_episodes
    return mean_of(values, weights.worst_step, rounding=moved)


def weighted_doubly_robust(inputs: EstimatorInputs) -> Statistic:
    """`dr` with weights divided by their sum at each step: `wdr`, `sndr`.

    mean of v(s_0) + sum over t of gamma^t (sum of rho_0:t (r_t - q_t + gamma v_t+1)) / (sum of
    rho_0:t), with v_t+1 = 0 past an episode's last step: the definition, ordered by weight.
    Source: Thomas & Brunskill 2016, section 5, WDR; of one step obp 0.4.1's SNDR.
    """
    episodes, weights = inputs.episodes, inputs.weights
    weights.check_any()
    numerators = _corrections(inputs)
    if episodes.is_one_step:
        corrected = ratio_of(
            numerators, weights.final, weights.whole_episodes, rounding=weights.rounding
        )
    else:
        corrected = ratio_per_step(
            episodes, numerators, weights.cumulative, weights.worst_step, weights.rounding
        )
    return total_of(corrected, direct_method(inputs))


def _corrections(inputs: EstimatorInputs) -> Array:
    """Return gamma^t rho_0:t (r_t - q_t + gamma v_t+1), v_t+1 = 0 past the last step: [M]."""
    episodes = inputs.episodes
    q, v = inputs.model
    following = np.append(v[1:], 0.0)
    following[episodes.offsets[1:] - 1] = 0.0
    errors = episodes.rewards - q + episodes.discount * following
    corrections: Array = episodes.discounts * inputs.weights.cumulative * errors
    return corrections


def switch_doubly_robust(inputs: EstimatorInputs) -> Statistic:
    """(1/n) sum of v + rho (r - q) where rho <= clip, v elsewhere: `switch_dr`, one step.

    Where the weight is too large to trust, the model alone speaks.
    Source: Wang, Agarwal & Dudik 2017, section 4, SWITCH-DR.
    """
    final = inputs.weights.final
    return _correct_model(inputs, np.where(final <= inputs.clip, final, 0.0))


def optimistic_shrinkage(inputs: EstimatorInputs) -> Statistic:
    """`dr` with rho shrunk to lambda rho / (rho^2 + lambda), lambda = clip^2: `dr_os`, one step.

    A weight of `clip` counts half. Source: Su, Dimakopoulou, Krishnamurthy & Dudik 2020, "Doubly
    Robust Off-Policy Evaluation with Shrinkage", section 3, optimistic.
    """
    final, square = inputs.weights.final, inputs.clip**2
    return _correct_model(inputs, final * (square / (final**2 + square)))


def _correct_model(inputs: EstimatorInputs, applied: Array) -> Statistic:
    q, v = inputs.model
    corrections = applied * (inputs.episodes.rewards - q)
    moved = float((inputs.weights.rounding * np.abs(corrections)).mean())
    return mean_of(v + corrections, summary(applied), rounding=moved)
