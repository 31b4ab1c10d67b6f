from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ReplayLakeError, SourceInvalidError
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.formats.format import (
    ReadOptions,
    RejectedEpisode,
    SourceReader,
)
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.receipt import Counts
from replaylake.datastore.interchange.sources.source import find_source
from replaylake.datastore.lake.lake import open_lake

# Written by lerobot 0.3.3 (v2.1) and 0.4.4 (v3.0); see make_lerobot.py there.
_MADE = Path(__file__).parents[3] / "fixtures" / "lerobot"
_VERSIONS = ("v2_1", "v3_0")


def _open(*paths: Path, **options: Any) -> SourceReader:
    source = find_source(paths)
    found = find_format("auto", source.files)
    assert found.name == "lerobot"
    return found.read(source.files, ReadOptions(**options))


def _episodes(reading: SourceReader) -> list[Episode]:
    found = list(reading)
    assert not [one for one in found if isinstance(one, RejectedEpisode)]
    return [one for one in found if isinstance(one, Episode)]


def _rewritten(path: Path, change: Any) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def _info(folder: Path, **changed: Any) -> None:
    path = folder / "meta" / "info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


@pytest.mark.parametrize("version", _VERSIONS)
def test_a_robot_dataset_without_rewards(version: str) -> None:
    reading = _open(_MADE / version / "arm")
    episodes = _episodes(reading)
    assert [len(e) for e in episodes] == [4, 6, 5]
    for number, episode in enumerate(episodes):
        t = np.arange(len(episode))
        assert isinstance(episode.observations, Mapping)
        state = np.stack([np.full(len(t), number), t, t / 8], axis=1)
        np.testing.assert_array_equal(episode.observations["state"], state)
        environment = np.stack([-t, np.full(len(t), number)], axis=1)
        np.testing.assert_array_equal(episode.observations["environment_state"], environment)
        want = np.stack([t / 2, np.full(len(t), -number)], axis=1)
        np.testing.assert_array_equal(episode.actions, want)
        assert np.isnan(episode.rewards).all()
        assert (episode.terminated, episode.truncated) == (False, True)
        assert episode.extras["task"].to_pylist() == [("pick", "place it")[number % 2]] * len(t)
        assert episode.extras["intervened"].to_pylist() == (t == 2).tolist()
        np.testing.assert_allclose(episode.extras["timestamp_s"], t / 10, atol=1e-6)
    assert reading.rewards_optional
    notes = "\n".join(reading.notes)
    assert "observation.images.top: video features are kept as references" in notes
    assert "nothing trains on them" in notes
    assert "no rewards: they are unknown" in notes
    assert "each episode was truncated where its recording stops" in notes


@pytest.mark.parametrize(
    ("version", "path", "start"),
    [
        ("v2_1", "videos/chunk-000/observation.images.top/episode_000002.mp4", 0.0),
        # In v3.0 a file holds many episodes: the third begins after 4 and 6 frames at 10 a second.
        ("v3_0", "videos/observation.images.top/chunk-000/file-000.mp4", 1.0),
    ],
)
def test_a_video_is_a_path_and_a_time(version: str, path: str, start: float) -> None:
    episode = _episodes(_open(_MADE / version / "arm"))[2]
    frames = episode.extras["observation_images_top"].to_pylist()
    assert {frame["path"] for frame in frames} == {path}
    assert (_MADE / version / "arm" / path).is_file()
    times = [frame["time_s"] for frame in frames]
    np.testing.assert_allclose(times, start + np.arange(5) / 10, atol=1e-6)


@pytest.mark.parametrize("version", _VERSIONS)
def test_a_dataset_with_rewards_and_done(version: str) -> None:
    reading = _open(_MADE / version / "game")
    first, second = _episodes(reading)
    assert np.asarray(first.observations).tolist() == [[0.0, 0.0], [0.0, 1.0], [0.0, 2.0]]
    assert np.asarray(second.actions).tolist() == [1, 0]
    assert first.rewards.tolist() == [1.0, 2.0, 3.0]
    assert (first.terminated, second.terminated) == (True, True)
    assert not reading.rewards_optional
    assert any("next.done used as terminated" in note for note in reading.notes)
    assert [e.truncated for e in _episodes(_open(_MADE / version / "game", time_limit=3))] == [
        True,
        False,
    ]


