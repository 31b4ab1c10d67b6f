"""POST /decisions: decisions taken elsewhere are logged once, and found by their request_id."""

import time

import pytest

from replaylake.datastore.errors import StorageError
from replaylake.datastore.feedback.join import join_feedback

OBSERVATION = [0.0, 0.5, -0.25, 1.0]
DECISION = {
    "request_id": "r1",
    "observation": OBSERVATION,
    "action": 1,
    "log_prob": -0.25,
    "policy": "fallback",
    "version": 7,
    "age_s": 2.5,
}


def read_steps(logged, num):
    """Join once the journal's rows are in the lake, and return the steps."""
    logged.log.close()
    join_feedback(logged.lake, "d", window_s=60)
    steps = logged.lake.sql("select * from d.steps order by source_episode_id, step").to_pylist()
    assert len(steps) == num, steps
    return steps


def test_a_decision_is_a_step_with_its_propensity_version_and_time(logged):
    before = time.time()
    decision = {**DECISION, "action_mask": [False, True], "package_sha256": "ab" * 32}
    answer = logged.post("/decisions", json={"decisions": [decision]})
    assert answer.status_code == 200
    (decision_id,) = answer.json()["decision_ids"]
    report = {"request_id": "r1", "reward": 2.0, "terminated": True}
    assert logged.post("/feedback", json=report).status_code == 202
    (step,) = read_steps(logged, 1)
    assert (step["action"], step["reward"]) == (1, 2.0)
    assert step["behavior_log_prob"] == -0.25
    assert (step["policy"], step["policy_version"]) == ("fallback", 7)
    assert (step["decision_id"], step["request_id"]) == (decision_id, "r1")
    assert step["action_mask"] == [False, True]
    assert before - 2.6 < step["timestamp"].timestamp() < time.time() - 2.4


def test_a_repeat_is_one_step_and_outranks_an_answer_that_was_lost(logged):
    lost = logged.post("/act", json={"observation": OBSERVATION, "request_id": "r1"}).json()
    assert lost["policy"] == "p"
    for age_s in (0.0, 0.0):
        one = {**DECISION, "age_s": age_s}
        assert logged.post("/decisions", json={"decisions": [one]}).status_code == 200
    logged.post("/feedback", json={"request_id": "r1", "reward": 1.0, "terminated": True})
    (step,) = read_steps(logged, 1)
    assert (step["policy"], step["policy_version"]) == ("fallback", 7)


@pytest.mark.parametrize("names", [{}, {"episode_id": "e"}, {"episode_id": "e", "step": 0}])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_answer_that_a_server_logs_late_is_not_the_step(logged, names, is_first):
    """The client gave up, decided itself, and names the request in its report."""
    body = {"observation": OBSERVATION, "request_id": "r1", "deterministic": True, **names}
    if is_first:
        logged.post("/act", json=body)
    decision = {**DECISION, **names, "age_s": 5.0}
    for _ in range(2):
        assert logged.post("/decisions", json={"decisions": [decision]}).status_code == 200
    if not is_first:
        logged.post("/act", json=body)
    logged.post("/feedback", json={"request_id": "r1", "reward": 1.0, "terminated": True})
    (step,) = read_steps(logged, 1)
    assert (step["policy"], step["policy_version"], step["action"]) == ("fallback", 7, 1)
    assert (step["behavior_log_prob"], step["reward"]) == (-0.25, 1.0)
    assert step["decided_by_client"] is True
    receipt = join_feedback(logged.lake, "d", window_s=60)
    assert (receipt.joined, receipt.repeated, receipt.waiting) == (1, 2, 0)


def test_a_decision_that_is_sent_again_after_its_report_is_one_step(logged):
    """A client that is killed between the answer and its note of it sends both again."""
    for number in range(2):
        one = {**DECISION, "age_s": 5.0 - number}
        assert logged.post("/decisions", json={"decisions": [one]}).status_code == 200
        logged.log.decisions.flush()
        logged.post("/feedback", json={"request_id": "r1", "reward": 1.0, "terminated": True})
        logged.log.rewards.flush()
        # A second later, no decision of before can still be on its way.
        receipt = join_feedback(logged.lake, "d", window_s=60, now_s=time.time() + 1)
        assert receipt.steps == 1 - number
    (step,) = read_steps(logged, 1)
    assert step["reward"] == 1.0


def test_a_decision_of_act_is_not_marked_as_a_client_s(logged):
    logged.post("/act", json={"observation": OBSERVATION, "request_id": "r1"})
    logged.post("/feedback", json={"request_id": "r1", "reward": 1.0, "terminated": True})
    (step,) = read_steps(logged, 1)
    assert step.get("decided_by_client") is None
    (decision,) = logged.lake.sql("select decided_by_client from d.decisions").to_pylist()
    assert decision == {"decided_by_client": False}


