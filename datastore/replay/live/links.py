"""Links: a run of a ring goes on in the one that continues it, whichever of them came first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.spaces import leaves
from replaylake.datastore.replay.layout import BOOTSTRAPPABLE, KEY, STEPS_LEFT
from replaylake.datastore.replay.live.cutting import Block
from replaylake.datastore.replay.live.ring import Ring
from replaylake.datastore.replay.live.runs import Interval, LiveRun, RunIndex


class Links:
    """Ties and unties runs; changes records that others may be reading."""

    def __init__(self, ring: Ring, late: Callable[[LiveRun], None]) -> None:
        """Take the ring; `late` is told of a run whose last step can be bootstrapped only now."""
        self._ring = ring
        self._late = late
        space = ring.layout.spec.observation_space
        self._observation = [name for name, _ in leaves(space, schema.OBSERVATION)]
        self._has_masks = ring.layout.spec.mask_size is not None
        # What a label may change; the rest says where a record belongs.
        structure = {KEY, STEPS_LEFT, BOOTSTRAPPABLE, schema.TERMINATED}
        names = ring.layout.dtype.names or ()
        self._values = [name for name in names if name not in structure]

    def connect(self, run: LiveRun, table: RunIndex) -> None:
        """Link a run with the one that it continues and with the one that continues it."""
        before = table.at(run.episode, run.first_step - 1) if run.first_step else None
        if before is not None and before.start >= 0:
            self._link(before, run)
        after = table.at(run.episode, run.end)
        if after is not None and after.start >= 0:
            self._link(run, after)

    def unlink_before(self, run: LiveRun) -> None:
        """Let the run that goes on in this one end."""
        before = run.before
        if before is not None:
            with self._ring.editing() as rows:
                rows[KEY][self._ring.place(before.tail), 0] = 0
            run.before, before.after = None, None

    def unlink_after(self, run: LiveRun) -> None:
        """Let the run in which this one goes on begin a chain."""
        if run.after is not None:
            # Also in its record: who copies it late follows no link to what is overwritten by then.
            with self._ring.editing() as rows:
                rows[KEY][self._ring.place(run.tail), 0] = 0
            run.after.before, run.after = None, None

    def open_end(self, run: LiveRun) -> bool:
        """Take the successor from a run's last step; return whether items could start there.

        They cannot any more, not even those that need no successor: a step has one number.
        """
        place = self._ring.place(run.tail)
        with self._ring.editing() as rows:
            rows[BOOTSTRAPPABLE][place - 1] = False
            for name in self._observation:
                rows[name][place] = rows[name][place - 1]
        could = bool(self._ring.startable[place - 1])
        self._ring.startable[place - 1] = False
        return could

    def change(self, run: LiveRun, block: Block, number: int, steps: Interval) -> bool:
        """Give some of a run's steps the values that a block's run has; False if they differ more.

        That is where one of them terminates now, or did.
        """
        skip = steps.first_step - block.intervals[number].first_step
        begin = int(block.packed.runs.starts[number]) + skip
        place = self._ring.place(run.start) + steps.first_step - run.first_step
        new = block.packed.records.rows[begin : begin + steps.length]
        old = self._ring.rows[place : place + steps.length]
        if (new[schema.TERMINATED] != old[schema.TERMINATED]).any():
            return False
        changed = [name for name in self._values if not _same(new[name], old[name])]
        if changed:
            with self._ring.editing() as rows:
                for name in changed:
                    rows[name][place : place + steps.length] = new[name]
        return True

    def _link(self, one: LiveRun, other: LiveRun) -> None:
        if one.ended or not one.is_there or not other.is_there:
            return
        tail, head = self._ring.place(one.tail), self._ring.place(other.start)
        rows = self._ring.rows
        is_same = all(_same(rows[name][tail], rows[name][head]) for name in self._observation)
        is_late = not one.has_final and not rows[BOOTSTRAPPABLE][tail - 1]
        with self._ring.editing():
            if self._has_masks:
                rows[schema.ACTION_MASK][tail] = rows[schema.ACTION_MASK][head]
            if one.has_final and not is_same:
                return
            for name in self._observation:
                rows[name][tail] = rows[name][head]
            rows[BOOTSTRAPPABLE][tail - 1] = True
            rows[KEY][tail, 0] = other.start + 1
            self._put_stack(one, other)
        one.after, other.before = other, one
        at: LiveRun | None = other
        before = one
        while at is not None and at.offset != before.offset + before.length:
            at.offset = before.offset + before.length
            before, at = at, at.after
        if is_late:
            self._late(one)

    def _put_stack(self, one: LiveRun, other: LiveRun | None) -> None:
        """Put what came before a run into the records before it, and on in those that follow."""
        num = self._ring.layout.frame_stack - 1
        while num and other is not None:
            tail, head = self._ring.place(one.tail), self._ring.place(other.start)
            for name in self._observation:
                values = self._ring.rows[name]
                values[head - num : head] = values[tail - num : tail]
            if other.length >= num:
                return
            one, other = other, other.after


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    # The same bytes, nearly always; comparing numbers takes ten times as long where they are few.
    if one.tobytes() == other.tobytes():
        return True
    # A NaN, where a log-probability is not known, is the same as another.
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
