"""verifiers: episodes of prime-rl and verifiers' own evaluations, `traces.jsonl`, one per line.

A trace of an agent is a graph of messages. Each message has one predecessor and the tokens that it
adds. A path from a first message to one without a successor is a branch: a training sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes import tokens
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.generations.json_values import (
    dump_json,
    dump_metadata,
)
from replaylake.datastore.interchange.formats.generations.messages import (
    DERIVED,
    GIVEN,
    Message,
    clean_text,
    derive_group,
    format_messages,
    shorten,
)
from replaylake.datastore.interchange.formats.generations.rows import (
    ACTION_ADVANTAGES,
    ACTION_ENTROPIES,
    FINAL_MESSAGES,
    REWARD_COMPONENTS,
    MappedPaths,
    Record,
    RecordTables,
    Row,
    describe_generation,
    empty_row,
    iter_lines,
    measure_row,
    parse_line,
    read_first_line,
    read_flags,
    read_floats,
    read_generations,
    read_ids,
    read_step,
)
from replaylake.datastore.interchange.sources.source import SourceFile

_FRAMEWORK: Final = "verifiers"
# verifiers' own `Trace.is_truncated`.
LIMITS: Final = frozenset(
    ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
)
# One value for each sampled token of a node.
_STREAMS: Final = {
    "logprobs": tokens.ACTION_LOG_PROBS,
    "trainer_logprobs": tokens.PROXIMAL_LOG_PROBS,
    "reference_logprobs": tokens.REFERENCE_LOG_PROBS,
    "advantages": ACTION_ADVANTAGES,
    "entropies": ACTION_ENTROPIES,
}
# Fields that become columns; all others of nodes, calls, traces and episodes are metadata.
_NODE_FIELDS: Final = frozenset(("message", "token_ids", "mask", "sampled", *_STREAMS))
_CALL_FIELDS: Final = frozenset(("node", "model", "sampling", "finish_reason"))
_TRACE_FIELDS: Final = frozenset(("nodes", "calls", "rewards", "stop_condition"))
_EPISODE_FIELDS: Final = frozenset(("id", "traces", "group"))
# Causes of a new context, the nearest first; a cause is not a predecessor of the context.
_CAUSES: Final = ("compaction", "continuation", "subagent_call")
_ATTEMPT, _COMPACTION = "compaction_attempt", "compaction"


class VerifiersFormat:
    """Lines with an episode's traces, or with one trace and its nodes."""

    name = "verifiers"
    about = "traces.jsonl of verifiers 0.4 and prime-rl: message graphs with token ids"
    is_folder = False

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        return is_episode(read_first_line(files[0]))

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        tables = _EpisodeTables(files, options)
        return read_generations(tables, tables.notes, files, options)


class _EpisodeTables(RecordTables):
    """Rows of the generations of the episodes of some files."""

    noun = "episodes"

    def __init__(self, files: Sequence[SourceFile], options: ReadOptions) -> None:
        super().__init__(files, options)
        self._without_steps: list[str] = []
        self._num_without_ids = 0

    def begin(self) -> None:
        super().begin()
        self._without_steps, self._num_without_ids = [], 0

    def records(self, file: SourceFile, number: int) -> Iterator[Record]:
        for line, text in iter_lines(file):
            try:
                rows = parse_line(text, self._read)
            except SourceInvalidError as error:
                yield Record([empty_row(self._ids.next(None))], line, 0, str(error))
                continue
            if not rows:
                self._without_steps.append(f"{file.name} line {line}")
            yield Record(rows, line, sum(map(measure_row, rows)))

    def finish(self) -> Sequence[str]:
        notes = self._ids.notes()
        if self._without_steps:
            more = ", ..." if len(self._without_steps) > 3 else ""
            notes.append(
                f"{len(self._without_steps)} episodes have no message, and so no step: left out "
                f"({', '.join(self._without_steps[:3])}{more})"
            )
        if self._num_without_ids:
            notes.append(
                f"{self._num_without_ids} generations have no token ids, and others of their trace "
                "have: they are stored without tokens, and is_trainable is false"
            )
        return notes

    def _read(self, record: dict[str, Any]) -> list[Row]:
        reader = _EpisodeReader(_to_episode(record), self.paths)
        rows = reader.read()
        self._num_without_ids += reader.num_without_ids
        if rows:
            episode_id = self._ids.next(_find_id(record))
            for row in rows:
                row["episode_id"] = episode_id
        return rows


