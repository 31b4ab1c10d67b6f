"""Profiles beside a writer: one count at a time, and what is shown until it is done."""

import threading
import time

import pytest

from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.maintenance.purge.purge import purge
from replaylake.serve.explorer import profiles
from replaylake.serve.explorer.profiles import ProfileMemory


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
