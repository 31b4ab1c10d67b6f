from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, Text
from replaylake.datastore.errors import EmptyReplayError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.profile.profile import compute_profile


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _episode(number: int, policy: str | None = None) -> Episode:
    rng = np.random.default_rng(number)
    num = 10 + number
    return Episode(
        f"test/{number}",
        observations=rng.normal(size=(num, 3)).astype(np.float32),
        actions=np.arange(num) % 2,
        rewards=np.where(np.arange(num) == num - 1, 1.0, 0.0),
        terminated=number % 2 == 0,
        truncated=number % 2 == 1,
        behavior_log_probs=np.log(np.full(num, 0.25, np.float32)),
        policies=None if policy is None else np.full(num, policy, dtype=object),
        policy_versions=None if policy is None else np.full(num, number),
    )


def test_a_profile_counts_what_is_there(lake: Lake) -> None:
    dataset = lake.dataset("log")
    dataset.create(Box((3,), "float32", -1.0, 1.0), Discrete(4))
    episodes = [_episode(i, "old" if i < 3 else "new") for i in range(6)]
    dataset.append(episodes[:3])
    dataset.append(episodes[3:])
    found = compute_profile(dataset.snapshot(), dataset.history())
    observed = np.concatenate([e.observations for e in episodes])
    assert found.summary["num_steps"] == found.num_sampled == len(observed) == 75
    assert [one.name for one in found.observations] == [f"observation[{i}]" for i in range(3)]
    for i, one in enumerate(found.observations):
        assert one.maximum == observed[:, i].max()
        assert one.mean == pytest.approx(observed[:, i].mean(), abs=1e-6)
        assert one.num_outside == (np.abs(observed[:, i]) > 1).sum()
        assert (one.low, one.high) == (-1.0, 1.0)
    (action,) = found.action_counts
    assert action.counts == (39, 36, 0, 0)
    assert found.coverage.action_share == 0.5
    # Two of four actions, nearly as often: half of log 4.
    assert found.coverage.action_entropy == pytest.approx(0.5, abs=0.01)
    assert found.reward.share_zero == 69 / 75
    assert found.returns is not None
    assert sum(found.returns.counts) == 6
    assert found.lengths is not None
    assert found.lengths.edges[0] == 9.5
    assert found.propensities is not None
    assert found.propensities.mean == pytest.approx(0.25)
    assert found.propensities.high == 1.0
    versions = {(one.policy, one.version): one for one in found.policies}
    assert {key: one.num_steps for key, one in versions.items()} == {
        ("old" if i < 3 else "new", i): 10 + i for i in range(6)
    }
    # In the order of rows: the first wrote in the beginning only.
    assert np.flatnonzero(versions["old", 0].by_period).tolist()[0] == 0
    assert np.flatnonzero(versions["new", 5].by_period).tolist()[-1] == 39
    assert not found.by_timestamp
    assert found.missing["timestamp"] == 1.0
    assert found.missing["reward"] == 0.0
    assert "final_observation" not in found.missing
    assert found.coverage.observation_map is not None
    assert sum(map(sum, found.coverage.observation_map)) == 75
    json.dumps(found.to_json(), allow_nan=False)


def test_time_orders_policies_where_it_is_known(lake: Lake) -> None:
    dataset = lake.dataset("log")
    for number, start in ((0, 1_000_000), (1, 0)):
        episode = _episode(number, "p")
        times = start + np.arange(len(episode)) * 1_000
        dataset.append([Episode(**{**vars(episode), "timestamps": times})])
    found = compute_profile(dataset.snapshot())
    assert found.by_timestamp
    by_version = {one.version: one for one in found.policies}
    assert np.flatnonzero(by_version[1].by_period).tolist()[0] == 0
    assert np.flatnonzero(by_version[0].by_period).tolist()[-1] == 39


def test_spaces_of_every_kind_are_profiled(lake: Lake) -> None:
    dataset = lake.dataset("rich")
    dataset.create(
        Dict(
            {
                "camera": Box((4, 4, 3), "uint8", 0, 255),
                "note": Text(),
                "cell": Discrete(5),
                "wide": Box((100,), "float64"),
            }
        ),
        Box((2,), "float32", -2.0, 2.0),
    )
    rng = np.random.default_rng(0)
    dataset.append(
        [
            Episode(
                "a/0",
                observations={
                    "camera": rng.integers(0, 255, (20, 4, 4, 3)).astype(np.uint8),
                    "note": np.array(["x"] * 20, dtype=object),
                    "cell": np.arange(20) % 3,
                    "wide": rng.normal(size=(20, 100)),
                },
                actions=rng.uniform(-0.1, 0.1, (20, 2)).astype(np.float32),
                rewards=np.zeros(20),
            )
        ]
    )
    found = compute_profile(dataset.snapshot())
    assert found.left_out == (
        "observation.camera (frames)",
        "observation.note (text)",
        "observation.wide (37 of its 100 numbers)",
    )
    assert [one.counts for one in found.observation_counts] == [(7, 7, 6, 0, 0)]
    assert found.coverage.state_share == 0.6
    assert len(found.observations) == 64
    # Of [-2, 2] two of 20 bins: those on both sides of zero.
    assert found.coverage.action_share == pytest.approx(0.1)
    assert found.coverage.action_entropy is None
    assert found.propensities is None
    assert found.reward.share_zero == 1.0


def test_what_ingests_said_is_summed_up_once_each(lake: Lake) -> None:
    dataset = lake.dataset("log")
    dataset.create(Box((3,), "float32"), Discrete(2))
    dataset.append([_episode(0)])
    check = {"name": "gap", "outcome": "rejected", "num_rows": 4, "example": "f row 1"}
    history = [
        {"version": 1, "producer": "a", "checks": [{**check, "num_episodes": 2}]},
        {"version": 2, "producer": "a", "checks": [{**check, "num_episodes": 2}]},
        {"version": 2, "producer": "b", "checks": [{**check, "num_episodes": 3}]},
        {"version": 9, "producer": "c", "checks": [{**check, "num_episodes": 5}]},
        {"version": 1, "producer": "d"},
    ]
    dataset.append([_episode(1)])
    (both,) = compute_profile(dataset.snapshot(), history).checks
    assert (both.check, both.num_episodes, both.num_rows, both.example) == ("gap", 5, 8, "f row 1")


def test_an_empty_dataset_has_no_profile(lake: Lake) -> None:
    dataset = lake.dataset("log")
    dataset.create(Box((3,)), Discrete(2))
    with pytest.raises(EmptyReplayError):
        compute_profile(dataset.snapshot())
