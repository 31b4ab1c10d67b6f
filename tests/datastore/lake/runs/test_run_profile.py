"""Profiles of runs: totals by link to seconds, shares and rates, over kills and resumptions."""

from __future__ import annotations

from typing import Any

import pytest

from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.lake.runs.metrics import LoggedMetrics
from replaylake.datastore.lake.runs.run_profile import LinkUse, build_run_profile, pair_links
from replaylake.datastore.lake.runs.timings import PLACES, WALL_SECONDS, Place, Timings

RECORD: dict[str, Any] = {
    "run_id": "01aa",
    "kind": "train online",
    "started_ms": 1_000_000,
    "config": {"workers": 2, "env_runner": "ray", "mode": "async"},
}


WORKER_LINKS = {"env_step", "worker_wait"}


def logged(
    update: int,
    at_s: float,
    /,
    *,
    since_s: float = 1000.0,
    workers: Place = "workers",
    **seconds: float,
) -> LoggedMetrics:
    """Totals of 1,000 items and 2 MB for each second of a link; since_s: when the process began."""
    timings = {of: Timings(of) for of in PLACES}
    for link, one in seconds.items():
        of: Place = workers if link in WORKER_LINKS else "trainer"
        if link in {"commit", "decode"}:
            of = "background"
        timings[of].add(link, one, round(1000 * one), round(2e6 * one))  # type: ignore[arg-type]
    metrics = {name: value for one in timings.values() for name, value in one.to_metrics().items()}
    return LoggedMetrics(update, at_s, {**metrics, WALL_SECONDS: at_s - since_s})


def by_link(links: tuple[LinkUse, ...]) -> dict[tuple[str, str], LinkUse]:
    return {(one.place, one.link): one for one in links}


def test_the_whole_run() -> None:
    history = [
        logged(10, 1004.0, env_step=2, update=1),
        logged(30, 1010.0, env_step=12, worker_wait=3, update=8, learner_wait=0.5),
    ]
    found = build_run_profile(RECORD, history)
    assert (found.wall_s, found.num_workers, found.num_processes) == (10.0, 2, 3)
    assert found.until_update == 30
    links = by_link(found.links)
    assert list(links) == [
        ("workers", "env_step"),
        ("workers", "worker_wait"),
        ("workers", "other"),
        ("trainer", "update"),
        ("trainer", "learner_wait"),
        ("trainer", "other"),
    ]
    step = links["workers", "env_step"]
    assert (step.seconds, step.items, step.num_bytes) == (12.0, 12_000, 24_000_000)
    # Of 10 seconds of three processes.
    assert step.share == pytest.approx(12 / 30)
    assert (step.items_per_s, step.mb_per_s) == (pytest.approx(1000), pytest.approx(2))
    # Waiting has no rate.
    assert links["workers", "worker_wait"].items_per_s is None
    # Two workers had 20 seconds, the trainer 10.
    assert links["workers", "other"].seconds == pytest.approx(20 - 12 - 3)
    assert links["trainer", "other"].seconds == pytest.approx(10 - 8.5)
    assert sum(one.share for one in found.links) == pytest.approx(1.0)
    assert (found.bottleneck.cause, found.bottleneck.link) == ("learner", "update")


def test_the_last_interval() -> None:
    history = [
        logged(10, 1004.0, env_step=2, update=1),
        logged(30, 1010.0, env_step=12, update=8, decode=1),
    ]
    found = build_run_profile(RECORD, history, only_last=True)
    links = by_link(found.links)
    assert found.wall_s == 6.0
    assert links["workers", "env_step"].seconds == 10.0
    assert links["trainer", "update"].items == 7000
    # Of which there was nothing before.
    assert links["background", "decode"].seconds == 1.0
    # With one entry alone it is the time since the beginning.
    assert build_run_profile(RECORD, history[:1], only_last=True).wall_s == 4.0


