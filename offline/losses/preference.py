"""Losses over pairs of sequences, one of which is preferred."""

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
