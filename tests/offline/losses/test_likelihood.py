import math

import pytest
import torch

from replaylake.offline.losses.likelihood import categorical_nll, gaussian_nll, squared_error


def test_categorical_nll_of_known_probabilities():
    # softmax(ln 1, ln 2, ln 5) = 1/8, 2/8, 5/8.
    logits = torch.log(torch.tensor([[1.0, 2.0, 5.0], [1.0, 2.0, 5.0]]))
    loss = categorical_nll(logits, torch.tensor([1, 2]))
    torch.testing.assert_close(loss, torch.tensor([math.log(4), math.log(8 / 5)]))


def test_categorical_nll_renormalizes_over_allowed_actions():
    # Of 1, 2, 5 the last is masked: 2 / 3 remains.
    logits = torch.log(torch.tensor([[1.0, 2.0, 5.0]]))
    mask = torch.tensor([[True, True, False]])
    loss = categorical_nll(logits, torch.tensor([1]), mask)
    torch.testing.assert_close(loss, torch.tensor([math.log(3 / 2)]))


def test_categorical_nll_of_a_masked_action_is_infinite():
    mask = torch.tensor([[True, False]])
    assert categorical_nll(torch.zeros(1, 2), torch.tensor([1]), mask).item() == math.inf


def test_masked_logits_get_no_gradient():
    logits = torch.zeros(1, 3, requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    categorical_nll(logits, torch.tensor([0]), mask).sum().backward()
    # softmax - onehot over the two allowed: -1/2, 1/2.
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.5, 0.0]]))


def test_gaussian_nll_by_hand():
    # Two elements: z = (3 - 1) / 2 = 1 and z = 0 with std 1.
    loss = gaussian_nll(
        torch.tensor([[1.0, 5.0]]), torch.tensor([[math.log(2), 0.0]]), torch.tensor([[3.0, 5.0]])
    )
    expected = 0.5 + math.log(2) + math.log(2 * math.pi)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_gaussian_nll_agrees_with_torchs_own_density():
    generator = torch.Generator().manual_seed(0)
    means, log_stds, actions = (torch.randn(8, 3, generator=generator) for _ in range(3))
    density = torch.distributions.Normal(means, log_stds.exp())
    torch.testing.assert_close(
        gaussian_nll(means, log_stds, actions), -density.log_prob(actions).sum(dim=-1)
    )


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_beta_weighs_the_gradient_of_the_mean_by_the_variance(beta):
    # d nll / d mean = (mean - a) / std^2 = (1 - 3) / 16, times std^(2 beta) = 4^(2 beta).
    means = torch.tensor([[1.0]], requires_grad=True)
    log_stds = torch.tensor([[math.log(4)]], requires_grad=True)
    gaussian_nll(means, log_stds, torch.tensor([[3.0]]), beta).sum().backward()
    assert means.grad.item() == pytest.approx(-2 / 16 * 4 ** (2 * beta), rel=1e-6)
    # d nll / d ln std = 1 - z^2 = 1 - 1/4; the weight is held constant.
    assert log_stds.grad.item() == pytest.approx(0.75 * 4 ** (2 * beta), rel=1e-6)


def test_squared_error_is_the_mean_over_elements():
    loss = squared_error(torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[0.0, 4.0], [0, 0]]))
    torch.testing.assert_close(loss, torch.tensor([2.5, 0.0]))
