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

from bisect import bisect_right
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


@dataclass(eq=False, slots=True)
class StepSlot:
    """A step to be, and the decisions that were made for it, in order of time.

    order: the place, among all decisions of the client episode, of the one that put it where it is.
    """

    decisions: list[Decision]
    chosen: Decision
    order: int


@dataclass(slots=True)
class TimelineEpisode:
    """One episode: its slots, in order."""

    by_step: bool
    slots: list[StepSlot] = field(default_factory=list)
    _of_name: dict[int | str, StepSlot] = field(default_factory=dict)
    _newest: int = -1
    end: int | None = None  # the client's step of the decision that ended it

    @property
    def decisions(self) -> list[Decision]:
        return [decision for slot in self.slots for decision in slot.decisions]

    def number(self, place: int) -> int:
        """Return the number of the slot at a place."""
        step = self.slots[place].chosen.step
        return step if self.by_step and step is not None else place

    def find_slot(self, step: int) -> StepSlot | None:
        """Return the slot that has a number, or None."""
        if self.by_step:
            return self._of_name.get(step)
        return self.slots[step] if step < len(self.slots) else None

    def can_take(self, decision: Decision) -> bool:
        """Whether a decision, later than those here, belongs here rather than to a new episode."""
        if not self.by_step or decision.step is None:
            return self.end is None
        slot = self._of_name.get(decision.step)
        if self.end is not None:
            return decision.step < self.end and slot is None
        if slot is None or decision.step == self._newest:
            return True
        return decision.request_id is not None and any(
            decision.request_id == other.request_id for other in slot.decisions
        )

    def add(self, decision: Decision, order: int, rank: Rank) -> StepSlot:
        """Put a decision, which is at place `order` of all, into its slot, or into a new one."""
        name = decision.step if self.by_step else decision.request_id
        slot = None if name is None else self._of_name.get(name)
        if slot is not None and not self.by_step:
            both = rank(decision.key) and rank(slot.chosen.key)
            slot = None if both else slot
        if self.by_step and decision.step is not None:
            self._newest = max(self._newest, decision.step)
        if slot is None:
            slot = StepSlot([decision], decision, order)
            self.slots.append(slot)
            if name is not None:
                self._of_name[name] = slot
            return slot
        slot.decisions.append(decision)
        if rank(decision.key) >= rank(slot.chosen.key):
            slot.chosen = decision
            if not self.by_step:
                self._remove(slot)
                self.slots.append(slot)
                slot.order = order
        return slot

    def _remove(self, slot: StepSlot) -> None:
        # From the end: who asks again does so soon.
        for place in range(len(self.slots) - 1, -1, -1):
            if self.slots[place] is slot:
                del self.slots[place]
                return

    def sort_slots(self) -> TimelineEpisode:
        """Return it with its slots by number."""
        if self.by_step:
            self.slots.sort(key=lambda slot: slot.chosen.step or 0)
        return self


