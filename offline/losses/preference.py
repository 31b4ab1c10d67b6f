"""Losses of preferences: over pairs of sequences, one of which is preferred, or single ones."""

from __future__ import annotations

import torch


def direct_preference(
    chosen_log_ratios: torch.Tensor, rejected_log_ratios: torch.Tensor, beta: float
) -> torch.Tensor:
    """Return -ln sigmoid(beta (chosen log-ratio - rejected log-ratio)), float [P].

    Args:
        chosen_log_ratios: float [P], ln pi - ln reference, summed over the tokens of a sequence.
        rejected_log_ratios: float [P].
        beta: strength of the KL constraint to the reference, more than 0.

    Source: Rafailov et al. 2023, "Direct Preference Optimization", eq. 7.
    """
    return -torch.nn.functional.logsigmoid(beta * (chosen_log_ratios - rejected_log_ratios))


def identity_preference(
    chosen_log_ratios: torch.Tensor, rejected_log_ratios: torch.Tensor, beta: float
) -> torch.Tensor:
    """Return (chosen log-ratio - rejected log-ratio - 1 / (2 beta))^2, float [P].

    Args:
        chosen_log_ratios: float [P], ln pi - ln reference, the mean over the tokens of a sequence.
        rejected_log_ratios: float [P].
        beta: strength of the KL constraint to the reference, tau in the paper, more than 0.

    Source: Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human
    Preferences" (IPO), eq. 17; means instead of sums make beta independent of the length.
    """
    return (chosen_log_ratios - rejected_log_ratios - 1 / (2 * beta)).square()


def kahneman_tversky(
    log_ratios: torch.Tensor,
    is_desirable: torch.Tensor,
    divergence: torch.Tensor,
    beta: float,
    *,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """Return weight * (1 - sigmoid(+-beta (log-ratio - divergence))), float [B].

    The sign is that of the label: + for a desirable sequence.

    Args:
        log_ratios: float [B], ln pi - ln reference, summed over the tokens of a sequence.
        is_desirable: bool [B].
        divergence: float [] or [B], estimate of KL(pi || reference) of a sequence, 0 or more; gets
            no gradient.
        beta: strength of the KL constraint to the reference, more than 0.
        desirable_weight: weight of the desirable sequences.
        undesirable_weight: weight of the others.

    Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization",
    eq. 7 and 8, with the constants lambda_y subtracted.
    """
    gains = beta * (log_ratios - divergence.detach())
    gains = torch.where(is_desirable, gains, -gains)
    weights = torch.where(is_desirable, desirable_weight, undesirable_weight)
    return weights * (1 - torch.sigmoid(gains))


def bradley_terry(
    chosen_scores: torch.Tensor, rejected_scores: torch.Tensor, center_coef: float = 0.0
) -> torch.Tensor:
    """Return -ln sigmoid(chosen - rejected) + center_coef (chosen + rejected)^2, float [P].

    Args:
        chosen_scores: float [P], of a reward model.
        rejected_scores: float [P].
        center_coef: holds the mean of the scores near 0, which the first term leaves open.

    Source: Bradley & Terry 1952, "Rank Analysis of Incomplete Block Designs"; as a loss of a reward
    model Ouyang et al. 2022, "Training Language Models to Follow Instructions", eq. 1; the second
    term Eisenstein et al. 2023, "Helping or Herding?", section 2.
    """
    losses = direct_preference(chosen_scores, rejected_scores, 1.0)
    return losses + center_coef * (chosen_scores + rejected_scores).square()
