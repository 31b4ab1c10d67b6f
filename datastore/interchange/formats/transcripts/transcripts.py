"""Transcripts: dialogues of chat and tool use as JSON or JSON lines, one row a generated turn.

Nothing in them is run: calls of tools are kept as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Text
from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.interchange.formats.format import Reading, ReadOptions, Written
from replaylake.datastore.interchange.formats.tabular.reading import Declared, TabularReading
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, Tables
from replaylake.datastore.interchange.formats.transcripts.dialogues import (
    GENERATED,
    dialogues_of,
    is_transcript,
)
from replaylake.datastore.interchange.formats.transcripts.json_values import (
    MAX_VALUE_CHARS,
    JsonValue,
    dumped,
    json_values,
)
from replaylake.datastore.interchange.formats.transcripts.rows import (
    FIELDS,
    ROW_SCHEMA,
    empty_row,
    record_of,
    rows_of,
)
from replaylake.datastore.interchange.sources.source import SourceFile

_CHUNK_CHARS: Final = 8 << 20
# What a first look at a file reads at most, when its format is asked for.
_LOOK_CHARS: Final = 8 << 20
_NOTE_EXAMPLES: Final = 3


class TranscriptTables(Tables):
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
                found, fault = _dialogues(value, file, ids)
                if fault is not None:
                    damage[len(rows)] = fault
                for turns in found:
                    if not turns:
                        silent.append(f"{file.name} line {value.line}")
                    unsaid += _num_unsaid(value, turns)
                    rows += turns
                    num_rows += len(turns)
                    num_chars += sum(map(_num_chars, turns))
                if num_chars > _CHUNK_CHARS:
                    yield Chunk(file, first_row, _table(rows), damage)
                    first_row += len(rows)
                    rows, num_chars, damage = [], 0, {}
            yield Chunk(file, first_row, _table(rows), damage)
        self.notes[:] = [*_silence(silent), *ids.notes(), *_unsaid(unsaid)]
        if silent and not num_rows:
            raise SourceInvalid(
                f"{silent[0]}: found no turn of an assistant in any of {len(silent)} transcripts, "
                f"expected a message of role {', '.join(sorted(GENERATED))}: a row is such a turn. "
                "Rename the role of those that the policy said."
            )


class TranscriptsFormat:
    """OpenAI's messages, ShareGPT's conversations, prompts and completions, tau-bench's results."""

    name = "transcripts"
    about = "dialogues of chat and tool use: messages as JSON or JSON lines, tau-bench's results"
    is_folder = False
    suffix = ".jsonl"

    def recognises(self, files: Sequence[SourceFile]) -> bool:
        if files[0].head(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] not in (b"{", b"["):
            return False
        try:
            first = next(_values(files[0], _LOOK_CHARS), None)
        except SourceInvalid:
            return False
        return first is not None and is_transcript(first.value)

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> Reading:
        tables = TranscriptTables(files)
        declared = Declared(
            fields=FIELDS,
            spaces=None if {*FIELDS} & options.mapping.keys() else (Text(), Text()),
            notes=tables.notes,
            rewards_optional=True,
            observed=FIELDS["observation"],
        )
        return TabularReading(tables, options, files[0].name, declared)

    def write(self, episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> Written:
        """Write a line for each dialogue; the episodes of its agents come one after the other.

        Raises: SpaceUnsupported for steps that are no transcripts.
        """
        num_episodes = num_steps = num_later = 0
        with path.open("x", encoding="utf-8", newline="\n") as file:
            for _, several in groupby(episodes, lambda episode: episode.episode_id):
                agents = list(several)
                file.write(dumped(record_of(agents)) + "\n")
                num_episodes += len(agents)
                num_steps += sum(map(len, agents))
                num_later += sum(episode.first_step > 0 for episode in agents)
        notes = (f"{num_later} begin within a dialogue: what was said before is left out",)
        return Written(num_episodes, num_steps, notes if num_later else ())


class _EpisodeIds:
    """Gives each dialogue an id of its own: the record's, or its number in the source."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._number = 0
        self._reused: list[str] = []

    def next(self, given: str | None) -> str:
        self._number += 1
        wanted = str(self._number - 1) if given is None else given
        name = wanted
        while name in self._counts:
            self._counts[wanted] += 1
            name = f"{wanted}#{self._counts[wanted]}"
        self._counts[name] = 1
        if name != wanted:
            self._reused.append(wanted)
        return name

    def notes(self) -> list[str]:
        if not self._reused:
            return []
        first = self._reused[0]
        return [
            f"{len(self._reused)} transcripts have the id of one before them, such as {first}: "
            f"they are {first}#2 and so on"
        ]


def _values(file: SourceFile, max_chars: int = MAX_VALUE_CHARS) -> Iterator[JsonValue]:
    """Read a file's records, whether it is an array of them, or lines, also of lists of messages.

    Raises: SourceInvalid.
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
        dialogues = dialogues_of(value.value)
        return [[*rows_of(one, ids.next(one.episode_id))] for one in dialogues], None
    except (SourceInvalid, RecursionError, ValueError) as error:
        return [[empty_row(ids.next(None))]], _malformed(value, file, error)


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, ROW_SCHEMA)


def _malformed(value: JsonValue, file: SourceFile, error: Exception) -> str:
    """Return what is wrong with a record, after the name of the check."""
    found = error if isinstance(error, SourceInvalid) else f"found {error}"
    return f"malformed\0{file.name} record {value.number} (line {value.line}): {found}"


def _num_chars(row: Mapping[str, Any]) -> int:
    return sum(len(value) for value in row.values() if isinstance(value, str))


def _num_unsaid(value: JsonValue, turns: Sequence[dict[str, Any]]) -> int:
    if not isinstance(value.value, dict) or "messages_display" not in value.value:
        return 0
    return sum('"content":null' in row["completion_messages"] for row in turns)


def _silence(places: Sequence[str]) -> list[str]:
    if not places:
        return []
    more = ", ..." if len(places) > _NOTE_EXAMPLES else ""
    return [
        f"{len(places)} transcripts have no turn of an assistant, and so no step: left out "
        f"({', '.join(places[:_NOTE_EXAMPLES])}{more})"
    ]


def _unsaid(num: int) -> list[str]:
    if not num:
        return []
    return [f"{num} turns are calls of tools that the log shows as None: name and arguments lost"]
