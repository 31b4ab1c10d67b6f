"""The run table: where each step of a snapshot goes, known before any of it is decoded.

Stretches are put in the order of their episodes and steps, joined to runs, and each run gets its
place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaylake.datastore.replay.arrays import RowGroup, for_each_verified_group
from replaylake.datastore.replay.packing.row_ranges import (
    FINAL,
    LAST,
    NO_ROW_RANGES,
    RowRangeReader,
    RowRanges,
)
from replaylake.datastore.storage.table.table import TableSnapshot


@dataclass(frozen=True)
class RunTable:
    """Where each step goes.

    ranges: in the order of their rows. positions int64 [num_stretches]: of each one's first
    step. steps_left int32: from that to the end of its run, itself included. order int64: the
    stretches by position. starts, lengths int64 [num_runs]: position of a run's first step, and its
    steps. first_ranges int64: each run's first one, in `order`. goes_on bool: whether the
    episode goes on in the following run from this one's final observation. digests uint64
    [num_pairs, 2]. groups: the row groups of each file.
    """

    groups: list[list[RowGroup]]
    ranges: RowRanges
    positions: NDArray[np.int64]
    steps_left: NDArray[np.int32]
    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    first_ranges: NDArray[np.int64]
    continues: NDArray[np.bool_]
    digests: NDArray[np.uint64]

    @property
    def num_steps(self) -> int:
        """Steps that will be packed."""
        return int(self.lengths.sum())

    @property
    def num_episodes(self) -> int:
        """Episodes, counted for each agent."""
        return len(self.digests)

    def num_records(self, frame_stack: int) -> int:
        """Return how many they take: for each run its tail and `frame_stack - 1` before it, too."""
        return self.num_steps + len(self.starts) * frame_stack

    def ends(self) -> NDArray[np.uint8]:
        """Return the flags of the last step of each run."""
        last = np.append(self.first_ranges[1:], len(self.order)) - 1
        flags: NDArray[np.uint8] = self.ranges.flags[self.order[last]]
        return flags


def make_run_table(
    snapshot: TableSnapshot,
    paths: list[Path],
    selected: pa.Table | None,
    frame_stack: int,
) -> RunTable:
    """Read ids, steps and flags, and lay out the runs of the selected episodes.

    Each file is hashed first. A step that is there twice is packed twice, in a run each time.
    Memory: at its peak 250 bytes for each of 1M one-step episodes, ids and all; next to nothing
    where episodes are long. Raises: ShardCorruptError, SchemaMismatchError.
    """
    reader = RowRangeReader(snapshot)
    groups = for_each_verified_group(snapshot, paths, reader.read)
    ranges = reader.row_ranges()
    if ranges is None:
        return _lay_out(groups, NO_ROW_RANGES, np.zeros((0, 2), np.uint64), frame_stack)
    stretches, names = ranges
    if selected is not None:
        stretches = stretches.take(names.is_selected(stretches.pairs, selected))
    stretches, pairs = _renumber(stretches)
    return _lay_out(groups, stretches, names.digests(pairs), frame_stack)


def _renumber(stretches: RowRanges) -> tuple[RowRanges, NDArray[np.int64]]:
    """Number the pairs that are there from 0, in order; and return what they were."""
    pairs, numbers = np.unique(stretches.pairs, return_inverse=True)
    return replace(stretches, pairs=numbers.reshape(-1)), pairs


def _lay_out(
    groups: list[list[RowGroup]],
    stretches: RowRanges,
    digests: NDArray[np.uint64],
    frame_stack: int,
) -> RunTable:
    order = _order(stretches)
    ordered = stretches.take(order)
    lengths = ordered.lengths.astype(np.int64)
    adjoins = np.diff(ordered.pairs) == 0
    adjoins &= ordered.first_steps[1:] == ordered.first_steps[:-1] + ordered.lengths[:-1]
    is_last = np.append(~adjoins | (ordered.flags[:-1] != 0), True)[: len(order)]
    lasts = np.flatnonzero(is_last)
    firsts = np.concatenate(([0], lasts[:-1] + 1))[: len(lasts)]
    before = np.cumsum(lengths) - lengths
    run_ends = (before + lengths)[lasts]
    runs = np.repeat(np.arange(len(lasts)), lasts - firsts + 1)
    # A tail and the records before the first step are each run's own.
    positions = before + runs * frame_stack + (frame_stack - 1)
    continues = np.zeros(len(lasts), np.bool_)
    continues[:-1] = adjoins[lasts[:-1]] & (ordered.flags[lasts[:-1]] == FINAL)
    flags = stretches.flags.copy()
    flags[order[lasts]] |= LAST
    in_row_order = np.empty(len(order), np.int64)
    in_row_order[order] = np.arange(len(order))
    return RunTable(
        groups=groups,
        ranges=replace(stretches, flags=flags),
        positions=positions[in_row_order],
        steps_left=(run_ends[runs] - before).astype(np.int32)[in_row_order],
        order=order,
        starts=positions[firsts],
        lengths=run_ends - before[firsts],
        first_ranges=firsts,
        continues=continues,
        digests=digests,
    )


def _order(stretches: RowRanges) -> NDArray[np.int64]:
    """Return the stretches by episode and agent, then by step."""
    pairs, steps = stretches.pairs, stretches.first_steps
    in_order = (np.diff(pairs) > 0) | ((np.diff(pairs) == 0) & (np.diff(steps) > 0))
    if in_order.all():
        return np.arange(len(pairs))
    return np.lexsort((steps, pairs))
