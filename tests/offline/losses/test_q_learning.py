import math

import pytest
import torch

from replaylake.offline.losses.q_learning import (
    conservative_gap,
    gather_values,
    greedy_values,
    huber,
    quantile_regression,
    td_errors,
)

Q = torch.tensor([[1.0, 5.0, 3.0], [2.0, 0.0, -1.0]])


def test_the_greedy_value_is_the_best_of_the_allowed_actions():
    assert greedy_values(Q).tolist() == [5.0, 2.0]
    mask = torch.tensor([[True, False, True], [False, False, True]])
    assert greedy_values(Q, mask).tolist() == [3.0, -1.0]


def test_a_selector_chooses_and_the_values_judge():
    selector = torch.tensor([[9.0, 0.0, 1.0], [0.0, 1.0, 9.0]])
    assert greedy_values(Q, q_t_selector=selector).tolist() == [1.0, -1.0]
    mask = torch.tensor([[False, True, True], [True, True, False]])
    assert greedy_values(Q, mask, selector).tolist() == [3.0, 0.0]


@pytest.mark.parametrize("selector", [None, Q])
def test_a_termination_may_be_followed_by_no_allowed_action(selector):
    none = torch.zeros(2, 3, dtype=torch.bool)
    v_t = greedy_values(Q, none, selector)
    rewards = torch.tensor([1.0, 2.0])
    errors = td_errors(torch.zeros(2, 3), torch.tensor([0, 1]), rewards, torch.zeros(2), v_t)
    assert errors.tolist() == [1.0, 2.0]


def test_td_errors_by_hand_move_only_the_taken_value():
    q_tm1 = Q.clone().requires_grad_()
    v_t = torch.tensor([10.0, 4.0], requires_grad=True)
    a_tm1 = torch.tensor([2, 0])
    assert gather_values(Q, a_tm1).tolist() == [3.0, 2.0]
    errors = td_errors(q_tm1, a_tm1, torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.0]), v_t)
    # 1 + 0.5 * 10 - 3; -1 + 0 * 4 - 2
    assert errors.tolist() == [3.0, -3.0]
    gradient, of_target = torch.autograd.grad(errors.sum(), [q_tm1, v_t], allow_unused=True)
    assert gradient.tolist() == [[0, 0, -1], [-1, 0, 0]]
    assert of_target is None


def test_huber_is_half_a_square_and_then_linear():
    errors = torch.tensor([-3.0, -0.5, 0.0, 1.0, 2.0])
    assert huber(errors).tolist() == [2.5, 0.125, 0.0, 0.5, 1.5]
    assert huber(errors, 2.0).tolist() == [4.0, 0.125, 0.0, 0.5, 2.0]


def test_the_conservative_gap_by_hand():
    gap = conservative_gap(Q, torch.tensor([1, 2]))
    first = math.log(math.exp(1) + math.exp(5) + math.exp(3)) - 5
    second = math.log(math.exp(2) + math.exp(0) + math.exp(-1)) + 1
    assert gap.tolist() == pytest.approx([first, second], abs=1e-6)
    mask = torch.tensor([[True, True, False], [False, False, True]])
    gap = conservative_gap(Q, torch.tensor([1, 2]), mask)
    assert gap.tolist() == pytest.approx([math.log1p(math.exp(-4)), 0.0], abs=1e-6)


def test_the_quantile_of_a_sample_is_where_the_loss_is_least():
    samples = torch.arange(11.0)[None]
    levels = torch.tensor([[0.25, 0.8]])
    grid = torch.linspace(0, 10, 101)
    for column, quantile in enumerate([2.5, 8.5]):
        losses = [
            float(quantile_regression(x.view(1, 1), levels[:, column : column + 1], samples))
            for x in grid
        ]
        best = grid[int(torch.tensor(losses).argmin())]
        assert float(best) == pytest.approx(quantile, abs=0.51)
