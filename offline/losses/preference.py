"""Losses of pairs of sequences, of which one is preferred."""

from __future__ import annotations

import torch


def direct_preference(
    chosen_log_ratios: torch.Tensor, rejected_log_ratios: torch.Tensor, beta: float
) -> torch.Tensor:
    """Return -ln sigmoid(beta (ln ratio of the chosen - ln ratio of the rejected)), [P].

    Args:
        chosen_log_ratios: float [P], ln pi - ln reference, summed over the tokens of a sequence.
        rejected_log_ratios: float [P].
        beta: how much it costs to move from the reference, more than 0.

    Source: Rafailov et al. 2023, "Direct Preference Optimization", eq. 7.
    """
    return -torch.nn.functional.logsigmoid(beta * (chosen_log_ratios - rejected_log_ratios))
