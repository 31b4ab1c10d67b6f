"""Policy gradient losses over sampled tokens, with off-policy correction.

Arrays are [B, T]: B sequences of T tokens, padded. Position t belongs to token t: its log-prob is
that of the token given those before it. `mask` bool [B, T]: the tokens that are included in the
loss; values elsewhere have no influence. pi: the target policy; mu: the behavior policies, which
sampled the tokens and whose log-probs were recorded; the proximal policy: pi before the update.
Weights and advantages have no gradient.
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import torch

from replaylake.offline.losses.policy_gradient import clipped_surrogate

Baseline = Literal["group_norm", "group_mean", "leave_one_out", "batch_norm"]
Level = Literal["token", "sequence", "geometric"]
Correction = Literal["none", "truncate", "mask"]
Estimator = Literal["k2", "k3"]
Reduction = Literal["sequence_mean", "token_mean", "constant"]
# Added to each standard deviation, so that a group of equal returns has advantages of 0.
_EPSILON: Final = 1e-4
# exp of more is infinite in float32, and infinity times an advantage of zero is not a number.
_MAX_LOG_RATIO: Final = 20.0


def group_advantages(
    returns: torch.Tensor,
    groups: torch.Tensor,
    baseline: Baseline,
    episodes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the advantage of each sequence relative to the episodes of its group, float [B].

    Args:
        returns: float [B], of the episode of each sequence.
        groups: int64 [B], equal for samples of one prompt; -1: a group of one episode.
        baseline: `group_norm`: return minus the mean of the group, divided by its standard
            deviation (n - 1) plus 1e-4; `group_mean`: return minus the mean of the group;
            `leave_one_out`: return minus the mean of the other samples of the group; `batch_norm`:
            return minus the mean of all, divided by their standard deviation plus 1e-4.
        episodes: int64 [B], equal for sequences (branches) of one episode, which count once in each
            mean; None: each sequence is an episode.

    An episode that is alone in its group has an advantage of 0, except with `batch_norm`.

    Source: `group_norm` Shao et al. 2024, "DeepSeekMath", section 4.1.2; `group_mean` Liu et al.
    2025, "Understanding R1-Zero-Like Training" (Dr. GRPO); `leave_one_out` Ahmadian et
    al. 2024, "Back to Basics" (RLOO); `batch_norm` Hu 2025, "REINFORCE++".
    """
    _check("baseline", baseline, Baseline)
    if episodes is not None:
        unique, places = torch.unique(episodes, return_inverse=True)
        first = torch.empty_like(unique)
        # Of equal places any one may stay: sequences of an episode have its return and group.
        first[places] = torch.arange(len(episodes), device=episodes.device)
        return group_advantages(returns[first], groups[first], baseline)[places]
    if baseline == "batch_norm":
        spread = returns.std() if len(returns) > 1 else torch.zeros_like(returns[0])
        return (returns - returns.mean()) / (spread + _EPSILON)
    alone = groups < 0
    names = torch.where(alone, -1 - torch.arange(len(groups), device=groups.device), groups)
    _, members = torch.unique(names, return_inverse=True)
    num = torch.bincount(members)
    counts = num[members]
    mean = torch.zeros(len(num), dtype=returns.dtype, device=returns.device)
    mean = mean.index_add(0, members, returns) / num
    centered = returns - mean[members]
    if baseline == "group_mean":
        return centered
    if baseline == "leave_one_out":
        return centered * counts / (counts - 1).clamp(min=1)
    squares = torch.zeros_like(mean).index_add(0, members, centered.square())
    spread = (squares / (num - 1).clamp(min=1)).sqrt()
    return centered / (spread[members] + _EPSILON)


def importance_weights(
    log_ratios: torch.Tensor,
    mask: torch.Tensor,
    *,
    correction: Correction = "truncate",
    level: Level = "token",
    low: float = 0.0,
    high: float = 2.0,
) -> torch.Tensor:
    """Return the importance weight of each token, float [B, T] without a gradient.

    Args:
        log_ratios: float [B, T], ln pi - ln mu.
        mask: bool [B, T].
        correction: `truncate`: the ratio, at most `high`; `mask`: the ratio, and 0 outside `low` to
            `high`; `none`: 1.
        level: `token`: the ratio of each token; `sequence`: the product of the ratios of all tokens
            of the sequence; `geometric`: their geometric mean.
        low: smallest ratio that `mask` retains.
        high: largest ratio.

    Outside of the mask, the weight is 0.

    Source: Ionides 2008, "Truncated Importance Sampling", eq. 2; by token and by sequence,
    truncated and masked, Liu et al. 2025, "When Speed Kills Stability" (TIS, MIS). `token` is
    biased with small variance, `sequence` unbiased with large variance.
    """
    _check("correction", correction, Correction)
    inside = mask.to(log_ratios.dtype)
    if correction == "none":
        return inside
    ratios = _ratios(log_ratios.detach(), mask, level)
    if correction == "truncate":
        return ratios.clamp(max=high) * inside
    return torch.where((ratios >= low) & (ratios <= high), ratios, 0.0) * inside


