"""Transcripts: dialogues of chat and tool use as JSON or JSON lines, one row a generated turn.

Nothing in them is run: calls of tools are kept as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Text
from replaylake.datastore.errors import SourceInvalidError, SpaceUnsupportedError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader, WriteResult
from replaylake.datastore.interchange.formats.tabular.reader import Declaration, TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, TableSource, is_encodable
from replaylake.datastore.interchange.formats.transcripts.dialogues import (
    GENERATED,
    Dialogue,
    Message,
    is_generated,
    is_transcript,
    parse_dialogues,
)
from replaylake.datastore.interchange.formats.transcripts.json_values import (
    MAX_VALUE_CHARS,
    JsonValue,
    dump_json,
    json_values,
)
from replaylake.datastore.interchange.sources.source import SourceFile

_CHUNK_CHARS: Final = 8 << 20
# What a first look at a file reads at most, when its format is asked for.
_LOOK_CHARS: Final = 8 << 20
_NOTE_EXAMPLES: Final = 3
PROMPT_MESSAGES: Final = "prompt_messages"
COMPLETION_MESSAGES: Final = "completion_messages"
FINAL_MESSAGES: Final = "final_messages"
# The further columns of such datasets; messages, calls and metadata are JSON text.
EXTRAS: Final = {
    "role": pa.string(),
    PROMPT_MESSAGES: pa.string(),
    COMPLETION_MESSAGES: pa.string(),
    FINAL_MESSAGES: pa.string(),
    "tool_name": pa.string(),
    "tool_calls": pa.string(),
    "group_id": pa.string(),
    "group_id_source": pa.string(),
    "sample_id": pa.string(),
    "source_framework": pa.string(),
    "status": pa.string(),
    "metadata": pa.string(),
}
ROW_SCHEMA: Final = pa.schema(
    {
        "episode_id": pa.string(),
        "agent_id": pa.string(),
        "step": pa.int64(),
        "env_step": pa.int64(),
        "prompt_text": pa.string(),
        "final_text": pa.string(),
        "completion_text": pa.string(),
        "reward": pa.float64(),
        "terminated": pa.bool_(),
        "truncated": pa.bool_(),
        "policy": pa.string(),
        **EXTRAS,
    }
)
# The texts for people are what a step saw and did.
FIELDS: Final = {
    "observation": "prompt_text",
    "final_observation": "final_text",
    "action": "completion_text",
}
_CONSTANT: Final = ("group_id", "group_id_source", "sample_id", "source_framework", "status")


class TranscriptTables(TableSource):
    """Rows of the dialogues of some files; `notes` are of the last whole reading."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self.notes: list[str] = []

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        ids = _EpisodeIds()
        silent: list[str] = []
        unsaid = num_rows = 0
        for file in self._files:
            first_row, num_chars = 0, 0
            rows: list[dict[str, Any]] = []
            damage: dict[int, str] = {}
            for value in _values(file):
                dialogues, fault = _dialogues(value, file, ids)
                if fault is not None:
                    damage[len(rows)] = fault
                for turns in dialogues:
                    if not turns:
                        silent.append(f"{file.name} line {value.line}")
                    unsaid += _count_lost_calls(value, turns)
                    rows += turns
                    num_rows += len(turns)
                    num_chars += sum(map(_num_chars, turns))
                if num_chars > _CHUNK_CHARS:
                    yield Chunk(file, first_row, _table(rows), damage)
                    first_row += len(rows)
                    rows, num_chars, damage = [], 0, {}
            yield Chunk(file, first_row, _table(rows), damage)
        self.notes[:] = [*_silent_notes(silent), *ids.notes(), *_lost_call_notes(unsaid)]
        if silent and not num_rows:
            raise SourceInvalidError(
                f"{silent[0]}: found no turn of an assistant in any of {len(silent)} transcripts, "
                f"expected a message of role {', '.join(sorted(GENERATED))}: each row is such a "
                "turn. Rename the role of the policy's messages."
            )


