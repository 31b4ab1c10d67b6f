from __future__ import annotations

import contextlib
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import minari
import numpy as np
import pyarrow as pa
import pytest
from gymnasium import spaces as gym_spaces
from minari.data_collector import EpisodeBuffer
from minari.serialization import deserialize_space, serialize_space

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
)
from replaylake.datastore.errors import SourceInvalidError, SpaceUnsupportedError
from replaylake.datastore.interchange.export.export import export
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.formats.format import (
    ReadOptions,
    RejectedEpisode,
    SourceReader,
)
from replaylake.datastore.interchange.formats.minari.minari import MinariFormat
from replaylake.datastore.interchange.formats.minari.spaces import parse_space, to_json_text
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.receipt import Counts
from replaylake.datastore.interchange.sources.source import find_source
from replaylake.datastore.lake.lake import open_lake

_CARTPOLE = Box(
    (4,),
    low=np.asarray([-4.8, -np.inf, -0.41887903, -np.inf], np.float32),
    high=np.asarray([4.8, np.inf, 0.41887903, np.inf], np.float32),
)


@pytest.fixture(autouse=True)
def minari_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def _open(*paths: Path) -> SourceReader:
    files = find_source(paths).files
    found = find_format("auto", files)
    assert found.name == "minari"
    return found.read(files, ReadOptions())


def _episodes(reading: SourceReader) -> list[Episode]:
    found = list(reading)
    assert not [one for one in found if isinstance(one, RejectedEpisode)]
    return [one for one in found if isinstance(one, Episode)]


def _equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _equal(one[key], other[key])
    else:
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["hdf5", "arrow"])
def test_both_storages_have_their_published_counts(
    shared_data: Path, tmp_path: Path, storage: str
) -> None:
    folder = shared_data / "minari" / "lab" / f"cartpole-{storage}-v0"
    reading = _open(folder)
    episodes = _episodes(reading)
    assert len(episodes) == 50
    assert sum(map(len, episodes)) == 13_061
    assert np.mean([e.rewards.sum() for e in episodes]) == 261.22
    assert sum(e.terminated for e in episodes) == sum(e.truncated for e in episodes) == 25
    assert all(e.final_observation is not None for e in episodes)
    assert reading.spaces == (_CARTPOLE, Discrete(2))
    assert any("CartPole-v1" in note for note in reading.notes)
    assert episodes[0].extras["seed"].to_pylist() == [1000] * 24

    lake = open_lake(tmp_path / "lake", create=True)
    receipt = ingest(lake, [folder], "cartpole")
    assert receipt.episodes == Counts(committed=50)
    assert receipt.steps == Counts(committed=13_061)
    assert lake.dataset("cartpole").spec.observation_space == _CARTPOLE
    assert lake.dataset("cartpole").snapshot().describe()["mean_return"] == 261.22


@pytest.mark.slow
def test_the_two_storages_hold_the_same_steps_and_can_be_named_by_their_data_folder(
    shared_data: Path,
) -> None:
    lab = shared_data / "minari" / "lab"
    whole = _episodes(_open(lab / "cartpole-hdf5-v0"))
    for path in (
        lab / "cartpole-hdf5-v0" / "data",
        lab / "cartpole-hdf5-v0" / "data" / "main_data.hdf5",
        lab / "cartpole-arrow-v0" / "data",
    ):
        for one, other in zip(whole, _episodes(_open(path)), strict=True):
            assert one.source_episode_id == other.source_episode_id
            _equal(one.observations, other.observations)
            _equal(one.final_observation, other.final_observation)
    with pytest.raises(
        SourceInvalidError, match=r"2 Minari datasets .*cartpole-arrow-v0, cartpole-hdf5"
    ):
        _open(lab)


_NESTED = gym_spaces.Dict(
    {
        "camera": gym_spaces.Box(0, 255, (32, 40, 3), np.uint8),
        "grid": gym_spaces.Box(0, 255, (5, 5), np.uint8),
        "hand": gym_spaces.Tuple((gym_spaces.Box(-1, 1, (2, 3)), gym_spaces.Discrete(5))),
        "order": gym_spaces.Text(20),
    }
)


