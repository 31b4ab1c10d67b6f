"""Token columns of a log: what does not go together is quarantined, and the row is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.episodes.spaces import Text
from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.errors import SchemaMismatchError
from replaylake.datastore.interchange.ingest import inspection
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake, open_lake


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _step(episode: str, agent: str = "", step: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "episode_id": episode,
        "agent_id": agent,
        "step": step,
        "observation": "question",
        "action": "answer",
        "reward": 0.5,
        "terminated": False,
        "truncated": False,
        "observation_tokens": [1, 2, 3],
        "action_tokens": [4, 5],
        "action_log_probs": [-0.5, -0.25],
        "parent_agent_id": None,
        "parent_step": None,
        **fields,
    }


def _write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "log.jsonl"


def test_faults_are_quarantined_with_their_rows(lake: Lake, tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        [
            _step("good"),
            _step("short", step=0),
            _step("short", step=1, action_log_probs=[-0.5]),
            _step("negative", action_tokens=[4, -5]),
            _step("half", action_log_probs=[-0.5, 0.25]),
            _step("sum", behavior_log_prob=-0.5),
            _step("fine", behavior_log_prob=-0.75),
        ],
    )
    receipt = ingest(lake, [path], "talks")
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert (check.name, check.num_episodes) == ("tokens", 4)
    assert "short: action_log_probs at step 1: found 1 values" in check.example
    assert check.place == "log.jsonl row 1"
    reasons = lake.sql(
        "SELECT DISTINCT source_episode_id AS id, reasons[1] AS reason "
        "FROM talks.quarantine ORDER BY id"
    ).to_pylist()
    assert [(row["id"], row["reason"].split(":")[0]) for row in reasons] == [
        ("half", "action_log_probs at step 0"),
        ("negative", "action_tokens at step 0"),
        ("short", "action_log_probs at step 1"),
        ("sum", "behavior_log_prob at step 0"),
    ]
    steps = lake.sql("SELECT source_episode_id AS id, behavior_log_prob AS p FROM talks.steps")
    assert sorted(map(tuple, (row.values() for row in steps.to_pylist()))) == [
        ("fine", -0.75),
        ("good", -0.75),
    ]


@pytest.mark.parametrize("batch_steps", [1, 65_536])
def test_parents_are_found_in_earlier_batches(
    lake: Lake, tmp_path: Path, batch_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_CHECK_STEPS", batch_steps)
    wrong = {"action_tokens": [4, -5]}
    path = _write(
        tmp_path,
        [
            _step("a", "x"),
            _step("a", "x", 1),
            _step("a", "x~1", parent_agent_id="x", parent_step=1),
            _step("a", "x~2", parent_agent_id="x~1", parent_step=0),
            # What goes on from a step that is refused is refused as well.
            _step("b", "x", **wrong),
            _step("b", "x~1", parent_agent_id="x", parent_step=0),
            _step("b", "x~2", parent_agent_id="x~1", parent_step=0),
            _step("c", "x"),
            _step("c", "x~1", parent_agent_id="x", parent_step=1),
            _step("c", "x~2", parent_step=0),
        ],
    )
    receipt = ingest(lake, [path], "talks", commit_steps=1)
    counts = {check.name: check.num_episodes for check in receipt.checks}
    assert (counts["tokens"], counts["parent"]) == (1, 4)
    kept = lake.sql("SELECT source_episode_id AS e, agent_id AS a, step FROM talks.steps")
    assert sorted(tuple(row.values()) for row in kept.to_pylist()) == [
        ("a", "x", 0),
        ("a", "x", 1),
        ("a", "x~1", 0),
        ("a", "x~2", 0),
        ("c", "x", 0),
    ]
    reason = lake.sql(
        "SELECT reasons[1] AS reason FROM talks.quarantine "
        "WHERE agent_id = 'x~2' ORDER BY source_episode_id"
    ).to_pylist()[-1]["reason"]
    assert "parent_step at step 0: found step 0 of agent 'x~2'" in reason


def test_vocabulary_of_the_dataset(lake: Lake, tmp_path: Path) -> None:
    tokenizer = Tokenizer("small", vocabulary_size=5)
    lake.dataset("talks").create(Text(), Text(), tokenizer=tokenizer)
    path = _write(tmp_path, [_step("good", action_tokens=[4, 4]), _step("outside")])
    receipt = ingest(lake, [path], "talks")
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert "found 5 as token 1, expected 0..4, the vocabulary of small" in check.example
    assert lake.dataset("talks").snapshot().num_steps == 1


def test_column_of_another_type(lake: Lake, tmp_path: Path) -> None:
    path = _write(tmp_path, [_step("a", action_tokens="4 5")])
    with pytest.raises(SchemaMismatchError, match="'action_tokens': found string, expected list"):
        ingest(lake, [path], "talks")
    assert not lake.dataset("talks").exists()
