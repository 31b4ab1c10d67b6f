import math

import pytest
import torch

from replaylake.offline.losses.preference import (
    bradley_terry,
    direct_preference,
    identity_preference,
    kahneman_tversky,
)


def test_a_pair_costs_the_log_odds_of_its_order():
    chosen = torch.tensor([0.0, 2.0], requires_grad=True)
    rejected = torch.tensor([0.0, -1.0], requires_grad=True)
    losses = direct_preference(chosen, rejected, 0.5)
    assert losses.tolist() == pytest.approx([math.log(2), math.log(1 + math.exp(-1.5))])
    losses.sum().backward()
    # -beta sigmoid(-margin), and its negative.
    expected = [-0.25, -0.5 / (1 + math.exp(1.5))]
    assert chosen.grad.tolist() == pytest.approx(expected)
    assert rejected.grad.tolist() == pytest.approx([-one for one in expected])


def test_an_identity_preference_costs_the_squared_distance_from_its_margin():
    chosen = torch.tensor([1.0, 2.0], requires_grad=True)
    rejected = torch.tensor([0.5, -3.0])
    # The margin is 1 / (2 * 0.25) = 2: at 0.5 it is missed by 1.5, at 5 it is exceeded by 3.
    losses = identity_preference(chosen, rejected, 0.25)
    assert losses.tolist() == pytest.approx([2.25, 9.0])
    losses.sum().backward()
    assert chosen.grad.tolist() == pytest.approx([-3.0, 6.0])


def test_a_labeled_sequence_costs_what_it_is_short_of_the_divergence():
    log_ratios = torch.tensor([3.0, 3.0, 1.0], requires_grad=True)
    labels = torch.tensor([True, False, True])
    divergence = torch.tensor(1.0, requires_grad=True)
    losses = kahneman_tversky(
        log_ratios, labels, divergence, 0.5, desirable_weight=2.0, undesirable_weight=3.0
    )
    # 0.5 * (3 - 1) = 1 for the first two, 0 for the last one.
    high = 1 / (1 + math.exp(-1))
    assert losses.tolist() == pytest.approx([2 * (1 - high), 3 * high, 2 * 0.5])
    losses.sum().backward()
    slope = 0.5 * high * (1 - high)
    assert log_ratios.grad.tolist() == pytest.approx([-2 * slope, 3 * slope, -2 * 0.5 * 0.25])
    assert divergence.grad is None


def test_scores_of_a_pair_cost_their_log_odds_and_their_distance_from_zero():
    losses = bradley_terry(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 1.0]), 0.1)
    expected = [math.log(1 + math.exp(-1)) + 0.1 * 9, math.log(2) + 0.1 * 4]
    assert losses.tolist() == pytest.approx(expected)