def _buffers(num_steps: tuple[int, ...], seed: int = 3) -> list[EpisodeBuffer]:
    rng = np.random.default_rng(seed)
    buffers = []
    for i, num in enumerate(num_steps):
        # Smooth pictures survive JPEG nearly unchanged.
        shade = np.linspace(0, 200, 40)[None, None, :, None] + rng.integers(
            40, size=(num + 1, 1, 1, 3)
        )
        flags = np.zeros((2, num), bool)
        flags[i % 2, -1] = True
        buffers.append(
            EpisodeBuffer(
                id=i,
                seed=100 + i,
                observations={
                    "camera": np.broadcast_to(shade, (num + 1, 32, 40, 3)).astype(np.uint8),
                    "grid": rng.integers(255, size=(num + 1, 5, 5)).astype(np.uint8),
                    "hand": (
                        rng.uniform(-1, 1, size=(num + 1, 2, 3)).astype(np.float32),
                        rng.integers(5, size=num + 1),
                    ),
                    "order": [f"go {t}" for t in range(num + 1)],
                },
                actions=rng.integers(4, size=num),
                rewards=rng.normal(size=num).tolist(),
                terminations=flags[0].tolist(),
                truncations=flags[1].tolist(),
                infos={
                    "success": np.arange(num + 1) == num,
                    "state": {"qpos": rng.normal(size=(num + 1, 2))},
                },
            )
        )
    return buffers


@pytest.mark.filterwarnings("ignore:`eval_env` is set to None:UserWarning")
@pytest.mark.filterwarnings("ignore:env_spec is None:UserWarning")
@pytest.mark.parametrize("jpeg", [True, False])
@pytest.mark.parametrize("storage", ["hdf5", "arrow", "parquet"])
def test_what_minari_writes_of_nested_spaces_reads_as_structs(
    minari_home: Path, storage: str, jpeg: bool
) -> None:
    buffers = _buffers((6, 9))
    minari.create_dataset_from_buffers(
        "lab/nested-v0",
        buffers,
        observation_space=_NESTED,
        action_space=gym_spaces.Discrete(4),
        data_format=storage,
        jpeg_encoding=jpeg,
        description="two arms",
        algorithm_name="none",
        author="lab",
        author_email="lab@example.invalid",
        code_permalink="n/a",
    )
    reading = _open(minari_home / "lab" / "nested-v0")
    assert reading.spaces is not None
    assert isinstance(reading.spaces[0], Dict)
    assert reading.spaces[0].spaces["hand"] == Tuple((Box((2, 3), low=-1, high=1), Discrete(5)))
    for one, other in zip(buffers, _episodes(reading), strict=True):
        theirs: Any = one.observations
        ours: Any = other.observations
        camera = theirs["camera"].astype(int)
        assert ours["camera"].shape == camera[:-1].shape
        allowed = 8 if jpeg else 0
        assert np.abs(ours["camera"] - camera[:-1]).max() <= allowed
        assert np.abs(other.final_observation["camera"].astype(int) - camera[-1]).max() <= allowed
        _equal(ours["grid"], theirs["grid"][:-1])
        _equal(ours["hand"]["_0"], theirs["hand"][0][:-1])
        _equal(ours["hand"]["_1"], theirs["hand"][1][:-1])
        assert [*ours["order"]] == theirs["order"][:-1]
        assert other.final_observation["order"] == theirs["order"][-1]
        _equal(other.actions, one.actions)
        # What a step returned: not what reset did.
        assert other.extras["infos_success"].to_pylist() == one.infos["success"][1:].tolist()
        qpos = np.asarray(other.extras["infos_state_qpos"].to_pylist())
        _equal(qpos, one.infos["state"]["qpos"][1:])
        assert set(other.extras["seed"].to_pylist()) == {one.seed}
    assert any("what reset returned" in note for note in reading.notes)


_SPACES: list[tuple[gym_spaces.Space[Any], Space]] = [
    (gym_spaces.Box(-1, 2, (2,)), Box((2,), "float32", -1, 2)),
    (gym_spaces.Box(-np.inf, np.inf, (), np.float64), Box((), "float64")),
    (gym_spaces.Box(0, 255, (4, 4), np.uint8), Box((4, 4), "uint8", 0, 255)),
    (gym_spaces.Discrete(3, start=-1), Discrete(3, -1)),
    (gym_spaces.MultiDiscrete([2, 3]), MultiDiscrete((2, 3))),
    (gym_spaces.MultiBinary(4), MultiBinary(4)),
    (gym_spaces.Text(9), Text()),
    (
        gym_spaces.Dict({"a": gym_spaces.Tuple((gym_spaces.Discrete(2),))}),
        Dict({"a": Tuple((Discrete(2),))}),
    ),
]


@pytest.mark.parametrize(("theirs", "ours"), _SPACES)
def test_spaces_go_both_ways(theirs: gym_spaces.Space[Any], ours: Space) -> None:
    assert parse_space(serialize_space(theirs), "here") == ours
    if not isinstance(ours, Text):
        assert deserialize_space(to_json_text(ours)) == theirs


