"""Packing: a snapshot's selected episodes, decoded into records that are ready to be gathered.

A run is a maximal sequence of consecutive steps of one episode and agent. It takes T + 1 records:
the last one holds only the observation after the run, so the successor of record i is i + 1, and a
batch is one gather of whole records. With stacked frames, `frame_stack - 1` more before its first
step hold the observations that came before it.

Two passes: ids, steps and flags tell where each step goes (run_table.py); then each row group is
decoded and written to its place (record_filler.py). Shards are hashed in the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.spaces import leaves
from replaylake.datastore.replay.array_allocator import (
    BOOTSTRAPPABLE_STEPS,
    RECORDS,
    STEPS,
    Allocate,
    allocate_in_memory,
)
from replaylake.datastore.replay.arrays import READ_THREADS, RowGroup
from replaylake.datastore.replay.layout import KEY, STEPS_LEFT, RecordLayout
from replaylake.datastore.replay.packing.record_filler import RecordFiller
from replaylake.datastore.replay.packing.row_ranges import FINAL, LAST, TERMINATED, TRUNCATED
from replaylake.datastore.replay.packing.run_table import RunTable, make_run_table
from replaylake.datastore.replay.record_runs import Runs
from replaylake.datastore.replay.records import PADDING, Packed, Records
from replaylake.datastore.storage.table.shard import blob_of
from replaylake.datastore.storage.table.table import TableSnapshot

OnProgress = Callable[[int, int], None]

# Positions worked on together.
_POSITIONS_AT_ONCE: Final = 1 << 18


def pack(
    snapshot: TableSnapshot,
    layout: RecordLayout,
    *,
    selected: pa.Table | None = None,
    rewards: pa.Table | None = None,
    start_flags: NDArray[np.bool_] | None = None,
    allocate: Allocate = allocate_in_memory,
    on_progress: OnProgress | None = None,
) -> Packed:
    """Decode a snapshot's shards, each checked against its sha256 before anything of it is read.

    Args:
        snapshot: the version, or some files of one.
        layout: what a record holds.
        selected: episode_id and agent_id of the episodes to keep; None for all.
        rewards: one column `reward` that replaces the logged one, in file and row order.
        start_flags: bool [num_rows], in file and row order: the steps where it is false are packed,
            but are neither in `steps` nor in `bootstrappable`.
        allocate: asked for "records" uint64 [num_records + PADDING, num_words] once their number is
            known and before any of them is decoded, then for "steps" and "bootstrappable", int64
            [N]. Where these two are equal they are one array.
        on_progress: called with shards decoded and all shards.

    Memory beyond what is allocated: 9 bytes a step for `rewards` and `start_flags`; a few MiB a
    thread, with the pages being decoded; 40 bytes a run; and for rows that do not lie together, as
    in one-step episodes, up to 250 bytes each. Remote files are all copied to this machine at once.
    Raises: ShardCorruptError; SchemaMismatchError, SpaceUnsupportedError for values that a record
    cannot hold.
    """
    # Copies of a remote lake's files are kept until both passes are over.
    blobs = [blob_of(snapshot.root, entry) for entry in snapshot.files]
    paths = snapshot.storage.fetch(blobs)
    try:
        table = make_run_table(snapshot, paths, selected, layout.frame_stack)
        if not table.num_steps:
            return _empty_packed(layout)
        num_records = table.num_records(layout.frame_stack)
        shape = (num_records + PADDING, layout.num_words)
        words = allocate(RECORDS, shape, np.dtype(np.uint64))
        replacing = None if rewards is None else rewards[schema.REWARD]
        filler = RecordFiller(snapshot, layout, table, replacing, words)
        fill = _fill_here if sum(map(len, table.groups)) == 1 else _fill_in_threads
        with fill(filler, table.groups, on_progress):
            steps, bootstrappable = _starts(table, start_flags, allocate)
    finally:
        snapshot.storage.release(blobs)
    return _make_packed(table, layout, words, steps, bootstrappable)


@contextmanager
def _fill_in_threads(
    filler: RecordFiller, groups: Sequence[Sequence[RowGroup]], on_progress: OnProgress | None
) -> Iterator[None]:
    """Fill in all row groups, beside what is done in this context."""
    with ThreadPoolExecutor(READ_THREADS, "replaylake-pack") as pool:
        try:
            filling = [[pool.submit(filler.fill, group) for group in some] for some in groups]
            yield
            for number, futures in enumerate(filling, 1):
                for future in futures:
                    future.result()
                if on_progress is not None:
                    on_progress(number, len(filling))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _fill_here(
    filler: RecordFiller, groups: Sequence[Sequence[RowGroup]], on_progress: OnProgress | None
) -> Iterator[None]:
    """Fill in one row group, as of a commit that is followed: threads would take 0.4 ms more."""
    yield
    for number, some in enumerate(groups, 1):
        for group in some:
            filler.fill(group)
        if on_progress is not None:
            on_progress(number, len(groups))


def _make_packed(
    table: RunTable,
    layout: RecordLayout,
    words: NDArray[np.uint64],
    steps: NDArray[np.int64],
    bootstrappable: NDArray[np.int64],
) -> Packed:
    rows = layout.rows(words)[:, 0]
    linked = _link(table, layout, rows)
    first_steps = table.ranges.first_steps[table.order[table.first_ranges]]
    runs = Runs(
        starts=table.starts,
        lengths=table.lengths,
        offsets=_offsets(table.lengths, linked),
        first_steps=first_steps.astype(np.int64),
        ended=((table.ends() & (TERMINATED | TRUNCATED)) > 0).astype(np.int64),
    )
    if layout.frame_stack > 1:
        _put_preceding(runs, layout, rows)
    return Packed(
        records=Records(layout, words, has_links=bool(len(linked))),
        runs=runs,
        steps=steps,
        bootstrappable=bootstrappable,
        num_steps=table.num_steps,
        num_episodes=table.num_episodes,
    )


def _link(table: RunTable, layout: RecordLayout, rows: NDArray[np.void]) -> NDArray[np.int64]:
    """Link tails to the runs in which their episodes go on, and return the runs that are linked.

    A link is there only where the following run begins with the tail's own observation.
    """
    runs = np.flatnonzero(table.continues)
    tails, heads = (table.starts + table.lengths)[runs], table.starts[runs + 1]
    if layout.spec.mask_size is not None:
        # A piece of an episode ends in a final observation, which is the next piece's first one:
        # that row has the mask that goes with it.
        rows[schema.ACTION_MASK][tails] = rows[schema.ACTION_MASK][heads]
    same = np.ones(len(runs), np.bool_)
    for name, _ in leaves(layout.spec.observation_space, schema.OBSERVATION):
        one, other = rows[name][tails], rows[name][heads]
        # What is unknown in both is the same.
        equal = (one == other) | ((one != one) & (other != other))
        same &= equal.all(axis=tuple(range(1, equal.ndim)))
    rows[KEY][tails[same], 0] = heads[same] + 1
    return runs[same]


def _offsets(lengths: NDArray[np.int64], linked: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the steps of its chain before each run; `linked` go on in the one after them."""
    begins = np.ones(len(lengths), np.bool_)
    begins[linked + 1] = False
    before = np.cumsum(lengths) - lengths
    offsets: NDArray[np.int64] = before - before[begins][np.cumsum(begins) - 1]
    return offsets


