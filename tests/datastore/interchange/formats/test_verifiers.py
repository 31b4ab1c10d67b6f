"""verifiers' traces: its own branches are our sequences; what is damaged is set aside by name."""

from __future__ import annotations

import json
import os
import re
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.spaces import Text
from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.errors import ReplayLakeError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.receipt import IngestReceipt
from replaylake.datastore.lake.lake import Lake, open_lake

FIXTURES = Path(__file__).parents[3] / "fixtures" / "verifiers"
# `make compat-verifiers` has verifiers write more of them.
_FOLDERS = [FIXTURES / "run", FIXTURES / "random", *map(Path, os.environ.get("TRACES", "").split())]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _ingest(lake: Lake, path: Path, **mapping: str) -> IngestReceipt:
    return ingest(lake, [path], "talks", options=ReadOptions(mapping=mapping))


def _read_traces(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "traces.jsonl").read_text().splitlines()]


def _rows(lake: Lake, episode: str) -> list[dict[str, Any]]:
    found = lake.sql(
        "SELECT * FROM talks.steps WHERE source_episode_id = $id ORDER BY env_step",
        parameters={"id": episode},
    )
    return found.to_pylist()


def _key(ids: list[int], mask: list[int], log_probs: Any) -> tuple[Any, ...]:
    return tuple(ids), tuple(mask), tuple(np.asarray(log_probs, np.float32).tolist())


@pytest.mark.parametrize("folder", _FOLDERS, ids=lambda folder: folder.name)
def test_branches_are_those_of_verifiers(lake: Lake, folder: Path) -> None:
    branches = json.loads((folder / "branches.json").read_text())
    assert _ingest(lake, folder / "traces.jsonl").episodes.rejected == 0
    found: dict[str, list[dict[str, Any]]] = {}
    query = """
        SELECT q.*, source_episode_id, len(action_tokens) AS num_acted
        FROM talks.sequences q JOIN talks.steps s
          ON s.episode_id = q.episode_id AND s.agent_id = q.agent_id AND s.step = q.last_step
    """
    for row in lake.sql(query).to_pylist():
        found.setdefault(row["source_episode_id"], []).append(row)
    num = 0
    for episode in _read_traces(folder):
        expected: Counter[Any] = Counter()
        num_trained = 0
        for trace in episode["traces"]:
            own = branches[trace["id"]]
            if not any(node.get("token_ids") for node in trace["nodes"]):
                continue  # of texts alone
            for one in own:
                expected[_key(one["token_ids"], one["sampled_mask"], one["logprobs"])] += 1
            num_trained += _count_trained(trace)
        rows = found.get(episode["id"], [])
        actual: Counter[Any] = Counter()
        for row in rows:
            mask = np.zeros(row["num_tokens"], np.int8)
            starts, ends = row["action_starts"], [*row["turn_starts"][1:], None]
            ends[-1] = starts[-1] + row["num_acted"]
            for start, end in zip(starts, ends, strict=True):
                mask[start:end] = 1
            log_probs = [0.0 if one is None else one for one in row["log_probs"]]
            actual[_key(row["token_ids"], mask.tolist(), log_probs)] += 1
            assert not (np.asarray(row["loss_mask"], np.int8) > mask).any()
        assert actual == expected, episode["id"]
        # What branches share counts once.
        assert sum(sum(row["loss_mask"]) for row in rows) == num_trained
        num += len(rows)
    assert num > 5


def _count_trained(trace: dict[str, Any]) -> int:
    """Return how many tokens verifiers would train on, each once."""
    nodes = trace["nodes"]
    resumed = {
        link["node"]
        for node in nodes
        for link in node["semantic_parents"]
        if link["type"] == "compaction"
    }
    trained: set[int] = set()
    for leaf in set(range(len(nodes))) - {node.get("parent") for node in nodes}:
        kinds = {link["type"] for link in nodes[leaf]["semantic_parents"]}
        if "compaction_attempt" in kinds and leaf not in resumed:
            continue
        at = leaf
        while at is not None:
            trained.add(at)
            at = nodes[at].get("parent")
    return trace["agent"]["trainable"] * sum(sum(nodes[at]["mask"]) for at in trained)


