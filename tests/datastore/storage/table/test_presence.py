"""Presence: a version whose shards were removed is refused as a whole, and the message says why."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import NotFoundError, ShardCorruptError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.query import summaries
from replaylake.datastore.storage.table.presence import check_shards_present

Make = Callable[..., Episode]
GONE = (
    r"^d@2: found that 2 of its 2 shards are gone, such as shards/\w+\.parquet, expected all of "
    r"them\. Version 3 \(COMPACT\) took them out, and vacuum or purge has removed them since\. "
    r"Read the newest version, d@4; a version that has a tag is kept\.$"
)


@pytest.fixture
def dataset(lake: Lake, make_episode: Make) -> Dataset:
    """Versions 1 and 2 were compacted by 3 and vacuumed; 4 appended."""
    dataset = lake.dataset("d")
    tokens = {"observation_tokens": [[1]] * 3, "action_tokens": [[2]] * 3}
    dataset.append([make_episode("a", extras=tokens)])
    dataset.append([make_episode("b", extras=tokens)])
    before = dataset.snapshot().table
    summaries.refresh(before)
    dataset.table.commit(
        [dataset.table.write(before.read(), since=1)],
        producer="compact/x",
        sequence=0,
        operation="COMPACT",
        removed=[entry.path for entry in before.files],
        data_change=False,
    )
    dataset.append([make_episode("c", extras=tokens)])
    for path in before.paths():
        path.unlink()
    return dataset


@pytest.mark.parametrize("view", ["steps", "episodes", "games", "transitions", "sequences"])
def test_a_version_that_was_vacuumed(lake: Lake, dataset: Dataset, view: str) -> None:
    with pytest.raises(NotFoundError, match=GONE):
        dataset.snapshot(2).sql(f"SELECT * FROM {view} LIMIT 1")
    with pytest.raises(NotFoundError, match=GONE):
        lake.sql(f"SELECT * FROM d.{view} LIMIT 1", at={"d": 2})
    assert lake.sql(f"SELECT DISTINCT episode_id FROM d.{view}").num_rows == 3


def test_it_cannot_be_trained_on(dataset: Dataset) -> None:
    with pytest.raises(NotFoundError, match=GONE):
        dataset.snapshot(2).replay()
    with pytest.raises(NotFoundError, match="1 of its 1 shards are gone"):
        dataset.snapshot(1).describe()


def test_what_should_be_there_is_damage(dataset: Dataset) -> None:
    newest = dataset.snapshot()
    path = newest.table.paths()[-1]
    path.unlink()
    with pytest.raises(ShardCorruptError, match=rf"{path}: No such file.*from a copy of the lake"):
        newest.sql("SELECT count(*) FROM episodes")
    # Version 3 does not have that shard.
    assert dataset.snapshot(3).sql("SELECT count(*) AS n FROM steps")["n"].to_pylist() == [6]


def test_where_the_log_no_longer_says(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = dataset.snapshot(2)

    def expired(*_: object) -> None:
        raise NotFoundError("version 3: its commit is not in d/_delta_log.")

    monkeypatch.setattr(type(dataset.table.log), "read_change", expired)
    with pytest.raises(NotFoundError, match=r"A later version took them out, and vacuum or purge"):
        check_shards_present(snapshot.table)
