"""Numbering: which items there are, of each kind that is sampled, as runs come and go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.replay.items.episodes import Episodes
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.layout import BOOTSTRAPPABLE
from replaylake.datastore.replay.live.candidates import LiveCandidates
from replaylake.datastore.replay.live.finished import FinishedSequences
from replaylake.datastore.replay.live.ring import Ring
from replaylake.datastore.replay.live.runs import LiveRun, RunIndex
from replaylake.datastore.replay.protocols import Item
from replaylake.datastore.replay.record_runs import Runs
from replaylake.datastore.replay.records import Packed, Records

_NONE: Final = np.zeros(0, np.int64)
# What comes later changes which sequences there are by no more than their length before it.
_CHAIN_STEPS: Final = 4096


class Numbering:
    """Candidates of each kind of item, from when it is first asked for."""

    def __init__(self, ring: Ring, runs: Collection[LiveRun], table: RunIndex) -> None:
        """Take the ring and the runs that are in it, in their order, and by episode and step."""
        self._ring = ring
        self._runs = runs
        self._table = table
        self._candidates: dict[Item, LiveCandidates] = {}
        self._finished: dict[Sequences, FinishedSequences] = {}

    def candidates(self, item: Item, refresh: Callable[[], None]) -> LiveCandidates:
        """Return the items of a kind that there are, kept up to date from now on."""
        if item not in self._candidates:
            made = LiveCandidates(self._ring, refresh)
            made.add(self._starts(item, [run for run in self._runs if run.is_there]))
            self._candidates[item] = made
        return self._candidates[item]

    def finished(self, item: Item, refresh: Callable[[], None]) -> LiveCandidates:
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

    def came(
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
            finished.came(runs)

    def late(self, position: int) -> None:
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
        found = [
            item.starts(self._shown(part))
            for part in (whole, *(chain for chain in chains if chain[0].offset))
            if part
        ]
        places = np.concatenate(found) if found else _NONE
        # All there is lies less than one round of the ring after `low`.
        return np.sort(self._ring.low + (places - self._ring.low) % self._ring.size)

    def _shown(self, runs: Sequence[LiveRun]) -> Packed:
        startable = self._ring.startable
        places = [(self._ring.place(run.start), run.length) for run in runs]
        steps = [place + np.flatnonzero(startable[place : place + num]) for place, num in places]
        return shown(self._ring, runs, np.sort(np.concatenate(steps)))


def shown(ring: Ring, runs: Sequence[LiveRun], steps: NDArray[np.int64]) -> Packed:
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


def _chains(runs: Iterable[LiveRun], most: int | None) -> list[list[LiveRun]]:
    """Return the chains of some runs; of each about `most` steps to either side of a run."""
    seen: set[LiveRun] = set()
    chains = []
    for run in runs:
        if run in seen:
            continue
        head, num = run, 0
        while head.before is not None and (most is None or num < most):
            head = head.before
            num += head.length
        chain = []
        at: LiveRun | None = head
        num += most or 0
        while at is not None and (most is None or num > 0):
            chain.append(at)
            num, at = num - at.length, at.after
        seen.update(chain)
        chains.append(chain)
    return chains
