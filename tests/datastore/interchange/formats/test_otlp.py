"""OTLP: spans of a trace or a conversation become an episode, each call of a model a step."""

from __future__ import annotations

import json
import random
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.errors import ReplayLakeError, SourceInvalidError
from replaylake.datastore.interchange.export.export import export
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.generations.rows import MappedPaths
from replaylake.datastore.interchange.formats.otlp.otlp import OtlpFormat
from replaylake.datastore.interchange.formats.otlp.sessions import (
    SessionCounts,
    make_header,
    make_rows,
)
from replaylake.datastore.interchange.formats.otlp.spans import Span, read_spans
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.receipt import IngestReceipt
from replaylake.datastore.interchange.sources.source import find_source
from replaylake.datastore.lake.lake import Lake, open_lake

FIXTURES = Path(__file__).parents[3] / "fixtures" / "otlp"
_TRACE = "5b8efff798038103d269b633813fc60c"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _rows(lake: Lake, name: str = "talks") -> list[dict[str, Any]]:
    return lake.sql(f"SELECT * FROM {name}.steps ORDER BY episode_id, env_step").to_pylist()


def _any(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_any(one) for one in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": _pairs(value)}}
    return {"stringValue": value}


def _pairs(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _any(value)} for name, value in values.items()]


def _span(number: int, parent: int | None = None, **fields: Any) -> dict[str, Any]:
    """Return a span's record; it begins `number` milliseconds after the epoch of these tests."""
    start = 1_700_000_000_000_000_000 + number * 1_000_000
    return {
        "traceId": fields.pop("trace", _TRACE),
        "spanId": f"{number + 1:016x}",
        **({} if parent is None else {"parentSpanId": f"{parent + 1:016x}"}),
        "name": "span",
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(start + 500_000),
        "attributes": _pairs(fields.pop("attributes", {})),
        **fields,
    }


def _text(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _chat(
    number: int, asked: list[Any], *answers: Any, parent: int | None = None, **more: Any
) -> dict[str, Any]:
    own = [_text("assistant", one) if isinstance(one, str) else one for one in answers]
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": json.dumps(asked),
        **({"gen_ai.output.messages": json.dumps(own)} if own else {}),
        **more,
    }
    return _span(number, parent, attributes=attributes)


def _agent(number: int, name: str, parent: int | None = None) -> dict[str, Any]:
    own = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
    return _span(number, parent, attributes=own)


def _request(*spans: Any, **logs: Any) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": [*spans]}]}], **logs}


def _ingest(lake: Lake, folder: Path, *spans: Any, name: str = "talks", **options: Any) -> Any:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(_request(*spans), indent=1))
    return ingest(lake, [file], name, options=ReadOptions(**options))


def test_agents_by_the_parents_of_their_spans(lake: Lake) -> None:
    receipt = ingest(lake, [FIXTURES / "agents.jsonl"], "talks")
    assert (receipt.format, receipt.episodes.committed) == ("otlp", 2)  # one for each agent
    assert receipt.notes == ("1 traces have no call of a model: left out",)
    rows = _rows(lake)
    names = ("agent_id", "step", "observation", "action", "parent_agent_id", "parent_step")
    assert [tuple(row[name] for name in names) for row in rows] == [
        (
            "planner",
            0,
            "system: Plan.\nuser: What is 6 * 7?",
            'I ask.\nask({"task":"6 * 7"})',
            None,
            None,
        ),
        ("solver", 0, "user: 6 * 7", "42", "planner", 0),
        ("planner", 1, "tool: 42", "It is 42.", None, None),
        ("planner", 2, "user: And 6 * 8?", 'ask({"task":"6 * 8"})', None, None),
    ]
    assert {row["source_episode_id"] for row in rows} == {"talk-1"}
    assert [row["is_continuation"] for row in rows] == [None, False, None, None]
    assert rows[3]["final_observation"] == "tool: 48"
    assert [row["finish_reason"] for row in rows] == ["tool_call", "stop", "stop", "tool_call"]
    assert json.loads(rows[0]["sampling"]) == {"model": "m", "temperature": 0.5}
    assert rows[0]["policy"] == "m-2"
    metadata = json.loads(rows[0]["metadata"])
    assert metadata["resource"]["service.name"] == "shop"
    assert metadata["attributes"]["gen_ai.usage.input_tokens"] == 10
    assert metadata["scope"]["name"] == "opentelemetry.util.genai.handler"
    assert not any(row["terminated"] for row in rows)


