"""tinker-cookbook's capture store: rows become generations, and no schema is executed."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.errors import ReplayLakeError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake, open_lake

FIXTURE = Path(__file__).parents[3] / "fixtures" / "tinker" / "capture.db"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _rows(lake: Lake) -> list[dict[str, Any]]:
    return lake.sql("SELECT * FROM talks.steps ORDER BY source_episode_id, step").to_pylist()


def _change(path: Path, *statements: tuple[str, Sequence[Any]]) -> Path:
    """Return a copy of the store in which statements were executed."""
    shutil.copy(FIXTURE, path)
    with closing(sqlite3.connect(path)) as connection:
        for statement, values in statements:
            connection.execute(statement, values)
        connection.commit()
    return path


def test_rows_become_generations(lake: Lake) -> None:
    receipt = ingest(lake, [FIXTURE], "talks")
    assert (receipt.format, receipt.episodes.committed, receipt.steps.committed) == ("tinker", 5, 7)
    assert receipt.notes == ("1 annotations of the store are not read",)
    rows = _rows(lake)
    names = ("source_episode_id", "step", "observation_tokens", "action_tokens", "is_continuation")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("run-1/1/train/3/0/0/rollout/0", 0, [1, 2], [11, 12], None),
        ("run-1/1/train/3/0/0/rollout/0", 1, [3], [13], None),
        ("run-1/1/train/3/0/0/rollout/0", 2, [1, 9], [14], False),
        ("run-1/1/train/3/0/1/rollout/0", 0, [1, 2], [21], None),
        ("run-1/1/train/3/1/0/rollout/0", 0, [1, 4], [31], None),
        ("run-1/1/train/3/1/0/rollout/1", 0, [1, 4], [32], None),
        ("unattributed/7", 0, [5], [41], None),
    ]
    assert rows[0]["action_log_probs"] == [-0.125, -0.25]
    assert rows[3]["action_log_probs"] is None
    versions = [(row["policy_version"], row["policy"]) for row in rows]
    assert versions == [*[(12, None)] * 3, (None, "tinker://a"), *[(12, None)] * 3]
    groups = [(row["group_id"], row["group_id_source"], row["train_step"]) for row in rows]
    assert groups[0] == groups[3] == ("run-1/1/train/3/0", "given", 3)
    assert groups[6] == (None, "none", None)
    assert rows[0]["timestamp"].timestamp() == 1_790_000_000.5
    assert {(row["reward"], row["terminated"]) for row in rows} == {(None, False)}
    assert json.loads(rows[0]["metadata"])["metadata"] == {"temperature": 0.5, "second": 0}
    found = lake.sql("SELECT token_ids FROM talks.sequences ORDER BY token_ids").to_pylist()
    assert [row["token_ids"] for row in found] == [
        [1, 2, 11, 12, 3, 13],
        [1, 2, 21],
        [1, 4, 31],
        [1, 4, 32],
        [1, 9, 14],
        [5, 41],
    ]


def test_a_reward_in_the_metadata(lake: Lake, tmp_path: Path) -> None:
    new = ("UPDATE wire_rows SET metadata = ? WHERE cursor = 4", [json.dumps({"reward": 1.0})])
    path = _change(tmp_path / "capture.db", new)
    options = ReadOptions(mapping={"reward": "metadata.reward"})
    ingest(lake, [path], "talks", options=options)
    rows = [(row["reward"], row["terminated"]) for row in _rows(lake)][:4]
    assert rows == [(None, False), (None, False), (1.0, True), (None, False)]


_SET = "UPDATE wire_rows SET {} = ? WHERE cursor = 7"


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("prompt_tokens", "[1,", "prompt_tokens: found '\\[1,', expected JSON"),
        ("prompt_tokens", None, "prompt_tokens: found None, expected a list of token ids"),
        ("sampled_tokens", "[-1]", "sampled_tokens: found -1, expected ids of 0 or more"),
        ("sampled_tokens", b"\xff", "sampled_tokens: found .*, expected JSON"),
        ("logprobs", "[-1, -2]", "logprobs: found 2 numbers, expected 1"),
        ("logprobs", "[NaN]", "found nan for token 0, expected at most 0"),
        ("created_at", "soon", "created_at: found 'soon', expected seconds since 1970"),
        ("iteration", "three", "three"),
        ("seq_id", b"\x00", "not JSON serializable"),
    ],
)
def test_bad_rows_are_quarantined(
    lake: Lake, tmp_path: Path, column: str, value: Any, message: str
) -> None:
    path = _change(tmp_path / "capture.db", (_SET.format(column), [value]))
    receipt = ingest(lake, [path], "talks")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (4, 1)
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert re.search(message, check.example), check.example
    if "token 0" not in message:
        assert "capture.db row 7: " in check.example


def test_stores_that_are_open_damaged_or_others(lake: Lake, tmp_path: Path) -> None:
    path = _change(tmp_path / "capture.db")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("DELETE FROM wire_rows WHERE cursor = 7")
        connection.commit()
        with pytest.raises(SourceInvalidError, match=r"rows that are in capture\.db-wal and not"):
            ingest(lake, [path], "talks")
    whole = FIXTURE.read_bytes()
    (tmp_path / "cut.db").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceInvalidError, match=r"cut\.db"):
        ingest(lake, [tmp_path / "cut.db"], "talks", format="tinker")
    # A view of the table's name would be a query of whoever wrote the file.
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT * FROM n"
    view = _change(
        tmp_path / "view.db",
        ("DROP TABLE wire_rows", ()),
        (f"CREATE VIEW wire_rows AS {endless}", ()),
    )
    with pytest.raises(SourceInvalidError, match=r"view\.db: found no table wire_rows"):
        ingest(lake, [view], "talks", format="tinker")


@pytest.mark.slow
def test_flipped_bytes(lake: Lake, tmp_path: Path) -> None:
    whole = FIXTURE.read_bytes()
    rng = np.random.default_rng(23)
    for number in range(30):
        damaged = bytearray(whole)
        for place in rng.integers(16, len(whole), size=20):
            damaged[place] ^= 1 << int(rng.integers(8))
        (tmp_path / f"{number}.db").write_bytes(damaged)
        with suppress(ReplayLakeError):
            ingest(lake, [tmp_path / f"{number}.db"], f"talks{number}", format="tinker")
