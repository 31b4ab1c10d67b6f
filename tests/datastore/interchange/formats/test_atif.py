"""ATIF: harbor's own documents become generations; what is damaged is set aside by name."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.errors import ConfigInvalidError, ReplayLakeError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.receipt import IngestReceipt
from replaylake.datastore.lake.lake import Lake, open_lake

FIXTURES = Path(__file__).parents[3] / "fixtures" / "atif"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _ingest(lake: Lake, *paths: Path, timezone: str | None = None, **mapping: str) -> IngestReceipt:
    options = ReadOptions(mapping={k.replace("__", "."): v for k, v in mapping.items()})
    if timezone is not None:
        options = ReadOptions(mapping=options.mapping, timezone=timezone)
    return ingest(lake, list(paths), "talks", options=options)


def _rows(lake: Lake) -> list[dict[str, Any]]:
    return lake.sql("SELECT * FROM talks.steps ORDER BY episode_id, env_step").to_pylist()


def _step(number: int, source: str, message: Any, **fields: Any) -> dict[str, Any]:
    return {"step_id": number, "source": source, "message": message, **fields}


def _metrics(prompt: Any, completion: Any, **fields: Any) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "completion_token_ids": completion, **fields}


def _document(*steps: dict[str, Any], **fields: Any) -> dict[str, Any]:
    agent = {"name": "solver", "version": "1"}
    return {"schema_version": "ATIF-v1.8", "agent": agent, "steps": list(steps), **fields}


def _talk(session: str, **fields: Any) -> dict[str, Any]:
    answer = _step(2, "agent", "Hello", metrics=_metrics([1, 2], [3], logprobs=[-0.5]))
    return _document(_step(1, "user", "Hi"), answer, session_id=session, **fields)


def _write(path: Path, *documents: Any) -> Path:
    texts = [one if isinstance(one, str) else json.dumps(one) for one in documents]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(texts))
    return path


def test_sub_agents_copies_and_what_is_new_of_a_prompt(lake: Lake) -> None:
    receipt = _ingest(
        lake,
        FIXTURES / "solver.json",
        reward="extra.reward",
        group_id="extra.group.id",
        policy_version="steps.metrics.extra.version",
        points="steps.extra.score",
    )
    assert (receipt.format, receipt.episodes.committed, receipt.notes) == ("atif", 3, ())
    rows = _rows(lake)
    assert [(row["agent_id"], row["step"]) for row in rows] == [
        ("solver", 0),
        ("critic", 0),
        ("critic~1", 0),
        ("solver", 1),
        ("solver", 2),
    ]
    ids = [(row["observation_tokens"], row["action_tokens"]) for row in rows]
    assert ids == [
        ([1, 2, 3, 4], [11, 12]),
        ([51, 52], [53]),
        ([51], [54, 55]),
        ([5, 6], [13]),
        ([1, 2, 9], [14, 15]),
    ]
    assert [row["is_continuation"] for row in rows] == [None, False, False, None, False]
    parents = [(row["parent_agent_id"], row["parent_step"]) for row in rows]
    assert parents == [(None, None), ("solver", 0), ("solver", 0), (None, None), (None, None)]
    assert rows[0]["action_log_probs"] == [-0.125, -0.25]
    assert rows[0]["behavior_log_prob"] == -0.375
    assert [row["reward"] for row in rows] == [0.0, 0.0, 0.0, 0.0, 0.5]
    assert [row["terminated"] for row in rows] == [False, True, True, False, True]
    assert [row["policy_version"] for row in rows] == [7, None, None, 8, 8]
    assert [row["points"] for row in rows] == [0.25, None, None, 0.5, 0.75]
    assert {(row["group_id"], row["group_id_source"]) for row in rows} == {("sum-1", "given")}
    assert {row["policy"] for row in rows} == {"tiny/llama", None}
    # What was dispatched without a model is no generation: the next one has read it.
    (dispatched,) = [m for m in json.loads(rows[3]["prompt_messages"]) if m["role"] == "assistant"]
    assert (dispatched["content"], dispatched["llm_call_count"]) == ("dispatch", 0)
    assert rows[3]["observation"].splitlines()[-3:] == [
        "assistant: dispatch",
        'bash({"cmd":"ls"})',
        "tool: 2",
    ]
    assert rows[0]["tool_name"] == "bash"
    assert "[audio]" in rows[0]["observation"]
    (said,) = json.loads(rows[0]["completion_messages"])
    assert said["metrics"] == {"prompt_tokens": 4, "extra": {"version": 7}}
    assert json.loads(rows[0]["metadata"])["trajectory"]["extra"]["passed"] is True


def test_branches_are_what_the_model_saw(lake: Lake) -> None:
    _ingest(lake, FIXTURES / "solver.json")
    found = lake.sql("SELECT agent_id, token_ids, loss_mask FROM talks.sequences ORDER BY 1, 2")
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        ("critic", [51, 52, 53], [0, 0, 1]),
        ("critic~1", [51, 54, 55], [0, 1, 1]),
        ("solver", [1, 2, 3, 4, 11, 12, 5, 6, 13], [0, 0, 0, 0, 1, 1, 0, 0, 1]),
        ("solver", [1, 2, 9, 14, 15], [0, 0, 0, 1, 1]),
    ]


def test_branches_of_random_histories(lake: Lake, tmp_path: Path) -> None:
    """Generations that go on from one another are a branch: the last one's prompt and answer."""
    rng = np.random.default_rng(29)
    documents, expected = [], {}
    for number in range(60):
        steps: list[dict[str, Any]] = [_step(1, "user", "Hi")]
        branches: list[tuple[list[int], list[bool]]] = []
        ids: list[int] = []
        mask: list[bool] = []
        for _ in range(int(rng.integers(1, 8))):
            if not branches or rng.random() < 0.3:
                # Another history, which is no beginning of the one before.
                ids = [1000 * (len(branches) + 1), *rng.integers(9, size=rng.integers(3)).tolist()]
                mask = [False] * len(ids)
                branches.append((ids, mask))
            new = rng.integers(9, size=rng.integers(4)).tolist()
            answer = rng.integers(9, size=rng.integers(1, 4)).tolist()
            ids, mask = [*ids, *new], [*mask, *[False] * len(new)]
            metrics = _metrics(ids, answer)
            steps.append(_step(len(steps) + 1, "agent", "x", metrics=metrics))
            ids, mask = [*ids, *answer], [*mask, *[True] * len(answer)]
            branches[-1] = (ids, mask)
        name = f"run-{number}"
        documents.append(_document(*steps, session_id=name))
        expected[name] = sorted(branches)
    _ingest(lake, _write(tmp_path / "runs.jsonl", *documents))
    query = """
        SELECT DISTINCT source_episode_id AS name, token_ids, loss_mask
        FROM talks.sequences JOIN talks.steps USING (episode_id)
    """
    found: dict[str, list[Any]] = {}
    for row in lake.sql(query).to_pylist():
        branch = (row["token_ids"], [bool(one) for one in row["loss_mask"]])
        found.setdefault(row["name"], []).append(branch)
    assert {name: sorted(several) for name, several in found.items()} == expected


