"""What each version did, newest first."""

import pytest

from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.lake.versions.history import read_history
from replaylake.datastore.storage.table.rewrite import RewritePlan, rewrite


@pytest.fixture
def dataset(lake, make_episode):
    dataset = lake.dataset("d")
    dataset.append([make_episode("a"), make_episode("b")], producer="first", sequence=0)
    dataset.append([make_episode("c", 5)], producer="second", sequence=3)
    return dataset


def test_the_newest_comes_first(lake, dataset):
    lake.tag("d@1", "golden")
    lake.tag("d@1", "first")
    found = read_history(lake.dataset("d"), lake.tags)
    assert [version.version for version in found.versions] == [2, 1, 0]
    newest, middle, oldest = found.versions
    assert (newest.producer, newest.operation) == ("second", "WRITE")
    assert (newest.num_episodes, newest.num_steps) == (1, 5)
    assert (newest.shards_added, newest.shards_removed, newest.tags) == (1, 0, ())
    assert middle.tags == ("first", "golden")
    assert (middle.num_episodes, middle.num_steps) == (2, 6)
    assert (oldest.operation, oldest.num_steps) == ("CREATE TABLE", None)
    assert newest.committed_ms > middle.committed_ms
    assert found.num_older == 0


def test_a_limit(lake, dataset):
    found = read_history(lake.dataset("d"), lake.tags, limit=2)
    assert [version.version for version in found.versions] == [2, 1]
    assert found.num_older == 1


def test_a_rewrite_removes_shards(lake, dataset):
    rewrite(
        dataset.table,
        lambda snapshot: RewritePlan(
            {entry: lambda rows: rows.slice(0, 0) for entry in snapshot.files}
        ),
        producer="delete/x",
        sequence=0,
        operation="DELETE",
    )
    (newest,) = read_history(lake.dataset("d"), lake.tags, limit=1).versions
    assert (newest.operation, newest.shards_added, newest.shards_removed) == ("DELETE", 0, 2)


def test_no_dataset(lake):
    with pytest.raises(NotFoundError, match="nowhere"):
        read_history(lake.dataset("nowhere"), lake.tags)
