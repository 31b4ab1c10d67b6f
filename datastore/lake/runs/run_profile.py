"""Profile of a run: where its time and bytes went, link by link, from the totals that it logs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.lake.runs.metrics import LoggedMetrics
from replaylake.datastore.lake.runs.summary import ONLINE
from replaylake.datastore.lake.runs.timings import (
    LINKS,
    PLACES,
    PROFILE,
    WALL_SECONDS,
    Link,
    Place,
    Timings,
    Total,
)

OTHER: Final = "other"
WAITS: Final[frozenset[Link]] = frozenset(
    {"worker_wait", "learner_wait", "write_wait", "batch_wait", "idle"}
)
# Who waits less than this share of its time waits for nobody: for a message, the end of a batch.
_IDLE: Final = 0.1
# Less than this of a place's time is not worth a word.
_MIN_SHARE_SHOWN: Final = 0.005
# Of two that wait, one holds the other up if it waits less than half as much.
_IDLE_RATIO: Final = 0.5

Totals = Mapping[tuple[Place, Link], Total]


@dataclass(frozen=True)
class LinkUse:
    """The time and bytes of one link; the link `other` is the time of a place outside its links.

    share: of the run's wall time times its processes. num_calls: how often it was timed.
    bound_mb_per_s: megabytes a second of the bare operation (bounds.py), where it was measured.
    """

    link: str
    place: Place
    seconds: float
    share: float
    items: int = 0
    num_bytes: int = 0
    num_calls: int = 0
    bound_mb_per_s: float | None = None

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

    @property
    def bound_ratio(self) -> float | None:
        """How many times as long it took as the bare operation would have taken."""
        if self.bound_mb_per_s is None or self.mb_per_s is None:
            return None
        return self.bound_mb_per_s / self.mb_per_s

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "items_per_s": self.items_per_s,
            "mb_per_s": self.mb_per_s,
            "bound_ratio": self.bound_ratio,
        }


@dataclass(frozen=True)
class RunProfile:
    """The links of a run and its bottleneck, over the whole run or its last interval.

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


@dataclass(frozen=True)
class ProcessProfile:
    """The links of one operation of a process, such as an ingest; wall_s: seconds that it took."""

    wall_s: float
    links: tuple[LinkUse, ...]

    def to_json(self) -> dict[str, Any]:
        return {"wall_s": self.wall_s, "links": [one.to_json() for one in self.links]}


def build_process_profile(timings: Timings, wall_s: float) -> ProcessProfile:
    """Return where the `wall_s` > 0 seconds of the thread of an operation went."""
    return ProcessProfile(wall_s, tuple(_links(timings.totals, {"process": wall_s})))


def build_run_profile(
    record: Mapping[str, Any], logged: Sequence[LoggedMetrics], *, only_last: bool = False
) -> RunProfile:
    """Return where the time of a run went.

    Args:
        record: of the run, as the registry has it: when it was resumed, and its config.
        logged: `read_logged_metrics(storage, run_id, "profile/")`, in order: totals since the
            process that logged them began. One that resumes a run counts anew.
        only_last: of the time between the last two totals; from the beginning where there is one.

    Raises: NotFoundError for a run without totals so far.
    """
    if not logged:
        raise NotFoundError(
            f"run {record['run_id']}: found no totals of its links yet, expected some every "
            "`log_steps` steps (online) or `log_updates` updates. Try again when it has gone on."
        )
    intervals = list(_intervals(logged, _list_resumptions(record)))
    wall_s, totals = _sum(intervals[-1:] if only_last else intervals)
    config = record.get("config") or {}
    is_online = record.get("kind") == ONLINE
    num_workers = 0
    if is_online and config.get("env_runner") != "local":
        num_workers = int(config.get("workers") or 1)
    return RunProfile(
        wall_s=wall_s,
        num_workers=num_workers,
        until_update=logged[-1].update,
        links=tuple(_links(totals, {"workers": wall_s * num_workers, "trainer": wall_s})),
        bottleneck=find_bottleneck(
            {key: total.seconds for key, total in totals.items()},
            wall_s,
            num_workers,
            is_sync=config.get("mode") == "sync",
        ),
    )


