from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete
from replaylake.datastore.errors import SourceInvalidError, SpaceUnsupportedError
from replaylake.datastore.interchange.formats.d4rl import D4rlFormat
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.formats.format import (
    ReadOptions,
    RejectedEpisode,
    SourceReader,
)
from replaylake.datastore.interchange.formats.tabular.tables import CachedTables
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.sources.source import find_source
from replaylake.datastore.lake.lake import open_lake

_SPEC = DatasetSpec(Box((3,)), Box((2,)))


def _log(num: int = 12, terminals: tuple[int, ...] = (), timeouts: tuple[int, ...] = ()) -> Any:
    """What a D4RL file has: observation t is [t, t + 0.5, -t], its successor that of t + 1."""
    t = np.arange(num + 1, dtype=np.float32)
    observations = np.stack([t, t + 0.5, -t], axis=1)
    flags = np.zeros((2, num), bool)
    flags[0, list(terminals)] = True
    flags[1, list(timeouts)] = True
    return {
        "observations": observations[:-1].copy(),
        "next_observations": observations[1:].copy(),
        "actions": np.linspace(-1, 1, 2 * num, dtype=np.float32).reshape(num, 2),
        "rewards": np.arange(num, dtype=np.float32) / 4,
        "terminals": flags[0],
        "timeouts": flags[1],
    }


