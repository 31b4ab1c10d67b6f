"""Evaluation of policies on stored samples of tasks."""

import numpy as np
import pyarrow as pa
import pytest

import replaylake as rl
from replaylake.datastore.episodes.spaces import Text
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EmptyReplayError,
    NotFoundError,
    QueryError,
)
from replaylake.datastore.lake.lake import open_lake
from replaylake.offline.evaluation.task_sets.task_set import (
    SampledPolicy,
    TaskSetRequest,
    evaluate_task_set,
    select_sampled_policy,
)

ONE, TWO = SampledPolicy("agent", 1), SampledPolicy("agent", 2)


def sample(task, number, reward, version, *, tokens=None, policy="agent", turns=1):
    """An episode whose last turn is rewarded; tokens: ids of the prompt and of the answer."""
    extras = {"group_id": [task] * turns}
    if tokens is not None:
        extras["observation_tokens"] = [[1] * tokens[0]] * turns
        extras["action_tokens"] = [[2] * tokens[1]] * turns
        extras["action_log_probs"] = [[-0.5] * tokens[1]] * turns
    versions = version if isinstance(version, list) else [version] * turns
    return rl.Episode(
        f"{task}#{policy}{number}",
        observations=np.array(["?"] * turns, object),
        actions=np.array(["!"] * turns, object),
        rewards=np.array([0.0] * (turns - 1) + [np.nan if reward is None else reward]),
        terminated=True,
        policies=[policy] * turns,
        policy_versions=np.array(versions),
        extras=extras,
    )


def outcomes(version, table, **options):
    """Samples of tasks: by task, the rewards."""
    return [
        sample(task, f"{version}.{number}", reward, version, **options)
        for task, rewards in table.items()
        for number, reward in enumerate(rewards)
    ]


