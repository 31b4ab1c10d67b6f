"""What trainers read: a row of each target worked out by hand, and what is left out and said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import replaylake as rl
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import (
    AlreadyExistsError,
    ConfigInvalidError,
    EmptyReplayError,
    QueryError,
    SpaceUnsupportedError,
)
from replaylake.datastore.interchange.export.export import ExportReceipt, export
from replaylake.datastore.interchange.export.trainers.files import (
    write_json_lines,
    write_torch_samples,
)
from replaylake.datastore.interchange.export.trainers.targets import TARGETS
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake

Make = Callable[..., Episode]
_FIXTURES = Path(__file__).parents[4] / "fixtures"
_DOCS = (Path(__file__).parents[5] / "docs" / "FORMATS.md").read_text(encoding="utf-8")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "1 + 1?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
GOT = {"role": "tool", "tool_call_id": "c1", "content": "2"}


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _dialogue(name: str, reward: float, messages: list[Any], **more: Any) -> dict[str, Any]:
    given = {"id": name, "group_id": "sum", "messages": messages, "reward": reward}
    return {**given, "answer": "2", "tools": TOOLS, **more}


@pytest.fixture
def chats(lake: Lake, tmp_path: Path) -> Lake:
    """Three samples of one prompt, of which one calls a tool; and one of another, an image."""
    image = {"type": "image_url", "image_url": {"url": "cat.png"}}
    seen = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}
    records = [
        _dialogue("tool", 1.0, [ASKED, CALLED, GOT, _said("It is 2.")]),
        _dialogue("right", 0.5, [ASKED, _said("2")]),
        _dialogue("wrong", -1.0, [ASKED, _said("3")]),
        _dialogue("cat", 1.0, [seen, _said("A cat")], group_id="image", answer="cat"),
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    ingest(lake, [path], dataset="chats")
    return lake


@pytest.fixture
def talks(lake: Lake, make_dialogue: Make) -> Lake:
    """Two samples of one prompt with tokens, of which the second was cut off."""
    named = {"group_id": ["g"] * 2}
    lake.dataset("talks").append(
        [
            make_dialogue("a", 2, extras=named, policy_versions=[3, 4]),
            make_dialogue("b", 2, extras=named, rewards=[0, 0], truncated=True, terminated=False),
        ]
    )
    return lake


def _export(lake: Lake, name: str, path: Path, **more: Any) -> tuple[ExportReceipt, list[Any]]:
    dataset = more.pop("dataset", "chats")
    receipt = export(lake, dataset, path, format=name, **more)
    return receipt, _read(path, name)


def _read(path: Path, name: str) -> list[Any]:
    write_rows = TARGETS[name].write_rows
    if write_rows is write_json_lines:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if TARGETS[name].is_parquet:
        return list(pq.read_table(path).to_pylist())
    if write_rows is write_torch_samples:
        return list(torch.load(path, weights_only=True)["samples"])
    if name == "atif":
        return [json.loads(file.read_text()) for file in sorted(path.iterdir())]
    with pa.OSFile(str(path / "data-00000-of-00001.arrow")) as file:
        return list(pa.ipc.open_stream(file).read_all().to_pylist())


_PLAIN_CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
_SUM = [ASKED, _PLAIN_CALLED, GOT, _said("It is 2.")]
_NO_CALL = {"tool_calls": None, "tool_call_id": None}
_RIGHT = "source_episode_id = 'right'"
# Of each target the first row of the dialogue `right`, or of the pair of `right` and `wrong`.
_FIRST_ROWS: dict[str, Any] = {
    "openai": {"messages": [ASKED, _said("2")], "tools": TOOLS},
    "trl-sft": {"messages": [ASKED, _said("2")], "tools": TOOLS},
    "nemo-rl-sft": {"messages": [ASKED, _said("2")], "tools": TOOLS},
    "verl-sft": {"messages": [ASKED, _said("2")]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}],
        "tools": TOOLS,
    },
    "trl-kto": {"prompt": [ASKED], "completion": [_said("2")], "label": True, "tools": TOOLS},
    "marti-kto": {"input": [ASKED], "output": [_said("2")], "label": True},
    "openrlhf-sft": {"input": [ASKED], "output": [_said("2")]},
    "trl-grpo": {"prompt": [ASKED], "ground_truth": "2", "tools": TOOLS},
    "verl-rl": {
        "data_source": "chats",
        "prompt": [ASKED],
        "ability": "",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": "right", "group_id": "sum"},
    },
    "openrlhf-prompts": {"input": [ASKED], "label": "2", "datasource": "chats"},
    "marti-prompts": {
        "input": [ASKED],
        "label": "2",
        "datasource": "chats",
        "metadata": {"episode_id": "right", "group_id": "sum"},
    },
    "nemo-rl-prompts": {"input": "1 + 1?", "output": "2"},
    "roll-rlvr": {
        "id": "right",
        "source": "chats",
        "difficulty": "",
        "prompt": "1 + 1?",
        "messages": '[{"role":"user","content":"1 + 1?"}]',
        "ground_truth": "2",
        "case_type": "",
        "test_case_function": "",
        "test_cases": "",
        "tag": "chats",
        "domain": "math_rule",
    },
    "areal-rl": {"messages": [ASKED], "answer": "2"},
    "easyr1": {"problem": "1 + 1?", "answer": "2"},
    "vlm-r1": {
        "id": "right",
        "conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}],
    },
    "art": {
        "group_index": 0,
        "group_metadata": '{"group_id":"sum"}',
        "group_metrics": None,
        "group_logs": [],
        "reward": 0.5,
        "metrics": None,
        "metadata": '{"episode_id":"right"}',
        "tools": json.dumps(TOOLS, separators=(",", ":")),
        "logs": [],
        "messages": [
            {**_NO_CALL, **ASKED, "trainable": False},
            {**_NO_CALL, **_said("2"), "trainable": True},
        ],
    },
    "slime-prompts": {
        "text": [ASKED],
        "label": "2",
        "metadata": {"episode_id": "right", "group_id": "sum"},
    },
    "trl-dpo": {
        "prompt": [ASKED],
        "chosen": [_said("2")],
        "rejected": [_said("3")],
        "tools": TOOLS,
    },
    "trl-reward": {
        "prompt": [ASKED],
        "chosen": [_said("2")],
        "rejected": [_said("3")],
        "tools": TOOLS,
        "margin": 1.5,
    },
    "verl-rm": {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
    "roll-dpo": {"instruction": "1 + 1?", "chosen": "2", "rejected": "3"},
    "openrlhf-preference": {
        "prompt": [ASKED],
        "chosen": [_said("2")],
        "rejected": [_said("3")],
        "margin": 1.5,
    },
    "nemo-rl-preference": {
        "context": [ASKED],
        "completions": [
            {"rank": 0, "completion": [_said("2")]},
            {"rank": 1, "completion": [_said("3")]},
        ],
    },
    "atif": {
        "schema_version": "ATIF-v1.8",
        "session_id": "right",
        "trajectory_id": "right",
        "agent": {"name": "openai", "version": "unknown", "tool_definitions": TOOLS},
        "steps": [
            {"step_id": 1, "source": "user", "message": "1 + 1?"},
            {"step_id": 2, "source": "agent", "message": "2"},
        ],
        "final_metrics": {"total_steps": 2},
        "extra": {"reward": 0.5, "group_id": "sum", "terminated": True, "truncated": False},
    },
    "verifiers": {
        "version": 1,
        "id": "right",
        "task": {"type": "Task", "data": {"idx": 0, "prompt": [ASKED]}, "key": "sum"},
        "agent": {"config": {}, "name": "agent"},
        "tools": [{"name": "add", "parameters": {"type": "object"}}],
        "nodes": [
            {"message": ASKED, "sampled": False},
            {"message": _said("2"), "parent": 0, "sampled": True},
        ],
        "rewards": {"reward": {"score": 0.5, "weight": 1.0}},
        "info": {"reward": 0.5, "group_id": "sum", "terminated": True, "truncated": False},
        "is_completed": True,
        "ok": True,
        "stop_condition": None,
    },
}
# Of the dialogue `a` of tokens, or of the pair of `a` and `b`.
_IDS, _MASK = [0, 1, 0, 10, 11, 100, 101], [0, 0, 1, 0, 0, 1, 1]
_TOKEN_ROWS: dict[str, Any] = {
    "trl-tokens": {"input_ids": _IDS, "labels": [-100, -100, 0, -100, -100, 100, 101]},
    "areal-sft": {"input_ids": _IDS, "loss_mask": _MASK},
    "areal-dpo": {
        "chosen_ids": _IDS,
        "chosen_loss_mask": _MASK,
        "rejected_ids": _IDS,
        "rejected_loss_mask": _MASK,
    },
    "slime": {
        "group_index": 0,
        "index": 0,
        "rollout_id": 0,
        "prompt": [{"role": "user", "content": "question 0"}],
        "tokens": _IDS,
        "response": "answer 0\nquestion 1\nanswer 1",
        "response_length": 5,
        "label": None,
        "reward": 1.0,
        "loss_mask": [1, 0, 0, 1, 1],
        "weight_versions": ["3", "4"],
        "rollout_log_probs": [-0.5, 0, 0, -0.5, -0.5],
        "status": "completed",
        "metadata": {"episode_id": "a", "group_id": "g"},
        "remove_sample": False,
    },
}


@pytest.mark.parametrize("name", _FIRST_ROWS)
def test_rows(chats: Lake, tmp_path: Path, name: str) -> None:
    pairs = TARGETS[name].unit == "pair"
    where = "source_episode_id IN ('right', 'wrong')" if pairs else _RIGHT
    receipt, rows = _export(chats, name, tmp_path / "out", where=where)
    assert rows == [_FIRST_ROWS[name]]
    assert (receipt.num_rows, receipt.notes) == (1, ())
    assert receipt.num_episodes == (2 if pairs else 1)


@pytest.mark.parametrize("name", _TOKEN_ROWS)
def test_rows_of_tokens(talks: Lake, tmp_path: Path, name: str) -> None:
    receipt, rows = _export(talks, name, tmp_path / "out", dataset="talks")
    assert rows[0] == _TOKEN_ROWS[name]
    assert receipt.num_rows == (1 if name == "areal-dpo" else 2)
    if name == "slime":
        assert rows[1]["group_index"] == 0
        assert (rows[1]["index"], rows[1]["status"]) == (1, "truncated")
        assert torch.load(tmp_path / "out", weights_only=True)["rollout_id"] == 0


def test_every_target_is_here_and_documented() -> None:
    assert {*_FIRST_ROWS} | {*_TOKEN_ROWS} == {*TARGETS}
    for target in TARGETS.values():
        assert f"| {target.name} | {target.unit} | {target.about} |" in _DOCS


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [
        ("openai", "messages", [ASKED, CALLED, GOT, _said("It is 2.")]),
        ("trl-sft", "messages", [ASKED, CALLED, GOT, _said("It is 2.")]),
        ("verl-sft", "messages", None),
        (
            "sharegpt",
            "conversations",
            [
                {"from": "human", "value": "1 + 1?"},
                {"from": "function_call", "value": json.dumps(CALL["function"]).replace(" ", "")},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "It is 2."},
            ],
        ),
        ("openrlhf-sft", "output", _SUM[1:]),
    ],
)
def test_calls_of_tools(
    chats: Lake, tmp_path: Path, name: str, key: str, expected: list[Any] | None
) -> None:
    _, rows = _export(chats, name, tmp_path / "out", where="source_episode_id = 'tool'")
    if expected is None:  # Parquet has each field in each message
        calls = [message["tool_calls"] for message in rows[0][key]]
        assert [call and call[0]["id"] for call in calls] == [None, "c1", None, None]
        assert rows[0][key][2]["tool_call_id"] == "c1"
    else:
        assert rows[0][key] == expected


def test_documents_of_calls(chats: Lake, tmp_path: Path) -> None:
    where = "source_episode_id = 'tool'"
    _, (atif,) = _export(chats, "atif", tmp_path / "atif", where=where)
    assert atif["steps"][1:] == [
        {
            "step_id": 2,
            "source": "agent",
            "message": "",
            "tool_calls": [
                {"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 1}},
            ],
            "observation": {"results": [{"source_call_id": "c1", "content": "2"}]},
        },
        {"step_id": 3, "source": "agent", "message": "It is 2."},
    ]
    _, (trace,) = _export(chats, "verifiers", tmp_path / "verifiers", where=where)
    called, result = (node["message"] for node in trace["nodes"][1:3])
    assert called["tool_calls"] == [{"id": "c1", "name": "add", "arguments": '{"a":1}'}]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "2"}


def test_arguments_that_are_no_json(lake: Lake, tmp_path: Path) -> None:
    for number, text in enumerate(['{"a":NaN}', '{"a":1e999}', '{"a":', "[" * 9999, '"\ud800"']):
        call = {**CALL, "function": {"name": "add", "arguments": text}}
        path = tmp_path / f"{number}.jsonl"
        messages = [ASKED, {**CALLED, "tool_calls": [call]}, GOT, _said("2")]
        path.write_text(json.dumps(_dialogue("odd", 1.0, messages)))
        ingest(lake, [path], dataset=f"odd{number}")
        _, (atif,) = _export(lake, "atif", tmp_path / f"atif{number}", dataset=f"odd{number}")
        assert atif["steps"][1]["tool_calls"][0]["arguments"] == {"arguments": text}


def test_documents_have_tokens(talks: Lake, tmp_path: Path) -> None:
    _, documents = _export(talks, "atif", tmp_path / "atif", dataset="talks")
    metrics = [step["metrics"] for step in documents[0]["steps"] if step["source"] == "agent"]
    assert [one["prompt_token_ids"] for one in metrics] == [[0, 1], [0, 1, 0, 10, 11]]
    assert [one["completion_token_ids"] for one in metrics] == [[0], [100, 101]]
    assert metrics[1]["logprobs"] == [-0.5, -0.5]
    assert documents[0]["steps"][3]["extra"] == {"reward": 1.0, "policy_version": 4}
    _, traces = _export(talks, "verifiers", tmp_path / "verifiers", dataset="talks")
    nodes = traces[0]["nodes"]
    assert [node.get("token_ids") for node in nodes] == [None, [0, 1, 0], None, [10, 11, 100, 101]]
    assert nodes[3]["mask"] == [False, False, True, True]
    assert nodes[3]["logprobs"] == [-0.5, -0.5]


@pytest.mark.parametrize(
    ("source", "num_documents"), [("slime/7.pt", 3), ("verifiers/run/traces.jsonl", 4)]
)
def test_documents_need_messages(
    lake: Lake, tmp_path: Path, source: str, num_documents: int
) -> None:
    """A generation of tokens without a message, as a mask divides one, leaves its dialogue out."""
    ingest(lake, [_FIXTURES / source], dataset="run")
    receipt, documents = _export(lake, "atif", tmp_path / "atif", dataset="run")
    (note,) = receipt.notes
    assert note.startswith("1 dialogues are left out, because atif cannot store them")
    assert len(documents) == num_documents


def test_documents_of_sub_agents(lake: Lake, make_dialogue: Make, tmp_path: Path) -> None:
    """A fork begins with what it goes on from as copied context; a call, with its own prompt."""
    forked = {"parent_agent_id": ["x", None], "parent_step": [0, None]}
    called = {**forked, "is_continuation": [False, None]}
    rewritten = {"is_continuation": [None, False]}
    lake.dataset("talks").append(
        [
            make_dialogue("a", 2, agent_id="x"),
            make_dialogue("a", 2, agent_id="y", extras=forked),
            make_dialogue("a", 2, agent_id="z", extras=called),
            make_dialogue("b", 2, extras=rewritten),
        ]
    )
    receipt, (atif,) = _export(lake, "atif", tmp_path / "atif", dataset="talks")
    assert receipt.notes[0].startswith("1 dialogues are left out, because atif cannot store them")
    assert [step["source"] for step in atif["steps"]] == ["user", "agent", "user", "agent"]
    (result,) = atif["steps"][1]["observation"]["results"]
    assert result == {
        "subagent_trajectory_ref": [{"trajectory_id": "a/y"}, {"trajectory_id": "a/z"}]
    }
    fork, call = atif["subagent_trajectories"]
    assert [(one["trajectory_id"], one["session_id"]) for one in (fork, call)] == [
        ("a/y", "a"),
        ("a/z", "a"),
    ]
    assert [step.get("is_copied_context") for step in fork["steps"]] == [True, True, *[None] * 4]
    assert "metrics" not in fork["steps"][1]
    assert fork["steps"][3]["metrics"]["prompt_token_ids"] == [0, 1, 0, 0, 1]
    assert [step["step_id"] for step in call["steps"]] == [1, 2, 3, 4]
    assert call["steps"][1]["metrics"]["prompt_token_ids"] == [0, 1]


def test_tools_of_a_column(lake: Lake, make_dialogue: Make, tmp_path: Path) -> None:
    """As the gateway records them: JSON text, at the steps where they changed."""
    texts = [json.dumps(TOOLS), None]
    lake.dataset("talks").append([make_dialogue("a", 2, extras={"tools": texts})])
    lake.dataset("talks").append([make_dialogue("b", 2, extras={"tools": ["{no JSON", None]})])
    _, rows = _export(lake, "trl-sft", tmp_path / "sft", dataset="talks")
    assert [row.get("tools") for row in rows] == [TOOLS, None]
    _, (atif, _) = _export(lake, "atif", tmp_path / "atif", dataset="talks")
    assert atif["agent"]["tool_definitions"] == TOOLS


def test_images(chats: Lake, tmp_path: Path) -> None:
    where = "source_episode_id = 'cat'"
    _, (row,) = _export(chats, "easyr1", tmp_path / "easyr1", where=where)
    assert row == {"problem": "<image>What is it?", "answer": "cat", "images": ["cat.png"]}
    _, (row,) = _export(chats, "vlm-r1", tmp_path / "vlm-r1", where=where)
    assert (row["image"], row["conversations"][1]["value"]) == ("cat.png", "cat")
    _, (atif,) = _export(chats, "atif", tmp_path / "atif", where=where)
    assert atif["steps"][0]["message"] == [
        {"type": "text", "text": "What is it?"},
        {"type": "image", "source": {"media_type": "image/png", "path": "cat.png"}},
    ]


def test_prompts_come_once(chats: Lake, tmp_path: Path) -> None:
    receipt, rows = _export(chats, "trl-grpo", tmp_path / "out")
    assert [row["ground_truth"] for row in rows] == ["2", "cat"]
    assert (receipt.num_episodes, receipt.num_rows) == (4, 2)
    receipt, rows = _export(chats, "openrlhf-prompts", tmp_path / "named", label="status")
    assert [row["label"] for row in rows] == ["", ""]
    assert receipt.notes[0].startswith("2 rows have no right answer")


def test_pairs(chats: Lake, tmp_path: Path) -> None:
    """By default the best against the worst; of those that `where` selects."""
    _, rows = _export(chats, "trl-reward", tmp_path / "best")
    assert [(row["chosen"][-1]["content"], row["margin"]) for row in rows] == [("It is 2.", 2)]
    _, rows = _export(chats, "trl-reward", tmp_path / "short", where="num_steps = 1")
    assert [(row["chosen"][-1]["content"], row["margin"]) for row in rows] == [("2", 1.5)]
    with pytest.raises(EmptyReplayError, match=r"no row for trl-reward.*no sample is in a se"):
        _export(chats, "trl-reward", tmp_path / "none", where_pairs="margin > 2")
    assert not (tmp_path / "none").exists()
    # A call of a tool is no text.
    with pytest.raises(EmptyReplayError, match="1 pairs are left out, because verl-rm cannot stor"):
        _export(chats, "verl-rm", tmp_path / "texts")


def test_pairs_of_other_prompts_are_left_out(
    lake: Lake, make_dialogue: Make, tmp_path: Path
) -> None:
    named = {"group_id": ["g"]}
    other = np.array(["Another?"], object)
    lake.dataset("talks").append(
        [
            make_dialogue("a", 1, extras=named),
            make_dialogue("b", 1, extras=named, observations=other, rewards=[0]),
        ]
    )
    with pytest.raises(EmptyReplayError, match="1 pairs are left out, because their prompts"):
        export(lake, "talks", tmp_path / "out", format="trl-dpo")


def test_an_export_of_pairs_without_rewards_says_what_makes_one(lake: Lake, tmp_path: Path) -> None:
    def add(completion: str, reward: float | None) -> None:
        with rl.record_language(lake, "notes", producer="run") as recorder:
            recorder.record(prompt="Say.", completion=completion, reward=reward, group_id="g")

    def write() -> ExportReceipt:
        return export(lake, "notes", tmp_path / "out", format="trl-dpo")

    add("a", None)
    with pytest.raises(EmptyReplayError, match=r"several episodes: 0; .*known rewards: 0 of 1"):
        write()
    add("b", 1.0)
    with pytest.raises(EmptyReplayError, match=r"several episodes: 1; .*known rewards: 1 of 2"):
        write()
    add("c", 0.0)
    assert write().num_rows == 1


def test_desirable(chats: Lake, tmp_path: Path) -> None:
    for threshold, labels in ((None, [True, True, False, True]), (0.5, [True, False, False, True])):
        path = tmp_path / str(threshold)
        _, rows = _export(chats, "trl-kto", path, threshold=threshold)
        assert [row["label"] for row in rows] == labels


def test_trees_are_left_out(lake: Lake, make_dialogue: Make, tmp_path: Path) -> None:
    forked = {"parent_agent_id": ["x", None], "parent_step": [1, None]}
    rewritten = {"is_continuation": [None, False]}
    lake.dataset("talks").append(
        [
            make_dialogue("a", 3, agent_id="x"),
            make_dialogue("a", 2, agent_id="y", extras=forked),
            make_dialogue("b", 2, extras=rewritten),
            make_dialogue("c", 2),
        ]
    )
    receipt = export(lake, "talks", tmp_path / "out", format="trl-sft")
    assert receipt.num_rows == 1
    assert receipt.notes[0].startswith("2 episodes are left out, because their generations fork")
    # As branches they are whole.
    sequences = lake.sql("SELECT * FROM talks.sequences ORDER BY episode_id, agent_id, last_step")
    receipt, rows = _export(lake, "slime", tmp_path / "slime", dataset="talks")
    assert receipt.num_rows == 5
    assert [row["tokens"] for row in rows] == sequences["token_ids"].to_pylist()
    assert [row["rollout_id"] for row in rows] == [0, 0, 1, 1, 2]
    # Each of a tree's branches has the tree's return.
    assert [row["reward"] for row in rows] == [2.0, 2.0, 1.0, 1.0, 1.0]
    assert [row["response"] for row in rows[:2]] == [
        "answer 0\nquestion 1\nanswer 1\nquestion 2\nanswer 2",
        "answer 0\nquestion 1\nanswer 1\nquestion 0\nanswer 0\nquestion 1\nanswer 1",
    ]


def test_contexts_of_several_agents(lake: Lake, make_dialogue: Make, tmp_path: Path) -> None:
    """Agents that nobody called have a context each where tokens are known; else they talk."""
    unknown = {name: [None, None] for name in ("observation_tokens", "action_tokens")}
    unknown["action_log_probs"] = [None, None]
    lake.dataset("talks").append(
        [
            make_dialogue("a", 2, agent_id="x"),
            make_dialogue("a", 2, agent_id="y"),
            make_dialogue("b", 2, agent_id="x", extras=unknown),
            make_dialogue("b", 2, agent_id="y", extras=unknown),
        ]
    )
    receipt, rows = _export(lake, "trl-sft", tmp_path / "sft", dataset="talks")
    assert receipt.notes[0].startswith("1 episodes are left out, because their generations fork")
    assert [len(row["messages"]) for row in rows] == [8]
    receipt, rows = _export(lake, "atif", tmp_path / "atif", dataset="talks")
    assert [row["session_id"] for row in rows] == ["b"]
    _, rows = _export(lake, "slime", tmp_path / "slime", dataset="talks", where="episode_id = 'a'")
    assert [row["reward"] for row in rows] == [1.0, 1.0]
    _, (apart, joined) = _export(lake, "verifiers", tmp_path / "traces", dataset="talks")
    assert [node.get("parent") for node in apart["nodes"]] == [None, 0, None, 2, 1, 4, 3, 6]
    assert [node.get("parent") for node in joined["nodes"]] == [None, *range(7)]


def test_interleaved_dialogues_are_rows_of_their_own(
    lake: Lake, make_dialogue: Make, tmp_path: Path
) -> None:
    for agent_id in ("x", "y"):
        for name in ("a", "b"):
            lake.dataset("talks").append([make_dialogue(name, 2, agent_id=agent_id)])
    receipt, traces = _export(lake, "verifiers", tmp_path / "traces", dataset="talks")
    assert (receipt.num_rows, receipt.num_episodes) == (2, 4)
    assert [len(trace["nodes"]) for trace in traces] == [8, 8]


def test_trees_as_graphs(lake: Lake, make_dialogue: Make, tmp_path: Path) -> None:
    forked = {"parent_agent_id": ["x", None], "parent_step": [1, None]}
    rewritten = {"is_continuation": [None, False, None]}
    lake.dataset("talks").append(
        [
            make_dialogue("a", 3, agent_id="x"),
            make_dialogue("a", 2, agent_id="y", extras=forked),
            make_dialogue("b", 3, extras=rewritten),
        ]
    )
    _, traces = _export(lake, "verifiers", tmp_path / "traces.jsonl", dataset="talks")
    branches = []
    for trace in traces:
        nodes = trace["nodes"]
        parents = {node.get("parent") for node in nodes}
        for leaf in (number for number in range(len(nodes)) if number not in parents):
            path: list[Any] = []
            at: int | None = leaf
            while at is not None:
                path.insert(0, nodes[at])
                at = nodes[at].get("parent")
            branches.append(
                (
                    [token for node in path for token in node.get("token_ids", ())],
                    [int(flag) for node in path for flag in node.get("mask", ())],
                )
            )
    rows = lake.sql("SELECT token_ids, loss_mask FROM talks.sequences").to_pylist()
    assert sorted(ids for ids, _ in branches) == sorted(row["token_ids"] for row in rows)
    # What branches share counts in each of them here.
    assert sum(map(sum, (mask for _, mask in branches))) > sum(sum(r["loss_mask"]) for r in rows)


@pytest.mark.parametrize("run", ["run", "random"])
def test_traces_are_read_again(lake: Lake, tmp_path: Path, run: str) -> None:
    """The branches of traces come back, also where a mask divides a message's tokens."""
    ingest(lake, [_FIXTURES / "verifiers" / run / "traces.jsonl"], dataset="once")
    receipt, traces = _export(lake, "verifiers", tmp_path / "traces.jsonl", dataset="once")
    ingest(lake, [tmp_path / "traces.jsonl"], dataset="again")
    query = """
        SELECT token_ids, loss_mask FROM {}.sequences
        WHERE len(token_ids) > 0
          AND episode_id IN (SELECT episode_id FROM {}.steps WHERE source_episode_id IN ({}))
        ORDER BY ALL
    """
    names = ", ".join(f"'{trace['id']}'" for trace in traces)
    once, again = (lake.sql(query.format(n, n, names)).to_pylist() for n in ("once", "again"))
    assert once == again
    num_left_out = lake.sql("SELECT count(DISTINCT episode_id) AS n FROM once.steps")
    assert receipt.num_rows is not None
    assert len(traces) == receipt.num_rows == num_left_out["n"].to_pylist()[0]


