"""POST /feedback in process: reports by every name, to any worker, and a log that is full."""

import errno
import json
import os
import random
import threading
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.serve.app import create_app
from replaylake.serve.recording.decision_log import DecisionLog
from replaylake.serve.recording.feedback_join_process import FeedbackJoinProcess
from replaylake.serve.serving_state import Limits, ServingState
from replaylake.serve.versions.router import Router, ServedPolicy

GOOD = [0.1, 0.2, 0.3, 0.4]


def serving(policy, *, log=None, signer=None):
    signer = signer or DecisionSigner(b"k" * 32, "d")
    router = Router(ServedPolicy("p", 2, policy, "p@champion", {"algorithm": "by_hand"}))
    return ServingState(router, signer, log, Exploration(temperature=1.0), Limits(batch=16))


@pytest.fixture(scope="module")
def client(app_client, policy):
    with app_client(create_app(lambda: serving(policy))) as client:
        yield client


@pytest.fixture
def workers(app_client, policy, tmp_path):
    """Two workers that share a lake."""
    lake = open_lake(tmp_path / "lake", create=True)
    clients = []
    for _ in range(2):
        signer = DecisionSigner(lake.signing_key(), "d")
        log = DecisionLog(lake.dataset("d"), policy.spec, signer.worker, window_s=60)
        client = app_client(create_app(lambda s=signer, k=log: serving(policy, log=k, signer=s)))
        client.lake, client.log, client.signer = lake, log, signer
        clients.append(client)
    with clients[0], clients[1]:
        yield clients


@pytest.fixture
def logged(workers):
    return workers[0]


def rewards(worker):
    worker.log.rewards.flush()
    return worker.lake.sql("select * from d.rewards order by timestamp").to_pylist()


def test_a_clock_that_is_set_back_leaves_reports_after_their_decisions(logged, monkeypatch):
    real, offset_s = time.time_ns, [0]
    monkeypatch.setattr(time, "time_ns", lambda: real() + offset_s[0] * 10**9)

    def report(name):
        body = {"request_id": name, "reward": 1, "terminated": True, "truncated": False}
        assert logged.post("/feedback", json=body).status_code == 202

    def act(name):
        logged.post("/act", json={"observation": GOOD, "request_id": name})

    offset_s[0] = -600
    report("of another server")
    offset_s[0] = 0
    act("before")
    offset_s[0] = -3600
    report("before")
    act("after")
    report("after")
    logged.log.decisions.flush()
    logged.log.rewards.flush()
    offset_s[0] = 0
    for ahead_s in (120, 1200, 90_000):
        receipt = join_feedback(logged.lake, "d", window_s=3600, now_s=time.time() + ahead_s)
        assert receipt.joined == 2
    rows = logged.lake.sql("select request_id from d.steps order by timestamp, decision_id")
    assert rows["request_id"].to_pylist() == ["before", "after"]


def test_feedback(logged):
    answer = logged.post("/act", json={"observation": GOOD, "episode_id": "e"}).json()
    key = answer["decision_id"]
    body = {"decision_id": key, "reward": 1, "terminated": True, "truncated": False}
    for _ in range(2):
        said = logged.post("/feedback", json=body)
        assert (said.status_code, said.json()) == (
            200,
            {"decision_id": key, "policy": "p", "version": 2},
        )
    assert logged.post("/feedback", json={"decision_id": key, "reward": 0.5}).status_code == 200
    final = {"decision_id": key, "reward": 1.5, "final_observation": [1, 2, 3, 4]}
    assert logged.post("/feedback", json=final).status_code == 200
    logged.log.rewards.flush()
    rows = logged.lake.sql("select * from d.rewards order by timestamp").to_pylist()
    assert [row["reward"] for row in rows] == [1.0, 1.0, 0.5, 1.5]
    assert [row["terminated"] for row in rows] == [True, True, False, False]
    assert rows[-1]["final_observation"] == [1.0, 2.0, 3.0, 4.0]
    assert {row["decision_id"] for row in rows} == {key}


