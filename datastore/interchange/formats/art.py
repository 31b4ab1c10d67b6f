"""ART: trajectory groups in Parquet, as OpenPipe's ART writes them and as `export` does.

Files of version 1 have the messages as columns. Those of version 2 have each trajectory as JSON,
beside columns that repeat a part of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.episodes import tokens
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.generations.contexts import ContextTree
from replaylake.datastore.interchange.formats.generations.json_values import dump_metadata
from replaylake.datastore.interchange.formats.generations.messages import (
    GIVEN,
    Message,
    clean_text,
    shorten,
)
from replaylake.datastore.interchange.formats.generations.rows import (
    Record,
    RecordTables,
    Row,
    empty_row,
    measure_row,
    read_generations,
    read_step,
)
from replaylake.datastore.interchange.formats.generic.parquet import is_parquet, parquet_schema
from replaylake.datastore.interchange.formats.generic.parquet_values import iter_rows, read_row
from replaylake.datastore.interchange.sources.source import SourceFile

_VERSION: Final = 2
_TRAJECTORY: Final = "trajectory_json"
_GROUP: Final = "group_json"
_FLAT: Final = frozenset(("group_index", "reward", "messages"))
_FULL: Final = frozenset(("format_version", "group_index", _GROUP, _TRAJECTORY))
_MESSAGES: Final = "messages_and_choices"
_HISTORIES: Final = "additional_histories"
_EXCHANGES: Final = "exchanges"
_CHAT: Final = "chat_completions"
_ASSISTANT: Final = "assistant"
_CUT_OFF: Final = "length"
# Fields of a trajectory that become columns, or columns of its messages.
_USED: Final = (_MESSAGES, _HISTORIES, _EXCHANGES, "reward", "metadata", "initial_policy_version")
_FAULTS: Final = (OverflowError, RecursionError, SourceInvalidError, ValueError, pa.ArrowException)
Context = tuple[list[Message], dict[int, Row]]


class ArtFormat:
    """Parquet with group_index, reward and messages with trainable, or with trajectory_json."""

    name = "art"
    about = "ART's trajectory groups, Parquet: messages, rewards, groups, tools and histories"
    is_folder = False

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        if not is_parquet(files[0]):
            return False
        try:
            schema = parquet_schema(files[0])
        except SourceInvalidError:
            return False
        return _is_log(schema)

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        tables = _TrajectoryTables(files, options)
        return read_generations(tables, tables.notes, files, options)


class _TrajectoryTables(RecordTables):
    """Rows of the generations of the trajectories in some files."""

    unit = "row"
    noun = "trajectories"

    def __init__(self, files: Sequence[SourceFile], options: ReadOptions) -> None:
        super().__init__(files, options)
        self._num_empty = 0

    def begin(self) -> None:
        super().begin()
        self._num_empty = 0

    def records(self, file: SourceFile, number: int) -> Iterator[Record]:
        if not _is_log(parquet_schema(file)):
            raise SourceInvalidError(
                f"{file.name}: found no {', '.join(sorted(_FULL))}, expected the columns of ART. "
                "Leave the file out."
            )
        counts: dict[int, int] = {}
        for place, row in enumerate(iter_rows(file)):
            try:
                rows = self._read(read_row(row), PurePosixPath(file.base_name).stem, counts)
            except _FAULTS as error:
                yield Record([empty_row(self._ids.next(None))], place, 0, str(error))
                continue
            self._num_empty += not rows
            yield Record(rows, place, sum(map(measure_row, rows)))

    def finish(self) -> Sequence[str]:
        notes = self._ids.notes()
        if self._num_empty:
            notes.append(
                f"{self._num_empty} rows have no generation, such as groups without trajectories: "
                "left out"
            )
        return notes

    def _read(self, row: Mapping[str, Any], stem: str, counts: dict[int, int]) -> list[Row]:
        index = read_step(row["group_index"], "group_index")
        number = counts[index] = counts.get(index, -1) + 1
        if _TRAJECTORY in row:
            if row["format_version"] != _VERSION:
                raise SourceInvalidError(
                    f"format_version: found {shorten(row['format_version'])}, expected {_VERSION}"
                )
            if row[_TRAJECTORY] is None:
                return []
            trajectory = _read_object(row, _TRAJECTORY)
            group = _read_object(row, _GROUP)
            group = {"group_" + k: v for k, v in group.items() if k != "trajectories"}
        else:
            names = ("metrics", "metadata", "tools")
            trajectory = {name: _read_text(row, name) for name in names}
            trajectory |= {"reward": row["reward"], "logs": row.get("logs")}
            trajectory[_MESSAGES] = _read_flat_messages(row["messages"])
            of_group = ("group_metadata", "group_metrics")
            group = {name: _read_text(row, name) for name in of_group}
            group["group_logs"] = row.get("group_logs")
        rows = _make_rows(trajectory)
        if not rows:
            return []
        reward = trajectory.get("reward")
        if not isinstance(reward, int | float) or isinstance(reward, bool):
            raise SourceInvalidError(f"reward: found {shorten(reward)}, expected a number")
        _set_ends(rows, float(reward))
        known = _get_object(trajectory, "metadata")
        rest = {k: v for k, v in trajectory.items() if k not in _USED}
        rest = {k: v for k, v in {**rest, **group}.items() if v}
        named = _get_object(group, "group_metadata").get("group_id")
        own_id = known.get("episode_id")
        shared: Row = {
            "group_id": clean_text(named) if isinstance(named, str) else f"{stem}/{index}",
            "group_id_source": GIVEN,
            "policy_version": trajectory.get("initial_policy_version"),
            "source_framework": "art",
        }
        for one in rows:
            one.update(shared)
        self.paths.apply(rows, self.paths.find({"": {**group, **trajectory}}))
        # A trajectory's metadata are its values: those of the same name stand below it.
        rest = {"metadata": known, **rest} if known.keys() & rest.keys() else {**known, **rest}
        if rest:
            rows[0]["metadata"] = dump_metadata({**rest, **rows[0].get("metadata", {})})
        for one in rows[1:]:
            if "metadata" in one:
                one["metadata"] = dump_metadata(one["metadata"])
        is_own = isinstance(own_id, str) and bool(own_id)
        episode_id = self._ids.next(
            clean_text(str(own_id)) if is_own else f"{stem}/{index}/{number}"
        )
        return [{**one, "episode_id": episode_id} for one in rows]


def _is_log(schema: pa.Schema) -> bool:
    """Whether a file has the columns of one of the two versions."""
    names = {*schema.names}
    if names >= _FULL:
        return True
    if not names >= _FLAT or _TRAJECTORY in names:
        return False
    kind = schema.field("messages").type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    inner = kind.value_type
    fields = ("role", "content", "trainable")
    return pa.types.is_struct(inner) and all(inner.get_field_index(n) >= 0 for n in fields)


def _make_rows(trajectory: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a trajectory's histories. Raises: SourceInvalidError."""
    tree = ContextTree()
    agents = {}
    for messages, generations in _list_contexts(trajectory):
        agent = tree.add(messages, generations)
        agents[agent.agent_id] = agent
    for agent in agents.values():
        if agent.rows:
            agent.set_final(agent.pending)
    return [row for agent in tree.agents for row in agent.rows]


