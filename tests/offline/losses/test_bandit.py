import numpy as np
import pytest
import torch

from replaylake.offline.losses.bandit import (
    doubly_robust_values,
    importance_weights,
    ips_value,
    self_normalized_value,
)


def test_values_by_hand():
    log_pi, log_mu = torch.tensor([0.5, 0.1]).log(), torch.tensor([0.25, 0.5]).log()
    weights = importance_weights(log_pi, log_mu)
    assert weights.tolist() == pytest.approx([2.0, 0.2])
    r = torch.tensor([1.0, 10.0])
    assert float(ips_value(r, weights)) == pytest.approx(2.0)
    assert float(self_normalized_value(r, weights)) == pytest.approx(4 / 2.2)
    q_taken, v_pi = torch.tensor([0.5, 8.0]), torch.tensor([0.7, 3.0])
    # 0.7 + 2 * 0.5; 3 + 0.2 * 2
    values = doubly_robust_values(r, weights, q_taken, v_pi)
    assert values.tolist() == pytest.approx([1.7, 3.4])


def test_a_constant_added_to_all_rewards_moves_the_self_normalized_value_by_it():
    weights, r = torch.tensor([2.0, 0.2, 0.7]), torch.tensor([1.0, 10.0, 0.0])
    before, after = (float(self_normalized_value(x, weights)) for x in (r, r + 5))
    assert after - before == pytest.approx(5.0)


def test_a_clipped_row_no_longer_moves_the_policy():
    log_pi = torch.tensor([0.0, 0.0], requires_grad=True)
    weights = importance_weights(log_pi, torch.tensor([-3.0, -1.0]), 10.0)
    assert weights.tolist() == pytest.approx([10.0, np.e])
    gradient = torch.autograd.grad(weights.sum(), log_pi)[0]
    assert gradient.tolist() == pytest.approx([0.0, np.e])


def test_either_half_of_doubly_robust_suffices():
    """Over all contexts, actions and rewards of a small problem, each with its chance."""
    mu = torch.tensor([[0.2, 0.8], [0.5, 0.5]], dtype=torch.float64)
    pi = torch.tensor([[0.9, 0.1], [0.3, 0.7]], dtype=torch.float64)
    means = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)
    truth = float((pi * means).sum() / 2)
    wrong_model = means + torch.tensor([[3.0, -1.0], [0.5, 2.0]], dtype=torch.float64)
    wrong_mu = torch.full_like(mu, 0.5)
    for q, assumed in ((wrong_model, mu), (means, wrong_mu)):
        weights = importance_weights(pi.log(), assumed.log())
        values = doubly_robust_values(means, weights, q, (pi * q).sum(dim=1, keepdim=True))
        assert float((mu * values).sum() / 2) == pytest.approx(truth)
