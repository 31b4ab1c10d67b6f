from __future__ import annotations

import io
import os
import struct
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.formats.format import (
    ReadOptions,
    RejectedEpisode,
    SourceReader,
)
from replaylake.datastore.interchange.formats.npz import npz
from replaylake.datastore.interchange.formats.npz.npz import NpzFormat
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.sources.source import find_source
from replaylake.datastore.lake.lake import Lake


def _open(*paths: Path, **options: Any) -> SourceReader:
    source = find_source(paths)
    found = find_format("auto", source.files)
    assert found.name == "npz"
    return found.read(source.files, ReadOptions(**options))


def _episodes(reading: SourceReader) -> list[Episode]:
    found = list(reading)
    assert not [one for one in found if isinstance(one, RejectedEpisode)]
    return [one for one in found if isinstance(one, Episode)]


def _noted(reading: SourceReader) -> str:
    checks = [f"{c.name} {c.example} {c.advice}" for c in reading.checks]
    return "\n".join([*reading.notes, *checks])


def _cartpole(shared_data: Path) -> Path:
    return shared_data / "imitation" / "cartpole_0_final.npz"


def test_imitation_trajectories_have_their_published_counts(shared_data: Path) -> None:
    reading = _open(_cartpole(shared_data))
    episodes = _episodes(reading)
    returns = [episode.rewards.sum() for episode in episodes]
    assert len(episodes) == 57
    assert sum(map(len, episodes)) == 26964
    assert np.mean(returns) == pytest.approx(473.0526, abs=1e-4)
    assert (min(returns), max(returns)) == (393, 500)
    assert all(e.terminated and not e.truncated for e in episodes)
    assert "array 'infos' left out: pickled Python objects" in reading.notes
    assert "`time_limit` 500" in _noted(reading)


@pytest.mark.parametrize("chunk_bytes", [16 << 20, 40_000])
def test_each_trajectory_has_one_observation_more_than_steps(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """Also where blocks end within an episode, at its end, and at the next one's first step."""
    monkeypatch.setattr(npz, "CHUNK_BYTES", chunk_bytes)
    log = np.load(_cartpole(shared_data))
    bounds = [0, *log["indices"], len(log["acts"])]
    for number, episode in enumerate(_episodes(_open(_cartpole(shared_data)))):
        start, end = bounds[number], bounds[number + 1]
        observations = log["obs"][start + number : end + number + 1]
        np.testing.assert_array_equal(episode.observations, observations[:-1])
        np.testing.assert_array_equal(episode.final_observation, observations[-1])
        np.testing.assert_array_equal(episode.actions, log["acts"][start:end])


def test_the_time_limit_makes_those_of_500_steps_truncated(shared_data: Path) -> None:
    episodes = _episodes(_open(_cartpole(shared_data), time_limit=500))
    ends = [(len(e) == 500, e.terminated, e.truncated) for e in episodes]
    assert set(ends) == {(True, False, True), (False, True, False)}
    assert ends.count((True, False, True)) == 15


def test_ingest_takes_the_trajectories(shared_data: Path, lake: Lake) -> None:
    receipt = ingest(lake, [_cartpole(shared_data)], "cartpole")
    assert (receipt.format, receipt.episodes.committed, receipt.steps.committed) == (
        "npz",
        57,
        26964,
    )
    described = lake.dataset("cartpole").snapshot().describe()
    assert described["mean_return"] == pytest.approx(473.0526, abs=1e-4)


def _trajectories(lengths: tuple[int, ...] = (2, 1, 3), **changes: Any) -> dict[str, Any]:
    """Observation k of the file is [k, -k], action t is t % 2 and reward t."""
    num = sum(lengths)
    at = np.arange(num + len(lengths), dtype=np.float32)
    return {
        "obs": np.stack([at, -at], axis=1),
        "acts": np.arange(num) % 2,
        "rews": np.arange(num, dtype=np.float64),
        "terminal": np.array([True, False, True][: len(lengths)]),
        "indices": np.cumsum(lengths)[:-1],
        **changes,
    }


def _save(path: Path, arrays: dict[str, Any], *, compressed: bool = False) -> Path:
    kept = {name: array for name, array in arrays.items() if array is not None}
    (np.savez_compressed if compressed else np.savez)(path, **kept)
    return path


def test_a_trajectory_that_is_not_terminal_stays_open(tmp_path: Path) -> None:
    first, second, third = _episodes(_open(_save(tmp_path / "log.npz", _trajectories())))
    ends = [(e.terminated, e.truncated) for e in (first, second, third)]
    assert ends == [(True, False), (False, False), (True, False)]
    assert second.observations.tolist() == [[3, -3]]
    assert second.final_observation.tolist() == [4, -4]
    assert third.rewards.tolist() == [3, 4, 5]


def test_episodes_of_two_files_stay_apart(tmp_path: Path) -> None:
    _save(tmp_path / "1.npz", _trajectories())
    _save(tmp_path / "2.npz", _trajectories((4,)))
    episodes = _episodes(_open(tmp_path))
    assert [len(e) for e in episodes] == [2, 1, 3, 4]
    assert [e.source_episode_id for e in episodes] == ["0", "1", "2", "3"]


def test_trajectories_without_rewards_are_refused_by_name(tmp_path: Path) -> None:
    log = _save(tmp_path / "log.npz", _trajectories(rews=None))
    with pytest.raises(SourceInvalidError, match="reward"):
        _open(log)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"obs": np.zeros((6, 2))}, "'obs' has 6 rows, expected 9"),
        ({"indices": np.array([3, 2])}, "one split fewer, in order"),
        ({"indices": np.array([2, 6])}, "one split fewer, in order"),
        ({"indices": np.array([2])}, "3 trajectories in `terminal` and 1 splits"),
        ({"indices": np.array([2.0, 3.0])}, "'indices' is float64"),
        ({"terminal": np.array([1, 0, 1])}, "'terminal' is int64"),
        ({"acts": np.array([{}] * 6, object)}, "'acts' holds pickled Python objects"),
        ({"obs": np.array([{}] * 9, object)}, "'obs' holds pickled Python objects"),
    ],
)
def test_what_does_not_fit_together_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    log = _save(tmp_path / "log.npz", _trajectories(**changes))
    with pytest.raises(SourceInvalidError, match=message):
        list(_open(log))


