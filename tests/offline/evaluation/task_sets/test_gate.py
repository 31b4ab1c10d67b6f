"""The gate by stored samples: who passes, and what a refusal says of how many more would do."""

import numpy as np
import pyarrow as pa
import pytest

import replaylake as rl
from replaylake.datastore.episodes.spaces import Text
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.registry import PolicyRef
from replaylake.offline.evaluation.task_sets.gate import TaskGateRequest, evaluate_task_gate
from replaylake.offline.evaluation.task_sets.task_set import TaskSetRequest

REQUEST = TaskGateRequest(TaskSetRequest("math"))


@pytest.fixture
def gate(tmp_path):
    """Returns a function of the outcomes of each version, by task, that evaluates the gate."""
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("math").create(
        Text(), Text(), rewards_optional=True, extras={"group_id": pa.string()}
    )

    def evaluate(candidate, champion=None, request=REQUEST, **options):
        episodes = [
            rl.Episode(
                f"{task}#{version}.{number}",
                observations=np.array(["?"], object),
                actions=np.array(["!"], object),
                rewards=np.array([float(reward)]),
                terminated=True,
                policies=["agent"],
                policy_versions=np.array([version]),
                extras={"group_id": [f"t{task:03d}"]},
            )
            for version, table in ((1, champion or []), (2, candidate))
            for task, rewards in enumerate(table)
            for number, reward in enumerate(rewards)
        ]
        lake.dataset("math").append(episodes)
        first, second = (PolicyRef("agent", v, "", "version", None) for v in (1, 2))
        against = None if champion is None else first
        return evaluate_task_gate(lake, second, against, request, **options)

    return evaluate


def test_a_better_candidate_passes(gate):
    result = gate([[1, 0, 1, 1]] * 24, [[0, 1, 0, 0]] * 24)
    assert result.passed
    (reason,) = result.reasons
    assert reason.startswith("Better than the champion: the difference of pass@1 is 0.5 (")
    assert reason.endswith("over 24 tasks, above 0.")
    record = result.to_record()
    assert (record["version"], record["measure"], record["against"]) == (
        1,
        "pass@1",
        "the champion",
    )
    assert record["comparisons"][0]["candidate"] == pytest.approx(0.75)
    assert record["comparisons"][0]["against"] == pytest.approx(0.25)
    assert (record["candidate"]["version"], record["champion"]["version"]) == (2, 1)
    reports = result.to_json()["reports"]
    assert [one["policy_version"] for one in reports] == [2, 1]
    assert reports[0]["against"] == "agent:1"


def test_a_refusal_says_how_many_more_would_do(gate):
    # Differences of 1, -1 and 0 in 8, 4 and 28 tasks of one sample: mean 0.1.
    candidate = [[1]] * 8 + [[0]] * 32
    champion = [[0]] * 8 + [[1]] * 4 + [[0]] * 28
    result = gate(candidate, champion)
    assert not result.passed
    mean, z = 4 / 42, 1.959963985
    low = mean - z * ((14 / 42 - mean**2) / 42) ** 0.5
    tasks = 40 * ((0.1 - low) / 0.1) ** 2
    (reason,) = result.reasons
    assert "is 0.1 (" in reason
    assert "its lower end is not above 0." in reason
    # Two digits, rounded up; nothing is known of samples of one task.
    assert reason.endswith(f"About {-(-tasks // 10) * 10:.0f} such tasks would do.")


def test_a_refusal_says_how_many_samples_would_do(gate):
    # Each task alike: the difference varies as samples of it do alone.
    rng = np.random.default_rng(1)
    candidate, champion = rng.binomial(1, 0.55, (30, 4)), rng.binomial(1, 0.45, (30, 4))
    (reason,) = gate(candidate.tolist(), champion.tolist()).reasons
    assert "such tasks would do, or " in reason
    assert reason.endswith("times the samples of each.")


def test_a_worse_candidate_needs_no_more_tasks(gate):
    (reason,) = gate([[0, 0]] * 30, [[0, 1]] * 30).reasons
    assert reason.endswith("More tasks or samples of this kind would not change that.")


def test_the_margin_is_in_units_of_the_measure(gate):
    tables = [[1, 0, 1, 1]] * 24, [[0, 1, 0, 0]] * 24
    result = gate(*tables, margin=0.49)
    assert not result.passed
    assert "not above 0.49" in result.reasons[0]


def test_a_loss_within_a_negative_margin_passes(gate):
    assert gate([[1, 0, 0]] * 40, [[1, 0, 0]] * 40, margin=-0.1).passed