def is_episode(value: Any) -> bool:
    """Whether a line's value is an episode, or one trace, as verifiers writes it."""
    if not isinstance(value, dict) or not isinstance(value.get("task"), dict):
        return False
    is_trace = isinstance(value.get("nodes"), list) and isinstance(value.get("agent"), dict)
    return isinstance(value.get("traces"), list) or is_trace


def read_episode(text: bytes, paths: MappedPaths) -> tuple[list[Row], str | None]:
    """Return the rows of the episode in a line, without their episode_id, and the id it states.

    Raises: SourceInvalidError.
    """
    own: list[str | None] = [None]

    def read(record: dict[str, Any]) -> list[Row]:
        own[0] = _find_id(record)
        return _EpisodeReader(_to_episode(record), paths).read()

    return [*parse_line(text, read)], own[0]


def _to_episode(record: dict[str, Any]) -> dict[str, Any]:
    """Return an episode, also for a line that is one trace."""
    if "traces" not in record and "nodes" in record:
        return {"id": record.get("id"), "task": record.get("task"), "traces": [record]}
    return record


def _find_id(record: Mapping[str, Any]) -> str | None:
    own = record.get("id")
    return None if own is None else clean_text(str(own))


@dataclass(frozen=True)
class _Node:
    """A message of a trace, with the N tokens that it adds to its path.

    mask bool [N]: which of them the policy sampled. streams float32 [M]: one value for each of
    those. is_generation: whether the policy made the message.
    """

    parent: int | None
    message: Message
    ids: Array
    mask: Array
    streams: Mapping[str, Array]
    is_generation: bool
    links: Sequence[tuple[int, str]]
    value: Mapping[str, Any]


@dataclass
class _Successors:
    """The successors of a generation, or of none: generations, and messages without a successor."""

    generations: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _StepKey:
    """The step that a generation became; the last one, if it became several."""

    agent_id: str
    step: int


class _EpisodeReader:
    """Reads the traces of one episode."""

    def __init__(self, record: Mapping[str, Any], paths: MappedPaths) -> None:
        self.record = record
        self._paths = paths
        self._rows: dict[str, list[Row]] = {}
        self._num_ticks = 0
        self.num_without_ids = 0

    def read(self) -> list[Row]:
        """Return the rows of all agents, in the order in which they began.

        Raises: SourceInvalidError.
        """
        traces = self.record.get("traces")
        if not isinstance(traces, list):
            raise SourceInvalidError(f"traces: found {shorten(traces)}, expected a list")
        for number, trace in enumerate(traces):
            try:
                self._read_trace(trace)
            except SourceInvalidError as error:
                raise SourceInvalidError(f"traces[{number}].{error}") from error
        rows = [row for several in self._rows.values() for row in several]
        if not rows:
            return []
        rest = {k: v for k, v in self.record.items() if k not in _EPISODE_FIELDS}
        rows[0]["metadata"] = {"episode": rest, **rows[0]["metadata"]}
        group = self._find_group(rows[0].pop("prompt"))
        shared = {**self._find_run(), "source_framework": _FRAMEWORK}
        shared["group_id"], shared["group_id_source"] = group
        for row in rows:
            row.pop("prompt", None)
            row.update(shared)
            row["metadata"] = dump_metadata(row["metadata"])
        return rows

    def _find_group(self, prompt: Sequence[Message]) -> tuple[str | None, str]:
        """Return the group that the episode states, or that of its task, or of its prompt."""
        group, task = self.record.get("group"), self.record.get("task")
        if isinstance(group, dict) and isinstance(group.get("id"), str):
            return clean_text(group["id"]), GIVEN
        for name in ("key", "hash"):
            if isinstance(task, dict) and isinstance(task.get(name), str):
                return clean_text(task[name]), DERIVED
        return derive_group(prompt)

    def _find_run(self) -> Row:
        run = self.record.get("run")
        work = run.get("work") if isinstance(run, dict) else None
        if not isinstance(work, dict):
            return {}
        step, kind = work.get("step"), work.get("type")
        return {
            "train_step": read_step(step, "run.work.step") if isinstance(step, int) else None,
            "split": clean_text(kind) if isinstance(kind, str) else None,
        }

    @property
    def policy_version(self) -> int | None:
        """The oldest version of the live policy that generated the episode."""
        value: Any = self.record.get("run")
        for name in ("work", "policy", "start"):
            value = value.get(name) if isinstance(value, dict) else None
        return value if isinstance(value, int) else None

    def _read_trace(self, trace: Any) -> None:
        if not isinstance(trace, dict):
            raise SourceInvalidError(f"found {shorten(trace)}, expected an object")
        nodes = _read_nodes(trace.get("nodes"))
        if not nodes:
            return
        agent = trace.get("agent")
        agent = agent if isinstance(agent, dict) else {}
        reader = _TraceReader(self, trace, agent, nodes)
        reader.read(self._paths)

    def begin_agent(self, name: str) -> str:
        """Return an agent's id: the name, or for another one of this name `name~1` and so on."""
        agent_id, number = name, 0
        while agent_id in self._rows:
            number += 1
            agent_id = f"{name}~{number}"
        self._rows[agent_id] = []
        return agent_id

    def add(self, agent_id: str, row: Row) -> _StepKey:
        """Append an agent's next step."""
        step = len(self._rows[agent_id])
        self._rows[agent_id].append(
            {**row, "agent_id": agent_id, "step": step, "env_step": self._num_ticks}
        )
        self._num_ticks += 1
        return _StepKey(agent_id, step)

    def list_rows(self, agent_id: str) -> list[Row]:
        """Return the rows of an agent, as far as they were read."""
        return self._rows[agent_id]


