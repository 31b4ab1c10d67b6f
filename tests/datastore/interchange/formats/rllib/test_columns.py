from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete
from replaylake.datastore.interchange.export.export import export
from replaylake.datastore.interchange.formats.format import (
    ReadOptions,
    SourceReader,
    WritableFormat,
)
from replaylake.datastore.interchange.formats.rllib import columns as rllib_columns
from replaylake.datastore.interchange.formats.rllib.rllib import RllibFormat
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.sources.source import find_source
from replaylake.datastore.lake.lake import Lake

_FIXTURES = Path(__file__).parents[4] / "fixtures" / "rllib_episodes"
_SPEC = DatasetSpec(Box((2,)), Discrete(2))


def _read(path: Path) -> SourceReader:
    files = find_source([path]).files
    assert RllibFormat().recognizes(files)
    return RllibFormat().read(files, ReadOptions())


def _write(path: Path, spec: DatasetSpec, *episodes: Episode) -> tuple[str, ...]:
    written = RllibFormat().write(iter(episodes), spec, path)
    assert written.num_steps == sum(map(len, episodes))
    return written.notes


def _all(path: Path) -> Iterator[Episode]:
    for one in _read(path):
        assert isinstance(one, Episode), one
        yield one


def _same(one: Episode, other: Episode) -> None:
    names = ["observations", "actions", "rewards", "final_observation", "behavior_log_probs"]
    names += ["policies", "policy_versions", "action_masks", "timestamps", "env_steps"]
    for name in names:
        found, expected = getattr(one, name), getattr(other, name)
        if isinstance(expected, dict):
            for key in expected:
                np.testing.assert_array_equal(found[key], expected[key], err_msg=name)
                assert found[key].dtype == expected[key].dtype
        elif name != "env_steps" or expected is not None:
            np.testing.assert_array_equal(found, expected, err_msg=name)
    for name in ("agent_id", "first_step", "terminated", "truncated"):
        assert getattr(one, name) == getattr(other, name), name


def test_it_is_writable() -> None:
    assert isinstance(RllibFormat(), WritableFormat)


def test_episodes_come_back_equal(tmp_path: Path, make_episode: Callable[..., Episode]) -> None:
    full = make_episode(
        "full",
        4,
        agent_id="left",
        terminated=True,
        behavior_log_probs=np.array([-0.5, np.nan, -1.5, 0.0], np.float32),
        policies=np.array(["p"] * 4, object),
        policy_versions=np.arange(4),
        timestamps=np.arange(4) + 1_700_000_000_000_000,
        action_masks=np.array([[True, True]] * 4),
        env_steps=np.arange(0, 8, 2, dtype=np.int32),
        extras={"note": pa.array(["a", None, "b", "c"]), "unroll_id": np.arange(4)},
    )
    kept = {name: getattr(full, name) for name in ("policies", "policy_versions", "timestamps")}
    other = make_episode(
        "open",
        4,
        agent_id="right",
        action_masks=full.action_masks,
        **kept,
        extras={"note": pa.array(["d"] * 4), "unroll_id": np.arange(4)},
        final_observation=None,
        behavior_log_probs=np.full(4, np.nan, np.float32),
    )
    extras = {"note": pa.string(), "unroll_id": pa.int64()}
    spec = DatasetSpec(Box((2,)), Discrete(2), mask_size=2, extras=extras)
    notes = _write(tmp_path / "log.parquet", spec, full, other)
    assert "1 episodes or pieces have no observation after their last step" in "\n".join(notes)
    first, second = _all(tmp_path / "log.parquet")
    _same(first, full)
    _same(second, other)
    assert first.source_episode_id == "full"
    assert first.extras["note"].to_pylist() == ["a", None, "b", "c"]
    assert first.extras["unroll_id"].to_pylist() == [0, 1, 2, 3]
    assert _read(tmp_path / "log.parquet").spaces == (Box((2,)), Discrete(2))


def test_what_an_episode_lacks_is_not_invented(
    tmp_path: Path, make_episode: Callable[..., Episode]
) -> None:
    _write(tmp_path / "log.parquet", _SPEC, make_episode("a", truncated=True))
    (episode,) = _all(tmp_path / "log.parquet")
    assert episode.behavior_log_probs is None
    assert episode.policies is None
    assert episode.policy_versions is None
    assert episode.timestamps is None
    assert episode.agent_id == ""
    assert not episode.extras
    assert episode.truncated


def test_pieces_of_an_episode_are_one_when_read(
    tmp_path: Path, make_episode: Callable[..., Episode]
) -> None:
    pieces = [make_episode("a", 3), make_episode("a", 2, first_step=3, terminated=True)]
    written = RllibFormat().write(iter(pieces), _SPEC, tmp_path / "log.parquet")
    assert (written.num_episodes, written.num_steps) == (1, 5)
    (episode,) = _all(tmp_path / "log.parquet")
    assert episode.rewards.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("known", [True, False])
def test_frames_and_dicts_come_back_equal(tmp_path: Path, known: bool) -> None:
    frames = np.arange(3 * 2 * 2 * 3, dtype=np.uint8).reshape(3, 2, 2, 3)
    image = Box((2, 2, 3), "uint8", 0, 255)
    pair = {"frame": frames, "goal": np.arange(3)}
    final = {"frame": frames[0], "goal": np.int64(1)}
    plain = Episode("a", frames, np.zeros((3, 1)), np.ones(3), final_observation=final["frame"])
    nested = Episode("a", pair, np.zeros(3, int), np.ones(3), final_observation=final)
    for name, episode, spec in (
        ("plain", plain, DatasetSpec(image, Box((1,), "float64"))),
        ("nested", nested, DatasetSpec(Dict({"frame": image, "goal": Discrete(3)}), Discrete(2))),
    ):
        given = Episode(**{**vars(episode), **({} if known else {"final_observation": None})})
        _write(tmp_path / f"{name}.parquet", spec, given)
        (found,) = _all(tmp_path / f"{name}.parquet")
        _same(found, given)


