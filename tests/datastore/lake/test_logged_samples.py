"""Episodes as samples of tasks: their policy, reward, tokens and conditions."""

import numpy as np
import pytest

import replaylake as rl
from replaylake.datastore.errors import NotFoundError, QueryError, QueryRefusedError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.logged_samples import read_logged_samples


@pytest.fixture
def snapshot(tmp_path):
    """a: two turns of two versions; b: two agents; c: a policy without tokens."""
    lake = open_lake(tmp_path / "lake", create=True)

    def episode(name, rewards, versions, *, agent="", tokens=2, policy="p"):
        num = len(rewards)
        return rl.Episode(
            name,
            agent_id=agent,
            observations=np.array(["?"] * num, object),
            actions=np.array(["!"] * num, object),
            rewards=np.array(rewards),
            terminated=True,
            policies=[policy] * num,
            policy_versions=np.array(versions),
            extras={
                "group_id": [None] * (num - 1) + [f"task {name}"],
                "observation_tokens": [[1] * tokens if tokens else None] * num,
                "action_tokens": [[2] * (tokens + 1) if tokens else None] * num,
            },
        )

    lake.dataset("math").append(
        [
            episode("a", [0.0, 1.0], [1, 2]),
            episode("b", [0.5], [3], agent="left"),
            episode("b", [0.25], [3], agent="right", policy="q"),
            episode("c", [2.0], [4], tokens=0),
        ]
    )
    return lake.snapshot("math")


def test_one_row_for_each_episode(snapshot):
    samples = read_logged_samples(snapshot, conditions={"few": "return < 0.5"})
    # The first value that is not NULL.
    assert samples.tasks.tolist() == ["task a", "task b", "task c"]
    assert samples.policies.tolist() == ["p", None, "p"]
    assert samples.versions.tolist()[2] == 4
    assert np.isnan(samples.versions[:2]).all()
    assert samples.first_versions.tolist() == [1, 3, 4]
    assert samples.last_versions.tolist() == [2, 3, 4]
    # All agents of an episode are one sample.
    assert samples.rewards.tolist() == [1.0, 0.75, 2.0]
    assert samples.action_tokens[:2].tolist() == [6, 6]
    assert samples.observation_tokens[:2].tolist() == [4, 4]
    assert np.isnan([samples.action_tokens[2], samples.observation_tokens[2]]).all()
    assert samples.flags["few"].tolist() == [False, True, False]


def test_a_task_may_be_an_expression(snapshot):
    samples = read_logged_samples(snapshot, "policy_version % 2")
    assert samples.tasks.tolist() == ["1", "1", "0"]


@pytest.mark.parametrize(
    ("task", "conditions", "error", "said"),
    [
        ("nothing", {}, QueryError, "task nothing: "),
        ("random()", {}, QueryRefusedError, "random"),
        ("group_id", {"where": "nothing > 1"}, QueryError, "where nothing > 1: "),
    ],
)
def test_what_sql_cannot_say_is_refused(snapshot, task, conditions, error, said):
    with pytest.raises(error, match=said):
        read_logged_samples(snapshot, task, conditions)


def test_without_groups_the_task_has_to_be_named(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("log").append(
        [
            rl.Episode(
                "a",
                observations=np.zeros((1, 2), np.float32),
                actions=np.array([1]),
                rewards=np.array([1.0]),
                terminated=True,
            )
        ]
    )
    with pytest.raises(NotFoundError, match="log has no column group_id"):
        read_logged_samples(lake.snapshot("log"))
    samples = read_logged_samples(lake.snapshot("log"), "action")
    assert samples.tasks.tolist() == ["1"]
    assert samples.action_tokens is None
