"""TRL's logged completions: what its own trainer wrote, and rows that are not as it writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.errors import ReplayLakeError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.generic import parquet_values
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake, open_lake

FIXTURES = Path(__file__).parents[3] / "fixtures" / "trl"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _rows(lake: Lake) -> list[dict[str, Any]]:
    return lake.sql("SELECT * FROM talks.steps ORDER BY source_episode_id, step").to_pylist()


def _logged(name: str) -> list[dict[str, Any]]:
    files = sorted((FIXTURES / name).glob("*.parquet"))
    rows = []
    for file in files:
        rows += [
            {**row, "id": f"step{row['step']}/{i}"}
            for i, row in enumerate(pq.read_table(file).to_pylist())
        ]
    return sorted(rows, key=lambda row: str(row["id"]))


def test_texts_and_one_reward_function(lake: Lake) -> None:
    receipt = ingest(lake, [FIXTURES / "text"], "talks")
    logged, rows = _logged("text"), _rows(lake)
    assert (receipt.format, len(rows)) == ("trl", len(logged))
    assert receipt.notes == ()
    for row, own in zip(rows, logged, strict=True):
        assert row["source_episode_id"] == own["id"]
        assert row["observation"] == f"user: {own['prompt']}"
        (said,) = json.loads(row["completion_messages"])
        assert said == {"role": "assistant", "content": own["completion"]}
        assert (row["reward"], row["advantage"]) == (own["score_length"], own["advantage"])
        assert (row["train_step"], row["terminated"]) == (own["step"], True)
    groups = lake.sql("SELECT num_episodes FROM talks.groups").to_pylist()
    assert {row["num_episodes"] for row in groups} == {2}


def test_messages_and_several_reward_functions(lake: Lake) -> None:
    receipt = ingest(lake, [FIXTURES / "chat"], "talks")
    logged, rows = _logged("chat"), _rows(lake)
    assert len(rows) == len(logged) > 4
    assert receipt.notes == (
        "reward is the sum of score_length, score_parity: the files do not state which of these "
        "columns are reward functions, nor their weights, and logged values such as lengths may be "
        "in the sum. `mapping` reward=COLUMN takes one of them",
    )
    seen = set()
    for row, own in zip(rows, logged, strict=True):
        assert json.loads(row["prompt_messages"]) == own["prompt"]
        assert json.loads(row["completion_messages"]) == own["completion"]
        scores = [own["score_length"], own["score_parity"]]
        known = [one for one in scores if one is not None and not math.isnan(one)]
        seen.add(len(known))
        assert row["reward"] == sum(known)
        components = {one["name"]: one["score"] for one in row["reward_components"]}
        assert sorted(one for one in components.values() if one is not None) == sorted(known)
        assert json.loads(row["metadata"]) == {"number": own["number"]}
    # A reward function that gave None is null, and not 0.
    assert seen == {1, 2}


def test_a_mapping_names_the_reward(lake: Lake) -> None:
    options = ReadOptions(mapping={"reward": "score_length", "level": "number"})
    receipt = ingest(lake, [FIXTURES / "chat"], "talks", options=options)
    assert receipt.notes == ()
    for row, own in zip(_rows(lake), _logged("chat"), strict=True):
        assert (row["reward"], row["level"]) == (own["score_length"], own["number"])


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def _row(completion: Any, **fields: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "1+1?"}]
    return {"step": 1, "prompt": prompt, "completion": completion, "advantage": 0.5, **fields}


def test_completions_with_tools(lake: Lake, tmp_path: Path) -> None:
    completion = [
        {"role": "assistant", "content": "ask", "name": None},
        {"role": "tool", "content": "2", "name": "add"},
        {"role": "assistant", "content": "2", "name": None},
        {"role": "user", "content": "ok", "name": None},
    ]
    ingest(lake, [_write(tmp_path / "log.parquet", [_row(completion, score=1.0)])], "talks")
    rows = _rows(lake)
    assert [(row["observation"], row["action"], row["reward"]) for row in rows] == [
        ("user: 1+1?", "ask", 0.0),
        ("tool: 2", "2", 1.0),
    ]
    assert rows[1]["final_observation"] == "user: ok"
    assert json.loads(rows[0]["completion_messages"]) == [{"role": "assistant", "content": "ask"}]


def test_bad_rows_are_quarantined(lake: Lake, tmp_path: Path) -> None:
    good = [{"role": "assistant", "content": "2"}]
    rows = [
        _row(good, score=1.0),
        _row([{"role": "user", "content": "2"}], score=1.0),
        _row(None, score=1.0),
        _row(good, score=1.0, step=None),
        _row([{"role": None, "content": "2"}], score=1.0),
        _row(good, score=None),
    ]
    receipt = ingest(lake, [_write(tmp_path / "log.parquet", rows)], "talks")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (2, 4)
    query = "SELECT unnest(reasons) AS reason FROM talks.quarantine ORDER BY file_row"
    reasons = [row["reason"] for row in lake.sql(query).to_pylist()]
    for place, message in enumerate(
        ("expected a message of the assistant", "found None", "step: found None", "expected text")
    ):
        assert f"log.parquet row {place + 1}: " in reasons[place]
        assert message in reasons[place]
    assert [row["reward"] for row in _rows(lake)] == [1.0, None]


def test_a_step_that_64_bits_cannot_hold(lake: Lake, tmp_path: Path) -> None:
    good = [{"role": "assistant", "content": "2"}]
    table = pa.Table.from_pylist([_row(good, score=1.0), _row(good, score=0.0)])
    steps = pa.array([1, 2**63], pa.uint64())
    table = table.set_column(table.schema.get_field_index("step"), "step", steps)
    pq.write_table(table, tmp_path / "log.parquet")
    receipt = ingest(lake, [tmp_path / "log.parquet"], "talks")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 1)
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    expected = "row 1: step: found 9223372036854775808, expected a whole number in 64 bits"
    assert expected in check.example


def test_a_row_that_decodes_to_more_than_it_may(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_values, "_MAX_ROW_BYTES", 1000)
    rows = [_row([{"role": "assistant", "content": text}]) for text in ("2", "2" * 2000)]
    receipt = ingest(lake, [_write(tmp_path / "log.parquet", rows)], "talks")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 1)
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert "log.parquet row 1: found 2," in check.example


def test_another_file_among_them_is_refused_by_name(lake: Lake, tmp_path: Path) -> None:
    good = [{"role": "assistant", "content": "2"}]
    paths = [
        _write(tmp_path / "1.parquet", [_row(good)]),
        _write(tmp_path / "2.parquet", [{"step": 1, "prompt": "x"}]),
    ]
    with pytest.raises(
        SourceInvalidError, match=r"2\.parquet: found the columns step, prompt, exp"
    ):
        ingest(lake, paths, "talks")


@pytest.mark.slow
def test_flipped_bytes_and_files_that_are_cut_off(lake: Lake, tmp_path: Path) -> None:
    whole = next((FIXTURES / "chat").glob("*.parquet")).read_bytes()
    rng = np.random.default_rng(17)
    for number in range(12):
        damaged = bytearray(whole if number else whole[: len(whole) // 2])
        for place in rng.integers(len(damaged), size=3):
            damaged[place] ^= 1 << int(rng.integers(8))
        (tmp_path / f"{number}.parquet").write_bytes(damaged)
        with suppress(ReplayLakeError):
            ingest(lake, [tmp_path / f"{number}.parquet"], f"talks{number}", format="trl")