@pytest.mark.parametrize("version", _VERSIONS)
def test_a_dataset_goes_into_the_lake(tmp_path: Path, version: str) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    receipt = ingest(lake, [_MADE / version / "arm"], "arm")
    assert (receipt.format, receipt.episodes) == ("lerobot", Counts(committed=3))
    assert receipt.steps == Counts(committed=15)
    assert any("nothing trains on them" in note for note in receipt.notes)


@pytest.mark.parametrize("version", _VERSIONS)
def test_lengths_that_differ_from_the_data_reject_the_episode(tmp_path: Path, version: str) -> None:
    folder = shutil.copytree(_MADE / version / "arm", tmp_path / "arm")
    if version == "v2_1":
        path = folder / "meta" / "episodes.jsonl"
        path.write_text(path.read_text().replace('"length": 6', '"length": 7'))
    else:
        path = folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
        lengths = pa.array([4, 7, 5])
        _rewritten(
            path, lambda t: t.set_column(t.schema.get_field_index("length"), "length", lengths)
        )
    found = list(_open(folder))
    assert [isinstance(one, RejectedEpisode) for one in found] == [False, True, False]
    rejected = found[1]
    assert isinstance(rejected, RejectedEpisode)
    assert rejected.findings[0].check == "unequal_lengths"
    assert "episode 1: found 6 rows, expected 7" in rejected.findings[0].message


def test_a_missing_row_is_a_gap_and_another_length(tmp_path: Path) -> None:
    folder = shutil.copytree(_MADE / "v2_1" / "arm", tmp_path / "arm")
    path = folder / "data" / "chunk-000" / "episode_000001.parquet"
    _rewritten(path, lambda t: t.filter(pa.array([i != 2 for i in range(6)])))
    rejected = [one for one in _open(folder) if isinstance(one, RejectedEpisode)]
    assert {f.check for f in rejected[0].findings} == {"gap", "unequal_lengths"}


def test_episodes_without_data_and_data_without_episodes_are_said(tmp_path: Path) -> None:
    folder = shutil.copytree(_MADE / "v2_1" / "arm", tmp_path / "arm")
    (folder / "data" / "chunk-000" / "episode_000000.parquet").unlink()
    episodes = folder / "meta" / "episodes.jsonl"
    episodes.write_text("".join(episodes.read_text().splitlines(keepends=True)[:2]))
    reading = _open(folder)
    assert [(len(e), e.truncated) for e in _episodes(reading)] == [(6, True), (5, False)]
    notes = "\n".join(reading.notes)
    assert "1 episodes that meta lists have no rows" in notes
    assert "1 episodes are not listed in meta" in notes


def test_other_versions_and_two_datasets_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(_MADE / "v2_1" / "arm", tmp_path / "arm")
    _info(folder, codebase_version="v1.6")
    with pytest.raises(SourceInvalidError, match=r"found codebase_version v1\.6, expected v2\.0"):
        _open(folder)
    with pytest.raises(SourceInvalidError, match=r"found 2 meta/info\.json"):
        _open(_MADE / "v2_1")