def test_spaces_without_one_of_ours_become_the_nearest_or_are_refused() -> None:
    shifted = gym_spaces.MultiDiscrete([2, 3], start=[1, 0])
    expected = Box((2,), "int64", low=(1, 0), high=2)
    assert parse_space(serialize_space(shifted), "here") == expected
    assert parse_space(serialize_space(gym_spaces.MultiBinary([2, 2])), "here") == Box(
        (2, 2), "int8", 0, 1
    )
    named = gym_spaces.Dict({"achieved-goal": gym_spaces.Discrete(2)})
    assert parse_space(serialize_space(named), "here") == Dict({"achieved_goal": Discrete(2)})
    for text in ('{"type": "Graph"}', "[1]", '{"type": "Box"}', "not json", "[" * 100_000, None):
        with pytest.raises(SourceInvalidError, match="here: found"):
            parse_space(text, "here")


_SPEC = DatasetSpec(
    Dict({"eye": Box((2, 2), "uint8", 0, 255), "arm": Tuple((Box((3,)), Discrete(4)))}),
    MultiDiscrete((2, 3)),
)


def _ours(i: int) -> Episode:
    rng = np.random.default_rng(i)
    num = 3 + i
    observations = {
        "eye": rng.integers(255, size=(num + 1, 2, 2)).astype(np.uint8),
        "arm": {
            "_0": rng.normal(size=(num + 1, 3)).astype(np.float32),
            "_1": rng.integers(4, size=num + 1),
        },
    }
    rows: Any = _take(observations, slice(num))
    return Episode(
        episode_id=f"e{i}",
        observations=rows,
        actions=rng.integers(2, size=(num, 2)),
        rewards=rng.normal(size=num),
        terminated=i == 0,
        truncated=i == 1,
        final_observation=_take(observations, num),
        behavior_log_probs=None if i == 0 else -rng.random(num).astype(np.float32),
        policies=np.asarray(["bot"] * num, object),
        action_masks=np.ones((num, 5), bool) if i else None,
        timestamps=np.arange(num),
        extras={"seed": pa.array([i] * num), "speed": pa.array(rng.normal(size=num))},
    )


def _take(values: Any, at: Any) -> Any:
    return {k: _take(v, at) for k, v in values.items()} if isinstance(values, dict) else values[at]


def test_an_export_loads_in_minari_and_reads_again_as_equal_rows(minari_home: Path) -> None:
    episodes = [_ours(i) for i in range(3)]
    path = minari_home / "arms-v2"
    written = MinariFormat().write(iter(episodes), _SPEC, path)
    assert (written.num_episodes, written.num_steps) == (3, 12)
    assert any("infos/action_mask" in note for note in written.notes)

    dataset = minari.load_dataset("arms-v2")
    assert (dataset.total_episodes, dataset.total_steps) == (3, 12)
    assert dataset.spec.observation_space["arm"][1] == gym_spaces.Discrete(4)
    assert [*minari.list_local_datasets()] == ["arms-v2"]
    again = _episodes(_open(path))
    for one, theirs, other in zip(episodes, dataset.iterate_episodes(), again, strict=True):
        ours: Any = one.observations
        _equal(theirs.observations["eye"][:-1], ours["eye"])
        _equal(theirs.observations["arm"][1][:-1], ours["arm"]["_1"])
        _equal(theirs.rewards, one.rewards)
        assert theirs.terminations[-1] == one.terminated
        _equal(other.observations, ours)
        _equal(other.final_observation, one.final_observation)
        _equal(other.actions, one.actions)
        _equal(other.rewards, one.rewards)
        assert (other.terminated, other.truncated) == (one.terminated, one.truncated)
        unknown = np.full(len(one), np.nan)
        known = one.behavior_log_probs
        _equal(other.behavior_log_probs, unknown if known is None else known)
        _equal(other.policies, one.policies)
        _equal(other.timestamps, one.timestamps)
        assert other.extras["seed"].to_pylist() == one.extras["seed"].to_pylist()
        assert other.extras["infos_speed"].to_pylist() == one.extras["speed"].to_pylist()


