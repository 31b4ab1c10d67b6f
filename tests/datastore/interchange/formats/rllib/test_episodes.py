"""Files in fixtures/rllib_episodes were written by RLlib itself: its README.md has the versions."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Discrete
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.formats.format import (
    ReadOptions,
    RejectedEpisode,
    SourceReader,
)
from replaylake.datastore.interchange.formats.rllib.rllib import RllibFormat
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.sources.source import find_source
from replaylake.datastore.lake.lake import Lake

_FIXTURES = Path(__file__).parents[4] / "fixtures" / "rllib_episodes"
_EXPECTED: Mapping[str, Any] = json.loads((_FIXTURES / "expected.json").read_text())


def _open(*paths: Path, **options: Any) -> SourceReader:
    source = find_source(paths)
    found = find_format("auto", source.files)
    assert found.name == "rllib"
    return found.read(source.files, ReadOptions(**options))


def _episodes(reading: SourceReader) -> list[Episode]:
    found = list(reading)
    assert not [one for one in found if isinstance(one, RejectedEpisode)]
    return [one for one in found if isinstance(one, Episode)]


def _sampled(name: str) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return what RLlib's recorder said that it sampled: episodes by id, each with its pieces."""
    pieces: dict[str, list[Mapping[str, Any]]] = {}
    for piece in _EXPECTED[name]:
        pieces.setdefault(piece["id"], []).append(piece)
    return [*pieces.items()]


@pytest.mark.parametrize("name", ["episodes", "columns", "packed", "pendulum"])
def test_what_rllib_sampled_is_read(name: str) -> None:
    episodes = _episodes(_open(_FIXTURES / f"{name}.parquet"))
    sampled = _sampled(name)
    assert [e.source_episode_id for e in episodes] == [key for key, _ in sampled]
    for episode, (_, pieces) in zip(episodes, sampled, strict=True):
        assert len(episode) == sum(piece["num_steps"] for piece in pieces)
        assert episode.first_step == pieces[0]["first_step"] == 0
        assert episode.rewards.sum() == pytest.approx(sum(piece["return"] for piece in pieces))
        assert episode.terminated == pieces[-1]["terminated"]
        assert episode.truncated == pieces[-1]["truncated"]
        assert episode.observations[0].tolist() == pieces[0]["first_observation"]
        assert episode.final_observation.tolist() == pieces[-1]["last_observation"]
        actions = [action for piece in pieces for action in piece["actions"]]
        assert episode.actions.tolist() == actions
        assert episode.behavior_log_probs is not None


def test_some_episode_was_several_rows() -> None:
    assert max(len(pieces) for _, pieces in _sampled("episodes")) > 1
    assert pq.read_metadata(_FIXTURES / "episodes.parquet").num_rows > len(_sampled("episodes"))


