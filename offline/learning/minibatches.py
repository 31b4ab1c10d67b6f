"""Minibatches: the rows of a batch in random order, cut into parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from replaylake.datastore.episodes.batch import Batch


def minibatches(
    batch: Batch, rng: torch.Generator, *, epochs: int = 1, num: int = 1
) -> Iterator[Batch]:
    """Yield `num` parts of the batch for each epoch, of all rows in another order each time.

    Fewer where there are fewer rows, so that no part is empty; sizes differ by one row at most.
    One part is the batch as it is. rng: on the batch's device.
    """
    num_rows = len(batch.actions)
    num = min(num, num_rows)
    for _ in range(epochs):
        if num == 1:
            yield batch
        elif num:
            order = torch.randperm(num_rows, generator=rng, device=rng.device)
            for rows in torch.tensor_split(order, num):
                yield take_rows(batch, rows)


def take_rows(batch: Batch, rows: torch.Tensor) -> Batch:
    """Return some rows of a batch of tensors: their numbers, int64 [M], or bool of their dims.

    A mask [B, T] takes steps of sequences: [B, T, ...] become [M, ...]. Copies.
    """
    return Batch(**{name: _take(value, rows) for name, value in vars(batch).items()})


def _take(value: Any, rows: torch.Tensor) -> Any:
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return value[rows]
    if isinstance(value, Mapping):
        return {key: _take(sub, rows) for key, sub in value.items()}
    return value[rows.cpu().numpy()]