@pytest.mark.parametrize("name", ["trial", "trial/*.json"])
def test_files_of_one_run_are_one_episode(lake: Lake, name: str) -> None:
    receipt = _ingest(lake, FIXTURES / name, reward="extra.reward")
    assert (receipt.episodes.committed, receipt.episodes.rejected, receipt.notes) == (2, 0, ())
    rows = _rows(lake)
    assert len({row["episode_id"] for row in rows}) == 1
    assert {row["source_episode_id"] for row in rows} == {"run-1"}
    assert [(row["agent_id"], row["action"]) for row in rows] == [
        ("terminus-2", "make"),
        ("terminus-2-summary", "I ran make."),
        ("terminus-2", "vi x.c"),
        ("terminus-2", "make again"),
    ]
    # The sub-agent went on from what the main agent had seen; the continuation did not.
    assert rows[1]["observation_tokens"] == [4, 5]
    assert (rows[1]["parent_agent_id"], rows[1]["is_continuation"]) == ("terminus-2", None)
    assert rows[2]["observation_tokens"] == [1, 2, 3, 7, 8]
    assert rows[2]["is_continuation"] is False
    # Copied steps are read again, and not generated again.
    roles = [m.get("is_copied_context") for m in json.loads(rows[2]["prompt_messages"])]
    assert roles == [None, None, None, True, True]
    assert [row["reward"] for row in rows] == [0.0, 0.0, 0.0, 1.0]
    assert rows[3]["final_observation"] == "user: ok"
    found = lake.sql("SELECT agent_id, token_ids FROM talks.sequences ORDER BY 1").to_pylist()
    assert [tuple(row.values()) for row in found] == [
        ("terminus-2", [1, 2, 3, 7, 8, 31, 9, 32, 33]),
        ("terminus-2-summary", [1, 2, 3, 11, 12, 4, 5, 21, 22]),
    ]


