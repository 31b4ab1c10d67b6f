"""TokenBatch: token sequences as arrays, padded to one length or packed one after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

A = TypeVar("A")


@dataclass(frozen=True)
class TokenBatch(Generic[A]):
    """B sequences: arrays [B, T], padded at the end, or packed into [N].

    token_ids int32; 0 past the end of a sequence. loss_mask bool: the tokens that the loss is over.
    log_probs float32: the behavior policy's of each token that it sampled, 0 elsewhere; NaN where
    the loss is over a token without a known log-prob; None if the dataset has none. columns: the
    further columns of the view, float32 or bool, in the same way. versions int64: of the policy
    that sampled each token, -1 elsewhere; None unless they were asked for.

    lengths int64 [B]: tokens of each sequence. returns float32 [B]: the sum of the rewards of its
    steps; episode_returns float32 [B]: of all steps of its episode, which samples of one group are
    compared by (a branch without the step that was rewarded has a return of 0); both NaN where
    unknown. groups int64 [B]: equal where two sequences are samples of one group_id, -1 without
    one. oldest_versions int64 [B]: the oldest policy version of the tokens, -1 if that of a sampled
    token is unknown. indices int64 [B]: rows of the view's `table`.

    Of packed batches only: position_ids int32 [N], from 0 in each sequence; sequence_ids int32 [N],
    from 0 in each batch; cu_seqlens int32 [B + 1]: where each sequence begins, and N.
    """

    token_ids: A
    loss_mask: A
    log_probs: A | None
    columns: Mapping[str, A]
    versions: A | None
    lengths: A
    returns: A
    episode_returns: A
    groups: A
    oldest_versions: A
    indices: NDArray[np.int64]
    position_ids: A | None = None
    sequence_ids: A | None = None
    cu_seqlens: A | None = None

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, without padding."""
        return int(self.lengths.sum())  # type: ignore[attr-defined]


class BatchMemory:
    """Memory of one batch, which a later batch is written into again."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def allocate(self, name: str, num_bytes: int) -> NDArray[np.uint8]:
        """Return memory for an array; that of an earlier call of this name, where it is enough."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._buffers[name] = np.empty(num_bytes, np.uint8)
        return buffer[:num_bytes]
