from __future__ import annotations

from pathlib import Path
from typing import Any

import d3rlpy
import h5py
import numpy as np
import pyarrow as pa
import pytest
from d3rlpy.dataset import Episode as TheirEpisode
from d3rlpy.dataset import InfiniteBuffer, ReplayBuffer

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, Tuple
from replaylake.datastore.errors import SourceInvalidError, SpaceUnsupportedError
from replaylake.datastore.interchange.formats.d3rlpy import D3rlpyFormat
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.formats.format import (
    ReadOptions,
    RejectedEpisode,
    SourceReader,
)
from replaylake.datastore.interchange.sources.source import find_source


def _open(*paths: Path) -> SourceReader:
    files = find_source(paths).files
    found = find_format("auto", files)
    assert found.name == "d3rlpy"
    return found.read(files, ReadOptions())


def _episodes(reading: SourceReader) -> list[Episode]:
    found = list(reading)
    assert not [one for one in found if isinstance(one, RejectedEpisode)]
    return [one for one in found if isinstance(one, Episode)]


def _theirs(num: int, terminated: bool, *, discrete: bool = False) -> TheirEpisode:
    rng = np.random.default_rng(num)
    actions = rng.integers(3, size=(num, 1)) if discrete else rng.normal(size=(num, 2))
    return TheirEpisode(
        observations=rng.normal(size=(num, 3)).astype(np.float32),
        actions=actions.astype(np.int64 if discrete else np.float32),
        rewards=rng.normal(size=(num, 1)).astype(np.float32),
        terminated=terminated,
    )


def _dump(path: Path, episodes: list[TheirEpisode]) -> Path:
    with path.open("w+b") as stream:
        ReplayBuffer(InfiniteBuffer(), episodes=episodes).dump(stream)
    return path


def _load(path: Path) -> ReplayBuffer:
    with path.open("rb") as stream:
        return ReplayBuffer.load(stream, InfiniteBuffer())


@pytest.mark.parametrize("discrete", [False, True])
def test_what_d3rlpy_dumps_reads_as_the_same_episodes(tmp_path: Path, discrete: bool) -> None:
    theirs = [_theirs(num, num % 2 == 0, discrete=discrete) for num in (4, 7, 10)]
    reading = _open(_dump(tmp_path / "buffer.h5", theirs))
    episodes = _episodes(reading)
    for one, other in zip(theirs, episodes, strict=True):
        np.testing.assert_array_equal(one.observations, other.observations)
        expected = one.actions[:, 0] if discrete else one.actions
        np.testing.assert_array_equal(expected, other.actions)
        np.testing.assert_array_equal(one.rewards[:, 0], other.rewards)
        assert (other.terminated, other.truncated) == (one.terminated, not one.terminated)
        assert other.final_observation is None
    assert any("no observation after the last step" in note for note in reading.notes)