def test_the_three_layouts_hold_the_same_steps() -> None:
    """The recorder was seeded: each layout was written of the same steps, but for the ids."""
    layouts = [
        _episodes(_open(_FIXTURES / f"{n}.parquet")) for n in ("episodes", "columns", "packed")
    ]
    for one, *others in zip(*layouts, strict=True):
        for other in others:
            for name in ("observations", "actions", "rewards", "behavior_log_probs"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            assert one.observations.dtype == other.observations.dtype == np.float32
            np.testing.assert_array_equal(one.final_observation, other.final_observation)
            assert (one.terminated, one.truncated) == (other.terminated, other.truncated)
            assert one.extras["weights_seq_no"].to_pylist() == (
                other.extras["weights_seq_no"].to_pylist()
            )


@pytest.mark.parametrize("name", ["episodes", "columns", "packed"])
def test_ingest_takes_each_layout(name: str, lake: Lake) -> None:
    receipt = ingest(lake, [_FIXTURES / f"{name}.parquet"], "cartpole")
    assert receipt.steps.committed == 100
    assert receipt.episodes.committed == 6
    assert lake.dataset("cartpole").spec.action_space == Discrete(2)


def test_composite_values_are_read_from_both_forms() -> None:
    """The first was written step by step, the second finalized: a structure of stacked arrays."""
    steps, stacked = _episodes(_open(_FIXTURES / "composite.parquet"))
    for episode in (steps, stacked):
        assert episode.observations["frame"][:, 0, 0].tolist() == [0, 1, 2]
        assert episode.observations["frame"].dtype == np.uint8
        assert episode.observations["goal"].tolist() == [0, 1, 2]
        assert episode.final_observation["frame"].tolist() == [[3, 3], [3, 3]]
        assert episode.actions["_0"].tolist() == [0, 1, 0]
        assert episode.actions["_1"].tolist() == [[0.0], [0.25], [0.5]]
        assert (episode.terminated, episode.truncated) == (False, True)
        assert episode.behavior_log_probs.tolist() == [-0.5] * 3


def test_infos_are_kept_as_json() -> None:
    steps, _ = _episodes(_open(_FIXTURES / "composite.parquet"))
    assert [json.loads(text) for text in steps.extras["infos"].to_pylist()] == [
        {"tick": 0},
        {"tick": 1},
        {"tick": 2},
    ]


def _nd(array: Any) -> dict[bytes, Any]:
    array = np.asarray(array)
    kind = {b"nd": True, b"type": array.dtype.str.encode(), b"kind": b""}
    return {**kind, b"shape": array.shape, b"data": array.tobytes()}


def _buffer(data: Any, lookback: int = 0) -> dict[str, Any]:
    return {"data": data, "lookback": lookback, "finalized": False, "space": None}


def _state(num: int = 2, name: str = "a", first: int = 0, **changes: Any) -> dict[str, Any]:
    """Step t of an episode has observation [t, -t], action t % 2 and reward t."""
    steps = range(first, first + num)
    return {
        "id_": name,
        "agent_id": None,
        "module_id": None,
        "multi_agent_episode_id": None,
        "observations": _buffer([_nd(np.array([t, -t], "f4")) for t in [*steps, first + num]]),
        "actions": _buffer([t % 2 for t in steps]),
        "rewards": _buffer([float(t) for t in steps]),
        "infos": _buffer([{}] * (num + 1)),
        "extra_model_outputs": None,
        "is_terminated": True,
        "is_truncated": False,
        "t_started": first,
        **changes,
    }


def _write(path: Path, *states: Any) -> Path:
    packed = [s if isinstance(s, bytes) else msgpack.packb(s) for s in states]
    pq.write_table(pa.table({"item": pa.array(packed, pa.binary())}), path)
    return path


def test_pieces_join_in_any_order_and_across_files(tmp_path: Path) -> None:
    _write(tmp_path / "1.parquet", _state(2, "a", 3), _state(1, "b"))
    _write(tmp_path / "2.parquet", _state(3, "a", is_terminated=False))
    first, second = _episodes(_open(tmp_path))
    assert (first.source_episode_id, first.rewards.tolist()) == ("a", [0, 1, 2, 3, 4])
    assert first.final_observation.tolist() == [5, -5]
    assert second.source_episode_id == "b"


def test_a_missing_piece_is_a_gap(tmp_path: Path) -> None:
    log = _write(tmp_path / "log.parquet", _state(2, is_terminated=False), _state(2, first=3))
    (rejected,) = list(_open(log))
    assert isinstance(rejected, RejectedEpisode)
    assert [finding.check for finding in rejected.findings] == ["gap"]


def test_what_lies_before_the_piece_is_left_to_its_own_row(tmp_path: Path) -> None:
    state = _state(3)
    state["t_started"] = 1
    for name in ("observations", "actions", "rewards"):
        state[name]["lookback"] = 1
    (episode,) = _episodes(_open(_write(tmp_path / "log.parquet", state)))
    assert episode.first_step == 1
    assert episode.rewards.tolist() == [1.0, 2.0]
    assert episode.observations.tolist() == [[1, -1], [2, -2]]
    assert episode.final_observation.tolist() == [3, -3]


def test_agents_and_modules_are_kept(tmp_path: Path) -> None:
    names = {"multi_agent_episode_id": "game", "module_id": "mover"}
    log = _write(
        tmp_path / "log.parquet",
        _state(2, "x", agent_id="left", **names),
        _state(2, "y", agent_id="right", **names),
    )
    left, right = _episodes(_open(log))
    assert (left.source_episode_id, left.agent_id) == ("game", "left")
    assert (right.source_episode_id, right.agent_id) == ("game", "right")
    assert set(left.policies) == {"mover"}


def test_unequal_lengths_reject_their_episode_only(tmp_path: Path) -> None:
    short = _state(2, "short")
    short["actions"]["data"].pop()
    ragged = _state(2, "ragged")
    ragged["observations"]["data"][1] = _nd(np.zeros(3, "f4"))
    log = _write(tmp_path / "log.parquet", _state(2, "a"), short, ragged, _state(2, "b"))
    found = {
        one.source_episode_id: [] if isinstance(one, Episode) else [f.message for f in one.findings]
        for one in _open(log)
    }
    assert found["a"] == found["b"] == []
    assert any("log.parquet row 1: actions has 1 entries" in text for text in found["short"])
    assert any("observations holds shapes (2,) and (3,)" in text for text in found["ragged"])


def test_rows_without_a_step_are_left_out_and_said_so(tmp_path: Path) -> None:
    reading = _open(_write(tmp_path / "log.parquet", _state(0, "none"), _state(2)))
    assert [e.source_episode_id for e in _episodes(reading)] == ["a"]
    assert any("rows without a step" in note for note in reading.notes)


class _Planted:
    def __init__(self, witness: Path) -> None:
        self._witness = witness

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._witness}",)


