"""ROLL's dumps: one line of columns becomes an episode for each sample, or for each rollout."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake, open_lake

_FOLDER = Path(__file__).parents[3] / "fixtures" / "roll"
FIXTURE = _FOLDER / "rollout_dump_data.step_12.jsonl"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _rows(lake: Lake) -> list[dict[str, Any]]:
    return lake.sql("SELECT * FROM talks.steps ORDER BY source_episode_id").to_pylist()


def test_a_line_of_columns(lake: Lake) -> None:
    receipt = ingest(lake, [FIXTURE], "talks")
    assert (receipt.format, receipt.episodes.committed) == ("roll", 4)
    rows = _rows(lake)
    names = ("source_episode_id", "action", "reward", "group_id", "terminated")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("step12/0", "It is 2.", 1.0, "step12/a", True),
        ("step12/1", "It is 3.", 0.0, "step12/a", True),
        ("step12/2", "It is 4.", 1.0, "step12/b", True),
        ("step12/3", "It is 5.", 0.0, "step12/b", True),
    ]
    assert rows[0]["observation"] == "system: Solve.\nuser: 1+1?"
    assert {(row["train_step"], row["group_id_source"]) for row in rows} == {(12, "given")}
    assert rows[0]["sampling"] == '{"temperature": 0.5}'
    assert json.loads(rows[2]["metadata"]) == {
        "prompt": "<user>2+2?",
        "ground_truth": "4",
        "tag": "sum",
        "domain": "math_rule",
    }


_COLUMNS = {"prompt": ["a", "b"], "responses": ["c", "d"], "scores": [1, 0], "global_step": [3, 3]}


def test_prompts_without_messages_and_ids(lake: Lake, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps({**_COLUMNS, "scores": [1, None]}))
    ingest(lake, [tmp_path / "log.jsonl"], "talks")
    rows = _rows(lake)
    found = [(row["observation"], row["reward"], row["terminated"]) for row in rows]
    assert found == [("user: a", 1.0, True), ("user: b", None, False)]
    assert {row["group_id_source"] for row in rows} == {"derived"}


def test_numbers_in_metadata_that_json_lacks(lake: Lake, tmp_path: Path) -> None:
    columns = {**_COLUMNS, "entropy": [float("nan"), float("inf")]}
    (tmp_path / "log.jsonl").write_text(json.dumps(columns))
    ingest(lake, [tmp_path / "log.jsonl"], "talks")
    found = [json.loads(row["metadata"])["entropy"] for row in _rows(lake)]
    assert found == ["NaN", "Infinity"]


@pytest.mark.parametrize(
    ("columns", "place", "message"),
    [
        ({"responses": ["c", 3]}, "sample 3", "responses: found 3, expected text"),
        ({"scores": [1, float("nan")]}, "sample 3", "scores: found nan, expected numbers or null"),
        ({"scores": [1, "x"]}, "sample 3", "scores: found 'x', expected numbers or null"),
        ({"global_step": [3, None]}, "sample 3", "global_step: found None, expected a whole"),
        (
            {"global_step": [3, 2**63]},
            "sample 3",
            "global_step: found 9.*a whole number in 64 bits",
        ),
        ({"prompt": ["a", None]}, "sample 3", "prompt: found None, expected text"),
        ({"messages": ["[]", "["]}, "sample 3", r"messages: found '\[', expected a JSON list"),
        ({"messages": ["[]", "[3]"]}, "sample 3", r"messages: found '\[3\]', expected a JSON"),
        ({"scores": [1]}, "sample 2", "line 2: scores: found 1 values, expected 2, one for each"),
        ({"responses": "c"}, "sample 2", "line 2: found no list responses, expected one value"),
        ({"tag": "x"}, "sample 2", "line 2: tag: found 'x', expected 2, one for each sample"),
    ],
)
def test_bad_samples_are_quarantined(
    lake: Lake, tmp_path: Path, columns: dict[str, Any], place: str, message: str
) -> None:
    lines = [_COLUMNS, {**_COLUMNS, **columns}]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    receipt = ingest(lake, [tmp_path / "log.jsonl"], "talks")
    assert receipt.episodes.rejected == 1
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert re.search(rf"log\.jsonl {place}: {message}", check.example), check.example


def test_a_rollout_with_a_reward_for_each_step(lake: Lake) -> None:
    receipt = ingest(lake, [_FOLDER / "native"], "talks")
    assert (receipt.format, receipt.episodes.committed, receipt.notes) == ("roll", 2, ())
    rows = _rows(lake)
    names = ("step", "observation", "action", "reward", "terminated", "truncated", "status")
    asked = "system: Use the shell.\nuser: Sum?"
    assert [tuple(row[name] for name in names) for row in rows] == [
        (0, asked, "ls", 0.25, False, False, "FINISH"),
        (1, "user: sum.py", "python sum.py", 1.0, True, False, "FINISH"),
        (0, asked, "ls", 0.25, False, False, "MAX_STEPS"),
        (1, "user: sum.py", "python sum.py", 0.0, False, True, "MAX_STEPS"),
    ]
    names = ("group_id", "group_id_source", "train_step", "split")
    assert {tuple(row[name] for name in names) for row in rows} == {
        ("swe_5_3_42", "given", 7, "train")
    }
    assert [row["final_observation"] for row in rows] == [None, "user: 3"] * 2
    assert rows[0]["source_episode_id"] == "swe_6_7_5_0_3_42_20260819_153611_250000"
    metadata = json.loads(rows[0]["metadata"])
    assert (metadata["exp_name"], metadata["env_info"]["image"]) == ("swe_demo", "sum:1")
    assert metadata["tools"][0]["function"]["name"] == "shell"
    assert not metadata.keys() & {"messages", "last_observation"}


def test_branches_of_a_rollout_are_agents_of_one_episode(lake: Lake) -> None:
    ingest(lake, [_FOLDER / "proxy" / "rollout_dump_data.step_8.jsonl"], "talks")
    names = ("agent_id", "step", "observation", "action", "reward", "terminated", "parent_step")
    rows = lake.sql(
        "SELECT * FROM talks.steps ORDER BY source_episode_id, agent_id, step"
    ).to_pylist()
    start = ("user: Fix it.", "look", 0.0, False, None)
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("", 0, *start),
        ("", 1, "user: seen 1", "edit", 1.0, True, None),
        ("~1", 0, "user: seen 2", "test", 1.0, True, 0),
        ("", 0, *start),
        ("", 1, "user: seen 1", "edit", 0.0, False, None),
        ("", 2, "user: seen 2", "test", 0.0, True, None),
    ]
    assert {row["group_id"] for row in rows} == {"proxy_2_4_42"}
    assert [row["source_episode_id"] for row in rows[2:4]] == [
        "proxy_2_4_42_0_20260819_153611_250000",
        "proxy_2_4_42_1_20260819_153611_250000",
    ]


def test_samples_of_single_steps_lack_the_last_answer(lake: Lake) -> None:
    receipt = ingest(lake, [_FOLDER / "proxy" / "rollout_dump_data.step_9.jsonl"], "talks")
    assert "2 agents end with a prompt whose answer ROLL does not dump" in receipt.notes[0]
    names = ("agent_id", "step", "observation", "action", "reward", "is_trainable")
    rows = lake.sql("SELECT * FROM talks.steps ORDER BY agent_id, step").to_pylist()
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("", 0, "user: Fix it.", "look", 0.0, None),
        ("", 1, "user: seen 1", "", 0.0, False),
        ("~1", 0, "user: seen 2", "", 1.0, False),
    ]


_ROLLOUT = {
    "trajectory_data": '{"trajectory_id": "t", "reward_info": {"episode_reward": 1}}',
    "messages": '[[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]',
    "global_step": 3,
}


def test_rewritten_contexts_and_rollouts_without_generations(lake: Lake, tmp_path: Path) -> None:
    first = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    second = [{"role": "user", "content": "so far: b"}, {"role": "assistant", "content": "c"}]
    samples = [
        {**_ROLLOUT, "messages": json.dumps([first, second])},
        {**_ROLLOUT, "messages": "[]"},
    ]
    columns = {name: [sample[name] for sample in samples] for name in _ROLLOUT}
    (tmp_path / "log.jsonl").write_text(json.dumps(columns))
    receipt = ingest(lake, [tmp_path / "log.jsonl"], "talks")
    assert "1 rollouts have no generation: left out" in receipt.notes
    rows = lake.sql("SELECT * FROM talks.steps ORDER BY agent_id").to_pylist()
    names = ("agent_id", "observation", "action", "reward", "group_id_source")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("", "user: a", "b", 0.0, "derived"),
        ("~1", "user: so far: b", "c", 1.0, "derived"),
    ]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"trajectory_data": "x"}, "trajectory_data: found 'x', expected a JSON object with traj"),
        ({"trajectory_data": '{"trajectory_id": "t"}'}, "trajectory_data.reward_info: found None"),
        ({"messages": "[3]"}, r"messages: found '\[3\]', expected a JSON list of messages"),
        ({"global_step": None}, "global_step: found None, expected a whole number"),
    ],
)
def test_bad_rollouts_are_quarantined(
    lake: Lake, tmp_path: Path, columns: dict[str, Any], message: str
) -> None:
    samples = [{**_ROLLOUT, **columns}, _ROLLOUT]
    line = {name: [sample[name] for sample in samples] for name in _ROLLOUT}
    (tmp_path / "log.jsonl").write_text(json.dumps(line))
    receipt = ingest(lake, [tmp_path / "log.jsonl"], "talks")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 1)
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert re.search(rf"log\.jsonl sample 0: {message}", check.example), check.example


@pytest.mark.slow
def test_a_line_of_many_rollouts_is_read_in_little_memory(tmp_path: Path) -> None:
    """In a process of its own, with small blocks: 80 MB in one line, within 40 MiB."""
    talk = [{"role": "user", "content": 'say "a"\n' * 5_000}, {"role": "assistant", "content": "a"}]
    texts = {**_ROLLOUT, "messages": json.dumps([talk])}
    with (tmp_path / "log.jsonl").open("w") as file:
        file.write("{")
        for number, (name, value) in enumerate(texts.items()):
            file.write(f'{", " if number else ""}"{name}": [{json.dumps(value)}')
            for _ in range(999):
                file.write(f", {json.dumps(value)}")
            file.write("]")
        file.write("}\n")
    script = """
