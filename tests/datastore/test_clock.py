"""The clock of a machine is set back an hour, or forth again, while the lake is in use."""

from __future__ import annotations

import time
from collections.abc import Callable

import pyarrow.compute as pc
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.versions.tags import tag_snapshot
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.maintain import maintain
from replaylake.datastore.maintenance.retention import set_retention
from replaylake.datastore.maintenance.trim import trim
from replaylake.datastore.names import new_ulid
from replaylake.datastore.query import summaries

Make = Callable[..., Episode]
HOUR_NS = 3_600_000_000_000


class Clock:
    """The clock of this process; files are still dated by the kernel's."""

    def __init__(self) -> None:
        self.offset_ns = 0
        self._time_ns = time.time_ns

    def time_ns(self) -> int:
        return self._time_ns() + self.offset_ns

    def time(self) -> float:
        return self.time_ns() / 1e9

    def set_back(self) -> None:
        self.offset_ns -= HOUR_NS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time_ns", clock.time_ns)
    monkeypatch.setattr(time, "time", clock.time)
    return clock


def ids(lake: Lake, version: int | None = None) -> list[str]:
    rows = lake.dataset("d").table.snapshot(version).read(["episode_id"])
    return sorted(set(rows["episode_id"].to_pylist()))


def test_a_name_sorts_after_one_that_an_earlier_clock_gave(clock: Clock) -> None:
    first = new_ulid()
    clock.set_back()
    assert new_ulid() < first
    names = [first]
    for _ in range(3):
        names.append(new_ulid(after=f"{names[-1]}.parquet"))
    assert names == sorted(names)
    assert {len(name) for name in names} == {26}
    assert new_ulid(after="a-name-of-another-kind.parquet") < first
    assert new_ulid() < first


@pytest.mark.parametrize("others", ["", "other"])
def test_commits_keep_their_order(
    lake: Lake, make_episode: Make, clock: Clock, others: str
) -> None:
    for number in range(3):
        lake.dataset("d").append([make_episode(f"e{number}")])
        clock.set_back()
        lake = open_lake(lake.path) if others else lake
    history = lake.dataset("d").history()
    assert [commit["version"] for commit in history] == list(range(4))
    times = [commit["timestamp"] for commit in history]
    assert times == sorted(set(times))
    assert [len(ids(lake, version)) for version in range(4)] == [0, 1, 2, 3]


def test_who_was_deleted_stays_so(lake: Lake, make_episode: Make, clock: Clock) -> None:
    """The later of a deletion and a readmission counts, by whichever clock."""

    def append(number: int, *, readmit: bool = False) -> None:
        episode = make_episode(f"e{number}", terminated=True, source_episode_id="anna")
        open_lake(lake.path).dataset("d").append([episode], readmit=readmit)

    append(0)
    for number in (1, 3):
        delete(lake, "d", "source_episode_id = 'anna'")
        clock.set_back()
        append(number, readmit=True)
        append(number + 1)
        assert ids(lake) == [f"e{number}", f"e{number + 1}"]
        clock.set_back()
    delete(lake, "d", "source_episode_id = 'anna'")
    append(5)
    assert ids(lake) == []


def test_the_summary_that_was_written_last_counts(
    lake: Lake, make_episode: Make, clock: Clock
) -> None:
    dataset = lake.dataset("d")
    for number in range(4):
        dataset.append([make_episode(f"e{number}", 20, terminated=True)])
        assert summaries.refresh(dataset.table.snapshot())
        assert not summaries.refresh(dataset.table.snapshot())
        assert len(dataset.table.storage.names("d/_derived/episodes")) == 1
        clock.set_back()


def test_maintenance_leaves_what_is_needed(lake: Lake, make_episode: Make, clock: Clock) -> None:
    """What was written after the clock was set back is no older for it."""
    dataset = lake.dataset("d")
    for number in range(3):
        dataset.append([make_episode(f"e{number}", terminated=True)])
    set_retention(lake, "d", {"keep_versions_s": 3600.0})
    reader = dataset.table.snapshot()
    tag_snapshot(lake.tags, lake.snapshot("d@2"), "paper")
    clock.set_back()
    rows = reader.read()
    late = pc.binary_join_element_wise(rows["episode_id"], "late", "-")
    written = dataset.table.write(rows.set_column(0, rows.schema.field("episode_id"), late))
    dataset.append([make_episode("back", terminated=True)])
    dataset.append([make_episode("open", terminated=False)])
    assert trim(lake, "d", older_than_s=1800.0).num_episodes == 0
    receipt, _ = maintain(lake)
    assert (receipt.error, receipt.vacuumed, receipt.dropped) == ("", 0, 0)
    assert receipt.compacted > 0
    assert reader.read().num_rows == 9
    assert len(ids(lake)) == 5
    # The clock is right again.
    clock.offset_ns = 0
    receipt, _ = maintain(lake)
    assert (receipt.error, receipt.vacuumed) == ("", 0)
    assert reader.read().num_rows == 9
    assert lake.snapshot("d@paper").num_steps == 6
    dataset.table.commit([written], producer="late", sequence=0)
    report = fsck(lake)
    assert report.is_clean, report.findings
