"""FinishedSequences: those sequences of a view that grows to which no step is added any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

import numpy as np

from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.live.candidates import LiveCandidates
from replaylake.datastore.replay.live.ring import Ring
from replaylake.datastore.replay.live.runs import LiveRun, RunIndex


class FinishedSequences:
    """Gives a number to each sequence once it has all T steps, or its episode ended before.

    So each step is in one of them (where they do not overlap), whatever pieces it came in. Of an
    episode whose beginning is not there, or that has a gap, the steps after it wait for what is
    missing, until a quarter of the view came after them; what is missing when this is made, is not
    waited for. An episode that nobody goes on with keeps what is less than T steps.
    """

    def __init__(
        self,
        item: Sequences,
        candidates: LiveCandidates,
        ring: Ring,
        table: RunIndex,
        runs: Collection[LiveRun],
    ) -> None:
        """Take what numbers them, and the runs that are there, which `table` has too."""
        self.candidates = candidates
        self._item = item
        self._ring = ring
        self._table = table
        self._patience = ring.size // 4
        # By episode: the step where its next sequence begins, and that where the first one did of
        # this stretch without a gap.
        self._next: dict[bytes, tuple[int, int]] = {}
        # Where runs behind a gap begin, in order of arrival.
        self._gaps: deque[tuple[int, bytes]] = deque()
        episodes = dict.fromkeys(run.episode for run in runs)
        self._add([at for e in episodes for at in self._found(e, gaps_stay=True)])

    def came(self, runs: Iterable[LiveRun]) -> None:
        """Give numbers to those that are finished now, as these runs came, grew or were linked."""
        starts: list[int] = []
        newest = 0
        for run in runs:
            newest = max(newest, run.tail)
            starts += self._found(run.episode)
            if run.before is None and run.first_step > self._next.get(run.episode, (0, 0))[0]:
                self._gaps.append((run.start, run.episode))
        while self._gaps and self._gaps[0][0] + self._patience < newest:
            starts += self._found(self._gaps.popleft()[1], gaps_stay=True)
        self._add(starts)

    def forget(self) -> None:
        """Note that some episodes are gone."""
        if len(self._next) > 2 * len(self._table) + 1024:
            self._next = {e: at for e, at in self._next.items() if e in self._table}

    def _add(self, starts: list[int]) -> None:
        if starts:
            self.candidates.add(np.sort(np.array(starts, np.int64)))

    def _found(self, episode: bytes, *, gaps_stay: bool = False) -> list[int]:
        """Return where the next sequences of an episode begin that are finished, as positions."""
        step, begin = self._next.get(episode, (0, 0))
        found: list[int] = []
        while (run := self._table.first_from(episode, step)) is not None and run.start >= 0:
            if run.first_step > step:
                if not (gaps_stay or _is_cut_off(run)):
                    break
                step = run.first_step
            if run.first_step == step and run.before is None:
                begin = step
            num, last = self._steps_from(run, step)
            if num < self._item.num_steps:
                if not self._is_closed(last, gaps_stay=gaps_stay):
                    break
                if num <= self._num_known(step, begin):
                    step = last.end
                    continue
            position = run.start + step - run.first_step
            if self._ring.startable[self._ring.place(position)]:
                found.append(position)
            step = min(step + self._item.length - self._item.overlap, last.end)
        self._next[episode] = step, begin
        return found

    def _steps_from(self, run: LiveRun, step: int) -> tuple[int, LiveRun]:
        """Count the steps that are there from one on, T or all; and the run that has the last."""
        while run.end - step < self._item.num_steps and run.after is not None:
            run = run.after
        return run.end - step, run

    def _is_closed(self, last: LiveRun, *, gaps_stay: bool) -> bool:
        """Whether nothing continues a run that is linked to none."""
        if last.ended:
            return True
        following = self._table.first_from(last.episode, last.end)
        if following is None or following.start < 0:
            return False
        # One that follows at once and is not linked begins with another observation.
        return following.first_step == last.end or gaps_stay or _is_cut_off(following)

    def _num_known(self, step: int, begin: int) -> int:
        """Return the first steps of a sequence from which nothing new is learned."""
        if step == begin:
            return self._item.burn_in if step else 0
        return self._item.burn_in + self._item.overlap


def _is_cut_off(run: LiveRun) -> bool:
    """Whether what a run continued fell out, or was removed."""
    return run.before is None and run.offset > 0
