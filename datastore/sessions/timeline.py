"""Timeline: the decisions of one client episode_id, cut into episodes and those into steps.

A decision after one that ended the episode begins another. Where all decisions have the client's
own step, they are ordered by it and keep it as their number: one that is missing leaves a gap. Then
a step that was there before, and is not the newest, begins another episode, too; and after an end
one that is missing before it still belongs to it, as clocks of workers differ. Otherwise the order
is that of time, and the number the position.

A client that got no answer asks again, under the same request_id or the same step: of such
decisions one becomes the step, if possible one that was named as a decision or is a step already,
else the newest. All that are named as decisions do, unless they share the client's step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Decision(NamedTuple):
    """A row of the decisions table; timestamp in us, `step` the client's own number."""

    key: str
    timestamp: int
    request_id: str | None = None
    step: int | None = None


Rank = Callable[[str], int]
"""Which of the decisions of one slot is the step: the newest of those with the highest rank."""


@dataclass(eq=False)
class Slot:
    """A step to be, and the decisions that were made for it, in order of time."""

    decisions: list[Decision]
    chosen: Decision


@dataclass
class Stretch:
    """One episode: its slots, in order."""

    by_step: bool
    slots: list[Slot] = field(default_factory=list)
    _of_name: dict[int | str, Slot] = field(default_factory=dict)
    _newest: int = -1
    end: int | None = None  # the client's step of the decision that ended it

    @property
    def decisions(self) -> list[Decision]:
        """All of its decisions."""
        return [decision for slot in self.slots for decision in slot.decisions]

    def number(self, place: int) -> int:
        """Return the number of the slot at a place."""
        step = self.slots[place].chosen.step
        return step if self.by_step and step is not None else place

    def slot_of(self, step: int) -> Slot | None:
        """Return the slot that has a number, or None."""
        if self.by_step:
            return self._of_name.get(step)
        return self.slots[step] if step < len(self.slots) else None

    def slot_asked(self, request_id: str) -> Slot | None:
        """Return the last slot with a decision of that request, or None."""
        for slot in reversed(self.slots):
            if any(decision.request_id == request_id for decision in slot.decisions):
                return slot
        return None

    def takes(self, decision: Decision) -> bool:
        """Whether a decision, later than those here, belongs here rather than to a new episode."""
        if not self.by_step or decision.step is None:
            return self.end is None
        held = self._of_name.get(decision.step)
        if self.end is not None:
            return decision.step < self.end and held is None
        if held is None or decision.step == self._newest:
            return True
        return decision.request_id is not None and any(
            decision.request_id == other.request_id for other in held.decisions
        )

    def add(self, decision: Decision, rank: Rank) -> None:
        """Put a decision into its slot, or into a new one."""
        name = decision.step if self.by_step else decision.request_id
        slot = None if name is None else self._of_name.get(name)
        if slot is not None and not self.by_step:
            both = rank(decision.key) and rank(slot.chosen.key)
            slot = None if both else slot
        if self.by_step and decision.step is not None:
            self._newest = max(self._newest, decision.step)
        if slot is None:
            slot = Slot([decision], decision)
            self.slots.append(slot)
            if name is not None:
                self._of_name[name] = slot
            return
        slot.decisions.append(decision)
        if rank(decision.key) >= rank(slot.chosen.key):
            slot.chosen = decision
            if not self.by_step:
                self.slots.remove(slot)
                self.slots.append(slot)

    def ordered(self) -> Stretch:
        """Return it with its slots by number."""
        if self.by_step:
            self.slots.sort(key=lambda slot: slot.chosen.step or 0)
        return self


class Timeline:
    """Decisions of one client episode, taken in the order of time.

    `ends` says whether the episode ends with a decision. Cost: linear, but for ends that become
    known after the next decision.
    """

    def __init__(self, by_step: bool, ends: Callable[[str], bool], rank: Rank) -> None:
        self._by_step, self._ends, self._rank = by_step, ends, rank
        self._taken: list[Decision] = []
        self.stretches: list[Stretch] = []

    def take(self, decision: Decision) -> None:
        """Add a decision that is no older than those before."""
        self._taken.append(decision)
        self._place(decision)

    def cut_again(self, key: str) -> None:
        """Cut anew, as a decision ends the episode now, or no longer does."""
        if self._ends(key) and key == self._taken[-1].key:
            self.stretches[-1].end = self._taken[-1].step or 0
            return
        self.stretches = []
        for decision in self._taken:
            self._place(decision)

    def _place(self, decision: Decision) -> None:
        if not self.stretches or not self.stretches[-1].takes(decision):
            self.stretches.append(Stretch(self._by_step))
        stretch = self.stretches[-1]
        stretch.add(decision, self._rank)
        if self._ends(decision.key):
            stretch.end = max(stretch.end or 0, decision.step or 0)

    def asked(self, request_id: str) -> Decision | None:
        """Return the decision that the newest step of that request is, or None."""
        found = (stretch.slot_asked(request_id) for stretch in reversed(self.stretches))
        return next((slot.chosen for slot in found if slot is not None), None)

    def at(self, step: int, *, oldest: bool = False) -> Decision | None:
        """Return the decision that has a number, in the newest episode that has it, or None."""
        order = self.stretches if oldest else reversed(self.stretches)
        found = (stretch.slot_of(step) for stretch in order)
        return next((slot.chosen for slot in found if slot is not None), None)


def stretches_of(
    decisions: Collection[Decision], ends: Callable[[str], bool], rank: Rank
) -> list[Stretch]:
    """Return the episodes that decisions of one client episode, in order of time, make."""
    timeline = Timeline(has_steps(decisions), ends, rank)
    for decision in decisions:
        timeline.take(decision)
    return [stretch.ordered() for stretch in timeline.stretches]


def has_steps(decisions: Collection[Decision]) -> bool:
    """Whether the client numbered all of them."""
    return all(decision.step is not None for decision in decisions)


def numbers_of(stretch: Stretch, known: Mapping[str, int]) -> dict[str, int]:
    """Return the step's number of each decision that may be one, those in `known` as they are.

    Between two known ones there is room for as many as were counted when they were written: for all
    decisions of theirs, or for the slots. A decision for which there is none is not in the answer.
    """
    decisions = sorted(decision.key for decision in stretch.decisions)
    written = {key: known[key] for key in decisions if key in known}
    chosen = {slot.chosen.key: stretch.number(i) for i, slot in enumerate(stretch.slots)}
    if stretch.by_step:
        taken = {*written.values()}
        fresh = {key: number for key, number in chosen.items() if number not in taken}
        return fresh | written
    if not written:
        return chosen
    numbers = dict(written)
    waiting: list[str] = []
    following = 0
    for key in decisions:
        if key not in written:
            waiting.append(key)
            continue
        room = range(following, written[key])
        keys = waiting if len(waiting) == len(room) else [k for k in waiting if k in chosen]
        numbers |= dict(zip(keys, room, strict=False))
        following, waiting = max(following, written[key] + 1), []
    rest = [key for key in waiting if key in chosen]
    return numbers | {key: number for number, key in enumerate(rest, following)}
