"""Export to dsjson: nothing of an event is lost, and Vowpal Wabbit itself parses every line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.encoding import Encoding
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, Text
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.datastore.interchange.export.export import ExportReceipt, export
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.labels.annotate import annotate

_SAMPLES = Path(__file__).parents[4] / "examples" / "data" / "dsjson"
_ARGUMENTS = {
    "articles": "--cb_explore_adf --epsilon 0.2",
    "pages": "--ccb_explore_adf --epsilon 0.2",
    "banners": "--slates --epsilon 0.2",
}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _export(lake: Lake, tmp_path: Path, name: str = "log") -> tuple[list[Any], ExportReceipt]:
    receipt = export(lake, name, tmp_path / f"{name}.dsjson", format="dsjson")
    lines = (tmp_path / f"{name}.dsjson").read_text().splitlines()
    return [*map(json.loads, lines)], receipt


def _learn(path: Path, arguments: str) -> list[Any]:
    """Learn from a file with VW, which stops at a line that it cannot parse; its predictions."""
    vowpalwabbit = pytest.importorskip("vowpalwabbit")
    vw = vowpalwabbit.Workspace(f"{arguments} --dsjson --strict_parse --quiet")
    predictions = []
    for line in path.read_text().splitlines():
        examples = vw.parse(line)
        if json.loads(line).get("_skipLearn"):
            assert len(examples) == 1  # VW left it out; finishing it would end the process
            continue
        predictions.append(vw.predict(examples))
        vw.learn(examples)
        vw.finish_example(examples)
    return predictions


@pytest.mark.parametrize("name", _ARGUMENTS)
def test_a_round_trip_keeps_every_member_and_vw_learns_the_same(
    lake: Lake, tmp_path: Path, name: str
) -> None:
    source = _SAMPLES / f"{name}.dsjson"
    ingest(lake, [source], name)
    events, receipt = _export(lake, tmp_path, name)
    assert events == [*map(json.loads, source.read_text().splitlines())]
    assert receipt.notes == ()
    exported = tmp_path / f"{name}.dsjson"
    predictions = _learn(exported, _ARGUMENTS[name])
    assert len(predictions) == {"articles": 195}.get(name, 60)
    assert predictions == _learn(source, _ARGUMENTS[name])
    # And what is exported is read as the same rows.
    ingest(lake, [exported], "again")
    columns = "* EXCLUDE (episode_id, dsjson) FROM {}.steps ORDER BY source_episode_id, step"
    again, first = (lake.sql(f"SELECT {columns.format(one)}") for one in ("again", name))
    assert again == first


_CONTEXT = {"U": {"n": 1}, "_multi": [{"T": {"t": 1}}, {"T": {"t": 2}}, {"T": {"t": 3}}]}


def _write(path: Path, *events: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return path


@pytest.mark.parametrize(
    "event",
    [
        {"_label_cost": 0, "_label_Action": 2, "_labelIndex": 1, "_label_probability": 0.3},
        {"_label_cost": -2, "_label_Action": 1, "_labelIndex": 0, "pdrop": 0.5, "_p": [1.0, 0, 0]},
        {"_label_cost": "NaN", "_label_Action": 1, "_labelIndex": 0, "_label_probability": 1},
        {"_label_cost": -1.0, "_label_Action": 3, "_labelIndex": 2, "_skipLearn": True},
        {"_label_Action": 3, "_labelIndex": 2, "_label_probability": 1e-30, "o": [{"v": 1}]},
        {"_label_cost": 0.1, "_label_Action": 1, "_labelIndex": 0, "_ba": [1], "x": {"y": [None]}},
        {"_label_Action": 1, "_labelIndex": 0, "Timestamp": "2026-03-02T08:00:00.1234567Z"},
    ],
)
def test_rare_members_are_kept(lake: Lake, tmp_path: Path, event: dict[str, Any]) -> None:
    ranking = {"a": [event["_label_Action"]], "p": [event.get("_label_probability", 1.0)]}
    whole = {**event, "EventId": "e", **ranking, "c": _CONTEXT}
    ingest(lake, [_write(tmp_path / "log", whole)], "log")
    events, _ = _export(lake, tmp_path)
    assert events == [{"_label_probability": 1.0, **whole}] if "_p" in event else [whole]


def test_the_label_precedes_the_context_and_outcomes_follow_it(lake: Lake, tmp_path: Path) -> None:
    label = {"_label_cost": -1, "_label_probability": 0.5, "_label_Action": 1, "_labelIndex": 0}
    ingest(lake, [_write(tmp_path / "log", {"c": _CONTEXT, "a": [1, 2], **label})], "log")
    text = export(lake, "log", tmp_path / "out", format="dsjson").path
    line = Path(text).read_text()
    assert max(line.index(f'"{name}"') for name in label) < line.index('"c"')
    ingest(lake, [_SAMPLES / "pages.dsjson"], "pages")
    export(lake, "pages", tmp_path / "pages", format="dsjson")
    for line in (tmp_path / "pages").read_text().splitlines():
        assert line.index('"c"') < line.index('"_outcomes"')


def test_a_reward_that_was_annotated_is_the_cost(lake: Lake, tmp_path: Path) -> None:
    event = {"EventId": "e", "_label_Action": 1, "_labelIndex": 0, "a": [1], "p": [0.5]}
    slots = [{"_label_cost": 0.0, "_a": [i], "_p": [0.5], "_o": [0]} for i in range(2)]
    page = {"EventId": "f", "c": {**_CONTEXT, "_slots": [{}, {}]}, "_outcomes": slots}
    ingest(lake, [_write(tmp_path / "log", {**event, "c": _CONTEXT}, page)], "log")
    labels = pa.table({"source_episode_id": ["e", "f"], "score": [4.0, 3.0]})
    annotate(lake, "log", labels, on="source_episode_id", set={"reward": "score"})
    events, receipt = _export(lake, tmp_path)
    costs = {one["EventId"]: one for one in events}
    assert costs["e"]["_label_cost"] == -4.0
    # How the event's reward is to be divided among its slots, nothing says.
    assert costs["f"]["_outcomes"] == slots
    assert receipt.notes == (
        "1 events with several slots whose reward is not the sum of slot_reward, or with an "
        "unknown slot_reward: their reward is not written, only the costs of slot_reward",
    )


def test_a_late_reward_of_slots_without_costs_is_noted_or_written(
    lake: Lake, tmp_path: Path
) -> None:
    """One slot has the reward of its event; among several, nothing says how to divide it."""
    slots = [{"_a": [0], "_p": [0.5]}, {"_a": [1], "_p": [0.5]}]
    half = [{"_label_cost": -1.0, **slots[0]}, slots[1]]
    events = [
        {"EventId": name, "c": {**_CONTEXT, "_slots": [{}] * len(outcomes)}, "_outcomes": outcomes}
        for name, outcomes in (("one", slots[:1]), ("two", slots), ("half", half), ("none", slots))
    ]
    ingest(lake, [_write(tmp_path / "log", *events)], "log")
    labels = pa.table({"source_episode_id": ["one", "two", "half"], "score": [2.0, 3.0, 1.0]})
    annotate(lake, "log", labels, on="source_episode_id", set={"reward": "score"})
    exported, receipt = _export(lake, tmp_path)
    outcomes = {event["EventId"]: event["_outcomes"] for event in exported}
    assert outcomes["one"] == [{"_label_cost": -2.0, **slots[0]}]
    assert [outcomes["two"], outcomes["half"], outcomes["none"]] == [slots, half, slots]
    assert [note[: note.index(" with")] for note in receipt.notes] == ["2 events"]


@pytest.mark.parametrize("is_slates", [False, True])
def test_repeated_namespaces_are_kept_as_vw_reads_them(
    lake: Lake, tmp_path: Path, is_slates: bool
) -> None:
    shared, features = '"U":{"a":1},"V":{"v":1},"U":{"b":1}', '"T":{"t":1},"T":{"u":1}'
    label = '"_label_cost":-1.0,"_label_probability":0.5,"_label_Action":1,"_labelIndex":0,'
    candidates = f'"_multi":[{{{features}}},{{{features}}}]'
    line = f'{{{label}"EventId":"e","a":[1,2],"p":[0.5,0.5],"c":{{{shared},{candidates}}}}}'
    if is_slates:
        candidates = f'"_multi":[{{"_slot_id":0,{features}}}],"_slots":[{{}}]'
        line = (
            f'{{"_label_cost":-1.0,"EventId":"e","c":{{{shared},{candidates}}},'
            '"_outcomes":[{"_a":[0],"_p":[1.0]}]}'
        )
    source = tmp_path / "log"
    source.write_text(f"{line}\n")
    assert ingest(lake, [source], "log", format="dsjson").episodes.committed == 1
    export(lake, "log", tmp_path / "out", format="dsjson")
    assert f'"c":{{{shared},{candidates}}}' in (tmp_path / "out").read_text()
    arguments = "--slates" if is_slates else "--cb_explore_adf"
    assert _learn(tmp_path / "out", arguments) == _learn(source, arguments)


_SLOT = {"_a": [0], "_p": [0.5]}


@pytest.mark.parametrize("cost", [None, "NaN", 7])
def test_a_slot_reward_that_was_annotated_replaces_any_logged_cost(
    lake: Lake, tmp_path: Path, cost: Any
) -> None:
    page = {
        "EventId": "e",
        "c": {**_CONTEXT, "_slots": [{}]},
        "_outcomes": [{"_label_cost": cost, **_SLOT}],
    }
    ingest(lake, [_write(tmp_path / "log", page)], "log")
    labels = pa.table({"source_episode_id": ["e"], "score": [2.0]})
    set_reward, add = {"reward": "score"}, {"slot_reward": "score"}
    annotate(lake, "log", labels, on="source_episode_id", set=set_reward, add=add)
    (event,), receipt = _export(lake, tmp_path)
    assert event["_outcomes"] == [{"_label_cost": -2.0, **_SLOT}]
    assert receipt.notes == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"dsjson": '{"_outcomes":[{},1]}'},
            r"'1' in _outcomes\[1\] of episode p/0, column dsjson",
        ),
        ({"dsjson": '{"_outcomes":{}}'}, "_outcomes of another number"),
        ({"slot_reward": math.inf}, "step 0, column slot_reward: found inf, expected a finite"),
    ],
)
def test_slots_that_were_edited_wrongly_are_refused(
    lake: Lake, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    extras = {
        "action_features": pa.array([["{}", "{}"]] * 2),
        "dsjson": [changes.get("dsjson", "{}"), None],
        "slot_features": ["{}", "{}"],
        "slot_reward": [changes.get("slot_reward", 1.0), 0.0],
    }
    episode = Episode(
        "p/0",
        np.array(["{}", "{}"], object),
        np.array([0, 1]),
        np.array([0.0, 1.0]),
        terminated=True,
        extras=extras,
    )
    lake.dataset("log").append([episode])
    with pytest.raises(SpaceUnsupportedError, match=expected):
        export(lake, "log", tmp_path / "out", format="dsjson")


_NUM = 6


def _decisions(**fields: Any) -> list[Episode]:
    draw = np.random.default_rng(0)
    return [
        Episode(
            f"p/{i}",
            draw.normal(size=(1, 2)).astype(np.float32),
            np.array([i % 3]),
            np.array([float(i)]),
            terminated=True,
            behavior_log_probs=np.log(np.full(1, 0.25, np.float32)),
            source_episode_id=f"d{i}",
            **fields,
        )
        for i in range(_NUM)
    ]


def test_decisions_among_fixed_actions_are_candidates_by_name(lake: Lake, tmp_path: Path) -> None:
    encoding = Encoding((), ("blue", "green", "red"))
    spec = DatasetSpec(Box((2,), "float32"), Discrete(3), 3, encoding=encoding)
    masks = np.array([[True, True, True]])
    lake.dataset("log").append(_decisions(action_masks=masks), spec=spec)
    events, receipt = _export(lake, tmp_path)
    assert len(receipt.notes) == 1  # that of every format without encodings
    assert [event["EventId"] for event in events] == [f"d{i}" for i in range(_NUM)]
    second = events[1]
    assert (second["_label_cost"], second["_label_Action"], second["_labelIndex"]) == (-1, 2, 1)
    assert second["_label_probability"] == pytest.approx(0.25, rel=1e-7)
    assert second["c"]["_multi"][2] == {"action": {"name": "red"}}
    assert [*second["c"]["observation"]] == ["0", "1"]
    predictions = _learn(tmp_path / "log.dsjson", "--cb_explore_adf")
    assert {len(one) for one in predictions} == {3}


def test_only_allowed_actions_are_candidates(lake: Lake, tmp_path: Path) -> None:
    observation = {"age": np.array([31.0]), "city": np.array(["Rome"], object)}
    spec = DatasetSpec(Dict({"age": Box((), "float64"), "city": Text()}), Discrete(4, start=5), 4)
    episode = Episode(
        "p/0",
        observation,
        np.array([8]),
        np.array([1.0]),
        terminated=True,
        action_masks=np.array([[True, False, False, True]]),
        extras={"note": ["x"]},
        policies=np.array(["q"], object),
    )
    lake.dataset("log").append([episode], spec=replace_extras(spec, note=pa.string()))
    (event,), receipt = _export(lake, tmp_path)
    assert [one["action"]["name"] for one in event["c"]["_multi"]] == ["5", "8"]
    assert event["_labelIndex"] == 1
    assert event["c"]["observation"] == {"age0": 31.0, "city": "Rome"}
    assert "_label_probability" not in event
    assert receipt.notes == (
        "columns that an event has no place for: note, policy",
        "1 decisions have no propensity: VW does not learn from them",
    )


def replace_extras(spec: DatasetSpec, **extras: pa.DataType) -> DatasetSpec:
    return DatasetSpec(spec.observation_space, spec.action_space, spec.mask_size, extras)


def test_what_is_no_event_is_refused(lake: Lake, tmp_path: Path) -> None:
    episode = Episode(
        "p/0",
        np.zeros((3, 2), np.float32),
        np.zeros(3, np.int64),
        np.ones(3),
        terminated=True,
    )
    lake.dataset("walk").append([episode])
    with pytest.raises(SpaceUnsupportedError, match="steps 0 to 2, expected one decision, or all"):
        export(lake, "walk", tmp_path / "out", format="dsjson")
    lake.dataset("arm").append(
        [Episode("p/0", np.zeros((1, 2)), np.zeros((1, 2)), np.ones(1), terminated=True)]
    )
    with pytest.raises(SpaceUnsupportedError, match="actions that are not Discrete"):
        export(lake, "arm", tmp_path / "out", format="dsjson")
    ingest(lake, [_SAMPLES / "pages.dsjson"], "pages")
    with pytest.raises(SpaceUnsupportedError, match="steps 1 to 1, expected one decision, or all"):
        export(lake, "pages", tmp_path / "out", format="dsjson", where_steps="step = 1")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"observations": np.array(["age 3"], object)}, "column observation: found 'age 3'"),
        ({"actions": np.array([2])}, "found action 2 of episode p/0, step 0, and 2 candidates"),
        ({"features": ["{}", "[1]"]}, r"column action_features: found '\[1\]'"),
        ({"dsjson": "{"}, "column dsjson: found the end of the line"),
        ({"outcome": "x"}, "column outcome: found 'x', expected JSON"),
        ({"probs": [0.5, None]}, "step 0, column action_probs: found null in the list"),
        ({"probs": [math.nan, 0.5]}, "step 0, column action_probs: found nan in the list"),
    ],
)
def test_columns_that_are_no_json_are_refused(
    lake: Lake, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    extras = {
        "action_features": pa.array([changes.get("features", ["{}", "{}"])]),
        "action_probs": pa.array([changes.get("probs", [0.5, 0.5])]),
        "dsjson": [changes.get("dsjson", "{}")],
        "outcome": [changes.get("outcome", "[]")],
    }
    episode = Episode(
        "p/0",
        changes.get("observations", np.array(["{}"], object)),
        changes.get("actions", np.array([1])),
        np.ones(1),
        terminated=True,
        extras=extras,
    )
    lake.dataset("log").append([episode])
    with pytest.raises(SpaceUnsupportedError, match=expected):
        export(lake, "log", tmp_path / "out", format="dsjson")


@pytest.mark.parametrize("is_slates", [False, True])
def test_slots_that_were_made_elsewhere_are_an_event(
    lake: Lake, tmp_path: Path, is_slates: bool
) -> None:
    """As `POST /episodes` or a writer of Python has them: without members of a log."""
    own = [["{}", '{"b":\n1}'], ["{}", '{"c":1}', '{"d":1}']]
    features = own if is_slates else [own[1]] * 2
    extras = {
        "action_features": pa.array(features, pa.list_(pa.string())),
        "action_probs": pa.array([[0.5, 0.5] + [0.0] * (not is_slates), [0.2, 0.0, 0.8]]),
        "slot_features": ['{"_id":"top"}', '{"_id":"side"}'],
        **({} if is_slates else {"slot_reward": [1.0, 2.0]}),
    }
    episode = Episode(
        "p/0",
        np.array(['{\n"U":\r\n{"n":"Mia"}}'] * 2, object),
        np.array([1, 2]),
        np.array([0.0, 3.0]),
        terminated=True,
        behavior_log_probs=np.log(np.array([0.5, 0.8], np.float32)),
        timestamps=np.array([1_700_000_000_000_001] * 2),
        source_episode_id="page-1",
        extras=extras,
    )
    lake.dataset("log").append([episode])
    (event,), receipt = _export(lake, tmp_path)
    assert receipt.notes == ()
    assert event["EventId"] == "page-1"
    assert event["Timestamp"] == "2023-11-14T22:13:20.000001Z"
    assert event["c"]["_slots"] == [{"_id": "top"}, {"_id": "side"}]
    assert [(one["_a"], one["_p"]) for one in event["_outcomes"]] == [
        ([1, 0], [0.5, 0.5]),
        ([2, 0], [0.8, 0.2]),
    ]
    if is_slates:
        assert event["_label_cost"] == -3.0
        assert [one["_slot_id"] for one in event["c"]["_multi"]] == [0, 0, 1, 1, 1]
    else:
        assert [one["_label_cost"] for one in event["_outcomes"]] == [-1.0, -2.0]
    (prediction,) = _learn(
        tmp_path / "log.dsjson", "--slates" if is_slates else "--ccb_explore_adf"
    )
    assert [len(one) for one in prediction] == ([2, 3] if is_slates else [3, 2])
    ingest(lake, [tmp_path / "log.dsjson"], "again")
    rows = lake.sql("SELECT action, reward, behavior_log_prob AS p FROM again.steps ORDER BY step")
    assert [(row["action"], row["reward"]) for row in rows.to_pylist()] == [(1, 0.0), (2, 3.0)]
    assert rows.column("p").to_pylist() == pytest.approx([math.log(0.5), math.log(0.8)])
