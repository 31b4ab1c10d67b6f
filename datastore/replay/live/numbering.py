"""Numbering: which items there are, of each kind that is sampled, as runs come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.replay.items.episodes import Episodes
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.layout import BOOTSTRAPPABLE
from replaylake.datastore.replay.live.candidates import LiveCandidates, Refresh
from replaylake.datastore.replay.live.ring import Ring
from replaylake.datastore.replay.live.runs import LiveRun, RunIndex
from replaylake.datastore.replay.protocols import Item
from replaylake.datastore.replay.record_runs import Runs
from replaylake.datastore.replay.records import Packed, Records

_NONE: Final = np.zeros(0, np.int64)
# What comes later changes which sequences there are by no more than their length before it.
_CHAIN_STEPS: Final = 4096


class ItemNumbering:
    """Candidates of each kind of item, from when it is first asked for."""

    def __init__(self, ring: Ring, runs: Collection[LiveRun], table: RunIndex) -> None:
        """Take the ring and the runs that are in it, in their order, and by episode and step."""
        self._ring = ring
        self._runs = runs
        self._table = table
        self._candidates: dict[Item, LiveCandidates] = {}
        self._finished: dict[Sequences, FinishedSequences] = {}

    def candidates(self, item: Item, refresh: Refresh) -> LiveCandidates:
        """Return the items of a kind that there are, kept up to date from now on."""
        if item not in self._candidates:
            result = LiveCandidates(self._ring, refresh)
            result.add(self._starts(item, [run for run in self._runs if run.is_there]))
            self._candidates[item] = result
        return self._candidates[item]

    def find_finished_candidates(self, item: Item, refresh: Refresh) -> LiveCandidates:
        """Return the items to which no step is added any more, kept up to date from now on."""
        if not isinstance(item, Sequences):
            return self.candidates(item, refresh)
        if item not in self._finished:
            self._finished[item] = FinishedSequences(
                item,
                LiveCandidates(self._ring, refresh),
                self._ring,
                self._table,
                [run for run in self._runs if run.is_there],
            )
        return self._finished[item].candidates

    def add_runs(
        self, packed: Packed, shift: int, runs: Sequence[LiveRun], *, are_new: bool = True
    ) -> None:
        """Give numbers to the items that there are now, as these runs came or grew.

        packed: their new steps, positions of which are `shift` less than in the ring.
        """
        alone = are_new and not any(run.before or run.after for run in runs)
        for item, candidates in self._candidates.items():
            if alone or isinstance(item, Transitions):
                candidates.add(item.starts(packed) + shift)
            else:
                candidates.add_new(self._starts(item, runs))
        for finished in self._finished.values():
            finished.add_runs(runs)

    def add_late_step(self, position: int) -> None:
        """Take a step that can be bootstrapped only now, as what follows it came.

        Of items other than transitions those runs decide, which come with it.
        """
        place = self._ring.place(position)
        alone = Packed(
            records=Records(self._ring.layout, self._ring.words, has_links=False),
            runs=Runs(_NONE, _NONE, _NONE, _NONE, _NONE),
            steps=_NONE,
            bootstrappable=np.array([place]),
            num_steps=0,
            num_episodes=0,
        )
        for item, candidates in self._candidates.items():
            if isinstance(item, Transitions):
                candidates.add(item.starts(alone) + (position - place))

    def clear(self, position: int, num: int) -> None:
        """Note that new records come at a position."""
        place = self._ring.place(position)
        for candidates in self._all():
            candidates.clear(slice(place, place + num))

    def forget(self) -> None:
        """Note that some items are gone."""
        for candidates in self._all():
            candidates.forget()
        for finished in self._finished.values():
            finished.forget()

    def _all(self) -> Iterator[LiveCandidates]:
        yield from self._candidates.values()
        yield from (finished.candidates for finished in self._finished.values())

    def _starts(self, item: Item, runs: Iterable[LiveRun]) -> NDArray[np.int64]:
        """Return where items start in the chains of some runs, in order of arrival."""
        chains = _chains(runs, None if isinstance(item, Episodes) else _CHAIN_STEPS)
        # One whose beginning is not there looks like the rest of another, if that has its length.
        whole = [run for chain in chains if not chain[0].offset for run in chain]
        starts = [
            item.starts(self._show(part))
            for part in (whole, *(chain for chain in chains if chain[0].offset))
            if part
        ]
        places = np.concatenate(starts) if starts else _NONE
        # All there is lies less than one round of the ring after `low`.
        return np.sort(self._ring.low + (places - self._ring.low) % self._ring.size)

    def _show(self, runs: Sequence[LiveRun]) -> Packed:
        startable = self._ring.startable
        places = [(self._ring.place(run.start), run.length) for run in runs]
        steps = [place + np.flatnonzero(startable[place : place + num]) for place, num in places]
        return show_runs(self._ring, runs, np.sort(np.concatenate(steps)))


def show_runs(ring: Ring, runs: Sequence[LiveRun], steps: NDArray[np.int64]) -> Packed:
    """Show runs of the ring by their places; `steps` are those at which items may start."""
    records = Records(ring.layout, ring.words, has_links=False)
    columns = [
        (ring.place(run.start), run.length, run.offset, run.first_step, int(run.ended))
        for run in runs
    ]
    return Packed(
        records=records,
        runs=Runs(*np.array(columns, np.int64).reshape(-1, 5).T.copy()),
        steps=steps,
        bootstrappable=steps[records.rows[BOOTSTRAPPABLE][steps]],
        num_steps=sum(run.length for run in runs),
        num_episodes=len({run.episode for run in runs}),
    )


def _chains(runs: Iterable[LiveRun], limit: int | None) -> list[list[LiveRun]]:
    """Return the chains of some runs; of each about `limit` steps to either side of a run."""
    visited: set[LiveRun] = set()
    chains = []
    for run in runs:
        if run in visited:
            continue
        head, num = run, 0
        while head.before is not None and (limit is None or num < limit):
            head = head.before
            num += head.length
        chain = []
        at: LiveRun | None = head
        num += limit or 0
        while at is not None and (limit is None or num > 0):
            chain.append(at)
            num, at = num - at.length, at.after
        visited.update(chain)
        chains.append(chain)
    return chains


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
        self._add([at for e in episodes for at in self._find_finished(e, gaps_stay=True)])

    def add_runs(self, runs: Iterable[LiveRun]) -> None:
        """Give numbers to those that are finished now, as these runs came, grew or were linked."""
        starts: list[int] = []
        newest = 0
        for run in runs:
            newest = max(newest, run.tail)
            starts += self._find_finished(run.episode)
            if run.before is None and run.first_step > self._next.get(run.episode, (0, 0))[0]:
                self._gaps.append((run.start, run.episode))
        while self._gaps and self._gaps[0][0] + self._patience < newest:
            starts += self._find_finished(self._gaps.popleft()[1], gaps_stay=True)
        self._add(starts)

    def forget(self) -> None:
        """Note that some episodes are gone."""
        if len(self._next) > 2 * len(self._table) + 1024:
            self._next = {e: at for e, at in self._next.items() if e in self._table}

    def _add(self, starts: list[int]) -> None:
        if starts:
            self.candidates.add(np.sort(np.array(starts, np.int64)))

    def _find_finished(self, episode: bytes, *, gaps_stay: bool = False) -> list[int]:
        """Return where the next sequences of an episode begin that are finished, as positions."""
        step, begin = self._next.get(episode, (0, 0))
        starts: list[int] = []
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
                starts.append(position)
            step = min(step + self._item.length - self._item.overlap, last.end)
        self._next[episode] = step, begin
        return starts

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
