from __future__ import annotations

import io
import json
import shutil
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.inference import infer_spec
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, Space
from replaylake.datastore.errors import ReplayLakeError, SourceInvalidError
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.formats.format import (
    ReadOptions,
    RejectedEpisode,
    SourceReader,
)
from replaylake.datastore.interchange.formats.rlds.features import episode_spec
from replaylake.datastore.interchange.formats.rlds.rlds import RldsTables, find_shards
from replaylake.datastore.interchange.formats.tabular.reader import TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import CachedTables
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.receipt import Counts
from replaylake.datastore.interchange.sources.source import find_source
from replaylake.datastore.lake.lake import open_lake

# Written by tensorflow-datasets; see make_rlds.py there. arm.json and grid.json are what it reads.
_MADE = Path(__file__).parents[3] / "fixtures" / "rlds"
_TENSOR = {"dtype": "float32", "encoding": "none", "shape": {"dimensions": ["2"]}}
_SCALAR = {"dtype": "float32", "encoding": "none", "shape": {}}
_STEP = {
    "observation": {"tensor": _TENSOR},
    "action": {"classLabel": {"numClasses": "3"}},
    "reward": {"tensor": _SCALAR},
    "is_first": {"tensor": {"dtype": "bool", "shape": {}}},
    "is_last": {"tensor": {"dtype": "bool", "shape": {}}},
    "is_terminal": {"tensor": {"dtype": "bool", "shape": {}}},
}


def _open(*paths: Path, **options: Any) -> SourceReader:
    source = find_source(paths)
    found = find_format("auto", source.files)
    assert found.name == "rlds"
    return found.read(source.files, ReadOptions(**options))


def _episodes(reading: SourceReader) -> list[Episode]:
    found = list(reading)
    assert not [one for one in found if isinstance(one, RejectedEpisode)]
    return [one for one in found if isinstance(one, Episode)]


def _features(step: Mapping[str, Any], **episode: Any) -> dict[str, Any]:
    steps = {"sequence": {"feature": {"featuresDict": {"features": step}}, "length": "-1"}}
    return {"featuresDict": {"features": {"steps": steps, **episode}}}


def _write(tf: Any, folder: Path, *episodes: Mapping[str, Any], step: Any = None) -> Path:
    """Write a dataset of one shard, as TFDS lays it out."""
    folder.mkdir(exist_ok=True)
    (folder / "features.json").write_text(json.dumps(_features(step or _STEP)))
    records = (tf.example({k: tf.feature(v) for k, v in e.items()}) for e in episodes)
    data = b"".join(map(tf.frame, records))
    (folder / "toy-train.tfrecord-00000-of-00001").write_bytes(data)
    return folder


def _episode(num_rows: int = 4, **changed: Any) -> dict[str, Any]:
    """Two numbers, an action, a reward of 1 a row but the last; terminated."""
    made: dict[str, Any] = {
        "observation": [float(i) for i in range(2 * num_rows)],
        "action": [t % 3 for t in range(num_rows)],
        "reward": [1.0] * (num_rows - 1) + [0.0],
        "is_first": [int(t == 0) for t in range(num_rows)],
        "is_last": [int(t == num_rows - 1) for t in range(num_rows)],
        "is_terminal": [int(t == num_rows - 1) for t in range(num_rows)],
    }
    return {f"steps/{name}": value for name, value in {**made, **changed}.items()}