@pytest.mark.parametrize("name", ["atif", "verifiers"])
@pytest.mark.parametrize("more", [{}, {"extras": {"status": ["max_turns"] * 2}}])
def test_ends_and_times_are_read_again(
    lake: Lake, make_dialogue: Make, tmp_path: Path, name: str, more: dict[str, Any]
) -> None:
    ends = {"a": (True, False), "b": (False, True), "c": (False, False)}
    times = np.array([1_790_000_000_250_000, 1_790_000_001_250_000])
    lake.dataset("talks").append(
        make_dialogue(one, 2, terminated=terminated, truncated=truncated, timestamps=times, **more)
        for one, (terminated, truncated) in ends.items()
    )
    _, rows = _export(lake, name, tmp_path / "out", dataset="talks")
    ingest(lake, [tmp_path / "out"], dataset="again", format=name)
    query = """
        SELECT source_episode_id, terminated, truncated FROM again.steps WHERE step = 1
        ORDER BY ALL
    """
    read = {r.pop("source_episode_id"): (*r.values(),) for r in lake.sql(query).to_pylist()}
    assert read == ends
    if name == "verifiers":
        assert [node["timestamp"] for node in rows[0]["nodes"]] == [
            *[1790000000.25] * 2,
            *[1790000001.25] * 2,
        ]


