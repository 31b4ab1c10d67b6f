"""Cutting parts out of packed runs: what is not there yet, and what fits into a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.spaces import leaves
from replaylake.datastore.replay.layout import BOOTSTRAPPABLE, KEY, STEPS_LEFT, RecordLayout
from replaylake.datastore.replay.live.runs import StepInterval
from replaylake.datastore.replay.packing.row_keys import keys_of_steps
from replaylake.datastore.replay.record_runs import Runs
from replaylake.datastore.replay.records import PADDING, Packed, Records


class RunPart(NamedTuple):
    """`length` steps of a run from its `skip`th on."""

    run: int
    skip: int
    length: int


@dataclass(frozen=True)
class PackedBlock:
    """Packed runs that belong to no chain yet, and whose steps they are.

    has_final: for each run, whether the observation after it came with its last step.
    """

    packed: Packed
    intervals: list[StepInterval]
    has_final: NDArray[np.bool_]

    @property
    def layout(self) -> RecordLayout:
        return self.packed.records.layout

    def __len__(self) -> int:
        return len(self.intervals)


def make_block(packed: Packed) -> PackedBlock:
    """Take what was packed apart into runs, unlinked: links are found anew among all there are."""
    runs, rows = packed.runs, packed.records.rows
    keys = keys_of_steps(rows[KEY][runs.starts], runs.first_steps)
    episodes = [key.tobytes() for key in keys]
    steps = zip(episodes, runs.first_steps.tolist(), runs.lengths.tolist(), strict=True)
    intervals = [StepInterval(*one) for one in steps]
    tails = runs.starts + runs.lengths
    rows[KEY][tails] = 0
    has_final = rows[BOOTSTRAPPABLE][tails - 1] & ~rows[schema.TERMINATED][tails - 1]
    return PackedBlock(packed, intervals, has_final)


def cut_block(
    block: PackedBlock, parts: Sequence[RunPart], *, with_successors: bool = True
) -> PackedBlock:
    """Return parts of a block's runs as a block of their own.

    Without successors, the last step of a part that was followed by another is not any more, and
    nothing of that other one is kept.
    """
    packed, layout = block.packed, block.layout
    runs = packed.runs
    before = layout.frame_stack - 1
    lengths = np.array([part.length for part in parts], np.int64)
    sizes = lengths + before + 1
    begins = np.cumsum(sizes) - sizes
    words = np.zeros((int(sizes.sum()) + PADDING, layout.num_words), np.uint64)
    rows = layout.rows(words)[:, 0]
    steps = []
    ended = np.zeros(len(parts), np.int64)
    has_final = np.zeros(len(parts), np.bool_)
    for number, (part, begin) in enumerate(zip(parts, begins.tolist(), strict=True)):
        source = int(runs.starts[part.run]) + part.skip
        num = part.length + before + 1
        words[begin : begin + num] = packed.records.words[source - before :][:num]
        taken = rows[begin : begin + num]
        taken[STEPS_LEFT] = np.arange(num)[::-1]
        taken[KEY][-1] = 0
        if part.skip + part.length == runs.lengths[part.run]:
            ended[number], has_final[number] = runs.ended[part.run], block.has_final[part.run]
        elif not with_successors:
            taken[BOOTSTRAPPABLE][-2] = taken[schema.TERMINATED][-2]
            for name, _ in leaves(layout.spec.observation_space, schema.OBSERVATION):
                taken[name][-1] = taken[name][-2]
        some = slice(*np.searchsorted(packed.steps, (source, source + part.length)))
        steps.append(packed.steps[some] + (begin + before - source))
    starts = np.concatenate(steps) if steps else np.zeros(0, np.int64)
    of = [block.intervals[part.run] for part in parts]
    first_steps = [i.first_step + part.skip for i, part in zip(of, parts, strict=True)]
    return PackedBlock(
        Packed(
            records=Records(layout, words, has_links=False),
            runs=Runs(
                begins + before, lengths, np.zeros_like(lengths), np.array(first_steps), ended
            ),
            steps=starts,
            bootstrappable=starts[rows[BOOTSTRAPPABLE][starts]],
            num_steps=int(lengths.sum()),
            num_episodes=len({i.episode for i in of}),
        ),
        [
            StepInterval(i.episode, first, part.length)
            for i, first, part in zip(of, first_steps, parts, strict=True)
        ],
        has_final,
    )


def slice_runs(packed: Packed, first: int, until: int) -> Packed:
    """Show consecutive runs of what was packed, by the same positions."""
    runs = packed.runs
    begin, end = int(runs.starts[first]), int(runs.starts[until - 1] + runs.lengths[until - 1])
    some = slice(*np.searchsorted(packed.steps, (begin, end)))
    others = slice(*np.searchsorted(packed.bootstrappable, (begin, end)))
    parts = slice(first, until)
    return Packed(
        records=packed.records,
        runs=Runs(
            runs.starts[parts],
            runs.lengths[parts],
            np.zeros(until - first, np.int64),
            runs.first_steps[parts],
            runs.ended[parts],
        ),
        steps=packed.steps[some],
        bootstrappable=packed.bootstrappable[others],
        num_steps=int(runs.lengths[parts].sum()),
        num_episodes=packed.num_episodes,
    )
