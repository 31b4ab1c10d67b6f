"""ATIF: trajectories of agents as harbor writes them, with their sub-agents and continuations.

A document is the dialogue of one agent. It names the documents of sub-agents and of its own
continuation, which are embedded in it or stored in other files: together they are an episode.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final
from zoneinfo import ZoneInfo

from replaylake.datastore.episodes import tokens
from replaylake.datastore.episodes.encoding import check_timezone
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.generations.json_values import (
    JsonValue,
    dump_json,
    json_values,
)
from replaylake.datastore.interchange.formats.generations.messages import (
    NONE,
    Message,
    clean_text,
    derive_group,
    format_messages,
    shorten,
)
from replaylake.datastore.interchange.formats.generations.rows import (
    FINAL_MESSAGES,
    Record,
    RecordTables,
    Row,
    describe_generation,
    empty_row,
    find_new_tokens,
    measure_row,
    read_floats,
    read_generations,
    read_ids,
)
from replaylake.datastore.interchange.sources.source import SourceFile

_LOOK_BYTES: Final = 1 << 16
_LOOK_CHARS: Final = 8 << 20
_VERSION: Final = re.compile(rb'"schema_version"\s*:\s*"ATIF-v')
# Later versions of the same number have further fields, which are retained as they are.
_KNOWN_VERSION: Final = re.compile(r"ATIF-v1\.\d+")
_LINKS: Final = re.compile(rb'"(?:trajectory_path|continued_trajectory_ref)"\s*:\s*"')
_ROLES: Final = {"system": "system", "user": "user", "agent": "assistant"}
_FRAMEWORK: Final = "atif"
_STEPS: Final = "steps"
_SUBAGENTS: Final = "subagent_trajectories"
_CONTINUATION: Final = "continued_trajectory_ref"
_PATH: Final = "trajectory_path"
_IDS: Final = ("trajectory_id", "session_id")
# Fields that become columns; all others of a step stay in its message.
_STEP_FIELDS: Final = ("source", "message", "tool_calls", "observation", "metrics")
_PROMPT_IDS: Final = "prompt_token_ids"
_COMPLETION_IDS: Final = "completion_token_ids"
_LOG_PROBS: Final = "logprobs"
_TOKEN_METRICS: Final = (_PROMPT_IDS, _COMPLETION_IDS, _LOG_PROBS)


class AtifFormat:
    """Documents with schema_version `ATIF-v1.*`, one in a file, in JSON lines, or in an array."""

    name = "atif"
    about = "harbor's ATIF trajectories of agents and sub-agents: one JSON each, or JSON lines"
    is_folder = False

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        head = files[0].head(_LOOK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
        if head[:1] not in (b"{", b"["):
            return False
        try:
            first = next(json_values(files[0], max_chars=_LOOK_CHARS), None)
        except SourceInvalidError:
            # Cut off, or too long for a look: its beginning has to show the version.
            return _VERSION.search(head) is not None
        value = None if first is None else first.value
        return isinstance(value, dict) and str(value.get("schema_version")).startswith("ATIF-v")

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        tables = _TrajectoryTables(files, options)
        return read_generations(tables, tables.notes, files, options)


@dataclass(frozen=True)
class _Document:
    """A trajectory's object, and the file that it stands in, by number."""

    value: Mapping[str, Any]
    file: int


@dataclass(frozen=True)
class _Generation:
    """A generation that others may continue from. context: its prompt's and own ids, if known."""

    agent_id: str
    step: int
    context: tuple[Array, Array] | None


@dataclass
class _Agent:
    """An agent of an episode, as far as it was read."""

    agent_id: str
    parent: _Generation | None
    rows: list[Row] = field(default_factory=list)
    pending: list[Message] = field(default_factory=list)
    last: _Generation | None = None
    mapped: Row = field(default_factory=dict)
    is_rewritten: bool = False


@dataclass
class _Counts:
    """Counts for the notes of the receipt."""

    without_steps: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    without_zone: int = 0
    without_prompt: int = 0