def test_json_lines_without_ids(lake: Lake) -> None:
    receipt = _ingest(lake, FIXTURES / "runs.jsonl", reward="extra.reward")
    assert receipt.episodes.committed == 3
    rows = _rows(lake)
    assert [(row["action"], row["reward"]) for row in rows] == [
        ("color 0", 0.0),
        ("color 1", 1.0),
        ("color 2", 0.0),
    ]
    assert not {"action_tokens", "parent_step", "is_continuation"} & rows[0].keys()
    (group,) = lake.sql("SELECT n, mean FROM talks.groups").to_pylist()
    assert group == {"n": 3, "mean": pytest.approx(1 / 3)}


def test_without_a_reward_runs_are_open(lake: Lake) -> None:
    _ingest(lake, FIXTURES / "runs.jsonl")
    (row,) = lake.sql("SELECT DISTINCT reward, terminated, truncated FROM talks.steps").to_pylist()
    assert row == {"reward": None, "terminated": False, "truncated": False}


def test_files_that_are_not_there_are_noted(lake: Lake, tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "trial" / "trajectory.json", tmp_path / "alone.json")
    receipt = _ingest(lake, tmp_path / "alone.json")
    assert receipt.episodes.committed == 1
    assert receipt.notes == (
        "2 documents that others name are not in the source "
        "('trajectory.summarization-1-summary.json', 'trajectory.cont-1.json')",
    )


def test_a_sub_agent_s_file_that_is_cut_off_is_set_aside(lake: Lake, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "trial", tmp_path / "trial")
    damaged = tmp_path / "trial" / "trajectory.summarization-1-summary.json"
    damaged.write_text(damaged.read_text()[:-40])
    receipt = _ingest(lake, tmp_path / "trial")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 1)
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert "trajectory.summarization-1-summary.json in the value" in check.example


def test_files_of_a_trajectory_that_is_refused_are_noted(lake: Lake, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "trial", tmp_path / "trial")
    root = tmp_path / "trial" / "trajectory.json"
    root.write_text(root.read_text().replace('"source": "agent"', '"source": "bot"'))
    _write(tmp_path / "trial" / "other.json", _talk("a"))
    receipt = _ingest(lake, tmp_path / "trial")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 1)
    assert receipt.notes == (
        "2 documents are named by a trajectory that was refused: left out (trajectory.cont-1.json, "
        "trajectory.summarization-1-summary.json)",
    )