def _experts(**changes: Any) -> dict[str, Any]:
    """What stable-baselines' generate_expert_traj saves: three episodes of 2, 3 and 1 steps."""
    starts = np.array([True, False, True, False, False, True])
    rewards = np.arange(6, dtype=np.float32)
    return {
        "actions": (np.arange(6) % 3).reshape(-1, 1),
        "obs": np.arange(12, dtype=np.float64).reshape(6, 2),
        "rewards": rewards,
        "episode_returns": np.array([1.0, 9.0, 5.0]),
        "episode_starts": starts,
        **changes,
    }


@pytest.mark.parametrize("chunk_bytes", [16 << 20, 60])
def test_experts_are_cut_where_episodes_start_and_never_terminated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(npz, "CHUNK_BYTES", chunk_bytes)
    reading = _open(_save(tmp_path / "expert.npz", _experts()))
    episodes = _episodes(reading)
    assert [e.rewards.tolist() for e in episodes] == [[0, 1], [2, 3, 4], [5]]
    assert [e.actions.tolist() for e in episodes] == [[0, 1], [2, 0, 1], [2]]
    assert all(not e.terminated and not e.truncated for e in episodes)
    assert all(e.final_observation is None for e in episodes)
    assert episodes[1].observations.tolist() == [[4, 5], [6, 7], [8, 9]]
    assert all(not e.extras for e in episodes)
    noted = _noted(reading)
    assert "not how they ended" in noted
    assert "episode_returns differ" not in noted


def test_open_ends_of_experts_may_be_truncated_by_choice(tmp_path: Path) -> None:
    log = _save(tmp_path / "expert.npz", _experts())
    episodes = _episodes(_open(log, open_ends="truncated"))
    assert [(e.terminated, e.truncated) for e in episodes] == [(False, True)] * 3


def test_returns_that_are_not_the_sums_of_rewards_are_noted(tmp_path: Path) -> None:
    shifted = _experts(rewards=np.array([1, 2, 3, 4, 5, 0], np.float32))
    reading = _open(_save(tmp_path / "expert.npz", shifted))
    _episodes(reading)
    assert "in 3 of 3 episodes, as in episode 0: 1 and 3" in _noted(reading)


def test_box_actions_of_one_number_stay_vectors(tmp_path: Path) -> None:
    log = _save(tmp_path / "expert.npz", _experts(actions=np.zeros((6, 1), np.float32)))
    assert _episodes(_open(log))[0].actions.shape == (2, 1)


def test_an_expert_file_may_begin_within_an_episode(tmp_path: Path) -> None:
    starts = np.array([False, False, True, False, False, True])
    reading = _open(_save(tmp_path / "expert.npz", _experts(episode_starts=starts)))
    assert [len(e) for e in _episodes(reading)] == [2, 3, 1]
    assert "does not begin an episode" in _noted(reading)