def pair_links(
    first: RunProfile, second: RunProfile
) -> Iterator[tuple[LinkUse | None, LinkUse | None]]:
    """Yield each link of either run with both uses of it, None where a run has none."""
    by_key = [{(one.place, one.link): one for one in each.links} for each in (first, second)]
    for place in PLACES:
        for link in (*LINKS, OTHER):
            pair = by_key[0].get((place, link)), by_key[1].get((place, link))
            if pair != (None, None):
                yield pair


def _list_resumptions(record: Mapping[str, Any]) -> list[float]:
    """Return each time that the run was resumed, in seconds since 1970."""
    return [entry["at_ms"] / 1000 for entry in record.get("resumed") or ()]


def _intervals(
    logged: Sequence[LoggedMetrics], resumed_at_s: Sequence[float]
) -> Iterator[tuple[float, dict[tuple[Place, Link], Total]]]:
    """Yield from each totals to the next: seconds at work, and what the links took meanwhile."""
    before_s, before = float("-inf"), dict[str, float]()
    for entry in logged:
        wall_s = entry.values.get(WALL_SECONDS, 0.0)
        # A process that resumes the run starts its totals at zero, also if its clock is behind.
        if any(before_s < at_s <= entry.at_s for at_s in resumed_at_s) or wall_s < before.get(
            WALL_SECONDS, 0.0
        ):
            before = {}
        grown = {name: value - before.get(name, 0.0) for name, value in entry.values.items()}
        before_s, before = entry.at_s, {**before, **entry.values}
        # A rate over no time at all would say nothing.
        yield max(1e-6, grown.get(WALL_SECONDS, 0.0)), _totals(grown)


def _totals(values: Mapping[str, float]) -> dict[tuple[Place, Link], Total]:
    totals: dict[tuple[Place, Link], Total] = {}
    for place in PLACES:
        for link in LINKS:
            name = f"{PROFILE}/{place}/{link}"
            if (seconds := values.get(f"{name}/seconds")) is not None:
                counts = (round(values.get(f"{name}/{w}", 0)) for w in ("items", "bytes", "calls"))
                totals[place, link] = Total(seconds, *counts)
    return totals


def _sum(
    intervals: Iterable[tuple[float, Totals]],
) -> tuple[float, dict[tuple[Place, Link], Total]]:
    wall_s, totals = 0.0, dict[tuple[Place, Link], Total]()
    for seconds, grown in intervals:
        wall_s += seconds
        for key, more in grown.items():
            totals.setdefault(key, Total()).add(more)
    return wall_s, totals


def _links(totals: Totals, place_s: Mapping[Place, float]) -> Iterator[LinkUse]:
    """Yield the links by place, and the time of each place that none of them accounts for.

    place_s: seconds of each place, over all its processes. Threads in the background wait most of
    the time, which is no link and is left out.
    """
    process_s = sum(place_s.values())
    for place in PLACES:
        links = [link for link in LINKS if (place, link) in totals]
        for link in links:
            one = totals[place, link]
            counts = (one.items, one.num_bytes, one.num_calls)
            yield LinkUse(link, place, one.seconds, one.seconds / process_s, *counts)
        if whole_s := place_s.get(place):
            other_s = max(0.0, whole_s - sum(totals[place, link].seconds for link in links))
            yield LinkUse(OTHER, place, other_s, other_s / process_s)


Cause = Literal[
    "learner", "workers", "storage", "transport", "evaluation", "preparation", "rate limiter"
]


@dataclass(frozen=True)
class _Group:
    """Links that one place spends its time on, for one cause."""

    cause: Cause
    place: Place
    links: tuple[Link, ...]


_GROUPS: Final = (
    _Group("learner", "trainer", ("sample", "to_device", "update", "broadcast")),
    _Group("workers", "workers", ("env_step", "inference", "set_policy", "assemble")),
    _Group("storage", "workers", ("encode", "shard_write")),
    _Group("storage", "background", ("encode", "shard_write", "commit", "tail", "decode")),
    _Group("storage", "trainer", ("checkpoint", "log", "decode", "commit")),
    _Group("transport", "workers", ("transfer",)),
    _Group("transport", "trainer", ("receive",)),
    _Group("evaluation", "trainer", ("evaluate",)),
    _Group("preparation", "trainer", ("start",)),
    # Where the trainer collects itself.
    _Group("workers", "trainer", ("env_step", "inference", "set_policy", "assemble")),
)
# What lies between workers and learner.
_BETWEEN: Final[frozenset[Cause]] = frozenset({"storage", "transport"})