def test_tuples_of_observations_are_structs(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(255, size=(5, 1, 4, 4)).astype(np.uint8)
    sensors = rng.normal(size=(5, 2)).astype(np.float32)
    theirs = TheirEpisode(
        observations=[pixels, sensors],
        actions=np.zeros((5, 1), np.float32),
        rewards=np.ones((5, 1), np.float32),
        terminated=True,
    )
    (episode,) = _episodes(_open(_dump(tmp_path / "buffer.h5", [theirs])))
    observations: Any = episode.observations
    np.testing.assert_array_equal(observations["_0"], pixels)
    np.testing.assert_array_equal(observations["_1"], sensors)
    assert episode.actions.shape == (5, 1)


def test_version_1_marks_ends_in_a_dataset_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "v1.h5"
    with h5py.File(path, "w") as file:
        file["observations"] = np.arange(18, dtype=np.float32).reshape(6, 3)
        file["actions"] = np.zeros((6, 1), np.int32)
        file["rewards"] = np.arange(6, dtype=np.float32)
        file["terminals"] = np.asarray([0, 1, 0, 0, 0, 0], np.float32)
        file["episode_terminals"] = np.asarray([0, 1, 0, 0, 1, 0], np.float32)
        file["discrete_action"] = True
        file["version"] = "1.0"
    episodes = _episodes(_open(path))
    ends = [(len(e), e.terminated, e.truncated) for e in episodes]
    assert ends == [(2, True, False), (3, False, True), (1, False, False)]


@pytest.mark.parametrize("ends", [np.zeros((6, 2)), np.asarray([b"x"] * 6), np.zeros(5)])
def test_ends_of_version_1_that_are_no_flags_are_refused(tmp_path: Path, ends: Any) -> None:
    path = tmp_path / "v1.h5"
    with h5py.File(path, "w") as file:
        file["observations"] = np.zeros((6, 3), np.float32)
        file["actions"] = np.zeros((6, 1), np.int32)
        file["rewards"] = np.zeros(6, np.float32)
        file["terminals"] = np.zeros(6, np.float32)
        file["episode_terminals"] = ends
    with pytest.raises(SourceInvalidError, match=r"v1\.h5: found no dataset 'episode_terminals'"):
        list(_open(path))


def _ours(i: int, *, discrete: bool = False, pair: bool = False) -> Episode:
    num = 4 + i
    rng = np.random.default_rng(i)
    observations: Any = rng.normal(size=(num + 1, 3))
    if pair:
        observations = {"_0": observations, "_1": rng.normal(size=(num + 1, 2))}
    rows = {k: v[:-1] for k, v in observations.items()} if pair else observations[:-1]
    last = {k: v[-1] for k, v in observations.items()} if pair else observations[-1]
    return Episode(
        episode_id=f"e{i}",
        observations=rows,
        actions=rng.integers(3, size=num) if discrete else rng.normal(size=(num, 2)),
        rewards=rng.normal(size=num),
        terminated=i == 0,
        truncated=i != 0,
        final_observation=last,
        behavior_log_probs=-rng.random(num).astype(np.float32),
        extras={"speed": pa.array(rng.normal(size=num))},
    )


@pytest.mark.parametrize("discrete", [False, True])
def test_an_export_loads_in_d3rlpy_and_reads_again(tmp_path: Path, discrete: bool) -> None:
    episodes = [_ours(i, discrete=discrete) for i in range(3)]
    spec = DatasetSpec(Box((3,), "float64"), Discrete(3) if discrete else Box((2,), "float64"))
    path = tmp_path / "out.h5"
    written = D3rlpyFormat().write(iter(episodes), spec, path)
    assert (written.num_episodes, written.num_steps) == (3, 15)
    buffer = _load(path)
    assert buffer.dataset_info.action_size == (3 if discrete else 2)
    kind = d3rlpy.ActionSpace.DISCRETE if discrete else d3rlpy.ActionSpace.CONTINUOUS
    assert buffer.dataset_info.action_space == kind
    batch = buffer.sample_transition_batch(32)
    assert batch.observations.shape == (32, 3)
    again = _episodes(_open(path))
    for one, theirs, other in zip(episodes, buffer.episodes, again, strict=True):
        np.testing.assert_array_equal(one.observations, theirs.observations)
        np.testing.assert_array_equal(one.rewards, theirs.rewards[:, 0])
        assert bool(theirs.terminated) == one.terminated
        np.testing.assert_array_equal(one.observations, other.observations)
        np.testing.assert_array_equal(one.actions, other.actions)
        np.testing.assert_array_equal(one.rewards, other.rewards)
        np.testing.assert_array_equal(one.final_observation, other.final_observation)
        np.testing.assert_array_equal(one.behavior_log_probs, other.behavior_log_probs)
        assert (one.terminated, one.truncated) == (other.terminated, other.truncated)
        assert other.extras["infos_speed"].to_pylist() == one.extras["speed"].to_pylist()


def test_tuples_are_written_as_d3rlpy_has_them(tmp_path: Path) -> None:
    episode = _ours(0, pair=True)
    space = Tuple((Box((3,), "float64"), Box((2,), "float64")))
    path = tmp_path / "out.h5"
    D3rlpyFormat().write(iter([episode]), DatasetSpec(space, Box((2,), "float64")), path)
    (theirs,) = _load(path).episodes
    assert [part.shape for part in theirs.observations] == [(4, 3), (4, 2)]
    (again,) = _episodes(_open(path))
    ours: Any = episode.observations
    found: Any = again.observations
    np.testing.assert_array_equal(found["_1"], ours["_1"])
    np.testing.assert_array_equal(again.final_observation["_0"], episode.final_observation["_0"])


def test_spaces_that_d3rlpy_lacks_are_refused(tmp_path: Path) -> None:
    spec = DatasetSpec(Dict({"camera": Box((3,))}), Discrete(2))
    with pytest.raises(SpaceUnsupportedError, match="expected a Box or a Tuple"):
        D3rlpyFormat().write(iter([]), spec, tmp_path / "out.h5")
    spec = DatasetSpec(Box((3,)), Tuple((Discrete(2), Discrete(2))))
    with pytest.raises(SpaceUnsupportedError, match="expected Discrete or a Box"):
        D3rlpyFormat().write(iter([]), spec, tmp_path / "out.h5")


def test_fewer_episodes_than_are_counted_are_refused(tmp_path: Path) -> None:
    path = _dump(tmp_path / "buffer.h5", [_theirs(4, True), _theirs(5, True)])
    with h5py.File(path, "a") as file:
        del file["rewards_1"]
    with pytest.raises(SourceInvalidError, match="num_episodes is 2"):
        _open(path)
    with h5py.File(path, "a") as file:
        del file["num_episodes"]
        file["num_episodes"] = 10**15
    with pytest.raises(SourceInvalidError, match="num_episodes is 1000000000000000"):
        _open(path)


def test_unequal_lengths_reject_their_episode_alone(tmp_path: Path) -> None:
    path = _dump(tmp_path / "buffer.h5", [_theirs(4, True), _theirs(5, True)])
    with h5py.File(path, "a") as file:
        actions = file["actions_1"][:3]
        del file["actions_1"]
        file["actions_1"] = actions
    kept, rejected = list(_open(path))
    assert isinstance(kept, Episode)
    assert isinstance(rejected, RejectedEpisode)
    assert rejected.findings[0].check == "unequal_lengths"
    assert "'actions' has 3 rows and 'rewards' 5" in rejected.findings[0].message


def test_times_come_back_as_times(tmp_path: Path) -> None:
    times = np.array([10**15, 10**15 + 1])
    episode = Episode(
        "a",
        np.zeros((2, 3), np.float32),
        np.array([0, 1]),
        np.ones(2),
        terminated=True,
        timestamps=times,
    )
    path = tmp_path / "o.h5"
    D3rlpyFormat().write(iter([episode]), DatasetSpec(Box((3,)), Discrete(2)), path)
    (found,) = _episodes(_open(path))
    assert found.timestamps.tolist() == times.tolist()


def test_what_is_no_file_of_d3rlpys_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros(3)
    files = find_source([path]).files
    with pytest.raises(
        SourceInvalidError, match="found x, expected columns, num_episodes, version"
    ):
        D3rlpyFormat().read(files, ReadOptions())
