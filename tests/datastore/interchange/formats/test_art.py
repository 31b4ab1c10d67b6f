"""ART's trajectory groups: files that ART wrote, in both versions, and those that we export."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.interchange.export.export import export
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake, open_lake

_FOLDER = Path(__file__).parents[3] / "fixtures" / "art"
_NAMES = ("agent_id", "step", "action", "reward", "terminated", "truncated", "is_trainable")
_CALLED = 'add({"a": 1})'


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _rows(lake: Lake, dataset: str = "talks") -> list[dict[str, Any]]:
    order = "source_episode_id, agent_id, step"
    return lake.sql(f"SELECT * FROM {dataset}.steps ORDER BY {order}").to_pylist()


def test_a_file_of_version_1(lake: Lake) -> None:
    receipt = ingest(lake, [_FOLDER / "v1.parquet"], "talks")
    assert (receipt.format, receipt.episodes.committed) == ("art", 2)
    assert "1 rows have no generation, such as groups without" in " ".join(receipt.notes)
    rows = _rows(lake)
    assert [tuple(row[name] for name in _NAMES) for row in rows] == [
        ("", 0, _CALLED, 0.0, False, False, None),
        ("", 1, "It is 2.", 1.0, True, False, None),
        ("", 0, "Let me see.", 0.0, False, False, False),
        ("", 1, "3", 0.25, True, False, None),
    ]
    assert [row["observation"] for row in rows[:2]] == [
        "system: Be brief.\nuser: 1 + 1?",
        "tool: 2",
    ]
    assert {(row["group_id"], row["group_id_source"]) for row in rows} == {("v1/0", "given")}
    assert rows[0]["source_episode_id"] == "v1/0/0"
    metadata = json.loads(rows[0]["metadata"])
    assert (metadata["task"], metadata["ground_truth"]) == ("sum", "2")
    assert metadata["group_metadata"] == {"level": 1}
    assert (metadata["metrics"], metadata["logs"]) == ({"num_calls": 1}, ["began"])
    assert metadata["tools"][0]["function"]["name"] == "add"


def test_a_file_of_version_2(lake: Lake) -> None:
    receipt = ingest(lake, [_FOLDER / "v2.parquet"], "talks")
    assert (receipt.format, receipt.episodes.committed) == ("art", 4)  # agents
    assert "2 rows have no generation" in " ".join(receipt.notes)
    rows = _rows(lake)
    assert [tuple(row[name] for name in _NAMES) for row in rows] == [
        ("", 0, _CALLED, 0.0, False, False, None),
        ("", 1, "It is 2.", 1.0, True, False, None),
        # A further history is an agent, and a cut answer a truncation.
        ("~1", 0, "Two.", 1.0, True, False, None),
        ("", 0, "Let me see.", 0.0, False, False, False),
        ("", 1, "3", 0.25, False, True, None),
        # Two recorded calls, of which the second goes on from the first.
        ("", 0, "Two.", 0.0, False, False, None),
        ("", 1, "Yes.", 2.0, True, False, None),
    ]
    assert [row["policy_version"] for row in rows[:3]] == [4, 4, 4]
    assert rows[6]["observation"] == "user: Sure?"
    assert [(row["policy"], row["sampling"]) for row in rows[5:]] == [
        ("qwen", '{"temperature":0.5}')
    ] * 2
    logged = json.loads(rows[1]["metadata"])["logprobs"]["content"][0]
    assert (logged["token"], logged["logprob"]) == ("token_id:7", -0.5)


def test_an_export_comes_back_and_is_exported_alike(lake: Lake, tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    asked = {"role": "user", "content": "1 + 1?"}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    got = {"role": "tool", "tool_call_id": "c1", "content": "2"}
    said = {"role": "assistant", "content": "2"}
    records = [
        {"id": "a", "group_id": "g", "messages": [asked, called, got, said], "reward": 1.0},
        {"id": "b", "group_id": "g", "messages": [asked, said], "reward": 0.5},
        {"id": "c", "group_id": "h", "messages": [asked, said, got], "reward": 0.0},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    ingest(lake, [path], "chats")
    export(lake, "chats", tmp_path / "first.parquet", format="art")
    receipt = ingest(lake, [tmp_path / "first.parquet"], "talks")
    assert (receipt.format, receipt.episodes.rejected) == ("art", 0)
    names = ("step", "observation", "action", "final_observation", "reward", "terminated")
    names += ("prompt_messages", "completion_messages", "group_id", "source_episode_id")
    texts = ("prompt_messages", "completion_messages")
    first, again = (
        [
            [json.loads(row[name]) if name in texts else row[name] for name in names]
            for row in _rows(lake, dataset)
        ]
        for dataset in ("chats", "talks")
    )
    assert again == first
    export(lake, "talks", tmp_path / "second.parquet", format="art")
    tables = [pq.read_table(tmp_path / f"{name}.parquet") for name in ("first", "second")]
    tables = [table.drop_columns(["metadata"]) for table in tables]
    assert tables[0].to_pylist() == tables[1].to_pylist()


_ROW = {
    "group_index": 0,
    "reward": 1.0,
    "messages": [{"role": "assistant", "content": "a", "tool_calls": None, "trainable": True}],
}
_FULL = {"format_version": 2, "group_index": 0, "group_json": "{}"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"reward": None}, "reward: found None, expected a number"),
        ({"messages": [{**_ROW["messages"][0], "role": None}]}, r"messages\[0\]: found .* a role"),
        (
            {"messages": [{**_ROW["messages"][0], "tool_calls": "["}]},
            r"messages\[0\].tool_calls: found '\[', expected JSON",
        ),
        ({**_FULL, "trajectory_json": "["}, r"trajectory_json: found '\[', expected JSON text"),
        ({**_FULL, "trajectory_json": "[1]"}, "trajectory_json: found .* expected a JSON object"),
        (
            {**_FULL, "format_version": 3, "trajectory_json": "{}"},
            "format_version: found 3, expected 2",
        ),
        (
            {**_FULL, "trajectory_json": '{"exchanges": {"responses": [1]}}'},
            "exchanges: found calls of responses, expected chat_completions alone",
        ),
    ],
)
def test_bad_rows_are_quarantined(
    lake: Lake, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    history = [{"role": "assistant", "content": "a"}]
    trajectory = json.dumps({"messages_and_choices": history, "reward": 1})
    good = {**_FULL, "trajectory_json": trajectory}
    rows = [{**_ROW, **row}, _ROW if "group_json" not in row else {**_ROW, **good}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    receipt = ingest(lake, [tmp_path / "log.parquet"], "talks", format="art")
    assert receipt.episodes.rejected == 1
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert re.search(rf"log\.parquet row 0: .*{message}", check.example), check.example


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v1", "v2"])
def test_flipped_bytes_and_files_that_are_cut_off(lake: Lake, tmp_path: Path, name: str) -> None:
    whole = (_FOLDER / f"{name}.parquet").read_bytes()
    # In the footer, PyArrow 26 aborts the process where two lists of sizes differ in length.
    num_data = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    rng = np.random.default_rng(23)
    for number in range(8):
        damaged = bytearray(whole if number else whole[: len(whole) // 2])
        for place in rng.integers(num_data if number else len(damaged), size=3):
            damaged[place] ^= 1 << int(rng.integers(8))
        (tmp_path / f"{number}.parquet").write_bytes(damaged)
        with suppress(ReplayLakeError):
            ingest(lake, [tmp_path / f"{number}.parquet"], f"talks{number}", format="art")
