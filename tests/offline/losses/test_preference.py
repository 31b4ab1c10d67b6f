import math

import pytest
import torch

from replaylake.offline.losses.preference import direct_preference


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
