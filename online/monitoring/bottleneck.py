"""Bottleneck: what holds a run up, from how long its links took and its two sides waited.

The trainer and its workers are stations in a ring: what one hands over, the other takes. The one
that is busy for most of its time bounds what the ring does, and the others wait for it (Denning and
Buzen 1978, "The operational analysis of queueing network models").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from replaylake.online.monitoring.timings import Link

Place = Literal["workers", "trainer"]
Cause = Literal["learner", "workers", "storage", "rate limiter"]


@dataclass(frozen=True)
class _Group:
    """Links that one place spends its time on, for one cause."""

    cause: Cause
    place: Place
    links: tuple[Link, ...]


_GROUPS: Final = (
    _Group("learner", "trainer", ("sample", "to_device", "update", "broadcast")),
    _Group("workers", "workers", ("env_step", "inference")),
    _Group("storage", "workers", ("encode", "shard_write")),
    _Group("storage", "trainer", ("commit", "tail", "decode")),
)
WORKER_LINKS: Final = frozenset(
    {"worker_wait", *(link for one in _GROUPS if one.place == "workers" for link in one.links)}
)
WAITS: Final[frozenset[Link]] = frozenset({"worker_wait", "learner_wait"})
# Who waits less than this share of its time waits for nobody: for a message, the end of a batch.
_IDLE: Final = 0.1
# Less than this of a place's time is not worth a word.
_TOLD: Final = 0.005
# Of two that wait, one holds the other up if it waits less than half as much.
_HALF: Final = 0.5


@dataclass(frozen=True)
class Bottleneck:
    """What holds a run up. link: the one that takes most of it; None where nobody works."""

    cause: Cause
    link: Link | None
    reason: str


def find_bottleneck(
    seconds: Mapping[Link, float], wall_s: float, num_workers: int, *, is_sync: bool = False
) -> Bottleneck:
    """Name what holds a run up.

    Args:
        seconds: by link, of all processes together.
        wall_s: seconds that the run took meanwhile, more than 0.
        num_workers: processes beside the trainer's; 0 where the trainer collects itself.
        is_sync: whether the two sides take turns, so that both wait by intent.

    Of the trainer and the workers, the one that waits less than half as long as the other, as a
    share of its own time, holds the run up; the storage does where commits, or looking for them,
    take longer than what the workers do. Where both wait alike it is what lies between them: the
    storage if it takes a tenth of the time, else the limit on how far they may run apart. Where
    nobody waits, or one process does all, it is what takes most.
    """
    waits = ""
    groups = list(_GROUPS)
    if num_workers > 0:
        idle = seconds.get("learner_wait", 0.0) / wall_s
        workers_idle = seconds.get("worker_wait", 0.0) / (wall_s * num_workers)
        waits = (
            f"; the learner waits {_percent(idle)} of its time, the workers "
            f"{_percent(workers_idle)}"
        )
        if max(idle, workers_idle) < _IDLE:
            pass
        elif workers_idle < _HALF * idle:
            groups = [one for one in groups if one.cause != "learner"]
        elif idle < _HALF * workers_idle:
            groups = [one for one in groups if one.place == "trainer"]
        else:
            groups = [one for one in groups if one.cause == "storage"]
            if max(_share(one, seconds, wall_s, num_workers) for one in groups) < _IDLE:
                why = "they take turns" if is_sync else "neither may run further ahead"
                return Bottleneck("rate limiter", None, f"{why}{waits}")
    most = max(groups, key=lambda one: _share(one, seconds, wall_s, num_workers))
    shares = {
        link: _share(_Group(most.cause, most.place, (link,)), seconds, wall_s, num_workers)
        for link in most.links
    }
    link = max(most.links, key=lambda link: shares[link])
    whose = "the run's" if num_workers == 0 else f"the {most.place}'s".replace("s's", "s'")
    text = f"{link} takes {_percent(shares[link])} of {whose} time"
    others = [one for one in most.links if one != link and shares[one] >= _TOLD]
    if others:
        text += f", {_percent(sum(shares.values()))} with {' and '.join(others)}"
    unseen = _unseen(most.place, seconds, wall_s, num_workers)
    if unseen > sum(shares.values()):
        text += f", while {_percent(unseen)} of it is in no link"
    return Bottleneck(most.cause, link, text + waits)


def _unseen(place: Place, seconds: Mapping[Link, float], wall_s: float, num_workers: int) -> float:
    """Return which share of a place's time no link accounts for; what has threads may have none."""
    links = tuple(
        link
        for link in seconds
        if num_workers == 0 or (link in WORKER_LINKS) == (place == "workers")
    )
    # The cause does not matter to a share.
    return max(0.0, 1.0 - _share(_Group("storage", place, links), seconds, wall_s, num_workers))


def _share(group: _Group, seconds: Mapping[Link, float], wall_s: float, num_workers: int) -> float:
    """Return which share of its place's time a group of links took."""
    processes = num_workers if group.place == "workers" and num_workers > 0 else 1
    return sum(seconds.get(link, 0.0) for link in group.links) / (wall_s * processes)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.095 or share == 0 else f"{share:.1%}"