class _TrajectoryTables(RecordTables):
    """Rows of the generations of the trajectories of some files."""

    noun = "trajectories"

    def __init__(self, files: Sequence[SourceFile], options: ReadOptions) -> None:
        super().__init__(files, options)
        self.zone: ZoneInfo | None = None
        if options.timezone is not None:
            check_timezone(options.timezone)
            self.zone = ZoneInfo(options.timezone)
        self.counts = _Counts()
        self._links = _Links(files)

    def begin(self) -> None:
        super().begin()
        self.counts = _Counts()
        self._links.find_references()

    def records(self, file: SourceFile, number: int) -> Iterator[Record]:
        if number in self._links.targets:  # read with the one that names it
            if number in self._links.cyclic:
                yield self._refuse(1, _describe_cycle(file))
            return
        for value in json_values(file, resumes=True):
            if value.fault is None:
                yield from self._read(value, file, number)
            else:
                # A run that was killed leaves a line or file that is cut off: others are read.
                file.check_unchanged()
                yield self._refuse(value.line, value.fault)

    def finish(self) -> Sequence[str]:
        counts = self.counts
        notes = list(self._ids.notes())
        for places, what in (
            (counts.without_steps, "trajectories have no generation, and so no step: left out"),
            (counts.missing, "documents that others name are not in the source"),
            (
                self._links.list_unread(),
                "documents are named by a trajectory that was refused: left out",
            ),
        ):
            if places:
                more = ", ..." if len(places) > 3 else ""
                notes.append(f"{len(places)} {what} ({', '.join(places[:3])}{more})")
        if counts.without_zone:
            notes.append(
                f"{counts.without_zone} timestamps state no zone, and are NULL without `timezone`"
            )
        if counts.without_prompt:
            notes.append(
                f"{counts.without_prompt} generations have ids without those of their prompt, or "
                "combine several calls: their ids stay in completion_messages"
            )
        return notes

    def _read(self, value: JsonValue, file: SourceFile, number: int) -> Iterator[Record]:
        episode = _EpisodeReader(self, self._links)
        try:
            trajectory = _check_trajectory(value.value)
            rows = episode.read(_Document(trajectory, number))
            episode_id = self._ids.next(_find_id(trajectory))
        # Also for texts that are not valid Unicode.
        except (OverflowError, RecursionError, SourceInvalidError, ValueError) as error:
            yield self._refuse(value.line, str(error))
            return
        for row in rows:
            row["episode_id"] = episode_id
        if not rows:
            self.counts.without_steps.append(f"{file.name} line {value.line}")
        yield Record(rows, value.line, sum(map(measure_row, rows)))
        for fault in episode.faults:
            yield self._refuse(value.line, fault)

    def _refuse(self, line: int, fault: str) -> Record:
        return Record([empty_row(self._ids.next(None))], line, 0, fault)


