"""Other engines open a dataset as a Delta table and see exactly our rows (docs/ENGINES.md)."""

import math
import sys

import duckdb
import numpy as np
import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, MultiBinary, Text, Tuple
from replaylake.datastore.errors import ExtraMissingError, ReplayLakeError
from replaylake.datastore.lake.lake import open_lake


def _ours(lake, name, version=None):
    """Return the rows as plain values, by episode, agent and step."""
    return _plain(lake.dataset(name).snapshot(version).table.read().to_pylist())


def _plain(rows):
    def key(row):
        return row["episode_id"], row["agent_id"], row["step"]

    return [_value(row) for row in sorted(rows, key=key)]


def _value(value):
    """Return a value such that equal values compare equal: NaN is None, instants are UTC."""
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_value(item) for item in value]
    if isinstance(value, float):
        return None if math.isnan(value) else value
    return value.timestamp() if hasattr(value, "timestamp") else value


def _delta_rs(path, version=None):
    return _plain(DeltaTable(path, version=version).to_pyarrow_table().to_pylist())


def _polars(path, version=None):
    frame = polars.read_delta(str(path), version=version, use_pyarrow=True)
    return _plain(frame.to_dicts())


def _polars_lazily(path, version=None):
    frame = polars.scan_delta(str(path), version=version, use_pyarrow=True)
    return _plain(frame.collect().to_dicts())


def _polars_of_the_snapshot(path, version=None):
    lake = open_lake(path.parent)
    return _plain(lake.dataset(path.name).snapshot(version).to_polars().collect().to_dicts())


def _duckdb_on_the_files(path, version=None):
    files = DeltaTable(path, version=version).file_uris()
    query = "select * from read_parquet($files, union_by_name = true)"
    with duckdb.connect() as connection:
        rows = connection.sql(query, params={"files": files}).to_arrow_table()
    return _plain(rows.to_pylist())


ENGINES = {
    "delta-rs": _delta_rs,
    "polars": _polars,
    "polars, lazily": _polars_lazily,
    "polars, to_polars": _polars_of_the_snapshot,
    "duckdb on the files": _duckdb_on_the_files,
}


@pytest.fixture(params=ENGINES)
def theirs(request):
    return ENGINES[request.param]


def _compact(dataset):
    table = dataset.table.snapshot()
    dataset.table.commit(
        [dataset.table.write(table.read(), since=0)],
        producer="compact/test",
        sequence=0,
        operation="COMPACT",
        removed=[entry.path for entry in table.files],
        data_change=False,
    )


def test_plain(lake, make_episode, theirs):
    dataset = lake.dataset("d")
    dataset.append([make_episode("a", timestamps=np.array([1, 2, 10**15]))])
    dataset.append([make_episode("b", 5, behavior_log_probs=np.array([-0.5] * 5))])
    assert theirs(dataset.path) == _ours(lake, "d")
    assert len(_ours(lake, "d")) == 8


def test_a_version_and_a_tag(lake, make_episode, theirs):
    dataset = lake.dataset("d")
    for name in ("a", "b", "c"):
        dataset.append([make_episode(name)])
    lake.tag("d@2", "golden")
    version = lake.tags.version("d", "golden")
    assert theirs(dataset.path, version) == _ours(lake, "d", 2)
    assert len(theirs(dataset.path, 1)) == 3
    assert theirs(dataset.path) == _ours(lake, "d")


def test_compacted(lake, make_episode, theirs):
    dataset = lake.dataset("d")
    for name in ("a", "b", "c"):
        dataset.append([make_episode(name)])
    before = _ours(lake, "d")
    _compact(dataset)
    assert len(dataset.snapshot().files) == 1
    assert theirs(dataset.path) == before
    assert theirs(dataset.path, 3) == before


def test_a_pattern_over_the_shards_reads_replaced_rows(lake, make_episode):
    """Why docs/ENGINES.md warns of it."""
    dataset = lake.dataset("d")
    for name in ("a", "b"):
        dataset.append([make_episode(name)])
    _compact(dataset)
    everything = polars.scan_parquet(dataset.path / "shards" / "*.parquet")
    assert len(everything.collect()) == 2 * len(_ours(lake, "d"))


def test_a_column_that_came_later(lake, make_episode, theirs):
    dataset = lake.dataset("d")
    dataset.append([make_episode("a")])
    dataset.append([make_episode("b", extras={"label": np.array([0.5, 1.5, np.nan])})])
    rows = theirs(dataset.path)
    assert rows == _ours(lake, "d")
    assert [row["label"] for row in rows] == [None, None, None, 0.5, 1.5, None]
    assert theirs(dataset.path, 1) == _ours(lake, "d", 1)