@pytest.mark.parametrize("name", ["events", "older", "openinference"])
def test_other_conventions_give_the_same_dialogue(lake: Lake, name: str) -> None:
    receipt = ingest(lake, [FIXTURES / f"{name}.jsonl"], "talks")
    assert (receipt.format, receipt.episodes.committed, receipt.notes) == ("otlp", 1, ())
    rows = _rows(lake)
    assert [row["observation"] for row in rows] == ["system: Sell.\nuser: A hat?", "tool: 12"]
    assert [row["action"].replace(" ", "") for row in rows] == ['price({"item":"hat"})', "12euros."]
    calls = json.loads(rows[0]["tool_calls"])
    assert calls[0]["id"] == json.loads(rows[1]["prompt_messages"])[0]["tool_call_id"] == "c1"
    reasons = [row["finish_reason"].rstrip("s") for row in rows]
    assert reasons == ["tool_call", "stop"]


def test_spans_in_any_order_and_in_several_files(lake: Lake, tmp_path: Path) -> None:
    ingest(lake, [FIXTURES / "agents.jsonl"], "talks")
    lines = (FIXTURES / "agents.jsonl").read_text().splitlines()
    random.Random(3).shuffle(lines)
    for number, part in enumerate((lines[:4], lines[4:])):
        (tmp_path / f"{number}.jsonl").write_text("\n".join(part))
    ingest(lake, [tmp_path / "0.jsonl", tmp_path / "1.jsonl"], "again")
    first, second = (
        [{k: v for k, v in row.items() if k != "episode_id"} for row in _rows(lake, name)]
        for name in ("talks", "again")
    )
    assert first == second


def test_messages_in_structured_form(lake: Lake, tmp_path: Path) -> None:
    asked = [{"role": "user", "parts": [{"type": "text", "content": "Hi"}]}]
    image = {"type": "uri", "modality": "image", "uri": "https://x/y.png", "mime_type": "image/png"}
    answer = {
        "role": "assistant",
        "parts": [
            {"type": "reasoning", "content": "Hm."},
            {"type": "text", "content": "Ho"},
            image,
        ],
        "finish_reason": "stop",
    }
    own = {
        "gen_ai.operation.name": "chat",
        "gen_ai.system_instructions": [{"type": "text", "content": "Be kind."}],
        "gen_ai.input.messages": asked,
        "gen_ai.output.messages": [answer],
        "gen_ai.tool.definitions": [{"type": "function", "name": "f"}],
    }
    _ingest(lake, tmp_path, _span(1, attributes=own))
    (row,) = _rows(lake)
    assert row["observation"] == "system: Be kind.\nuser: Hi"
    (message,) = json.loads(row["completion_messages"])
    assert message["reasoning_content"] == "Hm."
    assert message["content"] == [{"type": "text", "text": "Ho"}, image]
    metadata = json.loads(row["metadata"])
    assert metadata["gen_ai.tool.definitions"] == [{"type": "function", "name": "f"}]


@pytest.mark.parametrize(
    "attributes",
    [
        {
            "llm.request.type": "chat",
            "gen_ai.prompt.0.role": "user",
            "gen_ai.prompt.0.content": "Hi",
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.content": "Ho",
            "gen_ai.completion.0.finish_reason": "stop",
            "gen_ai.completion.0.tool_calls.0.name": "f",
            "gen_ai.completion.0.tool_calls.0.arguments": "{}",
        },
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.prompt": '[{"role": "user", "content": "Hi"}]',
            "gen_ai.completion": '[{"content": "Ho", "tool_calls": [{"name": "f"}]}]',
            "gen_ai.response.finish_reasons": ["stop"],
        },
    ],
)
def test_attributes_of_earlier_conventions(
    lake: Lake, tmp_path: Path, attributes: dict[str, Any]
) -> None:
    _ingest(lake, tmp_path, _span(1, attributes=attributes))
    (row,) = _rows(lake)
    found = (row["observation"], row["action"], row["finish_reason"])
    assert found == ("user: Hi", "Ho\nf({})", "stop")
    assert not any("prompt" in name for name in json.loads(row["metadata"])["attributes"])