def test_time_in_which_nobody_was_at_work_does_not_count() -> None:
    """The run went on 100 seconds after its last totals, in a process that counted anew."""
    record = {**RECORD, "resumed": [{"at_ms": 1_110_000, "update": 20}]}
    history = [
        logged(20, 1010.0, env_step=10, update=4),
        # More than the other had counted: it is of this process all the same.
        logged(30, 1116.0, since_s=1110.0, env_step=11, update=2),
        logged(40, 1118.0, since_s=1110.0, env_step=12, update=3),
    ]
    found = build_run_profile(record, history)
    assert found.wall_s == pytest.approx(10 + 8)
    links = by_link(found.links)
    assert links["workers", "env_step"].seconds == pytest.approx(22)
    assert links["trainer", "update"].seconds == pytest.approx(7)
    second = build_run_profile(record, history[:2], only_last=True)
    assert second.wall_s == pytest.approx(6)
    assert by_link(second.links)["workers", "env_step"].seconds == pytest.approx(11)


def test_totals_that_fall_are_counted_anew() -> None:
    """As where the clock of the machine that went on is behind, so that it seems not to have."""
    found = build_run_profile(
        RECORD,
        [logged(20, 1010.0, env_step=10), logged(30, 1012.0, since_s=1008.0, env_step=3)],
    )
    assert by_link(found.links)["workers", "env_step"].seconds == pytest.approx(13)


def test_a_run_in_one_process() -> None:
    record = {**RECORD, "config": {"workers": 2, "env_runner": "local"}}
    found = build_run_profile(
        record, [logged(1, 1010.0, workers="trainer", env_step=2, update=5, commit=4)]
    )
    assert (found.num_workers, found.num_processes) == (0, 1)
    links = by_link(found.links)
    assert list(links) == [
        ("trainer", "env_step"),
        ("trainer", "update"),
        ("trainer", "other"),
        ("background", "commit"),
    ]
    assert links["trainer", "env_step"].share == pytest.approx(0.2)
    # What its threads are at beside the loop takes none of the loop's time.
    assert links["trainer", "other"].seconds == pytest.approx(3.0)
    assert found.bottleneck.cause == "learner"


def test_an_offline_run_has_one_process_and_its_own_bottleneck() -> None:
    record = {**RECORD, "kind": "train offline", "config": {"learners": 1}}
    found = build_run_profile(record, [logged(9, 1010.0, start=1, sample=2, evaluate=5)])
    assert (found.num_processes, found.bottleneck.cause) == (1, "evaluation")
    assert found.bottleneck.reason == "evaluate takes 50% of the run's time"


def test_the_links_of_two_runs_are_paired() -> None:
    local = {**RECORD, "config": {"env_runner": "local"}}
    first = build_run_profile(RECORD, [logged(1, 1010.0, env_step=2, update=5)])
    second = build_run_profile(local, [logged(1, 1010.0, update=4, commit=1)])
    pairs = [
        tuple(one and (one.place, one.link, one.seconds) for one in pair)
        for pair in pair_links(first, second)
    ]
    assert pairs == [
        (("workers", "env_step", 2.0), None),
        (("workers", "other", 18.0), None),
        (("trainer", "update", 5.0), ("trainer", "update", 4.0)),
        (("trainer", "other", 5.0), ("trainer", "other", 6.0)),
        (None, ("background", "commit", 1.0)),
    ]


def test_a_clock_that_was_set_back_divides_by_nothing() -> None:
    found = build_run_profile(RECORD, [logged(1, 990.0, env_step=2)])
    assert found.links[0].seconds == 2.0


def test_a_run_without_totals() -> None:
    with pytest.raises(NotFoundError, match="no totals of its links yet"):
        build_run_profile(RECORD, [])


def test_as_json() -> None:
    body = build_run_profile(RECORD, [logged(7, 1010.0, env_step=2, update=5)]).to_json()
    assert (body["workers"], body["processes"], body["wall_s"]) == (2, 3, 10.0)
    assert body["links"][0] == {
        "link": "env_step",
        "place": "workers",
        "seconds": 2.0,
        "share": pytest.approx(2 / 30),
        "items": 2000,
        "num_bytes": 4_000_000,
        "num_calls": 1,
        "items_per_s": 1000.0,
        "mb_per_s": 2.0,
        "bound_mb_per_s": None,
        "bound_ratio": None,
    }
    assert set(body["bottleneck"]) == {"cause", "link", "reason"}