def test_turns_tools_and_messages_that_nobody_answered(lake: Lake) -> None:
    receipt = _ingest(lake, FIXTURES / "run" / "traces.jsonl")
    assert receipt.format == "verifiers"
    assert receipt.notes == (
        "1 episodes have no message, and so no step: left out (traces.jsonl line 6)",
    )
    rows = _rows(lake, "e-tools")
    assert [(row["agent_id"], row["step"], row["completion_text"]) for row in _named(rows)] == [
        ("solver", 0, 'ask\nadd({"a": 1, "b": 1})'),
        ("solver", 1, "It is 2."),
        ("solver~1", 0, "Two."),
    ]
    first, second, third = rows
    assert first["observation"] == "system: Solve.\nuser: 1+1?"
    assert second["observation"] == "tool: 2"
    # The scaffold that begins an answer was read, and not sampled.
    assert first["observation_tokens"][-1] == second["observation_tokens"][-1] == 93
    assert len(first["action_log_probs"]) == len(first["action_tokens"])
    assert (third["parent_agent_id"], third["parent_step"]) == ("solver", 0)
    assert third["final_observation"] == "user: Thanks"
    assert third["observation_tokens"] == second["observation_tokens"]
    assert [row["reward"] for row in rows] == [0.0, 0.0, 1.25]
    assert third["reward_components"] == [
        {"name": "correct", "score": 1.0, "weight": 1.0},
        {"name": "style", "score": 0.5, "weight": 0.5},
        {"name": "judged", "score": None, "weight": None},
    ]
    assert [row["terminated"] for row in rows] == [False, True, True]
    assert {row["group_id"] for row in rows} == {"g1"}
    assert {
        (row["policy"], row["policy_version"], row["train_step"], row["split"]) for row in rows
    } == {("tiny/llama", 11, 12, "train")}
    assert first["finish_reason"] == "tool_calls"
    assert json.loads(first["sampling"])["temperature"] == 0.5
    assert first["timestamp"].timestamp() == 1_790_000_002.25
    metadata = json.loads(first["metadata"])
    assert metadata["episode"]["run"]["work"]["policy"] == {"start": 11, "end": 12}
    assert metadata["trace"]["info"] == {"seed": 7}
    assert [node["num_tokens"] for node in metadata["nodes"]] == [7, 5, 4]


def _named(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "completion_text": row["action"]} for row in rows]


def test_compactions_and_agents(lake: Lake) -> None:
    _ingest(lake, FIXTURES / "run" / "traces.jsonl")
    rows = _rows(lake, "e-solvers")
    names = ("agent_id", "step", "action", "parent_agent_id", "parent_step", "is_continuation")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("solver", 0, "step 1", None, None, None),
        ("solver", 1, "did 1", None, None, None),
        ("solver~1", 0, "step 2", "solver", 1, False),
        ("solver~2", 0, "3", None, None, None),
        ("judge", 0, "A", None, None, None),
    ]
    assert [row["is_trainable"] for row in rows] == [None, None, None, None, False]
    assert [row["policy_version"] for row in rows] == [11, 11, 11, 11, None]
    # A judge was not scored itself.
    assert [row["reward"] for row in rows] == [0.0, 0.0, 0.0, 0.0, None]
    cut = _rows(lake, "e-cut")
    assert [(row["action"], row["is_trainable"], row["truncated"]) for row in cut] == [
        ("step 1", None, False),
        ("did 1", False, True),
        ("step 2", None, True),
    ]
    assert {row["status"] for row in cut} == {"max_turns"}


def test_texts_alone_and_failures(lake: Lake) -> None:
    _ingest(lake, FIXTURES / "run" / "traces.jsonl")
    texts = _rows(lake, "e-text")
    assert [(row["observation"], row["action"]) for row in texts] == [
        ("user: 1+1?", "2"),
        ("user: Sure?", "Yes"),
    ]
    assert {row["action_tokens"] for row in texts} == {None}
    (failed,) = _rows(lake, "e-failed")
    assert (failed["observation"], failed["action"]) == ("user: 1+1?", "")
    assert (failed["is_trainable"], failed["reward"], failed["truncated"]) == (False, None, True)
    assert json.loads(failed["metadata"])["trace"]["errors"][0]["status_code"] == 529
    # Episodes that state no group are samples of their task.
    assert (failed["group_id"], failed["group_id_source"]) == ("sum-1", "derived")


def test_paths_of_a_mapping(lake: Lake) -> None:
    _ingest(
        lake,
        FIXTURES / "run" / "traces.jsonl",
        reward="rewards.style.score",
        seed="info.seed",
        answer="episode.task.data.answer",
        made_at="node.timestamp",
        model="call.model",
    )
    rows = _rows(lake, "e-tools")
    assert [row["reward"] for row in rows] == [0.0, 0.0, 0.5]
    assert [row["seed"] for row in rows] == [7, 7, 7]
    assert [row["answer"] for row in rows] == ["2"] * 3
    assert rows[0]["made_at"] == 1_790_000_002.25
    assert {row["model"] for row in rows} == {"tiny/llama"}


def test_ends_and_calls_that_are_no_text_and_no_list(lake: Lake, tmp_path: Path) -> None:
    episode = _read_traces(FIXTURES / "run")[0]
    episode["traces"][0] |= {"stop_condition": ["x"], "calls": 5}
    (tmp_path / "log.jsonl").write_text(json.dumps(episode) + "\n")
    assert _ingest(lake, tmp_path / "log.jsonl").episodes.rejected == 0
    first, *_ = _rows(lake, "e-tools")
    assert (first["status"], first["policy"]) == (None, "tiny/llama")
    assert json.loads(first["metadata"])["trace"]["failed_calls"] == 5