def test_events_of_a_span_with_messages(lake: Lake, tmp_path: Path) -> None:
    contents = [
        {"name": "gen_ai.content.prompt", "attributes": _pairs({"gen_ai.prompt": "Hi"})},
        {"name": "gen_ai.content.completion", "attributes": _pairs({"gen_ai.completion": "Ho"})},
    ]
    choice = {"index": 0, "finish_reason": "stop", "message": {"content": "Ho"}}
    several = [
        {
            "name": "gen_ai.user.message",
            "attributes": _pairs({"gen_ai.event.content": '{"content": "Hi"}'}),
        },
        {
            "name": "gen_ai.choice",
            "attributes": _pairs({"gen_ai.event.content": json.dumps(choice)}),
        },
        {"name": "exception", "attributes": _pairs({"exception.type": "E"})},
    ]
    other = "0" * 31 + "1"
    _ingest(lake, tmp_path, _span(1, events=contents), _span(2, events=several, trace=other))
    rows = _rows(lake)
    assert [(row["observation"], row["action"]) for row in rows] == [("user: Hi", "Ho")] * 2
    kept = [json.loads(row["metadata"]).get("events") for row in rows]
    assert [{"name": "exception", "exception.type": "E"}] in kept


def test_answers_and_histories_that_fork(lake: Lake, tmp_path: Path) -> None:
    asked = [_text("user", "Hi")]
    later = [*asked, _text("assistant", "a"), _text("user", "more")]
    _ingest(
        lake,
        tmp_path,
        _chat(1, asked, "a", "b"),  # two choices
        _chat(2, later, "c"),
        _chat(3, later, "d"),  # another answer to the same prompt
        _chat(4, asked, "e"),
        _chat(5, [_text("user", "Summary")], "f"),  # a history that was rewritten
    )
    rows = _rows(lake)
    names = ("agent_id", "step", "observation", "action", "parent_agent_id", "parent_step")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("", 0, "user: Hi", "a", None, None),
        ("~1", 0, "user: Hi", "b", None, None),
        ("", 1, "user: more", "c", None, None),
        ("~2", 0, "user: more", "d", "", 0),
        ("~3", 0, "user: Hi", "e", None, None),
        ("~2", 1, "user: Summary", "f", None, None),
    ]
    assert [row["is_continuation"] for row in rows] == [None, None, None, None, None, False]


def test_calls_without_answer_or_content_and_wrappers(lake: Lake, tmp_path: Path) -> None:
    asked = [_text("user", "Hi")]
    bare = _span(2, attributes={"gen_ai.operation.name": "chat"})
    receipt = _ingest(
        lake,
        tmp_path,
        _chat(1, asked, parent=99),
        bare,
        _chat(3, asked, "a"),
        _span(4, 3),
        _chat(5, asked, "a", parent=4),
        _chat(5, asked, "a", parent=4),
    )
    assert [row["action"] for row in _rows(lake)] == ["a"]
    assert receipt.notes == (
        "1 calls of models have no messages: left out. "
        "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT captures them",
        "1 calls of models have no answer: left out",
        "1 calls contain the same call by another library: left out",
        "1 spans occur more than once: the first one is read",
    )


def test_rewards_of_evaluations_and_attributes(lake: Lake, tmp_path: Path) -> None:
    evaluation = {
        "name": "gen_ai.evaluation.result",
        "attributes": _pairs(
            {"gen_ai.evaluation.name": "correct", "gen_ai.evaluation.score.value": 0.75}
        ),
    }
    asked = [_text("user", "Hi")]
    later = [*asked, _text("assistant", "a"), _text("user", "more")]
    spans = [
        _span(0, attributes={"app.task": "t1", "app.version": 3}),
        {**_chat(1, asked, "a", parent=0, **{"app.reward": 0.5}), "events": [evaluation]},
        _chat(2, later, "b", parent=0),
    ]
    _ingest(lake, tmp_path, *spans)
    rows = _rows(lake)
    assert [row["reward"] for row in rows] == [None, None]
    components = [{"name": "correct", "score": 0.75, "weight": None}]
    assert rows[0]["reward_components"] == components
    mapping = {"reward": "evaluation.correct", "group_id": "app.task", "age": "app.version"}
    _ingest(lake, tmp_path, *spans, name="judged", mapping=mapping)
    found = [
        tuple(row[name] for name in ("reward", "terminated", "group_id", "age"))
        for row in _rows(lake, "judged")
    ]
    assert found == [(0.0, False, "t1", 3), (0.75, True, "t1", 3)]
    _ingest(lake, tmp_path, *spans, name="each", mapping={"reward": "span.app.reward"})
    assert [row["reward"] for row in _rows(lake, "each")] == [0.5, 0.0]


