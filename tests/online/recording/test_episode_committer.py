import threading
import time

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import SchemaMismatchError, StorageError, TransientStorageError
from replaylake.online.recording.episode_committer import EpisodeCommitter


def episode(number, num_steps=2, **given):
    return Episode(
        f"test/{number}",
        **{
            "observations": np.full((num_steps, 3), number, np.float32),
            "actions": np.zeros(num_steps, np.int64),
            "rewards": np.ones(num_steps),
            "terminated": True,
            **given,
        },
    )


@pytest.fixture
def dataset(lake):
    dataset = lake.dataset("toys")
    dataset.create(Box((3,)), Discrete(2))
    return dataset


def ids(lake):
    return lake.sql("select episode_id from toys.episodes order by 1")["episode_id"].to_pylist()


def test_a_commit_follows_another_after_the_interval(lake, dataset, monkeypatch):
    commit, begun, ended = dataset.commit, [], []

    def timed(*args, **kwargs):
        begun.append(time.monotonic())
        done = commit(*args, **kwargs)
        ended.append(time.monotonic())
        return done

    monkeypatch.setattr(dataset, "commit", timed)
    with EpisodeCommitter(dataset, "run", interval_s=0.1) as recorder:
        recorder.add([episode(0)])  # the first group is due at once
        assert recorder.flush(60)
        recorder.add([episode(1)])
        while len(ended) < 2:
            time.sleep(0.001)
    assert ids(lake) == ["test/0", "test/1"]
    assert begun[1] - ended[0] >= 0.1


def test_what_waits_for_the_interval_is_one_commit(lake, dataset):
    with EpisodeCommitter(dataset, "run", interval_s=3600) as recorder:
        recorder.add(dataset.write([episode(0)]))
        assert recorder.flush(60)
        recorder.add(dataset.write([episode(1), episode(2, num_steps=5)]))
        recorder.add([episode(3)])
        recorder.add([episode(4)])
        assert ids(lake) == ["test/0"]
        assert recorder.flush(60)
    log = [(c["producer"], c["sequence"], c["num_steps"]) for c in dataset.history()[1:]]
    assert log == [("run", 0, 2), ("run", 1, 11)]
    # What was not written yet is one shard, however it was handed over.
    assert len(dataset.snapshot().files) == 3


def test_closing_commits_what_is_left(lake, dataset):
    with EpisodeCommitter(dataset, "run", interval_s=3600) as recorder:
        recorder.add([episode(0)])
        assert recorder.flush(60)
        recorder.add([episode(1)])
    assert ids(lake) == ["test/0", "test/1"]


def test_what_was_handed_over_is_acknowledged_in_order(dataset):
    with EpisodeCommitter(dataset, "run", interval_s=3600) as recorder:
        recorder.add([episode(0)])
        assert recorder.flush(60)
        recorder.add([episode(1)])
        recorder.add([episode(2)])
        assert recorder.flush(60)
        done = recorder.take_acknowledged()
        assert [(a.last, a.commit.version) for a in done] == [(0, 1), (2, 2)]
        assert recorder.take_acknowledged() == []
        assert recorder.last_version == 2


@pytest.mark.slow
def test_a_store_that_refuses_is_asked_until_it_takes_it(lake, dataset, monkeypatch):
    has_room, commit = threading.Event(), dataset.commit

    def refusing(*args, **kwargs):
        if not has_room.is_set():
            raise TransientStorageError("toys: No space left on device")
        return commit(*args, **kwargs)

    monkeypatch.setattr(dataset, "commit", refusing)
    with EpisodeCommitter(dataset, "run", interval_s=0.01) as recorder:
        recorder.add([episode(0)])
        while recorder.blocked_reason is None:
            time.sleep(0.001)
        assert "No space left" in recorder.blocked_reason
        recorder.add([episode(1)])
        has_room.set()
        assert recorder.flush(60)
        assert recorder.blocked_reason is None
    assert ids(lake) == ["test/0", "test/1"]
    # Under the sequence that was tried first, so that a lost answer would have doubled nothing.
    assert [c["sequence"] for c in dataset.history()[1:]] == [0, 1]


def test_what_is_refused_for_good_is_raised(dataset):
    with EpisodeCommitter(dataset, "run", interval_s=0.01) as recorder:
        recorder.add([episode(0, actions=np.zeros(2, np.float32) + 0.5)])
        with pytest.raises(Exception, match="test/0"):
            recorder.flush(60)
        with pytest.raises(Exception, match="test/0"):
            recorder.add([episode(1)])