class _Links:
    """The files of a source that other files name; each is read with the file that names it."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._numbers: dict[str, int | None] = {}
        for number, file in enumerate(files):
            # For files that were given one by one, only the names are known.
            self._numbers[file.relative] = None if file.relative in self._numbers else number
        self.targets: set[int] = set()
        self.cyclic: set[int] = set()
        self._claimed: set[int] = set()

    def find_references(self) -> None:
        """Find which files name which. Cost: files that name others are parsed once more."""
        edges: dict[int, set[int]] = {}
        for number, file in enumerate(self._files):
            if _contains(file, _LINKS):
                # A value with a fault is refused when it is read.
                values = [one.value for one in json_values(file, resumes=True) if not one.fault]
                named = (self.resolve(path, number) for one in values for path in _iter_paths(one))
                edges[number] = {target for target in named if target is not None}
        self.targets = {target for several in edges.values() for target in several}
        self._claimed = set()
        reached: set[int] = set()
        ahead = [number for number in edges if number not in self.targets]
        while ahead:
            following = edges.get(ahead.pop(), set()) - reached
            reached |= following
            ahead += following
        self.cyclic = self.targets - reached

    def list_unread(self) -> list[str]:
        """Return the names of files that are named by others and were not read with any of them."""
        left = self.targets - self.cyclic - self._claimed
        return [self._files[number].name for number in sorted(left)]

    def resolve(self, path: Any, file: int) -> int | None:
        """Return the number of the file that a path in `file` refers to, if it is in the source."""
        if not isinstance(path, str):
            return None
        folder = posixpath.dirname(self._files[file].relative)
        return self._numbers.get(posixpath.normpath(posixpath.join(folder, path)))

    def claim(self, path: Any, file: int) -> _Document | None:
        """Return the document that a path refers to, unless it was claimed before.

        Raises: SourceInvalidError if it is not a trajectory.
        """
        number = self.resolve(path, file)
        if number is None or number in self._claimed or number not in self.targets:
            return None
        self._claimed.add(number)
        named = self._files[number]
        values = [value.value for value in json_values(named)]
        if len(values) != 1:
            raise SourceInvalidError(
                f"{named.name}: found {len(values)} documents, expected one, because "
                f"{self._files[file].name} names the file"
            )
        try:
            return _Document(_check_trajectory(values[0]), number)
        except SourceInvalidError as error:
            raise SourceInvalidError(f"{named.name}: {error}") from error


class _EpisodeReader:
    """Reads the agents of one episode; `faults` are documents of it that could not be read."""

    def __init__(self, tables: _TrajectoryTables, links: _Links) -> None:
        self._tables = tables
        self._links = links
        self._agents: dict[str, _Agent] = {}
        self._num_ticks = 0
        self._group: tuple[str | None, str] | None = None
        self._read_embedded: set[int] = set()
        self.faults: list[str] = []

    def read(self, document: _Document) -> list[Row]:
        """Return the rows of all agents, the first agent's first. Raises: SourceInvalidError."""
        self._read_agent(document, None, {})
        agents = [*self._agents.values()]
        paths = self._tables.paths
        rows = [row for agent in agents for row in agent.rows]
        if not rows:
            return []
        group = (None, NONE) if self._group is None else self._group
        reward, given = paths.get("reward") or "", paths.get("group_id") or ""
        has_outcome = any(row.get(reward) is not None for row in rows)
        terminated, truncated = _find_end(document.value) or (has_outcome, False)
        for agent in agents:
            for row in agent.rows:
                row["group_id"], row["group_id_source"] = group
                if given:  # sub-agents belong to the trajectory's group
                    row.setdefault(given, rows[0].get(given))
                if has_outcome and not reward.startswith(f"{_STEPS}.") and row.get(reward) is None:
                    row[reward] = 0.0  # a sub-agent has no reward of its own
            if agent.rows:
                agent.rows[-1]["terminated"] = terminated
                agent.rows[-1]["truncated"] = truncated
        return rows

    def _read_agent(
        self, document: _Document, parent: _Generation | None, scope: Mapping[str, _Document]
    ) -> None:
        """Read an agent's document and its continuations.

        scope: the embedded documents that it may name, by their ids.
        """
        trajectory = document.value
        agent = _Agent(self._name_agent(trajectory["agent"]["name"]), parent)
        self._agents[agent.agent_id] = agent
        headers = []
        following: _Document | None = document
        while following is not None:
            segment = following
            headers.append(_read_header(segment.value))
            self._read_segment(agent, segment, scope)
            agent.mapped |= self._tables.paths.find({"": segment.value})
            following = self._find_named(segment.value.get(_CONTINUATION), segment.file)
            agent.is_rewritten = True
        if not agent.rows:
            return
        if agent.pending:
            agent.rows[-1]["final_text"] = format_messages(agent.pending)
            agent.rows[-1][FINAL_MESSAGES] = dump_json(agent.pending)
        metadata: dict[str, Any] = {"trajectory": headers[0]}
        if len(headers) > 1:
            metadata["continuations"] = headers[1:]
        agent.rows[0]["metadata"] = dump_json(metadata)
        self._tables.paths.apply(agent.rows, agent.mapped)

    def _read_segment(
        self, agent: _Agent, document: _Document, scope: Mapping[str, _Document]
    ) -> None:
        """Read the steps of a document, and of the sub-agents that it names."""
        trajectory = document.value
        embedded = _find_embedded(document)
        scope = {**scope, **embedded}
        for place, step in enumerate(trajectory[_STEPS]):
            try:
                message = _to_message(step)
                if _is_generation(step):
                    agent.rows.append(self._make_row(agent, trajectory, step, message))
                    agent.pending = []
                else:
                    agent.pending.append(message)
                results = _find_results(step)
            except SourceInvalidError as error:
                raise SourceInvalidError(f"steps[{place}].{error}") from error
            for result in results:
                agent.pending.append(_to_tool_message(result))
                for ref in _find_refs(result):
                    if (named := self._find_subagent(ref, document.file, scope)) is not None:
                        self._read_agent(named, agent.last, scope)
        for own in embedded.values():
            # The parent of a sub-agent that no step names is unknown.
            if id(own.value) not in self._read_embedded:
                self._read_embedded.add(id(own.value))
                self._read_agent(own, None, scope)

    def _find_subagent(
        self, ref: Mapping[str, Any], file: int, scope: Mapping[str, _Document]
    ) -> _Document | None:
        """Return the document that a reference refers to, unless it was read already."""
        name = ref.get("trajectory_id")
        if isinstance(name, str) and (own := scope.get(name)) is not None:
            if id(own.value) in self._read_embedded:
                return None
            self._read_embedded.add(id(own.value))
            return own
        if ref.get(_PATH) is None:
            self._tables.counts.missing.append(shorten(name))
        return self._find_named(ref.get(_PATH), file)

    def _find_named(self, path: Any, file: int) -> _Document | None:
        if path is None:
            return None
        try:
            document = self._links.claim(path, file)
        except SourceInvalidError as error:
            self.faults.append(str(error))
            return None
        if document is None:
            self._tables.counts.missing.append(shorten(path))
        return document

    def _name_agent(self, name: str) -> str:
        own, number = clean_text(name), 0
        agent_id = own
        while agent_id in self._agents:
            number += 1
            agent_id = f"{own}~{number}"
        return agent_id

    def _make_row(
        self,
        agent: _Agent,
        trajectory: Mapping[str, Any],
        step: Mapping[str, Any],
        message: Message,
    ) -> Row:
        if self._group is None:
            self._group = derive_group(agent.pending)
        number = len(agent.rows)
        columns, context = self._read_tokens(agent, step)
        if context is not None:
            metrics = {k: v for k, v in message["metrics"].items() if k not in _TOKEN_METRICS}
            message = {**message, "metrics": metrics}
        if number == 0 and agent.parent is not None:
            columns[tokens.PARENT_AGENT_ID] = agent.parent.agent_id
            columns[tokens.PARENT_STEP] = agent.parent.step
        model = step.get("model_name", trajectory["agent"].get("model_name"))
        row = {
            **describe_generation(agent.pending, message),
            **columns,
            **self._tables.paths.find({"": {}, _STEPS: step}),
            "agent_id": agent.agent_id,
            "step": number,
            "env_step": self._num_ticks,
            "timestamp": self._read_time(step.get("timestamp")),
            "policy": clean_text(model) if isinstance(model, str) else None,
            "terminated": False,
            "truncated": False,
            "source_framework": _FRAMEWORK,
        }
        self._num_ticks += 1
        agent.last = _Generation(agent.agent_id, number, context)
        agent.is_rewritten = False
        return row

    def _read_tokens(
        self, agent: _Agent, step: Mapping[str, Any]
    ) -> tuple[Row, tuple[Array, Array] | None]:
        """Return the token columns of a generation, and the ids of its prompt and its own.

        Its prompt repeats the history; the new part of the prompt is the observation.
        """
        metrics = step.get("metrics") or {}
        before = agent.last or agent.parent
        row: Row = {}
        # A sub-agent has a prompt of its own; a continuation begins with a rewritten history.
        if before is not None and (agent.is_rewritten or agent.last is None):
            row[tokens.IS_CONTINUATION] = False
        if metrics.get(_COMPLETION_IDS) is None:
            return row, None
        if metrics.get(_PROMPT_IDS) is None or step.get("llm_call_count") not in (None, 1):
            self._tables.counts.without_prompt += 1
            return row, None
        prompt = read_ids(metrics[_PROMPT_IDS], f"metrics.{_PROMPT_IDS}")
        completion = read_ids(metrics[_COMPLETION_IDS], f"metrics.{_COMPLETION_IDS}")
        if metrics.get(_LOG_PROBS) is not None:
            name = f"metrics.{_LOG_PROBS}"
            row[tokens.ACTION_LOG_PROBS] = read_floats(metrics[_LOG_PROBS], name, len(completion))
        context = None if before is None else before.context
        start = 0 if context is None else find_new_tokens(prompt, *context)
        if before is not None:
            row[tokens.IS_CONTINUATION] = None if start else False
        row[tokens.OBSERVATION_TOKENS] = prompt[start:]
        row[tokens.ACTION_TOKENS] = completion
        return row, (prompt, completion)

    def _read_time(self, text: Any) -> datetime | None:
        if text is None:
            return None
        try:
            time = datetime.fromisoformat(text.replace("Z", "+00:00"))
        except (AttributeError, ValueError):
            raise SourceInvalidError(
                f"timestamp: found {shorten(text)}, expected a time such as 2026-01-31T10:00:00Z"
            ) from None
        if time.tzinfo is None:
            self._tables.counts.without_zone += self._tables.zone is None
            return None if self._tables.zone is None else time.replace(tzinfo=self._tables.zone)
        return time


