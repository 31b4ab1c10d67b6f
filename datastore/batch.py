"""Batch: what samplers return and losses take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from replaylake.datastore.spaces import Array

if TYPE_CHECKING:
    # With a default, as Python 3.13's own has: where nobody says which, a Batch holds either.
    from typing_extensions import TypeVar

    ArrayT = TypeVar("ArrayT", default=Any)
else:
    from typing import TypeVar

    ArrayT = TypeVar("ArrayT")


@dataclass(frozen=True)
class Batch(Generic[ArrayT]):
    """B transitions: a Batch[Array] from samplers, a Batch[Tensor] from `replay.to_torch`.

    observations and next_observations [B, *obs] (a mapping of arrays for Dict and Tuple spaces),
    float64 decoded to float32; actions [B, *act]; rewards float32 [B] in the environment's units;
    discounts float32 [B]: gamma, or 0 where the step terminated (truncation keeps gamma);
    behavior_log_probs float32 [B], NaN where unknown; weights float32 [B], the sampler's importance
    weights (1 when uniform); keys uint64 [B, 2], the stable 128-bit row keys, always numpy;
    action_masks and next_action_masks bool [B, A], or None where the dataset has none;
    bootstrappable bool [B], or None where all are: false for a step whose successor the log lacks.
    Its next observation is its own, to be finite, and stands for nothing: no loss may bootstrap
    there. Samplers draw such steps only for cloning.
    """

    observations: ArrayT | Mapping[str, Any]
    actions: ArrayT | Mapping[str, Any]
    rewards: ArrayT
    discounts: ArrayT
    next_observations: ArrayT | Mapping[str, Any]
    behavior_log_probs: ArrayT
    weights: ArrayT
    keys: Array
    action_masks: ArrayT | None = None
    next_action_masks: ArrayT | None = None
    bootstrappable: ArrayT | None = None

    def __len__(self) -> int:
        return len(self.keys)