@pytest.mark.parametrize("name", ["trl-tokens", "areal-sft"])
def test_branches_without_a_loss_are_left_out(
    lake: Lake, make_dialogue: Make, tmp_path: Path, name: str
) -> None:
    lake.dataset("talks").append(
        [make_dialogue("a", 1, extras={"is_trainable": [False]}), make_dialogue("b", 2)]
    )
    receipt, rows = _export(lake, name, tmp_path / "out", dataset="talks")
    assert [row["input_ids"] for row in rows] == [[0, 1, 0, 10, 11, 100, 101]]
    assert receipt.notes == (
        f"1 branches are left out, because {name} cannot store them (docs/FORMATS.md)",
    )


def test_texts_that_utf_8_cannot_hold(lake: Lake, tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    asked = {"role": "user", "content": "half \ud800 of a pair"}
    path.write_text(json.dumps(_dialogue("odd", 1.0, [asked, _said("2")])))
    ingest(lake, [path], dataset="odd")
    receipt, (row,) = _export(lake, "verl-rl", tmp_path / "out", dataset="odd")
    (message,) = row["prompt"]
    assert message["content"].startswith("half \ufffd")
    assert receipt.notes == (
        "1 rows have texts with half of a surrogate pair, which Parquet cannot store: "
        "replaced by U+FFFD",
    )


def test_pairs_with_a_side_that_is_left_out(
    lake: Lake, make_dialogue: Make, tmp_path: Path
) -> None:
    rewritten = {"group_id": ["h"] * 2, "is_continuation": [None, False]}
    lake.dataset("talks").append(
        [
            make_dialogue("a", 2, extras={"group_id": ["g"] * 2}),
            make_dialogue("b", 2, extras={"group_id": ["g"] * 2}, rewards=[0, 0]),
            make_dialogue("c", 2, extras={"group_id": ["h"] * 2}),
            make_dialogue("d", 2, extras=rewritten, rewards=[0, 0]),
        ]
    )
    receipt = export(lake, "talks", tmp_path / "out", format="trl-dpo")
    assert receipt.num_rows == 1
    assert receipt.notes[0].startswith("1 episodes are left out")
    assert receipt.notes[1] == "1 pairs are left out, because an episode of each is left out"


def test_a_condition_of_pairs_that_is_no_sql(chats: Lake, tmp_path: Path) -> None:
    expected = "^where_pairs 'none = 1': found Binder Error.* columns of `preference_pairs`"
    with pytest.raises(QueryError, match=expected):
        export(chats, "chats", tmp_path / "out", format="trl-dpo", where_pairs="none = 1")
    assert not (tmp_path / "out").exists()


def test_times_that_are_unknown(talks: Lake, tmp_path: Path) -> None:
    _, traces = _export(talks, "verifiers", tmp_path / "traces", dataset="talks")
    assert not any("timestamp" in node for trace in traces for node in trace["nodes"])


def test_traces_need_a_message(lake: Lake, tmp_path: Path) -> None:
    ingest(lake, [_FIXTURES / "slime" / "7.pt"], dataset="run")
    receipt, traces = _export(lake, "verifiers", tmp_path / "traces.jsonl", dataset="run")
    assert len(traces) == 3
    (note,) = receipt.notes
    assert note.startswith("1 dialogues are left out, because verifiers cannot store them")


def test_what_no_target_can_hold(lake: Lake, make_episode: Make, tmp_path: Path) -> None:
    lake.dataset("plain").append([make_episode("a")])
    with pytest.raises(SpaceUnsupportedError, match="episode a: found observations and actions"):
        export(lake, "plain", tmp_path / "out", format="trl-sft")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "options", "parameter"),
    [
        ("trl-sft", {"where_pairs": "pair = 1"}, "where_pairs"),
        ("parquet", {"where_pairs": "pair = 1"}, "where_pairs"),
        ("trl-dpo", {"label": "answer"}, "label"),
        ("trl-grpo", {"threshold": 1.0}, "threshold"),
        ("trl-grpo", {"where_steps": "step = 0"}, "where_steps"),
    ],
)
def test_options_that_are_not_used(
    chats: Lake, tmp_path: Path, name: str, options: dict[str, Any], parameter: str
) -> None:
    message = f"{parameter}: cannot be used with {name}"
    with pytest.raises(ConfigInvalidError, match=message) as refused:
        export(chats, "chats", tmp_path / "out", format=name, **options)
    assert refused.value.parameter == parameter


def test_an_export_is_replaced_by_its_like(talks: Lake, tmp_path: Path) -> None:
    for name in ("atif", "areal-sft"):
        path = tmp_path / name
        export(talks, "talks", path, format=name)
        with pytest.raises(AlreadyExistsError):
            export(talks, "talks", path, format=name)
        export(talks, "talks", path, format=name, force=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(AlreadyExistsError, match="holds no atif"):
        export(talks, "talks", other, format="atif", force=True)
    assert (other / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["openai", "sharegpt"])
def test_dialogues_are_read_again(chats: Lake, tmp_path: Path, name: str) -> None:
    path = tmp_path / "again.jsonl"
    export(chats, "chats", path, format=name, where="source_episode_id <> 'cat'")
    ingest(chats, [path], dataset="again")
    query = "SELECT action FROM {}.steps WHERE source_episode_id <> 'cat' ORDER BY ALL"
    known = chats.sql(query.format("chats")).column("action").to_pylist()
    read = chats.sql(query.format("again")).column("action").to_pylist()
    if name == "sharegpt":  # whose calls are texts
        assert len(read) == len(known)
    else:
        assert read == known
