import math

import pytest
import torch

from replaylake.offline.losses.token_policy_gradient import (
    group_advantages,
    importance_weights,
    kl_penalty,
    reduce_tokens,
    token_surrogate,
)

LN2, NAN = math.log(2), float("nan")
RETURNS = torch.tensor([1.0, 0.0, 0.0, 3.0, 2.0, 7.0])
GROUPS = torch.tensor([5, 5, 5, 2, 2, -1])
MASK = torch.tensor([[False, True, True, False], [True, False, True, True]])


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        # The mean of the first group is 1/3, its variance ((2/3)^2 + 2 (1/3)^2) / 2 = 1/3.
        ("group_mean", [2 / 3, -1 / 3, -1 / 3, 0.5, -0.5, 0.0]),
        (
            "group_norm",
            [
                *(one / (math.sqrt(1 / 3) + 1e-4) for one in (2 / 3, -1 / 3, -1 / 3)),
                0.5 / (math.sqrt(0.5) + 1e-4),
                -0.5 / (math.sqrt(0.5) + 1e-4),
                0.0,
            ],
        ),
        # 1 - (0 + 0) / 2, 0 - (1 + 0) / 2, ..., 3 - 2, 2 - 3, and none to compare with.
        ("leave_one_out", [1.0, -0.5, -0.5, 1.0, -1.0, 0.0]),
    ],
)
def test_advantages_are_over_the_samples_of_one_prompt(baseline, expected):
    assert group_advantages(RETURNS, GROUPS, baseline).tolist() == pytest.approx(expected, abs=1e-6)


def test_advantages_over_the_batch_disregard_groups():
    found = group_advantages(RETURNS, GROUPS, "batch_norm")
    mean = 13 / 6
    spread = math.sqrt(sum((one - mean) ** 2 for one in RETURNS.tolist()) / 5)
    assert found.tolist() == pytest.approx(
        [(one - mean) / (spread + 1e-4) for one in RETURNS.tolist()], abs=1e-6
    )
    assert group_advantages(RETURNS[:1], GROUPS[:1], "batch_norm").tolist() == [0.0]


def test_sequences_without_a_group_are_not_one_group():
    found = group_advantages(torch.tensor([1.0, 3.0]), torch.tensor([-1, -1]), "group_mean")
    assert found.tolist() == [0.0, 0.0]


def test_an_episode_counts_once_whatever_its_branches():
    # Episode 4 has three branches and a return of 1; the other of its group 0.
    returns = torch.tensor([1.0, 0.0, 1.0, 1.0, 5.0])
    groups = torch.tensor([7, 7, 7, 7, -1])
    episodes = torch.tensor([4, 2, 4, 4, 9])
    for baseline, expected in (
        ("leave_one_out", [1.0, -1.0, 1.0, 1.0, 0.0]),
        ("group_mean", [0.5, -0.5, 0.5, 0.5, 0.0]),
    ):
        found = group_advantages(returns, groups, baseline, episodes)
        assert found.tolist() == pytest.approx(expected)
    whole = group_advantages(returns, groups, "batch_norm", episodes)
    assert whole[[0, 1, 4]].tolist() == pytest.approx(
        group_advantages(torch.tensor([1.0, 0.0, 5.0]), groups[:3], "batch_norm").tolist()
    )


def test_a_group_of_equal_returns_has_no_advantages():
    for baseline in ("group_norm", "group_mean", "leave_one_out", "batch_norm"):
        found = group_advantages(torch.full((4,), 0.1), torch.zeros(4).long(), baseline)
        assert found.abs().max() < 1e-3


def test_weights_by_token_are_truncated_or_masked():
    # Ratios 4, 1/2 of the first sequence; 2, 1, 1/4 of the second.
    log_ratios = torch.tensor([[NAN, 2 * LN2, -LN2, NAN], [LN2, NAN, 0.0, -2 * LN2]])
    truncated = importance_weights(log_ratios, MASK, high=2.0)
    assert truncated.tolist() == [
        pytest.approx([0.0, 2.0, 0.5, 0.0]),
        pytest.approx([2.0, 0.0, 1.0, 0.25]),
    ]
    masked = importance_weights(log_ratios, MASK, correction="mask", low=0.5, high=2.0)
    assert masked.tolist() == [
        pytest.approx([0.0, 0.0, 0.5, 0.0]),
        pytest.approx([2.0, 0.0, 1.0, 0.0]),
    ]
    none = importance_weights(log_ratios, MASK, correction="none")
    assert none.tolist() == MASK.float().tolist()


def test_weights_by_sequence_are_the_product_or_the_geometric_mean():
    log_ratios = torch.tensor([[NAN, 2 * LN2, -LN2, NAN], [LN2, NAN, 0.0, -2 * LN2]])
    # Products 2 and 1/2, of two and three tokens.
    product = importance_weights(log_ratios, MASK, level="sequence", high=1.5)
    assert product.tolist() == [
        pytest.approx([0.0, 1.5, 1.5, 0.0]),
        pytest.approx([0.5, 0.0, 0.5, 0.5]),
    ]
    mean = importance_weights(log_ratios, MASK, level="geometric", high=10.0)
    assert mean[0].tolist() == pytest.approx([0.0, 2**0.5, 2**0.5, 0.0])
    assert mean[1].tolist() == pytest.approx([2 ** (-1 / 3), 0.0, 2 ** (-1 / 3), 2 ** (-1 / 3)])


def test_weights_have_no_gradient():
    log_ratios = torch.zeros(2, 4, requires_grad=True)
    assert not importance_weights(log_ratios, MASK).requires_grad


