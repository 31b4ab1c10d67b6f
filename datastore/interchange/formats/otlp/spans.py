"""Spans: OTLP JSON as spans, and the messages of a span that is a call of a language model.

A request or a line of a file has `resourceSpans` or `resourceLogs`. Log records that name a span
are events of it. Messages are read from the attributes and events of OpenTelemetry's semantic
conventions for generative AI, the current and earlier ones, and from those of OpenInference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.generations.json_values import dump_json
from replaylake.datastore.interchange.formats.generations.messages import Message, shorten

Kind = Literal["generation", "agent", "tool", "other"]
GENERATION: Final = "generation"
AGENT: Final = "agent"
TOOL: Final = "tool"
OTHER: Final = "other"

SPANS: Final = "resourceSpans"
LOGS: Final = "resourceLogs"
METRICS: Final = "resourceMetrics"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_RESULT: Final = "gen_ai.tool.call.result"
_TRACE_ID: Final = re.compile(r"[0-9a-fA-F]{32}")
_SPAN_ID: Final = re.compile(r"[0-9a-fA-F]{16}")
_NO_ID: Final = "0" * 16
_OPERATION: Final = "gen_ai.operation.name"
_OPERATIONS: Final[Mapping[str, Kind]] = {
    "chat": GENERATION,
    "generate_content": GENERATION,
    "text_completion": GENERATION,
    "invoke_agent": AGENT,
    "execute_tool": TOOL,
}
# Kinds of spans by OpenInference, and by OpenLLMetry.
_SPAN_KINDS: Final = ("openinference.span.kind", "traceloop.span.kind")
_KINDS: Final[Mapping[str, Kind]] = {"llm": GENERATION, "agent": AGENT, "tool": TOOL}
_REQUEST_TYPES: Final = frozenset(("chat", "completion"))
# Fields of a span's record that have a place of their own; its status is kept besides.
_SPAN_FIELDS: Final = frozenset(
    (
        "attributes",
        "endTimeUnixNano",
        "events",
        "name",
        "parentSpanId",
        "spanId",
        "startTimeUnixNano",
        "traceId",
    )
)
_CONVERSATIONS: Final = ("gen_ai.conversation.id", "session.id")
_AGENT_NAMES: Final = ("gen_ai.agent.name", "traceloop.entity.name", "agent.name")
_CALL_IDS: Final = (TOOL_CALL_ID, "tool_call.id")
_INPUT: Final = "gen_ai.input.messages"
_OUTPUT: Final = "gen_ai.output.messages"
_SYSTEM: Final = "gen_ai.system_instructions"
_DETAILS: Final = "gen_ai.client.inference.operation.details"
_EVALUATION: Final = "gen_ai.evaluation.result"
_CHOICE: Final = "gen_ai.choice"
_MESSAGE_EVENT: Final = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message")
_EVENT_CONTENT: Final = "gen_ai.event.content"
_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
# Of messages whose fields are attributes each: the list's name, and what is before a field's.
_INDEXED: Final = (
    ("gen_ai.prompt", "gen_ai.completion", ""),
    ("llm.input_messages", "llm.output_messages", "message."),
)


@dataclass(frozen=True)
class Event:
    """An event of a span, or a log record that names one. time_ns: ns since 1970."""

    name: str
    time_ns: int
    attributes: Mapping[str, Any]
    body: Any = None


@dataclass(frozen=True)
class Span:
    """A span. parent_id: None at a root. start_ns, end_ns: ns since 1970.

    attributes, resource: decoded values, by name. fields: all others of its record, and its scope.
    is_logged: it is only known from log records.
    """

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    events: Sequence[Event] = ()
    is_error: bool = False
    resource: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    is_logged: bool = False

    @property
    def kind(self) -> Kind:
        """What the span is: a call of a model, of an agent or of a tool, or something else."""
        if (operation := self.attributes.get(_OPERATION)) is not None:
            return _OPERATIONS.get(str(operation), OTHER)
        for name in _SPAN_KINDS:
            if (own := self.attributes.get(name)) is not None:
                return _KINDS.get(str(own).lower(), OTHER)
        # An attribute may be a list, which has no hash.
        request_type = str(self.attributes.get("llm.request.type"))
        if request_type in _REQUEST_TYPES or _OUTPUT in self.attributes:
            return GENERATION
        names = {event.name for event in self.events}
        return GENERATION if names & {_CHOICE, _DETAILS, "gen_ai.content.completion"} else OTHER

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation that it belongs to, if it states one."""
        return self._find_text(_CONVERSATIONS)

    @property
    def agent_name(self) -> str | None:
        """The name of the agent that it is, or that made the call."""
        names = _AGENT_NAMES if self.kind == AGENT else _AGENT_NAMES[:1]
        return self._find_text(names)

    @property
    def call_id(self) -> str | None:
        """The id of the call of a tool that it executes."""
        return self._find_text(_CALL_IDS)

    def _find_text(self, names: Sequence[str]) -> str | None:
        found = (self.attributes.get(name) for name in names)
        return next((value for value in found if isinstance(value, str) and value), None)


