"""Episodes: whole ones, for learners of returns and of decisions as sequences."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.replay.arguments import check_discount, check_int
from replaylake.datastore.replay.items.sequences import SequenceOutput
from replaylake.datastore.replay.protocols import SelectedItems
from replaylake.datastore.replay.records import Packed, Records


@dataclass(frozen=True)
class Episodes:
    """An item: one row of a batch is an episode, with fields [B, T, ...]; T is the longest length.

    Shorter episodes are padded in the same way as sequences: see Sequences for mask, padding and
    shared memory.

    An episode can be drawn if it was recorded without a gap from its first step to a termination or
    truncation, and if `where_steps` allows an item to start at its first step. With
    only_complete=False, each part of an episode without a gap can be drawn. If max_length is set, a
    view with a longer episode is refused, because each row takes the memory of the longest one.
    Episodes are never cut; use Sequences to draw parts of them.
    """

    max_length: int | None = None
    only_complete: bool = True
    discount: float = 0.99

    def __post_init__(self) -> None:
        if self.max_length is not None:
            check_int(
                "episodes: max_length", self.max_length, minimum=1, advice="None is no limit."
            )
        check_discount("episodes", self.discount)

    def starts(self, packed: Packed) -> NDArray[np.int64]:
        """Return the first steps of the episodes. Raises: ConfigInvalidError if one is too long."""
        runs = packed.runs
        heads, ends = runs.chain_heads(), runs.chain_ends()
        if self.only_complete:
            whole = runs.begin_episodes()[heads] & (runs.ended[ends] != 0)
            heads, ends = heads[whole], ends[whole]
        lengths = runs.offsets[ends] + runs.lengths[ends] - runs.offsets[heads]
        longest = int(lengths.max(initial=0))
        if self.max_length is not None and longest > self.max_length:
            num = int((lengths > self.max_length).sum())
            raise ConfigInvalidError(
                f"episodes: found {num} of {len(lengths)} longer than max_length "
                f"{self.max_length}, the longest of {longest} steps, expected none. Leave them out "
                f"with where='num_steps <= {self.max_length}', or sample Sequences."
            )
        return packed.filter_startable(runs.starts[heads])

    def assembler(self, records: Records) -> EpisodeAssembler:
        return EpisodeAssembler(records, self)


class EpisodeAssembler:
    """Copies whole episodes, each as one window."""

    # Batches are never put together: each would be as wide as the longest episode of all.
    row_bytes = sys.maxsize

    def __init__(self, records: Records, item: Episodes) -> None:
        self.records = records
        self._item = item

    def assemble(
        self,
        positions: NDArray[np.int64],
        selected: SelectedItems,
        out: SequenceOutput | None = None,
    ) -> SequenceOutput:
        """Copy the episodes that begin at `positions`; into `out` if it has just their length.

        Cost: B (T + frame_stack) records, and two reads for each piece of an episode.
        """
        longest = int(self.records.num_steps_left(positions).max(initial=0))
        if out is None or out.num_steps != longest:
            out = SequenceOutput(self.records, len(positions), longest)
        out.fill(self.records, positions, self._item.discount)
        out.number(selected)
        return out
