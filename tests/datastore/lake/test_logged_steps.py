"""Steps of episodes side by side, against the episodes that were appended."""

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import QueryError, QueryRefusedError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.logged_steps import read_logged_steps
from replaylake.datastore.maintenance.compact import compact


def episode(name, num, rng, *, agent="", first=0, end=True, masks=False, final=True):
    observations = rng.standard_normal((num, 3)).astype(np.float32)
    return Episode(
        name,
        observations=observations,
        actions=rng.integers(0, 3, num),
        rewards=rng.standard_normal(num),
        terminated=end,
        final_observation=observations[-1] + 1 if final else None,
        agent_id=agent,
        first_step=first,
        behavior_log_probs=np.log(rng.uniform(0.1, 1, num)).astype(np.float32),
        action_masks=np.ones((num, 3), bool) if masks else None,
        extras={"value": rng.standard_normal(num)},
    )


@pytest.fixture
def lake(tmp_path):
    return open_lake(tmp_path / "lake", create=True)


def test_rows_are_those_of_the_episodes_in_order(lake):
    rng = np.random.default_rng(0)
    given = [episode(f"e/{name}", num, rng) for name, num in (("b", 3), ("a", 1), ("c", 4))]
    for one in given:
        lake.dataset("log").append([one])
    steps = read_logged_steps(lake.snapshot("log"), columns={"target-prob": "value * 2"})
    by_name = sorted(given, key=lambda one: one.episode_id)
    assert steps.episode_ids.to_pylist() == ["e/a", "e/b", "e/c"]
    assert steps.offsets.tolist() == [0, 1, 4, 8]
    assert steps.episode_of.tolist() == [0, 1, 1, 1, 2, 2, 2, 2]
    assert steps.step_numbers.tolist() == [0, 0, 1, 2, 0, 1, 2, 3]
    for name, field in (
        ("observations", "observations"),
        ("actions", "actions"),
        ("rewards", "rewards"),
        ("behavior_log_probs", "behavior_log_probs"),
    ):
        expected = np.concatenate([getattr(one, field) for one in by_name])
        np.testing.assert_array_equal(getattr(steps, name), expected)
    np.testing.assert_array_equal(
        steps.final_observations, [one.final_observation for one in by_name]
    )
    expected = np.concatenate([one.extras["value"] for one in by_name]) * 2
    np.testing.assert_array_equal(steps.columns["target-prob"], expected)
    assert steps.terminated.all()
    assert not steps.truncated.any()
    assert steps.action_masks is None


def test_pieces_in_any_order_and_compaction_change_nothing(lake):
    rng = np.random.default_rng(1)
    whole = episode("e/x", 6, rng)
    for part in (slice(3, 6), slice(0, 3)):
        lake.dataset("log").append(
            [
                Episode(
                    "e/x",
                    observations=whole.observations[part],
                    actions=whole.actions[part],
                    rewards=whole.rewards[part],
                    terminated=part.stop == 6,
                    first_step=part.start,
                )
            ]
        )
        lake.dataset("log").append([episode(f"e/{part.start}", 2, rng)])
    before = read_logged_steps(lake.snapshot("log"))
    np.testing.assert_array_equal(before.rewards[-6:], whole.rewards)
    assert before.has_final.tolist() == [True, True, False]
    assert len(before.final_observations) == 2
    assert len(lake.snapshot("log").files) == 4
    compact(lake, "log")
    assert len(lake.snapshot("log").files) == 1
    after = read_logged_steps(lake.snapshot("log"))
    assert after.episode_ids == before.episode_ids
    np.testing.assert_array_equal(after.observations, before.observations)
    np.testing.assert_array_equal(after.behavior_log_probs, before.behavior_log_probs)


def test_agents_are_episodes_of_their_own(lake):
    rng = np.random.default_rng(2)
    given = [episode("e/x", 2, rng, agent=agent) for agent in ("red", "blue")]
    lake.dataset("log").append([*given, episode("e/y", 1, rng, agent="blue")])
    steps = read_logged_steps(lake.snapshot("log"))
    assert list(zip(steps.episode_ids.to_pylist(), steps.agent_ids.to_pylist(), strict=True)) == [
        ("e/x", "blue"),
        ("e/x", "red"),
        ("e/y", "blue"),
    ]
    np.testing.assert_array_equal(steps.rewards[:2], given[1].rewards)
    red = read_logged_steps(lake.snapshot("log"), "agent_id = 'red'")
    assert red.num_episodes == 1
    np.testing.assert_array_equal(red.rewards, given[0].rewards)


