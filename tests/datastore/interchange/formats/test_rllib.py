from __future__ import annotations

import base64
import json
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.episodes.episode import Episode
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
from replaylake.datastore.lake.lake import open_lake

_DATA = Path(__file__).parents[4] / "examples" / "data" / "rllib_cartpole"
_SMALL = _DATA / "small.json"
# Written by RLlib itself; its README.md has the versions.
_FIXTURES = Path(__file__).parents[3] / "fixtures" / "rllib_episodes"


def _open(*paths: Path, expected: str = "rllib", **options: object) -> SourceReader:
    source = find_source(paths)
    found = find_format("auto", source.files)
    assert found.name == expected
    return found.read(source.files, ReadOptions(**options))  # type: ignore[arg-type]


def _episodes(reading: SourceReader) -> list[Episode]:
    found = list(reading)
    assert not [one for one in found if isinstance(one, RejectedEpisode)]
    return [one for one in found if isinstance(one, Episode)]


def _batch(**columns: object) -> str:
    columns.setdefault("type", "SampleBatch")
    return json.dumps(columns) + "\n"


def test_large_log_has_its_published_counts() -> None:
    episodes = _episodes(_open(_DATA / "cartpole-v1_large"))
    returns = [episode.rewards.sum() for episode in episodes]
    assert len(episodes) == 21
    assert sum(map(len, episodes)) == 4137
    assert np.mean(returns) == 197.0
    assert sorted(map(len, episodes)) == [137] + [200] * 20
    # exp(action_logp) is the propensity.
    probabilities = np.concatenate([np.exp(e.behavior_log_probs) for e in episodes])
    assert probabilities.mean() == pytest.approx(0.6419769, abs=1e-6)


def test_large_log_keeps_final_observations_and_types() -> None:
    reading = _open(_DATA / "cartpole-v1_large")
    first = _episodes(reading)[0]
    assert first.observations.shape == (200, 4)
    assert first.observations.dtype == np.float64
    assert first.actions.dtype == np.int64
    assert first.final_observation.shape == (4,)
    assert first.source_episode_id == "1484177277"
    assert reading.num_actions == 2
    assert reading.extras["action_dist_inputs"] == pa.list_(pa.float64())


def test_dones_become_terminated_and_the_time_limit_is_noted() -> None:
    reading = _open(_DATA / "cartpole-v1_large")
    assert all(e.terminated and not e.truncated for e in _episodes(reading))
    notes = "\n".join(reading.notes)
    assert "dones used as terminated" in notes
    (check,) = reading.checks
    assert (check.name, check.outcome, check.num_episodes) == ("time_limit", "noted", 20)
    assert "20 of 21 terminated episodes" in check.example
    assert "`time_limit` 200" in check.advice


def test_time_limit_makes_the_episodes_of_that_length_truncated() -> None:
    reading = _open(_DATA / "cartpole-v1_large", time_limit=200)
    episodes = _episodes(reading)
    assert {(len(e), e.terminated, e.truncated) for e in episodes} == {
        (200, False, True),
        (137, True, False),
    }
    assert all(e.final_observation is not None for e in episodes)
    assert [(c.name, c.outcome, c.num_episodes) for c in reading.checks] == [
        ("time_limit", "corrected", 20)
    ]
    (note,) = [note for note in reading.notes if "dones used as terminated" in note]
    assert "but for episodes that reached the time limit of 200 steps" in note
    assert "unless" not in note


def test_sample_batches_and_rows_give_the_same_steps() -> None:
    batches = _episodes(_open(_DATA / "small.json"))
    rows = _episodes(_open(_DATA / "cartpole-v1.jsonl"))
    assert [len(e) for e in batches] == [len(e) for e in rows] == [56, 26, 20]
    for one, other in zip(batches, rows, strict=True):
        assert one.source_episode_id == other.source_episode_id
        np.testing.assert_allclose(one.observations, other.observations, atol=1e-10, rtol=0)
        np.testing.assert_array_equal(one.actions, other.actions)
        np.testing.assert_array_equal(one.rewards, other.rewards)
        np.testing.assert_allclose(one.final_observation, other.final_observation, atol=1e-10)
        np.testing.assert_allclose(one.behavior_log_probs, other.behavior_log_probs, atol=1e-6)


def test_empty_infos_are_dropped_and_said_so() -> None:
    reading = _open(_DATA / "small.json")
    assert "infos" not in reading.extras
    assert any("infos" in note for note in reading.notes)