def test_names_that_rllib_has_for_its_own_are_not_overwritten(
    tmp_path: Path, make_episode: Callable[..., Episode]
) -> None:
    episode = make_episode("a", extras={"obs": np.arange(3), "t": np.arange(3)})
    spec = DatasetSpec(Box((2,)), Discrete(2), extras={"obs": pa.int64(), "t": pa.int64()})
    notes = _write(tmp_path / "log.parquet", spec, episode)
    assert any("written as extra_*: obs, t" in note for note in notes)
    (found,) = _all(tmp_path / "log.parquet")
    assert set(found.extras) == {"extra_obs", "extra_t"}
    _same(found, episode)


def test_columns_are_those_that_rllib_writes(
    tmp_path: Path, make_episode: Callable[..., Episode]
) -> None:
    """The same names and kinds as in a file of RLlib's own, tensors included."""
    _write(tmp_path / "log.parquet", _SPEC, make_episode("a", terminated=True))
    ours = pq.read_schema(tmp_path / "log.parquet")
    theirs = pq.read_schema(_FIXTURES / "columns.parquet")
    for name in ("eps_id", "obs", "new_obs", "rewards", "terminateds", "truncateds"):
        assert ours.field(name).type == theirs.field(name).type, name
    for name in ("obs", "new_obs"):
        key = b"ARROW:extension:name"
        assert ours.field(name).metadata[key] == theirs.field(name).metadata[key]
        assert ours.field(name).metadata[b"ARROW:extension:metadata"] == b"[2]"


def test_what_a_later_row_group_says_first_is_added_to_those_before(
    tmp_path: Path, make_episode: Callable[..., Episode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """RLlib makes no tensors of null columns, so that those which say nothing are left out."""
    monkeypatch.setattr(rllib_columns, "CHUNK_BYTES", 1)
    plain = [make_episode(f"e{i}", terminated=True) for i in range(3)]
    _write(tmp_path / "plain.parquet", _SPEC, *plain)
    assert pq.read_schema(tmp_path / "plain.parquet").names == [
        *("obs", "actions", "new_obs", "eps_id", "t", "rewards", "terminateds", "truncateds")
    ]
    late = make_episode(
        "late",
        agent_id="left",
        behavior_log_probs=np.zeros(3, np.float32),
        env_steps=np.array([0, 5, 6], np.int32),
    )
    _write(tmp_path / "late.parquet", _SPEC, *plain, late, make_episode("end"))
    assert [path.name for path in tmp_path.glob("late*")] == ["late.parquet"]
    found = [*_all(tmp_path / "late.parquet")]
    _same(found[3], late)
    for one, expected in zip([*found[:3], found[4]], [*plain, make_episode("end")], strict=True):
        assert np.isnan(one.behavior_log_probs).all()
        assert one.env_steps.tolist() == [0, 1, 2]
        assert (one.agent_id, one.terminated) == ("", expected.terminated)


def test_columns_that_no_learner_takes_are_named(
    tmp_path: Path, make_episode: Callable[..., Episode]
) -> None:
    spec = DatasetSpec(Box((2,)), Discrete(2), extras={"note": pa.string(), "size": pa.int64()})
    episode = make_episode("a", extras={"note": pa.array(["x"] * 3), "size": np.arange(3)})
    notes = _write(tmp_path / "log.parquet", spec, episode)
    assert any("make no tensors: note;" in note for note in notes)


def test_many_episodes_are_written_in_groups(
    tmp_path: Path, make_episode: Callable[..., Episode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rllib_columns, "CHUNK_BYTES", 200)
    episodes = [make_episode(f"e{i}", terminated=True) for i in range(20)]
    _write(tmp_path / "log.parquet", _SPEC, *episodes)
    assert pq.read_metadata(tmp_path / "log.parquet").num_row_groups > 5
    for found, expected in zip(_all(tmp_path / "log.parquet"), episodes, strict=True):
        _same(found, expected)


def test_nothing_is_a_file_too(tmp_path: Path) -> None:
    assert RllibFormat().write(iter(()), _SPEC, tmp_path / "log.parquet").num_episodes == 0
    assert pq.read_table(tmp_path / "log.parquet").num_rows == 0


_ROWS = (
    "SELECT * EXCLUDE (episode_id, source_episode_id) FROM steps "
    "ORDER BY source_episode_id, agent_id, step"
)


@pytest.mark.parametrize("name", ["columns.parquet", "episodes.parquet", "multi_agent.json"])
def test_what_is_exported_and_ingested_again_has_equal_rows(
    name: str, lake: Lake, tmp_path: Path
) -> None:
    ingest(lake, [_FIXTURES / name], "first")
    export(lake, "first", tmp_path / "out.parquet", format="rllib")
    ingest(lake, [tmp_path / "out.parquet"], "second")
    first, second = (lake.dataset(n).snapshot() for n in ("first", "second"))
    rows: list[Any] = [snapshot.sql(_ROWS) for snapshot in (first, second)]
    assert rows[0].schema.names == rows[1].schema.names
    assert rows[0].to_pylist() == rows[1].to_pylist()
    specs = [lake.dataset(n).spec for n in ("first", "second")]
    assert specs[0].observation_space == specs[1].observation_space
    assert specs[0].action_space == specs[1].action_space