def test_the_surrogate_has_the_gradient_of_the_policy_where_the_ratio_is_one():
    log_probs = torch.full((2, 4), -1.0, requires_grad=True)
    losses = token_surrogate(log_probs, log_probs, torch.tensor([3.0, -0.5]), MASK)
    losses.sum().backward()
    expected = MASK * torch.tensor([[-3.0], [0.5]])
    assert torch.equal(log_probs.grad, expected)


def test_the_surrogate_is_clipped_unequally():
    # Ratios 2 and 1/2, with advantages 1 and -1: min(2, 1.3), min(-2, -1.3); min(0.5, 0.9),
    # min(-0.5, -0.9), and the sign of a loss.
    log_probs = torch.tensor([[LN2, LN2, -LN2, -LN2]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    losses = token_surrogate(
        log_probs,
        torch.zeros(1, 4),
        advantages,
        torch.ones(1, 4, dtype=torch.bool),
        clip_low=0.1,
        clip_high=0.3,
    )
    assert losses[0].tolist() == pytest.approx([-1.3, 2.0, -0.5, 0.9])


def test_gspo_clips_the_geometric_mean_and_spreads_its_gradient():
    log_probs = torch.tensor([[0.0, 3 * LN2, -LN2, 0.0]], requires_grad=True)
    mask = MASK[:1]
    losses = token_surrogate(
        log_probs, torch.zeros(1, 4), torch.ones(1), mask, level="geometric", clip_low=2.0
    )
    # exp((3 ln 2 - ln 2) / 2) = 2, the same at both tokens; d/dx of each is 2 / 2.
    assert losses[0].tolist() == pytest.approx([0.0, -2.0, -2.0, 0.0])
    reduce_tokens(losses, mask, "sequence_mean").backward()
    assert log_probs.grad[0].tolist() == pytest.approx([0.0, -1.0, -1.0, 0.0])


def test_values_outside_of_the_mask_have_no_influence():
    log_probs = torch.tensor([[NAN, -1.0, -2.0, 9e9]], requires_grad=True)
    before = torch.tensor([[5.0, -1.0, -2.5, NAN]])
    losses = token_surrogate(log_probs, before, torch.ones(1), MASK[:1])
    losses = losses + kl_penalty(log_probs, before, MASK[:1])
    reduce_tokens(losses, MASK[:1], "token_mean").backward()
    assert torch.isfinite(log_probs.grad).all()
    assert log_probs.grad[0, 0] == log_probs.grad[0, 3] == 0


def test_a_ratio_that_overflows_stays_finite():
    losses = token_surrogate(
        torch.tensor([[1000.0]]), torch.zeros(1, 1), torch.zeros(1), torch.ones(1, 1).bool()
    )
    assert losses.tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k2", LN2**2 / 2), ("k3", 0.5 + LN2 - 1)],
)
def test_a_penalty_is_that_of_each_token(estimator, expected):
    # ln reference - ln pi = -ln 2.
    found = kl_penalty(
        torch.tensor([[0.0, -1.0]]),
        torch.tensor([[0.0, -1.0 - LN2]]),
        torch.tensor([[False, True]]),
        estimator,
    )
    assert found[0].tolist() == pytest.approx([0.0, expected])


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_gradient_of_a_penalty_is_that_of_a_divergence(estimator):
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    log_reference = torch.randn(5, dtype=torch.float64).log_softmax(0)
    log_pi = logits.log_softmax(0)
    each = kl_penalty(log_pi[None], log_reference[None], torch.ones(1, 5).bool(), estimator)
    # Tokens are drawn by the policy as it is: their probabilities have no gradient.
    (found,) = torch.autograd.grad(
        (log_pi.detach().exp() * each[0]).sum(), logits, retain_graph=True
    )
    if estimator == "k2":
        divergence = (log_pi.exp() * (log_pi - log_reference)).sum()
    else:
        divergence = (log_reference.exp() * (log_reference - log_pi)).sum()
    (expected,) = torch.autograd.grad(divergence, logits)
    assert torch.allclose(found, expected, atol=1e-12)


def test_means_weigh_tokens_by_sequence_or_alike():
    values = torch.tensor([[0.0, 2.0, 4.0, 0.0], [1.0, 0.0, 1.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    mask = torch.cat([MASK, torch.zeros(1, 4, dtype=torch.bool)])
    assert reduce_tokens(values, mask, "sequence_mean").item() == pytest.approx((3 + 2) / 2)
    assert reduce_tokens(values, mask, "token_mean").item() == pytest.approx(12 / 5)
    assert reduce_tokens(values, mask, "constant", 10).item() == pytest.approx(12 / 20)
    for reduction in ("sequence_mean", "token_mean", "constant"):
        parts = [
            reduce_tokens(values[rows], mask[rows], reduction, 10, mask)
            for rows in (slice(0, 1), slice(1, 3))
        ]
        assert sum(parts).item() == pytest.approx(reduce_tokens(values, mask, reduction, 10).item())
    empty = torch.zeros_like(mask)
    assert reduce_tokens(values * 0, empty, "sequence_mean").item() == 0.0


def test_unknown_choices_are_refused():
    one, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="correction: found 'truncated', expected one of none"):
        importance_weights(one, mask, correction="truncated")
    with pytest.raises(ValueError, match="estimator: found 'k1'"):
        kl_penalty(one, one, mask, "k1")
    with pytest.raises(ValueError, match="reduction: found 'mean'"):
        reduce_tokens(one, mask, "mean")
    with pytest.raises(ValueError, match="baseline: found 'group'"):
        group_advantages(one[0], torch.zeros(2).long(), "group")
    with pytest.raises(ValueError, match="level: found 'word'"):
        token_surrogate(one, one, one[:, 0], mask, level="word")
