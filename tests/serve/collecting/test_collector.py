"""A server without a policy: what was acted elsewhere gets into its dataset, each once."""

import asyncio
import base64
import threading
import time

import httpx
import pytest

from replaylake.datastore.episodes.episode import MAX_STEP
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import SchemaMismatchError
from replaylake.datastore.feedback.decisions import ensure_feedback_tables
from replaylake.datastore.lake.lake import open_lake
from replaylake.serve.collecting import collector as collector_module
from replaylake.serve.collecting.collector import Collector, CollectorConfig, create_collector
from replaylake.serve.recording import outcome_log

DIALOGUE = {
    "episode_id": "talk",
    "messages": [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 3 + 3?"},
        {"role": "assistant", "content": "6"},
    ],
    "reward": 1.0,
    "model": "adder",
    "group_id": "sums",
    "difficulty": "low",
}
TOKENS = {
    "observation_tokens": [[1, 2], [5]],
    "action_tokens": [[3, 4], [6]],
    "action_log_probs": [[-0.5, -0.25], [0.0]],
}


def changed(name, **changes):
    return {**DIALOGUE, "episode_id": name, **changes}


def test_a_dialogue_is_stored_with_its_tokens_and_metadata(collector):
    answer = collector.post("/episodes", {"episodes": [{**DIALOGUE, **TOKENS}]})
    assert (answer.status_code, answer.json()) == (202, {"episodes": 1, "steps": 2})
    first, last = collector.read(num=2, where="source_episode_id = 'talk'")
    assert (first["action"], last["action"]) == ("4", "6")
    assert (first["reward"], last["reward"], last["terminated"]) == (0.0, 1.0, True)
    assert (first["policy"], first["group_id"]) == ("adder", "sums")
    assert first["metadata"] == '{"difficulty":"low"}'
    assert [row["action_tokens"] for row in (first, last)] == TOKENS["action_tokens"]
    assert first["behavior_log_prob"] == pytest.approx(-0.75)
    rows = collector.lake.sql(
        "select token_ids, loss_mask from agents.sequences where episode_id = 'received/talk'"
    ).to_pylist()
    assert rows == [{"token_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 1, 1, 0, 1]}]


def test_an_image_is_stored_beside_the_messages_and_a_repeated_dialogue_is_known(
    collect_in, tmp_path
):
    image = bytes(range(256)) * 4
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    seen = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    messages = [seen, DIALOGUE["messages"][1], seen, DIALOGUE["messages"][3]]
    for _ in range(2):
        with collect_in(tmp_path / "lake") as server:
            server.post("/episodes", {"episodes": [changed("seen", messages=messages)]})
            server.read(num=2)
            rows = server.read("message_media")
            page = server.get("/metrics").text
    assert [row["message_media"][0]["bytes"] for row in rows] == [image, None]
    assert "replaylake_collector_conflicting_steps 0.0" in page


def test_a_dialogue_that_is_sent_again_is_one_and_another_of_its_name_is_refused(collector):
    for _ in range(2):
        assert collector.post("/episodes", {"episodes": [changed("again")]}).status_code == 202
    other = collector.post("/episodes", {"episodes": [changed("again", reward=0.0)]})
    assert other.status_code == 409
    assert other.json()["error"]["field"] == "episodes[0]"
    collector.post("/episodes", {"episodes": [changed("marker")]})
    collector.read(num=2, where="source_episode_id = 'marker'")
    assert len(collector.read(where="source_episode_id = 'again'")) == 2


def test_a_contradiction_that_the_process_no_longer_remembers_is_counted(
    collect_in, tmp_path, caplog
):
    with collect_in(tmp_path / "lake") as server:
        server.post("/episodes", {"episodes": [changed("again")]})
        server.read(num=2)
    with collect_in(tmp_path / "lake") as server:
        other = {"episodes": [changed("again", reward=0.0)]}
        assert server.post("/episodes", other).status_code == 202
        server.post("/episodes", {"episodes": [changed("marker")]})
        server.read(num=2, where="source_episode_id = 'marker'")
        page = server.get("/metrics").text
        assert len(server.read(where="reward = 1")) == 2  # the first of each counts
    assert "replaylake_collector_conflicting_steps 1.0" in page
    assert "1 received steps contradict steps of their episodes" in caplog.text


def test_agents_of_a_dialogue_are_episodes_of_one_id(collector):
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "name": "a", "content": "1"},
        {"role": "assistant", "name": "b", "content": "2"},
        {"role": "assistant", "name": "a", "content": "3"},
    ]
    body = {"episodes": [{"episode_id": "two", "messages": messages}]}
    assert collector.post("/episodes", body).json() == {"episodes": 2, "steps": 3}
    rows = collector.read("agent_id, step, env_step", 3, "source_episode_id = 'two'")
    assert [tuple(row.values()) for row in rows] == [("a", 0, 0), ("b", 0, 1), ("a", 1, 2)]


