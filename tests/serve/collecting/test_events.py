"""Events of Vowpal Wabbit by POST /episodes: the rows that ingest makes of the same lines."""

import json
from pathlib import Path

import msgpack
import pytest

from replaylake.datastore.interchange.formats.dsjson.events import EXTRAS, SPACES
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import open_lake

_SAMPLES = Path(__file__).parents[3] / "examples" / "data" / "dsjson"
_JSON = {"content-type": "application/json"}
_COLUMNS = (
    "source_episode_id, step, observation, action, reward, terminated, behavior_log_prob, "
    "timestamp, action_features, action_probs, slot_features, slot_reward, skip_learn, outcome"
)


def _read_lines(name, num):
    return (_SAMPLES / f"{name}.dsjson").read_text().splitlines()[:num]


def _read(name, num):
    return [*map(json.loads, _read_lines(name, num))]


@pytest.fixture
def events(collect_in, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("clicks").create(*SPACES, extras=EXTRAS, rewards_optional=True)
    with collect_in(tmp_path / "lake", "clicks") as one:
        yield one


def test_events_slots_and_slates_are_the_rows_that_ingest_makes(events, tmp_path):
    lines = [_read_lines("articles", 42), _read_lines("pages", 4), _read_lines("banners", 4)]
    sent = [
        *(line for some in lines for line in some),
        # Texts that a parser and a serializer would change.
        '{"EventId": "e", "a": [1], "p":[0.5],"c":{"n": 0.30000000000000004000, "_multi": [{"i": '
        '123456789012345678901},  {"t":"Zo\\u00eb Zoë"}]}}',
        # One slot has no propensity.
        '{"EventId": "f", "c": {"_multi": [{}, {}], "_slots": [{}, {}]},"_outcomes": '
        '[{"_a": [0]}, {"_a": [1], "_p": [0.5]}]}',
    ]
    body = '{"episodes" : [' + " ,\n".join(sent) + "]}"
    for _ in range(2):  # what is sent again is known
        answer = events.client.post("/episodes", content=body.encode(), headers=_JSON)
        assert (answer.status_code, answer.json()) == (202, {"episodes": 52, "steps": 61})
    order = "source_episode_id, step"
    collected = events.read(_COLUMNS, 61, order=order)
    log = tmp_path / "log.dsjson"
    log.write_text("".join(f"{one}\n" for one in sent))
    ingest(events.lake, [log], "log")
    read = events.lake.sql(f"SELECT {_COLUMNS} FROM log.steps ORDER BY {order}").to_pylist()
    assert collected == read
    probs = [row["behavior_log_prob"] for row in read if row["source_episode_id"] == "f"]
    assert [one is None for one in probs] == [True, False]


def test_an_event_in_msgpack_is_json_without_white_space(events):
    context = {"n": 0.1, "_multi": [{"t": "Zoë"}]}
    body = msgpack.packb({"episodes": [{"EventId": "e", "a": [1], "p": [1.0], "c": context}]})
    headers = {"content-type": "application/msgpack"}
    assert events.client.post("/episodes", content=body, headers=headers).status_code == 202
    (row,) = events.read("observation, action_features", 1)
    assert row == {"observation": '{"n":0.1}', "action_features": ['{"t":"Zoë"}']}


def test_a_reward_may_be_reported_later(events):
    (event,) = _read("articles", 1)
    del event["_label_cost"], event["_original_label_cost"]
    page, reward = _read("pages", 1)[0], {"reward": 2.5}
    for outcome in page["_outcomes"]:
        del outcome["_label_cost"]
    assert events.post("/episodes", {"episodes": [event, page]}).status_code == 202
    assert [row["reward"] for row in events.read(num=3, order="reward")] == [0.0, None, None]
    for one in (event, page):
        report = {"episode_id": one["EventId"], **reward}
        assert events.post("/feedback", report).status_code == 202
    rows = events.read("source_episode_id as id, step, reward", 2, "reward = 2.5", "step")
    assert rows == [
        {"id": event["EventId"], "step": 0, "reward": 2.5},
        {"id": page["EventId"], "step": 1, "reward": 2.5},
    ]


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"EventId": None}, "episodes[0].EventId", "required field is missing"),
        ({"_label_probability": 7}, "episodes[0]", "_label_probability: found 7, expected the"),
        ({"_label_Action": 99}, "episodes[0]", "_labelIndex: found"),
        ({"_label_cost": -1e200}, "episodes[0].rewards[0]", "found"),
        ({"observations": ["{}"]}, "episodes[0]", "unknown field"),
    ],
)
def test_an_event_with_a_fault_is_refused_whole(events, changes, field, text):
    (event,) = _read("articles", 1)
    answer = events.post("/episodes", {"episodes": [{**event, **changes}]})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["field"].startswith(field)
    assert text in json.dumps(error)
    assert events.read() == []


def test_an_event_with_members_that_the_dataset_lacks_is_refused(collect_in, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    ingest(lake, [_SAMPLES / "articles.dsjson"], "clicks")
    with collect_in(tmp_path / "lake", "clicks") as server:
        answer = server.post("/episodes", {"episodes": _read("pages", 1)})
        assert answer.status_code == 422
        assert "no column for slot_features, slot_reward" in answer.text


def test_a_dataset_of_dialogues_takes_no_events(collector):
    answer = collector.post("/episodes", {"episodes": _read("articles", 1)})
    assert answer.status_code == 422
