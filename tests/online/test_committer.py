import numpy as np
import pytest

from replaylake.datastore.episode import Episode
from replaylake.datastore.errors import StorageFailed
from replaylake.datastore.spaces import Box, Discrete
from replaylake.online.committer import Committer


def _episode(number, num_steps=2):
    return Episode(
        f"test/{number}",
        observations=np.full((num_steps, 3), number, np.float32),
        actions=np.zeros(num_steps, np.int64),
        rewards=np.ones(num_steps),
        terminated=True,
    )


@pytest.fixture
def dataset(lake):
    dataset = lake.dataset("toys")
    dataset.create(Box((3,)), Discrete(2))
    return dataset


def _ids(lake):
    return lake.sql("select episode_id from toys.episodes order by 1")["episode_id"].to_pylist()


def test_written_episodes_are_unseen_until_their_group_is_committed(lake, dataset):
    committer = Committer(dataset, "run", interval_s=3600)
    committer.add(dataset.write([_episode(0)]))  # the first group is due at once
    committer.add(dataset.write([_episode(1), _episode(2, num_steps=5)]))
    committer.add(dataset.write([_episode(3)]))
    committer.commit_if_due()
    assert _ids(lake) == ["test/0"]
    committer.flush()
    assert _ids(lake) == ["test/0", "test/1", "test/2", "test/3"]
    counts = [(c.version, c.num_episodes, c.num_steps, c.num_shards) for c in committer.commits]
    assert counts == [(1, 1, 2, 1), (2, 3, 9, 2)]
    log = [(c["producer"], c["sequence"], c["num_steps"]) for c in dataset.history()[1:]]
    assert log == [("run", 0, 2), ("run", 1, 9)]


def test_nothing_to_commit_makes_no_version(dataset):
    committer = Committer(dataset, "run")
    committer.flush()
    assert committer.commits == []
    assert dataset.snapshot().version == 0


def test_a_group_committed_twice_is_there_once(lake, dataset):
    written = [dataset.write([_episode(0)])]
    first = dataset.commit(written, producer="run", sequence=0)
    again = dataset.commit(written, producer="run", sequence=0)
    assert (again.version, again.already_present, again.num_episodes) == (1, True, 0)
    assert (first.num_episodes, _ids(lake)) == (1, ["test/0"])


def test_a_group_outlives_a_commit_that_failed(lake, dataset):
    committer = Committer(dataset, "run")
    written = dataset.write([_episode(0)])
    temporary = lake.path / "_lake" / "tmp"
    temporary.rename(temporary.with_name("aside"))
    temporary.write_text("a file where the folder was")
    with pytest.raises(StorageFailed):
        committer.add(written)
    temporary.unlink()
    temporary.with_name("aside").rename(temporary)
    committer.flush()
    assert _ids(lake) == ["test/0"]
    assert [commit.version for commit in committer.commits] == [1]


def test_workers_may_each_bring_the_same_new_columns(lake, dataset):
    extras = {"worker": np.zeros(2, np.int32), "seed": np.zeros(2, np.int64)}
    episodes = [
        Episode(
            **{**vars(_episode(number)), "extras": extras | {"worker": extras["worker"] + number}}
        )
        for number in range(3)
    ]
    committer = Committer(dataset, "run", interval_s=3600)
    for written in [dataset.write([episode]) for episode in episodes]:
        committer.add(written)
    committer.flush()
    found = lake.sql("select distinct episode_id, worker, seed from toys.steps order by 1")
    assert found["worker"].to_pylist() == [0, 1, 2]
