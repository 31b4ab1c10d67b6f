"""A snapshot as a dataset of Ray: the same rows, by column, by episode, over schema drift."""

import pickle
import sys

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete
from replaylake.datastore.errors import ExtraMissingError, NotFoundError, QueryRefusedError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.shard_rows import episode_keys, shard_rows
from replaylake.offline.running.local_ray import import_ray
from replaylake.online.ray_data import to_ray

# Ray 2.60 reads settings of its own that it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")

BY_STEP = "order by episode_id, step"


def _episode(name, num_steps=3, **fields):
    return Episode(
        name,
        observations=np.arange(num_steps * 2, dtype=np.float32).reshape(-1, 2),
        actions=np.arange(num_steps) % 2,
        rewards=np.arange(num_steps) + 1.0,
        terminated=True,
        **fields,
    )


@pytest.fixture
def filled(lake):
    """Four shards; the last has a column that the others lack."""
    dataset = lake.dataset("d")
    for number in range(3):
        dataset.append([_episode(f"e{number}", number + 2)])
    dataset.append([_episode("x", 2, extras={"label": np.array([0.5, 1.5])})])
    return lake


@pytest.fixture(scope="module")
def ray():
    ray = import_ray("tests")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


def _rows(lake, query):
    return lake.sql(query).to_pylist()


def _sorted(rows):
    return sorted(rows, key=lambda row: (row["episode_id"], row["step"]))


def test_shard_rows_are_the_rows_in_parts(filled):
    snapshot = filled.snapshot("d")
    rows = shard_rows(snapshot)
    for num_parts, sizes in ((1, [11]), (2, [5, 6]), (4, [2, 3, 4, 2]), (9, [2, 3, 4, 2])):
        parts = rows.split(num_parts)
        assert [part.num_rows for part in parts] == sizes
        found = [row for part in parts for table in part.read() for row in table.to_pylist()]
        assert _sorted(found) == _rows(filled, f"select * from d.steps {BY_STEP}")


@pytest.mark.parametrize("on", ["folder", "s3"])
def test_shard_rows_travel(request, tmp_path, on):
    """A task opens the lake by its name: connections and caches do not travel."""
    place = tmp_path / "here" if on == "folder" else f"s3://{request.getfixturevalue('bucket')}/it"
    lake = open_lake(place, create=True)
    for number in range(3):
        lake.dataset("d").append([_episode(f"e{number}")])
    rows = shard_rows(lake.snapshot("d@2"), ["episode_id", "reward"])
    again = pickle.loads(pickle.dumps(rows))
    (part,) = again.split(1)
    found = [row for table in part.read() for row in table.to_pylist()]
    assert found == [{"episode_id": f"e{n}", "reward": r} for n in (0, 1) for r in (1.0, 2.0, 3.0)]


def test_shard_rows_of_an_empty_dataset(lake):
    lake.dataset("d").create(Box((2,)), Discrete(2))
    (part,) = shard_rows(lake.snapshot("d")).split(4)
    assert list(part.read()) == []


def test_shard_rows_of_some_episodes(filled):
    snapshot = filled.snapshot("d")
    keys = episode_keys(snapshot, "num_steps = 2")
    tables = list(shard_rows(snapshot, ["reward"]).read(keys))
    assert [row for table in tables for row in table["reward"].to_pylist()] == [1.0, 2.0, 1.0, 2.0]
    assert tables[0].column_names == ["reward"]


def test_what_cannot_be_read(filled):
    with pytest.raises(NotFoundError, match="nothing"):
        shard_rows(filled.snapshot("d"), ["nothing"])
    with pytest.raises(QueryRefusedError, match="random"):
        episode_keys(filled.snapshot("d"), "random() < 0.5")


def test_without_ray(filled, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ExtraMissingError, match=r"replaylake\[online\]"):
        to_ray(filled.snapshot("d"))


@pytest.mark.slow
def test_the_same_rows(filled, ray):
    dataset = to_ray(filled.snapshot("d"))
    assert dataset.count() == 11
    assert dataset.schema().names == filled.snapshot("d").table.schema.names
    rows = _sorted(dataset.take_all())
    expected = _rows(filled, f"select * from d.steps {BY_STEP}")
    assert [_plain(row) for row in rows] == expected
    assert [row["label"] for row in rows] == [None] * 9 + [0.5, 1.5]


@pytest.mark.slow
def test_columns_where_and_a_version(filled, ray):
    snapshot = filled.snapshot("d@3")
    dataset = to_ray(snapshot, ["episode_id", "step", "reward"], "num_steps >= 3")
    expected = _rows(
        filled,
        f"select episode_id, step, reward from d.steps where episode_id in ('e1', 'e2') {BY_STEP}",
    )
    assert _sorted(dataset.take_all()) == expected
    assert to_ray(snapshot, ["reward"], "num_steps > 100").count() == 0
    total = to_ray(snapshot, ["reward"]).map_batches(lambda batch: batch).sum("reward")
    assert total == sum(row["reward"] for row in _rows(filled, "select reward from d.steps")) - 3


@pytest.mark.slow
def test_nothing_is_read_before_it_is_asked_for(filled, ray):
    snapshot = filled.snapshot("d")
    (path,) = [path for path in snapshot.table.paths()][:1]
    dataset = to_ray(snapshot, ["reward"])
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ray.exceptions.RayTaskError, match="sha256"):
        dataset.take_all()


@pytest.mark.slow
def test_nested_and_image_columns(lake, ray):
    space = Dict({"camera": Box((2, 3), "uint8", 0, 255), "speed": Box((), "float64")})
    dataset = lake.dataset("nested")
    dataset.create(space, Discrete(2))
    observations = {
        "camera": np.arange(12, dtype=np.uint8).reshape(2, 2, 3),
        "speed": np.array([0.1, 0.2]),
    }
    dataset.append(
        [
            Episode(
                "n", observations=observations, actions=np.array([0, 1]), rewards=np.zeros(2),
                terminated=True,
            )
        ]
    )  # fmt: skip
    rows = _sorted(to_ray(lake.snapshot("nested")).take_all())
    assert [_plain(row) for row in rows] == _rows(lake, f"select * from nested.steps {BY_STEP}")


def _plain(value):
    """Return what Ray gives as arrays as the lists that SQL gives."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value
