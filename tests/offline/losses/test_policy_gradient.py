import math

import pytest
import torch

from replaylake.offline.losses.policy_gradient import (
    clipped_surrogate,
    policy_gradient,
    value_loss,
)

LN2 = math.log(2)


def test_a_policy_gradient_is_the_advantage_times_the_score():
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    losses = policy_gradient(log_probs, torch.tensor([3.0, -0.5]))
    assert losses.tolist() == [3.0, -1.0]
    losses.sum().backward()
    assert log_probs.grad.tolist() == [-3.0, 0.5]


def test_the_surrogate_is_clipped_where_going_on_would_pay():
    # Ratios 2, 2, 1/2, 1/2 with advantages 1, -1, 1, -1, clip 0.2:
    # min(2, 1.2), min(-2, -1.2), min(0.5, 0.8), min(-0.5, -0.8), and the sign of a loss.
    log_rho = torch.tensor([LN2, LN2, -LN2, -LN2], requires_grad=True)
    losses = clipped_surrogate(log_rho, torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2)
    assert losses.tolist() == pytest.approx([-1.2, 2.0, -0.5, 0.8])
    losses.sum().backward()
    # Beyond the clip nothing moves; the way back is free: d(-rho A) / d ln rho = -rho A.
    assert log_rho.grad.tolist() == pytest.approx([0.0, 2.0, -0.5, 0.0])


def test_at_a_ratio_of_one_the_surrogate_has_the_policy_gradient():
    log_rho = torch.zeros(2, requires_grad=True)
    clipped_surrogate(log_rho, torch.tensor([3.0, -0.5]), 0.2).sum().backward()
    assert log_rho.grad.tolist() == [-3.0, 0.5]


def test_a_value_costs_half_its_squared_error():
    v, target = torch.tensor([1.0, 4.0]), torch.tensor([3.0, 4.0])
    assert value_loss(v, target).tolist() == [2.0, 0.0]
    assert value_loss(v, target, torch.zeros(2)).tolist() == [2.0, 0.0]


def test_a_clipped_value_costs_the_greater_error():
    before = torch.tensor([0.0, 0.0, 0.0])
    v = torch.tensor([2.0, 2.0, 0.1], requires_grad=True)
    target = torch.tensor([2.0, 1.0, 1.0])
    # Clipped to 0.5, 0.5 and 0.1: errors max(0, 1.5), max(1, 0.5) and 0.9.
    losses = value_loss(v, target, before, 0.5)
    assert losses.tolist() == pytest.approx([1.125, 0.5, 0.405])
    losses.sum().backward()
    assert v.grad.tolist() == pytest.approx([0.0, 1.0, -0.9])
