"""WindowOutput: memory for some windows of records, and the batch that shows it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Array, Values
from replaylake.datastore.replay.layout import BOOTSTRAPPABLE, KEY
from replaylake.datastore.replay.protocols import SelectedItems
from replaylake.datastore.replay.records import Records


class WindowOutput:
    """`num` windows of `length` records each.

    words uint64 [num, length * num_words] are to be filled; rows [num, length] are the same memory
    as records.
    """

    batch: Batch[Array]

    def __init__(self, records: Records, num: int, length: int) -> None:
        self.layout = records.layout
        self.words = np.empty((num, length * self.layout.num_words), np.uint64)
        self.rows = self.layout.rows(self.words)
        self.weights: NDArray[np.float32] = np.ones(num, np.float32)
        self.indices: NDArray[np.int64] = np.empty(num, np.int64)

    def number(self, selected: SelectedItems) -> None:
        """Note which candidates the rows are, and what they weigh."""
        if selected.weights is not None:
            self.weights[:] = selected.weights
        self.indices[:] = selected.numbers

    def to_batch(
        self,
        steps: NDArray[np.void],
        following: NDArray[np.void],
        observations: Values,
        next_observations: Values,
        *,
        discounts: NDArray[np.float32],
        rewards: NDArray[np.float32] | None = None,
        mask: NDArray[np.bool_] | None = None,
        returns: NDArray[np.float32] | None = None,
        with_next_actions: bool = False,
    ) -> Batch[Array]:
        """Return a batch of views of steps [...] and of the records [...] that follow them.

        rewards: in place of the steps' own.
        """
        masked = self.layout.spec.mask_size is not None
        columns: Any = self.layout.column_values(steps)
        return Batch(
            observations=observations,
            actions=self.layout.actions(steps),
            rewards=steps[schema.REWARD] if rewards is None else rewards,
            discounts=discounts,
            next_observations=next_observations,
            behavior_log_probs=steps[schema.BEHAVIOR_LOG_PROB],
            weights=self.weights,
            keys=steps[KEY],
            action_masks=steps[schema.ACTION_MASK] if masked else None,
            next_action_masks=following[schema.ACTION_MASK] if masked else None,
            bootstrappable=steps[BOOTSTRAPPABLE],
            indices=self.indices,
            mask=mask,
            columns=columns,
            returns=returns,
            next_actions=self.layout.actions(following) if with_next_actions else None,
        )
