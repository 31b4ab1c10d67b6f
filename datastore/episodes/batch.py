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

    The shapes below are those of transitions, [B, ...]. For sequences and episodes they are [B, T,
    ...], except `weights` and `indices`. Arrays may be strided views of packed records.

    - observations and next_observations: [B, *obs], a mapping of arrays for Dict and Tuple spaces.
      float64 is decoded to float32 unless the view was opened with `float64=True`.
    - actions: [B, *act].
    - rewards: float32 [B], in the environment's units; for n steps, their discounted sum.
    - discounts: float32 [B], gamma to the power of the number of steps, or 0 if the last of them
      terminated. A truncated step keeps gamma.
    - behavior_log_probs: float32 [B], NaN where unknown.
    - weights: float32 [B], the importance weights of the sampler; 1 for uniform samplers.
    - keys: uint64 [B, 2], the stable 128-bit row keys; always numpy.
    - action_masks and next_action_masks: bool [B, A], or None if the dataset has no masks.
    - bootstrappable: bool [B], or None if it is true for all rows. It is false for a step whose
      successor the log lacks. The next observation of such a row is only a placeholder, a copy of
      its own observation, and no loss may bootstrap from it. Samplers draw such steps only for
      cloning.
    - indices: int64 [B], the sampler's numbers of the rows, for `update_priorities`; always numpy.
    - mask: bool [B, T], only for sequences and episodes: the steps to learn from, without padding
      and burn-in.
    - returns: float32 [B], the discounted sum of the rewards from the step to the end of the logged
      part of its episode. None unless the item requests it.
    - next_actions: [B, *act], the action of the following step, or the step's own action if none
      follows. None unless the item requests it.
    - columns: the further columns of the view by name, [B, ...]; None if the view has none.
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

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays or tensors."""
        return sum(map(_num_bytes, vars(self).values()))


def _num_bytes(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, Mapping):
        return sum(map(_num_bytes, value.values()))
    return int(value.nbytes)
