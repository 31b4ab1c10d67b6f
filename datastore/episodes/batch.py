"""Batch: what samplers return and losses take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from replaylake.datastore.episodes.spaces import Array

if TYPE_CHECKING:
    # With a default, as Python 3.13's own has: where nobody says which, a Batch holds either.
    from typing_extensions import TypeVar

    ArrayT = TypeVar("ArrayT", default=Any)
else:
    from typing import TypeVar

    ArrayT = TypeVar("ArrayT")


@dataclass(frozen=True)
class Batch(Generic[ArrayT]):
    """B transitions, or B sequences of T steps: arrays from samplers, tensors from `to_torch`.

    Shapes are those of transitions [B, ...]; of sequences and episodes they are [B, T, ...], but
    for `weights` and `indices`. Arrays may be strided views of packed records.

    observations and next_observations [B, *obs] (a mapping of arrays for Dict and Tuple spaces),
    float64 decoded to float32 unless the view keeps it; actions [B, *act]; rewards float32 [B] in
    the environment's units, of n steps their discounted sum; discounts float32 [B]: gamma to the
    number of steps, or 0 where the last of them terminated (truncation keeps gamma);
    behavior_log_probs float32 [B], NaN where unknown; weights float32 [B], the sampler's importance
    weights (1 when uniform); keys uint64 [B, 2], the stable 128-bit row keys, always numpy;
    action_masks and next_action_masks bool [B, A], or None where the dataset has none;
    bootstrappable bool [B], or None where all are: false for a step whose successor the log lacks.
    Its next observation is its own, to be finite, and stands for nothing: no loss may bootstrap
    there. Samplers draw such steps only for cloning.
    indices int64 [B], always numpy: the sampler's own numbers of the rows, for update_priorities.
    mask bool [B, T], of sequences only: the steps to learn from, neither padding nor burn-in.
    returns: float32 [B], the discounted sum of the rewards from the step to the end of what is
    logged of its episode; next_actions [B, *act]: the action of the step that follows, its own
    where there is none. Both None unless the item asked for them.
    columns: further columns [B, ...] that the view was asked for, by name; None without any.
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
    indices: Array | None = None
    mask: ArrayT | None = None
    columns: Mapping[str, ArrayT] | None = None
    returns: ArrayT | None = None
    next_actions: ArrayT | Mapping[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.keys)
