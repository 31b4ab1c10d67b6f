"""By hand and by what must be equal; numbers of other libraries are in test_vectors.py."""

import pytest
import torch

from replaylake.offline.losses.returns import (
    discounted_returns,
    generalized_advantages,
    lambda_returns,
    n_step_returns,
    retrace,
    v_trace,
)


@pytest.fixture(params=[1, 2, 7])
def sequence(request):
    """Rewards, discounts (0 now and then), values of what was acted upon and of what followed."""
    generator = torch.Generator().manual_seed(request.param)
    shape = (4, request.param)
    r_t, v_tm1 = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    discount_t = torch.rand(shape, generator=generator, dtype=torch.float64)
    discount_t[discount_t < 0.2] = 0
    last = torch.randn(4, 1, generator=generator, dtype=torch.float64)
    return r_t, discount_t, v_tm1, torch.cat([v_tm1[:, 1:], last], dim=1)


def test_returns_by_hand_stop_at_a_termination():
    r_t = torch.tensor([[1.0, 2.0, 4.0]])
    discount_t = torch.tensor([[0.5, 0.0, 0.5]])
    assert discounted_returns(r_t, discount_t, torch.tensor([8.0])).tolist() == [[2.0, 2.0, 8.0]]


def test_lambda_0_is_one_step_and_lambda_1_all(sequence):
    r_t, discount_t, _, v_t = sequence
    one = lambda_returns(r_t, discount_t, v_t, 0.0)
    torch.testing.assert_close(one, r_t + discount_t * v_t)
    torch.testing.assert_close(one, n_step_returns(r_t, discount_t, v_t, 1))
    whole = lambda_returns(r_t, discount_t, v_t, 1.0)
    torch.testing.assert_close(whole, discounted_returns(r_t, discount_t, v_t[:, -1]))
    torch.testing.assert_close(whole, n_step_returns(r_t, discount_t, v_t, 9))


def test_two_steps_by_hand():
    r_t, v_t = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[10.0, 20.0, 40.0]])
    discount_t = torch.full((1, 3), 0.5)
    # 1 + (2 + 20 / 2) / 2; 2 + (4 + 40 / 2) / 2; 4 + 40 / 2
    assert n_step_returns(r_t, discount_t, v_t, 2).tolist() == [[7.0, 14.0, 24.0]]


def test_advantages_are_lambda_returns_less_the_value(sequence):
    r_t, discount_t, v_tm1, v_t = sequence
    values = torch.cat([v_tm1, v_t[:, -1:]], dim=1)
    found = generalized_advantages(r_t, discount_t, values, 0.7)
    torch.testing.assert_close(found, lambda_returns(r_t, discount_t, v_t, 0.7) - v_tm1)


def test_on_policy_v_trace_is_the_lambda_return(sequence):
    r_t, discount_t, v_tm1, v_t = sequence
    trace = v_trace(v_tm1, v_t, r_t, discount_t, torch.zeros_like(r_t), lambda_=0.7)
    returns = lambda_returns(r_t, discount_t, v_t, 0.7)
    torch.testing.assert_close(trace.targets, returns)
    torch.testing.assert_close(trace.td_errors, returns - v_tm1)
    torch.testing.assert_close(trace.advantages, returns - v_tm1)


def test_v_trace_learns_nothing_where_the_policy_would_not_have_acted_so(sequence):
    r_t, discount_t, v_tm1, v_t = sequence
    never = torch.full_like(r_t, -torch.inf)
    trace = v_trace(v_tm1, v_t, r_t, discount_t, never)
    torch.testing.assert_close(trace.targets, v_tm1)
    torch.testing.assert_close(trace.advantages, torch.zeros_like(v_tm1))


def test_on_policy_retrace_of_its_own_values_is_the_lambda_return(sequence):
    r_t, discount_t, v_tm1, v_t = sequence
    # Q of the taken action is V: the policy is certain of it.
    found = retrace(v_tm1, v_t, r_t, discount_t, torch.zeros_like(r_t), 0.7)
    torch.testing.assert_close(found, lambda_returns(r_t, discount_t, v_t, 0.7))


def test_retrace_by_hand_cuts_at_an_action_that_is_half_as_likely():
    q_tm1, v_t = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
    r_t, discount_t = torch.tensor([[10.0, 20.0]]), torch.full((1, 2), 0.5)
    # Errors 10 + 1.5 - 1 and 20 + 2 - 2; the second counts 0.5 * min(1, 1/2) as much for the first,
    # whose own ratio does not matter.
    log_rho = torch.tensor([[5.0, 0.5]]).log()
    found = retrace(q_tm1, v_t, r_t, discount_t, log_rho)
    torch.testing.assert_close(found, torch.tensor([[1 + 10.5 + 0.25 * 20, 22.0]]))