def _check_trajectory(value: Any) -> Mapping[str, Any]:
    """Return a trajectory's object. Raises: SourceInvalidError for a malformed one."""
    if not isinstance(value, dict):
        raise SourceInvalidError(f"found {shorten(value)}, expected an ATIF trajectory")
    version = value.get("schema_version")
    if not isinstance(version, str) or not _KNOWN_VERSION.fullmatch(version):
        raise SourceInvalidError(
            f"schema_version: found {shorten(version)}, expected ATIF-v1.0 to ATIF-v1.8"
        )
    agent, steps = value.get("agent"), value.get(_STEPS)
    if not isinstance(agent, dict) or not isinstance(agent.get("name"), str):
        raise SourceInvalidError(f"agent: found {shorten(agent)}, expected an object with a name")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise SourceInvalidError(f"steps: found {shorten(steps)}, expected a list of objects")
    return value


def _find_id(trajectory: Mapping[str, Any]) -> str | None:
    own = next((value for name in _IDS if isinstance(value := trajectory.get(name), str)), None)
    return None if own is None else clean_text(own)


def _find_end(trajectory: Mapping[str, Any]) -> tuple[bool, bool] | None:
    """Return terminated and truncated where `extra` states both, as in an export from a lake."""
    extra = trajectory.get("extra")
    if not isinstance(extra, dict):
        return None
    terminated, truncated = extra.get("terminated"), extra.get("truncated")
    if not isinstance(terminated, bool) or not isinstance(truncated, bool):
        return None
    return terminated, truncated and not terminated