FEEDBACK = [
    ("empty", {}, "decision_id"),
    ("no reward", {"decision_id": "x"}, "reward"),
    ("no id", {"reward": 1}, "decision_id"),
    ("two ids", {"decision_id": "x", "request_id": "r", "reward": 1}, "request_id"),
    ("request number", {"request_id": 5, "reward": 1}, "request_id"),
    ("no step", {"episode_id": "e", "reward": 1}, "step"),
    ("step text", {"episode_id": "e", "step": "1", "reward": 1}, "step"),
    ("step true", {"episode_id": "e", "step": True, "reward": 1}, "step"),
    ("step below", {"episode_id": "e", "step": -1, "reward": 1}, "step"),
    ("step beyond", {"episode_id": "e", "step": 2**31, "reward": 1}, "step"),
    ("step alone", {"step": 1, "reward": 1}, "decision_id"),
    ("step beside", {"request_id": "r", "step": 1, "reward": 1}, "step"),
    ("mode", {"request_id": "r", "reward": 1, "mode": "add"}, "mode"),
    ("mode list", {"request_id": "r", "reward": 1, "mode": ["sum"]}, "mode"),
    ("sum without a name", {"request_id": "r", "reward": 1, "mode": "sum"}, "feedback_id"),
    ("name empty", {"request_id": "r", "reward": 1, "feedback_id": ""}, "feedback_id"),
    ("reward beyond", {"request_id": "r", "reward": 10**400}, "body"),
    ("list empty", {"feedback": []}, "feedback"),
    ("list object", {"feedback": {}}, "feedback"),
    ("list of numbers", {"feedback": [1]}, "feedback[0]"),
    ("list and one", {"feedback": [{"request_id": "r", "reward": 1}], "reward": 1}, "reward"),
    ("list of one wrong", {"feedback": [{"request_id": "r", "reward": 1}, {"request_id": "r"}]},
     "feedback[1].reward"),
    ("id number", {"decision_id": 5, "reward": 1}, "decision_id"),
    ("reward text", {"decision_id": "x", "reward": "1"}, "reward"),
    ("reward true", {"decision_id": "x", "reward": True}, "reward"),
    ("reward null", {"decision_id": "x", "reward": None}, "reward"),
    ("reward list", {"decision_id": "x", "reward": [1]}, "reward"),
    ("terminated 1", {"decision_id": "x", "reward": 1, "terminated": 1}, "terminated"),
    ("truncated text", {"decision_id": "x", "reward": 1, "truncated": "no"}, "truncated"),
    ("done", {"decision_id": "x", "reward": 1, "done": True}, "done"),
    ("final short", {"decision_id": "x", "reward": 1, "final_observation": [1]},
     "final_observation"),
    ("final text", {"decision_id": "x", "reward": 1, "final_observation": [1, 2, 3, "4"]},
     "final_observation[3]"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field"), [c[1:] for c in FEEDBACK], ids=[c[0] for c in FEEDBACK])
def test_wrong_feedback_is_422(client, body, field, refused):
    refused(client.post("/feedback", json=body), 422, field)


def test_a_reward_of_nan_is_422(client, refused):
    for number in (b"NaN", b"Infinity", b"1e400"):
        body = b'{"decision_id": "x", "reward": ' + number + b"}"
        refused(client.post("/feedback", content=body), 422, "body")


def test_a_strangers_decision_is_404_and_an_old_one_410(logged, refused):
    (foreign,) = DecisionSigner(b"other" * 7, "d").issue("p", 2, 1)
    (elsewhere,) = DecisionSigner(logged.lake.signing_key(), "e").issue("p", 2, 1)
    for key in (foreign, elsewhere, "x", "", "é"):
        body = {"decision_id": key, "reward": 1}
        error = refused(logged.post("/feedback", json=body), 404, "decision_id")
        assert error["message"] == "unknown decision_id; send one of a decision logged to d"
    (old,) = logged.signer.issue("p", 2, 1)
    late = logged.post("/feedback", json={"decision_id": old, "reward": 1})
    assert "past its reward window of 60 s" in refused(late, 410, "decision_id")["message"]


def test_feedback_without_a_log_is_404(client, refused):
    key = client.post("/act", json={"observation": GOOD}).json()["decision_id"]
    error = refused(
        client.post("/feedback", json={"decision_id": key, "reward": 1}), 404, "decision_id"
    )
    assert "`log_to`" in error["message"]


def test_one_episode_and_request_of_a_batch_name_each_row(logged):
    body = {"observations": [GOOD] * 3, "episode_id": "e", "request_id": "r"}
    first = logged.post("/act", json=body).json()["decision_ids"]
    again = logged.post("/act", json=body).json()["decision_ids"]  # its answer was lost
    logged.log.decisions.flush()
    rows = logged.lake.sql("select * from d.decisions order by decision_id").to_pylist()
    assert {row["episode_id"] for row in rows} == {"e"}
    assert [row["request_id"] for row in rows] == ["r/0", "r/1", "r/2"] * 2
    for number, key in enumerate(again, 1):
        logged.post("/feedback", json={"decision_id": key, "reward": number})
    ending = {"decision_id": again[-1], "reward": 3, "terminated": True}
    assert logged.post("/feedback", json=ending).status_code == 200
    logged.log.rewards.flush()
    receipt = join_feedback(logged.lake, "d", now_s=time.time() + 1)
    assert (receipt.steps, receipt.repeated) == (3, 3)
    steps = logged.lake.sql("select decision_id, reward from d.steps order by step").to_pylist()
    assert [(row["decision_id"], row["reward"]) for row in steps] == [
        (again[0], 1.0), (again[1], 2.0), (again[2], 3.0)
    ]  # fmt: skip
    assert not set(first) & set(again)


def test_by_the_clients_own_names(logged):
    for name in ({"request_id": "r"}, {"episode_id": "e", "step": 3}):
        said = logged.post("/feedback", json={**name, "reward": 1})
        assert (said.status_code, said.json()) == (202, {"accepted": True})
    rows = rewards(logged)
    assert [row["decision_id"] for row in rows] == [None, None]
    assert [(row["request_id"], row["episode_id"], row["step"]) for row in rows] == [
        ("r", None, None), (None, "e", 3)
    ]  # fmt: skip
    assert {(row["mode"], row["feedback_id"]) for row in rows} == {("last", None)}


def test_many_at_once_all_or_none(logged, refused):
    key = logged.post("/act", json={"observation": GOOD}).json()["decision_id"]
    known, named = {"decision_id": key, "reward": 1}, {"request_id": "r", "reward": 2}
    said = logged.post("/feedback", json={"feedback": [known] * 3})
    assert (said.status_code, said.json()) == (200, {"accepted": 3})
    assert logged.post("/feedback", json={"feedback": [known, named]}).status_code == 202
    body = {"feedback": [named, {"decision_id": "x", "reward": 1}]}
    refused(logged.post("/feedback", json=body), 404, "feedback[1].decision_id")
    refused(logged.post("/feedback", json={"feedback": [named] * 17}), 413, "feedback")
    assert len(rewards(logged)) == 5


def test_a_repeat_is_not_written_and_a_contradiction_is_409(workers, refused):
    first, other = workers
    body = {"request_id": "r", "reward": 1, "mode": "sum", "feedback_id": "click"}
    for _ in range(3):
        assert first.post("/feedback", json=body).status_code == 202
    assert len(rewards(first)) == 1
    refused(first.post("/feedback", json={**body, "reward": 2}), 409, "feedback_id")
    twice = {
        "feedback": [{**body, "feedback_id": "new"}, {**body, "feedback_id": "new", "reward": 3}]
    }
    refused(first.post("/feedback", json=twice), 409, "feedback[1].feedback_id")
    assert first.post("/feedback", json={**body, "request_id": "s", "reward": 2}).status_code == 202
    # Another worker does not know; the join takes what came first.
    assert other.post("/feedback", json={**body, "reward": 2}).status_code == 202
    other.log.rewards.flush()
    assert len(rewards(first)) == 3


class FullDisk:
    """What os.write does to journals while `is_full`: half of it, then no more."""

    def __init__(self, monkeypatch):
        self.is_full, self._write = False, os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, fd, data):
        if self.is_full and "/_journal/" in os.readlink(f"/proc/self/fd/{fd}"):
            if len(data) < 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self._write(fd, data[: len(data) // 2])
        return self._write(fd, data)


def test_a_log_that_cannot_be_written_is_503_until_there_is_room(logged, monkeypatch, refused):
    disk = FullDisk(monkeypatch)
    key = logged.post("/act", json={"observation": GOOD}).json()["decision_id"]
    disk.is_full = True
    refused(logged.post("/act", json={"observation": GOOD}), 503, "log")
    refused(logged.post("/feedback", json={"decision_id": key, "reward": 1}), 503, "log")
    assert "replaylake_log_failures_total 2" in logged.get("/metrics").text
    assert logged.get("/readyz").status_code == 200
    disk.is_full = False
    assert logged.post("/act", json={"observation": GOOD}).status_code == 200
    assert logged.post("/feedback", json={"decision_id": key, "reward": 1}).status_code == 200
    logged.log.decisions.flush()
    assert logged.lake.sql("select count(*) as n from d.decisions").to_pylist() == [{"n": 2}]
    assert len(rewards(logged)) == 1


def test_it_serves_without_logging_if_it_is_told_to(logged, monkeypatch, caplog, refused):
    disk = FullDisk(monkeypatch)
    logged.log.on_failure = "serve"
    disk.is_full = True
    for _ in range(5):
        said = logged.post("/act", json={"observations": [GOOD] * 2})
        assert said.status_code == 200
    # Who reports is told: it can be sent again.
    key = said.json()["decision_ids"][0]
    refused(logged.post("/feedback", json={"decision_id": key, "reward": 1}), 503, "log")
    assert "replaylake_log_lost_total 10" in logged.get("/metrics").text
    assert logged.get("/policy").json()["lost_decisions"] == 10
    assert logged.get("/readyz").status_code == 200
    assert caplog.text.count("answered without logging") == 1
    disk.is_full = False
    kept = logged.post("/act", json={"observation": GOOD}).json()["decision_id"]
    logged.log.decisions.flush()
    rows = logged.lake.sql("select decision_id from d.decisions").to_pylist()
    assert rows == [{"decision_id": kept}]
    assert logged.get("/policy").json()["lost_decisions"] == 10


def test_episodes_over_two_workers(workers):
    """Rewards late, twice, to the other worker and by all names: SQL finds what was played."""
    dice = random.Random(0)
    played, owed = {}, []
    for episode in range(30):
        name, length = f"e{episode % 20}", dice.randint(1, 4)  # ten names are used again
        for step in range(length):
            names = {"episode_id": name, "request_id": f"{episode}/{step}"}
            if episode % 2:
                names["step"] = step
            body = {"observation": GOOD, **names}
            for _ in range(1 + (dice.random() < 0.1)):  # its answer was lost
                worker = dice.choice(workers)
                key = worker.post("/act", json=body).json()["decision_id"]
            how = dice.choice(
                [{"decision_id": key}, {"request_id": names["request_id"]},
                 {"episode_id": name, "step": step}]
            )  # fmt: skip
            ends = {"terminated": step == length - 1}
            parts = [(how | ends | {"reward": step + 0.5}, "last")]
            if dice.random() < 0.3:
                parts.append((how | ends | {"reward": 2, "mode": "sum", "feedback_id": "f"}, "sum"))
            played[key] = step, step + 0.5 + 2 * (len(parts) - 1), ends["terminated"]
            for part, mode in parts:
                is_late = mode == "sum" and "step" not in how
                if is_late:
                    owed.append(part)
                else:
                    send(workers, dice, part)
    for worker in workers:
        worker.log.decisions.flush()
        worker.log.rewards.flush()
    join_feedback(workers[0].lake, "d", now_s=time.time() + 1)
    for part in owed:
        send(workers, dice, part)
    for worker in workers:
        worker.log.rewards.flush()
    receipt = join_feedback(workers[0].lake, "d", now_s=time.time() + 1)
    assert (receipt.waiting, receipt.orphaned, receipt.joined) == (0, 0, len(played))
    assert receipt.late == len(owed)
    rows = workers[0].lake.sql("select * from d.steps").to_pylist()
    found = {row["decision_id"]: (row["step"], row["reward"], row["terminated"]) for row in rows}
    assert found == played
    assert len(rows) == len(played)
    assert len({row["episode_id"] for row in rows}) == 30
    assert all(row["behavior_log_prob"] is not None for row in rows)


def send(workers, dice, part):
    """Send a report to a worker, or to two."""
    for _ in range(1 + (dice.random() < 0.3)):
        said = dice.choice(workers).post("/feedback", json=part)
        assert said.status_code in (200, 202), said.text


REPORTS = st.lists(
    st.fixed_dictionaries(
        {"reward": st.integers(-3, 3)},
        optional={
            "request_id": st.sampled_from(["a", "b"]),
            "episode_id": st.just("e"),
            "step": st.integers(-1, 2),
            "mode": st.sampled_from(["last", "sum", "x"]),
            "feedback_id": st.sampled_from(["f", ""]),
            "decision_id": st.just("x"),
            "terminated": st.sampled_from([True, None, 1]),
        },
    ),
    max_size=3,
)


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(reports=REPORTS)
def test_no_report_is_beyond_us(client, reports):
    response = client.post("/feedback", content=json.dumps({"feedback": reports}).encode())
    assert response.status_code in (404, 422)


@pytest.mark.slow
def test_a_process_beside_the_server_joins(logged, tmp_path):
    key = logged.post("/act", json={"observation": GOOD}).json()["decision_id"]
    logged.post("/feedback", json={"decision_id": key, "reward": 1, "terminated": True})
    logged.log.decisions.flush()
    logged.log.rewards.flush()
    told, heard = [], threading.Event()

    def on_round(*counts):
        told.append(counts)
        heard.set()

    both = [
        FeedbackJoinProcess(logged.lake.dataset("d"), tmp_path / "lake", 0.2, 60.0)
        for _ in range(2)
    ]
    for one in both:
        one.on_round = on_round
        one.start()
    assert heard.wait(120)
    deadline = time.monotonic() + 60
    while "decision_id" not in logged.lake.dataset("d").spec.extras:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    running = [one._process for one in both if one._process is not None]
    assert len(running) == 1, "one of them has the process"
    assert logged.lake.sql("select reward from d.steps").to_pylist() == [{"reward": 1.0}]
    assert told[0] == (1, 1, 0, 0)
    for one in both:
        one.stop()
    assert running[0].returncode is not None