def test_ray_tensor_columns_are_read_without_ray(tmp_path: Path) -> None:
    def tensor(name: str) -> pa.Field:
        metadata = {
            "ARROW:extension:name": "ray.data.arrow_tensor",
            "ARROW:extension:metadata": "[2, 2]",
        }
        return pa.field(name, pa.list_(pa.float32()), metadata=metadata)

    frames = np.arange(12, dtype=np.float32).reshape(3, 4)
    table = pa.table(
        [
            pa.array(list(frames[:2])),
            pa.array(list(frames[1:])),
            pa.array([0, 1]),
            pa.array([1.0, 2.0]),
            pa.array([False, True]),
            pa.array([5, 5]),
        ],
        schema=pa.schema(
            [
                tensor("obs"),
                tensor("new_obs"),
                pa.field("actions", pa.int64()),
                pa.field("rewards", pa.float64()),
                pa.field("dones", pa.bool_()),
                pa.field("eps_id", pa.int64()),
            ]
        ),
    )
    pq.write_table(table, tmp_path / "log.parquet")
    (episode,) = _episodes(_open(tmp_path / "log.parquet"))
    assert episode.observations.dtype == np.float32
    assert episode.observations.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert episode.final_observation.tolist() == [[8, 9], [10, 11]]


def test_lists_of_unequal_length_reject_their_episode_only(tmp_path: Path) -> None:
    good = {"obs": [[0.0], [1.0]], "actions": [0, 1], "rewards": [1.0, 1.0]}
    log = tmp_path / "log.json"
    log.write_text(
        _batch(eps_id=[1, 1], dones=[False, True], **good)
        + _batch(
            eps_id=[2, 2], dones=[False, True], obs=[[0.0], [1.0]], actions=[0, 1], rewards=[1.0]
        )
        + _batch(eps_id=[3, 3], dones=[False, True], **good)
    )
    first, second, third = list(_open(log))
    assert isinstance(first, Episode)
    assert isinstance(third, Episode)
    assert isinstance(second, RejectedEpisode)
    assert second.source_episode_id == "2"
    assert second.num_steps == 2
    checks = {finding.check: finding.message for finding in second.findings}
    assert "'rewards' has 1 entries" in checks["unequal_lengths"]
    assert "batch 1" in checks["unequal_lengths"]


def test_an_episode_may_span_batches_and_files(tmp_path: Path) -> None:
    (tmp_path / "part-2.json").write_text(
        _batch(eps_id=[7], obs=[[0.0]], actions=[0], rewards=[1.0], dones=[False], t=[0])
    )
    (tmp_path / "part-10.json").write_text(
        _batch(eps_id=[7], obs=[[1.0]], actions=[1], rewards=[2.0], dones=[True], t=[1])
    )
    (episode,) = _episodes(_open(tmp_path))
    assert episode.rewards.tolist() == [1.0, 2.0]
    assert episode.terminated