def test_few_tasks_do_not_pass(gate):
    result = gate([[1, 1]] * 19, [[0, 0]] * 19)
    assert not result.passed
    assert result.reasons[0].startswith("19 tasks are compared, 20 needed")


def test_without_a_champion_the_measure_itself_is_compared(gate):
    result = gate([[1, 0]] * 15 + [[1, 1]] * 15, request=TaskGateRequest(REQUEST.samples, "pass@2"))
    assert result.passed
    assert result.reasons[0].startswith("pass@2 is 1 (")
    assert result.to_record()["against"] == "the margin"
    assert result.to_record()["champion"] is None


def test_the_mean_reward_may_decide(gate):
    request = TaskGateRequest(TaskSetRequest("math", success="true"), "mean reward")
    result = gate([[0.5, 0.7]] * 24, [[0.2, 0.1]] * 24, request=request)
    assert result.passed
    assert result.comparison.difference == pytest.approx(0.45)


def test_rewards_that_are_all_alike_cannot_be_compared(gate):
    request = TaskGateRequest(REQUEST.samples, "mean reward")
    (reason,) = gate([[1, 1]] * 24, [[1, 1]] * 24, request=request).reasons
    assert reason.startswith("gate: agent:1 has no mean reward")


def test_samples_that_are_missing_are_an_answer(gate):
    result = gate([[1, 1]] * 24, [])
    assert not result.passed
    assert "found no sample of agent:1" in result.reasons[0]
    assert result.to_record()["comparisons"] == []
    assert result.to_json()["reports"] == []


def test_a_smaller_alpha_asks_for_more(gate):
    tables = [[1]] * 12 + [[0]] * 28, [[0]] * 8 + [[1]] * 6 + [[0]] * 26
    wide = gate(*tables, alpha=0.001)
    assert wide.comparison.low < wide.comparison.difference
    with pytest.raises(ConfigInvalidError, match=r"alpha: found 0\.5"):
        gate(*tables, alpha=0.5)


@pytest.mark.parametrize("measure", ["pass@0", "pass", "reward", "pass@1.5"])
def test_an_unknown_measure_is_refused(measure):
    with pytest.raises(ConfigInvalidError, match="expected pass@K"):
        TaskGateRequest(TaskSetRequest("math"), measure)


NAN = float("nan")


def test_a_candidate_that_fails_instead_of_answering_wrong_does_not_pass(gate):
    # Both solve one half; the candidate's other half has no reward.
    result = gate([[1, NAN, 1, NAN]] * 24, [[1, 0, 1, 0]] * 24)
    assert not result.passed
    (reason,) = result.reasons
    assert reason.startswith("samples have an unknown reward, as rollouts that failed do: ")
    assert "48 of 96 of agent:2. Had those of agent:2 failed, the difference" in reason
    assert "would be 0 (" in reason
    assert result.report.policies[1].verdict == "weak"
    assert "48 of 96 samples have an unknown reward" in result.report.policies[1].reason


def test_tasks_whose_samples_all_failed_are_counted(gate):
    result = gate([[1, 1]] * 24 + [[NAN, NAN]] * 24, [[1, 0]] * 24 + [[1, 1]] * 24)
    # The candidate's mean is 0.5, the champion's 0.75.
    (reason,) = result.reasons
    assert "would be -0.25 (" in reason


def test_unknown_rewards_of_the_champion_are_taken_as_passed(gate):
    result = gate([[1, 0]] * 24, [[0, NAN, NAN, NAN]] * 24)
    (reason,) = result.reasons
    assert "72 of 96 of agent:1. Had those of agent:1 passed" in reason
    assert "would be -0.25 (" in reason


def test_few_unknown_rewards_do_not_refuse_a_better_candidate(gate):
    assert gate([[1, 1, 1, NAN]] + [[1] * 4] * 23, [[0, 0, 0, 0]] * 24).passed


def test_the_mean_reward_takes_the_lowest_of_both_for_unknown_rewards(gate):
    request = TaskGateRequest(TaskSetRequest("math"), "mean reward")
    result = gate([[2, NAN]] * 24, [[1, 0]] * 24, request)
    # (2 + 0) / 2 - 1 / 2, in a range of 2.
    (reason,) = result.reasons
    assert reason.startswith("Better than the champion")
    (reason,) = gate([[1, NAN]] * 24, None, request, margin=0.5).reasons
    assert "agent:2" in reason


def test_with_a_condition_of_success_unknown_rewards_are_not_passed(gate):
    request = TaskGateRequest(TaskSetRequest("math", success="return > 0"))
    result = gate([[1, NAN, 1, NAN]] * 24, [[1, 0, 1, 0]] * 24, request)
    assert result.comparison.difference == 0
    assert not result.passed
