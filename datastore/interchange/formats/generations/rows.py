"""Rows: the form in which logs of language agents are read, one row for each generation.

A row has the observation since the generation before it, and the output of the model, each as
messages, as text, and, if the log has them, as token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes import tokens
from replaylake.datastore.episodes.message_media import COMPLETION_MESSAGES as COMPLETION_MESSAGES
from replaylake.datastore.episodes.message_media import FINAL_MESSAGES as FINAL_MESSAGES
from replaylake.datastore.episodes.message_media import PROMPT_MESSAGES as PROMPT_MESSAGES
from replaylake.datastore.episodes.spaces import Array, Text
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.generations.json_values import dump_json
from replaylake.datastore.interchange.formats.generations.messages import (
    GIVEN,
    NONE,
    Message,
    clean_text,
    find_calls,
    format_message,
    format_messages,
    parse_call,
    shorten,
)
from replaylake.datastore.interchange.formats.tabular.fields import ALIASES
from replaylake.datastore.interchange.formats.tabular.reader import Declaration, TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, TableSource
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import format_names

Row = dict[str, Any]

_CHUNK_BYTES: Final = 16 << 20
# Maximum bytes of a line: 8 values for each of 256k tokens, at 20 characters a value.
_MAX_LINE_BYTES: Final = 64 << 20
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
ACTION_ADVANTAGES: Final = "action_advantages"
ACTION_ENTROPIES: Final = "action_entropies"
REWARD_COMPONENTS: Final = "reward_components"
_COMPONENT: Final = pa.struct(
    [("name", pa.string()), ("score", pa.float64()), ("weight", pa.float64())]
)
# With the columns that only some logs have; one without a value is left out of a table.
GENERATION_SCHEMA: Final = pa.schema(
    {
        **{field.name: field.type for field in ROW_SCHEMA},
        "policy_version": pa.int64(),
        "timestamp": pa.timestamp("us", "UTC"),
        **tokens.TOKEN_TYPES,
        ACTION_ADVANTAGES: tokens.TOKEN_TYPES[tokens.ACTION_LOG_PROBS],
        ACTION_ENTROPIES: tokens.TOKEN_TYPES[tokens.ACTION_LOG_PROBS],
        REWARD_COMPONENTS: pa.list_(pa.field("element", _COMPONENT)),
        "advantage": pa.float64(),
        "finish_reason": pa.string(),
        "sampling": pa.string(),
        "train_step": pa.int64(),
        "split": pa.string(),
    }
)
_KEPT: Final = frozenset(ROW_SCHEMA.names) | ALIASES.keys()
# The texts for people are a step's observation and action.
FIELDS: Final = {
    "observation": "prompt_text",
    "final_observation": "final_text",
    "action": "completion_text",
}
_KINDS: Final = {
    "reward": (pa.float64(), int | float, "a number"),
    "behavior_log_prob": (pa.float64(), int | float, "a number"),
    "behavior_prob": (pa.float64(), int | float, "a number"),
    "step": (pa.int64(), int, "a whole number"),
    "env_step": (pa.int64(), int, "a whole number"),
    "policy_version": (pa.int64(), int, "a whole number"),
    "terminated": (pa.bool_(), bool, "true or false"),
    "truncated": (pa.bool_(), bool, "true or false"),
}
# Values of the rows before the last one of a trajectory.
_AT_END: Final[Mapping[str, Any]] = {"reward": 0.0, "terminated": False, "truncated": False}
_UNSTORABLE: Final = (OverflowError, TypeError, ValueError, pa.ArrowException)
_MAX_INT64: Final = 2**63
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_PATTERN: Final = re.compile(r"[,*?\[]")


class EpisodeIds:
    """Assigns each episode a unique id: the record's, or its number in the source."""

    def __init__(self, what: str = "transcripts") -> None:
        self._what = what
        self._counts: dict[str, int] = {}
        self._number = 0
        self._duplicates: list[str] = []

    def next(self, own_id: str | None) -> str:
        """Return the id of the following episode."""
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
        """Return a note on ids that occur more than once."""
        if not self._duplicates:
            return []
        first = self._duplicates[0]
        return [
            f"{len(self._duplicates)} {self._what} have the id of one before them, such as "
            f"{first}: they are {first}#2 and so on"
        ]


@dataclass(frozen=True)
class Record:
    """A record of a file: its rows; for a malformed one an empty row, and what is wrong with it.

    line: the line that it begins in, from 1; in files that are not text, its number. num_bytes: the
    approximate memory of its rows.
    """

    rows: Sequence[Row]
    line: int
    num_bytes: int
    fault: str | None = None


