"""Rewards and ends of recorded calls, reported to a real gateway."""

import time

import httpx
import pytest

from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.maintenance.delete import delete


def talk(gateway, path, *texts):
    """Hold a dialogue; return the ids of its answers."""
    messages, ids = [], []
    for text in texts:
        messages.append({"role": "user", "content": text})
        body = {"model": "tiny", "messages": messages}
        answer = httpx.post(f"{gateway.url}{path}/v1/chat/completions", json=body).json()
        messages.append(answer["choices"][0]["message"])
        ids.append(answer["id"])
    return ids


def report(gateway, **fields):
    return httpx.post(f"{gateway.url}/v1/feedback", json=fields)


def read_outcomes(gateway, where, expected):
    """Return once the steps have the expected rewards and ends."""
    columns = "step, reward, terminated, truncated"
    text = f"select {columns} from agents.steps where {where} order by env_step"
    deadline = time.monotonic() + 60
    while (
        found := [tuple(row.values()) for row in gateway.lake.sql(text).to_pylist()]
    ) != expected:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_a_report_of_an_episode_is_the_reward_of_its_last_step_and_ends_it(gateway):
    talk(gateway, "/episode/rewarded", "one", "two", "three")
    answer = report(gateway, episode_id="rewarded", reward=0.5, terminated=True)
    assert (answer.status_code, answer.json()["accepted"]) == (202, True)
    where = "source_episode_id = 'rewarded'"
    expected = [(0, 0.0, False, False), (1, 0.0, False, False), (2, 0.5, True, False)]
    read_outcomes(gateway, where, expected)
    (episode,) = gateway.lake.sql(
        f'select "return", complete, num_steps from agents.episodes where {where}'
    ).to_pylist()
    assert episode == {"return": 0.5, "complete": True, "num_steps": 3}
    # What comes after the end is another episode of the same name.
    talk(gateway, "/episode/rewarded", "again")
    read_outcomes(gateway, where, [(0, 0.0, False, False), (0, None, False, False), *expected[1:]])
    text = f"select count(distinct episode_id) as n from agents.steps where {where}"
    assert gateway.lake.sql(text).to_pylist() == [{"n": 2}]


def test_a_report_of_an_unknown_episode_is_answered_so(gateway):
    answer = report(gateway, episode_id="later", reward=1)
    assert answer.status_code == 202
    assert (answer.json()["accepted"], answer.json()["episode_id"]) == (True, None)
    assert "kept, but this gateway has no open episode" in answer.json()["message"]
    talk(gateway, "/episode/later", "one")
    talk(gateway, "/episode/known", "one")
    known = report(gateway, episode_id="known", reward=1)
    assert known.json().keys() == {"accepted", "episode_id"}
    read_outcomes(gateway, "source_episode_id = 'known'", [(0, 1.0, False, False)])
    # As the answer says: what was recorded after a report does not get it.
    read_outcomes(gateway, "source_episode_id = 'later'", [(0, None, False, False)])


def test_a_report_of_an_answer_is_the_reward_of_its_step(gateway):
    ids = talk(gateway, "/episode/by-answer", "one", "two")
    where = "source_episode_id = 'by-answer'"
    assert report(gateway, completion_id=ids[0], reward=1).status_code == 202
    read_outcomes(gateway, where, [(0, 1.0, False, False), (1, None, False, False)])
    # Sums add up, and one that is sent again counts once.
    for _ in range(2):
        more = {"mode": "sum", "feedback_id": "f1"}
        report(gateway, completion_id=ids[0], reward=0.25, **more)
    report(gateway, episode_id="by-answer", step=1, reward=-1, truncated=True)
    read_outcomes(gateway, where, [(0, 1.25, False, False), (1, -1.0, False, True)])


def test_a_report_that_is_wrong_is_refused_by_its_field(gateway):
    for fields, field in [
        ({"reward": 1}, "completion_id"),
        ({"episode_id": "e", "completion_id": "c", "reward": 1}, "completion_id"),
        ({"episode_id": "e"}, "reward"),
        ({"episode_id": "e", "reward": "1"}, "reward"),
        ({"episode_id": "e", "reward": 1, "step": -1}, "step"),
        ({"episode_id": "e", "reward": 1, "terminated": 2}, "terminated"),
        ({"episode_id": "e", "reward": 1, "score": 2}, "score"),
        ({"episode_id": 7, "reward": 1}, "episode_id"),
        ({"episode_id": "e", "reward": 1, "mode": "max"}, "mode"),
    ]:
        answer = report(gateway, **fields)
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, field), fields


@pytest.mark.slow
def test_reports_outlive_a_killed_gateway_and_people_are_deleted(engines, kit, tmp_path):
    engine = engines("vllm")
    gateway = kit.start_gateway(engine.url, tmp_path / "lake", "--user-header", "x-user")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"x-user": "ada", "X-ReplayLake-Episode": "kept"}
    httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers)
    report(gateway, episode_id="kept", reward=2)
    gateway.kill()
    gateway.process.stderr.close()
    gateway = kit.start_gateway(engine.url, tmp_path / "lake", "--user-header", "x-user")
    read_outcomes(gateway, "user_id = 'ada'", [(0, 2.0, False, False)])
    receipt = delete(open_lake(tmp_path / "lake"), "agents", where="user_id = 'ada'")
    assert receipt.num_steps == 1
    httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers)
    assert gateway.stop() == 0
    gateway.process.stderr.close()
    assert gateway.steps() == []  # they would come back
