"""Streams of decisions and of dialogues: each line once, by id, by key or by content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.errors import ConfigInvalidError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.stream.receipt import StreamReceipt
from replaylake.datastore.interchange.ingest.stream.stream import follow
from replaylake.datastore.lake.lake import Lake, open_lake
from tests.datastore.interchange.given_lines import GivenLines

_MAPPING = {
    "observation": "age,segment",
    "action": "banner",
    "reward": "paid",
    "behavior_prob": "chance",
}
_BY_ID = ReadOptions({**_MAPPING, "episode_id": "event_id"})


def _follow(lake: Lake, *chunks: Sequence[Any], **how: Any) -> StreamReceipt:
    """Flush after every chunk, unless told otherwise."""
    receipt = follow(lake, GivenLines(chunks), "log", **{"flush_every_s": 0.0, **how})
    assert receipt.num_lines == sum(1 for chunk in chunks for one in chunk if one != b"")
    return receipt


def _counts(receipt: StreamReceipt) -> tuple[int, int, int]:
    lines = receipt.lines
    assert lines.read == lines.committed + lines.rejected + lines.already_present
    return lines.committed, lines.rejected, lines.already_present


def _decision(event: Any, **changes: Any) -> dict[str, Any]:
    number = event if isinstance(event, int) else 0
    return {
        "event_id": event,
        "age": 20 + number,
        "segment": "ab"[number % 2],
        "banner": ["blue", "green", "red"][number % 3],
        "paid": number % 2,
        "chance": 0.25,
        **changes,
    }


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _steps(lake: Lake, columns: str = "*") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = lake.sql(
        f"SELECT {columns} FROM log.steps ORDER BY episode_id, agent_id, step"
    ).to_pylist()
    return rows


def test_decisions_are_as_those_of_a_file(lake: Lake, tmp_path: Path) -> None:
    log = [_decision(n) for n in range(1, 9)]
    receipt = _follow(lake, log[:3], log[3:], format="bandit", options=_BY_ID)
    assert _counts(receipt) == (8, 0, 0)
    assert receipt.num_commits == 2
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in log))
    ingest(lake, [path], "file", format="bandit", options=_BY_ID)
    columns = (
        "source_episode_id, step, observation, action, reward, terminated, truncated, "
        "behavior_log_prob"
    )
    streamed, read = (
        lake.sql(f"SELECT {columns} FROM {name}.steps ORDER BY ALL").to_pylist()
        for name in ("log", "file")
    )
    assert streamed == read
    assert all(row["terminated"] for row in streamed)
    encodings = [lake.dataset(name).spec.encoding for name in ("log", "file")]
    assert encodings[0] == encodings[1]


def test_decisions_delivered_again_add_nothing(lake: Lake) -> None:
    how = {"format": "bandit", "options": _BY_ID}
    log = [_decision(n) for n in range(1, 7)]
    _follow(lake, log, **how)
    more = [*log, _decision(8), log[0]]
    assert _counts(_follow(lake, more, **how)) == (1, 0, 7)
    other = _follow(lake, [_decision(3, paid=7)], **how)
    assert _counts(other) == (0, 1, 0)
    assert other.reasons[0].check == "step_twice"
    assert [row["reward"] for row in _steps(lake)] == [1, 0, 1, 0, 1, 0, 0]


def test_a_key_tells_decisions_apart(lake: Lake) -> None:
    """A late reward is filled in, a conflict set aside, and each key is there once."""
    options = ReadOptions(_MAPPING, reward_unknown=True)
    how = {"format": "bandit", "options": options}
    first = [_decision(1), _decision(2), _decision(3, paid=None), _decision(2)]
    receipt = _follow(lake, first, unique=["event_id"], **how)
    assert _counts(receipt) == (3, 0, 1)
    # The key of a dataset holds without being named.
    second = [_decision(3, paid=5), _decision(1, age=99), _decision(4), *first]
    receipt = _follow(lake, second, **how)
    assert _counts(receipt) == (1, 1, 5)
    assert (receipt.keys.late_values, receipt.keys.conflicts) == (1, 1)
    assert [(row["event_id"], row["reward"]) for row in _steps(lake)] == [
        (1, 1),
        (2, 0),
        (3, 5),
        (4, 0),
    ]
    assert [row["episode_id"] for row in _steps(lake)] == [f"log/{n}" for n in range(1, 5)]
    (row,) = lake.sql("SELECT checks, reasons FROM log.quarantine").to_pylist()
    assert row["checks"] == ["conflict"]
    assert "event_id 1" in row["reasons"][0]


def test_a_key_of_several_columns_names_episodes_apart(lake: Lake) -> None:
    log = [
        {**_decision(1), "site": site, "request": request}
        for site, request in (("a/b", "c"), ("a", "b/c"), ("a", 2.0), ("a", None))
    ]
    log[2]["request"] = "2"
    how = {"format": "bandit", "options": ReadOptions(_MAPPING)}
    receipt = _follow(lake, log, unique=["site", "request"], **how)
    assert _counts(receipt) == (3, 1, 0)
    assert receipt.reasons[0].check == "key"
    names = {row["episode_id"] for row in _steps(lake)}
    assert names == {"log/a%2Fb/c", "log/a/b%2Fc", "log/a/2"}


def test_decisions_without_id_and_key_are_refused(lake: Lake) -> None:
    with pytest.raises(SourceInvalidError, match=r"no column for episode_id.*`unique`"):
        _follow(lake, [_decision(1)], format="bandit", options=ReadOptions(_MAPPING))
    assert not lake.dataset("log").exists()


def test_invalid_decisions_are_quarantined_by_line_and_the_rest_committed(lake: Lake) -> None:
    log = [
        _decision(1),
        b"nonsense",
        _decision(2),
        _decision(3, banner=["red", "blue"]),
        _decision(4, paid="x"),
        _decision(None),
        [1, 2],
        _decision(5),
    ]
    receipt = _follow(lake, log, format="bandit", options=_BY_ID)
    assert _counts(receipt) == (3, 5, 0)
    rows = lake.sql("SELECT checks[1] AS name, reasons[1] AS reason FROM log.quarantine")
    found = {row["reason"].split(":")[0]: row["name"] for row in rows.to_pylist()}
    assert found == {
        "given line 2": "malformed",
        "given line 4, column 'banner'": "dtype",
        "given line 5, column 'paid'": "dtype",
        "given line 6, column 'event_id'": "missing",
        "given line 7": "malformed",
    }


def test_columns_that_name_a_slate_need_a_word(lake: Lake) -> None:
    log = [{**_decision(n), "request_id": f"r{n}"} for n in (1, 2)]
    with pytest.raises(SourceInvalidError, match="column 'request_id': is not supported in a"):
        _follow(lake, log, format="bandit", options=_BY_ID)
    options = ReadOptions({**_MAPPING, "episode_id": "request_id"})
    assert _counts(_follow(lake, log, format="bandit", options=options)) == (2, 0, 0)
    assert _counts(_follow(lake, log, format="bandit", options=options)) == (0, 0, 2)


def test_open_bandit_is_known_by_its_first_line(lake: Lake) -> None:
    log = [
        {
            "timestamp": f"2019-11-24T00:00:0{n}Z",
            "item_id": n % 3,
            "position": 1,
            "click": 0,
            "propensity_score": 0.25,
            "user_feature_0": "u",
        }
        for n in range(6)
    ]
    receipt = _follow(lake, log, unique=["timestamp"])
    assert _counts(receipt) == (6, 0, 0)
    assert _counts(_follow(lake, log, log[:2])) == (0, 0, 8)
    assert all(row["terminated"] for row in _steps(lake))


def _chat(name: str | None, *said: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]
    return {"messages": messages, **more} | ({} if name is None else {"id": name})


def test_dialogues_are_as_those_of_a_file(lake: Lake, tmp_path: Path) -> None:
    log = [
        _chat("a", "hi", "hello", "2+2?", "4", reward=1.0),
        {"id": "b", "prompt": "p", "completions": ["x", "y"], "rewards": [0, 1]},
        {
            "id": "c",
            "conversations": [{"from": "human", "value": "w"}, {"from": "gpt", "value": "v"}],
        },
        {
            "id": "d",
            "messages": [
                {"role": "user", "content": "look"},
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "content": "seen"},
                {"role": "assistant", "content": "done"},
            ],
            "status": "completed",
        },
    ]
    receipt = _follow(lake, log[:1], log[1:])
    assert _counts(receipt) == (7, 0, 0)
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in log))
    ingest(lake, [path], "file", format="transcripts")
    names = lake.sql("SELECT * FROM log.steps LIMIT 0").column_names
    columns = ", ".join(name for name in names if name != "episode_id")
    streamed, read = (
        lake.sql(f"SELECT {columns} FROM {name}.steps ORDER BY ALL").to_pylist()
        for name in ("log", "file")
    )
    assert streamed == read
    for name in ("observation_space", "action_space", "rewards_optional"):
        assert getattr(lake.dataset("log").spec, name) == getattr(lake.dataset("file").spec, name)


def test_dialogues_delivered_again_add_nothing(lake: Lake) -> None:
    log = [_chat("a", "hi", "hello", "2+2?", "4"), _chat(None, "hi", "yo"), _chat(None, "hi", "oh")]
    assert _counts(_follow(lake, log, format="transcripts")) == (4, 0, 0)
    assert _counts(_follow(lake, log, log[1:2], format="transcripts")) == (0, 0, 5)
    # One that goes on is continued, one that says something else under the same id is refused.
    longer = _chat("a", "hi", "hello", "2+2?", "4", "3+3?", "6")
    assert _counts(_follow(lake, [longer])) == (1, 0, 2)
    other = _follow(lake, [_chat("a", "hi", "something else")])
    assert _counts(other) == (0, 1, 0)
    assert other.reasons[0].check == "step_twice"
    assert len(_steps(lake)) == 5


@pytest.mark.parametrize("name", [None, "a"])
def test_the_order_of_keys_makes_no_other_dialogue(lake: Lake, name: str | None) -> None:
    chat = _chat(name, "hi", '{"x": 1, "y": 2}', "go on", "yo", task="t", source={"a": 1, "b": 2})
    assert _counts(_follow(lake, [chat])) == (2, 0, 0)
    turned = dict(reversed(chat.items()))
    turned["messages"] = [dict(reversed(message.items())) for message in chat["messages"]]
    turned["source"] = {"b": 2, "a": 1}
    assert json.dumps(turned) != json.dumps(chat)
    assert _counts(_follow(lake, [turned])) == (0, 0, 2)
    # What was said is text, and true is not 1.
    said = [dict(message) for message in chat["messages"]]
    said[1]["content"] = '{"y": 2, "x": 1}'
    for other in ({**chat, "messages": said}, {**chat, "source": {"a": True, "b": 2}}):
        receipt = _follow(lake, [other])
        assert receipt.lines.committed == (2 if name is None else 0)
        assert receipt.lines.rejected == (0 if name is None else 1)


def test_steps_with_messages_are_steps(lake: Lake) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    step = {"messages": messages, "observation": 1.0, "action": 1, "reward": 1.0}
    log = [
        {"episode_id": "a", "step": 0, **step, "terminated": False},
        {"episode_id": "a", "step": 1, **step, "reward": 2.0, "terminated": True},
    ]
    assert _counts(_follow(lake, log)) == (2, 0, 0)
    rows = _steps(lake, "step, action, reward, terminated")
    assert [(*row.values(),) for row in rows] == [(0, 1, 1, False), (1, 1, 2, True)]
    assert _counts(_follow(lake, log)) == (0, 0, 2)
    # Also under names that are mapped.
    mapped = [{"trial": "b", "n": 0, **step, "terminated": True}]
    options = ReadOptions({"episode_id": "trial", "step": "n"})
    receipt = follow(lake, GivenLines([mapped]), "mapped", options=options)
    assert _counts(receipt) == (1, 0, 0)
    assert lake.sql("SELECT reward FROM mapped.steps")["reward"].to_pylist() == [1]


def test_streams_keep_the_kind_of_their_lines(lake: Lake) -> None:
    chat = _chat("a", "hi", "hello")
    assert _counts(_follow(lake, [chat])) == (1, 0, 0)
    # As the first line this is a step.
    step = {"episode_id": "b", "step": 7, "observation": 0.5, "action": 1, "reward": 1.0}
    both = {**_chat("b", "hi", "hello"), **step}
    assert _counts(_follow(lake, [both])) == (1, 0, 0)
    assert [row["step"] for row in _steps(lake)] == [0, 0]
    assert _counts(follow(lake, GivenLines([[both]]), "other")) == (1, 0, 0)
    assert lake.sql("SELECT step FROM other.steps")["step"].to_pylist() == [7]
    # The number of a training step does not make a dialogue a step.
    trained = {**_chat("c", "hi", "hello"), "episode_id": "c", "step": 7}
    assert _counts(follow(lake, GivenLines([[trained]]), "trained")) == (1, 0, 0)
    assert lake.sql("SELECT step FROM trained.steps")["step"].to_pylist() == [0]


def test_invalid_dialogues_are_quarantined_by_line_and_the_rest_committed(lake: Lake) -> None:
    log = [
        _chat("a", "hi", "hello"),
        b'{"id": "b", "id": "c", "messages": []}',
        {"id": "d", "prompt": "p", "completion": 17},
        b'{"id": "e", "messages": [{"role": "assistant", "content": "x"}], "reward": NaN}',
        _chat("f", "only a question"),
        b'{"id": "g", "messages": [{"role": "assistant", "content": "half \\ud800 pair"}]}',
        {"something": "else"},
    ]
    receipt = _follow(lake, log)
    assert _counts(receipt) == (2, 4, 0)
    assert "1 lines without a turn of an assistant" in receipt.notes[-1]
    rows = lake.sql("SELECT checks[1] AS name, reasons[1] AS reason FROM log.quarantine")
    found = {row["reason"].split(":")[0]: row["name"] for row in rows.to_pylist()}
    assert found == {f"given line {n}": "malformed" for n in (2, 3, 4, 7)}


_FIXTURES = Path(__file__).parents[3] / "fixtures"
_SAMPLE = {
    "token_ids": [[1, 2, 3, 4, 5, 0]],
    "token_loss_mask": [[0, 0, 1, 1, 1, 0]],
    "input_lengths": [5],
    "generation_logprobs": [[0.0, 0.0, -0.5, -0.25, -0.125, 0.0]],
    "rewards": [1.0],
    "content": [["1+1?", "It is 2"]],
}


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def _compare(lake: Lake, log: Sequence[bytes], path: Path, columns: str) -> None:
    """Compare a stream with the file that has its lines; it adds nothing when it comes again."""
    path.write_bytes(b"\n".join(log))
    ingest(lake, [path], "whole")
    receipt = _follow(lake, *[[line] for line in log])
    number = receipt.lines.committed
    assert receipt.lines.rejected == 0
    query = "SELECT {} FROM {}.steps ORDER BY ALL"
    found, expected = (lake.sql(query.format(columns, one)) for one in ("log", "whole"))
    assert found.to_pylist() == expected.to_pylist()
    assert len(found) == number
    assert _counts(_follow(lake, log)) == (0, 0, number)


def test_rollouts_of_verifiers_are_episodes(lake: Lake, tmp_path: Path) -> None:
    columns = "source_episode_id, agent_id, step, action_tokens, action_log_probs, "
    columns += "behavior_log_prob, reward, reward_components, parent_agent_id, metadata"
    log = _lines(_FIXTURES / "verifiers" / "run" / "traces.jsonl")
    _compare(lake, log, tmp_path / "traces.jsonl", columns)


def test_samples_of_nemo_rl_are_episodes(lake: Lake, tmp_path: Path) -> None:
    samples = [{**_SAMPLE, "idx": i, "rewards": [float(i)]} for i in range(3)]
    log = [json.dumps(one).encode() for one in samples]
    columns = "observation, action, action_tokens, action_log_probs, behavior_log_prob, reward, "
    _compare(lake, log, tmp_path / "log.jsonl", columns + "group_id, terminated")
    # Its id is its content, because a line does not state its training step.
    assert len({row["episode_id"] for row in _steps(lake)}) == 3


@pytest.mark.parametrize("is_numbered", [True, False])
def test_equal_samples_of_nemo_rl_are_several(
    lake: Lake, tmp_path: Path, is_numbered: bool
) -> None:
    """Equal answers to one prompt are common in a group, whose size they are part of."""
    samples = [{**_SAMPLE, "idx": i} if is_numbered else _SAMPLE for i in range(3)]
    log = [json.dumps(one).encode() for one in samples]
    columns = "observation, action, action_tokens, action_log_probs, behavior_log_prob, reward"
    _compare(lake, log, tmp_path / "log.jsonl", columns)
    assert lake.sql("SELECT num_episodes FROM log.groups")["num_episodes"].to_pylist() == [3]
    if is_numbered:  # also twice in one stream
        assert _counts(follow(lake, GivenLines([[*log, *log]]), "twice")) == (3, 0, 3)


def test_equal_samples_of_verl_are_several(lake: Lake, tmp_path: Path) -> None:
    record = {"input": "1+1?", "output": "2", "gts": "2", "score": 1.0, "step": 7, "acc": "0.5"}
    log = [json.dumps(one).encode() for one in (record, record, {**record, "step": 8})]
    _compare(lake, log, tmp_path / "log.jsonl", "observation, action, reward, group_id, train_step")
    names = sorted(row["source_episode_id"] for row in _steps(lake))
    assert [name[:6] for name in names] == ["step7/", "step7/", "step8/"]
    assert names[1] == f"{names[0]}#2"
    options = ReadOptions({"reward": "acc"})
    assert _counts(follow(lake, GivenLines([log]), "mapped", options=options)) == (3, 0, 0)
    assert {*lake.sql("SELECT reward FROM mapped.steps")["reward"].to_pylist()} == {0.5}


def test_equal_samples_of_verl_are_counted_over_steps(lake: Lake) -> None:
    """An asynchronous trainer logs samples of several training steps in turn."""
    record = {"input": "1+1?", "output": "2", "gts": "2", "score": 1.0}
    log = [{**record, "step": step} for step in (7, 7, 8, 7, 8)]
    assert _counts(_follow(lake, log)) == (5, 0, 0)
    assert sorted(row["train_step"] for row in _steps(lake)) == [7, 7, 7, 8, 8]
    again = _follow(lake, log)
    assert _counts(again) == (0, 0, 5)
    assert again.notes[-1].startswith("5 steps of samples without an id equal stored ones")


def test_outputs_of_sessions_cannot_be_followed(lake: Lake) -> None:
    record = {"input": "1+1?", "output": "2", "gts": "2", "score": 1.0, "step": 7}
    receipt = _follow(lake, [record, {**record, "uid": "a_0_0"}])
    assert _counts(receipt) == (1, 1, 0)
    assert "uid: found session 0 of 'a', whose outputs are lines each" in receipt.reasons[0].example


def test_malformed_rollouts_are_quarantined(lake: Lake) -> None:
    receipt = _follow(
        lake,
        [
            _SAMPLE,
            {**_SAMPLE, "token_loss_mask": [[1]]},
            b"{",
            {**_SAMPLE, "generation_logprobs": [[0.0, 0.0, 0.5, 0.0, 0.0, 0.0]]},
        ],
    )
    assert _counts(receipt) == (1, 3, 0)
    assert lake.sql("SELECT count(*) AS n FROM log.quarantine")["n"].to_pylist() == [3]


def test_tokens_of_steps_are_compared_as_they_are_stored(lake: Lake) -> None:
    step = {"episode_id": "a", "step": 0, "observation": "1+1?", "action": "2", "reward": 1.0}
    own = {"observation_tokens": [1, 2], "action_tokens": [3], "action_log_probs": [-0.5]}
    log = [{**step, **own, "terminated": True, "truncated": False}]
    assert _counts(_follow(lake, log)) == (1, 0, 0)
    # The stored step has their sum as its log-prob, which the line does not state.
    assert _counts(_follow(lake, log)) == (0, 0, 1)


def test_formats_that_cannot_be_followed_are_refused_by_name(lake: Lake) -> None:
    with pytest.raises(
        ConfigInvalidError,
        match="'parquet', which cannot be followed, expected one of auto, bandit, dsjson, jsonl",
    ) as caught:
        _follow(lake, format="parquet")
    assert caught.value.parameter == "format"
