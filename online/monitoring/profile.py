"""Profile: where a run's time and bytes go, link by link, from the totals that it logs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from replaylake.datastore.errors import NotFound
from replaylake.datastore.lake.runs.metrics import Logged
from replaylake.datastore.lake.runs.summary import ONLINE
from replaylake.online.monitoring.bottleneck import (
    WAITS,
    WORKER_LINKS,
    Bottleneck,
    Place,
    find_bottleneck,
)
from replaylake.online.monitoring.timings import LINKS, PROFILE, Link, Total

OTHER: Final = "other"


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
        """Return a JSON object."""
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
        """Return a JSON object."""
        return {
            "wall_s": self.wall_s,
            "workers": self.num_workers,
            "processes": self.num_processes,
            "until_update": self.until_update,
            "links": [one.to_json() for one in self.links],
            "bottleneck": asdict(self.bottleneck),
        }


def profile_of(
    record: Mapping[str, Any], logged: Sequence[Logged], *, only_last: bool = False
) -> RunProfile:
    """Return where the time of a run went.

    Args:
        record: of the run, as the registry has it: when it began and went on, and its config.
        logged: `read_logged(storage, run_id, "profile/")`, in order: totals since the process that
            logged them began. One that goes on with a run counts anew.
        only_last: of the time between the last two totals; from the beginning where there is one.

    Raises: NotFound for a run of another kind, or one without totals so far.
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


def _check(record: Mapping[str, Any], logged: Sequence[Logged]) -> None:
    run_id, kind = record["run_id"], record.get("kind")
    if kind != ONLINE:
        raise NotFound(
            f"run {run_id}: found a run of {kind!r}, which has no workers and no links to them, "
            f"expected one of {ONLINE!r}. `replaylake runs show {run_id}` has its rate and metrics."
        )
    if not logged:
        raise NotFound(
            f"run {run_id}: found no totals of its links yet, expected some every `log_steps` "
            "steps. Ask again when it has taken some."
        )


def _starts(record: Mapping[str, Any]) -> list[float]:
    """Return when the run began, and each time that it went on, in seconds since 1970."""
    again = [entry["at_ms"] for entry in record.get("resumed") or ()]
    return [at_ms / 1000 for at_ms in (record["started_ms"], *again)]


def _intervals(
    logged: Sequence[Logged], starts: Sequence[float]
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
    found: dict[Link, Total] = {}
    for link in LINKS:
        if (seconds := values.get(f"{PROFILE}/{link}/seconds")) is not None:
            items, num_bytes = (
                round(values.get(f"{PROFILE}/{link}/{what}", 0)) for what in ("items", "bytes")
            )
            found[link] = Total(seconds, items, num_bytes)
    return found


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