class _TraceReader:
    """Reads the graph of one trace as the steps of one or more agents."""

    def __init__(
        self,
        episode: _EpisodeReader,
        trace: Mapping[str, Any],
        agent: Mapping[str, Any],
        nodes: Sequence[_Node],
    ) -> None:
        self._episode = episode
        self._trace = trace
        self._nodes = nodes
        self._has_ids = any(len(node.ids) for node in nodes)
        self._has_times = all(_is_number(node.value.get("timestamp")) for node in nodes)
        name = agent.get("name")
        self._name = clean_text(name) if isinstance(name, str) else "agent"
        config = agent.get("config")
        self._model = config.get("model") if isinstance(config, dict) else None
        self._is_trained = agent.get("trainable") is not False
        self._calls = _find_calls(trace.get("calls"), len(nodes))
        self._above = _find_generations_above(nodes)
        self._trainable = _find_trainable(nodes)
        self._places: dict[int, _StepKey] = {}
        self._tails: dict[int, Array] = {}

    def read(self, paths: MappedPaths) -> None:
        """Add the steps to the episode. Raises: SourceInvalidError."""
        successors = self._find_successors()
        continuing = {
            min(below.generations or below.ends)
            for above, below in successors.items()
            if above is not None
        }
        agents: list[str] = []
        last: tuple[str, int] | None = None
        for number, node in enumerate(self._nodes):
            above = self._above[number]
            is_end = number in successors[above].ends if above in successors else False
            if not node.is_generation and not (is_end and self._is_step(successors[above])):
                continue
            rows = self._make_rows(number, paths)
            if above is not None and number in continuing:
                agent_id = self._places[above].agent_id
            else:
                agent_id = self._episode.begin_agent(self._name)
                agents.append(agent_id)
                rows[0].update(self._find_parent(number))
            for row in rows:
                self._places[number] = self._episode.add(agent_id, row)
            if node.is_generation or last is None:
                last = (agent_id, self._places[number].step)
        self._add_finals(successors)
        several = [self._episode.list_rows(agent_id) for agent_id in agents]
        self._set_trace_values(several, last, paths)

    def _find_successors(self) -> dict[int | None, _Successors]:
        """Return the successors of each generation, and of none."""
        has_child = {node.parent for node in self._nodes}
        successors: dict[int | None, _Successors] = {}
        for number, node in enumerate(self._nodes):
            below = successors.setdefault(self._above[number], _Successors())
            if node.is_generation:
                below.generations.append(number)
            elif number not in has_child:
                below.ends.append(number)
        return {above: one for above, one in successors.items() if one.generations or one.ends}

    def _is_step(self, below: _Successors) -> bool:
        """Whether messages without a successor need a step, for a branch of their own.

        If such a message is the only successor of a generation, it is its final observation.
        """
        is_first = self._above[below.ends[0]] is None
        return is_first or len(below.ends) + len(below.generations) > 1

    def _add_finals(self, successors: Mapping[int | None, _Successors]) -> None:
        for number, place in self._places.items():
            below = successors.get(number, _Successors())
            if below.generations or (below.ends and self._is_step(below)):
                continue
            ids, messages = self._tails[number], []
            for end in below.ends:
                path = self._path_to(end)
                messages = [self._nodes[one].message for one in path]
                ids = np.concatenate([ids, *(self._nodes[one].ids for one in path)])
            row = self._episode.list_rows(place.agent_id)[place.step]
            if messages:
                row["final_text"] = format_messages(messages)
                row[FINAL_MESSAGES] = dump_json(messages)
                row["metadata"]["final_nodes"] = [self._describe_node(one) for one in path]
            if self._has_ids and len(ids):
                row[tokens.FINAL_OBSERVATION_TOKENS] = ids

    def _path_to(self, number: int) -> list[int]:
        """Return the path to a message from the generation above it, without that generation."""
        path = []
        at: int | None = number
        while at is not None and at != self._above[number]:
            path.append(at)
            at = self._nodes[at].parent
        return path[::-1]

    def _make_rows(self, number: int, paths: MappedPaths) -> list[Row]:
        """Return the steps of a generation: one for each run of tokens that were sampled."""
        node, above = self._nodes[number], self._above[number]
        path = self._path_to(number)
        before = path[:-1] if node.is_generation else path
        prompt = [self._nodes[one].message for one in before]
        call = self._calls.get(number, {})
        finish, sampling, model = (call.get(k) for k in ("finish_reason", "sampling", "model"))
        model = model if isinstance(model, str) else self._model
        shared: Row = {
            "policy": clean_text(model) if isinstance(model, str) else None,
            "policy_version": self._episode.policy_version if self._is_trained else None,
            "timestamp": self._read_time(node) if self._has_times else None,
            "terminated": False,
            "truncated": False,
            "finish_reason": clean_text(finish) if isinstance(finish, str) else None,
            "sampling": dump_json(sampling) if sampling is not None else None,
        }
        is_trainable = self._is_trained and number in self._trainable and node.is_generation
        if node.is_generation and self._has_ids and not len(node.ids):
            # What was sampled is not known; verifiers' own branches have the node, without ids.
            self._episode.num_without_ids += 1
            is_trainable = False
        if not is_trainable:
            shared[tokens.IS_TRAINABLE] = False
        read = [] if above is None else [self._tails[above]]
        read += [self._nodes[one].ids for one in before]
        columns = self._split(node, read) if node.is_generation else [self._observe(read)]
        self._tails[number] = np.zeros(0, np.int32)
        if node.is_generation:
            self._tails[number] = _find_tail(node)
        rest = {k: v for k, v in call.items() if k not in _CALL_FIELDS}
        metadata: dict[str, Any] = {"nodes": [self._describe_node(one) for one in path]}
        metadata |= {"call": rest} if rest else {}
        texts = describe_generation(prompt, node.message if node.is_generation else None)
        first: Row = {**texts, "metadata": metadata, "prompt": prompt}
        later: Row = {**describe_generation([], None), "metadata": {}}
        rows = [{**(later if i else first), **shared, **own} for i, own in enumerate(columns)]
        paths.apply(rows, paths.find({"": {}, "node": node.value, "call": call}))
        return rows

    def _observe(self, read: Sequence[Array]) -> Row:
        """Return the token columns of a step in which nothing was sampled."""
        if not self._has_ids:
            return {}
        empty = np.zeros(0, np.int32)
        return {
            tokens.OBSERVATION_TOKENS: np.concatenate([empty, *read]),
            tokens.ACTION_TOKENS: empty,
        }

    def _split(self, node: _Node, read: Sequence[Array]) -> list[Row]:
        """Return the token columns of a generation's steps."""
        if not self._has_ids:
            return [{}]
        starts, ends = _find_runs(node.mask)
        if not len(starts):
            return [self._observe([*read, node.ids])]
        rows: list[Row] = []
        num_read = num_sampled = 0
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            parts = [*read, node.ids[:start]] if not rows else [node.ids[num_read:start]]
            row = {
                tokens.OBSERVATION_TOKENS: np.concatenate(parts),
                tokens.ACTION_TOKENS: node.ids[start:end],
            }
            sampled = slice(num_sampled, num_sampled + end - start)
            row |= {_STREAMS[name]: values[sampled] for name, values in node.streams.items()}
            rows.append(row)
            num_read, num_sampled = end, sampled.stop
        return rows

    def _find_parent(self, number: int) -> Row:
        """Return the parent of the first step of an agent."""
        above = self._above[number]
        if above is not None:
            place = self._places[above]
            return {tokens.PARENT_AGENT_ID: place.agent_id, tokens.PARENT_STEP: place.step}
        # A new context may have been caused by a generation before it.
        links = [(kind, node) for node, kind in self._nodes[number].links if node in self._places]
        for cause in _CAUSES:
            for kind, node in links:
                if kind == cause and node < number and self._nodes[node].is_generation:
                    place = self._places[node]
                    return {
                        tokens.PARENT_AGENT_ID: place.agent_id,
                        tokens.PARENT_STEP: place.step,
                        tokens.IS_CONTINUATION: False,
                    }
        return {}

    def _set_trace_values(
        self, several: Sequence[list[Row]], last: tuple[str, int] | None, paths: MappedPaths
    ) -> None:
        """Set in the steps the values of the whole trace: its rewards, and how it ended."""
        terminated, truncated = _find_end(self._trace)
        reward, components = _read_rewards(self._trace.get("rewards"))
        stop = self._trace.get("stop_condition")
        for rows in several:
            for row in rows:
                row["status"] = clean_text(stop) if isinstance(stop, str) else None
                row["reward"] = None if reward is None else 0.0
            rows[-1]["terminated"], rows[-1]["truncated"] = terminated, truncated
        rest = {k: v for k, v in self._trace.items() if k not in _TRACE_FIELDS}
        calls = self._trace.get("calls")
        failed = (
            [call for call in calls if _is_unlinked(call)] if isinstance(calls, list) else calls
        )
        rest |= {"failed_calls": failed} if failed else {}
        first = several[0][0]
        first["metadata"] = {"trace": rest, **first["metadata"]}
        if last is None:
            return
        row = self._episode.list_rows(last[0])[last[1]]
        row["reward"] = reward
        row[REWARD_COMPONENTS] = components
        roots = {"": self._trace, "episode": self._episode.record, "node": {}, "call": {}}
        values = paths.find(roots)
        others = [one for rows in several for one in rows if one is not row]
        paths.apply([*others, row], values)

    def _read_time(self, node: _Node) -> datetime:
        seconds = node.value["timestamp"]
        try:
            return datetime.fromtimestamp(seconds, UTC)
        except (OSError, OverflowError, ValueError):
            raise SourceInvalidError(
                f"timestamp: found {seconds}, expected seconds since 1970"
            ) from None

    def _describe_node(self, number: int) -> dict[str, Any]:
        """Return a node's values that have no column, its number, and its number of ids."""
        node = self._nodes[number]
        rest = {k: v for k, v in node.value.items() if k not in _NODE_FIELDS}
        return {"index": number, "num_tokens": len(node.ids), **rest}