def _find_embedded(document: _Document) -> dict[str, _Document]:
    """Return the trajectories of sub-agents that are embedded in one, by their ids."""
    several = document.value.get(_SUBAGENTS) or []
    if not isinstance(several, list):
        raise SourceInvalidError(f"{_SUBAGENTS}: found {shorten(several)}, expected a list")
    embedded: dict[str, _Document] = {}
    for place, value in enumerate(several):
        try:
            name = _check_trajectory(value).get("trajectory_id")
        except SourceInvalidError as error:
            raise SourceInvalidError(f"{_SUBAGENTS}[{place}].{error}") from error
        if not isinstance(name, str) or name in embedded:
            raise SourceInvalidError(
                f"{_SUBAGENTS}[{place}].trajectory_id: found {shorten(name)}, expected a unique id"
            )
        embedded[name] = _Document(value, document.file)
    return embedded


def _is_generation(step: Mapping[str, Any]) -> bool:
    """Whether a step is a call of a model, and not a copy of one or an action without a model."""
    is_copy = step.get("is_copied_context") is True
    return step["source"] == "agent" and not is_copy and step.get("llm_call_count") != 0


def _to_message(step: Mapping[str, Any]) -> Message:
    """Return a step as a message, with all its fields except its observation."""
    source = step.get("source")
    if not isinstance(source, str) or source not in _ROLES:
        raise SourceInvalidError(f"source: found {shorten(source)}, expected {', '.join(_ROLES)}")
    content = step.get("message")
    if not isinstance(content, str | list):
        raise SourceInvalidError(f"message: found {shorten(content)}, expected text or parts")
    message: Message = {"role": _ROLES[source], "content": content}
    calls, metrics = step.get("tool_calls"), step.get("metrics")
    if calls is not None:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise SourceInvalidError(f"tool_calls: found {shorten(calls)}, expected objects")
        message["tool_calls"] = [_to_tool_call(call) for call in calls]
    if metrics is not None:
        if not isinstance(metrics, dict):
            raise SourceInvalidError(f"metrics: found {shorten(metrics)}, expected an object")
        message["metrics"] = metrics
    return message | {k: v for k, v in step.items() if k not in _STEP_FIELDS and v is not None}


