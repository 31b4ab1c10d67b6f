"""Joining: the records of several views one after another, as those of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.replay.layout import KEY, STEPS_LEFT, RecordLayout
from replaylake.datastore.replay.memory import BOOTSTRAPPABLE_STEPS, RECORDS, STEPS, Room
from replaylake.datastore.replay.record_runs import Runs
from replaylake.datastore.replay.records import Packed, Records

# Records copied at once where their layout changes.
_PIECE = 1 << 14


def join(parts: Sequence[Packed], layout: RecordLayout, room: Room) -> Packed:
    """Copy the parts into `room`; where `layout` has action masks and a part none, all are true.

    Each brings its padding along, so that a window never reaches into the next part's records.
    Raises: StorageFailed.
    """
    lengths = [len(part.records.words) for part in parts]
    offsets = [sum(lengths[:number]) for number in range(len(parts))]
    shape = (sum(lengths), layout.num_words)
    words = room.allocate(RECORDS, shape, np.dtype(np.uint64))
    for part, offset, length in zip(parts, offsets, lengths, strict=True):
        _copy(part.records, layout, words[offset : offset + length], offset)
    steps = _shifted([part.steps for part in parts], offsets, STEPS, room)
    bootstrappable = steps
    if any(len(part.bootstrappable) < len(part.steps) for part in parts):
        found = [part.bootstrappable for part in parts]
        bootstrappable = _shifted(found, offsets, BOOTSTRAPPABLE_STEPS, room)
    return Packed(
        records=Records(layout, words, has_links=any(part.records.has_links for part in parts)),
        runs=_joined_runs([part.runs for part in parts], offsets),
        steps=steps,
        bootstrappable=bootstrappable,
        num_steps=sum(part.num_steps for part in parts),
        num_episodes=sum(part.num_episodes for part in parts),
    )


def _copy(records: Records, layout: RecordLayout, words: NDArray[np.uint64], offset: int) -> None:
    """Copy records to their place, `offset` records from the beginning, a piece at a time."""
    is_same = records.layout.dtype == layout.dtype
    for start in range(0, len(words), _PIECE):
        piece = words[start : start + _PIECE]
        source = records.words[start : start + _PIECE]
        rows = layout.rows(piece)[:, 0]
        if is_same:
            piece[:] = source
        else:
            found = records.layout.rows(source)[:, 0]
            rows[schema.ACTION_MASK] = True
            for name in found.dtype.names or ():
                rows[name] = found[name]
        if records.has_links:
            links = np.flatnonzero((rows[STEPS_LEFT] == 0) & (rows[KEY][:, 0] > 0))
            rows[KEY][links, 0] += np.uint64(offset)


def _shifted(
    arrays: Sequence[NDArray[np.int64]], offsets: Sequence[int], name: str, room: Room
) -> NDArray[np.int64]:
    joined: NDArray[np.int64] = room.allocate(
        name, (sum(len(array) for array in arrays),), np.dtype(np.int64)
    )
    start = 0
    for array, offset in zip(arrays, offsets, strict=True):
        np.add(array, offset, out=joined[start : start + len(array)])
        start += len(array)
    return joined


def _joined_runs(parts: Sequence[Runs], offsets: Sequence[int]) -> Runs:
    moved = [
        replace(runs, starts=runs.starts + offset)
        for runs, offset in zip(parts, offsets, strict=True)
    ]
    return Runs(
        *(np.concatenate([getattr(runs, field.name) for runs in moved]) for field in fields(Runs))
    )