def _read_nodes(value: Any) -> list[_Node]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise SourceInvalidError(f"nodes: found {shorten(value)}, expected a list")
    nodes = []
    for number, one in enumerate(value):
        try:
            nodes.append(_read_node(one, number))
        except SourceInvalidError as error:
            raise SourceInvalidError(f"nodes[{number}].{error}") from error
    return nodes


def _read_node(value: Any, number: int) -> _Node:
    if not isinstance(value, dict):
        raise SourceInvalidError(f"found {shorten(value)}, expected an object")
    parent = value.get("parent")
    is_index = isinstance(parent, int) and not isinstance(parent, bool)
    if parent is not None and not (is_index and 0 <= parent < number):
        # This also excludes cycles.
        raise SourceInvalidError(
            f"parent: found {shorten(parent)}, expected the number of a node before it"
        )
    message = value.get("message")
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise SourceInvalidError(f"message: found {shorten(message)}, expected one with a role")
    ids = read_ids(value.get("token_ids") or [], "token_ids")
    mask = read_flags(value.get("mask") or [], "mask", len(ids))
    num_sampled = int(mask.sum())
    streams = {
        name: read_floats(value[name], name, num_sampled)
        for name in _STREAMS
        # The list is empty for a node whose log-probs were not requested.
        if value.get(name)
    }
    is_generation = value.get("sampled") is True or bool(num_sampled)
    links = _read_links(value.get("semantic_parents"))
    return _Node(parent, message, ids, mask, streams, is_generation, links, value)