_ReadRecord = Callable[[Mapping[str, Any], Mapping[str, Any], Any], Span | None]


@dataclass(frozen=True)
class Call:
    """The messages of a call of a model. used: attributes that are in them.

    outputs: one for each choice. finish_reasons: one for each of them, None where unknown.
    """

    inputs: Sequence[Message]
    outputs: Sequence[Message]
    finish_reasons: Sequence[str | None]
    used: frozenset[str]


def is_request(value: Any) -> bool:
    """Whether a value is an OTLP request of spans or of log records."""
    return isinstance(value, dict) and any(isinstance(value.get(n), list) for n in (SPANS, LOGS))


def is_metrics(value: Any) -> bool:
    """Whether a value is an OTLP request of metrics alone, of which nothing becomes a step."""
    return (
        isinstance(value, dict) and isinstance(value.get(METRICS), list) and not is_request(value)
    )


def read_spans(request: Any) -> Iterator[Span | SourceInvalidError]:
    """Yield the spans of a request, and an error for each that is malformed.

    The log records of a request that name a span are yielded as spans with `is_logged`.
    """
    if not is_request(request):
        yield SourceInvalidError(f"found {shorten(request)}, expected {SPANS} or {LOGS}")
        return
    for outer, inner, records, read in (
        (SPANS, "scopeSpans", "spans", _read_span),
        (LOGS, "scopeLogs", "logRecords", _read_log_record),
    ):
        try:
            for group in _objects(request, outer):
                resource = _read_attributes(group.get("resource") or {})
                older = _objects(group, "instrumentationLibrarySpans") if outer == SPANS else []
                for scope in [*_objects(group, inner), *older]:
                    own = scope.get("scope") or scope.get("instrumentationLibrary")
                    for record in _objects(scope, records):
                        yield from _read_record(record, resource, own, read)
        except (SourceInvalidError, RecursionError) as error:
            yield SourceInvalidError(str(error))


def read_call(span: Span) -> Call:
    """Return the messages of a call of a model, from the first convention that the span follows.

    Raises: SourceInvalidError for messages of another shape.
    """
    details = next((event for event in span.events if event.name == _DETAILS), None)
    for attributes in (span.attributes, {} if details is None else details.attributes):
        if _INPUT in attributes or _OUTPUT in attributes:
            return _read_current(attributes, span)
    names = {event.name for event in span.events}
    if _CHOICE in names or any(map(_MESSAGE_EVENT.fullmatch, names)):
        return _read_message_events(span)
    if "gen_ai.content.prompt" in names or "gen_ai.content.completion" in names:
        return _read_content_events(span)
    return _read_indexed(span)


