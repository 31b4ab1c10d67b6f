from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.episode import Episode
from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.formats.detect import find_format
from replaylake.datastore.formats.format import Reading, ReadOptions, Rejected
from replaylake.datastore.formats.source import find_source

_DATA = Path(__file__).parents[3] / "examples" / "data" / "rllib_cartpole"


def _open(*paths: Path, expected: str = "rllib", **options: object) -> Reading:
    source = find_source(paths)
    found = find_format("auto", source.files)
    assert found.name == expected
    return found.read(source.files, ReadOptions(**options))  # type: ignore[arg-type]


def _episodes(reading: Reading) -> list[Episode]:
    found = list(reading)
    assert not [one for one in found if isinstance(one, Rejected)]
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
    assert "20 of 21 terminated episodes" in notes
    assert "--time-limit 200" in notes


def test_time_limit_makes_the_episodes_of_that_length_truncated() -> None:
    reading = _open(_DATA / "cartpole-v1_large", time_limit=200)
    episodes = _episodes(reading)
    assert {(len(e), e.terminated, e.truncated) for e in episodes} == {
        (200, False, True),
        (137, True, False),
    }
    assert all(e.final_observation is not None for e in episodes)
    assert not any("greatest length" in note for note in reading.notes)


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
    assert isinstance(second, Rejected)
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (_batch(obs="BCJNGGhAjgAAAA", actions=[0], rewards=[1.0], dones=[True]), "packed"),
        (_batch(type="MultiAgentBatch", policy_batches={}), "MultiAgentBatch"),
    ],
)
def test_what_is_not_read_yet_is_refused_by_name(tmp_path: Path, line: str, message: str) -> None:
    log = tmp_path / "log.json"
    log.write_text(line)
    with pytest.raises(SourceInvalid, match=message):
        list(_open(log))


def test_packed_rows_are_refused(tmp_path: Path) -> None:
    row = {"obs": "BCJNGGhAjgAAAA", "eps_id": 1, "actions": 0, "rewards": 1.0, "dones": True}
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(row) + "\n")
    with pytest.raises(SourceInvalid, match="packed"):
        list(_open(log))


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
    assert isinstance(rejected, Rejected)
    assert [f.check for f in rejected.findings] == ["next_observation"]
    assert "log.json row 0" in rejected.findings[0].message