def _to_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    known = ("tool_call_id", "function_name", "arguments")
    rest = {name: value for name, value in call.items() if name not in known}
    function = {
        "name": call.get("function_name"),
        "arguments": dump_json(call.get("arguments")),
    }
    return {"id": call.get("tool_call_id"), "type": "function", "function": function, **rest}


def _find_results(step: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    observation = step.get("observation")
    results = observation.get("results") if isinstance(observation, dict) else None
    if observation is None:
        return []
    if not isinstance(results, list) or not all(isinstance(one, dict) for one in results):
        raise SourceInvalidError(
            f"observation: found {shorten(observation)}, expected an object with results"
        )
    return results


def _to_tool_message(result: Mapping[str, Any]) -> Message:
    known = ("source_call_id", "content")
    rest = {k: v for k, v in result.items() if k not in known and v is not None}
    call_id = result.get("source_call_id")
    own = {} if call_id is None else {"tool_call_id": call_id}
    return {"role": "tool", **own, "content": result.get("content"), **rest}


def _find_refs(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    refs = result.get("subagent_trajectory_ref") or []
    several = refs if isinstance(refs, list) else [refs]
    return [ref for ref in several if isinstance(ref, dict)]


def _read_header(trajectory: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in trajectory.items() if k not in (_STEPS, _SUBAGENTS)}


def _iter_paths(value: Any) -> Iterator[str]:
    """Yield the files that a document names, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in (_PATH, _CONTINUATION) and isinstance(inner, str):
                yield inner
            elif name in (_STEPS, _SUBAGENTS, "observation", "results", "subagent_trajectory_ref"):
                yield from _iter_paths(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _iter_paths(inner)


def _contains(file: SourceFile, pattern: re.Pattern[bytes]) -> bool:
    """Whether a file's bytes have a match of a pattern, which is at most 256 bytes long."""
    rest = b""
    with file.open() as stream:
        while block := stream.read(_LOOK_CHARS):
            if pattern.search(rest + block):
                return True
            rest = block[-256:]
    return False


def _describe_cycle(file: SourceFile) -> str:
    return (
        f"{file.name}: found a cycle: it names a trajectory that names it, directly or not, "
        "expected references without cycles"
    )
