"""Vowpal Wabbit's dsjson: events with features of each candidate, read and followed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.episodes.spaces import Text
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.export.export import export
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.formats.dsjson.events import ACTION_SPACE, parse_event
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.receipt import IngestReceipt
from replaylake.datastore.interchange.ingest.repair import repair
from replaylake.datastore.interchange.ingest.stream.receipt import StreamReceipt
from replaylake.datastore.interchange.ingest.stream.stream import follow
from replaylake.datastore.interchange.sources.source import find_source
from replaylake.datastore.lake.lake import Lake, open_lake
from tests.datastore.interchange.given_lines import GivenLines

_SAMPLES = Path(__file__).parents[4] / "examples" / "data" / "dsjson"
# Personalizer's, shortened: the third of three actions was taken, with probability 0.1.
_EVENT: dict[str, Any] = {
    "_label_cost": -1.5,
    "_label_probability": 0.10000000149011612,
    "_label_Action": 3,
    "_labelIndex": 2,
    "o": [{"v": 1.5, "EventId": "e1", "ActionTaken": False}],
    "Timestamp": "2026-03-02T08:00:00.1234567Z",
    "Version": "1",
    "EventId": "e1",
    "a": [3, 1, 2],
    "c": {
        "User": {"name": "Mia", "age": 31},
        "_multi": [{"T": {"t": "x"}}, {"T": {"t": "y"}}, {"T": {"t": "z"}}],
    },
    "p": [0.1, 0.7, 0.2],
    "VWState": {"m": "N/A"},
    "_original_label_cost": -1.5,
}


def _event(*without: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**_EVENT, **changes}.items() if name not in without}


def _write(path: Path, *events: dict[str, Any] | str) -> Path:
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _ingest(lake: Lake, tmp_path: Path, *events: Any, **how: Any) -> IngestReceipt:
    return ingest(lake, [_write(tmp_path / "log", *events)], "log", format="dsjson", **how)


def _steps(lake: Lake, columns: str = "*") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = lake.sql(
        f"SELECT {columns} FROM log.steps ORDER BY source_episode_id, step"
    ).to_pylist()
    return rows


def test_an_event_is_an_episode_of_one_step(lake: Lake, tmp_path: Path) -> None:
    receipt = _ingest(lake, tmp_path, _EVENT)
    assert (receipt.episodes.committed, receipt.episodes.rejected, receipt.notes) == (1, 0, ())
    (row,) = _steps(lake)
    assert row["source_episode_id"] == "e1"
    assert row["observation"] == '{"User": {"name": "Mia", "age": 31}}'
    assert row["action_features"] == ['{"T": {"t": "x"}}', '{"T": {"t": "y"}}', '{"T": {"t": "z"}}']
    assert (row["step"], row["action"], row["reward"]) == (0, 2, 1.5)
    assert (row["terminated"], row["truncated"]) == (True, False)
    assert row["behavior_log_prob"] == pytest.approx(math.log(0.1), rel=1e-7)
    assert row["action_probs"] == [0.7, 0.2, 0.1]
    assert row["timestamp"].isoformat() == "2026-03-02T08:00:00.123456+00:00"
    assert row["original_label_cost"] == -1.5
    assert json.loads(row["outcome"]) == _EVENT["o"]
    assert json.loads(row["dsjson"]) == {
        name: _EVENT[name]
        for name in ("_label_probability", "Timestamp", "Version", "a", "p", "VWState")
    }
    spec = lake.dataset("log").spec
    assert (spec.observation_space, spec.action_space) == (Text(), ACTION_SPACE)
    assert (spec.mask_size, spec.rewards_optional) == (None, True)


def test_a_sample_has_the_costs_and_probabilities_of_its_lines(lake: Lake) -> None:
    source = find_source([_SAMPLES / "articles.dsjson"])
    assert find_format("auto", source.files).name == "dsjson"
    receipt = ingest(lake, [_SAMPLES / "articles.dsjson"], "log")
    assert (receipt.format, receipt.episodes.committed, receipt.episodes.rejected) == (
        "dsjson",
        200,
        0,
    )
    events = {
        event["EventId"]: event
        for event in map(json.loads, (_SAMPLES / "articles.dsjson").read_text().splitlines())
    }
    rows = _steps(lake)
    assert len(rows) == len(events) == 200
    for row in rows:
        event = events[row["source_episode_id"]]
        is_skipped = event.get("_skipLearn", False)
        assert row["skip_learn"] is (True if is_skipped else None)
        assert row["reward"] == (None if is_skipped else -event["_label_cost"])
        assert row["action"] == event["_labelIndex"]
        assert row["behavior_log_prob"] == pytest.approx(math.log(event["_label_probability"]))
        candidates = [*map(json.loads, row["action_features"])]
        assert {**json.loads(row["observation"]), "_multi": candidates} == event["c"]
        ranked = dict(zip(event["a"], event["p"], strict=True))
        assert row["action_probs"] == [ranked[i + 1] for i in range(len(candidates))]
    assert sum(row["reward"] is None for row in rows) == 5


def test_features_are_kept_to_the_letter(lake: Lake, tmp_path: Path) -> None:
    features = r'{"f":0.1234567890123456789, "f" : 2E-7, "u":"ü\u00fc \"}{,[", "n":[1, {"k":null}]}'
    shared = f'"User" :{features}'
    line = f'{{"a":[1],"p":[1.0],"c":{{ {shared} , "_multi":[ {features} ] }},"EventId":"e"}}'
    _ingest(lake, tmp_path, line)
    (row,) = _steps(lake)
    assert row["observation"] == f"{{{shared}}}"
    assert row["action_features"] == [features]


@pytest.mark.parametrize(
    ("changes", "without", "expected"),
    [
        # Rankings count from 1, or as simulators have them from 0.
        ({"a": [3, 1, 2]}, (), [0.7, 0.2, 0.1]),
        ({"a": [2, 0, 1]}, (), [0.7, 0.2, 0.1]),
        # One that could count from either says it by its first.
        ({"a": [2, 1], "p": [0.1, 0.9]}, (), [0.0, 0.9, 0.1]),
        # No probabilities of all candidates: a part, twice the same, or not the label's.
        ({"a": [3, 1], "p": [0.1, 0.2]}, (), None),
        ({"a": [3, 3, 1], "p": [0.1, 0.7, 0.2]}, (), None),
        ({"p": [0.5, 0.3, 0.2]}, (), None),
        ({}, ("p",), None),
    ],
)
def test_probabilities_of_candidates(
    lake: Lake, tmp_path: Path, changes: Any, without: Any, expected: list[float] | None
) -> None:
    _ingest(lake, tmp_path, _event(*without, **changes), _event(EventId="e2"))
    first, _ = _steps(lake, "action, action_probs, source_episode_id, step")
    assert (first["action"], first["action_probs"]) == (2, expected)


def test_an_event_without_a_label_takes_its_action_from_the_ranking(
    lake: Lake, tmp_path: Path
) -> None:
    labels = ("_label_cost", "_label_probability", "_label_Action", "_labelIndex")
    _ingest(lake, tmp_path, _event(*labels))
    (row,) = _steps(lake, "action, reward, exp(behavior_log_prob) as p")
    assert row == {"action": 2, "reward": None, "p": pytest.approx(0.1)}


@pytest.mark.parametrize(
    ("ranking", "action"), [([1, 2], 0), ([1], 0), ([2], 1), ([0, 1], 0), ([3, 2], 2)]
)
def test_a_ranking_of_some_candidates_counts_from_1_unless_it_has_a_0(
    ranking: list[int], action: int
) -> None:
    labels = ("_label_cost", "_label_probability", "_label_Action", "_labelIndex")
    probs = [1 / len(ranking)] * len(ranking)
    _, (row,) = parse_event(json.dumps(_event(*labels, a=ranking, p=probs)).encode())
    assert (row["action"], row["behavior_prob"]) == (action, probs[0])
    assert row["action_probs"][action] == probs[0]


def test_a_reward_that_is_none_is_unknown(lake: Lake, tmp_path: Path) -> None:
    events = [
        _event(_label_cost="NaN"),
        _event(EventId="e2", _skipLearn=True),
        _event(EventId="e3", _skipLearn=False, pdrop=0.75),
    ]
    _ingest(lake, tmp_path, *events)
    rows = _steps(lake, "reward, skip_learn, pdrop, dsjson->>'$._label_cost' as cost")
    assert [(row["reward"], row["skip_learn"], row["pdrop"], row["cost"]) for row in rows] == [
        (None, None, None, "NaN"),
        (None, True, None, "-1.5"),
        (1.5, False, 0.75, None),
    ]


_MULTI = _EVENT["c"]["_multi"]


_FAULTS: list[tuple[Any, str]] = [
    ("[CHECKPOINT INFO LINE]", "found '[CHECKPOINT INFO LINE]', expected one JSON object"),
    ('{"a":[1]', "found the end of the line after the member 'a'"),
    ('{"a":[1],"a":[2]}', "found the member 'a' twice"),
    ('{"c":{"_multi":[{}],"_multi":[{}]}}', "c: found the member '_multi' twice"),
    ('{"a":NaN}', "found NaN, which is not JSON"),
    ('{"RewardValue":1.0,"EventId":"e9"}', "found the reward '1.0' of the event 'e9' without"),
    (_event("c"), "expected the context c"),
    (_event(c=[1]), "c: found '[1]', expected an object of features"),
    (_event(c={"User": {}}), "expected _multi, a list of candidates"),
    (_event(c={"_multi": []}), "c._multi: found '[]', expected a list of one object"),
    (_event(c={"_multi": [{}, 3]}), "c._multi[1]: found '3', expected an object"),
    (_event("_label_Action", "_labelIndex", "a"), "expected the action that was taken"),
    (_event("_label_Action", "_labelIndex", a=[4, 1]), "a: found '[4, 1]', expected the numbers"),
    (_event("_label_Action", "_labelIndex", a=[0, 3]), "a: found '[0, 3]', expected the numbers"),
    (_event("_label_Action", "a", _labelIndex=3), "found 4, expected 1 to 3 candidates"),
    (_event(_label_Action=2), "_labelIndex: found 2 beside _label_Action 2, expected 1"),
    (_event("_labelIndex", _label_Action=1.5), "_label_Action: found 1.5, expected a whole"),
    (_event(_label_probability=0), "_label_probability: found 0, expected the probability"),
    (_event(_label_probability=1.5), "_label_probability: found 1.5"),
    (_event(_label_cost="high"), "_label_cost: found '\"high\"', expected a finite number"),
    (_event(pdrop=1), "pdrop: found 1, expected 0 or more and below 1"),
    (_event(_skipLearn=1), "_skipLearn: found '1', expected true or false"),
    (_event(a=[1.5]), "a: found '[1.5]', expected a list of whole numbers"),
    (_event(EventId=7), "EventId: found '7', expected text"),
    (_event(Timestamp="noon"), "Timestamp: found '\"noon\"', expected a time"),
    (_event("_labelIndex", _label_ca={"action": 1.5}), "found _label_ca, a continuous action"),
    (_event(c={"_multi": _MULTI, "_slots": [{}]}), "_outcomes: found no list, expected one"),
]


def test_a_line_with_a_fault_is_rejected_alone_with_the_reason(lake: Lake, tmp_path: Path) -> None:
    lines = [line if isinstance(line, str) else json.dumps(line) for line, _ in _FAULTS]
    receipt = _ingest(lake, tmp_path, _event(EventId="good"), *lines)
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, len(_FAULTS))
    found = lake.sql("SELECT * FROM log.quarantine ORDER BY file_row").to_pylist()
    for number, (one, (_, reason), line) in enumerate(zip(found, _FAULTS, lines, strict=True), 2):
        assert one["checks"] == ["malformed"]
        assert one["reasons"][0].startswith(f"log line {number}: ")
        assert reason in one["reasons"][0]
        # The line is there to be corrected, and is no decision before it is.
        assert json.loads(one["row"])["dsjson"] == line
    assert repair(lake.dataset("log")).num_repaired_episodes == 0
    assert len(_steps(lake)) == 1


def test_damaged_lines_are_read_or_rejected_with_a_reason() -> None:
    lines = [
        line
        for path in sorted(_SAMPLES.glob("*.dsjson"))
        for line in path.read_bytes().splitlines()[:3]
    ]
    draw = random.Random(5)
    num_rejected = 0
    for _ in range(3000):
        damaged = bytearray(draw.choice(lines))
        if draw.random() < 0.2:
            del damaged[draw.randrange(len(damaged)) :]
        for _ in range(draw.randrange(4) if damaged else 0):
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        try:
            _, rows = parse_event(bytes(damaged))
        except SourceInvalidError as error:
            num_rejected += "found" in str(error)
            continue
        assert all(row["action"] < len(row["action_features"]) for row in rows)
    assert num_rejected > 1000


def test_a_file_that_is_cut_off_has_its_whole_lines(lake: Lake, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes((_SAMPLES / "articles.dsjson").read_bytes()[:20_000])
    receipt = ingest(lake, [path], "log")
    assert receipt.episodes.committed == path.read_bytes().count(b"\n")
    assert receipt.episodes.rejected == 1


def test_values_too_deep_are_rejected(lake: Lake, tmp_path: Path) -> None:
    deep = '{"c":' + "[" * 100_000 + "]" * 100_000 + "}"
    receipt = _ingest(lake, tmp_path, _EVENT, deep)
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 1)


def test_two_events_of_one_id_are_both_rejected(lake: Lake, tmp_path: Path) -> None:
    receipt = _ingest(lake, tmp_path, _EVENT, _event(EventId="e2"), _event(_label_cost=0))
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 1)
    assert [row["source_episode_id"] for row in _steps(lake)] == ["e2"]


def test_lines_that_were_written_twice_are_one_event(lake: Lake, tmp_path: Path) -> None:
    """As where a log was delivered again in part; without an id they may be two events."""
    first = _write(tmp_path / "log-1", _EVENT, _event("EventId"), _PAGE)
    second = _write(tmp_path / "log-2", _PAGE, _event("EventId"), _EVENT, _event(EventId="e2"))
    receipt = ingest(lake, [first, second], "log", format="dsjson")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (5, 0)
    assert receipt.notes == ("2 lines equal one before them, and are read once",)
    ids = [row["source_episode_id"] for row in _steps(lake)]
    assert ids == ["1", "3", "e1", "e2", "page", "page"]


def test_events_without_an_id_are_numbered(lake: Lake, tmp_path: Path) -> None:
    _ingest(lake, tmp_path, _event("EventId"), _event("EventId"), _event())
    assert [row["source_episode_id"] for row in _steps(lake)] == ["0", "1", "e1"]


_LABELS = ("_label_cost", "_original_label_cost", "o")
_KEY = {"unique": ["source_episode_id"], "late": ["original_label_cost", "outcome"]}


def test_a_late_reward_is_stored_in_the_event_that_lacks_it(lake: Lake, tmp_path: Path) -> None:
    _ingest(lake, tmp_path, _event(*_LABELS), **_KEY)
    receipt = ingest(lake, [_write(tmp_path / "later", _EVENT, _event(EventId="e2"))], "log")
    assert (receipt.episodes.committed, receipt.episodes.already_present) == (1, 1)
    rows = _steps(lake, "reward, original_label_cost, outcome")
    assert [(row["reward"], row["original_label_cost"]) for row in rows] == [(1.5, -1.5)] * 2
    assert json.loads(rows[0]["outcome"]) == _EVENT["o"]


def _follow(lake: Lake, *chunks: Sequence[Any], **how: Any) -> StreamReceipt:
    return follow(lake, GivenLines(chunks), "log", **{"flush_every_s": 0.0, **how})


def _counts(receipt: StreamReceipt) -> tuple[int, int, int]:
    lines = receipt.lines
    return lines.committed, lines.rejected, lines.already_present


def test_a_stream_has_the_rows_of_the_file(lake: Lake) -> None:
    events = [*map(json.loads, (_SAMPLES / "articles.dsjson").read_text().splitlines())][:60]
    receipt = _follow(lake, events[:7], events[7:])
    assert _counts(receipt) == (60, 0, 0)
    # Again from any line: nothing twice.
    assert _counts(_follow(lake, events[50:])) == (0, 0, 10)
    columns = (
        "source_episode_id, step, observation, action, reward, terminated, behavior_log_prob, "
        "timestamp, action_features, action_probs, skip_learn, original_label_cost, outcome"
    )
    streamed = _steps(lake, columns)
    assert len(streamed) == 60
    by_id = {row["source_episode_id"]: row for row in streamed}
    for event in events:
        _, (row,) = parse_event(json.dumps(event).encode())
        stored = by_id[event["EventId"]]
        for name in columns.split(", ")[2:]:
            if name != "behavior_log_prob":
                assert stored[name] == row.get(name), name


def test_a_stream_stores_late_rewards_by_the_key(lake: Lake) -> None:
    receipt = _follow(lake, [_event(*_LABELS), _event(EventId="e2")], [_EVENT], **_KEY)
    assert _counts(receipt) == (2, 0, 1)
    assert receipt.keys.late_values == 1
    assert [row["reward"] for row in _steps(lake)] == [1.5, 1.5]


def test_a_stream_rejects_an_event_without_an_id(lake: Lake) -> None:
    receipt = _follow(lake, [_EVENT, _event("EventId")])
    assert _counts(receipt) == (1, 1, 0)
    assert "expected an EventId to follow a stream" in receipt.reasons[0].example


def _outcome(*actions: int, **changes: Any) -> dict[str, Any]:
    probs = [1 / len(actions)] * len(actions)
    return {"_label_cost": -1.0, "_a": [*actions], "_p": probs, **changes}


_SLOTS = [{"_id": "top", "S": {"size": 2}}, {"_id": "side", "_inc": [0, 2]}]
_PAGE = {
    "EventId": "page",
    "c": {"User": {"name": "Mia"}, "_multi": _MULTI, "_slots": _SLOTS},
    "_outcomes": [_outcome(1, 0, 2), _outcome(2, 0, _label_cost=0.25, _o=[0.25])],
    "VWState": {"m": "N/A"},
}
_BANNER = {
    "_label_cost": -3.0,
    "EventId": "slate",
    "c": {
        "User": {"name": "Mia"},
        "_multi": [
            {"_slot_id": 1, "C": {"red": 1}},
            {"_slot_id": 0, "T": {"buy": 1}},
            {"_slot_id": 1, "C": {"blue": 1}},
        ],
        "_slots": [{"_id": "text"}, {"_id": "color"}],
    },
    "_outcomes": [{"_a": [0], "_p": [1.0]}, {"_a": [1, 0], "_p": [0.75, 0.25]}],
}


def test_slots_are_steps_with_the_reward_of_the_event_in_the_last(
    lake: Lake, tmp_path: Path
) -> None:
    _ingest(lake, tmp_path, _PAGE)
    first, second = _steps(lake)
    assert [first["step"], second["step"]] == [0, 1]
    assert [first["terminated"], second["terminated"]] == [False, True]
    assert first["observation"] == second["observation"] == '{"User": {"name": "Mia"}}'
    assert [*map(json.loads, second["action_features"])] == _MULTI
    assert [json.loads(row["slot_features"]) for row in (first, second)] == _SLOTS
    assert [first["action"], second["action"]] == [1, 2]
    assert [first["slot_reward"], second["slot_reward"]] == [1.0, -0.25]
    assert [first["reward"], second["reward"]] == [0.0, 0.75]
    # What the first slot took, and what is not in _inc, the second could not take.
    assert first["action_probs"] == pytest.approx([1 / 3] * 3)
    assert second["action_probs"] == [0.5, 0.0, 0.5]
    assert math.exp(second["behavior_log_prob"]) == pytest.approx(0.5)
    assert json.loads(first["dsjson"])["_outcomes"] == _PAGE["_outcomes"]
    assert second["dsjson"] is None


def test_slots_of_slates_have_candidates_of_their_own(lake: Lake, tmp_path: Path) -> None:
    _ingest(lake, tmp_path, _BANNER)
    first, second = _steps(lake)
    assert [*map(json.loads, first["action_features"])] == [{"_slot_id": 0, "T": {"buy": 1}}]
    assert [json.loads(text)["C"] for text in second["action_features"]] == [
        {"red": 1},
        {"blue": 1},
    ]
    assert [first["action"], second["action"]] == [0, 1]
    assert second["action_probs"] == [0.25, 0.75]
    assert [first["reward"], second["reward"]] == [0.0, 3.0]
    assert "slot_reward" not in {**first} or first["slot_reward"] is None


def test_samples_of_slots_have_the_costs_of_their_lines(lake: Lake) -> None:
    for name in ("pages", "banners"):
        events = [*map(json.loads, (_SAMPLES / f"{name}.dsjson").read_text().splitlines())]
        receipt = ingest(lake, [_SAMPLES / f"{name}.dsjson"], name)
        # All have two steps, some the same ones: neither a time limit nor written twice.
        assert receipt.checks == ()
        rows = lake.sql(f"SELECT * FROM {name}.steps ORDER BY timestamp, step").to_pylist()
        assert len(rows) == 120
        outcomes = [one for event in events for one in event["_outcomes"]]
        assert [row["action"] for row in rows] == [one["_a"][0] for one in outcomes]
        probs = [math.exp(row["behavior_log_prob"]) for row in rows]
        assert probs == pytest.approx([one["_p"][0] for one in outcomes])
        returns = lake.sql(f'SELECT "return" AS r FROM {name}.episodes ORDER BY started_at').column(
            "r"
        )
        costs = [
            event.get("_label_cost", sum(one.get("_label_cost", 0) for one in event["_outcomes"]))
            for event in events
        ]
        assert returns.to_pylist() == [-cost for cost in costs]


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [
        ([_outcome(1)], "_outcomes: found 1 outcomes, expected one outcome for each of the 2"),
        ([_outcome(1), 3], "_outcomes[1]: found '3', expected an object"),
        ([_outcome(1), _outcome(3)], "_outcomes[1]._a: found 3, expected 0 to 2"),
        ([_outcome(1), {"_label_cost": 1}], "_outcomes[1]._a: found no action"),
        ([_outcome(1, _p=[0]), _outcome(0)], "_outcomes[0]._p: found 0, expected the probability"),
    ],
)
def test_slots_with_a_fault_are_rejected(
    lake: Lake, tmp_path: Path, outcomes: list[Any], reason: str
) -> None:
    receipt = _ingest(lake, tmp_path, _EVENT, {**_PAGE, "_outcomes": outcomes})
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 1)
    (found,) = lake.sql("SELECT reasons FROM log.quarantine").to_pylist()
    assert reason in found["reasons"][0]


def test_a_slate_of_an_unknown_slot_is_rejected() -> None:
    context = {**_BANNER["c"], "_multi": [{"_slot_id": 0}, {"_slot_id": 2}]}
    with pytest.raises(SourceInvalidError, match="_slot_id: found 2, expected the number of one"):
        parse_event(json.dumps({**_BANNER, "c": context}).encode())


def test_a_page_of_which_one_cost_is_unknown_has_no_reward() -> None:
    outcomes = [_outcome(1), {"_a": [0], "_p": [0.5]}]
    _, rows = parse_event(json.dumps({**_PAGE, "_outcomes": outcomes}).encode())
    assert [(row["reward"], row["slot_reward"]) for row in rows] == [(0.0, 1.0), (None, None)]


def test_slots_that_were_not_shown_have_no_rewards(lake: Lake, tmp_path: Path) -> None:
    _ingest(lake, tmp_path, _PAGE, {**_PAGE, "EventId": "skipped", "_skipLearn": True})
    rows = _steps(lake, "source_episode_id as id, reward, slot_reward")
    assert [(row["id"], row["reward"], row["slot_reward"]) for row in rows] == [
        ("page", 0.0, 1.0),
        ("page", 0.75, -0.25),
        ("skipped", 0.0, None),
        ("skipped", None, None),
    ]
    # The export has the costs of the log all the same.
    export(lake, "log", tmp_path / "out", format="dsjson")
    events = [*map(json.loads, (tmp_path / "out").read_text().splitlines())]
    assert [event["_outcomes"] for event in events] == [_PAGE["_outcomes"]] * 2


def test_a_stream_has_all_slots_of_an_event_once(lake: Lake) -> None:
    key = {"unique": ["source_episode_id", "step"]}
    assert _counts(_follow(lake, [_PAGE, _BANNER], [_PAGE], **key)) == (4, 0, 2)
    rows = _steps(lake, "source_episode_id as id, step")
    assert [(row["id"], row["step"]) for row in rows] == [
        ("page", 0),
        ("page", 1),
        ("slate", 0),
        ("slate", 1),
    ]