def _read_links(value: Any) -> list[tuple[int, str]]:
    several = value if isinstance(value, list) else []
    return [
        (one["node"], one["type"])
        for one in several
        if isinstance(one, dict)
        and isinstance(one.get("node"), int)
        and isinstance(one.get("type"), str)
    ]


def _find_generations_above(nodes: Sequence[_Node]) -> list[int | None]:
    """Return for each node the nearest generation that precedes it."""
    above: list[int | None] = []
    for node in nodes:
        if node.parent is None:
            above.append(None)
        else:
            is_generation = nodes[node.parent].is_generation
            above.append(node.parent if is_generation else above[node.parent])
    return above


def _find_trainable(nodes: Sequence[_Node]) -> set[int]:
    """Return the nodes of the branches that are training samples, as `Trace.branches` has them.

    A compaction from which nothing continued is not one of them.
    """
    resumed = {node for one in nodes for node, kind in one.links if kind == _COMPACTION}
    parents = {node.parent for node in nodes}
    trainable: set[int] = set()
    for number, node in enumerate(nodes):
        if number in parents:
            continue
        is_attempt = any(kind == _ATTEMPT for _, kind in node.links)
        at: int | None = number if not is_attempt or number in resumed else None
        while at is not None and at not in trainable:
            trainable.add(at)
            at = nodes[at].parent
    return trainable