def token_surrogate(
    log_probs: torch.Tensor,
    proximal_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: Level = "token",
    clip_low: float = 0.2,
    clip_high: float | None = None,
) -> torch.Tensor:
    """Return -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), float [B, T].

    Args:
        log_probs: float [B, T], ln pi, with a gradient.
        proximal_log_probs: float [B, T], of the policy in the denominator of rho.
        advantages: float [B] by sequence, or [B, T] by token.
        mask: bool [B, T].
        level: of the ratio rho, as in `importance_weights`.
        clip_low: rho is clipped at 1 - clip_low.
        clip_high: rho is clipped at 1 + clip_high; None: clip_low.

    Outside of the mask, the value is 0.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", eq. 7; unequal clips Yu
    et al. 2025, "DAPO"; `geometric` Zheng et al. 2025, "Group Sequence Policy Optimization",
    eq. 5 and 7. Weighted by `importance_weights` of the proximal policy and mu, it is the
    decoupled objective of Hilton et al. 2022, "Batch size-invariance for policy optimization".
    """
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand_as(log_probs)
    log_rho = _log_ratios(log_probs - proximal_log_probs.detach(), mask, level)
    return clipped_surrogate(log_rho, advantages, clip_low, clip_high) * mask


def kl_penalty(
    log_probs: torch.Tensor,
    reference_log_probs: torch.Tensor,
    mask: torch.Tensor,
    estimator: Estimator = "k2",
) -> torch.Tensor:
    """Return a penalty for the divergence of pi from a reference, float [B, T], 0 outside the mask.

    Args:
        log_probs: float [B, T], ln pi.
        reference_log_probs: float [B, T].
        mask: bool [B, T].
        estimator: with x = ln reference - ln pi, `k2` x^2 / 2 or `k3` exp(x) - x - 1.

    What counts in a loss is the gradient. Over tokens that pi sampled, that of `k2` is the gradient
    of KL(pi || reference), and that of `k3`, which GRPO uses, the gradient of KL(reference || pi).

    Source: Schulman 2020, "Approximating KL Divergence"; the gradients Tang & Munos 2025, "On a few
    pitfalls in KL divergence gradient estimation for RL".
    """
    _check("estimator", estimator, Estimator)
    x = torch.where(mask, reference_log_probs.detach() - log_probs, 0.0)
    if estimator == "k2":
        return 0.5 * x.square()
    return torch.exp(x.clamp(max=_MAX_LOG_RATIO)) - x - 1


def reduce_tokens(
    values: torch.Tensor,
    mask: torch.Tensor,
    reduction: Reduction,
    max_tokens: int | None = None,
    whole: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mean of token values as one number, float [].

    Args:
        values: float [B, T], 0 outside the mask.
        mask: bool [B, T].
        reduction: `sequence_mean`: the mean over the tokens of each sequence, then over sequences,
            so that tokens of long sequences have less weight (GRPO, RLOO, GSPO); `token_mean`: the
            mean over all tokens (DAPO); `constant`: the sum over the tokens of each sequence,
            divided by `max_tokens`, then the mean over sequences, so that a token's weight does not
            depend on the length of its sequence (Dr. GRPO).
        max_tokens: largest length of a sequence; for `constant`.
        whole: bool [.., T], the mask of the batch of which this is a part: the numbers of all parts
            add up to that of the batch. None: it is the batch.


    Sequences without a token in the mask are not counted.

    Raises: ValueError for `constant` without max_tokens.
    """
    _check("reduction", reduction, Reduction)
    num = mask.sum(dim=1)
    whole = mask if whole is None else whole
    num_sequences = whole.any(dim=1).sum().clamp(min=1)
    if reduction == "token_mean":
        return values.sum() / whole.sum().clamp(min=1)
    if reduction == "constant":
        if max_tokens is None:
            raise ValueError("max_tokens: found None, expected the largest length for `constant`")
        return values.sum() / (max_tokens * num_sequences)
    return (values.sum(dim=1) / num.clamp(min=1)).sum() / num_sequences


def _check(name: str, value: str, choices: Any) -> None:
    known = get_args(choices)
    if value not in known:
        raise ValueError(f"{name}: found {value!r}, expected one of {', '.join(known)}")


def _log_ratios(log_ratios: torch.Tensor, mask: torch.Tensor, level: Level) -> torch.Tensor:
    """Return the log-ratio of each token at a level [B, T], 0 outside of the mask."""
    _check("level", level, Level)
    inside = torch.where(mask, log_ratios, 0.0)
    if level != "token":
        total = inside.sum(dim=1, keepdim=True)
        if level == "geometric":
            total = total / mask.sum(dim=1, keepdim=True).clamp(min=1)
        inside = total.expand_as(log_ratios)
    return torch.where(mask, inside, 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _ratios(log_ratios: torch.Tensor, mask: torch.Tensor, level: Level) -> torch.Tensor:
    return torch.exp(_log_ratios(log_ratios, mask, level))