class Timeline:
    """Decisions of one client episode, taken in the order of time.

    `ends` says whether the episode ends with a decision. Cost: linear. An end that becomes known
    after later decisions costs another pass from there to the next end or repeated step, once
    something is asked that depends on it: a request that has one decision does not.
    """

    def __init__(self, by_step: bool, ends: Callable[[str], bool], rank: Rank) -> None:
        self._by_step, self._ends, self._rank = by_step, ends, rank
        self._decisions: list[Decision] = []
        self._place_of: dict[str, int] = {}
        self._episodes: list[TimelineEpisode] = []
        self._begins: list[int] = []  # the place of each stretch's first decision
        self._slot_of: dict[str, StepSlot] = {}  # by request, the last one with a decision of it
        self._only: dict[str, Decision | None] = {}  # by request, its decision; None for several
        self._stale: tuple[int, int] | None = None  # first and last place of an end that changed

    @property
    def episodes(self) -> list[TimelineEpisode]:
        """The episodes so far, in order of time."""
        self._cut()
        return self._episodes

    def take(self, decision: Decision) -> None:
        """Add a decision that is no older than those before."""
        place = len(self._decisions)
        self._decisions.append(decision)
        self._place_of[decision.key] = place
        if (request_id := decision.request_id) is not None:
            self._only[request_id] = None if request_id in self._only else decision
        self._name(decision, self._put(place))

    def recut(self, key: str) -> None:
        """Cut anew, as a decision ends the episode now, or no longer does."""
        if self._ends(key) and key == self._decisions[-1].key:
            newest = self._episodes[-1]
            newest.end = max(newest.end or 0, self._decisions[-1].step or 0)
            return
        place = self._place_of[key]
        first, last = (place, place) if self._stale is None else self._stale
        self._stale = min(first, place), max(last, place)

    def find_request(self, request_id: str) -> Decision | None:
        """Return the decision that the newest step of that request is, or None."""
        if not self._by_step and (only := self._only.get(request_id)) is not None:
            return only
        self._cut()
        slot = self._slot_of.get(request_id)
        return None if slot is None else slot.chosen

    def find_step(self, step: int, *, oldest: bool = False) -> Decision | None:
        """Return the decision that has a number, in the newest episode that has it, or None."""
        stretches = self.episodes
        slots = (episode.find_slot(step) for episode in (stretches if oldest else stretches[::-1]))
        return next((slot.chosen for slot in slots if slot is not None), None)

    def _put(self, place: int) -> StepSlot:
        decision = self._decisions[place]
        if not self._episodes or not self._episodes[-1].can_take(decision):
            self._episodes.append(TimelineEpisode(self._by_step))
            self._begins.append(place)
        episode = self._episodes[-1]
        slot = episode.add(decision, place, self._rank)
        if self._ends(decision.key):
            episode.end = max(episode.end or 0, decision.step or 0)
        return slot

    def _name(self, decision: Decision, slot: StepSlot) -> None:
        if decision.request_id is not None:
            other = self._slot_of.get(decision.request_id)
            if other is None or other.order <= slot.order:
                self._slot_of[decision.request_id] = slot

    def _cut(self) -> None:
        """Cut anew around the ends that changed, as far as it makes a difference."""
        if self._stale is None:
            return
        (first, last), self._stale = self._stale, None
        number = bisect_right(self._begins, first) - 1
        olds, begins = self._episodes[number:], self._begins[number:]
        del self._episodes[number:], self._begins[number:]
        slots, num_gone = [], 0
        for place in range(begins[0], len(self._decisions)):
            if num_gone < len(olds) and begins[num_gone] == place:
                if place > last and not self._episodes[-1].can_take(self._decisions[place]):
                    break  # cut here before and now: what follows depends on nothing earlier
                num_gone += 1
            slots.append(self._put(place))
        self._episodes += olds[num_gone:]
        self._begins += begins[num_gone:]
        for episode in olds[:num_gone]:
            self._forget(episode)
        for decision, slot in zip(self._decisions[begins[0] :], slots, strict=False):
            self._name(decision, slot)

    def _forget(self, episode: TimelineEpisode) -> None:
        for slot in episode.slots:
            for decision in slot.decisions:
                request_id = decision.request_id
                if request_id is not None and self._slot_of.get(request_id) is slot:
                    del self._slot_of[request_id]


def cut_episodes(
    decisions: Collection[Decision], ends: Callable[[str], bool], rank: Rank
) -> list[TimelineEpisode]:
    """Return the episodes that decisions of one client episode, in order of time, make."""
    timeline = Timeline(has_steps(decisions), ends, rank)
    for decision in decisions:
        timeline.take(decision)
    return [episode.sort_slots() for episode in timeline.episodes]


def has_steps(decisions: Collection[Decision]) -> bool:
    """Whether the client numbered all of them."""
    return all(decision.step is not None for decision in decisions)


def number_steps(episode: TimelineEpisode, known: Mapping[str, int]) -> dict[str, int]:
    """Return the step's number of each decision that may be one, those in `known` as they are.

    Between two known ones there is room for as many as were counted when they were written: for all
    decisions of theirs, or for the slots. A decision for which there is none is not in the answer.
    """
    decisions = sorted(decision.key for decision in episode.decisions)
    written = {key: known[key] for key in decisions if key in known}
    chosen = {slot.chosen.key: episode.number(i) for i, slot in enumerate(episode.slots)}
    if episode.by_step:
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