def test_the_environment_can_be_recovered_from_an_export(minari_home: Path, tmp_path: Path) -> None:
    environment = gymnasium.make("CartPole-v1", max_episode_steps=77)
    assert environment.spec is not None
    stated = environment.spec.to_json()
    MinariFormat().write(iter([_ours(i) for i in range(3)]), _SPEC, minari_home / "arms-v0")
    metadata = minari_home / "arms-v0" / "data" / "metadata.json"
    plain = json.loads(metadata.read_text())
    assert "env_spec" not in plain
    metadata.write_text(json.dumps({**plain, "env_spec": stated}))
    lake = open_lake(tmp_path / "lake", create=True)
    ingest(lake, [minari_home / "arms-v0"], "arms")
    assert lake.dataset("arms").spec.env_spec == stated
    export(lake, "arms", minari_home / "again-v0", format="minari")
    recovered = minari.load_dataset("again-v0").recover_environment()
    assert recovered.spec is not None
    assert (recovered.spec.id, recovered.spec.max_episode_steps) == ("CartPole-v1", 77)


@pytest.mark.parametrize("wrong", ["[" * 60_000, "[1]", "x", 7, '{"a": "' + "b" * (1 << 16) + '"}'])
def test_an_environment_that_is_none_is_left_out(
    minari_home: Path, tmp_path: Path, wrong: object
) -> None:
    MinariFormat().write(iter([_ours(i) for i in range(3)]), _SPEC, minari_home / "arms-v0")
    metadata = minari_home / "arms-v0" / "data" / "metadata.json"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "env_spec": wrong}))
    lake = open_lake(tmp_path / "lake", create=True)
    receipt = ingest(lake, [minari_home / "arms-v0"], "arms")
    assert lake.dataset("arms").spec.env_spec is None
    assert any(note.startswith("env_spec is left out: expected a JSON") for note in receipt.notes)


def test_an_episode_without_its_final_observation_refuses_the_export(tmp_path: Path) -> None:
    blind = Episode(**(vars(_ours(1)) | {"final_observation": None}))
    with pytest.raises(SpaceUnsupportedError, match="1 of 3 episodes have no final observation"):
        MinariFormat().write(iter([_ours(0), blind, _ours(2)]), _SPEC, tmp_path / "out")


def test_a_folder_of_another_name_says_what_to_call_it(tmp_path: Path) -> None:
    written = MinariFormat().write(iter([_ours(0)]), _SPEC, tmp_path / "my arms")
    assert "'my_arms-v0'" in written.notes[0]
    metadata = json.loads((tmp_path / "my arms" / "data" / "metadata.json").read_text())
    assert metadata["dataset_id"] == "my_arms-v0"
    assert len(minari.MinariDataset(tmp_path / "my arms" / "data")) == 1


def _copied(shared_data: Path, tmp_path: Path, storage: str) -> Path:
    source = shared_data / "minari" / "lab" / f"cartpole-{storage}-v0"
    shutil.copytree(source, tmp_path / "copy")
    return tmp_path / "copy" / "data"


def test_episodes_of_the_same_bytes_are_episodes_each(shared_data: Path, tmp_path: Path) -> None:
    """A deterministic policy writes the same file twice; each is a part of the dataset."""
    data = _copied(shared_data, tmp_path, "arrow")
    for folder in sorted(path for path in data.iterdir() if path.is_dir()):
        if folder.name not in ("0", "1"):
            shutil.rmtree(folder)
    shutil.copy(data / "0" / "part-0.arrow", data / "1" / "part-0.arrow")
    lake = open_lake(tmp_path / "lake", create=True)
    for _ in range(2):
        receipt = ingest(lake, [data], "walk")
        assert receipt.episodes.read == 2
        assert lake.sql("SELECT count(*) AS n FROM walk.episodes").to_pylist() == [{"n": 2}]