def test_agent_index_splits_agents_only_where_it_varies(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    columns = {"obs": [[0.0]] * 4, "actions": [0] * 4, "rewards": [1.0, 2.0, 3.0, 4.0]}
    log.write_text(
        _batch(
            eps_id=[1] * 4, agent_index=[0, 1, 0, 1], dones=[False, False, True, True], **columns
        )
    )
    first, second = _episodes(_open(log))
    assert (first.agent_id, first.rewards.tolist()) == ("0", [1.0, 3.0])
    assert (second.agent_id, second.rewards.tolist()) == ("1", [2.0, 4.0])
    assert _episodes(_open(_DATA / "small.json"))[0].agent_id == ""


def _packed(array: Any) -> str:
    return base64.b64encode(lz4.frame.compress(pickle.dumps(array))).decode()


def test_packed_batches_have_their_published_counts(shared_data: Path) -> None:
    log = shared_data / "rllib_pendulum" / "small.json"
    (episode,) = _episodes(_open(log))
    assert len(episode) == 40
    assert not episode.terminated
    assert not episode.truncated
    assert episode.rewards.sum() == pytest.approx(-306.37472677, abs=1e-8)
    assert episode.observations.shape == (40, 3)
    assert episode.observations.dtype == np.float32
    # Pendulum observes (cos, sin, velocity), which is checked against the packed new_obs too.
    np.testing.assert_allclose((episode.observations[:, :2] ** 2).sum(axis=1), 1, atol=1e-6)
    assert episode.final_observation.shape == (3,)


def test_the_pendulum_parquet_has_its_published_counts(shared_data: Path, tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    log = shared_data / "rllib_pendulum" / "pendulum-v1_enormous"
    receipt = ingest(lake, [log], "pendulum")
    assert (receipt.format, receipt.num_files) == ("rllib", 200)
    assert receipt.episodes.committed == 82
    assert receipt.steps.committed == 16231
    described = lake.dataset("pendulum").snapshot().describe()
    assert described["mean_return"] == pytest.approx(-142.9524447262952, abs=1e-9)
    (ends,) = (
        lake.dataset("pendulum")
        .snapshot()
        .sql(
            "SELECT count(*) FILTER (terminated OR truncated) AS ends, "
            "min(len(observation)) AS width FROM steps"
        )
        .to_pylist()
    )
    assert ends == {"ends": 0, "width": 3}


def test_packed_and_plain_batches_are_the_same_steps(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain.json", tmp_path / "packed.json"
    lines: list[dict[str, Any]] = [json.loads(line) for line in _SMALL.read_text().splitlines()]
    plain.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        line["obs"] = _packed(np.asarray(line["obs"]))
        line["new_obs"] = _packed(np.asfortranarray(line["new_obs"]))
    packed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for one, other in zip(_episodes(_open(plain)), _episodes(_open(packed)), strict=True):
        np.testing.assert_array_equal(one.observations, other.observations)
        np.testing.assert_array_equal(one.final_observation, other.final_observation)
        np.testing.assert_array_equal(one.actions, other.actions)


def test_packed_dicts_become_a_dict_space(tmp_path: Path) -> None:
    frames = np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
    log = tmp_path / "log.json"
    log.write_text(
        _batch(
            eps_id=[1, 1],
            obs=_packed({"frame": frames, "goal": np.arange(2)}),
            actions=[0, 1],
            rewards=[1.0, 1.0],
            dones=[False, True],
        )
    )
    (episode,) = _episodes(_open(log))
    assert episode.observations["frame"].tolist() == frames.tolist()
    assert episode.observations["goal"].tolist() == [0, 1]


def test_packed_rows_are_read_from_json_too(tmp_path: Path) -> None:
    rows = [
        {
            "obs": _packed(np.array([t, -t], np.float32)),
            "new_obs": _packed(np.array([t + 1, -t - 1], np.float32)),
            "eps_id": 1,
            "actions": t % 2,
            "rewards": float(t),
            "terminateds": t == 2,
        }
        for t in range(3)
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (episode,) = _episodes(_open(log))
    assert episode.observations.tolist() == [[0, 0], [1, -1], [2, -2]]
    assert episode.final_observation.tolist() == [3, -3]
    assert episode.terminated


def test_packed_rows_of_another_shape_reject_their_episode_only(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    good = {"actions": [0, 1], "rewards": [1.0, 1.0], "dones": [False, True]}
    log.write_text(
        _batch(eps_id=[1, 1], obs=_packed(np.zeros((2, 3))), **good)
        + _batch(eps_id=[2, 2], obs=_packed(np.zeros((2, 2))), **good)
        + _batch(eps_id=[3, 3], obs=_packed(np.zeros((3, 3))), **good)
        + _batch(eps_id=[4, 4], obs=_packed(np.zeros((2, 3))), **good)
    )
    first, second, third, fourth = list(_open(log))
    assert isinstance(first, Episode)
    assert isinstance(second, RejectedEpisode)
    assert [f.check for f in second.findings] == ["shape"]
    assert isinstance(third, RejectedEpisode)
    checks = {finding.check: finding.message for finding in third.findings}
    assert "has 2 entries and 'obs' 3" in checks["unequal_lengths"]
    assert isinstance(fourth, Episode)


def test_a_planted_pickle_is_refused_with_its_place_and_nothing_runs(tmp_path: Path) -> None:
    witness = tmp_path / "ran"

    class Planted:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {witness}",)

    log = tmp_path / "log.json"
    columns = {"eps_id": [1], "actions": [0], "rewards": [1.0], "dones": [True]}
    log.write_text(
        _batch(obs=_packed(np.zeros((1, 3))), **columns) + _batch(obs=_packed(Planted()), **columns)
    )
    with pytest.raises(SourceInvalidError, match=r"log.json batch 1, column 'obs': .*posix.system"):
        list(_open(log))
    assert not witness.exists()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"obs": "BCJNGGhAjgAAAA"}, "expected a packed numpy array"),
        ({"obs": "BCJNGG!"}, "expected a packed numpy array"),
        ({"obs": "plain text"}, "expected a list"),
        ({"obs": 3.5}, "expected a list"),
        ({"type": "MultiAgentBatch", "policy_batches": [1]}, "one batch per policy"),
    ],
)
def test_what_is_no_batch_is_refused_by_name(
    tmp_path: Path, columns: dict[str, object], message: str
) -> None:
    log = tmp_path / "log.json"
    log.write_text(_batch(**{"actions": [0], "rewards": [1.0], "dones": [True], **columns}))
    with pytest.raises(SourceInvalidError, match=message):
        list(_open(log))


@pytest.mark.parametrize("name", ["multi_agent.json", "multi_agent_packed.json"])
def test_multi_agent_batches_keep_agent_policy_and_tick(name: str) -> None:
    first, second, third = _episodes(_open(_FIXTURES / name))
    assert [e.source_episode_id for e in (first, second, third)] == ["77"] * 3
    assert [e.agent_id for e in (first, second, third)] == ["0", "1", "2"]
    assert [set(e.policies) for e in (first, second, third)] == [{"mover"}, {"mover"}, {"watcher"}]
    assert second.rewards.tolist() == [10.0 + tick for tick in range(8)]
    assert second.env_steps.tolist() == list(range(8))
    # The watcher acts at every other tick: no gap in its own steps.
    assert third.env_steps.tolist() == [0, 2, 4, 6]
    assert third.rewards.tolist() == [20.0, 22.0, 24.0, 26.0]
    assert third.observations.tolist() == [[2, tick] for tick in (0, 2, 4, 6)]
    assert third.final_observation.tolist() == [2, 8]
    assert all(e.terminated and not e.truncated for e in (first, second, third))
    np.testing.assert_allclose(np.exp(first.behavior_log_probs), 0.5, rtol=1e-6)


def test_ticks_put_batches_in_order(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    lines = (_FIXTURES / "multi_agent.json").read_text().splitlines(keepends=True)
    log.write_text("".join(reversed(lines)))
    for found, expected in zip(
        sorted(_episodes(_open(log)), key=lambda e: e.agent_id),
        _episodes(_open(_FIXTURES / "multi_agent.json")),
        strict=True,
    ):
        assert found.rewards.tolist() == expected.rewards.tolist()
        assert found.env_steps.tolist() == expected.env_steps.tolist()


def test_sample_batches_may_stand_beside_multi_agent_ones(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    batch = {"obs": [[0.0]], "actions": [0], "rewards": [1.0], "dones": [True]}
    two = {"mover": {"eps_id": [1], **batch}}
    log.write_text(
        _batch(type="MultiAgentBatch", count=1, policy_batches=two) + _batch(eps_id=[2], **batch)
    )
    episodes = _episodes(_open(log))
    assert {e.source_episode_id: e.policies[0] for e in episodes} == {"1": "mover", "2": None}


def test_policies_of_different_spaces_are_refused_by_name(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    rest = {"eps_id": [1], "actions": [0], "rewards": [1.0], "dones": [True]}
    batches = {"small": {"obs": [[0.0]], **rest}, "large": {"obs": [[0.0, 1.0]], **rest}}
    log.write_text(_batch(type="MultiAgentBatch", count=2, policy_batches=batches))
    with pytest.raises(
        SourceInvalidError, match=r"obs of policy 'large' are floats \[2\], those of policy"
    ):
        list(_open(log))


def _varying(path: Path, **cells: list[list[float]]) -> Path:
    """A log of three steps some of whose columns are of tensors that may vary in shape."""
    kind = pa.struct([("data", pa.list_(pa.float32())), ("shape", pa.list_(pa.int64()))])
    metadata = {"ARROW:extension:name": "ray.data.arrow_variable_shaped_tensor"}
    columns = {
        "actions": [0, 1, 0],
        "rewards": [1.0, 2.0, 3.0],
        "eps_id": [5, 5, 5],
        "terminateds": [False, False, True],
    }
    table = pa.table(columns if "obs" in cells else {"obs": [[0.0], [1.0], [2.0]], **columns})
    for name, values in cells.items():
        structs = [{"data": value, "shape": [len(value)]} for value in values]
        table = table.append_column(
            pa.field(name, kind, metadata=metadata), pa.array(structs, kind)
        )
    pq.write_table(table, path)
    return path


def test_tensors_that_could_vary_in_shape_and_do_not_are_read(tmp_path: Path) -> None:
    log = _varying(tmp_path / "log.parquet", obs=[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    (episode,) = _episodes(_open(log))
    assert episode.observations.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert episode.observations.dtype == np.float32


def test_variable_shaped_tensors_are_refused_by_name_where_they_are_needed(tmp_path: Path) -> None:
    log = _varying(tmp_path / "log.parquet", obs=[[1.0, 2.0], [3.0], [5.0, 6.0]])
    with pytest.raises(
        SourceInvalidError, match=r"column 'obs': found ray\.data\.arrow_variable_shaped"
    ):
        list(_open(log))
    log = _varying(tmp_path / "log.parquet", logits=[[1.0, 2.0], [3.0], [5.0, 6.0]])
    reading = _open(log)
    (episode,) = _episodes(reading)
    assert not episode.extras
    assert "columns of tensors of varying shape, not read: logits" in reading.notes


@pytest.mark.parametrize(
    "infos", [np.array([{"a": 1}, {}], object), [{"lives": 3}, {"lives": 2}], [None, None]]
)
def test_packed_columns_of_objects_are_left_out_and_said_so(tmp_path: Path, infos: Any) -> None:
    columns = {"eps_id": [1, 1], "actions": [0, 1], "rewards": [1.0, 2.0], "dones": [False, True]}
    log = tmp_path / "log.json"
    log.write_text(_batch(obs=_packed(np.eye(2)), infos=_packed(infos), **columns))
    reading = _open(log)
    (episode,) = _episodes(reading)
    assert episode.observations.tolist() == [[1, 0], [0, 1]]
    assert not episode.extras
    assert any("column 'infos' holds" in note and "left out" in note for note in reading.notes)


def test_what_would_be_run_is_refused_in_columns_that_nobody_needs(tmp_path: Path) -> None:
    columns = {"eps_id": [1], "actions": [0], "rewards": [1.0], "dones": [True]}
    planted = base64.b64encode(lz4.frame.compress(b"cos\nsystem\n(Vtrue\ntR.")).decode()
    log = tmp_path / "log.json"
    log.write_text(_batch(obs=_packed(np.zeros((1, 3))), infos=planted, **columns))
    with pytest.raises(SourceInvalidError, match=r"'infos'.* names os\.system"):
        list(_open(log))


def test_pickled_object_columns_are_left_out_and_said_so(tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    payload = b"cos\nsystem\n(Vtouch " + str(witness).encode() + b"\ntR."
    metadata = {"ARROW:extension:name": "ray.data.arrow_pickled_object"}
    columns = {"obs": [[0.0]], "actions": [0], "rewards": [1.0], "eps_id": [1], "dones": [True]}
    table = pa.table(columns).append_column(
        pa.field("infos", pa.large_binary(), metadata=metadata),
        pa.array([payload], pa.large_binary()),
    )
    pq.write_table(table, tmp_path / "log.parquet")
    reading = _open(tmp_path / "log.parquet")
    (episode,) = _episodes(reading)
    assert "infos" not in episode.extras
    assert "columns of pickled Python objects, not read: infos" in reading.notes
    assert not witness.exists()


def test_batches_in_parquet_are_laid_out_too(tmp_path: Path) -> None:
    table = pa.table(
        {
            "obs": [[[0.0], [1.0]], [[5.0]]],
            "actions": [[0, 1], [1]],
            "rewards": [[1.0, 2.0], [3.0]],
            "dones": [[False, True], [True]],
            "eps_id": [[1, 1], [2]],
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    first, second = _episodes(_open(tmp_path / "log.parquet"))
    assert first.rewards.tolist() == [1.0, 2.0]
    assert second.observations.tolist() == [[5.0]]


@pytest.mark.parametrize("name", ["multi_agent_packed.json", "packed.parquet", "columns.parquet"])
def test_torn_and_flipped_files_are_refused_or_read(name: str, tmp_path: Path) -> None:
    whole = (_FIXTURES / name).read_bytes()
    rng = np.random.default_rng(3)
    for trial in range(40):
        data = bytearray(whole)
        if trial % 4 == 0:
            data = data[: int(rng.integers(1, len(data)))]
        else:
            for at in rng.integers(len(data), size=trial % 4):
                data[at] = int(rng.integers(256))
        log = tmp_path / f"{trial}-{name}"
        log.write_bytes(bytes(data))
        source = find_source([log])
        with suppress(SourceInvalidError):
            list(RllibFormat().read(source.files, ReadOptions()))


def test_shifted_next_observations_are_named(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    log.write_text(
        _batch(
            eps_id=[1, 1],
            obs=[[0.0], [1.0]],
            new_obs=[[0.5], [2.0]],
            actions=[0, 1],
            rewards=[1.0, 1.0],
            dones=[False, True],
        )
    )
    (rejected,) = list(_open(log))
    assert isinstance(rejected, RejectedEpisode)
    assert [f.check for f in rejected.findings] == ["next_observation"]
    assert "log.json row 0" in rejected.findings[0].message