def _png(pixels: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(out, "PNG")
    return out.getvalue()


def test_a_robot_dataset_of_tfds_is_read_as_tfds_reads_it() -> None:
    reading = _open(_MADE / "arm")
    episodes = _episodes(reading)
    expected = json.loads((_MADE / "arm.json").read_text())
    assert len(episodes) == 6
    assert [len(e) for e in episodes] == [3, 4, 3, 3, 1, 5]
    for episode, whole in zip(episodes, [*expected["train"], *expected["val"]], strict=True):
        rows = whole["steps"]
        num = len(episode)
        for key in ("image", "state", "depth"):
            want = np.asarray([row["observation"][key] for row in rows])
            assert isinstance(episode.observations, Mapping)
            np.testing.assert_array_equal(episode.observations[key], want[:num])
            if num < len(rows):
                np.testing.assert_array_equal(episode.final_observation[key], want[num])
        for key in ("world_vector", "gripper"):
            assert isinstance(episode.actions, Mapping)
            assert episode.actions[key].tolist() == [row["action"][key] for row in rows[:num]]
        assert episode.rewards.tolist() == [row["reward"] for row in rows[:num]]
        assert episode.terminated == rows[-1]["is_terminal"]
        assert episode.truncated == (rows[-1]["is_last"] and not rows[-1]["is_terminal"])
        for key in ("discount", "language_instruction", "language_embedding"):
            assert episode.extras[key].to_pylist() == [row[key] for row in rows[:num]]
        assert episode.extras["episode_metadata"].to_pylist() == [whole["episode_metadata"]] * num
    assert [e.episode_id for e in episodes][:3] == [
        "train-00000-0",
        "train-00000-1",
        "train-00001-0",
    ]
    assert [e.extras["split"][0].as_py() for e in episodes] == ["train"] * 4 + ["val"] * 2


def test_what_the_last_row_lost_is_said() -> None:
    reading = _open(_MADE / "arm")
    list(reading)
    notes = "\n".join(reading.notes)
    assert "all splits were read: train, val" in notes
    assert "action, reward and discount mean nothing by RLDS" in notes
    # Of six episodes one was stopped; the others have 99 there.
    assert "5 episodes have a reward other than 0 on the row that is_last marks" in notes


def test_spaces_are_as_features_json_states_them() -> None:
    parts: dict[str, Space] = {
        "depth": Box((2, 2)),
        "image": Box((8, 6, 3), "uint8", 0, 255),
        "state": Box((3,)),
    }
    action = Dict({"gripper": Discrete(2), "world_vector": Box((2,))})
    assert _open(_MADE / "arm").spaces == (Dict(parts), action)
    # How many states there are, a feature of int64 does not say.
    assert _open(_MADE / "grid").spaces == (Box((), "int64"), Discrete(3))


def test_a_dataset_goes_into_the_lake(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    receipt = ingest(lake, [_MADE / "arm"], "arm")
    assert receipt.format == "rlds"
    assert receipt.episodes == Counts(committed=6)
    assert receipt.steps == Counts(committed=19)
    again = ingest(lake, [_MADE / "arm"], "arm")
    assert again.episodes.committed == 0


def test_a_discrete_dataset_with_a_ragged_feature() -> None:
    first, second = _episodes(_open(_MADE / "grid"))
    assert np.asarray(first.observations).tolist() == [0, -1]
    assert first.final_observation == -2
    assert np.asarray(second.actions).tolist() == [1, 2, 0, 1]
    assert (first.terminated, first.truncated) == (True, False)
    assert (second.terminated, second.truncated) == (False, True)
    assert second.extras["visited"].to_pylist() == [[], [0], [0, 1], [0, 1, 2]]
    assert second.extras["seed"].to_pylist() == [8] * 4
    assert infer_spec([first, second]).action_space == Discrete(3)


def test_ends_by_hand(tf: Any, tmp_path: Path) -> None:
    none = [0, 0, 0, 0]
    folder = _write(
        tf,
        tmp_path / "toy",
        _episode(),
        _episode(is_terminal=none),
        _episode(is_terminal=none, is_last=none),
        _episode(is_last=[0, 1, 0, 1]),
        _episode(is_first=[1, 0, 1, 0]),
        _episode(1),
        _episode(is_first=none),
    )
    reading = _open(folder)
    found = list(reading)
    kept = [one for one in found if isinstance(one, Episode)]
    assert [(len(e), e.terminated, e.truncated) for e in kept] == [
        (3, True, False),
        (3, False, True),
        (4, False, False),
        (3, True, False),
    ]
    assert kept[0].final_observation.tolist() == [6.0, 7.0]
    assert kept[2].final_observation is None
    assert kept[2].rewards.tolist() == [1.0, 1.0, 1.0, 0.0]
    rejected = [one for one in found if isinstance(one, RejectedEpisode)]
    assert [one.source_episode_id for one in rejected] == ["train-00000-3", "train-00000-4"]
    assert {one.findings[0].check for one in rejected} == {"end_inside"}
    notes = "\n".join(reading.notes)
    assert "1 episodes hold one row" in notes
    assert "1 episodes do not begin with is_first" in notes


def test_only_open_episodes(tf: Any, tmp_path: Path) -> None:
    none = [0, 0, 0, 0]
    step = {**_STEP, "observation": {"tensor": {**_TENSOR, "shape": {"dimensions": ["2", "1"]}}}}
    folder = _write(tf, tmp_path / "toy", _episode(is_terminal=none, is_last=none), step=step)
    (episode,) = _episodes(_open(folder))
    assert np.asarray(episode.observations).shape == (4, 2, 1)


def test_large_images_are_read_again_and_not_kept() -> None:
    whole = _episodes(_open(_MADE / "arm"))
    files = find_source([_MADE / "arm"]).files
    spec = episode_spec(json.loads((_MADE / "arm" / "features.json").read_text()), "arm")
    tables = RldsTables(find_shards(files)[0], spec, [])
    kept = CachedTables(tables, keep_bytes=1)
    again = _episodes(TabularReader(kept, ReadOptions(), block_bytes=1))
    assert not kept.fill()
    assert [(e.episode_id, e.terminated, e.truncated) for e in again] == [
        (e.episode_id, e.terminated, e.truncated) for e in whole
    ]
    for one, other in zip(again, whole, strict=True):
        for key in ("image", "state"):
            assert isinstance(one.observations, Mapping)
            assert isinstance(other.observations, Mapping)
            np.testing.assert_array_equal(one.observations[key], other.observations[key])


def test_without_features_json_nothing_is_guessed(tmp_path: Path) -> None:
    folder = shutil.copytree(_MADE / "grid", tmp_path / "grid")
    (folder / "features.json").unlink()
    with pytest.raises(SourceInvalidError, match=r"found 0 features\.json"):
        _open(folder)


def test_two_datasets_are_not_mixed() -> None:
    with pytest.raises(SourceInvalidError, match=r"found 2 features\.json"):
        _open(_MADE / "grid", _MADE / "arm")


def test_a_missing_shard_is_said(tmp_path: Path) -> None:
    folder = shutil.copytree(_MADE / "arm", tmp_path / "arm")
    (folder / "arm-train.tfrecord-00000-of-00002").unlink()
    reading = _open(folder)
    assert len(_episodes(reading)) == 4
    assert "of the split train, 1 of 2 shards are in the source" in reading.notes


def test_a_shard_that_was_cut_between_records_is_refused(tf: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(_MADE / "grid", tmp_path / "grid")
    shard = folder / "grid-train.tfrecord-00000-of-00001"
    data = shard.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    shard.write_bytes(data[: 16 + length])
    with pytest.raises(SourceInvalidError, match="found 1 records, expected 2"):
        list(_open(folder))


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"action": [0, 1]}, "2 numbers or texts as steps/action, expected 4"),
        ({"observation": [1.0] * 7}, r"7 numbers or texts as steps/observation, expected 4 of the"),
        ({"action": [b"left"] * 4}, "bytes as steps/action, expected int64"),
        ({"is_last": []}, "no steps/is_last"),
        ({"is_first": [1, 0]}, "2 values of steps/is_first, expected 4 flags"),
        ({"is_terminal": [0, 0, 0, 2]}, "4 values of steps/is_terminal, expected 4 flags"),
    ],
)
def test_records_that_are_not_as_declared_are_named(
    tf: Any, tmp_path: Path, changed: Any, found: str
) -> None:
    folder = _write(tf, tmp_path / "toy", _episode(), _episode(**changed))
    with pytest.raises(SourceInvalidError, match=f"00000-of-00001 record 1: found {found}"):
        list(_open(folder))