def test_episodes_that_will_not_go_on_are_named_in_a_commit(dataset):
    with EpisodeCommitter(dataset, "run", interval_s=0.01) as recorder:
        recorder.abandon(["test/7"])
        recorder.add([episode(0)])
        assert recorder.flush(60)
        recorder.abandon(["test/8", "test/9"])
    told = [c.get("abandoned_episodes") for c in dataset.history()[1:]]
    assert told == [["test/7"], ["test/8", "test/9"]]
    assert dataset.snapshot().num_steps == 2


def test_names_alone_are_committed_before_flush_returns(dataset):
    with EpisodeCommitter(dataset, "run", interval_s=3600) as recorder:
        recorder.abandon(["test/7"])
        assert recorder.flush(60)
        assert [c.get("abandoned_episodes") for c in dataset.history()[1:]] == [["test/7"]]
        assert recorder.take_acknowledged() == []


def test_a_producer_goes_on_after_its_last_commit(lake, dataset):
    for number in range(2):
        with EpisodeCommitter(dataset, "run", interval_s=0.01) as recorder:
            recorder.add([episode(number)])
    assert ids(lake) == ["test/0", "test/1"]
    assert [c["sequence"] for c in dataset.history()[1:]] == [0, 1]


def test_closing_does_not_wait_for_a_store_that_refuses(lake, dataset, monkeypatch):
    def refusing(*args, **kwargs):
        raise TransientStorageError("toys: No space left on device")

    monkeypatch.setattr(dataset, "commit", refusing)
    recorder = EpisodeCommitter(dataset, "run", interval_s=0.01)
    recorder.add([episode(0)])
    assert not recorder.flush(0.3)
    recorder.close()
    assert ids(lake) == []


def test_a_store_that_refuses_for_good_ends_it(dataset, monkeypatch):
    def refusing(*args, **kwargs):
        raise StorageError("toys: Read-only file system")

    monkeypatch.setattr(dataset, "commit", refusing)
    with EpisodeCommitter(dataset, "run", interval_s=0.01) as recorder:
        recorder.add([episode(0)])
        with pytest.raises(StorageError, match="Read-only"):
            recorder.flush(60)
        assert recorder.blocked_reason is None


def test_a_mismatch_of_schemas_is_not_a_full_disk(dataset):
    with EpisodeCommitter(dataset, "run", interval_s=0.01) as recorder:
        recorder.add([episode(0, action_masks=np.ones((2, 2), bool))])
        with pytest.raises(SchemaMismatchError):
            recorder.flush(60)
        assert recorder.blocked_reason is None


def test_nothing_to_commit_makes_no_version(dataset):
    with EpisodeCommitter(dataset, "run", interval_s=0.01) as recorder:
        assert recorder.flush(60)
    assert dataset.snapshot().version == 0


def test_workers_may_each_bring_the_same_new_columns(lake, dataset):
    with EpisodeCommitter(dataset, "run", interval_s=3600) as recorder:
        for number in range(3):
            extras = {"worker": np.full(2, number, np.int32), "seed": np.zeros(2, np.int64)}
            recorder.add(dataset.write([episode(number, extras=extras)]))
    found = lake.sql("select distinct episode_id, worker, seed from toys.steps order by 1")
    assert found["worker"].to_pylist() == [0, 1, 2]


def test_trouble_that_turns_out_to_be_for_good_is_raised_and_waited_for_no_longer(
    dataset, monkeypatch
):
    is_for_good = threading.Event()

    def refusing(*args, **kwargs):
        if not is_for_good.is_set():
            raise TransientStorageError("toys: No space left")
        raise StorageError("toys: Read-only")

    monkeypatch.setattr(dataset, "commit", refusing)
    with EpisodeCommitter(dataset, "run", interval_s=0.01) as recorder:
        recorder.add([episode(0)])
        for waits in (True, False):
            while (recorder.blocked_reason is None) is waits:
                time.sleep(0.001)
            is_for_good.set()
        with pytest.raises(StorageError, match="Read-only"):
            recorder.take_acknowledged()


def test_what_was_committed_before_a_failure_is_told(dataset):
    with EpisodeCommitter(dataset, "run", interval_s=0.01) as recorder:
        recorder.add([episode(0)])
        assert recorder.flush(60)
        recorder.add([episode(1, action_masks=np.ones((2, 2), bool))])
        with pytest.raises(SchemaMismatchError):
            recorder.flush(60)
        assert [one.commit.num_episodes for one in recorder.take_acknowledged()] == [1]
        with pytest.raises(SchemaMismatchError):
            recorder.take_acknowledged()