def test_nested_and_text(lake, theirs):
    observation = Dict(
        {
            "arm": Tuple((Box((2,), "float64"), Discrete(3))),
            "flags": MultiBinary(2),
            "said": Text(),
        }
    )
    dataset = lake.dataset("nested")
    dataset.create(observation, Discrete(2), mask_size=2)
    values = {
        "arm": {"_0": np.array([[0.1, 0.2], [0.3, 0.4]]), "_1": np.array([0, 2])},
        "flags": np.array([[0, 1], [1, 1]]),
        "said": np.array(["hello", "wörld"], object),
    }
    dataset.append(
        [
            Episode(
                "n",
                observations=values,
                actions=np.array([0, 1]),
                rewards=np.zeros(2),
                truncated=True,
                action_masks=np.array([[True, False], [True, True]]),
            )
        ]
    )
    rows = theirs(dataset.path)
    assert rows == _ours(lake, "nested")
    assert rows[1]["observation"]["said"] == "wörld"


def test_images(lake, theirs):
    frames = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    dataset = lake.dataset("pixels")
    dataset.create(Box((4, 5, 3), "uint8", 0, 255), Discrete(2))
    dataset.append(
        [
            Episode(
                "i",
                observations=frames,
                actions=np.array([0, 1]),
                rewards=np.zeros(2),
                final_observation=frames[0],
            )
        ]
    )
    rows = theirs(dataset.path)
    assert rows == _ours(lake, "pixels")
    assert rows[1]["observation"] == frames[1].tobytes()


def test_after_a_checkpoint(lake, make_episode, theirs):
    dataset = lake.dataset("d")
    for number in range(6):
        dataset.append([make_episode(f"e{number}")])
    _compact(dataset)
    dataset.table.log.checkpoint(dataset.snapshot().version)
    dataset.append([make_episode("after", extras={"label": np.zeros(3)})])
    assert theirs(dataset.path) == _ours(lake, "d")
    assert theirs(dataset.path, 7) == _ours(lake, "d", 7)


def test_an_empty_dataset(lake):
    dataset = lake.dataset("d")
    dataset.create(Box((2,)), Discrete(2))
    assert _delta_rs(dataset.path) == []
    assert _polars(dataset.path) == []


def test_types_as_other_engines_have_them(lake, make_episode):
    """What docs/ENGINES.md says of types: lists for vectors, plain strings for ids."""
    lake.dataset("d").append([make_episode("a")])
    path = lake.dataset("d").path
    fields = DeltaTable(path).to_pyarrow_table().schema
    assert pa.types.is_list(fields.field("observation").type)
    assert pa.types.is_string(fields.field("agent_id").type)
    frame = polars.read_delta(str(path), use_pyarrow=True)
    assert frame.schema["observation"] == polars.List(polars.Float32)
    # Its own Parquet reader takes vectors for Arrays, as the shards say, where Delta says List.
    with pytest.raises(polars.exceptions.SchemaError, match="Array"):
        polars.read_delta(str(path))


def test_a_lazy_polars_frame_reads_only_what_a_query_needs(lake, make_episode):
    dataset = lake.dataset("d")
    for number in range(3):
        dataset.append([make_episode(f"e{number}", extras={"label": np.zeros(3)})])
    snapshot = dataset.snapshot()
    frame = snapshot.to_polars()
    assert frame.collect_schema()["observation"] == polars.Array(polars.Float32, 2)
    query = frame.filter(polars.col("episode_id") == "e1").select("step", "reward")
    plan = query.explain()
    assert "PROJECT 3/" in plan
    assert "SELECTION:" in plan
    for entry in snapshot.files[::2]:
        # Every byte but the footer, which has the smallest and largest episode of the file.
        path = dataset.path / entry.path
        footer = int.from_bytes(path.read_bytes()[-8:-4], "little") + 8
        path.write_bytes(bytes(entry.size_bytes - footer) + path.read_bytes()[-footer:])
    assert query.collect()["step"].to_list() == [0, 1, 2]
    with pytest.raises(polars.exceptions.PolarsError):
        frame.select("reward").collect()


def test_a_lazy_polars_frame_of_removed_shards(lake, make_episode):
    dataset = lake.dataset("d")
    dataset.append([make_episode("a")])
    before = dataset.snapshot()
    (dataset.path / before.files[0].path).unlink()
    with pytest.raises(ReplayLakeError, match=r"shards"):
        before.to_polars()


def test_to_polars_without_polars(lake, make_episode, monkeypatch):
    dataset = lake.dataset("d")
    dataset.append([make_episode("a")])
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ExtraMissingError, match=r"pip install 'replaylake\[polars\]'"):
        dataset.snapshot().to_polars()
