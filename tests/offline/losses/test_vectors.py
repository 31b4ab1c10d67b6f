"""Our losses give the numbers of other libraries' own tests, within those tests' tolerances."""

import json

import numpy as np
import pytest
import torch

from replaylake.offline.losses.bandit import (
    importance_weights,
    ips_value,
    self_normalized_value,
)
from replaylake.offline.losses.q_learning import greedy_values, quantile_regression, td_errors
from replaylake.offline.losses.returns import (
    discounted_returns,
    generalized_advantages,
    lambda_returns,
    n_step_returns,
    v_trace,
)

# Of replay and of its rate limiter, not of learning: tests/datastore/replay/kernels/test_sum_tree,
# tests/datastore/replay/selectors/test_prioritized, and the rate limiter's own.
ELSEWHERE = {
    "per_sample_distribution",
    "per_all_zero_is_uniform",
    "per_rejects_bad_priorities",
    "sum_tree_query",
    "rate_limiter_scenarios",
}


def n_step_transitions(n, rewards, discounts, states, actions):
    """The accumulator's rows as n-step returns: over nothing, and of values of 1 alone."""
    # The first reward and discount are dm_env's, of no step.
    r_t, discount_t = rewards[None, 1:], discounts[None, 1:]
    zeros = torch.zeros_like(r_t)
    num = len(states) - int(n)
    return {
        "s_tm1": states[:num],
        "s_t": states[int(n) :],
        "a_tm1": actions[:num],
        "discount": n_step_returns(zeros, discount_t, zeros + 1, int(n))[0, :num],
        "reward": n_step_returns(r_t, discount_t, zeros, int(n))[0, :num],
    }


def rlax_v_trace(behavior_logits, target_logits, actions, r_t, discount_t, v_tm1, bootstrap, **k):
    pi, mu = (torch.log_softmax(x, -1) for x in (target_logits, behavior_logits))
    log_rhos = (pi - mu).gather(-1, actions.long()[..., None])[..., 0]
    v_t = torch.cat([v_tm1[:, 1:], bootstrap[:, None]], dim=1)
    trace = v_trace(v_tm1, v_t, r_t, discount_t, log_rhos, **k)
    return {"td_error": trace.td_errors, "pg_advantage": trace.advantages}


def impala_v_trace(
    log_rhos, discounts, rewards, values, bootstrap_value, clip_rho_threshold, clip_pg_rho_threshold
):
    # [T, B] there.
    v_t = torch.cat([values[1:], bootstrap_value[None]])
    sequences = [x.T for x in (values, v_t, rewards, discounts, log_rhos)]
    trace = v_trace(*sequences, clip_rho=clip_rho_threshold, clip_pg_rho=clip_pg_rho_threshold)
    return {"vs": trace.targets.T, "pg_advantages": trace.advantages.T}


def decayed_sum(sequence, decays, bootstrap):
    return discounted_returns(sequence, decays, bootstrap)


def q_learning(q_tm1, a_tm1, r_t, discount_t, q_t):
    return td_errors(q_tm1, a_tm1.long(), r_t, discount_t, greedy_values(q_t))


def double_q_learning(q_tm1, a_tm1, r_t, discount_t, q_t_value, q_t_selector):
    v_t = greedy_values(q_t_value, q_t_selector=q_t_selector)
    return td_errors(q_tm1, a_tm1.long(), r_t, discount_t, v_t)


def quantiles(dist_src, tau_src, dist_target):
    return {
        f"huber{delta}": quantile_regression(dist_src, tau_src, dist_target, delta)
        for delta in (0, 2)
    }


def constant_bandit(cases):
    found = {"ips": [], "snips": []}
    for case in cases:
        rewards = torch.full((case["n"],), float(case["r"]))
        log_pi, log_mu = (torch.tensor(float(case[key])).log() for key in ("p_pred", "p_log"))
        weights = importance_weights(log_pi, log_mu).expand_as(rewards)
        found["ips"].append(ips_value(rewards, weights))
        found["snips"].append(self_normalized_value(rewards, weights))
    return {name: torch.stack(values) for name, values in found.items()}


OURS = {
    "lambda_returns": lambda_returns,
    "discounted_returns": discounted_returns,
    "scan_discounted_sum_reverse": decayed_sum,
    "n_step_bootstrapped_returns_n5": n_step_returns,
    "n_step_bootstrapped_returns_n7": n_step_returns,
    "n_step_transitions_n3": n_step_transitions,
    "truncated_gae_lambda1.0": generalized_advantages,
    "truncated_gae_lambda0.7": generalized_advantages,
    "vtrace_td_error_and_advantage": rlax_v_trace,
    "vtrace_from_importance_weights_B1": impala_v_trace,
    "q_learning_td": q_learning,
    "double_q_learning_td": double_q_learning,
    "quantile_regression_loss": quantiles,
    "ips_snips_constant": constant_bandit,
}


def tensors(inputs):
    if not isinstance(inputs, dict):
        return inputs
    return {
        name: torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
        for name, value in inputs.items()
    }


@pytest.fixture(scope="module")
def vectors(shared_data):
    return {
        vector["id"]: vector for vector in json.loads((shared_data / "vectors.json").read_text())
    }


@pytest.mark.parametrize("name", OURS)
def test_ours_are_theirs(vectors, name):
    vector = vectors[name]
    inputs = tensors(vector["inputs"])
    found = OURS[name](**inputs) if isinstance(inputs, dict) else OURS[name](inputs)
    expected = vector["expected"]
    if not isinstance(expected, dict):
        found, expected = {"": found}, {"": expected}
    tolerance = {key: vector[key] for key in ("rtol", "atol") if key in vector}
    tolerance = {"rtol": 0, "atol": 0, **tolerance} if tolerance else {"rtol": 1e-6, "atol": 1e-6}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(found[key].numpy(), value, **tolerance, err_msg=key)


def test_every_vector_is_tested(vectors):
    assert vectors.keys() == OURS.keys() | ELSEWHERE