def find_scores(span: Span) -> dict[str, float | None]:
    """Return the scores of a span's evaluations by name; None for one that is no number."""
    scores: dict[str, float | None] = {}
    for event in span.events:
        name = event.attributes.get("gen_ai.evaluation.name")
        if event.name == _EVALUATION and isinstance(name, str):
            score = event.attributes.get("gen_ai.evaluation.score.value")
            is_number = isinstance(score, int | float) and not isinstance(score, bool)
            scores[name] = float(score) if is_number and score is not None else None
    return scores


def list_other_events(span: Span) -> list[dict[str, Any]]:
    """Return the events of a span that hold no message, as objects."""
    return [
        {
            "name": event.name,
            **event.attributes,
            **({} if event.body is None else {"body": event.body}),
        }
        for event in span.events
        if event.name
        not in (_DETAILS, _CHOICE, "gen_ai.content.prompt", "gen_ai.content.completion")
        and not _MESSAGE_EVENT.fullmatch(event.name)
    ]


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, dict):
        raise SourceInvalidError(f"found {shorten(value)}, expected an object with {name}")
    several = value.get(name)
    if several is None:
        return []
    if not isinstance(several, list) or not all(isinstance(one, dict) for one in several):
        raise SourceInvalidError(f"{name}: found {shorten(several)}, expected a list of objects")
    return several


def _read_record(
    record: Mapping[str, Any], resource: Mapping[str, Any], scope: Any, read: _ReadRecord
) -> Iterator[Span | SourceInvalidError]:
    try:
        span = read(record, resource, scope)
    except (SourceInvalidError, RecursionError, ValueError) as error:
        where = f"span {shorten(record.get('spanId'))} of trace {shorten(record.get('traceId'))}"
        yield SourceInvalidError(f"{where}: {error}")
    else:
        if span is not None:
            yield span


def _read_span(record: Mapping[str, Any], resource: Mapping[str, Any], scope: Any) -> Span:
    parent = record.get("parentSpanId") or None
    if parent is not None:
        parent = _read_id(parent, "parentSpanId", _SPAN_ID)
    status = record.get("status")
    code = status.get("code") if isinstance(status, dict) else None
    fields = {k: v for k, v in record.items() if k not in _SPAN_FIELDS}
    return Span(
        _read_id(record.get("traceId"), "traceId", _TRACE_ID),
        _read_id(record.get("spanId"), "spanId", _SPAN_ID),
        None if parent == _NO_ID else parent,
        record["name"] if isinstance(record.get("name"), str) else "",
        _read_time(record.get("startTimeUnixNano"), "startTimeUnixNano"),
        _read_time(record.get("endTimeUnixNano"), "endTimeUnixNano"),
        _read_attributes(record),
        [_read_event(event) for event in _objects(record, "events")],
        code in (2, "STATUS_CODE_ERROR"),
        resource,
        fields if scope is None else {**fields, "scope": scope},
    )


def _read_event(event: Mapping[str, Any]) -> Event:
    return Event(
        str(event.get("name", "")),
        _read_time(event.get("timeUnixNano"), "timeUnixNano"),
        _read_attributes(event),
    )


def _read_log_record(
    record: Mapping[str, Any], resource: Mapping[str, Any], scope: Any
) -> Span | None:
    """Return a log record as a span that has it as its event; None for one without a span."""
    if not record.get("traceId") or not record.get("spanId"):
        return None
    attributes = _read_attributes(record)
    name = record.get("eventName") or attributes.get("event.name") or ""
    if not str(name).startswith("gen_ai."):
        return None
    time = record.get("timeUnixNano") or record.get("observedTimeUnixNano")
    time_ns = _read_time(time, "timeUnixNano")
    body = record.get("body")
    event = Event(str(name), time_ns, attributes, None if body is None else _read_value(body))
    trace_id = _read_id(record["traceId"], "traceId", _TRACE_ID)
    span_id = _read_id(record["spanId"], "spanId", _SPAN_ID)
    own = attributes if name == _DETAILS else {}
    return Span(
        trace_id,
        span_id,
        None,
        "",
        time_ns,
        time_ns,
        own,
        [event],
        resource=resource,
        fields={} if scope is None else {"scope": scope},
        is_logged=True,
    )