class RecordTables(TableSource):
    """Rows of the records of some files, which a format's class reads; `notes` are of that reading.

    paths: the paths that the mapping takes from a record. unit: what `Record.line` counts. noun:
    what notes call the episodes.
    """

    unit = "line"
    noun = "samples"

    def __init__(self, files: Sequence[SourceFile], options: ReadOptions) -> None:
        self._files = files
        self.paths = MappedPaths(options)
        self.notes: list[str] = []
        self._ids = EpisodeIds(self.noun)

    def begin(self) -> None:
        """Forget what a reading has counted, before the next one."""
        self._ids = EpisodeIds(self.noun)

    def records(self, file: SourceFile, number: int) -> Iterator[Record]:
        """Read a file, whose number in the source is given. Raises: SourceInvalidError."""
        raise NotImplementedError

    def finish(self) -> Sequence[str]:
        """Return the notes of a whole reading."""
        return ()

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        self.begin()
        for number, file in enumerate(self._files):
            file.check_unchanged()
            records: list[Record] = []
            first_row = num_bytes = 0
            for record in self.records(file, number):
                records.append(record)
                num_bytes += record.num_bytes
                if num_bytes > _CHUNK_BYTES:
                    yield self._to_chunk(file, first_row, records)
                    first_row += sum(len(one.rows) for one in records)
                    records, num_bytes = [], 0
            yield self._to_chunk(file, first_row, records)
        self.paths.refuse_missing(self._files[0].name)
        self.notes[:] = self.finish()

    def _to_chunk(self, file: SourceFile, first_row: int, records: Sequence[Record]) -> Chunk:
        try:
            table = self._to_table([row for record in records for row in record.rows])
        except _UNSTORABLE:
            # A value has the right type and does not fit its column: only its record is rejected.
            records = [self._check_storable(record) for record in records]
            table = self._to_table([row for record in records for row in record.rows])
        damage: dict[int, str] = {}
        lines: list[int] = []
        for record in records:
            if record.fault is not None:
                where = f"{file.name} {self.unit} {record.line}"
                damage[len(lines)] = f"malformed\0{where}: {record.fault}"
            lines += [record.line] * len(record.rows)
        is_text = self.unit == "line"
        return Chunk(file, first_row, table, damage, lines=lines if is_text else ())

    def _check_storable(self, record: Record) -> Record:
        try:
            self._to_table(record.rows)
        except _UNSTORABLE as error:
            return replace(record, rows=[empty_row(record.rows[0]["episode_id"])], fault=str(error))
        return record

    def _to_table(self, rows: Sequence[Row]) -> pa.Table:
        arrays, names = [], []
        self.paths.set_group_source(rows)
        for field in GENERATION_SCHEMA:
            if field.name in self.paths.replaced:
                continue
            values = [row.get(field.name) for row in rows]
            if field.name in _KEPT or any(value is not None for value in values):
                arrays.append(pa.array(values, field.type))
                names.append(field.name)
        for name, kind in self.paths.kinds.items():
            values = [row.get(name) for row in rows]
            arrays.append(_to_array(values) if kind is None else pa.array(values, kind))
            names.append(name)
        return pa.Table.from_arrays(arrays, names=names)


class MappedPaths:
    """The paths into a record that a mapping names where it names no column, such as extra.score.

    A part of a path is a key, or an element's number in a list. kinds: the Arrow type of each path,
    None where the values decide it. replaced: the columns whose place they take.
    """

    def __init__(self, options: ReadOptions) -> None:
        own = {*GENERATION_SCHEMA.names}
        self._mapping = {
            ours: theirs
            for ours, theirs in options.mapping.items()
            # Several columns, or a pattern of some, are no path.
            if theirs not in own and not _PATTERN.search(theirs)
        }
        self._found: set[str] = set()
        self.replaced = frozenset(own & self._mapping.keys())
        self.kinds = {
            theirs: pa.string() if ours in ALIASES and ours not in _KINDS else _kind_of(ours)
            for ours, theirs in self._mapping.items()
        }

    def get(self, ours: str) -> str | None:
        """Return the path that the mapping takes one of our fields from; None if it is a column."""
        return self._mapping.get(ours)

    def find(self, roots: Mapping[str, Any]) -> Row:
        """Return the values of all paths in one record.

        roots: the object that the rest of a path leads into, by the first part of the path; "" is
        that of all other paths. Raises: SourceInvalidError for a value of the wrong type.
        """
        values: Row = {}
        for ours, path in self._mapping.items():
            first, _, rest = path.partition(".")
            is_rooted = bool(first) and first in roots and rest
            value = _follow(roots[first], rest) if is_rooted else _follow(roots[""], path)
            if value is None:
                continue
            self._found.add(path)
            values[path] = _check_kind(value, ours, path)
        return values

    def apply(self, rows: Sequence[Row], values: Row) -> None:
        """Set in all rows of a trajectory the values that belong to the whole trajectory.

        A reward or an end is set in the last row; rows before it have 0 or False.
        """
        at_end = {self._mapping.get(ours): before for ours, before in _AT_END.items()}
        for path, value in values.items():
            for row in rows:
                row[path] = value
            if path in at_end:
                for row in rows[:-1]:
                    row[path] = at_end[path]

    def set_group_source(self, rows: Sequence[Row]) -> None:
        """State in rows whether the mapping gave them a group, if it maps one."""
        if (group := self.get("group_id")) is not None:
            for row in rows:
                row["group_id_source"] = NONE if row.get(group) is None else GIVEN

    def refuse_missing(self, where: str) -> None:
        """Refuse a path that no record had. Raises: SourceInvalidError."""
        for ours, path in self._mapping.items():
            if path not in self._found:
                raise SourceInvalidError(
                    f"{where}: found the columns {format_names(GENERATION_SCHEMA.names)}, and no "
                    f"record with {path!r}, which the mapping {ours}={path} names. Correct "
                    "`mapping`."
                )


