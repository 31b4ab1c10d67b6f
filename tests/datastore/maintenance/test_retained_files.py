from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.retained_files import RetainedFiles, find_retained_files
from replaylake.datastore.storage.log.expiry import expire
from replaylake.datastore.storage.storage import LocalStorage, StoredFile

Make = Callable[..., Episode]
DAY_MS = 86_400_000


@pytest.fixture
def compacted(lake: Lake, make_episode: Make) -> Lake:
    """Versions 1 to 3 add a shard each, and version 4 has one in the place of all three."""
    for number in range(3):
        lake.dataset("d").append([make_episode(f"e{number}", terminated=True)])
    compact(lake, "d")
    return lake


def in_days(days: float) -> int:
    return time.time_ns() // 1_000_000 + int(days * DAY_MS)


def shards(lake: Lake, version: int) -> set[str]:
    return {f"d/{entry.path}" for entry in lake.dataset("d").table.snapshot(version).files}


def reasons(kept: RetainedFiles) -> list[tuple[int, str, str]]:
    return [(pin.version, pin.reason, pin.name) for pin in kept.pins]


def test_what_was_replaced_lately_is_kept(compacted: Lake) -> None:
    kept = find_retained_files(compacted, "d", now_ms=in_days(6.9))
    assert kept.paths == shards(compacted, 3) | shards(compacted, 4)
    assert reasons(kept) == [
        (4, "newest", ""),
        (3, "recent", ""),
        (2, "recent", ""),
        (1, "recent", ""),
        (0, "recent", ""),
    ]


def test_after_the_retention_the_newest_is_left(compacted: Lake) -> None:
    kept = find_retained_files(compacted, "d", now_ms=in_days(7.1))
    assert kept.paths == shards(compacted, 4)
    assert reasons(kept) == [(4, "newest", "")]


def test_a_tag_pins_its_version(compacted: Lake) -> None:
    compacted.tags.set("d", "paper", 2)
    kept = find_retained_files(compacted, "d", now_ms=in_days(30))
    assert kept.paths == shards(compacted, 2) | shards(compacted, 4)
    assert (2, "tag", "paper") in reasons(kept)


def test_a_policy_pins_what_it_was_trained_on(compacted: Lake, package: Path) -> None:
    lineage = {"datasets": [{"dataset": "d", "version": 1}, {"dataset": "other", "version": 3}]}
    compacted.registry.register("best", package, run_id="r", lineage=lineage)
    kept = find_retained_files(compacted, "d", now_ms=in_days(30))
    assert kept.paths == shards(compacted, 1) | shards(compacted, 4)
    assert (1, "policy", "best:1") in reasons(kept)


def test_a_run_pins_what_it_reads_until_it_has_ended_or_was_killed(compacted: Lake) -> None:
    run = {
        "status": "running",
        "started_ms": in_days(0),
        "datasets": [{"dataset": "d", "version": 1}],
    }
    compacted.registry.record_run("r", run)
    assert (1, "run", "r") in reasons(find_retained_files(compacted, "d", now_ms=in_days(20)))
    assert (1, "run", "r") not in reasons(find_retained_files(compacted, "d", now_ms=in_days(40)))
    compacted.registry.record_run("r", {**run, "status": "failed"})
    assert (1, "run", "r") not in reasons(find_retained_files(compacted, "d", now_ms=in_days(20)))


def test_a_run_that_was_interrupted_pins_what_it_goes_on_with(compacted: Lake) -> None:
    run = {
        "status": "interrupted",
        "started_ms": in_days(-50),
        "ended_ms": in_days(0),
        "datasets": [{"dataset": "d", "version": 1}],
    }
    compacted.registry.record_run("r", run)
    assert (1, "run", "r") in reasons(find_retained_files(compacted, "d", now_ms=in_days(20)))
    assert (1, "run", "r") not in reasons(find_retained_files(compacted, "d", now_ms=in_days(40)))


def test_a_run_that_is_alive_pins_for_as_long_as_it_takes(compacted: Lake) -> None:
    run = {
        "status": "running",
        "started_ms": in_days(-50),
        "datasets": [{"dataset": "d", "version": 1}],
    }
    compacted.registry.record_run("r", run)
    assert (1, "run", "r") not in reasons(find_retained_files(compacted, "d"))
    with RunLease(compacted.storage, "r"):
        assert (1, "run", "r") in reasons(find_retained_files(compacted, "d"))
        assert (1, "run", "r") in reasons(find_retained_files(compacted, "d", now_ms=in_days(90)))
    resumed = [{"at_ms": in_days(-10), "update": 7}]
    compacted.registry.record_run("r", {**run, "resumed": resumed})
    assert (1, "run", "r") in reasons(find_retained_files(compacted, "d"))


def test_a_commit_that_a_slow_clock_stamped_is_as_young_as_those_before(compacted: Lake) -> None:
    last = compacted.path / "d" / "_delta_log" / f"{4:020d}.json"
    os.utime(last, (0, 0))
    kept = find_retained_files(compacted, "d", now_ms=in_days(1))
    assert kept.paths == shards(compacted, 3) | shards(compacted, 4)


def test_a_pin_on_a_version_that_expired_is_named(compacted: Lake) -> None:
    compacted.tags.set("d", "paper", 2)
    expire(compacted.dataset("d").table.log, 4)
    kept = find_retained_files(compacted, "d", now_ms=in_days(30))
    assert [str(pin) for pin in kept.broken] == ["d@2 (tag paper)"]
    assert reasons(kept) == [(4, "newest", "")]


def test_a_commit_in_this_moment_ages_none_of_those_before(
    compacted: Lake, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = LocalStorage.files

    def append_beside(storage: LocalStorage, folder: str) -> Iterator[StoredFile]:
        found = list(listed(storage, folder))
        if folder == "d/_delta_log":
            compacted.dataset("d").append([make_episode("late")])
        return iter(found)

    monkeypatch.setattr(LocalStorage, "files", append_beside)
    kept = find_retained_files(compacted, "d")
    assert {0, 1, 2, 3, 4} <= {pin.version for pin in kept.pins}
    assert shards(compacted, 3) <= kept.paths


def test_a_run_that_ends_in_this_moment_is_kept_by_its_policy(
    compacted: Lake, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = [{"dataset": "d", "version": 1}]
    run = {"status": "running", "started_ms": in_days(0), "datasets": datasets}
    compacted.registry.record_run("r", run)

    def end() -> None:
        done = {**run, "status": "done"}
        lineage = {"datasets": datasets}
        compacted.registry.register("best", package, run_id="r", lineage=lineage, run=done)

    registry = compacted.registry
    for name in ("runs", "list", "lineages"):
        look = getattr(registry, name)

        def looked(look: Callable[[], Any] = look) -> Any:
            found = look()
            monkeypatch.undo()
            end()
            return found

        monkeypatch.setattr(registry, name, looked)
    kept = find_retained_files(compacted, "d", now_ms=in_days(20))
    assert {"policy", "run"} & {pin.reason for pin in kept.pins}
