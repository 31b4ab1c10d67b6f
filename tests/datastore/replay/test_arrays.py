from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete
from replaylake.datastore.errors import NotFoundError, SchemaMismatchError, ShardCorruptError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table import shard as shard_module

IMAGES = Box((4, 3), "uint8", 0, 255)


def episode(number: int, num: int, **fields: Any) -> Episode:
    rng = np.random.default_rng(number)
    return Episode(
        f"e{number}",
        rng.normal(size=(num, 3)).astype(np.float32),
        rng.integers(0, 4, num),
        rng.normal(size=num),
        truncated=True,
        **fields,
    )


@pytest.fixture
def dataset(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """Four shards of several row groups each, so that every thread has something to do."""
    monkeypatch.setattr(shard_module, "ROW_GROUP_ROWS", 7)
    dataset = Dataset(storage, "d")
    dataset.create(Box((3,), "float32"), Discrete(4))
    for commit in range(4):
        dataset.append([episode(10 * commit + i, 9 + i) for i in range(3)])
    return dataset


def test_arrays_are_the_rows_in_their_order(dataset: Dataset) -> None:
    snapshot = dataset.snapshot()
    table = snapshot.table.read()
    arrays = snapshot.arrays()
    assert list(arrays) == [
        "step",
        "observation",
        "action",
        "reward",
        "terminated",
        "truncated",
    ]
    kinds = {name: (np.asarray(a).dtype.name, np.asarray(a).shape) for name, a in arrays.items()}
    assert kinds == {
        "step": ("int32", (120,)),
        "observation": ("float32", (120, 3)),
        "action": ("int64", (120,)),
        "reward": ("float64", (120,)),
        "terminated": ("bool", (120,)),
        "truncated": ("bool", (120,)),
    }
    for name, array in arrays.items():
        assert np.asarray(array).tolist() == table[name].to_pylist(), name


def test_what_is_not_known_is_nan_nat_or_none(dataset: Dataset) -> None:
    known = episode(
        50,
        5,
        behavior_log_probs=np.asarray([-1, np.nan, -2, -3, -4], np.float32),
        policies=np.asarray(["p", None, "q", "p", "p"], object),
        timestamps=np.arange(5) * 1_000_000,
        extras={"note": ["a", None, "a", "b", "c"], "pair": np.ones((5, 2))},
    )
    dataset.append([known])
    names = ["episode_id", "behavior_log_prob", "policy", "timestamp", "note"]
    arrays = {name: np.asarray(a) for name, a in dataset.snapshot().arrays(names).items()}
    assert arrays["episode_id"][[0, 119, -1]].tolist() == ["e0", "e32", "e50"]
    np.testing.assert_array_equal(arrays["behavior_log_prob"][-5:], [-1, np.nan, -2, -3, -4])
    assert np.isnan(arrays["behavior_log_prob"][:-5]).all()
    assert arrays["policy"][-5:].tolist() == ["p", None, "q", "p", "p"]
    assert arrays["policy"][0] is None
    assert arrays["note"][-6:].tolist() == [None, "a", None, "a", "b", "c"]
    assert arrays["timestamp"].dtype == np.dtype("datetime64[us]")
    assert arrays["timestamp"][-1] == np.datetime64(4, "s")
    assert np.isnat(arrays["timestamp"][:-5]).all()


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("policy_version", "'policy_version': found .* nulls in .* rows, expected a value in each"),
        ("pair", "'pair': found .* nulls in .* rows, expected a value in each"),
        ("ragged", "'ragged': found list.*, expected numbers, flags, times"),
    ],
)
def test_columns_that_arrays_cannot_hold(dataset: Dataset, column: str, message: str) -> None:
    extras = {"pair": np.ones((2, 2)), "ragged": pa.array([[1.0], [2.0, 3.0]])}
    dataset.append([episode(50, 2, extras=extras)])
    with pytest.raises(SchemaMismatchError, match=message):
        dataset.snapshot().arrays([column])


def test_an_absent_column(dataset: Dataset) -> None:
    with pytest.raises(NotFoundError, match="found no column pixels"):
        dataset.snapshot().arrays(["pixels"])


def test_nested_spaces_and_frames(storage: LocalStorage) -> None:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (6, 4, 3), dtype=np.uint8)
    speeds = rng.normal(size=6)
    dataset = Dataset(storage, "d")
    dataset.create(Dict({"camera": IMAGES, "speed": Box((), "float64")}), Discrete(2))
    for part in (slice(0, 2), slice(2, 6)):
        num = part.stop - part.start
        observations = {"camera": frames[part], "speed": speeds[part]}
        dataset.append([Episode(str(part.start), observations, np.zeros(num, int), np.ones(num))])
    read: Any = dataset.snapshot().arrays(["observation"])["observation"]
    np.testing.assert_array_equal(read["camera"], frames)
    np.testing.assert_array_equal(read["speed"], speeds)
    assert read["camera"].dtype == np.uint8


def test_a_snapshot_without_rows(storage: LocalStorage) -> None:
    dataset = Dataset(storage, "d")
    dataset.create(Box((3,), "float32"), Discrete(4))
    assert np.asarray(dataset.snapshot().arrays()["observation"]).shape == (0, 3)


@pytest.mark.parametrize("number", [0, 3])
def test_a_damaged_shard_is_in_no_array(dataset: Dataset, number: int) -> None:
    path = dataset.snapshot().table.paths()[number]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardCorruptError, match=path.name):
        dataset.snapshot().arrays()