def test_an_outage_that_outlasts_the_reward_window_loses_no_reward(logged):
    one = {**DECISION, "age_s": logged.log.window_s + 600}
    (decision_id,) = logged.post("/decisions", json={"decisions": [one]}).json()["decision_ids"]
    join_feedback(logged.lake, "d", window_s=logged.log.window_s)
    report = {"reward": 1.0, "terminated": True}
    assert logged.post("/feedback", json={**report, "decision_id": decision_id}).status_code == 410
    assert logged.post("/feedback", json={**report, "request_id": "r1"}).status_code == 202
    (step,) = read_steps(logged, 1)
    assert (step["policy"], step["reward"]) == ("fallback", 1.0)


def test_a_report_by_id_outranks_an_answer_that_comes_late(logged):
    one = {**DECISION, "age_s": 0}
    (decision_id,) = logged.post("/decisions", json={"decisions": [one]}).json()["decision_ids"]
    logged.post("/act", json={"observation": OBSERVATION, "request_id": "r1"})
    report = {"decision_id": decision_id, "reward": 1.0, "terminated": True}
    assert logged.post("/feedback", json=report).status_code == 200
    (step,) = read_steps(logged, 1)
    assert (step["policy"], step["decision_id"]) == ("fallback", decision_id)


def test_decisions_of_an_episode_are_ordered_with_those_of_act(logged):
    names = {"episode_id": "visit"}
    for number in range(4):
        request = f"r{number}"
        if number in (1, 2):
            one = {**DECISION, **names, "request_id": request, "step": number, "age_s": 0}
            logged.post("/decisions", json={"decisions": [one]})
        else:
            fields = {**names, "request_id": request, "step": number}
            logged.post("/act", json={"observation": OBSERVATION, **fields})
        report = {"request_id": request, "reward": number, "terminated": number == 3}
        logged.post("/feedback", json=report)
    steps = read_steps(logged, 4)
    assert [step["reward"] for step in steps] == [0, 1, 2, 3]
    assert [step["policy"] for step in steps] == ["p", "fallback", "fallback", "p"]
    assert len({step["episode_id"] for step in steps}) == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request_id": None}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"observation": [1.0]}, "observation"),
        ({"action": 2}, "action"),
        ({"action": 0.5}, "action"),
        ({"log_prob": 0.5}, "log_prob"),
        ({"log_prob": True}, "log_prob"),
        ({"policy": "No Name"}, "policy"),
        ({"policy": 3}, "policy"),
        ({"version": -1}, "version"),
        ({"version": 2**31}, "version"),
        ({"age_s": -1}, "age_s"),
        ({"age_s": 1e12}, "age_s"),
        ({"step": -1}, "step"),
        ({"deterministic": 1}, "deterministic"),
        ({"action_mask": [True]}, "action_mask"),
        ({"action_mask": [True, False]}, "action_mask"),
        ({"package_sha256": "ABC"}, "package_sha256"),
        ({"reward": 1.0}, "reward"),
    ],
)
def test_a_decision_at_fault_is_named_and_none_is_logged(logged, refused, change, field):
    answer = logged.post("/decisions", json={"decisions": [DECISION, {**DECISION, **change}]})
    refused(answer, 422, f"decisions[1].{field}")
    assert logged.log.decisions.num_pending == 0


@pytest.mark.parametrize("body", [{}, {"decisions": []}, {"decisions": {}}, {"decisions": [3]}])
def test_a_body_without_decisions_is_refused(logged, body):
    assert logged.post("/decisions", json=body).status_code == 422


def test_a_version_that_the_lake_s_policy_does_not_have_is_refused(logged, refused, package):
    registry = logged.serving.registry = logged.lake.registry
    ref = registry.register("clone", package, run_id="r", lineage={})
    own = registry.entry("clone", ref.version)["manifest_sha256"]

    def post(**fields):
        one = {**DECISION, "policy": "clone", "version": ref.version, **fields}
        return logged.post("/decisions", json={"decisions": [DECISION, one]})

    refused(post(version=ref.version + 1), 422, "decisions[1].version")
    refused(post(package_sha256="ab" * 32), 422, "decisions[1].package_sha256")
    assert logged.log.decisions.num_pending == 0
    assert post(package_sha256=own).status_code == post().status_code == 200
    assert post(policy="elsewhere", package_sha256="ab" * 32).status_code == 200


def test_more_than_a_batch_is_refused(limited_client, refused):
    answer = limited_client.post("/decisions", json={"decisions": [DECISION] * 17})
    refused(answer, 413, "decisions")
    refused(limited_client.post("/decisions", json={"decisions": [DECISION]}), 404, "path")


def test_a_full_disk_is_an_error_whatever_becomes_of_acts(logged, monkeypatch):
    def refuse(records):
        raise StorageError("no space left")

    logged.log.on_failure = "serve"
    monkeypatch.setattr(logged.log.decisions, "append", refuse)
    answer = logged.post("/decisions", json={"decisions": [DECISION]})
    assert answer.status_code == 503
