"""Recorded calls: rows of a journal as steps, and what a deletion leaves of them."""

import json
import time

import pyarrow as pa
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete, Text
from replaylake.datastore.errors import SchemaMismatchError
from replaylake.datastore.feedback.journal import Journal
from replaylake.datastore.feedback.recorded_calls import (
    calls_encoder,
    ensure_calls_dataset,
    read_recent_calls,
)
from replaylake.datastore.feedback.segments import frame_records, journal_folder
from replaylake.datastore.interchange.formats.generations.rows import EXTRAS
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.maintenance.purge.purge import purge
from replaylake.datastore.names import new_ulid


@pytest.fixture
def lake(tmp_path):
    return open_lake(tmp_path / "lake", create=True)


def row(episode, step=0, **fields):
    return {
        "episode_id": episode,
        "step": step,
        "env_step": step,
        "agent_id": "",
        "observation": "user: é",
        "action": "4",
        "reward": None,
        "terminated": False,
        "truncated": False,
        "timestamp": time.time_ns() // 1000,
        "policy": "tiny",
        "context": "s:c:3:h",
        "user_id": "ada",
        **fields,
    }


def record(dataset, rows):
    journal = Journal(dataset.table, calls_encoder(dataset, EXTRAS), worker=new_ulid())
    journal.append([json.dumps(one).encode() for one in rows])
    journal.close()


def test_a_row_is_the_same_whether_arrow_or_python_reads_it(lake):
    dataset = lake.dataset("agents")
    ensure_calls_dataset(dataset, EXTRAS)
    encoder = calls_encoder(dataset, EXTRAS)
    tokens = {"observation_tokens": [1, 2], "action_tokens": [3], "action_log_probs": [-0.5]}
    rows = [row("a", **tokens), row("b", policy=None), row("c", action_tokens=[])]
    quick = encoder.try_parse([json.dumps(one).encode() for one in rows])
    assert quick is not None
    assert quick.equals(encoder(rows))
    assert quick.column("action_tokens").to_pylist() == [[3], None, []]


def test_a_commit_states_the_steps_and_the_episodes_that_begin_in_it(lake):
    dataset = lake.dataset("agents")
    ensure_calls_dataset(dataset, EXTRAS)
    record(dataset, [row("a"), row("a", 1), row("b"), row("b", agent_id="sub")])
    record(dataset, [row("a", 2)])
    text = "select num_episodes, num_steps, num_rejected from commits order by version"
    counts = [tuple(one.values()) for one in lake.sql(text).to_pylist()]
    assert counts[-2:] == [(2, 4, 0), (0, 1, 0)]


def test_columns_that_came_after_a_gateway_began_are_encoded_too(lake):
    dataset = lake.dataset("agents")
    ensure_calls_dataset(dataset, EXTRAS)
    encoder = calls_encoder(dataset, EXTRAS)
    ensure_calls_dataset(lake.dataset("agents"), {**EXTRAS, "record_hash": pa.int64()})
    table = encoder([row("a", record_hash=7, unknown=1), row("b")])
    assert table.column("record_hash").to_pylist() == [7, None]
    assert "unknown" not in table.column_names


def test_a_damaged_record_of_a_person_goes_with_a_purge(lake):
    dataset = lake.dataset("agents")
    ensure_calls_dataset(dataset, EXTRAS)
    record(dataset, [row("gateway/ada"), row("gateway/bob", user_id="bob")])
    folder = journal_folder(dataset.table)
    lines = frame_records([b'{"episode_id": "gateway/ada"}', b'{"episode_id": "gateway/bob"}'])
    (folder / "dead-0.damaged").write_bytes(b"".join(lines))
    purge(lake, "agents", "user_id = 'ada'")
    assert (folder / "dead-0.damaged").read_bytes() == lines[1]
    left = lake.sql("select episode_id from agents.steps").to_pylist()
    assert left == [{"episode_id": "gateway/bob"}]
    others = row("gateway/bob", 1, user_id="bob")
    record(dataset, [row("gateway/ada", 1), others])  # what was on its way
    left = lake.sql("select episode_id, step from agents.steps order by step").to_pylist()
    assert left == [{"episode_id": "gateway/bob", "step": step} for step in (0, 1)]


def test_recent_calls_are_those_of_episodes_with_one_since_a_time(lake):
    dataset = lake.dataset("agents")
    ensure_calls_dataset(dataset, EXTRAS)
    assert read_recent_calls(dataset, 0) == []
    now = time.time_ns() // 1000
    old = now - 3_600_000_000
    record(dataset, [row("a", timestamp=old), row("b", timestamp=old), row("c", timestamp=old)])
    time.sleep(0.01)
    between = time.time_ns() // 1000  # older shards are not opened where they need not be
    later = between + 1_000_000
    record(dataset, [row("a", 1, terminated=True, timestamp=later), row("d", timestamp=later)])
    record(dataset, [row("c", 1, timestamp=old)])
    found = read_recent_calls(dataset, between)
    assert [(one.episode_id, one.step, one.ends) for one in found] == [
        ("a", 0, False),
        ("a", 1, True),
        ("d", 0, False),
    ]
    assert found[0].context == "s:c:3:h"


def test_a_dataset_of_other_steps_is_refused(lake):
    lake.dataset("numbers").create(Box((2,)), Discrete(2))
    with pytest.raises(SchemaMismatchError, match=r"expected texts\. Record into another"):
        ensure_calls_dataset(lake.dataset("numbers"), EXTRAS)
    lake.dataset("known").create(Text(), Text())
    with pytest.raises(SchemaMismatchError, match="found rewards that must be known"):
        ensure_calls_dataset(lake.dataset("known"), EXTRAS)
    keyed = lake.dataset("keyed")
    keyed.create(Text(), Text(), rewards_optional=True, unique=["source_episode_id"])
    with pytest.raises(SchemaMismatchError, match="found a unique key"):
        ensure_calls_dataset(keyed, EXTRAS)
