"""verl's dumps: each session is an episode, and its score counts once."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake, open_lake

FIXTURES = Path(__file__).parents[3] / "fixtures" / "verl"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _rows(lake: Lake) -> list[dict[str, Any]]:
    return lake.sql("SELECT * FROM talks.steps ORDER BY source_episode_id, step").to_pylist()


def test_dumps_without_a_group(lake: Lake) -> None:
    receipt = ingest(lake, [FIXTURES / "legacy"], "talks")
    assert (receipt.format, receipt.episodes.committed) == ("verl", 4)
    rows = _rows(lake)
    assert [row["source_episode_id"] for row in rows] == [f"step7/{i}" for i in range(4)]
    assert rows[0]["observation"] == "user: user\n1+1?\nassistant\n"
    assert [row["action"] for row in rows] == ["It is 2.", "It is 3.", "It is 5.", "It is 4."]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.0, 1.0]
    assert {(row["terminated"], row["train_step"]) for row in rows} == {(True, 7)}
    # Numbers of numpy's are written as text.
    assert json.loads(rows[0]["metadata"]) == {
        "gts": "2",
        "acc": "1.0",
        "pred": "2",
        "request_id": "r0",
    }
    groups = lake.sql("SELECT num_episodes, mean FROM talks.groups").to_pylist()
    assert groups == [{"num_episodes": 2, "mean": 0.5}] * 2
    assert {row["group_id_source"] for row in rows} == {"derived"}


def test_numbers_that_are_written_as_text(lake: Lake) -> None:
    options = ReadOptions(mapping={"reward": "acc", "guess": "pred"})
    ingest(lake, [FIXTURES / "legacy"], "talks", options=options)
    rows = [(row["reward"], row["guess"]) for row in _rows(lake)]
    assert rows == [(1.0, "2"), (0.0, "3"), (0.0, "5"), (1.0, "4")]


@pytest.mark.parametrize(
    ("name", "scores"), [("v1", [1, 0, 1, 0, 1]), ("validation", [1, 0, 0.5, 0, 1])]
)
def test_outputs_of_a_session_are_an_episode(lake: Lake, name: str, scores: list[float]) -> None:
    receipt = ingest(lake, [FIXTURES / name / "7.jsonl"], "talks")
    assert (receipt.format, receipt.episodes.committed, receipt.steps.committed) == ("verl", 4, 5)
    rows = _rows(lake)
    names = ("source_episode_id", "step", "group_id", "sample_id", "terminated")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("step7/ab_c_0", 0, "ab_c", "0", True),
        ("step7/ab_c_1", 0, "ab_c", "1", False),
        ("step7/ab_c_1", 1, "ab_c", "1", True),
        ("step7/de_0", 0, "de", "0", True),
        ("step7/de_1", 0, "de", "1", True),
    ]
    assert [row["reward"] for row in rows] == scores
    assert {row["group_id_source"] for row in rows} == {"given"}


_LINE = {"input": "a", "output": "b", "gts": None, "score": 1.0, "step": 3}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "a", ', "Expecting property name"),
        ("[]", "found list, expected an object"),
        ({**_LINE, "input": 3}, "input: found 3, expected text"),
        ({**_LINE, "score": "high"}, "score: found 'high', expected a number or null"),
        ({**_LINE, "score": float("nan")}, "score: found nan, expected a number"),
        ({**_LINE, "step": 2.5}, "step: found 2.5, expected a whole number in 64 bits"),
        (
            {**_LINE, "step": 2**70},
            "step: found 1180591620717411303424, expected a whole number in 64 bits",
        ),
    ],
)
def test_bad_lines_are_quarantined(lake: Lake, tmp_path: Path, line: Any, message: str) -> None:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in (_LINE, line, _LINE)]
    (tmp_path / "3.jsonl").write_text("\n".join(lines))
    receipt = ingest(lake, [tmp_path / "3.jsonl"], "talks")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (2, 1)
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert re.search(rf"3\.jsonl line 2: .*({message})", check.example), check.example


def test_scores_that_are_null_and_texts_that_utf_8_cannot_hold(lake: Lake, tmp_path: Path) -> None:
    line = {**_LINE, "input": "a\x00\ud83d", "score": None, "uid": "\ud83d_0_0"}
    (tmp_path / "log.jsonl").write_text(json.dumps(line))
    ingest(lake, [tmp_path / "log.jsonl"], "talks")
    (row,) = _rows(lake)
    assert row["observation"].startswith("user: a\N{REPLACEMENT CHARACTER}")
    assert (row["reward"], row["terminated"]) == (None, False)


def _write_sessions(path: Path, *lines: Any) -> Path:
    """Write lines of JSON; a pair is a uid and its fields."""
    several = [
        x if isinstance(x, str) else json.dumps({**_LINE, "uid": x[0], **x[1]}) for x in lines
    ]
    path.write_text("\n".join(several))
    return path


def test_outputs_are_in_the_order_of_their_uids(lake: Lake, tmp_path: Path) -> None:
    lines = [
        ("b_0_1", {"input": "abc", "output": "d", "score": 2.0}),
        ("c_0_0", {"output": "x", "score": 0.25}),
        ("b_0_0", {"score": 0.5}),
        ("c_0_1", {"input": "axy", "output": "z", "score": 3.0}),
    ]
    receipt = ingest(lake, [_write_sessions(tmp_path / "3.jsonl", *lines)], "talks")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (2, 0)
    names = ("source_episode_id", "step", "observation", "action", "reward", "terminated")
    assert [tuple(row[name] for name in names) for row in _rows(lake)] == [
        ("step3/b_0", 0, "user: a", "b", 0.0, False),
        ("step3/b_0", 1, "user: c", "d", 2.0, True),
        ("step3/c_0", 0, "user: a", "x", 0.0, False),
        ("step3/c_0", 1, "user: y", "z", 3.0, True),
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([("b_0_0", {}), ("b_0_2", {})], "line 1: uid: found the outputs [0, 2] of session 'b_0'"),
        ([("b_0_1", {})], "line 1: uid: found the outputs [1] of session 'b_0'"),
        ([("b_0_0", {}), ("b_0_0", {})], "line 1: uid: found the outputs [0, 0] of session"),
        ([("b_0_0", {}), ("b_0_1", {"score": "x"})], "line 1: line 2: score: found 'x'"),
        ([("b_0_0", {}), ("b_0_1", {}), '{"input": "a", '], "line 1: line 3, which may be"),
        ([("b_0_0", {}), ("b_0_1", {"step": None})], "line 1: line 2, which may be"),
    ],
)
def test_sessions_that_may_lack_an_output_are_quarantined(
    lake: Lake, tmp_path: Path, lines: list[Any], message: str
) -> None:
    path = _write_sessions(tmp_path / "3.jsonl", *lines, ("c_0_0", {}))
    receipt = ingest(lake, [path], "talks")
    assert [row["source_episode_id"] for row in _rows(lake)] == ["step3/c_0"]
    rejected = [one.example for one in receipt.checks if one.outcome == "rejected"]
    assert any(message in one for one in rejected), rejected


def test_a_later_output_has_what_was_read_since(lake: Lake, tmp_path: Path) -> None:
    lines = [
        ("b_0_0", {"input": "Add.", "output": "2"}),
        ("b_0_1", {"input": "Add.2 Sure?", "output": "3"}),
        ("b_0_2", {"input": "Summary: 3.", "output": "4"}),
    ]
    ingest(lake, [_write_sessions(tmp_path / "3.jsonl", *lines)], "talks")
    rows = _rows(lake)
    texts = ["user: Add.", "user:  Sure?", "user: Summary: 3."]
    assert [row["observation"] for row in rows] == texts
    assert json.loads(rows[1]["prompt_messages"]) == [{"role": "user", "content": " Sure?"}]
    assert [row["is_continuation"] for row in rows] == [None, None, False]


def test_numbers_in_metadata_that_json_lacks(lake: Lake, tmp_path: Path) -> None:
    line = {**_LINE, "acc": float("nan"), "more": [float("-inf")]}
    (tmp_path / "log.jsonl").write_text(json.dumps(line))
    receipt = ingest(lake, [tmp_path / "log.jsonl"], "talks")
    assert receipt.episodes.committed == 1
    metadata = json.loads(_rows(lake)[0]["metadata"])
    assert metadata == {"gts": None, "acc": "NaN", "more": ["-Infinity"]}


@pytest.mark.slow
def test_flipped_bytes(lake: Lake, tmp_path: Path) -> None:
    whole = (FIXTURES / "v1" / "7.jsonl").read_bytes()
    rng = np.random.default_rng(11)
    for number in range(8):
        damaged = bytearray(whole)
        for place in rng.integers(len(whole), size=3):
            damaged[place] ^= 1 << int(rng.integers(8))
        (tmp_path / f"{number}.jsonl").write_bytes(damaged)
        with suppress(ReplayLakeError):
            ingest(lake, [tmp_path / f"{number}.jsonl"], f"talks{number}", format="verl")
