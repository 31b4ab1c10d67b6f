"""Profiles beside a writer: one count at a time, and what is shown until it is done."""

import threading
import time

import pytest

from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.maintenance.purge.purge import purge
from replaylake.datastore.query import summaries
from replaylake.serve.explorer.datasets import lake_page
from replaylake.serve.explorer.visits import profiles
from replaylake.serve.explorer.visits.profiles import ProfileMemory


class Gate:
    """Lets real profiles be computed one by one, and notes which began."""

    def __init__(self, monkeypatch):
        self.begun = []
        self._may_go = threading.Semaphore(0)
        compute = profiles.compute_profile

        def wait(snapshot, history, on_progress):
            self.begun.append(snapshot.version)
            while not self._may_go.acquire(timeout=0.01):
                on_progress(0, snapshot.num_steps)
            return compute(snapshot, history, on_progress)

        monkeypatch.setattr(profiles, "compute_profile", wait)

    def open(self, num=1):
        self._may_go.release(num)


def _wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def written(tmp_path, episode_maker, monkeypatch):
    """A dataset with versions 1 to 4, and no time that a page waits for their profiles."""
    lake = open_lake(tmp_path / "lake", create=True)
    for place in range(4):
        lake.dataset("walks").append([episode_maker(f"w/{place}", 3, seed=place)])
    monkeypatch.setattr(profiles, "_WAIT_S", 0.0)
    return lake


def test_a_dataset_that_grows_shows_its_newest_finished_profile(written, monkeypatch):
    gate, memory = Gate(monkeypatch), ProfileMemory()

    def find(version):
        return memory.find(written, written.snapshot(f"walks@{version}"))

    for version in (1, 2, 3, 4):
        found = find(version)
        assert (found.profile, found.progress) == (None, (0, 3 * version))
    gate.open()
    # Versions 2 and 3 were not asked for any more.
    _wait_for(lambda: gate.begun == [1, 4])
    found = find(4)
    assert (found.version, found.progress) == (1, (0, 12))
    assert found.profile.summary["num_steps"] == 3
    gate.open()
    _wait_for(lambda: find(4).progress is None)
    assert find(4).profile.summary["num_steps"] == 12
    assert find(1).version == 1
    assert gate.begun == [1, 4]


def test_a_profile_that_nobody_asks_for_is_counted_no_further(written, monkeypatch):
    gate, memory = Gate(monkeypatch), ProfileMemory()
    memory.find(written, written.snapshot("walks@1"))
    memory.find(written, written.snapshot("walks@2"))
    _wait_for(lambda: gate.begun == [1])
    monkeypatch.setattr(profiles, "_UNWANTED_S", -1.0)
    _wait_for(lambda: memory._running is None)
    assert gate.begun == [1]
    monkeypatch.setattr(profiles, "_UNWANTED_S", 90.0)
    gate.open()
    _wait_for(lambda: memory.find(written, written.snapshot("walks@2")).progress is None)
    assert gate.begun == [1, 2]


def test_a_profile_is_forgotten_in_time(written, monkeypatch):
    gate, memory = Gate(monkeypatch), ProfileMemory()
    gate.open(2)
    snapshot = written.snapshot("walks")
    _wait_for(lambda: memory.find(written, snapshot).progress is None)
    assert gate.begun == [4]
    monkeypatch.setattr(profiles, "_REMEMBERED_S", -1.0)
    assert memory.find(written, snapshot).progress is not None
    _wait_for(lambda: gate.begun == [4, 4])


def test_the_page_says_which_version_it_shows(
    written, reader_type, page_type, episode_maker, monkeypatch
):
    gate, reader = Gate(monkeypatch), reader_type(written)
    gate.open()
    assert reader.json("/datasets/walks.json")["profile_version"] == 4
    written.dataset("walks").append([episode_maker("w/4", 3, seed=4)])
    page = page_type(reader.client.get("/datasets/walks").text)
    assert "Below are the counts of version 4; version 5 is being counted." in page.text
    bars = [link for link in page.links if "/episodes?where=" in link]
    assert bars
    assert all(link.endswith("&at=4") for link in bars)
    body = reader.client.get("/datasets/walks.json").json()
    assert (body["version"], body["profile_version"], body["num_steps"]) == (5, 4, 15)
    gate.open()
    page = reader.page("/datasets/walks")
    assert "is being counted" not in page.text


