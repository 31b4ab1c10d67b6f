"""Events of Vowpal Wabbit by POST /episodes: the rows that ingest makes of the same lines."""

import json
from pathlib import Path

import pytest

from replaylake.datastore.interchange.formats.dsjson.events import EXTRAS, SPACES
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import open_lake

_SAMPLES = Path(__file__).parents[3] / "examples" / "data" / "dsjson"
_COLUMNS = (
    "source_episode_id, step, observation, action, reward, terminated, behavior_log_prob, "
    "timestamp, action_features, action_probs, slot_features, slot_reward, skip_learn, outcome"
)


def _read(name, num):
    return [*map(json.loads, (_SAMPLES / f"{name}.dsjson").read_text().splitlines()[:num])]


@pytest.fixture
def events(collect_in, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("clicks").create(*SPACES, extras=EXTRAS, rewards_optional=True)
    with collect_in(tmp_path / "lake", "clicks") as one:
        yield one


def _compact(row):
    """White space is not part of a value, and JSON is sent again by whoever sends it."""
    texts = {
        name: row[name] and json.loads(row[name])
        for name in ("observation", "slot_features", "outcome")
    }
    return {**row, **texts, "action_features": [*map(json.loads, row["action_features"])]}


def test_events_slots_and_slates_are_the_rows_that_ingest_makes(events, tmp_path):
    sent = [*_read("articles", 42), *_read("pages", 4), *_read("banners", 4)]
    for _ in range(2):  # what is sent again is known
        answer = events.post("/episodes", {"episodes": sent})
        assert (answer.status_code, answer.json()) == (202, {"episodes": 50, "steps": 58})
    order = "source_episode_id, step"
    collected = events.read(_COLUMNS, 58, order=order)
    log = tmp_path / "log.dsjson"
    log.write_text("".join(f"{json.dumps(one)}\n" for one in sent))
    ingest(events.lake, [log], "log")
    read = events.lake.sql(f"SELECT {_COLUMNS} FROM log.steps ORDER BY {order}").to_pylist()
    assert [*map(_compact, collected)] == [*map(_compact, read)]


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
