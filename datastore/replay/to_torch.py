"""to_torch: a batch of numpy arrays as torch tensors. The only torch in datastore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from replaylake.datastore.batch import Batch
from replaylake.datastore.spaces import Array


def to_torch(batch: Batch[Array], device: torch.device | str = "cpu") -> Batch[torch.Tensor]:
    """Return the batch with tensors of the same shapes and dtypes, on `device`.

    On the CPU the tensors share the arrays' memory. Keys stay numpy: they name rows, and nothing is
    computed from them.
    """
    return Batch(
        observations=_tensors(batch.observations, device),
        actions=_tensors(batch.actions, device),
        rewards=_tensors(batch.rewards, device),
        discounts=_tensors(batch.discounts, device),
        next_observations=_tensors(batch.next_observations, device),
        behavior_log_probs=_tensors(batch.behavior_log_probs, device),
        weights=_tensors(batch.weights, device),
        keys=batch.keys,
        action_masks=_tensors(batch.action_masks, device),
        next_action_masks=_tensors(batch.next_action_masks, device),
        bootstrappable=_tensors(batch.bootstrappable, device),
    )


def _tensors(values: Any, device: torch.device | str) -> Any:
    if values is None:
        return None
    if isinstance(values, Mapping):
        return {key: _tensors(sub, device) for key, sub in values.items()}
    # A gather from packed records may give strides that are no multiple of the item's size, which
    # torch refuses; a contiguous array is passed on as it is.
    values = np.asarray(values, order="C")
    # non_blocking matters only to a CUDA device and pinned memory; elsewhere it changes nothing.
    return torch.from_numpy(values).to(device, non_blocking=True)