def _find_runs(mask: Array) -> tuple[Array, Array]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.view(np.int8), [0]])))
    return edges[::2], edges[1::2]


def _find_tail(node: _Node) -> Array:
    """Return the ids of a generation after the last sampled one."""
    _, ends = _find_runs(node.mask)
    return node.ids[ends[-1] :] if len(ends) else node.ids[:0]


def _find_calls(value: Any, num_nodes: int) -> dict[int, Mapping[str, Any]]:
    several = value if isinstance(value, list) else []
    calls: dict[int, Mapping[str, Any]] = {}
    for call in several:
        if isinstance(call, dict) and isinstance(call.get("node"), int):
            if not 0 <= call["node"] < num_nodes:
                raise SourceInvalidError(
                    f"calls: found node {call['node']}, expected one of {num_nodes} nodes"
                )
            calls[call["node"]] = call
    return calls


def _is_unlinked(call: Any) -> bool:
    return not isinstance(call, dict) or not isinstance(call.get("node"), int)


def _find_end(trace: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return terminated and truncated: a trace that is not complete is open."""
    if trace.get("is_completed") is not True:
        return False, False
    several = trace.get("calls")
    answered = [
        call
        for call in (several if isinstance(several, list) else [])
        if isinstance(call, dict) and call.get("error") is None
    ]
    is_cut = bool(answered) and answered[-1].get("finish_reason") == "length"
    is_failed = trace.get("is_timeout") is True or bool(trace.get("errors"))
    is_limited = any(trace.get("stop_condition") == limit for limit in LIMITS)
    truncated = is_limited or is_cut or is_failed
    return not truncated, truncated


def _read_rewards(value: Any) -> tuple[float | None, list[dict[str, Any]] | None]:
    """Return the sum of weighted scores, and each of them; None where nothing was scored."""
    if value is None:
        return None, None
    if not isinstance(value, dict):
        raise SourceInvalidError(f"rewards: found {shorten(value)}, expected an object")
    components: list[dict[str, Any]] = []
    scored: list[float] = []
    for name, one in value.items():
        component: dict[str, Any] = {"name": clean_text(name), "score": None, "weight": None}
        if one is not None:
            score: Any = one.get("score") if isinstance(one, dict) else None
            weight: Any = one.get("weight", 1.0) if isinstance(one, dict) else None
            if not _is_number(score) or not _is_number(weight):
                raise SourceInvalidError(
                    f"rewards.{name}: found {shorten(one)}, expected a score and a weight"
                )
            component |= {"score": float(score), "weight": float(weight)}
            scored.append(float(score) * float(weight))
        components.append(component)
    return (sum(scored) if scored else None), components or None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