def test_a_chunk_of_seekable_zstd(lake: Lake, tmp_path: Path) -> None:
    """prime-rl seals its stream in frames, with a table of them in a frame that is skipped."""
    data = (FIXTURES / "run" / "traces.jsonl").read_bytes()
    half = len(data) // 2
    codec = pa.Codec("zstd")
    frames = [codec.compress(part).to_pybytes() for part in (data[:half], data[half:])]
    sizes = zip(map(len, frames), (half, len(data) - half), strict=True)
    table = b"".join(struct.pack("<II", *pair) for pair in sizes)
    table += struct.pack("<IBI", len(frames), 0, 0x8F92EAB1)
    sealed = b"".join(frames) + struct.pack("<II", 0x184D2A5E, len(table)) + table
    (tmp_path / "stream.jsonl.zst").write_bytes(sealed)
    receipt = _ingest(lake, tmp_path / "stream.jsonl.zst")
    assert (receipt.format, receipt.steps.committed) == ("verifiers", 14)


def test_a_trace_that_stands_alone(lake: Lake, tmp_path: Path) -> None:
    episode = _read_traces(FIXTURES / "run")[0]
    (tmp_path / "log.jsonl").write_text(json.dumps(episode["traces"][0]) + "\n")
    assert _ingest(lake, tmp_path / "log.jsonl").format == "verifiers"
    assert [row["action"] for row in _rows(lake, "tools")][1:] == ["It is 2.", "Two."]


def test_generations_without_ids_in_a_trace_with_ids(lake: Lake, tmp_path: Path) -> None:
    episode = _read_traces(FIXTURES / "run")[0]
    for number in (2, 5):
        fields = {"token_ids": [], "mask": [], "logprobs": []}
        episode["traces"][0]["nodes"][number].update(fields)
    (tmp_path / "log.jsonl").write_text(json.dumps(episode))
    receipt = _ingest(lake, tmp_path / "log.jsonl")
    assert receipt.episodes.rejected == 0
    assert receipt.notes == (
        "2 generations have no token ids, and others of their trace have: they are stored without "
        "tokens, and is_trainable is false",
    )
    rows = [(row["action_tokens"], row["is_trainable"]) for row in _rows(lake, "e-tools")]
    assert rows == [([], False), ([10, 53, 33, 42, 52, 33], None), ([], False)]


def test_numbers_in_metadata_that_json_lacks(lake: Lake, tmp_path: Path) -> None:
    episode = _read_traces(FIXTURES / "run")[0]
    episode["traces"][0]["info"] = {"seed": float("nan")}
    (tmp_path / "log.jsonl").write_text(json.dumps(episode))
    _ingest(lake, tmp_path / "log.jsonl")
    metadata = json.loads(_rows(lake, "e-tools")[0]["metadata"])
    assert metadata["trace"]["info"] == {"seed": "NaN"}


def _node(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    """Return what damages the second node of the first trace."""
    return lambda episode: episode["traces"][0]["nodes"][2].update(fields)


def _trace(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda episode: episode["traces"][0].update(fields)


_BAD: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda one: one.update(traces=3), "traces: found 3, expected a list"),
    (lambda one: one.update(traces=[3]), r"traces\[0\].found 3, expected an object"),
    (_trace(nodes={}), r"traces\[0\].nodes: found {}, expected a list"),
    (_trace(nodes=[4]), r"nodes\[0\].found 4, expected an object"),
    (_trace(calls=[{"node": 9}]), "calls: found node 9, expected one of"),
    (_trace(rewards=[1]), r"rewards: found \[1\], expected an object"),
    (_trace(rewards={"a": {"score": "1"}}), "rewards.a: found {'score': '1'}, expected a score"),
    (_trace(rewards={"a": {"score": 10**400}}), "int too large to convert to float"),
    (_node(parent=2), r"nodes\[2\].parent: found 2, expected the number of a node before it"),
    (_node(parent=4), "parent: found 4, expected the number of a node before it"),
    (_node(parent=-1), "parent: found -1, expected"),
    (_node(parent=True), "parent: found True, expected"),
    (_node(message={"content": "x"}), "message: found {'content': 'x'}, expected one with a role"),
    (_node(token_ids=["a"]), r"token_ids: found \['a'\], expected a list of token ids"),
    (_node(token_ids=[-4], mask=[True]), "token_ids: found -4, expected ids of 0 or more"),
    (_node(mask=[True]), r"mask: found \[True\], expected 4 flags"),
    (_node(mask=[0, 1, 2, 1]), r"mask: found \[0, 1, 2, 1\], expected 4 flags"),
    (_node(logprobs=[-1.0]), "logprobs: found 1 numbers, expected 3, one for each token"),
    (_node(logprobs=[None] * 3), r"logprobs: found \[None, None, None\], expected 3 numbers"),
    (_node(logprobs=[float("nan")] * 3), "found nan for token 0, expected at most 0"),
    (_node(logprobs=[0.5] * 3), "found 0.5 for token 0, expected at most 0"),
    (_node(timestamp=1e30), "timestamp: found 1e[+]30, expected seconds since 1970"),
    (
        lambda one: one["run"]["work"].update(step=2**70),
        "run.work.step: found 1180591620717411303424, expected a whole number in 64 bits",
    ),
]