def _write(path: Path, log: Mapping[str, Any], **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in log.items():
            file.create_dataset(name, data=values, **(options if np.ndim(values) else {}))
    return path


def _open(*paths: Path, **options: Any) -> SourceReader:
    files = find_source(paths).files
    found = find_format("auto", files)
    assert found.name == "d4rl"
    return found.read(files, ReadOptions(**options))


def _episodes(reading: SourceReader) -> list[Episode]:
    found = list(reading)
    assert not [one for one in found if isinstance(one, RejectedEpisode)]
    return [one for one in found if isinstance(one, Episode)]


def test_episodes_end_at_terminals_and_timeouts_and_the_last_stays_open(tmp_path: Path) -> None:
    log = _log(12, terminals=(3,), timeouts=(8,))
    reading = _open(_write(tmp_path / "log.hdf5", log))
    first, second, third = _episodes(reading)
    ends = [(len(e), e.terminated, e.truncated) for e in (first, second, third)]
    assert ends == [(4, True, False), (5, False, True), (3, False, False)]
    np.testing.assert_array_equal(second.observations, log["observations"][4:9])
    np.testing.assert_array_equal(second.final_observation, log["next_observations"][8])
    np.testing.assert_array_equal(second.actions, log["actions"][4:9])
    assert third.rewards.tolist() == [2.25, 2.5, 2.75]
    assert first.observations.dtype == np.float32


@pytest.mark.parametrize(
    "options", [{"compression": "gzip"}, {"compression": "lzf", "shuffle": True}, {"chunks": True}]
)
def test_packed_and_chunked_datasets_read_the_same(tmp_path: Path, options: Any) -> None:
    log = _log(500, terminals=(99, 499), timeouts=(250,))
    plain = _episodes(_open(_write(tmp_path / "plain.hdf5", log)))
    packed = _episodes(_open(_write(tmp_path / "packed.hdf5", log, **options)))
    assert [len(e) for e in packed] == [100, 151, 249]
    for one, other in zip(plain, packed, strict=True):
        np.testing.assert_array_equal(one.observations, other.observations)


def test_infos_become_columns_and_log_probs_and_metadata_is_told(tmp_path: Path) -> None:
    log = _log(4, terminals=(3,)) | {
        "infos/action_log_probs": np.asarray([-0.5, -1, 0.25, -2], np.float32),
        "infos/qpos": np.arange(8.0).reshape(4, 2),
        "infos/goal": np.arange(3.0),
        "metadata/algorithm": "SAC",
        "metadata/iteration": np.int64(1000),
        "metadata/policy/fc0/weight": np.zeros((3, 3)),
    }
    # Some files have one value a step as [N, 1].
    log |= {name: log[name][:, None] for name in ("rewards", "terminals", "timeouts")}
    reading = _open(_write(tmp_path / "log.hdf5", log))
    (episode,) = _episodes(reading)
    assert episode.behavior_log_probs is not None
    assert episode.behavior_log_probs.tolist() == [-0.5, -1, 0.25, -2]
    assert episode.extras["infos_qpos"].to_pylist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert reading.renames == {"infos/qpos": "infos_qpos"}
    notes = "\n".join(reading.notes)
    assert "infos/goal numbers[3]" in notes
    assert "algorithm = SAC; iteration = 1000; 1 arrays, which are not read" in notes


def test_without_timeouts_what_was_cut_off_shows_as_a_mismatch(tmp_path: Path) -> None:
    log = _log(8, terminals=(7,))
    # Row 4 begins another trajectory, which no flag says.
    log["observations"][4:] += 100
    log["next_observations"][4:] += 100
    del log["timeouts"]
    reading = _open(_write(tmp_path / "log.hdf5", log))
    (found,) = list(reading)
    assert isinstance(found, RejectedEpisode)
    assert [finding.check for finding in found.findings] == ["next_observation"]
    assert "row 3" in found.findings[0].message
    assert any("no timeouts" in note for note in reading.notes)


def test_an_open_episode_does_not_go_on_in_the_next_file(tmp_path: Path) -> None:
    paths = [_write(tmp_path / f"{i}.hdf5", _log(6 + i, terminals=(2,))) for i in range(3)]
    episodes = _episodes(_open(*paths))
    assert [len(e) for e in episodes] == [3, 3, 3, 4, 3, 5]
    assert len({e.episode_id for e in episodes}) == 6


def test_open_episodes_of_several_large_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such files are read again for the ends of episodes, of which they have no column."""
    monkeypatch.setattr(CachedTables.__init__, "__defaults__", (1, None))
    paths = [_write(tmp_path / f"{i}.hdf5", _log(6 + i, terminals=(2,))) for i in range(2)]
    assert [len(e) for e in _episodes(_open(*paths))] == [3, 3, 3, 4]


def test_images_and_discrete_actions_keep_shape_and_type(tmp_path: Path) -> None:
    frames = np.arange(5 * 4 * 4 * 3, dtype=np.uint8).reshape(5, 4, 4, 3)
    log = {
        "observations": frames,
        "actions": np.asarray([0, 1, 2, 1, 0]),
        "rewards": np.ones(5),
        "terminals": np.asarray([0, 0, 0, 0, 1], np.uint8),
    }
    path = _write(tmp_path / "log.hdf5", log)
    (episode,) = _episodes(_open(path))
    assert episode.terminated
    np.testing.assert_array_equal(episode.observations, frames)
    lake = open_lake(tmp_path / "lake", create=True)
    ingest(lake, [path], "frames")
    assert lake.dataset("frames").spec.observation_space == Box((4, 4, 3), "uint8", 0, 255)
    assert lake.dataset("frames").spec.action_space == Discrete(3)


def test_a_large_file_is_read_in_blocks(tmp_path: Path) -> None:
    log = _log(300_000, timeouts=tuple(range(999, 300_000, 1000)))
    path = _write(tmp_path / "log.hdf5", log)
    episodes = _episodes(_open(path))
    assert len(episodes) == 300
    assert {len(e) for e in episodes} == {1000}
    observations = np.concatenate([e.observations for e in episodes])
    np.testing.assert_array_equal(observations, log["observations"])


def _kept(tmp_path: Path) -> list[Episode]:
    rng = np.random.default_rng(7)
    return [
        Episode(
            episode_id=f"e{i}",
            observations=rng.normal(size=(num, 3)).astype(np.float32),
            actions=rng.normal(size=(num, 2)).astype(np.float32),
            rewards=rng.normal(size=num),
            terminated=i == 0,
            truncated=i == 1,
            final_observation=rng.normal(size=3).astype(np.float32),
            behavior_log_probs=None if i == 0 else rng.normal(size=num).astype(np.float32),
            policy_versions=np.full(num, i),
            timestamps=np.arange(num) + 1_700_000_000_000_000,
            extras={"speed": pa.array(rng.normal(size=num)), "mood": pa.array(["calm"] * num)},
        )
        for i, num in enumerate([5, 7, 4])
    ]


def test_an_export_reads_again_as_equal_rows(tmp_path: Path) -> None:
    episodes = _kept(tmp_path)
    path = tmp_path / "out.hdf5"
    written = D4rlFormat().write(iter(episodes), _SPEC, path)
    assert (written.num_episodes, written.num_steps) == (3, 16)
    with h5py.File(path) as file:
        # As d4rl's qlearning_dataset takes them.
        assert file["next_observations"].shape == (16, 3)
        assert file["terminals"][()].nonzero()[0].tolist() == [4]
        assert file["timeouts"][()].nonzero()[0].tolist() == [11]
        assert file["rewards"].dtype == np.float64
    for one, other in zip(episodes, _episodes(_open(path)), strict=True):
        np.testing.assert_array_equal(one.observations, other.observations)
        np.testing.assert_array_equal(one.actions, other.actions)
        np.testing.assert_array_equal(one.rewards, other.rewards)
        np.testing.assert_array_equal(one.final_observation, other.final_observation)
        assert (one.terminated, one.truncated) == (other.terminated, other.truncated)
        expected = np.full(5, np.nan) if one is episodes[0] else one.behavior_log_probs
        np.testing.assert_array_equal(other.behavior_log_probs, expected)
        np.testing.assert_array_equal(one.policy_versions, other.policy_versions)
        np.testing.assert_array_equal(one.timestamps, other.timestamps)
        assert other.extras["infos_speed"].to_pylist() == one.extras["speed"].to_pylist()
        assert other.extras["infos_mood"].to_pylist() == one.extras["mood"].to_pylist()


def test_an_export_says_what_d4rl_cannot_hold(tmp_path: Path) -> None:
    first, second, third = _kept(tmp_path)
    blind = Episode(**(vars(second) | {"final_observation": None, "extras": {}}))
    written = D4rlFormat().write(iter([first, blind]), _SPEC, tmp_path / "a.hdf5")
    notes = "\n".join(written.notes)
    assert "next_observations left out: 1 episodes have no final observation" in notes
    assert "infos/speed" in notes
    with h5py.File(tmp_path / "a.hdf5") as file:
        assert "next_observations" not in file
        assert "infos/speed" not in file
    with pytest.raises(SpaceUnsupportedError, match="e2 has no end and is not the last"):
        D4rlFormat().write(iter([third, first]), _SPEC, tmp_path / "b.hdf5")
    nested = DatasetSpec(Dict({"camera": Box((3,))}), Box((2,)))
    with pytest.raises(SpaceUnsupportedError, match="expected one array"):
        D4rlFormat().write(iter([]), nested, tmp_path / "c.hdf5")
    unknown = Episode(**(vars(first) | {"rewards": np.full(5, np.nan)}))
    with pytest.raises(SpaceUnsupportedError, match="reward is not known"):
        D4rlFormat().write(iter([unknown]), _SPEC, tmp_path / "d.hdf5")


def test_datasets_of_other_lengths_are_refused_by_name(tmp_path: Path) -> None:
    log = _log(6, terminals=(5,))
    log["actions"] = log["actions"][:4]
    with pytest.raises(SourceInvalidError, match=r"actions is numbers of shape \[4, 2\].*6 rows"):
        _open(_write(tmp_path / "log.hdf5", log))


def test_datasets_of_other_names_can_be_mapped(tmp_path: Path) -> None:
    log = _log(12, terminals=(4,), timeouts=(9,))
    expected = [len(one) for one in _episodes(_open(_write(tmp_path / "a.hdf5", log)))]
    names = {"rewards": "r", "terminals": "done", "timeouts": "cut"}
    other = {names.get(name, name): values for name, values in log.items()}
    other["done"] = other["done"][:, None]
    mapping = {"reward": "r", "terminated": "done", "truncated": "cut"}
    one = _write(tmp_path / "b.hdf5", other)
    two = _write(tmp_path / "c.hdf5", {**other, "r": other["r"] + 1})
    for paths in ([one], [one, two]):
        files = find_source(paths).files
        with pytest.raises(
            SourceInvalidError, match=r"expected rewards\. Name it with `mapping` reward="
        ):
            D4rlFormat().read(files, ReadOptions())
        found = _episodes(D4rlFormat().read(files, ReadOptions(mapping=mapping)))
        assert [len(e) for e in found] == expected * len(paths)
        assert [e.truncated for e in found][:3] == [False, True, False]
