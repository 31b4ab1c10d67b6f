"""Transcripts: dialogues of chat and tool use, one row a generated turn: JSON (lines) or Parquet.

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
from replaylake.datastore.errors import SourceInvalidError, SpaceUnsupportedError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader, WriteResult
from replaylake.datastore.interchange.formats.generations.json_values import (
    MAX_VALUE_CHARS,
    JsonValue,
    dump_json,
    json_values,
)
from replaylake.datastore.interchange.formats.generations.messages import Message, clean_text
from replaylake.datastore.interchange.formats.generations.rows import (
    COMPLETION_MESSAGES,
    EXTRAS,
    FINAL_MESSAGES,
    PROMPT_MESSAGES,
    ROW_SCHEMA,
    EpisodeIds,
    describe_generation,
    empty_row,
    read_generations,
)
from replaylake.datastore.interchange.formats.generic.parquet import is_parquet, parquet_schema
from replaylake.datastore.interchange.formats.generic.parquet_values import (
    drop_nulls,
    read_row,
    to_json_value,
)
from replaylake.datastore.interchange.formats.generic.parquet_values import (
    iter_rows as iter_table_rows,
)
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, TableSource
from replaylake.datastore.interchange.formats.transcripts.dialogues import (
    GENERATED,
    Dialogue,
    is_generated,
    is_run_of_simulations,
    is_transcript,
    list_simulations,
    parse_dialogues,
)
from replaylake.datastore.interchange.sources.source import SourceFile

_CHUNK_CHARS: Final = 8 << 20
# What a first look at a file reads at most, when its format is asked for.
_LOOK_CHARS: Final = 8 << 20
_HEAD_BYTES: Final = 1 << 16
_RUN_FIELDS: Final = (b'"num_trials"', b'"agent_info"', b'"environment_info"')
_NOTE_EXAMPLES: Final = 3
# An example of what a column of Parquet may hold.
_EXAMPLES: Final[Mapping[str, Any]] = {
    "text": "a",
    "texts": ["a"],
    "role": [{"role": "user", "content": "a"}],
    "from": [{"from": "human", "value": "a"}],
    "other": 0,
}
_CONSTANT: Final = ("group_id", "group_id_source", "sample_id", "source_framework", "status")


class TranscriptTables(TableSource):
    """Rows of the dialogues of some files; `notes` are of the last whole reading."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self.notes: list[str] = []

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        ids = EpisodeIds()
        unused: list[str] = []
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
                        place = f"line {value.line}" if value.line else f"row {value.number}"
                        unused.append(f"{file.name} {place}")
                    unsaid += _count_lost_calls(value, turns)
                    rows += turns
                    num_rows += len(turns)
                    num_chars += sum(map(_num_chars, turns))
                if num_chars > _CHUNK_CHARS:
                    yield Chunk(file, first_row, _table(rows), damage)
                    first_row += len(rows)
                    rows, num_chars, damage = [], 0, {}
            yield Chunk(file, first_row, _table(rows), damage)
        self.notes[:] = [
            *_note_without_steps(unused),
            *ids.notes(),
            *_lost_call_notes(unsaid),
        ]
        if unused and not num_rows:
            raise SourceInvalidError(
                f"{unused[0]}: found no turn of an assistant in any of {len(unused)} transcripts, "
                f"expected a message of role {', '.join(sorted(GENERATED))}: each row is such a "
                "turn. Rename the role of the policy's messages."
            )


class TranscriptsFormat:
    """OpenAI's messages, ShareGPT's conversations, prompts and completions, tau-bench's results."""

    name = "transcripts"
    about = (
        "dialogues of chat and tool use: messages as JSON (lines) or Parquet; tau-bench's results"
    )
    is_folder = False
    suffix = ".jsonl"

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        if is_parquet(files[0]):
            return _is_dialogue_table(files[0])
        if files[0].head(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] not in (b"{", b"["):
            return False
        try:
            first = next(json_values(files[0], max_chars=_LOOK_CHARS), None)
            if first is not None and is_run_of_simulations(first.value):
                return True
            first = next(_values(files[0], _LOOK_CHARS), None)
        except SourceInvalidError:
            # Too long for a look: a run of tau2-bench is one value.
            head = files[0].head(_HEAD_BYTES)
            return all(name in head for name in _RUN_FIELDS)
        return first is not None and is_transcript(first.value)

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        tables = TranscriptTables(files)
        return read_generations(tables, tables.notes, files, options)

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


def _values(file: SourceFile, max_chars: int = MAX_VALUE_CHARS) -> Iterator[JsonValue]:
    """Read a file's records, whether it is an array of them, or lines, also of lists of messages.

    Raises: SourceInvalidError.
    """
    if is_parquet(file):
        return _parquet_values(file)
    first = next(json_values(file, max_chars=max_chars), None)
    # An array whose elements are messages is a record itself.
    is_lists = first is not None and _is_bare_message(first.value)
    return _iter_records(json_values(file, as_lines=is_lists, max_chars=max_chars))


