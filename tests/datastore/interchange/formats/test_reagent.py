from __future__ import annotations

import bz2
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError, ReplayLakeError, SourceInvalidError
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


def _open(*paths: Path, **options: Any) -> SourceReader:
    source = find_source(paths)
    found = find_format("auto", source.files)
    assert found.name == "reagent"
    return found.read(source.files, ReadOptions(**options))


def _episodes(reading: SourceReader) -> list[Episode]:
    found = list(reading)
    assert not [one for one in found if isinstance(one, RejectedEpisode)]
    return [one for one in found if isinstance(one, Episode)]


def _row(episode: str, number: int, **changed: Any) -> dict[str, Any]:
    return {
        "mdp_id": episode,
        "sequence_number": number,
        "state_features": {"10": number / 2, "9": -1.0},
        "action": "left",
        "reward": 1.0,
        "action_probability": 0.5,
        "possible_actions": ["left", "right"],
        **changed,
    }


def _write(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def cartpole(shared_data: Path) -> Path:
    return shared_data / "reagent" / "cartpole_training_data.json"


@pytest.fixture
def workflow(shared_data: Path) -> Path:
    return shared_data / "reagent" / "dqn_workflow.zip"


def test_the_json_of_cartpole_has_gaps_in_33_of_41_episodes(cartpole: Path) -> None:
    found = list(_open(cartpole))
    rejected = [one for one in found if isinstance(one, RejectedEpisode)]
    assert (len(found), len(rejected)) == (41, 33)
    assert sum(len(one) for one in found if isinstance(one, Episode)) == 8
    assert {f.check for one in rejected for f in one.findings} == {"gap"}


def test_the_json_rows_are_as_their_objects(cartpole: Path) -> None:
    rows = {
        (row["mdp_id"], row["sequence_number"]): row
        for row in map(json.loads, cartpole.read_text().splitlines())
    }
    kept = [one for one in _open(cartpole) if isinstance(one, Episode)]
    for episode in kept:
        row = rows[episode.episode_id, episode.first_step]
        state = [row["state_features"][key] for key in "0123"]
        assert np.asarray(episode.observations).tolist() == [state]
        # The actions are one-hot features 4 and 5.
        assert np.asarray(episode.actions).tolist() == [int(row["action"]["5"])]
        assert episode.extras["logged_action"].to_pylist() == ["45"[int(row["action"]["5"])]]
        assert episode.final_observation.tolist() == [
            row["next_state_features"][key] for key in "0123"
        ]
        assert episode.action_masks is not None
        assert episode.action_masks.tolist() == [[True, True]]
        assert episode.behavior_log_probs is not None
        assert episode.behavior_log_probs.tolist() == [0.0]
        timeline = json.loads(episode.extras["reward_timeline"][0].as_py())
        assert timeline == row["reward_timeline"]
        assert (episode.terminated, episode.truncated) == (False, False)


def test_gaps_can_be_split_and_bz2_is_unpacked(cartpole: Path, tmp_path: Path) -> None:
    packed = tmp_path / "log.json.bz2"
    packed.write_bytes(bz2.compress(cartpole.read_bytes()))
    lake = open_lake(tmp_path / "lake", create=True)
    receipt = ingest(lake, [packed], "whole", options=ReadOptions(gaps="split"))
    assert receipt.steps == Counts(committed=162)
    assert lake.dataset("whole").snapshot().describe()["num_steps"] == 162


def test_the_workflow_is_18_whole_episodes(workflow: Path) -> None:
    reading = _open(workflow)
    episodes = _episodes(reading)
    assert len(episodes) == 18
    assert sum(map(len, episodes)) == 323
    assert np.mean([e.rewards.sum() for e in episodes]) == pytest.approx(17.944444444444443)
    assert all(e.terminated and not e.truncated and e.first_step == 1 for e in episodes)
    assert all(e.final_observation is None for e in episodes)
    for episode in episodes:
        assert episode.behavior_log_probs is not None
        np.testing.assert_allclose(episode.behavior_log_probs, np.log(0.5), rtol=1e-6)
        assert episode.action_masks is not None
        assert episode.action_masks.shape == (len(episode), 2)
        assert episode.action_masks.all()
    notes = "\n".join(reading.notes)
    assert "18 terminal rows have an empty possible_actions_mask" in notes
    assert "restate the following row, left out: next_action, possible_next" in notes


def test_the_workflow_is_the_same_unzipped(workflow: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(workflow) as packed:
        packed.extractall(tmp_path)
    by_id = {e.episode_id: e for e in _episodes(_open(workflow))}
    for episode in _episodes(_open(tmp_path / "dqn_workflow")):
        other = by_id.pop(episode.episode_id)
        np.testing.assert_array_equal(episode.observations, other.observations)
        np.testing.assert_array_equal(episode.actions, other.actions)
    assert not by_id


def test_features_are_in_the_order_of_their_ids(tmp_path: Path) -> None:
    path = _write(tmp_path / "log.json", _row("a", 0), _row("a", 1, action="right"))
    (episode,) = _episodes(_open(path))
    assert np.asarray(episode.observations).tolist() == [[-1.0, 0.0], [-1.0, 0.5]]
    assert np.asarray(episode.actions).tolist() == [0, 1]
    assert (episode.terminated, episode.truncated) == (False, False)


def test_an_absent_feature_is_not_zero_unless_said(tmp_path: Path) -> None:
    sparse = _row("b", 1, state_features={"9": 3.0})
    path = _write(tmp_path / "log.json", _row("a", 0), _row("b", 0), sparse)
    reading = _open(path)
    kept, rejected = list(reading)
    assert isinstance(kept, Episode)
    assert isinstance(rejected, RejectedEpisode)
    assert [f.check for f in rejected.findings] == ["missing"]
    assert any("1 rows lack some of 2 features" in note for note in reading.notes)
    filled = _open(path, fill={"state_features": "-7"})
    assert np.asarray(_episodes(filled)[1].observations).tolist() == [[-1.0, 0.0], [3.0, -7.0]]
    with pytest.raises(ConfigInvalidError, match="fill state_features=much: found 'much'"):
        _open(path, fill={"state_features": "much"})


def test_a_row_without_a_next_state_is_terminal(tmp_path: Path) -> None:
    following = {"next_state_features": {"10": 0.5, "9": -1.0}}
    path = _write(
        tmp_path / "log.json",
        _row("a", 0, **following),
        _row("a", 1, next_state_features={}),
        _row("b", 0, **following),
    )
    reading = _open(path)
    first, second = _episodes(reading)
    assert first.terminated
    assert first.final_observation is None
    assert (second.terminated, second.truncated) == (False, False)
    assert second.final_observation.tolist() == [-1.0, 0.5]
    assert any("1 rows have no next state: taken as terminal" in note for note in reading.notes)


def test_metrics_of_one_name_are_refused(tmp_path: Path) -> None:
    rows = [_row("a", number) for number in range(2)]
    features = [[("9", -1.0), ("10", 0.5)]] * 2
    table = pa.Table.from_pylist(
        [{k: v for k, v in r.items() if "features" not in k} for r in rows]
    )
    table = table.append_column(
        "state_features", pa.array(features, pa.map_(pa.string(), pa.float64()))
    )
    values = [pa.array([1.0, 2.0])] * 2
    metrics = pa.StructArray.from_arrays(values, fields=[pa.field("a", pa.float64())] * 2)
    path = tmp_path / "log.parquet"
    pq.write_table(table.append_column("metrics", metrics), path)
    with pytest.raises(SourceInvalidError, match="'metrics' has two fields of the same name"):
        _episodes(_open(path))


def test_not_terminal_is_believed(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "log.json", _row("a", 0, not_terminal=True), _row("a", 1, not_terminal=False)
    )
    (episode,) = _episodes(_open(path))
    assert episode.terminated


def test_masks_follow_the_names(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "log.json",
        _row("a", 0, possible_actions=["right", "left"]),
        _row("a", 1, action="right", possible_actions=["right", "up"]),
    )
    reading = _open(path)
    (episode,) = _episodes(reading)
    assert episode.action_masks is not None
    assert episode.action_masks.tolist() == [[True, True], [False, True]]
    assert "actions possible but never taken, left out: up" in reading.notes


def test_a_later_log_keeps_the_names_of_the_dataset(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    ingest(lake, [_write(tmp_path / "a.json", _row("a", 0), _row("a", 1, action="right"))], "d")
    ingest(lake, [_write(tmp_path / "b.json", _row("b", 0, action="right"))], "d")
    found = lake.sql("select action, logged_action from d.steps order by all")
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        (0, "left"),
        (1, "right"),
        (1, "right"),
    ]


def test_continuous_actions_are_vectors(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "log.json",
        _row("a", 0, action={"4": 1.0, "5": 0.0}, possible_actions=[]),
        _row("a", 1, action={"4": 0.25, "5": -3.0}, possible_actions=[]),
    )
    (episode,) = _episodes(_open(path))
    assert np.asarray(episode.actions).tolist() == [[1.0, 0.0], [0.25, -3.0]]
    assert episode.action_masks is None


def _maps(column: list[dict[int, float]]) -> pa.Array:
    return pa.array([[*one.items()] for one in column], pa.map_(pa.int64(), pa.float64()))


def test_maps_of_parquet_are_as_the_objects_of_json(tmp_path: Path) -> None:
    table = pa.table(
        {
            "mdp_id": ["a", "a"],
            "sequence_number": [0, 1],
            "state_features": _maps([{10: 0.5, 9: 1.0}, {9: 2.0, 10: 3.0}]),
            "action": _maps([{0: 1.0}, {1: 1.0}]),
            "reward": [1.0, 2.0],
            "metrics": _maps([{1: 4.0}, {}]),
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    (episode,) = _episodes(_open(tmp_path / "log.parquet"))
    assert np.asarray(episode.observations).tolist() == [[1.0, 0.5], [2.0, 3.0]]
    assert np.asarray(episode.actions).tolist() == [0, 1]
    assert episode.extras["metrics"].to_pylist() == ['{"1": 4.0}', "{}"]


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"state_features": {"9": "warm"}}, "column 'state_features': found struct"),
        ({"not_terminal": 1}, "column 'not_terminal' is int64"),
        ({"possible_actions": "left"}, "expected a list of actions a row"),
        ({"step": 3}, "column 'step' holds 3, expected 1"),
    ],
)
def test_what_is_not_as_reagent_writes_it_is_named(
    tmp_path: Path, changed: Any, found: str
) -> None:
    path = _write(tmp_path / "log.json", _row("a", 0, **changed))
    with pytest.raises(SourceInvalidError, match=found):
        list(_open(path))