def _set_ends(rows: Sequence[Row], reward: float) -> None:
    """Set rewards and ends: a trajectory's reward is that of the last step of each history."""
    lasts = {row["agent_id"]: row for row in rows}
    for row in rows:
        is_last = lasts[row["agent_id"]] is row
        was_cut = is_last and row.get("finish_reason") == _CUT_OFF
        row["reward"] = reward if is_last else 0.0
        row["terminated"], row["truncated"] = is_last and not was_cut, was_cut


def _list_contexts(trajectory: Mapping[str, Any]) -> Iterator[Context]:
    exchanges = _get_object(trajectory, _EXCHANGES)
    if others := [name for name, calls in exchanges.items() if calls and name != _CHAT]:
        raise SourceInvalidError(
            f"{_TRAJECTORY}.{_EXCHANGES}: found calls of {', '.join(others)}, expected {_CHAT} "
            "alone"
        )
    for number, exchange in enumerate(exchanges.get(_CHAT) or ()):
        yield from _read_exchange(exchange, f"{_EXCHANGES}.{_CHAT}[{number}]")
    if trajectory.get(_MESSAGES):
        yield _read_history(trajectory[_MESSAGES], _MESSAGES)
    for number, history in enumerate(trajectory.get(_HISTORIES) or ()):
        name = f"{_HISTORIES}[{number}]"
        if not isinstance(history, dict):
            raise SourceInvalidError(f"{name}: found {shorten(history)}, expected an object")
        yield _read_history(history.get(_MESSAGES), f"{name}.{_MESSAGES}")


