"""Sessions: the spans of a trace, or of the traces of one conversation, as rows of an episode.

Each call of a model is a row. Its prompt repeats the history of its agent, by which the calls of an
agent are found; the agent that called another is found by the parents of their spans.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from replaylake.datastore.episodes import tokens
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.generations.json_values import (
    dump_json,
    dump_metadata,
)
from replaylake.datastore.interchange.formats.generations.messages import (
    NONE,
    Message,
    clean_text,
    derive_group,
    find_calls,
    format_messages,
    parse_call,
)
from replaylake.datastore.interchange.formats.generations.rows import (
    FINAL_MESSAGES,
    REWARD_COMPONENTS,
    MappedPaths,
    Row,
    describe_generation,
)
from replaylake.datastore.interchange.formats.otlp.spans import (
    AGENT,
    GENERATION,
    OTHER,
    TOOL,
    TOOL_RESULT,
    Call,
    Kind,
    Span,
    find_scores,
    list_other_events,
    read_call,
)

_SPAN_PATH: Final = "span"
_EVALUATION_PATH: Final = "evaluation"
_TOOLS: Final = "gen_ai.tool.definitions"
_SAMPLING: Final = "gen_ai.request."
_MODELS: Final = (
    "gen_ai.response.model",
    "gen_ai.request.model",
    "llm.model_name",
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class SpanHeader(NamedTuple):
    """What has to be known of all spans of a session at once. place: for whoever loads the span."""

    trace_id: str
    span_id: str
    parent_id: str | None
    start_ns: int
    kind: Kind
    agent_name: str | None
    call_id: str | None
    has_scores: bool
    place: int


@dataclass
class SessionCounts:
    """Counts for notes on what has no row."""

    num_without_content: int = 0
    num_without_answer: int = 0
    num_wrappers: int = 0
    num_without_parent: int = 0


def make_header(span: Span, place: int) -> SpanHeader:
    """Return the header of a span."""
    return SpanHeader(
        span.trace_id,
        span.span_id,
        span.parent_id,
        span.start_ns,
        span.kind,
        span.agent_name,
        span.call_id,
        bool(find_scores(span)),
        place,
    )


def make_rows(
    headers: Iterable[SpanHeader],
    load: Callable[[SpanHeader], Span],
    paths: MappedPaths,
    counts: SessionCounts,
) -> list[Row]:
    """Return the rows of a session, without their episode_id, each agent's in order.

    headers: of all its spans, in any order. load: returns the span of a header. Cost: the hash of
    all messages, also of those that prompts repeat; memory holds each message once.

    Raises: SourceInvalidError for spans whose messages are malformed, or that are their own
    ancestors; RecursionError, ValueError.
    """
    return _Session(headers, load, paths, counts).read()


_Scope = tuple[str, str]


@dataclass
class _Agent:
    """The calls of an agent that were read so far.

    prompt: the hash of its first prompt. parent: the call that its first one follows. scope: the
    span of the agent that its first call is within. last_start_ns: when its last call began.
    """

    agent_id: str
    prompt: bytes
    parent: tuple[str, int] | None
    trace_id: str
    scope: _Scope
    rows: list[Row] = field(default_factory=list)
    last_start_ns: int = 0
    last: Message = field(default_factory=dict)
    tools: Any = None


class _Session:
    """Reads the calls of a session, in the order in which they began."""

    def __init__(
        self,
        headers: Iterable[SpanHeader],
        load: Callable[[SpanHeader], Span],
        paths: MappedPaths,
        counts: SessionCounts,
    ) -> None:
        self._headers = sorted(headers, key=lambda one: (one.start_ns, one.trace_id, one.span_id))
        self._load = load
        self._paths = paths
        self._counts = counts
        self._spans = {(one.trace_id, one.span_id): one for one in self._headers}
        self._agents: dict[str, _Agent] = {}
        # By an agent's name and the hash of a context: whose context it is, after which step.
        self._contexts: dict[tuple[str, bytes], tuple[_Agent, int]] = {}
        self._by_scope: dict[_Scope, _Agent] = {}
        # By kind: the span of that kind that a span is within.
        self._outer: dict[Kind, dict[SpanHeader, SpanHeader | None]] = {}
        self._callers: dict[str, tuple[str, int]] = {}
        self._scores: dict[str, float | None] = {}
        self._mapped: Row = {}
        self._group: tuple[str | None, str] = (None, NONE)
        self._num_ticks = 0

    def read(self) -> list[Row]:
        wrappers = self._find_wrappers()
        ended_by_error = False
        for header in self._headers:
            # The parent may be a span of another service, which the source does not contain.
            if (header.trace_id, header.parent_id) not in self._spans:
                root = self._load(header)
                if not root.is_logged:  # log records state neither a parent nor a status
                    ended_by_error = root.is_error
                attributes = {**root.resource, **root.attributes}
                self._mapped |= self._paths.find({"": attributes, _SPAN_PATH: {}})
            if header.has_scores:
                self._scores |= find_scores(self._load(header))
            if header.kind == GENERATION and header not in wrappers:
                self._read_generation(header)
        self._add_tool_results()
        agents = [agent for agent in self._agents.values() if agent.rows]
        if not agents:
            return []
        if self._scores:
            self._mapped |= self._paths.find({"": {}, _EVALUATION_PATH: self._scores})
        self._finish(agents, ended_by_error)
        return [row for agent in agents for row in agent.rows]

    def _finish(self, agents: Sequence[_Agent], ended_by_error: bool) -> None:
        """Set what belongs to the whole session."""
        first = agents[0].rows
        self._paths.apply(first, self._mapped)
        reward, given = self._paths.get("reward") or "", self._paths.get("group_id") or ""
        has_outcome = any(row.get(reward) is not None for agent in agents for row in agent.rows)
        for agent in agents:
            for row in agent.rows:
                row["group_id"], row["group_id_source"] = self._group
                if given:  # sub-agents belong to the session's group
                    row.setdefault(given, first[0].get(given))
                if has_outcome and row.get(reward) is None:
                    row[reward] = 0.0
            agent.rows[-1]["terminated"] = has_outcome
            agent.rows[-1]["truncated"] = ended_by_error and not has_outcome

    def _find_wrappers(self) -> set[SpanHeader]:
        """Return the calls that another library's span of the same call is within.

        Only where that span has the answer: else the outer one may be the only one that has it.
        """
        wrappers: set[SpanHeader] = set()
        for header in self._headers:
            if header.kind != GENERATION:
                continue
            outer = self._find_outer(header, GENERATION)
            if outer is None or not _read_call(self._load(header)).outputs:
                continue
            while outer is not None and outer not in wrappers:
                wrappers.add(outer)
                outer = self._find_outer(outer, GENERATION)
        self._counts.num_wrappers += len(wrappers)
        return wrappers

    def _iter_ancestors(self, header: SpanHeader) -> Iterable[SpanHeader]:
        seen = {header.span_id}
        at = header
        while at.parent_id is not None:
            if at.parent_id in seen:
                raise SourceInvalidError(
                    f"span {header.span_id} of trace {header.trace_id}: found a cycle in "
                    "parentSpanId, expected a root above each span"
                )
            seen.add(at.parent_id)
            outer = self._spans.get((at.trace_id, at.parent_id))
            if outer is None:
                return
            yield outer
            at = outer

    def _find_outer(self, header: SpanHeader, kind: Kind) -> SpanHeader | None:
        """Return the innermost span of a kind that a span is within; None where there is none.

        A generation is looked for up to the next span of an agent or a tool.
        """
        known = self._outer.setdefault(kind, {})
        if header in known:
            return known[header]
        path, found = [header], None
        for outer in self._iter_ancestors(header):
            if outer.kind == kind:
                found = outer
                break
            if kind == GENERATION and outer.kind != OTHER:
                break
            if outer in known:
                found = known[outer]
                break
            path.append(outer)
        known.update(dict.fromkeys(path, found))
        return found

    def _read_generation(self, header: SpanHeader) -> None:
        span = self._load(header)
        call = _read_call(span)
        if not call.outputs:
            self._counts.num_without_answer += bool(call.inputs) or span.is_error
            self._counts.num_without_content += not call.inputs and not span.is_error
            return
        if header.parent_id is not None and (header.trace_id, header.parent_id) not in self._spans:
            self._counts.num_without_parent += 1
        scope = self._find_outer(header, AGENT)
        name = header.agent_name or (None if scope is None else scope.agent_name) or ""
        if not self._agents:
            self._group = derive_group(call.inputs)
        context = b""
        contexts = [context := _hash(context, message) for message in call.inputs]
        for number, output in enumerate(call.outputs):
            agent, start, is_rewritten = self._find_agent(header, scope, name, contexts, number)
            row = self._make_row(span, call, number, start)
            row |= {"agent_id": agent.agent_id, "step": len(agent.rows)}
            if not agent.rows and agent.parent is not None:
                row[tokens.PARENT_AGENT_ID], row[tokens.PARENT_STEP] = agent.parent
            if is_rewritten:
                row[tokens.IS_CONTINUATION] = False
            self._set_tools(agent, span, row)
            agent.rows.append(row)
            agent.last, agent.last_start_ns = output, header.start_ns
            after = _hash(contexts[-1] if contexts else b"", output)
            self._contexts[name, after] = (agent, len(agent.rows) - 1)
            for tool_call in find_calls(output):
                if isinstance(tool_call, dict) and isinstance(tool_call.get("id"), str):
                    self._callers[tool_call["id"]] = (agent.agent_id, len(agent.rows) - 1)

    def _find_agent(
        self,
        header: SpanHeader,
        scope: SpanHeader | None,
        name: str,
        contexts: Sequence[bytes],
        choice: int,
    ) -> tuple[_Agent, int, bool]:
        """Return the agent of a call, the first new message, and whether its history is another.

        contexts: the hash of each beginning of the prompt. choice: the number of the answer.
        """
        key = ("", "") if scope is None else (scope.trace_id, scope.span_id)
        prompt = contexts[-1] if contexts else b""
        for end in range(len(contexts), 0, -1):
            if (found := self._contexts.get((name, contexts[end - 1]))) is None:
                continue
            agent, step = found
            if choice or step < len(agent.rows) - 1:
                agent = self._add_agent(name, prompt, (agent.agent_id, step), header.trace_id, key)
            self._by_scope[key] = agent
            return agent, end, False
        before = self._by_scope.get(key)
        # In a later trace it is asked again, and a further sub-agent has its own caller.
        same = (
            one
            for one in self._agents.values()
            if (one.prompt, one.scope, one.trace_id) == (prompt, key, header.trace_id)
            and _is(one, name)
        )
        if (twin := next(same, None)) is not None:
            # Another answer to the first prompt of an agent.
            agent = self._add_agent(name, prompt, twin.parent, header.trace_id, key)
            return agent, 0, twin.parent is not None
        if before is None and scope is not None and self._find_caller(scope) is None:
            # The same agent, in a later trace of its conversation.
            before = next(
                (
                    one
                    for one in reversed(self._agents.values())
                    if _is(one, name) and one.parent is None and one.trace_id != header.trace_id
                ),
                None,
            )
        if before is not None and _is(before, name):
            agent = before
            if choice:
                earlier = (agent.agent_id, len(agent.rows) - 2)
                agent = self._add_agent(name, prompt, earlier, header.trace_id, key)
            self._by_scope[key] = agent
            return agent, 0, True
        parent = None if scope is None else self._find_caller(scope)
        agent = self._add_agent(name, prompt, parent, header.trace_id, key)
        self._by_scope[key] = agent
        return agent, 0, parent is not None

    def _add_agent(
        self,
        name: str,
        prompt: bytes,
        parent: tuple[str, int] | None,
        trace_id: str,
        scope: _Scope,
    ) -> _Agent:
        own, number = clean_text(name), 0
        agent_id = own
        while agent_id in self._agents:
            number += 1
            agent_id = f"{own}~{number}"
        agent = _Agent(agent_id, prompt, parent, trace_id, scope)
        self._agents[agent_id] = agent
        return agent

    def _find_caller(self, scope: SpanHeader) -> tuple[str, int] | None:
        """Return the call that called an agent: the one of its tool, else the last one before."""
        for outer in self._iter_ancestors(scope):
            if outer.call_id is not None and outer.call_id in self._callers:
                return self._callers[outer.call_id]
            if outer.kind == AGENT:
                caller = self._by_scope.get((outer.trace_id, outer.span_id))
                if caller is not None and caller.rows:
                    return caller.agent_id, len(caller.rows) - 1
        caller = self._by_scope.get(("", ""))
        return (caller.agent_id, len(caller.rows) - 1) if caller and caller.rows else None

    def _make_row(self, span: Span, call: Call, number: int, start: int) -> Row:
        rest = {k: v for k, v in span.attributes.items() if k not in call.used and k != _TOOLS}
        model = next((span.attributes[n] for n in _MODELS if n in span.attributes), None)
        sampling = {k: rest.pop(k) for k in [*rest] if k.startswith(_SAMPLING)}
        settings = {k.removeprefix(_SAMPLING): v for k, v in sampling.items()}
        scores = find_scores(span)
        metadata: dict[str, Any] = {
            "trace_id": span.trace_id,
            "span_id": span.span_id,
            "name": span.name,
            "duration_ns": max(0, span.end_ns - span.start_ns),
            "attributes": rest,
            **span.fields,
        }
        if events := list_other_events(span):
            metadata["events"] = events
        if not self._num_ticks and span.resource:
            metadata["resource"] = span.resource
        row: Row = {
            **describe_generation(call.inputs[start:], call.outputs[number]),
            **self._paths.find({"": {}, _SPAN_PATH: span.attributes}),
            "env_step": self._num_ticks,
            "timestamp": _EPOCH + timedelta(microseconds=span.start_ns // 1000)
            if span.start_ns
            else None,
            "policy": clean_text(model) if isinstance(model, str) else None,
            "finish_reason": _clean(call.finish_reasons[number]),
            "sampling": dump_metadata(settings) if settings else None,
            "terminated": False,
            "truncated": False,
            "source_framework": "opentelemetry",
            "metadata": dump_metadata(metadata),
        }
        if scores:
            row[REWARD_COMPONENTS] = [
                {"name": clean_text(name), "score": score, "weight": None}
                for name, score in scores.items()
            ]
        self._num_ticks += 1
        return row

    def _set_tools(self, agent: _Agent, span: Span, row: Row) -> None:
        """Keep the definitions of an agent's tools where they are other than before."""
        tools = span.attributes.get(_TOOLS)
        if tools is not None and tools != agent.tools:
            metadata = json.loads(row["metadata"])
            row["metadata"] = dump_metadata({**metadata, _TOOLS: tools})
            agent.tools = tools

    def _add_tool_results(self) -> None:
        """Add results of tools after the last call of an agent as its final observation."""
        results: dict[str, list[SpanHeader]] = {}
        for one in self._headers:
            if one.kind == TOOL and one.call_id:
                results.setdefault(one.call_id, []).append(one)
        for agent in self._agents.values():
            final: list[Message] = []
            for call in find_calls(agent.last):
                own = call.get("id") if isinstance(call, dict) else None
                found = results.get(own, []) if isinstance(own, str) else []
                # Ids may be reused by turn, such as `call_0`: not a result from before the call.
                later = (one for one in found if one.start_ns >= agent.last_start_ns)
                header = next(later, None)
                result = None if header is None else self._load(header).attributes.get(TOOL_RESULT)
                if result is not None:
                    text = result if isinstance(result, str) else dump_metadata(result)
                    final.append({"role": "tool", "tool_call_id": own, "content": text})
            if final and agent.rows:
                agent.rows[-1]["final_text"] = format_messages(final)
                agent.rows[-1][FINAL_MESSAGES] = dump_json(final)


def _read_call(span: Span) -> Call:
    """Return the messages of a call. Raises: SourceInvalidError, which names the span."""
    try:
        return read_call(span)
    except (RecursionError, SourceInvalidError, ValueError) as error:
        where = f"span {span.span_id} of trace {span.trace_id}"
        raise SourceInvalidError(f"{where}: {error}") from error


def _is(agent: _Agent, name: str) -> bool:
    """Whether an agent has a name, besides the number of a fork."""
    own = clean_text(name)
    return agent.agent_id == own or agent.agent_id.startswith(f"{own}~")


def _clean(text: str | None) -> str | None:
    return None if text is None else clean_text(text)


def _hash(context: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the hash of a context and the message after it, however its writer laid it out."""
    content = message.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        content = "".join(str(part.get("text")) for part in content)
    calls = []
    for call in find_calls(message):
        name, arguments = parse_call(call)
        with suppress(RecursionError, ValueError):
            arguments = json.dumps(json.loads(arguments), sort_keys=True)
        calls.append((name, arguments, call.get("id") if isinstance(call, dict) else None))
    key = dump_metadata([message["role"], content or "", calls, message.get("tool_call_id")])
    return hashlib.sha256(context + key.encode()).digest()