@dataclass(frozen=True)
class Bottleneck:
    """What holds a run up. link: the one that takes most of it; None where nobody works."""

    cause: Cause
    link: Link | None
    reason: str


def find_bottleneck(
    seconds: Mapping[tuple[Place, Link], float],
    wall_s: float,
    num_workers: int,
    *,
    is_sync: bool = False,
) -> Bottleneck:
    """Name what limits the speed of a run.

    Args:
        seconds: by place and link, of all processes together.
        wall_s: seconds that the run took meanwhile, more than 0.
        num_workers: processes beside the trainer's; 0 where the trainer collects itself or reads
            what is stored.
        is_sync: whether the two sides take turns, so that both wait by intent.

    Of the trainer and the workers, the one that waits less than half as long as the other, as a
    share of its own time, holds the run up; storage or transport do where commits, or looking for
    them, take longer than what the workers do. Where both wait alike it is what lies between them
    if it takes a tenth of the time, else the limit on how far they may run apart. Where nobody
    waits, or one process does all, it is what takes most.
    """
    waits = ""
    groups = list(_GROUPS)
    if num_workers > 0:
        idle = seconds.get(("trainer", "learner_wait"), 0.0) / wall_s
        workers_idle = seconds.get(("workers", "worker_wait"), 0.0) / (wall_s * num_workers)
        waits = (
            f"; the learner waits {_percent(idle)} of its time, the workers "
            f"{_percent(workers_idle)}"
        )
        if max(idle, workers_idle) < _IDLE:
            pass
        elif workers_idle < _IDLE_RATIO * idle:
            groups = [one for one in groups if one.place == "workers" or one.cause in _BETWEEN]
        elif idle < _IDLE_RATIO * workers_idle:
            groups = [one for one in groups if one.place != "workers"]
        else:
            groups = [one for one in groups if one.cause in _BETWEEN]
            if max(_share(one, seconds, wall_s, num_workers) for one in groups) < _IDLE:
                why = "they take turns" if is_sync else "neither may run further ahead"
                return Bottleneck("rate limiter", None, f"{why}{waits}")
    slowest = max(groups, key=lambda one: _share(one, seconds, wall_s, num_workers))
    shares = {
        link: _share(_Group(slowest.cause, slowest.place, (link,)), seconds, wall_s, num_workers)
        for link in slowest.links
    }
    link = max(slowest.links, key=lambda link: shares[link])
    text = f"{link} takes {_percent(shares[link])} of {_whose(slowest.place, num_workers)} time"
    others = [one for one in slowest.links if one != link and shares[one] >= _MIN_SHARE_SHOWN]
    if others:
        text += f", {_percent(sum(shares.values()))} with {' and '.join(others)}"
    unseen = _find_unaccounted_share(slowest.place, seconds, wall_s, num_workers)
    if unseen > sum(shares.values()):
        text += f", while {_percent(unseen)} of it is in no link"
    return Bottleneck(slowest.cause, link, text + waits)


def _whose(place: Place, num_workers: int) -> str:
    if num_workers == 0:
        return "the run's"
    return "the workers'" if place == "workers" else "the trainer's"


def _find_unaccounted_share(
    place: Place, seconds: Mapping[tuple[Place, Link], float], wall_s: float, num_workers: int
) -> float:
    """Return which share of a place's time no link accounts for; threads beside it have none."""
    if place == "background":
        return 0.0
    links = tuple(link for of, link in seconds if of == place)
    # The cause does not matter to a share.
    return max(0.0, 1.0 - _share(_Group("storage", place, links), seconds, wall_s, num_workers))


def _share(
    group: _Group,
    seconds: Mapping[tuple[Place, Link], float],
    wall_s: float,
    num_workers: int,
) -> float:
    """Return which share of its place's time a group of links took."""
    processes = num_workers if group.place == "workers" and num_workers > 0 else 1
    in_links = sum(seconds.get((group.place, link), 0.0) for link in group.links)
    return in_links / (wall_s * processes)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.095 or share == 0 else f"{share:.1%}"