def _read_history(value: Any, name: str) -> Context:
    """Return messages, of which the choices are generations of the policy that is trained.

    Other messages of assistants are generations too, which the loss leaves out.
    """
    if not isinstance(value, list):
        raise SourceInvalidError(f"{name}: found {shorten(value)}, expected a list of messages")
    messages: list[Message] = []
    generations: dict[int, Row] = {}
    for number, item in enumerate(value):
        if isinstance(item, dict) and isinstance(item.get("message"), dict):
            generations[number] = _describe_choice(item)
            messages.append(_read_message(item["message"], f"{name}[{number}].message"))
            continue
        message = _read_message(item, f"{name}[{number}]")
        messages.append(message)
        if message["role"] == _ASSISTANT:
            generations[number] = {tokens.IS_TRAINABLE: False}
    return messages, generations


def _read_exchange(exchange: Any, name: str) -> Iterator[Context]:
    """Yield the context of each choice of a call: the messages of its request, and the answer."""
    request = _get_object(exchange, "request")
    response = _get_object(exchange, "response")
    asked, choices = request.get("messages"), response.get("choices")
    if not isinstance(asked, list) or not isinstance(choices, list):
        raise SourceInvalidError(
            f"{name}: found {shorten(exchange)}, expected a request with messages and a response "
            "with choices"
        )
    prompt = [_read_message(one, f"{name}.request.messages") for one in asked]
    sampling = {k: v for k, v in request.items() if k not in ("messages", "tools", "model")}
    rest = {k: v for k, v in response.items() if k != "choices" and v is not None}
    for choice in choices:
        if not isinstance(choice, dict):
            raise SourceInvalidError(f"{name}: found {shorten(choice)}, expected a choice")
        answer = _read_message(choice.get("message"), f"{name}.response.choices")
        row = _describe_choice(choice)
        row["metadata"] = {**row.get("metadata", {}), "response": rest}
        if tools := request.get("tools"):
            row["metadata"]["tools"] = tools
        row["sampling"] = dump_metadata(sampling) if sampling else None
        model = request.get("model") or response.get("model")
        row["policy"] = clean_text(model) if isinstance(model, str) else None
        yield [*prompt, answer], {len(prompt): row}


def _describe_choice(choice: Mapping[str, Any]) -> Row:
    reason = choice.get("finish_reason")
    names = ("message", "finish_reason", "index")
    rest = {k: v for k, v in choice.items() if k not in names and v is not None}
    row: Row = {"finish_reason": clean_text(reason) if isinstance(reason, str) else None}
    return {**row, "metadata": rest} if rest else row


def _read_message(value: Any, name: str) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise SourceInvalidError(f"{name}: found {shorten(value)}, expected a message with a role")
    # Models of messages write null for what a message does not have.
    message = {k: v for k, v in value.items() if v is not None or k == "content"}
    return message if "content" in message else {**message, "content": None}


def _read_flat_messages(value: Any) -> list[Any]:
    """Return the messages of version 1, with those that are trainable as choices."""
    items: list[Any] = []
    for number, one in enumerate(value or ()):
        name = f"messages[{number}]"
        message = _read_message({**one, "trainable": None} if one else one, name)
        if isinstance(calls := message.get("tool_calls"), str):
            message["tool_calls"] = _parse(calls, f"{name}.tool_calls")
        items.append({"message": message} if one["trainable"] else message)
    return items


def _read_text(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column of JSON text; None where it has none."""
    text = row.get(name)
    return _parse(text, name) if isinstance(text, str) and text else text or None


def _read_object(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = _parse(row[name], name)
    if not isinstance(value, dict):
        raise SourceInvalidError(f"{name}: found {shorten(row[name])}, expected a JSON object")
    return value


def _parse(text: Any, name: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError) as error:
        raise SourceInvalidError(f"{name}: found {shorten(text)}, expected JSON text") from error


def _get_object(value: Any, name: str) -> dict[str, Any]:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}