def test_several_calls_in_one_and_ids_without_their_prompt(lake: Lake, tmp_path: Path) -> None:
    document = _document(
        _step(1, "user", "Hi"),
        _step(2, "agent", "A", metrics=_metrics([1], [2]), llm_call_count=3),
        _step(3, "agent", "B", metrics={"completion_token_ids": [4]}),
        _step(4, "agent", "C", metrics=_metrics([1, 2, 3], [5]), llm_call_count=1),
        # A copy with its ids: read, and not sampled.
        _step(5, "agent", "D", metrics=_metrics([1], [9]), is_copied_context=True),
        _step(6, "agent", "E", metrics=_metrics([1, 2, 3, 5, 9], [6])),
    )
    receipt = _ingest(lake, _write(tmp_path / "run.json", document))
    rows = _rows(lake)
    assert [row["action"] for row in rows] == ["A", "B", "C", "E"]
    assert [row["action_tokens"] for row in rows] == [None, None, [5], [6]]
    assert [row["observation_tokens"] for row in rows] == [None, None, [1, 2, 3], [9]]
    assert [row["is_continuation"] for row in rows] == [None, None, False, None]
    assert json.loads(rows[0]["completion_messages"])[0]["metrics"]["completion_token_ids"] == [2]
    assert receipt.notes == (
        "2 generations have ids without those of their prompt, or combine several calls: "
        "their ids stay in completion_messages",
    )
    (row,) = lake.sql("SELECT token_ids, loss_mask FROM talks.sequences").to_pylist()
    assert row == {"token_ids": [1, 2, 3, 5, 9, 6], "loss_mask": [0, 0, 0, 1, 0, 1]}


def test_sub_agents_below_sub_agents_and_those_that_no_step_names(
    lake: Lake, tmp_path: Path
) -> None:
    def refer(*names: str) -> dict[str, Any]:
        refs = [{"trajectory_id": name} for name in names]
        return {"results": [{"content": "see", "subagent_trajectory_ref": refs}]}

    inner = _document(_step(1, "agent", "inner"), trajectory_id="inner")
    # `outer` names its own, its sibling, and itself: each is read once.
    outer = _document(
        _step(1, "agent", "outer", observation=refer("inner", "sibling", "outer")),
        trajectory_id="outer",
        subagent_trajectories=[inner],
    )
    others = [
        _document(_step(1, "agent", name), trajectory_id=name) for name in ("sibling", "lone")
    ]
    root = _document(
        _step(1, "agent", "root", observation=refer("outer", "gone")),
        subagent_trajectories=[outer, *others],
    )
    receipt = _ingest(lake, _write(tmp_path / "run.json", root))
    rows = _rows(lake)
    found = [(r["agent_id"], r["action"], r["parent_agent_id"], r["parent_step"]) for r in rows]
    assert found == [
        ("solver", "root", None, None),
        ("solver~1", "outer", "solver", 0),
        ("solver~2", "inner", "solver~1", 0),
        ("solver~3", "sibling", "solver~1", 0),
        ("solver~4", "lone", None, None),
    ]
    assert receipt.notes == ("1 documents that others name are not in the source ('gone')",)


def test_times_without_a_zone(lake: Lake, tmp_path: Path) -> None:
    document = _document(_step(1, "agent", "x", timestamp="2026-07-01T12:00:00"))
    path = _write(tmp_path / "run.json", document)
    receipt = ingest(lake, [path], "bare")
    assert receipt.notes == ("1 timestamps state no zone, and are NULL without `timezone`",)
    _ingest(lake, path, timezone="Europe/Berlin")
    (row,) = lake.sql(
        "SELECT strftime(timestamp AT TIME ZONE 'UTC', '%H:%M') AS at FROM talks.steps"
    ).to_pylist()
    assert row == {"at": "10:00"}
    with pytest.raises(ConfigInvalidError, match="timezone: found 'Mars/Base'"):
        _ingest(lake, path, timezone="Mars/Base")


def test_texts_that_utf_8_or_an_engine_cannot_hold(lake: Lake, tmp_path: Path) -> None:
    document = _document(
        _step(1, "user", "a\x00b \ud83d"), _step(2, "agent", "c\x00\ud83d"), session_id="a\ud83d"
    )
    document["agent"]["name"] = "so\x00lver"
    _ingest(lake, _write(tmp_path / "run.json", document))
    (row,) = _rows(lake)
    assert row["observation"] == "user: a\N{REPLACEMENT CHARACTER}b " + 3 * (
        "\N{REPLACEMENT CHARACTER}"
    )
    assert row["agent_id"] == "so\N{REPLACEMENT CHARACTER}lver"
    (message,) = json.loads(row["completion_messages"])
    assert message["content"] == "c\x00\ud83d"


