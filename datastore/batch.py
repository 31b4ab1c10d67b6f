"""Batch: what samplers return and losses take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from replaylake.datastore.spaces import Array, Values


@dataclass(frozen=True)
class Batch:
    """B transitions, as numpy arrays or, through `replay.to_torch`, torch tensors.

    observations and next_observations [B, *obs] (a mapping of arrays for Dict and Tuple spaces),
    float64 decoded to float32; actions [B, *act]; rewards float32 [B] in the environment's units;
    discounts float32 [B]: gamma, or 0 where the step terminated (truncation keeps gamma);
    behavior_log_probs float32 [B], NaN where unknown; weights float32 [B], the sampler's importance
    weights (1 when uniform); keys uint64 [B, 2], the stable 128-bit row keys; action_masks and
    next_action_masks bool [B, A], or None where the dataset has none.
    """

    observations: Values
    actions: Values
    rewards: Array
    discounts: Array
    next_observations: Values
    behavior_log_probs: Array
    weights: Array
    keys: Array
    action_masks: Any = None
    next_action_masks: Any = None

    def __len__(self) -> int:
        return len(self.rewards)