@pytest.mark.parametrize(
    ("episode", "field", "text"),
    [
        ({"messages": DIALOGUE["messages"]}, "episodes[0].episode_id", "required field is missing"),
        (changed("x", messages=[{"content": "?"}]), "episodes[0]", "unknown field"),
        (changed("x", messages=DIALOGUE["messages"][:1]), "episodes[0].messages", "no step"),
        (changed("x", action_tokens=[[1]]), "episodes[0].action_tokens", "a list of 2"),
        (changed("x", action_tokens=[["a"], [1]]), "episodes[0]", "action_tokens"),
        (changed("x", **{**TOKENS, "action_log_probs": [[1.0, 0], [0]]}), "episodes[0]", "log"),
        (changed("x", reward="much"), "episodes[0]", "a number or null"),
    ],
)
def test_a_malformed_dialogue_is_refused_with_its_place(collector, episode, field, text):
    answer = collector.post("/episodes", {"episodes": [episode]})
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert error["field"].startswith(field), error
    assert text in answer.text


def test_a_server_that_only_collects_says_that_it_has_no_policy(collector):
    for answer in (collector.post("/act", {"observation": [1]}), collector.get("/policy")):
        assert answer.status_code == 409
        assert "no policy is served here" in answer.json()["error"]["message"]


def test_it_reports_health_and_metrics(collector):
    assert collector.get("/livez").json() == {"alive": True}
    assert collector.get("/readyz").json() == {"ready": True, "degraded": []}
    page = collector.get("/metrics").text
    assert 'table="received"' in page
    assert 'replaylake_requests_total{route="/readyz",status="200"}' in page
    assert collector.get("/episodes").status_code == 405
    assert collector.get("/no").status_code == 404


def test_feedback_before_and_after_the_episode_is_stored(collector):
    report = {"episode_id": "judged", "reward": 0.5}
    open_one = changed("judged", reward=None)
    collector.post("/episodes", {"episodes": [open_one]})
    assert collector.post("/feedback", report).status_code == 202
    rows = collector.read("reward", 2, "source_episode_id = 'judged' and reward is not null")
    assert [row["reward"] for row in rows] == [0.0, 0.5]
    collector.post("/feedback", {**report, "reward": 2, "terminated": True})
    where = "source_episode_id = 'judged' and reward = 2"
    assert collector.read("terminated", 1, where)[0]["terminated"]
    plain = collector.client.post(
        "/feedback", content=b"{}", headers={"content-type": "text/plain"}
    )
    assert plain.status_code == 415  # a page of another site could send it


def test_reports_are_applied_for_at_most_a_quarter_of_the_time(collect_in, tmp_path, monkeypatch):
    rounds = []
    apply = outcome_log.apply_outcomes

    def apply_slowly(dataset, **options):
        begun = time.monotonic()
        time.sleep(0.1)
        done = apply(dataset, **options)
        rounds.append((begun, time.monotonic()))
        return done

    monkeypatch.setattr(outcome_log, "apply_outcomes", apply_slowly)
    with collect_in(tmp_path / "lake") as server:
        server.post("/feedback", {"episode_id": "a", "reward": 1})
        server.work_until(lambda: rounds)
        server.post("/feedback", {"episode_id": "b", "reward": 1})
        server.work_until(lambda: len(rounds) > 1)
        (begun, ended), (again, _) = rounds[:2]
    assert again - ended >= 2.9 * (ended - begun)