@pytest.mark.parametrize("name", ["meta/tasks.jsonl", "meta/episodes.jsonl"])
def test_a_missing_meta_file_is_named(tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(_MADE / "v2_1" / "arm", tmp_path / "arm")
    (folder / name).unlink()
    with pytest.raises(SourceInvalidError, match=f"found no {name}"):
        _open(folder)


def test_a_path_template_fills_in_numbers_alone(tmp_path: Path) -> None:
    folder = shutil.copytree(_MADE / "v2_1" / "arm", tmp_path / "arm")
    template = "{video_key.__class__}/{episode_index:999999999d}/{episode_index:03d}"
    _info(folder, video_path=template)
    episode = _episodes(_open(folder))[1]
    path = episode.extras["observation_images_top"][0]["path"].as_py()
    assert path == "{video_key.__class__}/{episode_index:999999999d}/001"


def test_a_dataset_of_videos_alone_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(_MADE / "v3_0" / "arm", tmp_path / "arm")
    path = folder / "data" / "chunk-000" / "file-000.parquet"
    _rewritten(path, lambda t: t.drop(["observation.state", "observation.environment_state"]))
    with pytest.raises(SourceInvalidError, match="Videos are not read"):
        _open(folder)


def test_embedded_images_become_frames(tmp_path: Path) -> None:
    folder = shutil.copytree(_MADE / "v2_1" / "game", tmp_path / "game")
    encoded = []
    for t in range(3):
        out = io.BytesIO()
        Image.fromarray(np.full((4, 5, 3), t, np.uint8)).save(out, "PNG")
        encoded.append({"bytes": out.getvalue(), "path": f"{t}.png"})
    features = json.loads((folder / "meta" / "info.json").read_text())["features"]
    image = {"dtype": "image", "shape": [4, 5, 3], "names": ["height", "width", "channels"]}
    _info(folder, features={**features, "observation.image": image})
    for number, length in ((0, 3), (1, 2)):
        path = folder / "data" / "chunk-000" / f"episode_00000{number}.parquet"
        column = pa.array(encoded[:length])
        _rewritten(path, lambda t, c=column: t.append_column("observation.image", c))
    episode = _episodes(_open(folder))[0]
    assert isinstance(episode.observations, Mapping)
    assert episode.observations["image"].shape == (3, 4, 5, 3)
    assert episode.observations["image"][:, 0, 0, 0].tolist() == [0, 1, 2]
    assert episode.observations["state"].shape == (3, 2)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("v2_1", "meta/info.json"),
        ("v2_1", "meta/episodes.jsonl"),
        ("v3_0", "meta/tasks.parquet"),
        ("v3_0", "data/chunk-000/file-000.parquet"),
    ],
)
def test_damaged_bytes_are_refused_or_read(tmp_path: Path, version: str, name: str) -> None:
    folder = shutil.copytree(_MADE / version / "arm", tmp_path / "arm")
    whole = (folder / name).read_bytes()
    rng = np.random.default_rng(0)
    damaged = [whole[:cut] for cut in rng.integers(1, len(whole) - 4, 10).tolist()]
    for at in rng.integers(0, len(whole), 40).tolist():
        damaged.append(
            whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :]
        )
    num_refused = 0
    for data in damaged:
        (folder / name).write_bytes(data)
        source = find_source([folder])
        try:
            found = find_format("lerobot", source.files)
            list(found.read(source.files, ReadOptions()))
        except ReplayLakeError:
            num_refused += 1
    assert num_refused > 5


@pytest.mark.parametrize("version", _VERSIONS)
def test_plain_values_may_be_lists_of_one(tmp_path: Path, version: str) -> None:
    folder = shutil.copytree(_MADE / version / "game", tmp_path / "game")

    def listed(table: pa.Table) -> pa.Table:
        for name in ("next.reward", "next.done", "episode_index", "frame_index"):
            values = [[value] for value in table.column(name).to_pylist()]
            at = table.schema.get_field_index(name)
            table = table.set_column(at, name, pa.array(values))
        return table

    for path in (folder / "data").rglob("*.parquet"):
        _rewritten(path, listed)
    for one, other in zip(
        _episodes(_open(_MADE / version / "game")), _episodes(_open(folder)), strict=True
    ):
        assert one.source_episode_id == other.source_episode_id
        assert one.rewards.tolist() == other.rewards.tolist()
        assert (one.terminated, len(one)) == (other.terminated, len(other))


def test_truncations_are_read_where_there_are_any(tmp_path: Path) -> None:
    folder = shutil.copytree(_MADE / "v3_0" / "game", tmp_path / "game")
    info = json.loads((folder / "meta" / "info.json").read_text())
    flag = info["features"]["next.done"]
    _info(folder, features={**info["features"], "next.truncated": flag})
    for path in (folder / "data").rglob("*.parquet"):
        _rewritten(path, lambda t: t.append_column("next.truncated", t.column("next.done")))
    for episode in _episodes(_open(folder)):
        assert (episode.terminated, episode.truncated) == (False, True)