def test_where_and_reward(lake):
    rng = np.random.default_rng(3)
    given = [episode(f"e/{i}", i + 1, rng, end=i != 2) for i in range(4)]
    lake.dataset("log").append(given)
    snapshot = lake.snapshot("log")
    steps = read_logged_steps(snapshot, "num_steps >= 2 AND complete", reward="-reward")
    assert steps.episode_ids.to_pylist() == ["e/1", "e/3"]
    np.testing.assert_array_equal(
        steps.rewards, -np.concatenate([given[1].rewards, given[3].rewards])
    )
    nothing = read_logged_steps(snapshot, "num_steps > 9")
    assert (nothing.num_episodes, nothing.num_steps) == (0, 0)


def test_only_is_reading_less(lake):
    rng = np.random.default_rng(4)
    given = [episode(f"e/{i}", i + 1, rng, masks=True, final=i % 2 == 0) for i in range(5)]
    lake.dataset("log").append(given)
    snapshot = lake.snapshot("log")
    columns = {"target-prob": "value"}
    every = read_logged_steps(snapshot, columns=columns)
    odd = read_logged_steps(snapshot, "num_steps % 2 = 1", columns=columns)
    found = every.select(every.lengths % 2 == 1)
    assert found.episode_ids == odd.episode_ids
    for name in (
        "offsets",
        "step_numbers",
        "observations",
        "final_observations",
        "has_final",
        "actions",
        "rewards",
        "behavior_log_probs",
        "action_masks",
        "terminated",
    ):
        np.testing.assert_array_equal(getattr(found, name), getattr(odd, name))
    np.testing.assert_array_equal(found.columns["target-prob"], odd.columns["target-prob"])


def test_gaps_and_unknown_values(lake):
    rng = np.random.default_rng(5)
    lake.dataset("log").append([episode("e/whole", 3, rng, first=1)])
    for first in (0, 3):
        lake.dataset("log").append([episode("e/gap", 2, rng, first=first, end=first == 3)])
    unknown = Episode(
        "e/unknown",
        observations=np.zeros((2, 3), np.float32),
        actions=np.zeros(2, np.int64),
        rewards=np.zeros(2),
        terminated=True,
    )
    lake.dataset("log").append([unknown])
    steps = read_logged_steps(lake.snapshot("log"))
    assert steps.episode_ids.to_pylist() == ["e/gap", "e/unknown", "e/whole"]
    assert steps.has_gaps().tolist() == [True, False, False]
    assert steps.any_step(np.isnan(steps.behavior_log_probs)).tolist() == [False, True, False]


def test_lists_are_matrices(lake):
    rng = np.random.default_rng(6)
    lake.dataset("log").append([episode("e/b", 2, rng), episode("e/a", 1, rng)])
    snapshot = lake.snapshot("log")
    steps = read_logged_steps(snapshot, columns={"target-prob": "[action, step, 0.5]"})
    expected = np.stack([steps.actions, steps.step_numbers, np.full(3, 0.5)], axis=1)
    np.testing.assert_array_equal(steps.columns["target-prob"], expected)
    some = "CASE WHEN step = 0 THEN [1.0, 2.0] END"
    found = read_logged_steps(snapshot, columns={"target-prob": some}).columns["target-prob"]
    np.testing.assert_array_equal(found, [[1, 2], [1, 2], [np.nan, np.nan]])
    uneven = "CASE WHEN step = 0 THEN [1.0] ELSE [0.5, 0.5] END"
    with pytest.raises(QueryRefusedError, match="lists of"):
        read_logged_steps(snapshot, columns={"target-prob": uneven})


def test_sql_that_is_refused(lake):
    lake.dataset("log").append([episode("e/a", 1, np.random.default_rng(7))])
    snapshot = lake.snapshot("log")
    with pytest.raises(QueryRefusedError, match="random"):
        read_logged_steps(snapshot, columns={"target-prob": "random()"})
    with pytest.raises(QueryError, match="target-prob 'absent'"):
        read_logged_steps(snapshot, columns={"target-prob": "absent"})
    with pytest.raises(QueryError, match="where"):
        read_logged_steps(snapshot, "absent > 1")