def _object_array(witness: Path) -> dict[bytes, Any]:
    data = pickle.dumps(_Planted(witness))
    return {b"nd": True, b"type": b"|O", b"kind": b"O", b"shape": [3], b"data": data}


def test_pickled_infos_are_left_out_and_nothing_runs(tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    as_array = _state(2, "a", infos=_buffer(_object_array(witness)))
    within = _state(2, "b", infos=_buffer([{}, {"x": _object_array(witness)}, {}]))
    for number, state in enumerate((as_array, within)):
        reading = _open(_write(tmp_path / f"{number}.parquet", state))
        (episode,) = _episodes(reading)
        assert "infos" not in episode.extras
        assert any("pickled Python objects: not read" in note for note in reading.notes)
    assert not witness.exists()


def test_pickled_observations_reject_their_episode_and_nothing_runs(tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    state = _state(2, observations=_buffer([_object_array(witness)] * 3))
    rejected, good = list(_open(_write(tmp_path / "log.parquet", state, _state(2, "good"))))
    assert isinstance(good, Episode)
    assert isinstance(rejected, RejectedEpisode)
    messages = "\n".join(finding.message for finding in rejected.findings)
    assert "observations holds a pickled array of Python objects" in messages
    assert not witness.exists()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (b"\x81", "expected one whole msgpack value"),
        (b"", "expected one whole msgpack value"),
        ({"id_": "a", "agent_episodes": []}, "the state of a multi-agent episode"),
        ([1], "found another message"),
        (_state(2, t_started=-1), "t_started -1"),
        (_state(2, t_started="x"), "t_started x"),
        (_state(2, is_terminated="yes"), "is_terminated yes"),
    ],
)
def test_what_is_no_state_is_refused_with_its_row(tmp_path: Path, state: Any, message: str) -> None:
    log = _write(tmp_path / "log.parquet", _state(2), state)
    with pytest.raises(SourceInvalidError, match=rf"log.parquet row 1: .*{message}"):
        list(_open(log))


def test_flipped_and_torn_states_are_refused_or_read(tmp_path: Path) -> None:
    """Each within a Parquet file that is whole."""
    whole = msgpack.packb(_state(3, extra_model_outputs={"vf": _buffer([1.0, 2.0, 3.0])}))
    rng = np.random.default_rng(2)
    files = []
    for trial in range(150):
        data = bytearray(whole)
        data[int(rng.integers(len(data)))] = int(rng.integers(256))
        files.append(_write(tmp_path / f"{trial}.parquet", bytes(data)))
    for file in files:
        with suppress(SourceInvalidError):
            list(RllibFormat().read(find_source([file]).files, ReadOptions()))
    for cut in range(0, len(whole), 17):
        torn = _write(tmp_path / f"torn-{cut}.parquet", whole[:cut])
        with pytest.raises(SourceInvalidError):
            list(RllibFormat().read(find_source([torn]).files, ReadOptions()))


def test_flipped_and_torn_files_are_refused_or_read(tmp_path: Path) -> None:
    whole = (_FIXTURES / "episodes.parquet").read_bytes()
    rng = np.random.default_rng(4)
    for trial in range(40):
        data = bytearray(whole[: int(rng.integers(4, len(whole)))] if trial % 3 == 0 else whole)
        data[int(rng.integers(len(data)))] = int(rng.integers(256))
        log = tmp_path / f"{trial}.parquet"
        log.write_bytes(bytes(data))
        with suppress(SourceInvalidError):
            list(RllibFormat().read(find_source([log]).files, ReadOptions()))