def test_an_outer_call_is_read_where_the_inner_one_has_no_answer(
    lake: Lake, tmp_path: Path
) -> None:
    asked, other = [_text("user", "Hi")], [_text("user", "More")]
    bare = {"gen_ai.operation.name": "chat"}
    receipt = _ingest(
        lake,
        tmp_path,
        _chat(1, asked, "a"),
        _span(2, 1, attributes=bare),
        _chat(3, other, "b"),
        _span(4, 3, attributes=bare),
        _chat(5, other, "b", parent=4),
    )
    assert [row["action"] for row in _rows(lake)] == ["a", "b"]
    assert "2 calls contain the same call by another library: left out" in receipt.notes


def test_calls_within_many_calls_take_linear_time() -> None:
    """Each call is within all those before it, so only the innermost one is read."""
    num = 6_000
    found = [*read_spans(_request(*(_chat(n, [], "a", parent=n - 1) for n in range(num))))]
    spans = [one for one in found if isinstance(one, Span)]
    headers = [make_header(span, place) for place, span in enumerate(spans)]
    counts = SessionCounts()
    paths = MappedPaths(ReadOptions())
    began_s = time.thread_time()
    (row,) = make_rows(headers, lambda header: spans[header.place], paths, counts)
    assert json.loads(row["metadata"])["span_id"] == f"{num:016x}"
    assert counts.num_wrappers == num - 1
    # 0.5 s; 9 s where each span's ancestors are walked to the root.
    assert time.thread_time() - began_s < 5


def test_outcomes_of_roots_and_of_any_span(lake: Lake, tmp_path: Path) -> None:
    """An entry span has a remote parent; log records are no root; any span may be judged."""
    judged = {
        "name": "gen_ai.evaluation.result",
        "attributes": _pairs({"gen_ai.evaluation.name": "q", "gen_ai.evaluation.score.value": 0.5}),
    }
    error = {"code": 2}
    entry = _span(0, 98, attributes={"app.reward": 1.0}, status=error, events=[judged])
    record = {
        "traceId": _TRACE,
        "spanId": f"{77:016x}",
        "timeUnixNano": str(1_800_000_000_000_000_000),
        "eventName": "gen_ai.user.message",
        "body": _any({"content": "x"}),
    }
    logs = [{"scopeLogs": [{"logRecords": [record]}]}]
    request = _request(entry, _chat(1, [_text("user", "Hi")], "Ho", parent=0), resourceLogs=logs)
    file = tmp_path / "log.json"
    file.write_text(json.dumps(request))
    for name, mapping, expected in (
        ("open", {}, (None, False, True)),
        ("app", {"reward": "app.reward"}, (1.0, True, False)),
        ("score", {"reward": "evaluation.q"}, (0.5, True, False)),
    ):
        ingest(lake, [file], name, options=ReadOptions(mapping))
        (row,) = _rows(lake, name)
        assert (row["reward"], row["terminated"], row["truncated"]) == expected


def test_an_error_of_the_root_is_a_truncation(lake: Lake, tmp_path: Path) -> None:
    root = {**_agent(0, "a"), "status": {"code": 2, "message": "out of turns"}}
    _ingest(lake, tmp_path, root, _chat(1, [_text("user", "Hi")], "Ho", parent=0))
    (row,) = _rows(lake)
    assert (row["agent_id"], row["terminated"], row["truncated"]) == ("a", False, True)