def test_counts_of_a_purged_version_are_not_shown(written, monkeypatch):
    gate, memory = Gate(monkeypatch), ProfileMemory()
    gate.open()
    before = written.snapshot("walks@4")
    _wait_for(lambda: memory.find(written, before).progress is None)
    purge(written, "walks", "episode_id = 'w/0'")
    found = memory.find(written, written.snapshot("walks"))
    assert (found.profile, found.progress) == (None, (0, 9))
    assert memory.find(written, before).profile is None
    gate.open(2)
    _wait_for(lambda: memory.find(written, written.snapshot("walks")).progress is None)


@pytest.fixture
def unsummarized(written, monkeypatch):
    """Let a summary be worth its writing, and be written only once the gate opens."""
    monkeypatch.setattr(summaries, "_WRITE_US", 0.0)
    monkeypatch.setattr(lake_page, "_WAIT_S", 0.0)
    refresh, may_go = profiles.refresh, threading.Event()

    def wait(table, on_progress):
        while not may_go.wait(0.01):
            on_progress(5, table.num_rows)
        return refresh(table, on_progress)

    monkeypatch.setattr(profiles, "refresh", wait)
    return may_go


def _read_counted(reader):
    """Return what the lake's page has of the dataset, once its episodes are counted."""
    found = {}

    def read():
        found.update(reader.json("/index.json")["datasets"][0])
        return found["num_episodes"] is not None

    _wait_for(read)
    return found


def test_pages_come_before_the_episodes_are_summarized(
    written, unsummarized, reader_type, page_type
):
    reader = reader_type(written)

    def read(path):
        return reader.client.get(path)

    assert read("/index.json").json()["datasets"][0]["num_episodes"] is None
    page = page_type(read("/").text)
    assert page.text.count("being counted") == 3  # the facts, the row's episodes and policies
    assert 'data-refresh="2"' in read("/").text
    _wait_for(lambda: read("/datasets/walks.json").json()["progress"] == [5, 12])
    body = read("/datasets/walks.json").json()
    assert (body["num_episodes"], body["num_steps"]) == (None, 12)
    assert "being counted" in page_type(read("/datasets/walks").text).text
    # The episodes alone were wanted first, and the profile meanwhile.
    unsummarized.set()
    body = reader.json("/datasets/walks.json")
    assert (body["num_episodes"], body["profile_version"]) == (4, 4)
    assert _read_counted(reader)["num_episodes"] == 4
    assert "being counted" not in reader.page("/").text
    assert "data-refresh" not in read("/").text


def test_the_page_of_a_lake_counts_no_steps(written, unsummarized, reader_type, monkeypatch):
    gate, reader = Gate(monkeypatch), reader_type(written)
    unsummarized.set()
    assert _read_counted(reader)["mean_return"] == 3.0
    # Of a version that is summarized, no file is looked at again.
    monkeypatch.setattr(profiles, "needs_refresh", None)
    assert reader.client.get("/").status_code == 200
    _wait_for(lambda: reader.app._profiles._running is None)
    assert gate.begun == []


def test_what_is_never_summarized_is_queried(written, unsummarized, reader_type, monkeypatch):
    unsummarized.set()
    monkeypatch.setattr(summaries, "_MIN_STEPS", 100)
    reader = reader_type(written)
    assert _read_counted(reader)["num_episodes"] == 4
    assert summaries.needs_refresh(written.snapshot("walks").table)


def test_a_purge_ends_what_is_remembered(written, unsummarized, monkeypatch):
    unsummarized.set()
    memory, snapshot = ProfileMemory(), written.snapshot("walks")
    _wait_for(lambda: memory.find_unsummarized(written, snapshot) is None)
    purge(written, "walks", "episode_id = 'w/0'")
    _wait_for(lambda: memory.find_unsummarized(written, written.snapshot("walks")) is None)
    rows = written.sql("SELECT count(*) AS num FROM walks.episodes").to_pylist()
    assert rows == [{"num": 3}]