def test_trajectories_without_a_generation_are_left_out(lake: Lake, tmp_path: Path) -> None:
    silent = _document(_step(1, "user", "Hi"))
    receipt = _ingest(lake, _write(tmp_path / "runs.jsonl", silent, _talk("a")))
    assert receipt.episodes.committed == 1
    assert receipt.notes == (
        "1 trajectories have no generation, and so no step: left out (runs.jsonl line 1)",
    )


# Each is in the place of what a good document has.
_BAD: list[tuple[Any, str]] = [
    ([], r"found \[\], expected an ATIF trajectory"),
    ({"schema_version": "ATIF-v2.0"}, "schema_version: found 'ATIF-v2.0', expected ATIF-v1.0"),
    ({"agent": {"version": "1"}}, "agent: found {'version': '1'}, expected an object with a"),
    ({"steps": [1]}, r"steps: found \[1\], expected a list of objects"),
    ({"steps": [_step(1, "tool", "x")]}, r"steps\[0\].source: found 'tool', expected system"),
    ({"steps": [_step(1, ["x"], "x")]}, r"steps\[0\].source: found \['x'\], expected system"),
    ({"steps": [_step(1, "user", None)]}, r"steps\[0\].message: found None, expected text"),
    ({"steps": [_step(1, "agent", "", tool_calls=["x"])]}, r"tool_calls: found \['x'\]"),
    ({"steps": [_step(1, "agent", "", metrics=3)]}, "metrics: found 3, expected an object"),
    ({"steps": [_step(1, "agent", "", observation=3)]}, "observation: found 3, expected"),
    ({"steps": [_step(1, "agent", "", timestamp="soon")]}, "timestamp: found 'soon', expected"),
    ({"subagent_trajectories": [_talk("b")]}, r"\[0\].trajectory_id: found None, expected a uniq"),
    ({"metrics": _metrics([1, "2"], [3])}, r"metrics.prompt_token_ids: found \[1, '2'\]"),
    ({"metrics": _metrics([1], [3.5])}, r"metrics.completion_token_ids: found \[3.5\]"),
    ({"metrics": _metrics([1], [-3])}, "completion_token_ids: found -3, expected ids of 0"),
    ({"metrics": _metrics([1], [2**40])}, "found 1099511627776, expected ids of 0 or more"),
    ({"metrics": _metrics([1], [2**70])}, r"found \[1180591620717411303424\], expected"),
    ({"metrics": _metrics([[1], [2, 3]], [3])}, "expected a list of token ids"),
    ({"metrics": _metrics([1], [3], logprobs=[-1, -2])}, "logprobs: found 2 numbers, expected"),
    ({"metrics": _metrics([1], [3], logprobs=[None])}, r"logprobs: found \[None\], expected"),
    ({"metrics": _metrics([1], [3], logprobs=[0.5])}, "found 0.5 for token 0, expected at"),
    ({"metrics": _metrics([1], [3], logprobs=[-1e300])}, "found -inf for token 0, expected"),
]


def test_bad_trajectories_are_quarantined(lake: Lake, tmp_path: Path) -> None:
    for number, (damage, _) in enumerate(_BAD):
        bad: Any = "[[]]"
        if damage:
            own = {"steps": [_step(1, "agent", "", **damage)]} if "metrics" in damage else damage
            bad = {**_talk(f"bad{number}"), **own}
        _write(tmp_path / "talks" / f"{number}.json", bad)
    _write(tmp_path / "talks" / "0-before.json", _talk("a"))
    _write(tmp_path / "talks" / "99-after.json", _talk("c"))
    receipt = _ingest(lake, tmp_path / "talks")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (2, len(_BAD))
    rows = lake.sql("SELECT file, unnest(reasons) AS reason FROM talks.quarantine").to_pylist()
    reasons = {row["file"]: row["reason"] for row in rows}
    for number, (_, message) in enumerate(_BAD):
        reason = reasons[f"{number}.json"]
        assert re.search(message, reason), reason


