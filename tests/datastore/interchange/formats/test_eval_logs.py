"""Logs of AReaL, EasyR1 and SkyRL: a sample of text becomes an episode of one step."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.receipt import IngestReceipt
from replaylake.datastore.lake.lake import Lake, open_lake

FIXTURES = Path(__file__).parents[3] / "fixtures"
_AREAL = FIXTURES / "areal" / "rollout" / "4" / "7.jsonl"
_EASYR1 = FIXTURES / "easyr1" / "generations.log"
_SKYRL = FIXTURES / "skyrl" / "dumped_evals"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _rows(lake: Lake, columns: str = "*") -> list[dict[str, Any]]:
    query = f"SELECT {columns} FROM talks.steps ORDER BY source_episode_id"
    return lake.sql(query).to_pylist()


def _example(receipt: IngestReceipt) -> str:
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    return check.example


def test_areal_samples_of_a_task(lake: Lake) -> None:
    receipt = ingest(lake, [_AREAL], "talks")
    assert (receipt.format, receipt.episodes.committed) == ("areal", 2)
    names = "source_episode_id, action, reward, terminated, policy_version, group_id, sample_id"
    assert [tuple(row.values()) for row in _rows(lake, names)] == [
        ("version4/7/0", " 4<eos>", 1.0, True, 4, "version4/7", "0"),
        ("version4/7/1", "2+2? 5<eos>", 0.0, True, 4, "version4/7", "1"),
    ]
    # What cannot be trusted is kept, and is no column.
    metadata = [json.loads(row["metadata"]) for row in _rows(lake)]
    assert metadata[0] == {"seqlen": 4, "prompt_len": 2, "head_version": -1}


def test_skyrl_samples_with_scores_for_tokens(lake: Lake) -> None:
    receipt = ingest(lake, [_SKYRL], "talks", options=ReadOptions({"truth": "env_extras.answer"}))
    assert (receipt.format, receipt.episodes.committed) == ("skyrl", 3)
    (note,) = receipt.notes
    assert re.fullmatch(r"1 files have metrics and no samples: not read \(.*results.jsonl\)", note)
    names = "source_episode_id, observation, action, reward, terminated, truncated, train_step"
    assert [tuple(row.values()) for row in _rows(lake, names)] == [
        ("step12/openai_gsm8k/0", "user: <bos>2+2?", " 4<eos>", 1.0, True, False, 12),
        ("step12/openai_gsm8k/1", "user: <bos>2+2?", " 5", 0.25, False, True, 12),
        ("step12/unknown/0", "user: <bos>2+2?", " 4", 0.0, True, False, 12),
    ]
    rows = _rows(lake)
    assert json.loads(rows[1]["metadata"])["score"] == [0.0, 0.25]
    assert {(row["split"], row["truth"]) for row in rows} == {("eval", "4")}
    assert len({row["group_id"] for row in rows}) == 1


def test_skyrl_pickles_are_refused(lake: Lake, tmp_path: Path) -> None:
    (tmp_path / "global_step_1_training_input.pkl").write_bytes(b"\x80\x04}\x94.")
    with pytest.raises(ReplayLakeError, match="found a pickle"):
        ingest(lake, [tmp_path / "global_step_1_training_input.pkl"], "talks")


def test_easyr1_blocks_and_the_ambiguous_one(lake: Lake) -> None:
    receipt = ingest(lake, [_EASYR1], "talks")
    assert (receipt.format, receipt.episodes.committed) == ("easyr1log", 3)
    # The third text contains the marker of a score and of an output: two parts of a block.
    assert receipt.episodes.rejected == 2
    example = _example(receipt)
    assert "line 18: found the fields prompt, output, score (line 22)" in example, example
    names = "observation, action, reward, terminated, group_id_source"
    rows = [tuple(row.values()) for row in _rows(lake, names)]
    assert rows == [
        ("user: user\n2+2?\nassistant\n", "It is 4.\n", 1.0, True, "derived"),
        ("user: user\n2+2?\nassistant\n", "[1] It is 5.", 0.0, True, "derived"),
        ("user: user\n3+3?\n", "", -0.5, True, "derived"),
    ]
    assert [json.loads(row["metadata"]) for row in _rows(lake)] == [
        {"ground_truth": "4"},
        {"ground_truth": "4"},
        {"ground_truth": "6"},
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"completion": 3}, "completion: found 3, expected text"),
        ({"reward": float("nan")}, "reward: found nan, expected a number or null"),
        ({"reward": "1"}, "reward: found '1', expected a number or null"),
        ({"tail_version": None}, "tail_version: found None, expected a whole number"),
        ({"task_id": 2**63}, "task_id: found 9.*a whole number in 64 bits"),
    ],
)
def test_bad_lines_of_areal(
    lake: Lake, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    good = json.loads(_AREAL.read_text().splitlines()[0])
    lines = [json.dumps(good), json.dumps({**good, **change})]
    (tmp_path / "7.jsonl").write_text("\n".join(lines))
    receipt = ingest(lake, [tmp_path / "7.jsonl"], "talks")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 1)
    assert re.search(rf"7\.jsonl line 2: {message}", _example(receipt)), _example(receipt)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_response": None}, "output_response: found None, expected text"),
        ({"stop_reason": {}}, "stop_reason: found {}, expected text or null"),
        ({"score": ["a"]}, r"score: found \['a'\], expected numbers or null"),
        ({"score": [float("nan")]}, r"score: found \[nan\], expected numbers or null"),
    ],
)
def test_bad_lines_of_skyrl(
    lake: Lake, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    good = json.loads(next(_SKYRL.rglob("unknown.jsonl")).read_text())
    lines = [json.dumps(good), json.dumps({**good, **change}), json.dumps({**good, "score": None})]
    (tmp_path / "unknown.jsonl").write_text("\n".join(lines))
    receipt = ingest(lake, [tmp_path / "unknown.jsonl"], "talks")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (2, 1)
    assert re.search(rf"unknown\.jsonl line 2: {message}", _example(receipt)), _example(receipt)
    rows = _rows(lake, "reward, terminated")
    assert [(row["reward"], row["terminated"]) for row in rows] == [(0.0, True), (None, False)]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("[prompt] a\n[output] b\n[ground_truth] c\n[score] high\n\n", "score: found 'high'"),
        (
            "[prompt] a\n[output] b\n[ground_truth] c\n[score] nan\n\n",
            "score: found nan, expected a",
        ),
        ("[prompt] a\n[output] b\n[output] c\n[ground_truth] c\n[score] 1\n\n", "(line 8)"),
        (
            "[prompt] a\n[output] b\n[ground_truth] c",
            "found the fields prompt, output, ground_truth",
        ),
        ("b\n[prompt] a\n[output] b\n[ground_truth] c\n[score] 1\n\n", "expected prompt, output"),
    ],
)
def test_bad_blocks_of_easyr1(lake: Lake, tmp_path: Path, block: str, message: str) -> None:
    good = "[prompt] a\n[output] b\n[ground_truth] c\n[score] 1.0\n\n"
    (tmp_path / "generations.log").write_text(good + block)
    receipt = ingest(lake, [tmp_path / "generations.log"], "talks")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 1)
    assert message in _example(receipt), _example(receipt)


@pytest.mark.slow
@pytest.mark.parametrize("source", [_AREAL, _EASYR1, next(_SKYRL.rglob("openai_gsm8k.jsonl"))])
def test_flipped_bytes_and_files_that_are_cut_off(lake: Lake, tmp_path: Path, source: Path) -> None:
    whole = source.read_bytes()
    rng = np.random.default_rng(23)
    for number in range(8):
        damaged = bytearray(whole if number else whole[: len(whole) // 2])
        for place in rng.integers(len(damaged), size=3):
            damaged[place] ^= 1 << int(rng.integers(8))
        path = tmp_path / f"{number}{source.suffix}"
        shutil.copyfile(source, path)
        path.write_bytes(damaged)
        with suppress(ReplayLakeError):
            ingest(lake, [path], f"talks{number}")