def _iter_records(values: Iterator[JsonValue]) -> Iterator[JsonValue]:
    """Yield values, those that are runs of simulations as one value for each of these."""
    for value in values:
        if is_run_of_simulations(value.value):
            for number, one in enumerate(list_simulations(value.value)):
                yield JsonValue(number, value.line, one)
        else:
            yield value


def _parquet_values(file: SourceFile) -> Iterator[JsonValue]:
    """Read rows as records; they are numbered, and stand in no line."""
    for number, row in enumerate(iter_table_rows(file)):
        try:
            value = {k: v for k, v in read_row(row).items() if v is not None}
        except (OverflowError, SourceInvalidError, ValueError, pa.ArrowException) as error:
            yield JsonValue(number, 0, None, str(error))
        else:
            plain = to_json_value(drop_nulls(value))
            yield JsonValue(number, 0, {k: _with_content(v) for k, v in plain.items()})


def _with_content(value: Any) -> Any:
    """Return messages with the content that each has in JSON, if only as null."""
    if not isinstance(value, list):
        return value
    return [
        {"content": None, **one} if isinstance(one, dict) and "role" in one else one
        for one in value
    ]


def _is_dialogue_table(file: SourceFile) -> bool:
    """Whether a Parquet file has a column of messages, or of prompts and answers, and no actions.

    Tables of steps may have a column of messages besides.
    """
    try:
        schema = parquet_schema(file)
    except SourceInvalidError:
        return False
    # A record with an example of each column: of messages, of text, or of something else.
    record = {field.name: _EXAMPLES.get(_kind_of(field.type)) for field in schema}
    return is_transcript({name: value for name, value in record.items() if value is not None})


def _kind_of(kind: pa.DataType) -> str:
    """Return whether a column is of texts, of messages by role or by speaker, or of others."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "text"
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return "other"
    inner = kind.value_type
    if not pa.types.is_struct(inner):
        return "texts" if _kind_of(inner) == "text" else "other"
    names = {inner.field(i).name for i in range(inner.num_fields)}
    if {"role", "content"} <= names:
        return "role"
    return "from" if {"from", "value"} <= names else "other"


def _is_bare_message(value: Any) -> bool:
    return isinstance(value, dict) and not is_transcript(value) and is_transcript([value])


def _dialogues(
    value: JsonValue, file: SourceFile, ids: EpisodeIds
) -> tuple[list[list[dict[str, Any]]], str | None]:
    """Return the rows of each dialogue of a record; for a malformed one an empty row, and why."""
    try:
        if value.fault is not None:
            raise SourceInvalidError(value.fault)
        dialogues = parse_dialogues(value.value)
        return [[*iter_rows(one, ids.next(one.episode_id))] for one in dialogues], None
    except (SourceInvalidError, RecursionError, ValueError) as error:
        return [[empty_row(ids.next(None))]], _describe_malformed(value, file, error)


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, ROW_SCHEMA)


def _describe_malformed(value: JsonValue, file: SourceFile, error: Exception) -> str:
    """Return what is wrong with a record, after the name of the check."""
    found = error if isinstance(error, SourceInvalidError) else f"found {error}"
    return f"malformed\0{file.name} {_place(value)}: {found}"


def _place(value: JsonValue) -> str:
    where = f"record {value.number} (line {value.line})"
    return where if value.line else f"row {value.number}"


def _num_chars(row: Mapping[str, Any]) -> int:
    return sum(len(value) for value in row.values() if isinstance(value, str))


def _count_lost_calls(value: JsonValue, turns: Sequence[dict[str, Any]]) -> int:
    if not isinstance(value.value, dict) or "messages_display" not in value.value:
        return 0
    return sum('"content":null' in row["completion_messages"] for row in turns)


def _note_without_steps(places: Sequence[str]) -> list[str]:
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
        is_last = lasts[agent] == number
        yield {
            "episode_id": episode_id,
            "agent_id": agent,
            "step": counts[agent],
            "env_step": number,
            **describe_generation(prompt, message, final),
            "reward": dialogue.rewards[number],
            "terminated": is_last and dialogue.terminated,
            "truncated": is_last and dialogue.truncated,
            "policy": dialogue.model,
            "group_id": dialogue.group_id,
            "group_id_source": dialogue.group_id_source,
            "sample_id": dialogue.sample_id,
            "source_framework": dialogue.framework,
            "status": dialogue.status,
            "metadata": dump_json(dialogue.metadata) if dialogue.metadata and not number else None,
        }


def make_record(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return one dialogue's record, with `messages` whole, from the episodes of its agents.

    `iter_rows` makes the same episodes from it. Raises: SpaceUnsupportedError for episodes
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
    return clean_text(name) if isinstance(name, str) else ""
