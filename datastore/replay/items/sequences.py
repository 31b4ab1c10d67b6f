"""Sequences: consecutive steps of an episode, for recurrent networks and learners of segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Array, Values
from replaylake.datastore.replay.arguments import check_discount, check_int
from replaylake.datastore.replay.items.output import WindowOutput
from replaylake.datastore.replay.kernels.kernels import end_sequences
from replaylake.datastore.replay.layout import RecordLayout
from replaylake.datastore.replay.protocols import SelectedItems
from replaylake.datastore.replay.records import Packed, Records


@dataclass(frozen=True)
class Sequences:
    """An item: one row is T = burn_in + length consecutive steps, with fields [B, T, ...].

    Sequences begin every length - overlap steps, from the beginning of an episode or of a part of
    it without a gap. A sequence is left out if `where_steps` excludes its first step, or if all its
    steps to learn from are also in an earlier sequence.

    mask [B, T] is true for the steps to learn from. It is false for the first burn_in steps, which
    only warm up a recurrent state. If a sequence starts at the beginning of an episode, its state
    is the initial one, and the mask is true for all its steps (Kapturowski et al. 2019, R2D2). Past
    the end of the episode, all fields are 0 or false, except action masks, which are all true; the
    first step past the end has the final observation, whose memory is shared. A last step without a
    successor is in the mask, and its bootstrappable is false.

    next_observations are the observations shifted by one step, in the same memory: a change to one
    also changes the other. If a recurrent state was stored with each step, it is a further column,
    for example columns["hidden"] [B, T, H], and [:, 0] is the start state.
    """

    length: int
    overlap: int = 0
    burn_in: int = 0
    discount: float = 0.99

    def __post_init__(self) -> None:
        length = check_int(
            "sequences: length", self.length, minimum=1, advice="It counts the steps to learn from."
        )
        check_int(
            "sequences: overlap",
            self.overlap,
            maximum=length - 1,
            advice="Sequences begin every length - overlap steps.",
        )
        check_int("sequences: burn_in", self.burn_in, advice="0 is none.")
        check_discount("sequences", self.discount)

    @property
    def num_steps(self) -> int:
        """T: the number of steps in a row, burn_in + length."""
        return self.burn_in + self.length

    def starts(self, packed: Packed) -> NDArray[np.int64]:
        """Return the first steps of all sequences. Cost: O(sequences + runs)."""
        runs, stride = packed.runs, self.length - self.overlap
        # Counted along the chain, so that pieces of an episode are cut as the whole one would be.
        first = -(-runs.offsets // stride) * stride
        num = np.maximum(-(-(runs.offsets + runs.lengths - first) // stride), 0)
        run = np.repeat(np.arange(len(runs)), num)
        within = np.arange(len(run)) - np.repeat(np.cumsum(num) - num, num)
        at = first[run] + within * stride
        positions = runs.starts[run] + at - runs.offsets[run]
        if self.burn_in or self.overlap:
            heads, ends = runs.chain_heads(), runs.chain_ends()
            totals = np.repeat((runs.offsets + runs.lengths)[ends], ends - heads + 1)
            known = np.where(at == 0, self.burn_in, self.burn_in + self.overlap)
            known[(at == 0) & runs.begin_episodes()[run]] = 0
            positions = positions[totals[run] - at > known]
        return packed.filter_startable(positions)

    def assembler(self, records: Records) -> SequenceAssembler:
        return SequenceAssembler(records, self)


class SequenceOutput(WindowOutput):
    """Memory for some sequences of T steps: a row is T + frame_stack records."""

    def __init__(self, records: Records, num: int, num_steps: int) -> None:
        self.num_steps = num_steps
        self._before = records.layout.frame_stack - 1
        super().__init__(records, num, self._before + num_steps + 1)
        self.discounts: NDArray[np.float32] = np.empty((num, num_steps), np.float32)
        self.mask: NDArray[np.bool_] = np.empty((num, num_steps), np.bool_)
        observations, following = consecutive_observations(self.layout, self.rows)
        self.batch = self.to_batch(
            self.rows[:, self._before : -1],
            self.rows[:, self._before + 1 :],
            observations,
            following,
            discounts=self.discounts,
            mask=self.mask,
        )

    def fill(self, records: Records, positions: NDArray[np.int64], discount: float) -> None:
        """Copy the steps from each position on, and put nothing where the episode has none.

        Cost: one contiguous copy of T + frame_stack records a row; what comes after an end is
        written once more.
        """
        before = self._before
        first = positions - before if before else positions
        records.windows(first, before + self.num_steps + 1, self.words)
        end_sequences(self.words, before, records.fields, discount, self.mask, self.discounts)


class SequenceAssembler:
    """Copies windows of consecutive records, of which the batch's fields are views."""

    def __init__(self, records: Records, item: Sequences) -> None:
        self.records = records
        self._item = item
        self.row_bytes = (
            item.num_steps + records.layout.frame_stack
        ) * records.layout.dtype.itemsize

    def assemble(
        self,
        positions: NDArray[np.int64],
        selected: SelectedItems,
        out: SequenceOutput | None = None,
    ) -> SequenceOutput:
        """Copy the sequences that begin at `positions`."""
        if out is None:
            out = SequenceOutput(self.records, len(positions), self._item.num_steps)
        out.fill(self.records, positions, self._item.discount)
        burn_in = self._item.burn_in
        if burn_in:
            out.mask[:, :burn_in] &= self.records.begin_episodes(positions)[:, None]
        out.number(selected)
        return out


def stacks(frames: Array, num: int) -> Array:
    """Return the `num` frames that end at each: [B, T + num - 1, ...] to [B, T, num, ...].

    A view: stacks that overlap share their frames' memory, so what is written to a frame of one of
    them shows in the others. Cost: no copy.
    """
    shape = (frames.shape[0], frames.shape[1] - num + 1, num, *frames.shape[2:])
    strides = (frames.strides[0], frames.strides[1], *frames.strides[1:])
    return np.lib.stride_tricks.as_strided(frames, shape, strides)


def consecutive_observations(layout: RecordLayout, rows: Any) -> tuple[Values, Values]:
    """Return what is observed at all but the last step of windows [B, T + frame_stack], and after.

    Each [B, T, *obs], of stacked frames [B, T, frame_stack, *obs]. Views: the observation after one
    step and that of the next one are the same memory.
    """
    if layout.frame_stack == 1:
        return layout.observations(rows[:, :-1]), layout.observations(rows[:, 1:])
    frames: Any = layout.observations(rows)
    stacked = stacks(frames, layout.frame_stack)
    return stacked[:, :-1], stacked[:, 1:]