def read_generations(
    tables: TableSource,
    notes: Sequence[str],
    files: Sequence[SourceFile],
    options: ReadOptions,
) -> TabularReader:
    """Return the reader of tables of such rows, whose observations and actions are texts.

    notes: notes for the receipt, complete after all files were read.
    """
    return TabularReader(tables, options, files[0].name, declare_generations(options, notes))


def declare_generations(options: ReadOptions, notes: Sequence[str] = ()) -> Declaration:
    """Return the declaration of such rows, which is known without reading them."""
    return Declaration(
        fields=FIELDS,
        spaces=None if {*FIELDS} & options.mapping.keys() else (Text(), Text()),
        notes=notes,
        rewards_optional=True,
        observed=FIELDS["observation"],
    )


def iter_lines(file: SourceFile) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers from 1. Raises: SourceInvalidError."""
    with file.open() as stream:
        line = 0
        while text := stream.readline(_MAX_LINE_BYTES):
            line += 1
            if len(text) == _MAX_LINE_BYTES:
                raise SourceInvalidError(
                    f"{file.name} line {line}: found more than {_MAX_LINE_BYTES >> 20} MiB, "
                    "expected one sample a line."
                )
            if text.strip():
                yield line, text


def read_first_line(file: SourceFile) -> Any:
    """Return the value in a file's first line; None if that is no JSON, or too long."""
    if file.head(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        with file.open() as stream:
            return json.loads(stream.readline(_MAX_LINE_BYTES))
    except (SourceInvalidError, RecursionError, ValueError):
        return None


def parse_line(text: bytes, make_rows: Callable[[dict[str, Any]], Sequence[Row]]) -> Sequence[Row]:
    """Return the rows made from the object in a line.

    Raises: SourceInvalidError with the value found, for anything that is wrong in it.
    """
    try:
        record = json.loads(text)
        if not isinstance(record, dict):
            raise SourceInvalidError(f"found {type(record).__name__}, expected an object")
        return make_rows(record)
    # Also for texts that are not valid Unicode, and numbers that no column holds.
    except (OverflowError, RecursionError, ValueError, pa.ArrowException) as error:
        raise SourceInvalidError(str(error)) from error


def describe_generation(
    prompt: Sequence[Message], message: Message | None, final: Sequence[Message] = ()
) -> Row:
    """Return the texts and messages of a generation, for a row.

    message: what was generated; None where nothing was. final: what came after an agent's last one.
    """
    calls = find_calls(message) if message is not None else []
    return {
        "prompt_text": format_messages(prompt),
        "final_text": format_messages(final) if final else None,
        "completion_text": "" if message is None else format_message(message),
        "role": None if message is None else clean_text(message["role"]),
        PROMPT_MESSAGES: dump_json(prompt),
        COMPLETION_MESSAGES: dump_json([] if message is None else [message]),
        FINAL_MESSAGES: dump_json(final) if final else None,
        "tool_name": next((clean_text(name) for name, _ in map(parse_call, calls) if name), None),
        "tool_calls": dump_json(calls) if calls else None,
    }


def empty_row(episode_id: str) -> Row:
    """Return a row that stands for a record of which nothing could be read."""
    row = {"episode_id": episode_id, "agent_id": "", "step": 0, "env_step": 0}
    texts = ("prompt_text", "completion_text", PROMPT_MESSAGES, COMPLETION_MESSAGES)
    ends = {"terminated": False, "truncated": False}
    return {**dict.fromkeys(ROW_SCHEMA.names), **row, **dict.fromkeys(texts, ""), **ends}


def measure_row(row: Mapping[str, Any]) -> int:
    """Return the approximate bytes of a row."""
    return sum(
        len(value) if isinstance(value, str) else value.nbytes
        for value in row.values()
        if isinstance(value, str | np.ndarray)
    )


def find_new_tokens(prompt: Array, read: Array, sampled: Array) -> int:
    """Return the position of the first new id of a prompt; 0 if it does not repeat a generation.

    read, sampled: the ids of that generation's prompt, and those that it sampled.
    """
    end = len(read) + len(sampled)
    is_prefix = np.array_equal(prompt[: len(read)], read)
    return end if is_prefix and np.array_equal(prompt[len(read) : end], sampled) else 0


def read_step(value: Any, name: str) -> int:
    """Return the number of a training step. Raises: SourceInvalidError for what is none."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not -_MAX_INT64 <= value < _MAX_INT64:
        raise SourceInvalidError(
            f"{name}: found {shorten(value)}, expected a whole number in 64 bits"
        )
    return int(value)


def read_ids(value: Any, name: str) -> Array:
    """Return token ids, int32 [N]. Raises: SourceInvalidError for what is no list of ids."""
    ids = _to_numbers(value, name, "a list of token ids", "iu")
    if (outside := (ids < 0) | (ids >= 2**31)).any():
        raise SourceInvalidError(
            f"{name}: found {ids[outside][0]}, expected ids of 0 or more, in 32 bits"
        )
    return ids.astype(np.int32)


def read_floats(value: Any, name: str, num: int) -> Array:
    """Return one number for each of `num` tokens, float32 [num]. Raises: SourceInvalidError."""
    values = _to_numbers(value, name, f"{num} numbers, one for each token", "iuf")
    if len(values) != num:
        raise SourceInvalidError(
            f"{name}: found {len(values)} numbers, expected {num}, one for each token"
        )
    with np.errstate(over="ignore"):  # values out of range become infinite, and are refused
        return values.astype(np.float32)


def read_flags(value: Any, name: str, num: int) -> Array:
    """Return a flag for each of `num` tokens, bool [num]. Raises: SourceInvalidError."""
    values = _to_numbers(value, name, f"{num} flags, one for each token", "biuf")
    if len(values) != num or not np.isin(values, (0, 1)).all():
        raise SourceInvalidError(
            f"{name}: found {shorten(value)}, expected {num} flags, one for each token"
        )
    return values.astype(np.bool_)


def _to_numbers(value: Any, name: str, expected: str, kinds: str) -> Array:
    if value == []:
        return np.zeros(0, np.int64)
    try:
        values = np.asarray(value) if isinstance(value, list | np.ndarray) else np.asarray("")
    except ValueError:  # for lists of different lengths
        values = np.asarray("")
    if values.ndim != 1 or values.dtype.kind not in kinds:
        raise SourceInvalidError(f"{name}: found {shorten(value)}, expected {expected}")
    return values


def _kind_of(ours: str) -> pa.DataType | None:
    return _KINDS[ours][0] if ours in _KINDS else None


def _follow(value: Any, path: str) -> Any:
    """Return the value at a path in an object, whose keys may have dots; None if there is none."""
    if isinstance(value, dict):
        if path in value:
            return value[path]
        for end in range(1, len(path)):
            if path[end] == "." and path[:end] in value:
                found = _follow(value[path[:end]], path[end + 1 :])
                if found is not None:
                    return found
    if isinstance(value, list):
        first, _, rest = path.partition(".")
        if first.isdecimal() and first.isascii() and int(first) < len(value):
            return _follow(value[int(first)], rest) if rest else value[int(first)]
    return None


def _check_kind(value: Any, ours: str, path: str) -> Any:
    if ours not in _KINDS:
        if isinstance(value, str):
            return clean_text(value)
        return dump_json(value) if ours in ALIASES or ours == "group_id" else value
    kind, python, expected = _KINDS[ours]
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        # verl writes NumPy numbers as text.
        value = float(value) if pa.types.is_floating(kind) else value
    is_flag = isinstance(value, bool)
    is_fitting = isinstance(value, python) and is_flag == pa.types.is_boolean(kind)
    if not is_fitting or (isinstance(value, int) and abs(value) >= _MAX_INT64):
        raise SourceInvalidError(f"{path}: found {shorten(value)}, expected {expected}")
    return float(value) if pa.types.is_floating(kind) else value


def _to_array(values: Sequence[Any]) -> pa.Array:
    """Return values as numbers or flags, where all of them are; else as text."""
    known = [value for value in values if value is not None]
    for kinds in (bool, int, int | float):
        is_flag = kinds is bool
        if known and all(isinstance(v, kinds) and isinstance(v, bool) == is_flag for v in known):
            try:
                return pa.array(values)
            except (OverflowError, pa.ArrowException):
                break
    texts = [v if v is None or isinstance(v, str) else dump_json(v) for v in values]
    return pa.array(texts, pa.string())
