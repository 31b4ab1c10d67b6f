"""Timings: no second is counted for two links of one thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from replaylake.datastore.lake.runs import timings as module
from replaylake.datastore.lake.runs.timings import Link, Place, ThreadTimings, Timings
from replaylake.datastore.storage.spans import record_spans, span


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the module reads, in seconds."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def seconds(timings: Timings) -> dict[tuple[Place, Link], float]:
    return {key: total.seconds for key, total in timings.totals.items()}


def test_what_is_inside_a_measurement_is_not_counted_with_it(clock: list[float]) -> None:
    timings = Timings("trainer")
    with timings.measure("receive"):
        clock[0] += 1
        with timings.measure("checkpoint", items=0):
            clock[0] += 2
            timings.add("broadcast", 0.5)
        clock[0] += 4
        worker = Timings("workers")
        worker.add("env_step", 3.0, 10)
        # In a process of its own, then in this thread.
        timings.merge(worker)
        timings.merge(worker, place="trainer")
    assert seconds(timings) == {
        ("trainer", "broadcast"): 0.5,
        ("trainer", "checkpoint"): 1.5,
        ("workers", "env_step"): 3.0,
        ("trainer", "env_step"): 3.0,
        ("trainer", "receive"): 2.0,
    }
    own = [one for (place, _), one in seconds(timings).items() if place == "trainer"]
    assert sum(own) == clock[0] - 100.0


def test_a_measurement_that_fails_counts_and_ends(clock: list[float]) -> None:
    timings = Timings("trainer")

    def fail() -> None:
        with timings.measure("update"):
            clock[0] += 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    timings.add("sample", 1.0)
    assert seconds(timings) == {("trainer", "update"): 2.0, ("trainer", "sample"): 1.0}


def test_the_metrics_of_a_run(clock: list[float]) -> None:
    timings = Timings("workers", started_at=clock[0])
    timings.add("encode", 0.5, 8, 64)
    timings.add("encode", 0.25, 4, 32)
    clock[0] += 7
    assert timings.to_metrics() == {
        "profile/seconds": 7.0,
        "profile/workers/encode/seconds": 0.75,
        "profile/workers/encode/items": 12.0,
        "profile/workers/encode/bytes": 96.0,
        "profile/workers/encode/calls": 2.0,
    }
    assert seconds(timings.take()) == {("workers", "encode"): 0.75}
    assert timings.totals == {}


def test_spans_are_of_their_thread(clock: list[float]) -> None:
    def write() -> None:
        with span("shard_write") as work:
            clock[0] += 4
            work.num_bytes = 64
            with span("fsync"):
                clock[0] += 1

    threads = ThreadTimings(Timings("process"))
    with record_spans(threads), ThreadPoolExecutor(1) as pool:
        with span("encode") as work:
            clock[0] += 2
            work.items = 8
        with span("write_wait"):
            pool.submit(write).result()
    with span("encode"):
        clock[0] += 1  # nobody measures any more
    merged = threads.merge()
    assert seconds(merged) == {
        ("process", "encode"): 2.0,
        ("process", "write_wait"): 5.0,
        ("background", "shard_write"): 4.0,
        ("background", "fsync"): 1.0,
    }
    assert merged.totals["process", "encode"].items == 8
    assert merged.totals["background", "shard_write"].num_bytes == 64