def _read_id(value: Any, name: str, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        digits = 32 if pattern is _TRACE_ID else 16
        raise SourceInvalidError(
            f"{name}: found {shorten(value)}, expected {digits} hex digits, as OTLP JSON writes ids"
        )
    return value.lower()


def _read_time(value: Any, name: str) -> int:
    if value is None or value == "":
        return 0
    is_text = isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if (not is_text and not is_number) or not 0 <= int(value) < 2**63:
        raise SourceInvalidError(
            f"{name}: found {shorten(value)}, expected nanoseconds since 1970, in 64 bits"
        )
    return int(value)


def _read_attributes(record: Any) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise SourceInvalidError(f"resource: found {shorten(record)}, expected an object")
    pairs = _objects(record, "attributes")
    return {str(pair.get("key")): _read_value(pair.get("value")) for pair in pairs}


def _read_value(value: Any) -> Any:
    """Return the value of an AnyValue; bytes stay base64, NaN and infinity text."""
    if not isinstance(value, dict):
        if value is None:
            return None
        raise SourceInvalidError(f"found the value {shorten(value)}, expected an AnyValue")
    for name, inner in value.items():
        if name == "intValue":
            if isinstance(inner, str) and re.fullmatch(r"-?\d{1,19}", inner):
                return int(inner)
            if isinstance(inner, int):
                return inner
            raise SourceInvalidError(f"intValue: found {shorten(inner)}, expected a whole number")
        if name == "arrayValue":
            return [_read_value(one) for one in _objects(inner or {}, "values")]
        if name == "kvlistValue":
            pairs = _objects(inner or {}, "values")
            return {str(pair.get("key")): _read_value(pair.get("value")) for pair in pairs}
        if name in ("stringValue", "boolValue", "doubleValue", "bytesValue"):
            return inner
    return None


def _read_current(attributes: Mapping[str, Any], span: Span) -> Call:
    inputs: list[Message] = []
    if (system := attributes.get(_SYSTEM)) is not None:
        parsed = _parse(system, _SYSTEM)
        parts = [{"type": "text", "content": parsed}] if isinstance(parsed, str) else parsed
        inputs += _to_messages({"role": "system", "parts": parts}, _SYSTEM)
    for message in _list(attributes.get(_INPUT), _INPUT):
        inputs += _to_messages(message, _INPUT)
    outputs, reasons = [], []
    for message in _list(attributes.get(_OUTPUT), _OUTPUT):
        found = _to_messages({"role": "assistant", **message}, _OUTPUT)
        if len(found) != 1:
            raise SourceInvalidError(
                f"{_OUTPUT}: found {shorten(message)}, expected one message of the model"
            )
        reason = found[0].pop("finish_reason", None)
        outputs.append(found[0])
        reasons.append(reason if isinstance(reason, str) and reason else None)
    return _finish(span, inputs, outputs, reasons, {_INPUT, _OUTPUT, _SYSTEM})


def _read_message_events(span: Span) -> Call:
    inputs: list[Message] = []
    choices: dict[int, tuple[Message, str | None]] = {}
    for event in sorted(span.events, key=lambda event: event.time_ns):
        match = _MESSAGE_EVENT.fullmatch(event.name)
        if match is None and event.name != _CHOICE:
            continue
        content = event.body
        if content is None and _EVENT_CONTENT in event.attributes:
            content = _parse(event.attributes[_EVENT_CONTENT], _EVENT_CONTENT)
        body = content if isinstance(content, dict) else {"content": content}
        if content is None:
            body = {k: v for k, v in event.attributes.items() if not k.startswith("gen_ai.")}
        if match is not None:
            own = {"role": match[1], **body}
            if match[1] == "tool" and "id" in own:
                own["tool_call_id"] = own.pop("id")
            inputs += _to_messages(own, event.name)
            continue
        index = body.get("index", len(choices))
        message = body.get("message")
        if isinstance(message, str):
            message = _parse(message, event.name)
        if not isinstance(message, dict):
            known = ("index", "finish_reason", "message")
            own = {} if message is None else {"content": message}
            message = own or {k: v for k, v in body.items() if k not in known}
        calls = {"tool_calls": body["tool_calls"]} if "tool_calls" in body else {}
        several = _to_messages({"role": "assistant", **message, **calls}, event.name)
        if len(several) != 1:
            raise SourceInvalidError(
                f"{event.name}: found {shorten(message)}, expected one message of the model"
            )
        found = several[0]
        reason = body.get("finish_reason")
        choices[index if isinstance(index, int) else len(choices)] = (
            found,
            reason if isinstance(reason, str) else None,
        )
    ordered = [choices[index] for index in sorted(choices)]
    return _finish(
        span, inputs, [message for message, _ in ordered], [reason for _, reason in ordered], set()
    )


def _read_content_events(span: Span) -> Call:
    found: dict[str, list[Message]] = {"gen_ai.prompt": [], "gen_ai.completion": []}
    for event in span.events:
        for name, role in (("gen_ai.prompt", "user"), ("gen_ai.completion", "assistant")):
            if (value := event.attributes.get(name)) is not None:
                found[name] += _read_loose(value, name, role)
    outputs = found["gen_ai.completion"]
    return _finish(span, found["gen_ai.prompt"], outputs, [None] * len(outputs), set())


def _read_indexed(span: Span) -> Call:
    """Read messages whose fields are attributes, such as `gen_ai.prompt.0.content`."""
    for before, after, inner in _INDEXED:
        used: set[str] = set()
        both: list[list[Message]] = []
        for name, role in ((before, "user"), (after, "assistant")):
            if name in span.attributes:
                used.add(name)
                both.append(_read_loose(span.attributes[name], name, role))
                continue
            tree = _to_tree(span.attributes, f"{name}.", used)
            messages: list[Message] = []
            for own in tree if isinstance(tree, list) else []:
                fields = own.get(inner.rstrip("."), {}) if inner and isinstance(own, dict) else own
                plain = {"role": role, **(fields if isinstance(fields, dict) else {})}
                if inner and isinstance(plain.get("tool_calls"), list):
                    plain["tool_calls"] = [
                        call.get("tool_call", call) if isinstance(call, dict) else call
                        for call in plain["tool_calls"]
                    ]
                if inner and isinstance(parts := plain.pop("contents", None), list):
                    plain["content"] = [
                        part.get("message_content", part) if isinstance(part, dict) else part
                        for part in parts
                    ]
                messages += _to_messages(plain, name)
            both.append(messages)
        if any(both):
            # OpenInference repeats all messages in these.
            used |= {"input.value", "output.value"} if inner else set()
            reasons = [message.pop("finish_reason", None) for message in both[1]]
            known = [reason if isinstance(reason, str) else None for reason in reasons]
            return _finish(span, both[0], both[1], known, used)
    return Call([], [], [], frozenset())


def _finish(
    span: Span,
    inputs: Sequence[Message],
    outputs: Sequence[Message],
    reasons: Sequence[str | None],
    used: set[str],
) -> Call:
    """Return a call, whose finish reasons may also stand in an attribute of their own."""
    stated = span.attributes.get(_FINISH_REASONS)
    several = stated if isinstance(stated, list) else [span.attributes.get("llm.finish_reason")]
    known = [
        reason or (several[i] if i < len(several) and isinstance(several[i], str) else None)
        for i, reason in enumerate(reasons)
    ]
    return Call(inputs, outputs, known, frozenset(used))


def _read_loose(value: Any, name: str, role: str) -> list[Message]:
    """Return messages of a text, which may be JSON."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except ValueError:
            return [{"role": role, "content": value}]
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        value = value["messages"]
    several = value if isinstance(value, list) else [value]
    found: list[Message] = []
    for one in several:
        message = one if isinstance(one, dict) else {"content": one}
        found += _to_messages({"role": role, **message}, name)
    return found


def _to_messages(message: Any, name: str) -> list[Message]:
    """Return a message in the form of OpenAI's chat completions; results of tools one by one.

    Parts of the current convention become content, calls and reasoning; others stay parts.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise SourceInvalidError(
            f"{name}: found {shorten(message)}, expected a message with a role"
        )
    own: Message = {k: v for k, v in message.items() if k != "parts" and v is not None}
    own.setdefault("content", None)
    if isinstance(own.get("tool_calls"), list):
        own["tool_calls"] = [_to_call(call) for call in own["tool_calls"]]
    if "parts" not in message:
        return [own]
    parts = message["parts"]
    if not isinstance(parts, list):
        raise SourceInvalidError(f"{name}: found the parts {shorten(parts)}, expected a list")
    content: list[Any] = []
    calls: list[Any] = []
    results: list[Message] = []
    reasoning: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("content"), str):
            content.append({"type": "text", "text": part["content"]})
        elif kind == "tool_call":
            calls.append(_to_call(part))
        elif kind == "tool_call_response":
            result = part.get("response", part.get("result"))
            text = result if isinstance(result, str) else dump_json(result)
            results.append({"role": "tool", "tool_call_id": part.get("id"), "content": text})
        elif kind == "reasoning" and isinstance(part.get("content"), str):
            reasoning.append(part["content"])
        else:
            content.append(part)
    if content:
        (first, *more) = content
        is_text = not more and isinstance(first, dict) and {*first} == {"type", "text"}
        own["content"] = first["text"] if is_text else content
    if calls:
        own["tool_calls"] = calls
    if reasoning:
        own["reasoning_content"] = "\n".join(reasoning)
    is_only_results = results and not (content or calls or reasoning)
    return results if is_only_results else [own, *results]