def test_a_file_that_is_cut_off_is_refused_alone(lake: Lake, tmp_path: Path) -> None:
    whole = json.dumps(_talk("b"))
    _write(tmp_path / "a.json", _talk("a"))
    _write(tmp_path / "b.json", whole[: len(whole) // 2])
    _write(tmp_path / "c.json", whole.replace("-0.5", "NaN"))
    receipt = _ingest(lake, *(tmp_path / f"{name}.json" for name in "abc"))
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 2)
    rows = lake.sql("SELECT reasons FROM talks.quarantine ORDER BY 1").to_pylist()
    assert "b.json in the value that begins in line 1: found" in rows[0]["reasons"][0]
    assert "NaN, which is not JSON" in rows[1]["reasons"][0]
    with pytest.raises(SourceInvalidError, match=r"b\.json in the value that begins in line 1"):
        ingest(lake, [tmp_path / "b.json"], "alone")


def test_lines_after_one_that_is_cut_off_are_read(lake: Lake, tmp_path: Path) -> None:
    lines = [json.dumps(_talk(f"s{number}")) for number in range(4)]
    lines[1] = lines[1][:-40]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    receipt = _ingest(lake, tmp_path / "log.jsonl")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (3, 1)
    ids = sorted({row["source_episode_id"] for row in _rows(lake)})
    assert ids == ["s0", "s2", "s3"]
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert "log.jsonl line 2: " in check.example, check.example


def test_documents_that_name_each_other_in_a_circle(lake: Lake, tmp_path: Path) -> None:
    _write(tmp_path / "runs" / "a.json", _talk("a", continued_trajectory_ref="b.json"))
    _write(tmp_path / "runs" / "b.json", _talk("b", continued_trajectory_ref="a.json"))
    _write(tmp_path / "runs" / "c.json", _talk("c", continued_trajectory_ref="c.json"))
    _write(tmp_path / "runs" / "d.json", _talk("d"))
    receipt = _ingest(lake, tmp_path / "runs")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 3)
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert "a.json: found a cycle: it names a trajectory that names it" in check.example


def test_a_path_that_no_trajectory_has(lake: Lake) -> None:
    with pytest.raises(SourceInvalidError, match=r"no record with 'extra.grade'.*reward=extra.gra"):
        _ingest(lake, FIXTURES / "solver.json", reward="extra.grade")


def test_a_reward_that_is_no_number(lake: Lake, tmp_path: Path) -> None:
    path = _write(tmp_path / "runs.jsonl", _talk("a", extra={"r": 1}), _talk("b", extra={"r": "x"}))
    receipt = _ingest(lake, path, reward="extra.r")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 1)
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert "runs.jsonl line 2: extra.r: found 'x', expected a number" in check.example


@pytest.mark.slow
def test_flipped_bytes(lake: Lake, tmp_path: Path) -> None:
    whole = (FIXTURES / "solver.json").read_bytes()
    rng = np.random.default_rng(5)
    for number in range(12):
        damaged = bytearray(whole)
        for place in rng.integers(len(whole), size=3):
            damaged[place] ^= 1 << int(rng.integers(8))
        (tmp_path / f"{number}.json").write_bytes(damaged)
        with suppress(ReplayLakeError):
            ingest(lake, [tmp_path / f"{number}.json"], f"runs{number}", format="atif")


def test_transcripts_that_quote_a_trajectory_are_transcripts(lake: Lake, tmp_path: Path) -> None:
    quoted = {"messages": [{"role": "user", "content": json.dumps(_talk("a"))}]}
    quoted["messages"].append({"role": "assistant", "content": "ok"})
    receipt = ingest(lake, [_write(tmp_path / "talk.jsonl", quoted)], "talks")
    assert receipt.format == "transcripts"
