"""Rows parsed by Arrow equal those encoded one by one, or are left to that."""

import json

import hypothesis
import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, Text
from replaylake.datastore.feedback.decisions import (
    decisions_encoder,
    decisions_schema,
    ensure_feedback_tables,
    rewards_schema,
)
from replaylake.datastore.feedback.row_encoder import can_parse, parse_records
from replaylake.datastore.feedback.segments import Segment, commit_segment, frame_records
from replaylake.datastore.lake.lake import open_lake

SCHEMA = decisions_schema(Box((3,)), Discrete(2))

doubles = st.floats(allow_nan=False, allow_infinity=False, width=32)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@st.composite
def records(draw):
    return {
        "decision_id": draw(texts),
        "request_id": draw(st.none() | texts),
        "episode_id": draw(st.none() | texts),
        "timestamp": draw(st.integers(0, 2**53)),
        "policy": draw(texts),
        "policy_version": draw(st.integers(0, 2**31)),
        "observation": draw(st.lists(doubles | st.integers(-9, 9), min_size=3, max_size=3)),
        "action": draw(st.integers(0, 1)),
        "log_prob": draw(st.none() | doubles),
        "deterministic": draw(st.booleans()),
        "action_mask": draw(st.none() | st.lists(st.booleans(), min_size=2, max_size=2)),
    }


@pytest.mark.slow
@hypothesis.given(st.lists(records(), min_size=1, max_size=5))
def test_each_value_is_the_one_that_was_written(rows):
    table = parse_records([orjson.dumps(row) for row in rows], SCHEMA)
    assert table.schema == SCHEMA
    for row, found in zip(rows, table.to_pylist(), strict=True):
        assert found["decision_id"] == row["decision_id"]
        assert found["episode_id"] == row["episode_id"]
        assert found["timestamp"].timestamp() == pytest.approx(row["timestamp"] / 1e6)
        assert found["observation"] == [float(np.float32(x)) for x in row["observation"]]
        assert found["action_mask"] == row["action_mask"]
        assert found["log_prob"] == row["log_prob"]


def good(**changes):
    row = {
        "decision_id": "d",
        "timestamp": 1,
        "policy": "p",
        "policy_version": 1,
        "observation": [1, 2, 3],
        "action": 0,
        "deterministic": True,
    }
    return {**row, **changes}


@pytest.mark.parametrize(
    "row",
    [
        good(observation=[1, 2]),
        good(observation=[1, 2, None]),
        good(observation=None),
        good(observation=[[1], [2], [3]]),
        good(action=0.5),
        good(action="0"),
        good(policy=None),
        good(decision_id=7),
        good(action_mask=[True]),
        good(unknown=1),
        good(timestamp=2**70),
    ],
    ids=repr,
)
def test_what_does_not_fit_is_left_to_the_slower_reading(row):
    assert parse_records([orjson.dumps(good()), json.dumps(row).encode()], SCHEMA) is None


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"{}{}", b"\xff"])
def test_no_json_is_left_to_it_too(line):
    assert parse_records([orjson.dumps(good()), line], SCHEMA) is None


@pytest.mark.parametrize("first", [b"null", b" null", b"null{}"])
def test_null_first_is_left_to_it_too(first):
    assert parse_records([first, orjson.dumps(good())], SCHEMA) is None


def test_absent_fields_are_null_and_none_is_none():
    table = parse_records([orjson.dumps(good())], SCHEMA)
    assert table.column("request_id").null_count == 1
    assert table.column("action_mask").null_count == 1
    assert parse_records([], SCHEMA).num_rows == 0


def test_lists_of_structs_are_read_as_they_were_written():
    run = pa.struct([("start", pa.int32()), ("version", pa.int64())])
    schema = pa.schema({"runs": pa.list_(pa.field("element", run)), "p": pa.list_(pa.float32())})
    rows = [{"runs": [{"start": 0, "version": 2**40}], "p": [0.1]}, {"runs": []}, {"p": None}]
    table = parse_records([json.dumps(row).encode() for row in rows], schema)
    assert table.schema == schema
    assert table.column("runs").to_pylist() == [[{"start": 0, "version": 2**40}], [], None]
    for wrong in ({"start": "0"}, {"start": 2**40}, {"other": 1}, [1]):
        line = json.dumps({"runs": [wrong]}).encode()
        assert parse_records([line], schema) is None
    assert not can_parse(pa.schema({"a": pa.list_(pa.struct([("b", pa.list_(pa.int8()))]))}))


def test_only_flat_columns():
    assert can_parse(SCHEMA)
    assert can_parse(rewards_schema(Box((3,), dtype="float64")))
    assert can_parse(pa.schema([pa.field("a", pa.int16())]))
    assert not can_parse(decisions_schema(Dict({"a": Box((2,))}), Discrete(2)))
    assert can_parse(decisions_schema(Text(), Discrete(2)))
    assert not can_parse(decisions_schema(Box((8, 8), dtype="uint8"), Discrete(2)))


def test_a_segment_is_committed_either_way(tmp_path):
    dataset = open_lake(tmp_path / "lake", create=True).dataset("d")
    ensure_feedback_tables(dataset, Box((3,)), Discrete(2))
    encode = decisions_encoder(dataset)
    plain = [good(decision_id=f"d{i}", episode_id="e", action=i % 2) for i in range(4)]
    # What the quick way leaves to the other: a number with a point where the column holds integers.
    odd = [good(decision_id="d9", policy_version=1.0)]
    for sequence, rows in enumerate([plain, plain[:1] + odd]):
        path = tmp_path / f"w-{sequence}.jsonl"
        path.write_bytes(b"".join(frame_records(map(orjson.dumps, rows))))
        done = commit_segment(dataset.decisions, encode, "w", Segment(sequence, path))
        assert (done.num_rows, done.num_damaged) == (len(rows), 0)
    assert encode.try_parse([orjson.dumps(odd[0])]) is None
    found = dataset.decisions.snapshot().read(["decision_id", "action"]).to_pylist()
    assert sorted(row["decision_id"] for row in found) == ["d0", "d0", "d1", "d2", "d3", "d9"]
    quick = encode.try_parse([orjson.dumps(row) for row in plain])
    assert quick.equals(encode(plain))