@pytest.mark.parametrize("compressed", [False, True])
def test_arrays_called_as_columns_are_columns(tmp_path: Path, compressed: bool) -> None:
    arrays = {
        "observations": np.asfortranarray(np.arange(12.0).reshape(4, 3)),
        "actions": np.arange(4, dtype=">i4") % 2,
        "rewards": np.arange(4.0),
        "terminals": np.array([False, True, False, False]),
        "timeouts": np.array([False, False, False, True]),
        "task": np.array(["a", "b", "c", "d"]),
        "scale": np.array(3.0),
        "goal": np.zeros(3),
        "complex": np.zeros(4, complex),
    }
    reading = _open(_save(tmp_path / "log.npz", arrays, compressed=compressed))
    first, second = _episodes(reading)
    assert (first.terminated, second.truncated) == (True, True)
    assert first.observations.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second.actions.tolist() == [0, 1]
    assert second.extras["task"].to_pylist() == ["c", "d"]
    noted = _noted(reading)
    assert "'scale' left out: a single value" in noted
    assert "'goal' left out: 3 rows for 4 steps" in noted
    assert "'complex' left out: dtype complex128" in noted


def test_frames_keep_their_shape(tmp_path: Path) -> None:
    frames = np.arange(4 * 2 * 3 * 3, dtype=np.uint8).reshape(4, 2, 3, 3)
    arrays = {"obs": frames, "actions": np.zeros(4, int), "rewards": np.zeros(4)}
    log = _save(tmp_path / "log.npz", {**arrays, "dones": np.array([0, 0, 0, 1])})
    (episode,) = _episodes(_open(log))
    np.testing.assert_array_equal(episode.observations, frames)
    assert episode.observations.dtype == np.uint8


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    witness = tmp_path / "ran"

    class Planted:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {witness}",)

    extra = {"infos": np.array([Planted()], object), "more": np.array([Planted()] * 6, object)}
    reading = _open(_save(tmp_path / "log.npz", {**_trajectories(), **extra}))
    assert len(_episodes(reading)) == 3
    assert "'more' left out: pickled Python objects" in _noted(reading)
    assert not witness.exists()
    with np.load(tmp_path / "log.npz", allow_pickle=True) as opened:
        assert len(opened["more"]) == 6
    assert witness.exists()