@pytest.fixture
def lake(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    episodes = [
        *outcomes(1, {"a": [1, 0, 0, 0], "b": [0, 0, 0, 0], "c": [1, 1, 0, 0]}, tokens=(3, 4)),
        *outcomes(2, {"a": [1, 1], "b": [0, 1], "d": [1, 1]}, tokens=(3, 2)),
    ]
    lake.dataset("math").append(episodes)
    return lake


def test_pass_at_k_tokens_and_the_paired_difference_by_hand(lake):
    report = evaluate_task_set(lake, [ONE, TWO], TaskSetRequest("math"))
    first, second = report.policies
    by_name = {one.name: one for one in first.measures}
    # The fewest samples of a task are two.
    assert list(by_name) == ["pass@1", "pass@2", "mean reward"]
    assert by_name["pass@1"].estimate.value == pytest.approx((1 / 4 + 0 + 2 / 4) / 3)
    # Of C(4, 2) = 6 pairs, 3 and 1 have no success.
    assert by_name["pass@2"].estimate.value == pytest.approx((3 / 6 + 0 + 5 / 6) / 3)
    assert by_name["pass@1"].difference is None
    assert by_name["mean reward"].estimate == by_name["pass@1"].estimate
    assert first.samples.tokens.prompt == 3
    assert first.samples.tokens.completion == 4
    assert first.samples.tokens.completion_per_success == pytest.approx(12 * 4 / 3)
    # a and b are common to both: 1 - 1/4 and 1/2 - 0.
    difference = second.measures[0].difference
    assert (difference.value, difference.num_tasks) == (pytest.approx((0.75 + 0.5) / 2), 2)
    assert difference.low < difference.value
    assert second.against == "agent:1"
    assert (report.dataset, report.version) == ("math", 1)


def test_few_tasks_are_weak_and_so_are_few_that_pass(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    ordinary = {f"t{i}": [i % 2, 0] for i in range(20)}
    rare = {f"t{i}": [int(i == 0), 0] for i in range(20)}
    lake.dataset("math").append([*outcomes(1, ordinary), *outcomes(2, rare)])
    one, two = evaluate_task_set(lake, [ONE, TWO], TaskSetRequest("math")).policies
    assert (one.verdict, two.verdict) == ("supported", "weak")
    assert two.reason.startswith("An effective 1.0 of 20 tasks bring the successes (3 needed)")
    some = TaskSetRequest("math", where="group_id < 't19'")
    (fewer,) = evaluate_task_set(lake, [ONE], some).policies
    assert fewer.verdict == "weak"
    assert fewer.reason.startswith("11 tasks are few")


def test_success_and_task_may_be_anything_that_sql_says(lake):
    lake.dataset("math").append(
        [sample("x", i, 0.3 * i, 3, turns=2, tokens=(1, 1)) for i in range(4)]
    )
    three = SampledPolicy("agent", 3)
    report = evaluate_task_set(lake, [three], TaskSetRequest("math", success="return > 0.5"))
    measures = {one.name: one.estimate.value for one in report.policies[0].measures}
    assert list(measures) == ["pass@1", "pass@2", "pass@4", "mean reward"]
    assert measures["pass@1"] == pytest.approx(0.5)
    assert measures["mean reward"] == pytest.approx(0.45)
    # Each turn's tokens count once.
    assert report.policies[0].samples.tokens.completion == 2
    request = TaskSetRequest("math", task="left(episode_id, 1)", success="any(reward > 0.2)")
    (again,) = evaluate_task_set(lake, [three], request).policies
    assert again.samples.tasks == ("x",)
    assert again.samples.num_passed.tolist() == [3]


def test_samples_of_a_condition_need_no_version(lake):
    rest = SampledPolicy(label="others", where="group_id <> 'b' and return < 2")
    report = evaluate_task_set(lake, [rest, ONE], TaskSetRequest("math", ks=(1,)))
    assert report.policies[0].samples.num_samples.tolist() == [6, 4, 2]
    assert report.policies[0].to_json()["label"] == "others"
    assert report.policies[1].against == "others"


def test_samples_that_do_not_count_are_counted(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("math").create(
        Text(), Text(), rewards_optional=True, extras={"group_id": pa.string()}
    )
    lake.dataset("math").append(
        [
            *outcomes(1, {"a": [1, 0, None]}),
            sample(None, "x", 1.0, 1),
            sample("a", "mixed", 1.0, [1, 2], turns=2),
        ]
    )
    (one,) = evaluate_task_set(lake, [ONE], TaskSetRequest("math")).policies
    assert one.samples.left_out == {
        "by several versions": 1,
        "without a task": 1,
        "with an unknown reward": 1,
    }
    assert one.samples.num_samples.tolist() == [2]
    assert one.samples.tokens is None
    # What counts as success needs no reward.
    (other,) = evaluate_task_set(lake, [ONE], TaskSetRequest("math", success="true")).policies
    assert other.samples.num_samples.tolist() == [3]
    assert [measure.name for measure in other.measures] == ["pass@1", "pass@2", "pass@3"]


def test_tasks_with_too_few_samples_are_left_out_of_a_requested_k(lake):
    lake.dataset("math").append(outcomes(4, {"a": [1, 0, 0], "b": [1]}, tokens=(1, 1)))
    four = SampledPolicy("agent", 4)
    (one,) = evaluate_task_set(lake, [four], TaskSetRequest("math", ks=(3, 1))).policies
    assert [(m.name, m.estimate.num_tasks) for m in one.measures[:2]] == [
        ("pass@1", 2),
        ("pass@3", 1),
    ]
    with pytest.raises(EmptyReplayError, match="pass@9 of agent:4: found at most 3 samples"):
        evaluate_task_set(lake, [four], TaskSetRequest("math", ks=(9,)))


def test_policies_without_a_common_task_are_refused(lake):
    lake.dataset("math").append(outcomes(5, {"z": [1, 0]}, tokens=(1, 1)))
    with pytest.raises(EmptyReplayError, match="found no task of 1 of agent:5 and 3 of agent:1"):
        evaluate_task_set(lake, [SampledPolicy("agent", 5), ONE][::-1], TaskSetRequest("math"))


@pytest.mark.parametrize(
    ("policies", "request_", "error", "said"),
    [
        ([SampledPolicy("agent", 9)], {}, EmptyReplayError, "expected one of agent:1, agent:2"),
        ([SampledPolicy(label="x", where="false")], {}, EmptyReplayError, "for which false"),
        ([ONE], {"task": "nothing"}, QueryError, "task nothing"),
        ([ONE], {"success": "nothing"}, QueryError, "nothing"),
        ([ONE, ONE], {}, ConfigInvalidError, "agent:1, agent:1"),
        ([], {}, ConfigInvalidError, "found policies none"),
    ],
)
def test_refusals_say_what_was_found(lake, policies, request_, error, said):
    with pytest.raises(error, match=said):
        evaluate_task_set(lake, policies, TaskSetRequest("math", **request_))


def test_a_request_is_checked():
    with pytest.raises(ConfigInvalidError, match="k: found 0"):
        TaskSetRequest("math", ks=(0,))
    with pytest.raises(ConfigInvalidError, match="level: found 1"):
        TaskSetRequest("math", level=1.0)


def test_a_dataset_without_groups_names_the_parameter(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("log").create(Text(), Text())
    episode = sample("a", 0, 1.0, 1)
    episode.extras.clear()
    lake.dataset("log").append([episode])
    with pytest.raises(NotFoundError, match="has no column group_id") as refused:
        evaluate_task_set(lake, [ONE], TaskSetRequest("log"))
    assert refused.value.parameter == "task"


def test_texts_name_policies(lake):
    assert select_sampled_policy(lake, "run:01abc:3") == SampledPolicy("run:01abc", 3)
    assert select_sampled_policy(lake, "base = policy_version = 0") == SampledPolicy(
        label="base", where="policy_version = 0"
    )
    with pytest.raises(NotFoundError, match="agent"):
        select_sampled_policy(lake, "agent")