@pytest.mark.slow
def test_nothing_that_was_acknowledged_is_lost_by_a_kill(collectors, tmp_path):
    first = collectors(tmp_path / "lake")
    for number in range(20):
        body = {"episodes": [changed(f"e{number}")]}
        assert first.post("/episodes", body).status_code == 202
    first.kill()
    second = collectors(tmp_path / "lake")
    for number in range(10, 25):  # a client that did not see the answers of some
        second.post("/episodes", {"episodes": [changed(f"e{number}")]})
    second.read(num=50)
    assert second.stop() == 0
    counts = second.lake.sql(
        "select source_episode_id, count(*) as n from agents.steps group by all"
    ).to_pylist()
    assert {row["n"] for row in counts} == {2}
    assert len(counts) == 25


def test_steps_and_decisions_of_other_spaces_need_their_dataset(collect_in, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("arms").create(Box((2,)), Discrete(3), rewards_optional=True)
    decision = {
        "episode_id": "d1",
        "observations": [[0.5, 1.0]],
        "actions": [2],
        "rewards": [None],
        "log_probs": [-0.7],
        "policy": "ours",
    }
    with collect_in(tmp_path / "lake", "arms") as server:
        assert server.post("/episodes", {"episodes": [decision]}).status_code == 202
        refused = server.post("/episodes", {"episodes": [DIALOGUE]})
        assert "not those of dialogues" in refused.json()["error"]["message"]
        several = {name: 2 * decision[name] for name in ("observations", "actions", "rewards")}
        beyond = {"episode_id": "d2", "first_step": MAX_STEP, **several}
        invalid = server.post("/episodes", {"episodes": [beyond]})
        assert "`replaylake show arms` has the spaces" in invalid.json()["error"]["message"]
        report = {"episode_id": "d1", "reward": 1, "terminated": True}
        assert server.post("/feedback", report).status_code == 202
        (row,) = server.read(num=1, where="reward = 1")
    assert (row["action"], row["policy"], row["terminated"]) == (2, "ours", True)
    assert row["behavior_log_prob"] == pytest.approx(-0.7)


def test_roles_of_tokens(collect_in, tmp_path, monkeypatch):
    monkeypatch.setenv("REPLAYLAKE_FEEDBACK_TOKEN", "feedback-0123456789")
    with collect_in(tmp_path / "lake") as server:
        body = {"episodes": [DIALOGUE]}
        assert server.post("/episodes", body).status_code == 401
        headers = {"authorization": "Bearer feedback-0123456789"}
        assert server.post("/episodes", body, headers=headers).status_code == 202
        assert server.get("/metrics", headers=headers).status_code == 403
        assert server.get("/readyz").status_code == 200


def test_a_dataset_that_served_decisions_are_joined_into_is_refused(tmp_path):
    dataset = open_lake(tmp_path, create=True).dataset("live")
    ensure_feedback_tables(dataset, Box((2,)), Discrete(3))
    with pytest.raises(SchemaMismatchError, match="found decisions of a served policy"):
        Collector(CollectorConfig(str(tmp_path), "live"))


def test_requests_of_a_collector_are_spans(collectors, tmp_path, otlp_receiver):
    one = collectors(tmp_path / "lake", environment=otlp_receiver.environment)
    assert one.post("/episodes", {"episodes": "x"}).status_code == 422
    about, _, attributes = otlp_receiver.wait_for_span("POST /episodes")
    assert about["service.name"] == "replaylake-collector"
    assert attributes["replaylake.dataset"] == "agents"
    assert attributes["http.response.status_code"] == 422
    otlp_receiver.wait_for_metric("replaylake_collector_spans")
    otlp_receiver.wait_for_metric("replaylake_requests")


def numbered(name, numbers, **changes):
    """Return a piece of an episode of numbers, from its first step on."""
    return {
        "episode_id": name,
        "first_step": numbers[0],
        "observations": [f"see {number}" for number in numbers],
        "actions": [f"say {number}" for number in numbers],
        "rewards": [0.0] * len(numbers),
        **changes,
    }


def test_a_producer_asks_where_it_has_to_continue(collector):
    def ask(*names):
        answer = collector.post("/watermark", {"episode_ids": names})
        assert answer.status_code == 200, answer.text
        rows = answer.json()["episodes"]
        return [
            (one["episode_id"], one["agent_id"], one["next_step"], one["ended"]) for one in rows
        ]

    assert ask("mark/new") == [("mark/new", "", 0, False)]
    pieces = [
        numbered("mark", [0, 1]),
        numbered("mark", [3]),  # after a gap
        numbered("mark", [0], agent_id="other", truncated=True),
    ]
    assert collector.post("/episodes", {"episodes": pieces}).status_code == 202
    expected = [("mark", "", 2, False), ("mark", "other", 1, True), ("mark/new", "", 0, False)]
    assert ask("mark", "mark/new", "mark") == expected  # at once, whatever has moved by then
    collector.read(num=3, where="source_episode_id = 'mark'")
    assert ask("mark", "mark/new") == expected
    last = numbered("mark", [2, 3], terminated=True)
    last |= {"observations": ["see 2", "see 3"], "actions": ["say 2", "say 3"]}
    assert collector.post("/episodes", {"episodes": [last]}).status_code == 409  # 3 had no end
    assert collector.post("/episodes", {"episodes": [numbered("mark", [2])]}).status_code == 202
    assert ask("mark")[0] == ("mark", "", 4, False)


def test_requests_for_positions_that_wait_share_one_commit_and_scan(tmp_path, monkeypatch):
    collector = Collector(CollectorConfig(str(tmp_path / "lake"), "d"))
    app, find = create_collector(collector), collector.find_positions
    asked, requested, may_end = [], [], threading.Event()
    find_shared = collector_module._Watermarks.find

    def find_slowly(names):
        asked.append(names)
        assert may_end.wait(60)
        return find(names)

    async def find_and_note(watermarks, names):
        requested.append(names)
        return await find_shared(watermarks, names)

    monkeypatch.setattr(collector, "find_positions", find_slowly)
    monkeypatch.setattr(collector_module._Watermarks, "find", find_and_note)

    async def ask(client, name):
        return await client.post("/watermark", json={"episode_ids": [name, "all"]})

    async def run():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            first = asyncio.create_task(ask(client, "a"))
            while not asked:
                await asyncio.sleep(0.001)
            others = [asyncio.create_task(ask(client, f"b{number}")) for number in range(20)]
            while len(requested) < 21:
                await asyncio.sleep(0.001)
            others[0].cancel()
            may_end.set()
            return await asyncio.gather(first, *others[1:])

    answers = asyncio.run(run())
    collector.close()
    assert {answer.status_code for answer in answers} == {200}
    names = [[one["episode_id"] for one in answer.json()["episodes"]] for answer in answers]
    assert names == [["a", "all"], *([f"b{number}", "all"] for number in range(1, 20))]
    assert [len(names) for names in asked] == [2, 21]


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({}, "episode_ids"),
        ({"episode_ids": []}, "episode_ids"),
        ({"episode_ids": "a"}, "episode_ids"),
        ({"episode_ids": ["a"] * 1001}, "episode_ids"),
        ({"episode_ids": ["a", 1]}, "episode_ids[1]"),
        ({"episode_ids": [None]}, "episode_ids[0]"),
        ({"episode_ids": ["a"], "other": 1}, "other"),
    ],
)
def test_a_malformed_question_for_a_position_is_refused(collector, body, place):
    answer = collector.post("/watermark", body)
    assert answer.status_code == 422
    assert answer.json()["error"]["field"] == place
