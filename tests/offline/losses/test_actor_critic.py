import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from replaylake.offline.losses.actor_critic import (
    advantage_weights,
    behavior_regularized_value,
    clipped_double_target,
    conservative_gap,
    expectile_loss,
    normalized_advantage_weights,
    sample_squashed,
    smooth_actions,
    temperature_loss,
)


def close(found, *expected, **tolerance):
    torch.testing.assert_close(found, torch.tensor(expected), **tolerance)


def test_clipped_double_target_takes_the_lesser_critic_and_stops_at_an_end():
    r, discount = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 0.5, 0.0])
    q = torch.tensor([[4.0, -2.0, 9.0], [6.0, -6.0, 8.0]])
    close(clipped_double_target(r, discount, q), 1 + 0.5 * 4, 2 - 0.5 * 6, 3.0)


def test_clipped_double_target_charges_for_certainty():
    r, discount = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0])
    q, cost = torch.tensor([[4.0, 1.0]]), torch.tensor([-3.0, 7.0])
    close(clipped_double_target(r, discount, q, cost), 1 + 0.5 * (4 + 3), 2.0)


def test_smoothed_actions_clip_the_noise_then_the_action():
    actions = torch.tensor([[0.0, 0.0, 0.9, -0.9]])
    noise = torch.tensor([[1.0, 10.0, 2.0, -1.0]])
    given = noise.clone()
    # 0.2 x noise is 0.2, 2, 0.4, -0.2; at most 0.3 of each is taken.
    close(smooth_actions(actions, noise, 0.2, 0.3)[0], 0.2, 0.3, 1.0, -1.0)
    torch.testing.assert_close(noise, given)


def test_behavior_regularized_value_scales_by_the_mean_magnitude():
    q = torch.tensor([1.0, -3.0], requires_grad=True)
    # mean |q| = 2, alpha / 2 = 1.25
    loss = behavior_regularized_value(q, 2.5)
    close(loss, -1.25, 3.75)
    loss.sum().backward()
    close(q.grad, -1.25, -1.25)  # lambda is held constant


def test_expectile_loss_weighs_above_and_below():
    u = torch.tensor([2.0, -2.0, 0.0], requires_grad=True)
    loss = expectile_loss(u, 0.7)
    close(loss, 0.7 * 4, 0.3 * 4, 0.0)
    loss.sum().backward()
    close(u.grad, 2 * 0.7 * 2, -2 * 0.3 * 2, 0.0)


def test_the_expectile_is_where_the_loss_is_least():
    # Of the values 0 and 1 the 0.9-expectile is 0.9: 0.9 (1 - v) = 0.1 v.
    v = torch.linspace(0, 1, 1001)
    losses = expectile_loss(0 - v, 0.9) + expectile_loss(1 - v, 0.9)
    assert v[losses.argmin()].item() == pytest.approx(0.9, abs=1e-3)


def test_advantage_weights_are_exponential_and_clipped():
    a = torch.tensor([0.0, math.log(2), -math.log(2), 50.0])
    close(advantage_weights(a, 3.0, 100.0), 1.0, 8.0, 1 / 8, 100.0)


def test_normalized_advantage_weights_have_mean_one():
    a = torch.tensor([math.log(1), math.log(3)])
    # softmax is 1/4, 3/4; at lambda 1/2 the ratio is 9: 1/10, 9/10.
    close(normalized_advantage_weights(a, 1.0), 0.5, 1.5)
    close(normalized_advantage_weights(a, 0.5), 0.2, 1.8)


def test_squashed_sample_of_the_mode_by_hand():
    # u = 0.5: the density is 1 / (std sqrt(2 pi)) / (1 - tanh(0.5)^2).
    mean, log_std = torch.tensor([[0.5]]), torch.tensor([[math.log(0.1)]])
    actions, log_probs = sample_squashed(mean, log_std, torch.zeros(1, 1))
    tanh = math.tanh(0.5)
    expected = -math.log(0.1 * math.sqrt(2 * math.pi)) - math.log(1 - tanh**2)
    close(actions, [tanh])
    close(log_probs, expected)


def test_squashed_sample_is_torchs_transformed_normal():
    generator = torch.Generator().manual_seed(0)
    means, log_stds, noise = torch.randn(3, 50, 2, generator=generator)
    means, log_stds = means.requires_grad_(), (0.3 * log_stds).requires_grad_()
    actions, log_probs = sample_squashed(means, log_stds, noise)
    law = TransformedDistribution(Normal(means, log_stds.exp()), TanhTransform(cache_size=1))
    drawn = law.transforms[0](means + log_stds.exp() * noise)
    torch.testing.assert_close(actions, drawn)
    expected = law.log_prob(drawn).sum(-1)
    torch.testing.assert_close(log_probs, expected, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(log_probs.sum(), (means, log_stds))
    wanted = torch.autograd.grad(expected.sum(), (means, log_stds))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_squashed_sample_far_out_stays_finite():
    _, log_probs = sample_squashed(torch.tensor([[40.0]]), torch.zeros(1, 1), torch.zeros(1, 1))
    # 1 - tanh(40)^2 is 4 exp(-80) to all digits: ln of it is ln 4 - 80.
    close(log_probs, -0.5 * math.log(2 * math.pi) + 80 - math.log(4))


def test_temperature_rises_where_entropy_is_below_its_target():
    log_temperature = torch.tensor(math.log(2.0), requires_grad=True)
    log_probs = torch.tensor([3.0, -1.0], requires_grad=True)
    loss = temperature_loss(log_temperature, log_probs, -1.0)
    close(loss, -2 * (3 - 1), -2 * (-1 - 1.0))
    loss[0].backward()
    assert log_temperature.grad.item() == pytest.approx(-4.0)  # a step down raises it
    assert log_probs.grad is None


def test_conservative_gap_divides_by_the_densities():
    # exp(q) / density: 2 / 0.5 + 3 / 0.25 = 16; the logged action has e.
    q = torch.tensor([[[math.log(2), math.log(3)]]])
    log_probs = torch.tensor([[math.log(0.5), math.log(0.25)]])
    gap = conservative_gap(q, log_probs, torch.tensor([[1.0]]))
    close(gap, [math.log(16) - 1])


def test_conservative_gap_estimates_the_integral():
    # q(a) = a over [-1, 1]: the integral of exp(a) is e - 1/e; the mean over K samples, K times.
    rng = np.random.default_rng(0)
    a = torch.from_numpy(rng.uniform(-1, 1, (1, 1, 100_000)).astype(np.float32))
    gap = conservative_gap(a, torch.full((1, 100_000), math.log(0.5)), torch.zeros(1, 1))
    expected = math.log(math.e - 1 / math.e) + math.log(100_000)
    assert gap.item() == pytest.approx(expected, abs=0.01)
