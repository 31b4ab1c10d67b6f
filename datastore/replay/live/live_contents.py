"""Contents: what a live view holds, as it comes, is changed and falls out. One thread at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.spaces import leaves
from replaylake.datastore.replay.layout import BOOTSTRAPPABLE, KEY, STEPS_LEFT, RecordLayout
from replaylake.datastore.replay.live.numbering import ItemNumbering, show_runs
from replaylake.datastore.replay.live.packed_block import (
    PackedBlock,
    RunPart,
    cut_block,
    slice_runs,
)
from replaylake.datastore.replay.live.ring import Ring
from replaylake.datastore.replay.live.runs import (
    IntervalSet,
    LiveRun,
    RunIndex,
    StepInterval,
    intersect,
    subtract,
)
from replaylake.datastore.replay.records import Packed


class LiveContents:
    """The newest steps, at most `max_steps`, in a ring; and the items that they make."""

    def __init__(
        self, layout: RecordLayout, max_steps: int, *, changes_in_place: bool = True
    ) -> None:
        """Where a label may decide at which steps items start, change no step, but add it anew."""
        self._in_place = changes_in_place
        self.ring = Ring(layout, max_steps)
        self._runs: deque[LiveRun] = deque()
        self._table = RunIndex()
        self.items = ItemNumbering(self.ring, self._runs, self._table)
        self.num_steps = 0
        self.num_transitions = 0
        self._max_steps = max_steps
        # At a time: as many fall out first, and there is always something to sample.
        self._most_steps = min(self.ring.margin - layout.frame_stack, -(-max_steps // 4))
        self._head = self.ring.size
        self._links = RunLinks(self.ring, self._add_late_step)
        self._cut_off: list[LiveRun] = []

    def add(self, block: PackedBlock) -> None:
        """Add those steps of a block that are not there yet, in its order."""
        runs: list[LiveRun] = []
        for number, steps in enumerate(block.intervals):
            overlaps = self._table.overlapping(steps) if steps.episode in self._table else []
            if overlaps or steps.length > self._most_steps:
                self._insert_runs(block, runs, number)
                runs = []
                parts = self._parts(number, steps, subtract(steps, overlaps))
                if parts:
                    self.add(cut_block(block, parts))
            else:
                ended = bool(block.packed.runs.ended[number])
                final = bool(block.has_final[number])
                runs.append(LiveRun(*steps, ended=ended, has_final=final))
                self._table.add(runs[-1])
        self._insert_runs(block, runs, len(block))

    def replace(self, blocks: Sequence[PackedBlock], removed: IntervalSet) -> None:
        """Take blocks in place of what was removed: steps go, stay with other values, or come.

        A step that was removed and comes again, but is not there, fell out before: it stays away.
        """
        added = IntervalSet(steps for block in blocks for steps in block.intervals)
        for steps in removed:
            self._remove(subtract(steps, added.within(steps)))
        for block in blocks:
            comes: list[RunPart] = []
            for number, steps in enumerate(block.intervals):
                again = removed.within(steps)
                for part in again:
                    comes += self._change_steps(block, number, part)
                comes += self._parts(number, steps, subtract(steps, again))
            if comes:
                self.add(cut_block(block, sorted(comes)))
        self._settle()

    def _change_steps(self, block: PackedBlock, number: int, steps: StepInterval) -> list[RunPart]:
        """Change those of a run's steps that are there; return what has to be added anew."""
        comes: list[RunPart] = []
        for run in self._table.overlapping(steps):
            common = intersect(steps, run)
            if not (self._in_place and self._links.change(run, block, number, common)):
                self._remove([common])
                comes += self._parts(number, block.intervals[number], [common])
        return comes

    def retain(self, intervals: IntervalSet) -> None:
        """Remove all steps but those of a set."""
        for run in list(self._runs):
            if run.is_there:
                self._remove(list(subtract(run.interval, intervals.within(run.interval))))
        self._settle()

    def extend(self, run: LiveRun, block: PackedBlock) -> bool:
        """Put a block's one run, which follows a run at once, into the room kept after that.

        False, and nothing done, where there is no room or the steps are there already.
        """
        steps = block.intervals[0]
        if not run.is_there or run.tail + steps.length >= run.limit or run.ended:
            return False
        if steps.length > self._most_steps:
            return False
        if self._table.overlapping(steps) or self._table.at(steps.episode, steps.end):
            return False
        self._evict(self.num_steps + steps.length - self._max_steps)
        if not run.is_there:
            return False
        packed, at = block.packed, run.tail
        local = int(packed.runs.starts[0])
        place, before = self.ring.place(at), run.length + self.ring.layout.frame_stack - 1
        with self.ring.editing() as rows:
            words = packed.records.words[local : local + steps.length + 1]
            self.ring.words[place : place + len(words)] = words
            rows[STEPS_LEFT][place - before : place] += steps.length
        run.length += steps.length
        run.ended, run.has_final = bool(packed.runs.ended[0]), bool(block.has_final[0])
        self.ring.startable[self.ring.places(packed.steps + (at - local))] = True
        self.items.add_runs(packed, at - local, [run], are_new=False)
        self._count(packed)
        return True

    def release_room(self, run: LiveRun) -> None:
        """Let go of the room that was kept after a run."""
        if run.limit == self._head:
            self._head = run.tail + 1
        run.limit = run.tail + 1

    def append(self, block: PackedBlock, room: int) -> LiveRun | None:
        """Add a block of one run, and keep room for as many more records; return the run.

        None where some of its steps are there already, or they are too many for one run.
        """
        (steps,) = block.intervals
        if self._table.overlapping(steps) or steps.length > self._most_steps:
            self.add(block)
            return None
        ended, final = bool(block.packed.runs.ended[0]), bool(block.has_final[0])
        run = LiveRun(*steps, ended=ended, has_final=final)
        self._table.add(run)
        self._insert(block, [run], 0, room)
        return run

    def _parts(
        self, number: int, steps: StepInterval, intervals: Iterable[StepInterval]
    ) -> list[RunPart]:
        """Return parts of a run, none longer than may be written at once."""
        limit = self._most_steps
        return [
            RunPart(number, at - steps.first_step, min(limit, part.end - at))
            for part in intervals
            for at in range(part.first_step, part.end, limit)
        ]

    def _insert_runs(self, block: PackedBlock, runs: Sequence[LiveRun], until: int) -> None:
        """Insert consecutive runs of a block, the last one before `until`, a few at a time."""
        first = until - len(runs)
        lengths = block.packed.runs.lengths[first:until]
        num_records = np.cumsum(lengths + block.layout.frame_stack)
        num_steps = np.cumsum(lengths)
        at = records = steps = 0
        while at < len(runs):
            num = min(
                int(np.searchsorted(num_records, records + self.ring.margin, "right")),
                int(np.searchsorted(num_steps, steps + self._most_steps, "right")),
            )
            self._insert(block, runs[at:num], first + at)
            at, records, steps = num, int(num_records[num - 1]), int(num_steps[num - 1])

    def _insert(
        self, block: PackedBlock, runs: Sequence[LiveRun], first: int, room: int = 0
    ) -> None:
        packed, until = block.packed, first + len(runs)
        before = block.layout.frame_stack - 1
        starts = packed.runs.starts[first:until]
        begin, end = int(starts[0]) - before, int(starts[-1]) + runs[-1].length + 1
        self._evict(self.num_steps + sum(run.length for run in runs) - self._max_steps)
        base = self._reserve(end - begin, room)
        shift = base - begin
        self.items.clear(base, end - begin + room)
        self.ring.write(base, packed.records.words[begin:end], room)
        for run, start in zip(runs, starts.tolist(), strict=True):
            run.start, run.limit = start + shift, start + shift + run.length + 1
            self.ring.first[self.ring.place(run.start)] = run.first_step == 0
        runs[-1].limit = base + end - begin + room
        self._runs.extend(runs)
        some = slice_runs(packed, first, until)
        self.ring.startable[self.ring.places(some.steps + shift)] = True
        for run in runs:
            self._links.connect(run, self._table)
        self.items.add_runs(some, shift, runs)
        self._count(some)

    def _count(self, packed: Packed) -> None:
        """Count new steps: once they can be sampled, as others wait for the counts."""
        self.num_transitions += len(packed.bootstrappable)
        self.num_steps += packed.num_steps

    def _add_late_step(self, run: LiveRun) -> None:
        """Take the last step of a run that can be bootstrapped now, as what follows it came."""
        position = run.tail - 1
        if position >= self.ring.low and self.ring.startable[self.ring.place(position)]:
            self.items.add_late_step(position)
            self.num_transitions += 1

    def _reserve(self, num: int, room: int) -> int:
        """Return the position of the next `num` records and `room` more, in one piece."""
        ring = self.ring
        if ring.place(self._head) + num + room > ring.size:
            self._head += ring.size - ring.place(self._head)
        base = self._head
        self._head += num + room
        # What is written comes a margin below what may be read.
        self._evict_below(self._head + ring.margin - ring.size)
        return base

    def _evict(self, num_steps: int) -> None:
        """Let the oldest steps fall out, `num_steps` of them at least."""
        if num_steps <= 0:
            return
        low = self.ring.low
        for run in self._runs:
            if run.is_there:
                if run.length >= num_steps:
                    low = run.start + num_steps
                    break
                num_steps -= run.length
            low = run.tail + 1
        self._evict_below(low)

    def _evict_below(self, low: int) -> None:
        if low <= self.ring.low:
            return
        before, self.ring.low = self.ring.low, low
        self._retract_starts(before, low)
        while self._runs and self._runs[0].start < low:
            run = self._runs[0]
            if run.is_there:
                num = min(low - run.start, run.length)
                self._links.unlink_before(run)
                self.num_steps -= num
                if num == run.length:
                    self._links.unlink_after(run)
                    self._table.remove(run)
                    run.is_there = False
                else:
                    run.start, run.first_step = run.start + num, run.first_step + num
                    run.length, run.offset = run.length - num, run.offset + num
                    break
            self._runs.popleft()
        self.items.forget()

    def _remove(self, intervals: Iterable[StepInterval]) -> None:
        """Remove steps, of those that are there. What came before them is settled later."""
        for steps in intervals:
            for run in self._table.overlapping(steps):
                rest = list(subtract(run.interval, [steps]))
                parts = [RunPart(0, part.first_step - run.first_step, part.length) for part in rest]
                rows = (
                    cut_block(self._block_of(run), parts, with_successors=False) if parts else None
                )
                self._discard_run(run)
                if rows is not None:
                    self.add(rows)

    def _settle(self) -> None:
        """Take the successor from last steps whose successors went and did not come again."""
        for run in self._cut_off:
            if run.is_there and run.after is None and not run.has_final:
                self.num_transitions -= self._links.open_end(run)
        self._cut_off.clear()
        self.items.forget()

    def _discard_run(self, run: LiveRun) -> None:
        """Remove a run of which nothing has fallen out."""
        self._retract_starts(run.start, run.tail)
        self.num_steps -= run.length
        self._table.remove(run)
        run.is_there = False
        if run.before is not None:
            self._cut_off.append(run.before)
        self._links.unlink_before(run)
        self._links.unlink_after(run)

    def _retract_starts(self, first: int, until: int) -> None:
        """Let no item start from one position up to another any more."""
        until = min(until, first + self.ring.size)
        flags = self.ring.rows[BOOTSTRAPPABLE]
        while first < until:
            place = self.ring.place(first)
            some = slice(place, min(self.ring.size, place + until - first))
            startable = self.ring.startable[some]
            self.num_transitions -= int(np.count_nonzero(startable & flags[some]))
            startable[:] = False
            first += some.stop - some.start

    def _block_of(self, run: LiveRun) -> PackedBlock:
        """Show a run in the ring as a block."""
        place = self.ring.place(run.start)
        steps = place + np.flatnonzero(self.ring.startable[place : place + run.length])
        return PackedBlock(
            show_runs(self.ring, [run], steps),
            [run.interval],
            np.array([run.has_final]),
        )


class RunLinks:
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

    def change(self, run: LiveRun, block: PackedBlock, number: int, steps: StepInterval) -> bool:
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
        changed = [name for name in self._values if not _is_equal(new[name], old[name])]
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
        is_same = all(_is_equal(rows[name][tail], rows[name][head]) for name in self._observation)
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


def _is_equal(one: np.ndarray, other: np.ndarray) -> bool:
    # The same bytes, nearly always; comparing numbers takes ten times as long where they are few.
    if one.tobytes() == other.tobytes():
        return True
    # A NaN, where a log-probability is not known, is the same as another.
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
