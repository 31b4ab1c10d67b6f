"""Profile: where a run's time and bytes go, link by link, from the totals that it logs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.lake.runs.metrics import LoggedMetrics
from replaylake.datastore.lake.runs.summary import ONLINE
from replaylake.online.monitoring.timings import LINKS, PROFILE, Link, Total

OTHER: Final = "other"
WAITS: Final[frozenset[Link]] = frozenset({"worker_wait", "learner_wait"})
# Who waits less than this share of its time waits for nobody: for a message, the end of a batch.
_IDLE: Final = 0.1
# Less than this of a place's time is not worth a word.
_MIN_SHARE_SHOWN: Final = 0.005
# Of two that wait, one holds the other up if it waits less than half as much.
_IDLE_RATIO: Final = 0.5


@dataclass(frozen=True)
class LinkUse:
    """What one link took, or `other`: what a place did beside them.

    share: of the run's wall time times its processes.
    """

    link: str
    place: Place
    seconds: float
    share: float
    items: int = 0
    num_bytes: int = 0

    @property
    def items_per_s(self) -> float | None:
        """Items a second while it was busy; None of what only waits."""
        is_busy = self.seconds > 0 and self.items > 0 and self.link not in WAITS
        return self.items / self.seconds if is_busy else None

    @property
    def mb_per_s(self) -> float | None:
        """Megabytes (10**6 bytes) a second while it was busy."""
        is_busy = self.seconds > 0 and self.num_bytes > 0
        return self.num_bytes / self.seconds / 1e6 if is_busy else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "items_per_s": self.items_per_s, "mb_per_s": self.mb_per_s}


@dataclass(frozen=True)
class RunProfile:
    """Where the time of a run went, or of its last interval.

    wall_s: seconds at work; those between a kill and its resumption are left out. num_workers: 0
    where the trainer collects itself. until_update: the update of the last totals.
    """

    wall_s: float
    num_workers: int
    until_update: int
    links: tuple[LinkUse, ...]
    bottleneck: Bottleneck

    @property
    def num_processes(self) -> int:
        """The trainer and its workers."""
        return 1 + self.num_workers

    def to_json(self) -> dict[str, Any]:
        return {
            "wall_s": self.wall_s,
            "workers": self.num_workers,
            "processes": self.num_processes,
            "until_update": self.until_update,
            "links": [one.to_json() for one in self.links],
            "bottleneck": asdict(self.bottleneck),
        }


def build_run_profile(
    record: Mapping[str, Any], logged: Sequence[LoggedMetrics], *, only_last: bool = False
) -> RunProfile:
    """Return where the time of a run went.

    Args:
        record: of the run, as the registry has it: when it began and went on, and its config.
        logged: `read_logged(storage, run_id, "profile/")`, in order: totals since the process that
            logged them began. One that goes on with a run counts anew.
        only_last: of the time between the last two totals; from the beginning where there is one.

    Raises: NotFoundError for a run of another kind, or one without totals so far.
    """
    _check(record, logged)
    intervals = list(_intervals(logged, _starts(record)))
    wall_s, totals = _sum(intervals[-1:] if only_last else intervals)
    config = record.get("config") or {}
    num_workers = 0 if config.get("env_runner") == "local" else int(config.get("workers") or 1)
    return RunProfile(
        wall_s=wall_s,
        num_workers=num_workers,
        until_update=logged[-1].update,
        links=tuple(_links(totals, wall_s, num_workers)),
        bottleneck=find_bottleneck(
            {link: total.seconds for link, total in totals.items()},
            wall_s,
            num_workers,
            is_sync=config.get("mode") == "sync",
        ),
    )


def _check(record: Mapping[str, Any], logged: Sequence[LoggedMetrics]) -> None:
    run_id, kind = record["run_id"], record.get("kind")
    if kind != ONLINE:
        raise NotFoundError(
            f"run {run_id}: found a run of {kind!r}, which has no workers and no links to them, "
            f"expected one of {ONLINE!r}. `replaylake runs show {run_id}` has its rate and metrics."
        )
    if not logged:
        raise NotFoundError(
            f"run {run_id}: found no totals of its links yet, expected some every `log_steps` "
            "steps. Ask again when it has taken some."
        )


def _starts(record: Mapping[str, Any]) -> list[float]:
    """Return when the run began, and each time that it went on, in seconds since 1970."""
    again = [entry["at_ms"] for entry in record.get("resumed") or ()]
    return [at_ms / 1000 for at_ms in (record["started_ms"], *again)]


def _intervals(
    logged: Sequence[LoggedMetrics], starts: Sequence[float]
) -> Iterator[tuple[float, dict[Link, Total]]]:
    """Yield from each totals to the next: seconds at work, and what the links took meanwhile."""
    before_s, before = starts[0], dict[str, float]()
    for entry in logged:
        again = [start_s for start_s in starts if before_s < start_s <= entry.at_s]
        if again:
            # From the last totals before a kill to the resumption nobody was at work.
            before_s, before = again[-1], {}
        grown = {}
        for name, value in entry.values.items():
            last = before.get(name, 0.0)
            # Less than before: counted anew, by a machine whose clock is behind.
            grown[name] = value - last if value >= last else value
        since_s, before_s, before = before_s, entry.at_s, {**before, **entry.values}
        # Clocks are set back at times; a rate over no time at all would say nothing.
        yield max(1e-6, entry.at_s - since_s), _totals(grown)


def _totals(values: Mapping[str, float]) -> dict[Link, Total]:
    totals: dict[Link, Total] = {}
    for link in LINKS:
        if (seconds := values.get(f"{PROFILE}/{link}/seconds")) is not None:
            items, num_bytes = (
                round(values.get(f"{PROFILE}/{link}/{what}", 0)) for what in ("items", "bytes")
            )
            totals[link] = Total(seconds, items, num_bytes)
    return totals


def _sum(
    intervals: Iterable[tuple[float, Mapping[Link, Total]]],
) -> tuple[float, dict[Link, Total]]:
    wall_s, totals = 0.0, dict[Link, Total]()
    for seconds, grown in intervals:
        wall_s += seconds
        for link, more in grown.items():
            total = totals.setdefault(link, Total())
            total.seconds += more.seconds
            total.items += more.items
            total.num_bytes += more.num_bytes
    return wall_s, totals


def _links(totals: Mapping[Link, Total], wall_s: float, num_workers: int) -> Iterator[LinkUse]:
    """Yield the links, the workers' first, and at the end of each place what is none of them."""
    process_s = wall_s * (1 + num_workers)
    places: dict[Place, float] = {"workers": wall_s * num_workers, "trainer": wall_s}
    if num_workers == 0:
        del places["workers"]
    for place, place_s in places.items():
        links = [
            link
            for link in LINKS
            if link in totals
            and (num_workers == 0 or (link in WORKER_LINKS) == (place == "workers"))
        ]
        for link in links:
            one = totals[link]
            yield LinkUse(
                link, place, one.seconds, one.seconds / process_s, one.items, one.num_bytes
            )
        # Threads of one process may add up to more than its time.
        other_s = max(0.0, place_s - sum(totals[link].seconds for link in links))
        yield LinkUse(OTHER, place, other_s, other_s / process_s)


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
        elif workers_idle < _IDLE_RATIO * idle:
            groups = [one for one in groups if one.cause != "learner"]
        elif idle < _IDLE_RATIO * workers_idle:
            groups = [one for one in groups if one.place == "trainer"]
        else:
            groups = [one for one in groups if one.cause == "storage"]
            if max(_share(one, seconds, wall_s, num_workers) for one in groups) < _IDLE:
                why = "they take turns" if is_sync else "neither may run further ahead"
                return Bottleneck("rate limiter", None, f"{why}{waits}")
    slowest = max(groups, key=lambda one: _share(one, seconds, wall_s, num_workers))
    shares = {
        link: _share(_Group(slowest.cause, slowest.place, (link,)), seconds, wall_s, num_workers)
        for link in slowest.links
    }
    link = max(slowest.links, key=lambda link: shares[link])
    whose = "the run's" if num_workers == 0 else f"the {slowest.place}'s".replace("s's", "s'")
    text = f"{link} takes {_percent(shares[link])} of {whose} time"
    others = [one for one in slowest.links if one != link and shares[one] >= _MIN_SHARE_SHOWN]
    if others:
        text += f", {_percent(sum(shares.values()))} with {' and '.join(others)}"
    unseen = _unaccounted_share(slowest.place, seconds, wall_s, num_workers)
    if unseen > sum(shares.values()):
        text += f", while {_percent(unseen)} of it is in no link"
    return Bottleneck(slowest.cause, link, text + waits)


def _unaccounted_share(
    place: Place, seconds: Mapping[Link, float], wall_s: float, num_workers: int
) -> float:
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
