"""Seats: what a pool of processes knows of each worker, whichever process it is now."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Final

from replaylake.online.collecting.shipment import Endless, Order, Shipment

# Where Ray's messages say it.
_SAID: Final = {
    "pid": re.compile(r"^\s*pid: (\d+)", re.MULTILINE),
    "ip": re.compile(r"^\s*ip: (\S+)", re.MULTILINE),
    "cause": re.compile(
        r"(?:because |is unavailable: )(.*?)(?: Some common causes|: RpcError|$)", re.MULTILINE
    ),
}


@dataclass
class Seat:
    """One worker of a pool.

    order: what that process was made with. ended: numbers of its episodes that ended; num_begun: at
    most so many were begun. owed: steps that were asked for and not handed over. unwritten: a
    shipment that the writer has still to write. deaths: in a row, without a shipment in between.
    ready: what is answered once the process runs. seated_at, started_at, asked_at: when it was
    asked for, was found to run, and was asked for what it owes, by the monotonic clock (s).
    """

    order: Order
    actor: Any = None
    num_cpus: float = 0.0
    acting: Any = None
    ended: set[int] = field(default_factory=set)
    num_ended: int = 0
    owed: int = 0
    asked: int = 0
    open_episodes: tuple[str, ...] = ()
    unwritten: Any = None
    deaths: int = 0
    has_answered: bool = False
    is_first: bool = True
    ready: Any = None
    seated_at: float = 0.0
    started_at: float | None = None
    asked_at: float = 0.0

    def note(self, shipment: Shipment) -> None:
        """Take what a shipment tells of the episodes."""
        numbers = {end.number for end in shipment.ends}
        if not isinstance(self.order.episodes, Endless):
            self.ended |= numbers
        self.num_ended += len(numbers)
        self.owed = 0
        self.open_episodes = tuple(shipment.open_episodes)

    def remaining(self) -> Order:
        """Return what a replacement is to collect: what has not ended, or fresh episodes."""
        episodes = self.order.episodes
        if not isinstance(episodes, Endless):
            left = [number for number in episodes if number not in self.ended]
            return replace(self.order, episodes=left)
        # An episode has a step at least, and every environment may have begun another.
        num_begun = self.num_ended + self.owed + 2 * self.order.config.num_envs
        fresh = Endless(episodes.first + episodes.step * num_begun, episodes.step)
        return replace(self.order, episodes=fresh)


def reason_of(error: Exception) -> str:
    """Return in one line what Ray says of a death in a dozen."""
    text = str(error)
    found = {name: match.group(1) for name, one in _SAID.items() if (match := one.search(text))}
    cause = found.get("cause") or next(iter(text.splitlines()), "") or type(error).__name__
    where = " ".join(f"{name} {found[name]}" for name in ("pid", "ip") if name in found)
    return f"{where}: {cause}" if where else cause