import resource, sys
from pathlib import Path
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.generations import json_columns, rows
from replaylake.datastore.interchange.formats.roll import RollFormat, _SampleTables
from replaylake.datastore.interchange.sources.source import find_source

files = find_source([Path(sys.argv[1])]).files
json_columns._BLOCK_BYTES = rows._CHUNK_BYTES = 1 << 20
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert RollFormat().recognizes(files)
num = sum(chunk.table.num_rows for chunk in _SampleTables(files, ReadOptions()).chunks())
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(num, (after - before) // 1024)
"""
    assert (tmp_path / "log.jsonl").stat().st_size > 80_000_000
    command = [sys.executable, "-c", script, str(tmp_path / "log.jsonl")]
    num, growth = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()
    assert int(num) == 1_000
    assert int(growth) < 40


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rollout_dump_data.step_12", "native/rollout_dump_data.step_7"])
def test_flipped_bytes_and_files_that_are_cut_off(lake: Lake, tmp_path: Path, name: str) -> None:
    whole = (_FOLDER / f"{name}.jsonl").read_bytes()
    rng = np.random.default_rng(19)
    for number in range(8):
        damaged = bytearray(whole if number else whole[: len(whole) // 2])
        for place in rng.integers(len(damaged), size=3):
            damaged[place] ^= 1 << int(rng.integers(8))
        (tmp_path / f"{number}.jsonl").write_bytes(damaged)
        with suppress(ReplayLakeError):
            ingest(lake, [tmp_path / f"{number}.jsonl"], f"talks{number}", format="roll")