def _to_call(call: Any) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise SourceInvalidError(f"tool_calls: found {shorten(call)}, expected objects")
    inner = call["function"] if isinstance(call.get("function"), dict) else call
    arguments = inner.get("arguments")
    text = (
        arguments
        if isinstance(arguments, str)
        else dump_json({} if arguments is None else arguments)
    )
    function = {"name": inner.get("name"), "arguments": text}
    return {"id": call.get("id"), "type": "function", "function": function}


def _parse(value: Any, name: str) -> Any:
    """Return a value that may be JSON text. Raises: SourceInvalidError for a text that is none."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        if name in (_SYSTEM, _EVENT_CONTENT, _CHOICE):
            return value
        raise SourceInvalidError(f"{name}: found {shorten(value)}, expected JSON") from None


def _list(value: Any, name: str) -> list[Any]:
    if value is None:
        return []
    several = _parse(value, name)
    if not isinstance(several, list) or not all(isinstance(one, dict) for one in several):
        raise SourceInvalidError(f"{name}: found {shorten(value)}, expected a list of messages")
    return several


def _to_tree(attributes: Mapping[str, Any], prefix: str, used: set[str]) -> Any:
    """Return attributes with dotted names as objects; those with numbers for names as lists."""
    root: dict[str, Any] = {}
    for name, value in attributes.items():
        if not name.startswith(prefix):
            continue
        used.add(name)
        at = root
        *path, last = name.removeprefix(prefix).split(".")
        for part in path:
            following = at.setdefault(part, {})
            at = following if isinstance(following, dict) else at.setdefault(f"{part}.", {})
        at[last] = value
    return _to_lists(root)


def _to_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(part.isascii() and part.isdecimal() and len(part) < 10 for part in value):
        return [_to_lists(value[part]) for part in sorted(value, key=int)]
    return {part: _to_lists(inner) for part, inner in value.items()}