def test_a_length_that_a_file_declares_is_not_memory_that_it_takes(
    shared_data: Path, tmp_path: Path
) -> None:
    """A billion flags are a few bytes of a packed array: their episode is rejected unread."""
    data = _copied(shared_data, tmp_path, "hdf5")
    with h5py.File(data / "main_data.hdf5", "a") as file:
        del file["episode_3/terminations"]
        file.create_dataset("episode_3/terminations", (10**9,), bool, chunks=True)
    tracemalloc.start()
    try:
        rejected = [one for one in _open(data) if isinstance(one, RejectedEpisode)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "'terminations' 1000000000, expected equal lengths" in rejected[0].findings[0].message
    assert peak < 100 << 20


def test_unequal_lengths_reject_their_episode_alone(shared_data: Path, tmp_path: Path) -> None:
    data = _copied(shared_data, tmp_path, "hdf5")
    with h5py.File(data / "main_data.hdf5", "a") as file:
        actions = file["episode_3/actions"][:-2]
        del file["episode_3/actions"]
        file["episode_3/actions"] = actions
    found = list(_open(data))
    rejected = [one for one in found if isinstance(one, RejectedEpisode)]
    assert len(found) == 50
    assert [one.source_episode_id for one in rejected] == ["3"]
    assert rejected[0].findings[0].check == "unequal_lengths"


def test_parts_of_an_observation_that_differ_in_length_reject_their_episode(tmp_path: Path) -> None:
    path = tmp_path / "arms-v0"
    MinariFormat().write(iter([_ours(0), _ours(1)]), _SPEC, path)
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        short = file["episode_1/observations/arm/_index_0"][:-2]
        del file["episode_1/observations/arm/_index_0"]
        file["episode_1/observations/arm/_index_0"] = short
    kept, rejected = list(_open(path))
    assert isinstance(kept, Episode)
    assert isinstance(rejected, RejectedEpisode)
    assert "'observations.arm._0' has 3 rows" in rejected.findings[0].message


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["hdf5", "arrow"])
def test_torn_and_altered_files_are_refused_or_read(
    shared_data: Path, tmp_path: Path, storage: str
) -> None:
    data = _copied(shared_data, tmp_path, storage)
    target = data / "2" / "part-0.arrow"
    for name in data.iterdir():
        if name.name.isdigit() and int(name.name) > 3:
            shutil.rmtree(name)
    if storage == "hdf5":
        target = data / "main_data.hdf5"
        target.rename(tmp_path / "whole.hdf5")
        with h5py.File(tmp_path / "whole.hdf5") as whole, h5py.File(target, "w") as part:
            for i in range(3):
                whole.copy(f"episode_{i}", part)
    rng = np.random.default_rng(11)
    for damaged in (data / "metadata.json", target):
        undamaged = damaged.read_bytes()
        for i in range(40):
            raw = bytearray(undamaged)
            if i < 12:
                raw = raw[: max(1, len(raw) * i // 12)]
            else:
                at = int(rng.integers(min(len(raw), 4096 if i % 2 else len(raw))))
                raw[at] ^= 1 << int(rng.integers(8))
            damaged.write_bytes(raw)
            with contextlib.suppress(SourceInvalidError):
                files = find_source([data]).files
                assert list(find_format("minari", files).read(files, ReadOptions()))
        damaged.write_bytes(undamaged)


def test_packed_arrow_buffers_that_declare_too_much_are_refused_before_they_are_unpacked(
    shared_data: Path, tmp_path: Path
) -> None:
    data = _copied(shared_data, tmp_path, "arrow")
    part = data / "0" / "part-0.arrow"
    zeros = pa.array(np.zeros(150_000_000, np.int8))
    flags = pa.array(np.zeros(len(zeros), bool))
    table = pa.table(
        {
            "observations": zeros,
            **{f"x{i}": zeros for i in range(8)},
            "actions": zeros,
            "rewards": zeros,
            "terminations": flags,
            "truncations": flags,
        }
    )
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        pa.OSFile(str(part), "wb") as sink,
        pa.ipc.new_file(sink, table.schema, options=options) as writer,
    ):
        writer.write_table(table)
    assert part.stat().st_size < 1_000_000
    with pytest.raises(SourceInvalidError, match="stored bytes unpack to"):
        _open(data)


def test_before_metadata_json_the_spaces_were_in_the_file_itself(tmp_path: Path) -> None:
    data = tmp_path / "door-v0" / "data"
    data.mkdir(parents=True)
    with h5py.File(data / "main_data.hdf5", "w") as file:
        file.attrs["observation_space"] = serialize_space(gym_spaces.Box(-1, 1, (2,), np.float32))
        file.attrs["action_space"] = serialize_space(gym_spaces.Discrete(4))
        file.attrs["dataset_id"] = "door-v0"
        group = file.create_group("episode_0")
        group.attrs["seed"] = "None"
        group["observations"] = np.zeros((4, 2), np.float32)
        group["actions"] = np.array([[0], [1], [2]])
        group["rewards"] = np.ones(3)
        group["terminations"] = np.array([False, False, True])
        group["truncations"] = np.zeros(3, bool)
    reading = _open(tmp_path / "door-v0")
    assert reading.spaces == (Box((2,), "float32", -1, 1), Discrete(4))
    (episode,) = _episodes(reading)
    assert episode.actions.tolist() == [0, 1, 2]
    assert "seed" not in episode.extras
    assert "Minari dataset door-v0" in reading.notes


def test_what_is_no_dataset_of_minaris_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.hdf5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros(3)
    with pytest.raises(
        SourceInvalidError, match=r"log\.hdf5: found no main_data\.hdf5 and no episode"
    ):
        find_format("minari", (files := find_source([path]).files)).read(files, ReadOptions())
