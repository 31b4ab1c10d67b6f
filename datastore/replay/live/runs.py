"""Which steps of which episodes a live view has, and where: looked up by episode and step."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, NamedTuple

_FIRST_STEP: Final = attrgetter("first_step")


class StepInterval(NamedTuple):
    """Consecutive steps of one episode and agent, which its 16 bytes in row keys stand for."""

    episode: bytes
    first_step: int
    length: int

    @property
    def end(self) -> int:
        """The step after the last one."""
        return self.first_step + self.length


@dataclass(slots=True, eq=False)
class LiveRun:
    """A run in a ring. About 250 bytes; it is gone when its last step is.

    start: position of the first step. limit: position up to which records are its own, written or
    not. offset: steps of the same chain before it, also those that fell out. ended: whether the
    last step terminated or was truncated. has_final: whether the observation after it came with
    it, and not with the step that follows. before, after: the runs that it is linked to.
    """

    episode: bytes
    first_step: int
    length: int
    start: int = -1
    limit: int = -1
    offset: int = 0
    ended: bool = False
    has_final: bool = False
    is_there: bool = True
    before: LiveRun | None = field(default=None, repr=False)
    after: LiveRun | None = field(default=None, repr=False)

    @property
    def end(self) -> int:
        """The step after the last one."""
        return self.first_step + self.length

    @property
    def interval(self) -> StepInterval:
        return StepInterval(self.episode, self.first_step, self.length)

    @property
    def tail(self) -> int:
        """Position of the record after the last step."""
        return self.start + self.length


class RunIndex:
    """Runs by episode and step; those of one episode do not overlap."""

    def __init__(self) -> None:
        self._runs: dict[bytes, list[LiveRun]] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, episode: bytes) -> bool:
        return episode in self._runs

    def add(self, run: LiveRun) -> None:
        """Add a run."""
        runs = self._runs.setdefault(run.episode, [])
        if runs and runs[-1].first_step > run.first_step:
            insort(runs, run, key=_FIRST_STEP)
        else:
            runs.append(run)

    def remove(self, run: LiveRun) -> None:
        """Remove a run that is there."""
        runs = self._runs[run.episode]
        if len(runs) == 1:
            del self._runs[run.episode]
        else:
            del runs[bisect_left(runs, run.first_step, key=_FIRST_STEP)]

    def overlapping(self, steps: StepInterval) -> list[LiveRun]:
        """Return the runs that have some of these steps, in order."""
        runs = self._runs.get(steps.episode)
        if runs is None or runs[-1].end <= steps.first_step:
            return []
        at = max(0, bisect_left(runs, steps.first_step, key=_FIRST_STEP) - 1)
        until = bisect_left(runs, steps.end, key=_FIRST_STEP)
        return [run for run in runs[at:until] if run.end > steps.first_step]

    def at(self, episode: bytes, step: int) -> LiveRun | None:
        """Return the run that has a step."""
        run = self.first_from(episode, step)
        return run if run is not None and run.first_step <= step else None

    def first_from(self, episode: bytes, step: int) -> LiveRun | None:
        """Return the run that has a step, or else the next one of its episode."""
        runs = self._runs.get(episode)
        # Pieces come in order, nearly always: what is asked for is at the end.
        if runs is None or runs[-1].end <= step:
            return None
        if len(runs) == 1 or runs[-2].end <= step:
            return runs[-1]
        at = bisect_left(runs, step + 1, key=_FIRST_STEP)
        if at and runs[at - 1].end > step:
            return runs[at - 1]
        return runs[at]


def subtract(
    steps: StepInterval, others: Iterable[StepInterval | LiveRun]
) -> Iterator[StepInterval]:
    """Return what is left of some steps without those of others, which are in order."""
    at = steps.first_step
    for other in others:
        if other.first_step > at:
            yield StepInterval(steps.episode, at, min(other.first_step, steps.end) - at)
        at = max(at, other.end)
    if at < steps.end:
        yield StepInterval(steps.episode, at, steps.end - at)


def intersect(steps: StepInterval, other: StepInterval | LiveRun) -> StepInterval:
    """Return the steps that two which overlap have in common."""
    first = max(steps.first_step, other.first_step)
    return StepInterval(steps.episode, first, min(steps.end, other.end) - first)


class IntervalSet:
    """Steps by episode: what some shards hold."""

    def __init__(self, intervals: Iterable[StepInterval]) -> None:
        self._table = RunIndex()
        self._all: list[StepInterval] = []
        for interval in intervals:
            for part in list(subtract(interval, self._table.overlapping(interval))):
                self._table.add(LiveRun(*part))
                self._all.append(part)

    def __iter__(self) -> Iterator[StepInterval]:
        return iter(self._all)

    def within(self, steps: StepInterval) -> list[StepInterval]:
        """Return which of some steps are in the set, in order."""
        return [intersect(steps, run) for run in self._table.overlapping(steps)]