@pytest.mark.parametrize(
    ("feature", "reason"),
    [
        ({"tensor": {**_TENSOR, "dtype": "bfloat16"}}, "its dtype is bfloat16"),
        ({"tensor": {**_TENSOR, "shape": {"dimensions": ["-1"]}}}, r"its shape is \[None\]"),
        ({"image": {"dtype": "float32"}}, "it is an image of float32"),
        ({"pythonClassName": "tensorflow_datasets.Audio", "audio": {}}, "of the kind Audio"),
    ],
)
def test_a_feature_that_is_not_read(tf: Any, tmp_path: Path, feature: Any, reason: str) -> None:
    folder = _write(tf, tmp_path / "a", _episode(), step={**_STEP, "extra": feature})
    reading = _open(folder)
    assert len(_episodes(reading)) == 1
    assert any("features that are not read: steps/extra" in note for note in reading.notes)
    folder = _write(tf, tmp_path / "b", _episode(), step={**_STEP, "observation": feature})
    with pytest.raises(SourceInvalidError, match=f"steps/observation and .*{reason}"):
        _open(folder)


def test_images_of_another_size_than_declared(tf: Any, tmp_path: Path) -> None:
    image = {"image": {"dtype": "uint8", "shape": {"dimensions": ["4", "4", "3"]}}}
    small, large = _png(np.zeros((4, 4, 3))), _png(np.zeros((5, 4, 3)))
    episode = _episode(observation=[small] * 4)
    folder = _write(tf, tmp_path / "toy", episode, step={**_STEP, "observation": image})
    (read,) = _episodes(_open(folder))
    assert np.asarray(read.observations).shape == (3, 4, 4, 3)
    for images, message in (
        ([large] * 4, r"uint8 images of \[5, 4, 3\] as steps/observation"),
        ([small, small, large, small], r"image 2: found \[5, 4, 3\] pixels"),
        ([small, small[: len(small) // 2], small, small], "image 1: could not be decoded"),
        ([small] * 3, "3 images as steps/observation, expected 4"),
    ):
        episode = _episode(observation=images)
        _write(tf, folder, episode, step={**_STEP, "observation": image})
        with pytest.raises(SourceInvalidError, match=message):
            list(_open(folder))


def test_an_image_bomb_is_refused_by_its_declared_size(tf: Any, tmp_path: Path) -> None:
    # Each below what Pillow itself refuses; 2 GB together.
    header = struct.pack(">IIBBBBB", 13_000, 13_000, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    bomb = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    step = {**_STEP, "observation": {"image": {"dtype": "uint8"}}}
    folder = _write(tf, tmp_path / "toy", _episode(observation=[bomb] * 4), step=step)
    with pytest.raises(
        SourceInvalidError,
        match=r"record 0 steps/observation images: .* stored bytes unpack to 2,0",
    ):
        list(_open(folder))


def test_a_zlib_bomb_is_refused_by_its_declared_size(tf: Any, tmp_path: Path) -> None:
    shape = {"dimensions": ["100000", "100000"]}
    step = {**_STEP, "observation": {"tensor": {**_TENSOR, "encoding": "zlib", "shape": shape}}}
    episode = _episode(observation=[zlib.compress(bytes(100_000))] * 4)
    folder = _write(tf, tmp_path / "toy", episode, step=step)
    with pytest.raises(SourceInvalidError, match="record 0 steps/observation"):
        list(_open(folder))


@pytest.mark.parametrize("name", ["arm-val.tfrecord-00001-of-00002", "features.json"])
def test_damaged_bytes_are_refused_or_read(tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(_MADE / "arm", tmp_path / "arm")
    whole = (folder / name).read_bytes()
    rng = np.random.default_rng(0)
    damaged = [whole[:cut] for cut in rng.integers(1, len(whole), 15).tolist()]
    for at in rng.integers(0, len(whole), 40).tolist():
        damaged.append(
            whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :]
        )
    num_refused = 0
    for data in damaged:
        (folder / name).write_bytes(data)
        try:
            list(_open(folder))
        except ReplayLakeError:
            num_refused += 1
    # Flips in a shard all meet a checksum.
    assert num_refused == len(damaged) if "tfrecord" in name else num_refused >= 15


@pytest.mark.parametrize("key", ["steps/observation/image", "steps/observation/depth"])
def test_damage_behind_a_right_checksum_is_refused_or_read(
    tf: Any, tmp_path: Path, key: str
) -> None:
    folder = shutil.copytree(_MADE / "arm", tmp_path / "arm")
    (folder / "dataset_info.json").unlink()
    for shard in folder.glob("*-train*"):
        shard.unlink()
    shard = folder / "arm-val.tfrecord-00000-of-00002"
    (length,) = struct.unpack("<Q", shard.read_bytes()[:8])
    record = shard.read_bytes()[12 : 12 + length]
    start = record.index(key.encode()) + len(key)
    rng = np.random.default_rng(1)
    num_refused = 0
    for at in rng.integers(start, start + 200, 60).tolist():
        flipped = bytes([record[at] ^ 1 << int(rng.integers(8))])
        shard.write_bytes(tf.frame(record[:at] + flipped + record[at + 1 :]))
        try:
            list(_open(folder))
        except ReplayLakeError:
            num_refused += 1
    assert num_refused > 20