def test_bad_episodes_are_quarantined(lake: Lake, tmp_path: Path) -> None:
    good = json.dumps(_read_traces(FIXTURES / "run")[0])
    lines = [good]
    for damage, _ in _BAD:
        bad = json.loads(good)
        damage(bad)
        lines.append(json.dumps(bad))
    lines += ["[1]", good[: len(good) // 2], good]
    (tmp_path / "traces.jsonl").write_text("\n".join(lines))
    receipt = _ingest(lake, tmp_path / "traces.jsonl")
    (row,) = lake.sql("SELECT count(DISTINCT episode_id) AS n FROM talks.steps").to_pylist()
    assert row == {"n": 2}
    query = "SELECT DISTINCT unnest(reasons) AS reason FROM talks.quarantine"
    reasons = [row["reason"] for row in lake.sql(query).to_pylist()]
    messages = [*(message for _, message in _BAD), "found list, expected an object", "column"]
    for number, message in enumerate(messages):
        # What the checks of steps find stands with the place of the step, and not of the line.
        of_steps = message.endswith("expected at most 0")
        place = "" if of_steps else f"traces.jsonl line {number + 2}: "
        found = [reason for reason in reasons if place in reason]
        assert any(re.search(message, reason) for reason in found), (message, found)
    assert receipt.episodes.rejected >= len(messages)


def test_ids_outside_the_vocabulary_are_quarantined(lake: Lake) -> None:
    """The messages of the fixture end above 93: with a vocabulary of 90, none is inside."""
    tokenizer = Tokenizer("tiny", vocabulary_size=90)
    lake.dataset("talks").create(Text(), Text(), rewards_optional=True, tokenizer=tokenizer)
    receipt = _ingest(lake, FIXTURES / "run" / "traces.jsonl")
    # What remains are the episodes of texts alone.
    (row,) = lake.sql(
        "SELECT count(action_tokens) AS n, count(*) AS m FROM talks.steps"
    ).to_pylist()
    assert row["n"] == 0 < row["m"]
    checks = [one for one in receipt.checks if one.outcome == "rejected"]
    assert any("expected 0..89, the vocabulary of" in one.example for one in checks)


def test_texts_that_utf_8_cannot_hold(lake: Lake, tmp_path: Path) -> None:
    episode = _read_traces(FIXTURES / "run")[0]
    trace = episode["traces"][0]
    trace["nodes"][0]["message"]["content"] = "a\x00\ud83d"
    trace["agent"]["name"] = "so\x00l\ud83d"
    episode["id"] = "e\ud83d"
    (tmp_path / "traces.jsonl").write_text(json.dumps(episode))
    assert _ingest(lake, tmp_path / "traces.jsonl").episodes.rejected == 0
    (row,) = lake.sql("SELECT * FROM talks.steps WHERE env_step = 0").to_pylist()
    assert row["observation"].startswith("system: a\N{REPLACEMENT CHARACTER}")
    assert json.loads(row["prompt_messages"])[0]["content"] == "a\x00\ud83d"


def test_a_line_that_is_too_long(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replaylake.datastore.interchange.formats.generations import rows

    monkeypatch.setattr(rows, "_MAX_LINE_BYTES", 1 << 10)
    with pytest.raises(SourceInvalidError, match=r"line 1: found more than .* MiB, expected one"):
        ingest(lake, [FIXTURES / "run" / "traces.jsonl"], "talks", format="verifiers")


@pytest.mark.slow
def test_flipped_bytes(lake: Lake, tmp_path: Path) -> None:
    whole = (FIXTURES / "run" / "traces.jsonl").read_bytes()
    rng = np.random.default_rng(7)
    for number in range(12):
        damaged = bytearray(whole)
        for place in rng.integers(len(whole), size=5):
            damaged[place] ^= 1 << int(rng.integers(8))
        (tmp_path / f"{number}.jsonl").write_bytes(damaged)
        with suppress(ReplayLakeError):
            ingest(lake, [tmp_path / f"{number}.jsonl"], f"talks{number}", format="verifiers")