def _put_preceding(runs: Runs, layout: RecordLayout, rows: NDArray[np.void]) -> None:
    """Fill the records before each run: its chain's observations, the first of that repeated."""
    before = np.cumsum(runs.lengths) - runs.lengths
    chain_begins = before - runs.offsets
    if layout.spec.mask_size is not None:
        for back in range(1, layout.frame_stack):
            rows[schema.ACTION_MASK][runs.starts - back] = True
    for back in range(1, layout.frame_stack):
        rows[STEPS_LEFT][runs.starts - back] = runs.lengths + back
        steps = np.maximum(before - back, chain_begins)
        sources = np.searchsorted(before, steps, "right") - 1
        positions = runs.starts[sources] + steps - before[sources]
        rows[schema.OBSERVATION][runs.starts - back] = rows[schema.OBSERVATION][positions]


def _starts(
    table: RunTable, start_flags: NDArray[np.bool_] | None, allocate: Allocate
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of all steps that may start a sample, and of those with a successor."""
    flags = table.ends()
    num_dead = int(((flags & (FINAL | TERMINATED)) == 0).sum())
    num_steps, num_bootstrappable = table.num_steps, table.num_steps - num_dead
    if start_flags is not None:
        num_steps = num_bootstrappable = 0
        for positions, has_successor in _positions(table, start_flags):
            num_steps += len(positions)
            num_bootstrappable += int(has_successor.sum())
    steps = _allocate_positions(allocate, STEPS, num_steps)
    is_same = num_bootstrappable == num_steps
    bootstrappable = (
        steps
        if is_same
        else _allocate_positions(allocate, BOOTSTRAPPABLE_STEPS, num_bootstrappable)
    )
    done = done_bootstrappable = 0
    for positions, has_successor in _positions(table, start_flags):
        steps[done : done + len(positions)] = positions
        done += len(positions)
        if not is_same:
            starts = positions[has_successor]
            bootstrappable[done_bootstrappable : done_bootstrappable + len(starts)] = starts
            done_bootstrappable += len(starts)
    return steps, bootstrappable


def _positions(
    table: RunTable, start_flags: NDArray[np.bool_] | None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Yield the positions of steps, ascending, and which of them has a successor or terminated."""
    stretches = table.ranges
    lengths = stretches.lengths[table.order].astype(np.int64)
    ends = np.cumsum(lengths)
    firsts = np.searchsorted(ends, np.arange(0, table.num_steps, _POSITIONS_AT_ONCE), "right")
    for first, last in zip(firsts, [*firsts[1:], len(ends)], strict=True):
        some, sizes = table.order[first:last], lengths[first:last]
        before = np.cumsum(sizes) - sizes
        within = np.arange(int(sizes.sum())) - np.repeat(before, sizes)
        positions = np.repeat(table.positions[some], sizes) + within
        has_successor = np.ones(len(positions), np.bool_)
        flags = stretches.flags[some]
        has_successor[(before + sizes - 1)[(flags & (LAST | FINAL | TERMINATED)) == LAST]] = False
        if start_flags is not None:
            allowed = start_flags[np.repeat(stretches.rows[some], sizes) + within]
            positions, has_successor = positions[allowed], has_successor[allowed]
        yield positions, has_successor


def _allocate_positions(allocate: Allocate, name: str, num: int) -> NDArray[np.int64]:
    # A file of no bytes cannot be mapped.
    return allocate(name, (num,), np.dtype(np.int64)) if num else np.zeros(0, np.int64)


def _empty_packed(layout: RecordLayout) -> Packed:
    empty = np.zeros(0, np.int64)
    words = np.zeros((PADDING, layout.num_words), np.uint64)
    return Packed(
        records=Records(layout, words, has_links=False),
        runs=Runs(empty, empty, empty, empty, empty),
        steps=empty,
        bootstrappable=empty,
        num_steps=0,
        num_episodes=0,
    )