class TranscriptsFormat:
    """OpenAI's messages, ShareGPT's conversations, prompts and completions, tau-bench's results."""

    name = "transcripts"
    about = "dialogues of chat and tool use: messages as JSON or JSON lines, tau-bench's results"
    is_folder = False
    suffix = ".jsonl"

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        if files[0].head(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] not in (b"{", b"["):
            return False
        try:
            first = next(_values(files[0], _LOOK_CHARS), None)
        except SourceInvalidError:
            return False
        return first is not None and is_transcript(first.value)

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        tables = TranscriptTables(files)
        declared = Declaration(
            fields=FIELDS,
            spaces=None if {*FIELDS} & options.mapping.keys() else (Text(), Text()),
            notes=tables.notes,
            rewards_optional=True,
            observed=FIELDS["observation"],
        )
        return TabularReader(tables, options, files[0].name, declared)

    def write(self, episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> WriteResult:
        """Write a line for each dialogue; the episodes of its agents come one after the other.

        Raises: SpaceUnsupportedError for steps that are no transcripts.
        """
        num_episodes = num_steps = num_later = 0
        with path.open("x", encoding="utf-8", newline="\n") as file:
            for _, several in groupby(episodes, lambda episode: episode.episode_id):
                agents = list(several)
                file.write(dump_json(make_record(agents)) + "\n")
                num_episodes += len(agents)
                num_steps += sum(map(len, agents))
                num_later += sum(episode.first_step > 0 for episode in agents)
        notes = (f"{num_later} begin within a dialogue: what was said before is left out",)
        return WriteResult(num_episodes, num_steps, notes if num_later else ())


class _EpisodeIds:
    """Gives each dialogue an id of its own: the record's, or its number in the source."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._number = 0
        self._duplicates: list[str] = []

    def next(self, own_id: str | None) -> str:
        self._number += 1
        candidate = str(self._number - 1) if own_id is None else own_id
        name = candidate
        while name in self._counts:
            self._counts[candidate] += 1
            name = f"{candidate}#{self._counts[candidate]}"
        self._counts[name] = 1
        if name != candidate:
            self._duplicates.append(candidate)
        return name

    def notes(self) -> list[str]:
        if not self._duplicates:
            return []
        first = self._duplicates[0]
        return [
            f"{len(self._duplicates)} transcripts have the id of one before them, such as {first}: "
            f"they are {first}#2 and so on"
        ]


def _values(file: SourceFile, max_chars: int = MAX_VALUE_CHARS) -> Iterator[JsonValue]:
    """Read a file's records, whether it is an array of them, or lines, also of lists of messages.

    Raises: SourceInvalidError.
    """
    first = next(json_values(file, max_chars=max_chars), None)
    # An array whose elements are messages is a record itself.
    is_lists = first is not None and _is_bare_message(first.value)
    return json_values(file, as_lines=is_lists, max_chars=max_chars)


def _is_bare_message(value: Any) -> bool:
    return isinstance(value, dict) and not is_transcript(value) and is_transcript([value])


def _dialogues(
    value: JsonValue, file: SourceFile, ids: _EpisodeIds
) -> tuple[list[list[dict[str, Any]]], str | None]:
    """Return the rows of each dialogue of a record; for a malformed one an empty row, and why."""
    try:
        dialogues = parse_dialogues(value.value)
        return [[*iter_rows(one, ids.next(one.episode_id))] for one in dialogues], None
    except (SourceInvalidError, RecursionError, ValueError) as error:
        return [[empty_row(ids.next(None))]], _describe_malformed(value, file, error)


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, ROW_SCHEMA)


def _describe_malformed(value: JsonValue, file: SourceFile, error: Exception) -> str:
    """Return what is wrong with a record, after the name of the check."""
    found = error if isinstance(error, SourceInvalidError) else f"found {error}"
    return f"malformed\0{file.name} record {value.number} (line {value.line}): {found}"


def _num_chars(row: Mapping[str, Any]) -> int:
    return sum(len(value) for value in row.values() if isinstance(value, str))


def _count_lost_calls(value: JsonValue, turns: Sequence[dict[str, Any]]) -> int:
    if not isinstance(value.value, dict) or "messages_display" not in value.value:
        return 0
    return sum('"content":null' in row["completion_messages"] for row in turns)


def _silent_notes(places: Sequence[str]) -> list[str]:
    if not places:
        return []
    more = ", ..." if len(places) > _NOTE_EXAMPLES else ""
    return [
        f"{len(places)} transcripts have no turn of an assistant, and so no step: left out "
        f"({', '.join(places[:_NOTE_EXAMPLES])}{more})"
    ]


def _lost_call_notes(num: int) -> list[str]:
    if not num:
        return []
    return [f"{num} turns are calls of tools that the log shows as None: name and arguments lost"]


def iter_rows(dialogue: Dialogue, episode_id: str) -> Iterator[dict[str, Any]]:
    """Yield a row of ROW_SCHEMA for each generated turn, in order.

    A row has the messages since the turn before it, whoever's that was. Where several agents speak,
    `step` counts an agent's own turns, `env_step` those of all. What is said after the last turn is
    the final observation.
    """
    turns = [i for i, message in enumerate(dialogue.messages) if is_generated(message)]
    agents = [_name(dialogue.messages[i]) for i in turns]
    lasts = {agent: number for number, agent in enumerate(agents)}
    counts: dict[str, int] = {}
    start = 0
    for number, (i, agent) in enumerate(zip(turns, agents, strict=True)):
        prompt, message = dialogue.messages[start:i], dialogue.messages[i]
        start = i + 1
        final = dialogue.messages[start:] if i == turns[-1] else []
        counts[agent] = counts.get(agent, -1) + 1
        calls = _calls(message)
        is_last = lasts[agent] == number
        yield {
            "episode_id": episode_id,
            "agent_id": agent,
            "step": counts[agent],
            "env_step": number,
            "prompt_text": _format_messages(prompt),
            "final_text": _format_messages(final) if final else None,
            "completion_text": _message_text(message),
            "reward": dialogue.rewards[number],
            "terminated": is_last and dialogue.terminated,
            "truncated": is_last and dialogue.truncated,
            "policy": dialogue.model,
            "role": _clean(message["role"]),
            PROMPT_MESSAGES: dump_json(prompt),
            COMPLETION_MESSAGES: dump_json([message]),
            FINAL_MESSAGES: dump_json(final) if final else None,
            "tool_name": next((_clean(name) for name, _ in map(_call, calls) if name), None),
            "tool_calls": dump_json(calls) if calls else None,
            "group_id": dialogue.group_id,
            "group_id_source": dialogue.group_id_source,
            "sample_id": dialogue.sample_id,
            "source_framework": dialogue.framework,
            "status": dialogue.status,
            "metadata": dump_json(dialogue.metadata) if dialogue.metadata and not number else None,
        }


def empty_row(episode_id: str) -> dict[str, Any]:
    """Return a row that stands for a record of which nothing could be read."""
    row = {"episode_id": episode_id, "agent_id": "", "step": 0, "env_step": 0}
    texts = ("prompt_text", "completion_text", PROMPT_MESSAGES, COMPLETION_MESSAGES)
    ends = {"terminated": False, "truncated": False}
    return {**dict.fromkeys(ROW_SCHEMA.names), **row, **dict.fromkeys(texts, ""), **ends}


def make_record(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return one dialogue's record, with `messages` whole, from the episodes of its agents.

    It reads as what `rows_of` made these episodes of. Raises: SpaceUnsupportedError for episodes
    that are no transcripts.
    """
    first = episodes[0]
    turns = sorted(turn for episode in episodes for turn in _turns(episode))
    rows = [row for _, row in turns]
    messages: list[Message] = []
    for row in rows:
        for name in (PROMPT_MESSAGES, COMPLETION_MESSAGES, FINAL_MESSAGES):
            messages += json.loads(row[name]) if row[name] else []
    texts = [row["metadata"] for row in rows if row["metadata"]]
    metadata: dict[str, Any] = json.loads(texts[0]) if texts else {}
    record = {
        **metadata,
        "episode_id": first.source_episode_id or first.episode_id,
        "messages": messages,
        **_rewards([row["reward"] for row in rows]),
        **{name: rows[0][name] for name in _CONSTANT if rows[0][name] is not None},
        "terminated": all(episode.terminated for episode in episodes),
        "truncated": any(episode.truncated for episode in episodes),
    }
    policy = None if first.policies is None else first.policies[0]
    return record if policy is None else {**record, "model": policy}


def _turns(episode: Episode) -> Iterator[tuple[int, _TickRow]]:
    needed = (PROMPT_MESSAGES, COMPLETION_MESSAGES)
    if missing := [name for name in needed if name not in episode.extras]:
        raise SpaceUnsupportedError(
            f"episode {episode.episode_id}: found no column {', '.join(missing)}, expected them as "
            "in datasets that were ingested from transcripts. Export it to another format."
        )
    unknown = [None] * len(episode)
    columns = {
        name: _rows_values(episode.extras[name]) if name in episode.extras else unknown
        for name in EXTRAS
    }
    ticks = range(len(episode)) if episode.env_steps is None else episode.env_steps.tolist()
    for row, tick in enumerate(ticks):
        values = {name: column[row] for name, column in columns.items()}
        yield tick, _TickRow(values | {"reward": float(episode.rewards[row])})


class _TickRow(dict[str, Any]):
    """A row that sorts by its tick alone."""

    def __lt__(self, other: object) -> bool:
        return False


def _rows_values(column: Any) -> list[Any]:
    return list(column.to_pylist() if hasattr(column, "to_pylist") else column)


def _rewards(rewards: Sequence[float]) -> dict[str, Any]:
    """Return what the record says of rewards; NaN is unknown."""
    known = [None if reward != reward else reward for reward in rewards]
    if all(reward is None for reward in known):
        return {}
    if known[-1] is not None and not any(known[:-1]) and None not in known:
        return {"reward": known[-1]}
    return {"rewards": known}


def _name(message: Mapping[str, Any]) -> str:
    name = message.get("name")
    return _clean(name) if isinstance(name, str) else ""


def _calls(message: Mapping[str, Any]) -> list[Any]:
    """Return the calls of tools: OpenAI's, its older `function_call`, or Anthropic's parts."""
    if isinstance(calls := message.get("tool_calls"), list):
        return calls
    if isinstance(call := message.get("function_call"), dict):
        return [call]
    parts = message.get("content")
    if not isinstance(parts, list):
        return []
    return [part for part in parts if isinstance(part, dict) and part.get("type") == "tool_use"]


def _call(call: Any) -> tuple[str, str]:
    """Return the name and the arguments of a call; empty where it does not say."""
    inner = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(inner, dict):
        return "", ""
    name, arguments = inner.get("name"), inner.get("arguments", inner.get("input", ""))
    return str(name or ""), arguments if isinstance(arguments, str) else dump_json(arguments)


def _format_messages(messages: Sequence[Message]) -> str:
    """Return messages for people, as lines of `role: text`."""
    return "\n".join(f"{_clean(message['role'])}: {_message_text(message)}" for message in messages)


def _message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, then its calls as `name(arguments)`."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else []
    if isinstance(content, list):
        parts = [text for part in content if (text := _part(part))]
    elif content is not None and not isinstance(content, str):
        parts = [dump_json(content)]
    parts += ["{}({})".format(*_call(call)) for call in _calls(message)]
    return _clean("\n".join(parts))


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") == "tool_use":
        return ""
    text = part.get("text")
    if part.get("type") == "tool_result" and "content" in part:
        return _message_text({"content": part["content"]})
    return text if isinstance(text, str) else f"[{part.get('type', 'part')}]"


def _clean(text: str) -> str:
    """Return a text that every engine can show; the JSON beside it has it as it was."""
    if not is_encodable(text):
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")
