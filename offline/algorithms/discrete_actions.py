"""Discrete actions: what the algorithms that learn them have in common."""

from __future__ import annotations

from typing import Final

import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Discrete, Space, describe
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.offline.learning.algorithm import tensor

# Of a logit: far below any other, and far from overflowing.
_FORBIDDEN: Final = -1e9


def discrete(name: str, action_space: Space) -> Discrete:
    """Return the action space, known to be Discrete. Raises: SpaceUnsupportedError."""
    if isinstance(action_space, Discrete):
        return action_space
    raise SpaceUnsupportedError(
        f"{name}: found action space {describe(action_space)}, expected Discrete."
    )


def action_indices(batch: Batch, space: Discrete) -> torch.Tensor:
    """Return the actions taken as int64 [B] in 0 .. A - 1."""
    actions = tensor(batch.actions).long()
    return actions - space.start if space.start else actions


def log_softmax(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return ln pi(a|s), float [B, A], of logits [B, A]; of forbidden actions a very negative one.

    It is finite, so that 0 times it is 0: the entropy, and means over actions, leave those out.
    """
    if mask is not None:
        logits = logits.masked_fill(~mask, _FORBIDDEN)
    return torch.log_softmax(logits, dim=-1)