def test_many_ids_of_few_rows_are_refused(tmp_path: Path) -> None:
    # Dense, 30,000 rows of 30,000 ids would take 7.2 GB.
    num = 30_000
    column = pa.MapArray.from_arrays(
        pa.array(np.arange(num + 1, dtype=np.int32)),
        pa.array(np.arange(num)),
        pa.array(np.ones(num)),
    )
    table = pa.table(
        {
            "mdp_id": np.arange(num),
            "sequence_number": np.zeros(num, np.int64),
            "state_features": column,
            "action": np.zeros(num, np.int64),
            "reward": np.ones(num),
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    with pytest.raises(SourceInvalidError, match="unpack"):
        _open(tmp_path / "log.parquet")


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_damaged_bytes_are_refused_or_read(
    tmp_path: Path, cartpole: Path, workflow: Path, kind: str
) -> None:
    if kind == "json":
        whole = b"".join(cartpole.read_bytes().splitlines(keepends=True)[:12])
    else:
        with zipfile.ZipFile(workflow) as packed:
            whole = packed.read(next(n for n in packed.namelist() if n.endswith(".parquet")))
    rng = np.random.default_rng(0)
    damaged = [whole[:cut] for cut in rng.integers(1, len(whole) - 4, 10).tolist()]
    for at in rng.integers(0, len(whole), 50).tolist():
        damaged.append(
            whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :]
        )
    num_refused = 0
    for data in damaged:
        path = tmp_path / "log"
        path.write_bytes(data)
        source = find_source([path])
        try:
            list(find_format("reagent", source.files).read(source.files, ReadOptions()))
        except ReplayLakeError:
            num_refused += 1
    assert num_refused > 5


def test_numbered_actions_have_no_mask_and_the_receipt_says_so(tmp_path: Path) -> None:
    rows = [_row("a", i, action=i % 2, possible_actions=[0, 1]) for i in range(3)]
    reading = _open(_write(tmp_path / "log.json", *rows))
    (episode,) = _episodes(reading)
    assert episode.actions.tolist() == [0, 1, 0]
    assert episode.action_masks is None
    assert any(note.startswith("possible_actions left out") for note in reading.notes)
    assert not any("never taken" in note for note in reading.notes)


def test_rows_that_name_no_possible_action_have_an_unknown_mask(tmp_path: Path) -> None:
    """Such rows end the episodes of logs with `possible_actions`, also of those without an end."""
    rows = [_row(name, i, action="right") for name in "ab" for i in range(3)]
    rows += [_row(name, 3, possible_actions=[]) for name in "ab"]
    rows[1]["possible_actions"] = ["right"]
    rows[4]["possible_actions"] = ["left"]  # not what was taken: still refused
    reading = _open(_write(tmp_path / "log.json", *rows))
    first, second = _episodes(reading)
    assert first.action_masks is not None
    assert first.action_masks.tolist() == [[True, True], [False, True], [True, True], [True, True]]
    assert "2 rows name no possible action" in " ".join(reading.notes)
    lake = open_lake(tmp_path / "lake", create=True)
    receipt = ingest(lake, [tmp_path / "log.json"], "log")
    assert receipt.episodes == Counts(committed=1, rejected=1)
    assert [check.name for check in receipt.checks if check.outcome == "rejected"] == [
        "action_mask"
    ]
    assert second.source_episode_id == receipt.rejected[0].source_episode_id == "b"


def test_a_log_that_never_names_a_possible_action_has_no_mask(tmp_path: Path) -> None:
    rows = [_row("a", i, possible_actions=[]) for i in range(2)]
    (episode,) = _episodes(_open(_write(tmp_path / "log.json", *rows)))
    assert episode.action_masks is None