def _zip(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


def _npy(array: Any, header: str | None = None) -> bytes:
    """Return an array's bytes, with another header if one is given."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(array))
    if header is None:
        return stream.getvalue()
    text = header.encode().ljust(118 - 1) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + b"\0" * 8


_HEADER = "{{'descr': '{}', 'fortran_order': False, 'shape': {}, }}"


@pytest.mark.parametrize(
    "header",
    [
        _HEADER.format("<f4", "(1000000000000, 4)"),
        _HEADER.format("<f4", "(6, 1000000000000)"),
        _HEADER.format("<f4", "(-1, 4)"),
        _HEADER.format("<f4", "(6, 0)"),
        _HEADER.format("<U0", "(1000000000000,)"),
        _HEADER.format("|V0", "(6,)"),
        _HEADER.format("<f4", "(1,)"),
        _HEADER.format("<f4", "()"),
        _HEADER.format("nonsense", "(6,)"),
        "__import__('os').system('true')",
        "{'descr': '<f4'}",
        "((((((((((",
    ],
)
@pytest.mark.parametrize("name", ["obs", "acts", "rews", "terminal", "indices"])
def test_headers_that_lie_are_refused(tmp_path: Path, header: str, name: str) -> None:
    members = {key: _npy(array) for key, array in _trajectories().items()}
    log = _zip(tmp_path / "log.npz", {**members, name: _npy([], header)})
    with pytest.raises(SourceInvalidError):
        list(NpzFormat().read(find_source([log]).files, ReadOptions()))


def test_a_member_that_goes_on_is_refused(tmp_path: Path) -> None:
    members = {key: _npy(array) for key, array in _trajectories().items()}
    log = _zip(tmp_path / "log.npz", {**members, "acts": members["acts"] + b"\0"})
    with pytest.raises(SourceInvalidError, match="'acts' continues after its last row"):
        list(_open(log))


def test_a_bomb_is_refused_by_its_declared_size(tmp_path: Path) -> None:
    members = {key: _npy(array) for key, array in _trajectories().items()}
    log = _zip(tmp_path / "log.npz", {**members, "rews": _npy(np.zeros(200_000))})
    data = bytearray(log.read_bytes())
    # The size is in the central directory's entry, behind its name's place there.
    at = data.rindex(b"rews.npy") - 46
    assert data[at : at + 4] == b"PK\x01\x02"
    data[at + 24 : at + 28] = struct.pack("<I", 3 << 30)
    log.write_bytes(bytes(data))
    with pytest.raises(SourceInvalidError, match="unpack to 3,221,225,472"):
        list(NpzFormat().read(find_source([log]).files, ReadOptions()))


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("layout", [_trajectories, _experts])
def test_flipped_and_torn_files_are_refused_or_read(
    tmp_path: Path, layout: Any, compressed: bool
) -> None:
    whole = _save(tmp_path / "whole.npz", layout(), compressed=compressed).read_bytes()
    rng = np.random.default_rng(1)
    for trial in range(60):
        data = bytearray(whole)
        data[int(rng.integers(len(data)))] = int(rng.integers(256))
        if trial % 5 == 0:
            data = data[: int(rng.integers(1, len(data)))]
        log = tmp_path / f"{trial}.npz"
        log.write_bytes(bytes(data))
        with suppress(SourceInvalidError):
            list(NpzFormat().read(find_source([log]).files, ReadOptions()))


def test_a_torn_npz_is_named_and_no_other_format(tmp_path: Path) -> None:
    whole = _save(tmp_path / "whole.npz", _trajectories()).read_bytes()
    log = tmp_path / "log.npz"
    log.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceInvalidError, match=r"log\.npz"):
        list(_open(log))


def test_values_of_one_number_may_have_a_dim_of_their_own(tmp_path: Path) -> None:
    flat = _experts()
    wide = {name: flat[name][:, None] for name in ("rewards", "episode_starts")}
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    one = _episodes(_open(_save(tmp_path / "1" / "log.npz", flat)))
    other = _episodes(_open(_save(tmp_path / "2" / "log.npz", {**flat, **wide})))
    assert [e.rewards.tolist() for e in other] == [e.rewards.tolist() for e in one]
    buffer = {
        "observations": np.eye(3),
        "actions": np.zeros((3, 2)),
        "rewards": np.ones((3, 1)),
        "terminals": np.array([[False], [True], [True]]),
    }
    first, second = _episodes(_open(_save(tmp_path / "buffer.npz", buffer)))
    assert (len(first), len(second)) == (2, 1)
    assert first.terminated
    assert first.actions.shape == (2, 2)


def test_paths_of_images_are_no_observations(tmp_path: Path) -> None:
    paths = np.array([f"recorded_images/{i}.png" for i in range(6)])
    log = _save(tmp_path / "expert.npz", _experts(obs=paths))
    with pytest.raises(SourceInvalidError, match=r"'obs' has texts.*only the paths"):
        list(_open(log))


def test_one_trajectory_and_none(tmp_path: Path) -> None:
    one = _trajectories((6,), terminal=np.array([True]), indices=np.array([]))
    (episode,) = _episodes(_open(_save(tmp_path / "one.npz", one)))
    assert len(episode) == 6
    none = {
        "obs": np.zeros((0, 2)),
        "acts": np.zeros(0, int),
        "rews": np.zeros(0),
        "terminal": np.zeros(0, bool),
        "indices": np.zeros(0, int),
    }
    with pytest.raises(SourceInvalidError, match="found no rows"):
        list(_open(_save(tmp_path / "none.npz", none)))


def test_terminals_of_recordings_without_a_task_are_truncations(tmp_path: Path) -> None:
    """OGBench's files: no rewards, no timeouts, and `terminals` at the end of each recording."""
    arrays = {
        "observations": np.arange(12, dtype=np.float32).reshape(6, 2),
        "actions": np.ones((6, 1), np.float32),
        "terminals": np.array([0, 0, 1, 0, 0, 1], np.float32),
    }
    np.savez(tmp_path / "play.npz", **arrays)
    reading = _open(tmp_path / "play.npz", reward_unknown=True)
    episodes = _episodes(reading)
    assert [len(one) for one in episodes] == [3, 3]
    assert [(one.terminated, one.truncated) for one in episodes] == [(False, True)] * 2
    assert "terminals used as truncated" in " ".join(reading.notes)
    mapped = _open(tmp_path / "play.npz", reward_unknown=True, mapping={"terminated": "terminals"})
    assert [one.terminated for one in _episodes(mapped)] == [True, True]
    np.savez(tmp_path / "task.npz", **arrays, rewards=np.zeros(6))
    assert [one.terminated for one in _episodes(_open(tmp_path / "task.npz"))] == [True, True]