def test_rows_of_spans_in_memory() -> None:
    asked = [_text("user", "Hi")]
    later = [*asked, _text("assistant", "a"), _text("user", "more")]
    request = _request(_chat(2, later, "b"), _chat(1, asked, "a"))
    spans = [one for one in read_spans(request) if isinstance(one, Span)]
    headers = [make_header(span, place) for place, span in enumerate(spans)]
    rows = make_rows(
        headers, lambda header: spans[header.place], MappedPaths(ReadOptions()), SessionCounts()
    )
    assert [(row["step"], row["completion_text"]) for row in rows] == [(0, "a"), (1, "b")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"traceId": "W47/95gDgQPSabYzgT/GDA=="},
            "traceId: found 'W47/95g.*expected 32 hex digits",
        ),
        ({"spanId": None}, "spanId: found None, expected 16 hex digits"),
        ({"parentSpanId": 7}, "parentSpanId: found 7, expected 16 hex"),
        ({"startTimeUnixNano": "1e9"}, "startTimeUnixNano: found '1e9', expected nanoseconds"),
        ({"startTimeUnixNano": 2**63}, "startTimeUnixNano: found 9.*in 64 bits"),
        ({"attributes": [{"key": "a", "value": {"intValue": "x"}}]}, "intValue: found 'x'"),
        ({"attributes": [{"key": "a", "value": 3}]}, "found the value 3, expected an AnyValue"),
        ({"attributes": 3}, "attributes: found 3, expected a list of objects"),
        (
            {"attributes": [{"key": "a", "value": {"kvlistValue": [1]}}]},
            r"found \[1\], expected an object with values",
        ),
        ({"parentSpanId": f"{3:016x}"}, "found a cycle in parentSpanId, expected a root"),
        (
            {"attributes": _pairs({"gen_ai.output.messages": "not JSON"})},
            "span 0000000000000003 of trace .*gen_ai.output.messages: found 'not JSON', expected",
        ),
        (
            {"attributes": _pairs({"gen_ai.output.messages": '[{"parts": 3}]'})},
            "gen_ai.output.messages: found the parts 3, expected a list",
        ),
        (
            {
                "attributes": _pairs(
                    {"gen_ai.input.messages": "[3]", "gen_ai.output.messages": "[]"}
                )
            },
            r"gen_ai.input.messages: found '\[3\]', expected a list of messages",
        ),
    ],
)
def test_malformed_spans_are_quarantined(
    lake: Lake, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    good = _chat(1, [_text("user", "Hi")], "Ho")
    damaged = {**_chat(2, [_text("user", "Hi")], "Ho"), "traceId": "0" * 31 + "2", **change}
    lines = [json.dumps(_request(one)) for one in (good, damaged)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    receipt: IngestReceipt = ingest(lake, [tmp_path / "log.jsonl"], "talks")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 1)
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert re.search(rf"log\.jsonl line 2: .*{message}", check.example), check.example


def test_lines_that_are_no_requests(lake: Lake, tmp_path: Path) -> None:
    line = json.dumps(_request(_chat(1, [_text("user", "Hi")], "Ho")))
    (tmp_path / "log.jsonl").write_text(f'{line}\n{{"resourceOther": []}}\n{{"resourceSpans"')
    receipt = ingest(lake, [tmp_path / "log.jsonl"], "talks")
    assert (receipt.episodes.committed, receipt.episodes.rejected) == (1, 2)
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert "expected resourceSpans or resourceLogs" in check.example


def test_metrics_are_left_out(lake: Lake, tmp_path: Path) -> None:
    """The Collector writes all signals to one file; the first line may be metrics."""
    line = json.dumps(_request(_chat(1, [_text("user", "Hi")], "Ho")))
    (tmp_path / "log.jsonl").write_text(f'{{"resourceMetrics": []}}\n{line}\n')
    receipt = ingest(lake, [tmp_path / "log.jsonl"], "talks")
    assert (receipt.format, receipt.episodes.committed) == ("otlp", 1)
    assert receipt.notes == ("1 requests hold metrics: left out",)


def test_a_large_request_is_recognized(tmp_path: Path) -> None:
    file = tmp_path / "log.json"
    file.write_text(json.dumps(_request(_chat(1, [_text("user", "x" * (9 << 20))], "Ho"))))
    assert OtlpFormat().recognizes(find_source([file]).files)


def test_log_records_that_come_twice_are_read_once(lake: Lake, tmp_path: Path) -> None:
    def record(name: str, body: dict[str, Any], time: int) -> dict[str, Any]:
        own = {"traceId": _TRACE, "spanId": f"{2:016x}", "timeUnixNano": str(time)}
        return {**own, "eventName": name, "body": _any(body)}

    said = [
        record("gen_ai.user.message", {"content": "Hi"}, 10),
        record("gen_ai.user.message", {"content": "Hi"}, 11),
        record("gen_ai.choice", {"index": 0, "message": {"content": "Ho"}}, 20),
    ]
    span = _span(1, attributes={"gen_ai.operation.name": "chat"})
    line = json.dumps(_request(span, resourceLogs=[{"scopeLogs": [{"logRecords": said}]}]))
    (tmp_path / "log.jsonl").write_text(f"{line}\n{line}\n")
    receipt = ingest(lake, [tmp_path / "log.jsonl"], "talks")
    assert [row["observation"] for row in _rows(lake)] == ["user: Hi\nuser: Hi"]
    assert "3 log records occur more than once: the first one is read" in receipt.notes


def _calling(call_id: str) -> dict[str, Any]:
    call = {"type": "tool_call", "id": call_id, "name": "ask", "arguments": {"q": 1}}
    return {"role": "assistant", "parts": [call]}


def _tool(number: int, call_id: str, parent: int | None = None, result: str = "4") -> Any:
    own = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.call.id": call_id}
    return _span(number, parent, attributes={**own, "gen_ai.tool.call.result": result})


def _answered(call_id: str, result: str = "4") -> dict[str, Any]:
    part = {"type": "tool_call_response", "id": call_id, "response": result}
    return {"role": "tool", "parts": [part]}


def test_sub_agents_with_the_same_prompt_have_their_own_callers(lake: Lake, tmp_path: Path) -> None:
    asked, task = [_text("user", "Hi")], [_text("user", "task")]
    later = [*asked, _calling("t1"), _answered("t1")]
    _ingest(
        lake,
        tmp_path,
        _agent(0, "main"),
        _chat(1, asked, _calling("t1"), parent=0),
        _tool(2, "t1", 0),
        _agent(3, "sub", 2),
        _chat(4, task, "4", parent=3),
        _chat(5, later, _calling("t2"), parent=0),
        _tool(6, "t2", 0),
        _agent(7, "sub", 6),
        _chat(8, task, "4", parent=7),
    )
    found = [(r["agent_id"], r["parent_agent_id"], r["parent_step"]) for r in _rows(lake)]
    assert found == [
        ("main", None, None),
        ("sub", "main", 0),
        ("main", None, None),
        ("sub~1", "main", 1),
    ]


def test_a_prompt_that_is_repeated_in_a_later_trace_continues(lake: Lake, tmp_path: Path) -> None:
    asked = [_text("user", "Hi")]
    spans = [_chat(n, asked, f"a{n}", **{"gen_ai.conversation.id": "c"}) for n in (1, 2)]
    _ingest(lake, tmp_path, spans[0], {**spans[1], "traceId": f"{2:032x}"})
    found = [(r["agent_id"], r["step"], r["is_continuation"]) for r in _rows(lake)]
    assert found == [("", 0, None), ("", 1, False)]


def test_results_from_before_a_call_are_not_its_own(lake: Lake, tmp_path: Path) -> None:
    """Some servers number the calls of each turn anew."""
    asked = [_text("user", "Hi")]
    later = [*asked, _calling("call_0"), _answered("call_0", "first")]
    spans = [
        _chat(1, asked, _calling("call_0")),
        _tool(2, "call_0", result="first"),
        _chat(3, later, _calling("call_0")),
    ]
    _ingest(lake, tmp_path, *spans)
    assert [row["final_observation"] for row in _rows(lake)] == [None, None]
    _ingest(lake, tmp_path, *spans, _tool(4, "call_0", result="second"), name="executed")
    assert _rows(lake, "executed")[1]["final_observation"] == "tool: second"


def test_a_choice_of_several_messages_is_malformed(lake: Lake, tmp_path: Path) -> None:
    parts = [
        {"type": "text", "content": "x"},
        {"type": "tool_call_response", "id": "1", "response": "r"},
    ]
    content = json.dumps({"index": 0, "message": {"parts": parts}})
    choice = {"name": "gen_ai.choice", "attributes": _pairs({"gen_ai.event.content": content})}
    other = {**_chat(2, [_text("user", "Hi")], "Ho"), "traceId": f"{2:032x}"}
    receipt = _ingest(lake, tmp_path, _span(1, events=[choice]), other)
    (check,) = [one for one in receipt.checks if one.outcome == "rejected"]
    assert "gen_ai.choice: found" in check.example
    assert "expected one message of the model" in check.example


def test_odd_parts_and_ids_are_retained(lake: Lake, tmp_path: Path) -> None:
    parts = [{"type": "text"}, {"type": "tool_call", "id": {"a": 1}, "name": "f"}]
    _ingest(lake, tmp_path, _chat(1, [_text("user", "Hi")], {"parts": parts}))
    (message,) = json.loads(_rows(lake)[0]["completion_messages"])
    assert message["content"] == [{"type": "text"}]
    assert message["tool_calls"][0]["id"] == {"a": 1}


@pytest.mark.parametrize("value", [True, 2**62, 0.5, ["chat"], {"a": ["b"]}, "x", ""])
def test_attributes_of_any_type(lake: Lake, tmp_path: Path, value: Any) -> None:
    """Attributes of another type than the conventions' neither raise nor hide other sessions."""
    names = (
        "llm.request.type",
        "gen_ai.operation.name",
        "openinference.span.kind",
        "traceloop.span.kind",
        "gen_ai.agent.name",
        "gen_ai.conversation.id",
        "session.id",
        "gen_ai.tool.call.id",
        "gen_ai.tool.call.result",
        "gen_ai.tool.definitions",
        "gen_ai.request.model",
        "gen_ai.response.finish_reasons",
        "llm.finish_reason",
    )
    asked = [_text("user", "Hi")]
    spans = [_chat(0, asked, "good")]
    for number, name in enumerate(names, 1):
        trace = f"{number:032x}"
        # Alone: the conventions read an operation before all others.
        spans.append({**_span(2 * number, attributes={name: value}), "traceId": trace})
        own = _chat(2 * number + 1, asked, "other", **{name: value})
        spans.append({**own, "traceId": trace})
    _ingest(lake, tmp_path, *spans)
    said = [row["action"] for row in _rows(lake)]
    assert said.count("good") == 1
    assert said.count("other") >= len(names) - 3  # some say that the span is no call of a model


def test_a_source_without_content_is_refused(lake: Lake, tmp_path: Path) -> None:
    reason = "found no rows, .*1 calls of models have no messages: left out. .*CAPTURE_MESSAGE"
    with pytest.raises(SourceInvalidError, match=reason):
        _ingest(lake, tmp_path, _span(2, attributes={"gen_ai.operation.name": "chat"}))
    assert not lake.dataset("talks").exists()


@pytest.mark.slow
def test_flipped_bytes_and_files_that_are_cut_off(lake: Lake, tmp_path: Path) -> None:
    whole = (FIXTURES / "agents.jsonl").read_bytes()
    rng = np.random.default_rng(31)
    for number in range(12):
        damaged = bytearray(whole if number else whole[: len(whole) // 2])
        for place in rng.integers(len(damaged), size=3):
            damaged[place] ^= 1 << int(rng.integers(8))
        (tmp_path / f"{number}.jsonl").write_bytes(damaged)
        with suppress(ReplayLakeError):
            ingest(lake, [tmp_path / f"{number}.jsonl"], f"talks{number}", format="otlp")


def test_answers_to_one_prompt_are_no_dialogue_in_exports(lake: Lake, tmp_path: Path) -> None:
    _ingest(lake, tmp_path, _chat(1, [_text("user", "Hi")], "a", "b"))
    with pytest.raises(ReplayLakeError, match="their generations fork"):
        export(lake, "talks", tmp_path / "out.jsonl", format="openai")
