"""tinker-cookbook: its capture store, a SQLite file with a row for each sampled sequence.

The rows of a trajectory have the same run, attempt, split, iteration, group and number in the
group; each repeats the history in its prompt.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.episodes import tokens
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.generations.json_values import dump_json
from replaylake.datastore.interchange.formats.generations.messages import (
    GIVEN,
    NONE,
    clean_text,
    shorten,
)
from replaylake.datastore.interchange.formats.generations.rows import (
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
from replaylake.datastore.interchange.sources.source_errors import unreadable_error

_MAGIC: Final = b"SQLite format 3\0"
_TABLE: Final = "wire_rows"
_ANNOTATIONS: Final = "annotations"
# Maximum bytes of one text: a prompt of 8 million ids.
_MAX_TEXT_BYTES: Final = 64 << 20
# Columns that identify a trajectory; `sample_idx` numbers several answers to one prompt.
_KEY: Final = (
    "run_id",
    "run_attempt",
    "split",
    "iteration",
    "group_idx",
    "traj_idx",
    "purpose",
    "sample_idx",
)
_GROUP: Final = ("run_id", "run_attempt", "split", "iteration", "group_idx")
_VALUES: Final = (
    "cursor",
    "sampling_session_id",
    "seq_id",
    "policy_version",
    "created_at",
    "prompt_tokens",
    "sampled_tokens",
    "logprobs",
    "metadata",
)
_JSON: Final = ("prompt_tokens", "sampled_tokens", "logprobs", "metadata")
# Columns that become columns of the dataset; all others are metadata.
_USED: Final = frozenset(("policy_version", "created_at", *_JSON))
# Raised for damaged files; also if a message of SQLite quotes bytes that are not text.
_STORE_ERRORS: Final = (sqlite3.Error, OverflowError, UnicodeDecodeError)
# A column of SQLite holds values of any type.
_ROW_ERRORS: Final = (OverflowError, RecursionError, SourceInvalidError, TypeError, ValueError)


class TinkerFormat:
    """SQLite files with the table wire_rows."""

    name = "tinker"
    about = "tinker-cookbook's capture store (SQLite): prompts, sampled ids and log-probs"
    is_folder = False

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        if files[0].head(len(_MAGIC)) != _MAGIC:
            return False
        try:
            with closing(_open(files[0])) as connection:
                return {*_KEY, *_VALUES} <= _find_columns(connection)
        except _STORE_ERRORS:
            return False

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        tables = _WireTables(files, options)
        return read_generations(tables, tables.notes, files, options)


class _WireTables(RecordTables):
    """Rows of the trajectories in some stores."""

    unit = "row"
    noun = "trajectories"

    def __init__(self, files: Sequence[SourceFile], options: ReadOptions) -> None:
        super().__init__(files, options)
        self._num_annotations = 0

    def begin(self) -> None:
        super().begin()
        self._num_annotations = 0

    def records(self, file: SourceFile, number: int) -> Iterator[Record]:
        try:
            with closing(_open(file)) as connection:
                if not {*_KEY, *_VALUES} <= _find_columns(connection):
                    raise SourceInvalidError(
                        f"{file.name}: found no table {_TABLE} with the columns of a capture "
                        "store, expected it as tinker-cookbook writes it. Leave the file out."
                    )
                self._num_annotations += _count_rows(connection, _ANNOTATIONS)
                names = (*_KEY, *_VALUES)
                # Their numbers within a session are random; times are those of the calls.
                order = ", ".join((*_KEY, "created_at", "cursor"))
                found = connection.execute(
                    f"SELECT {', '.join(names)} FROM {_TABLE} ORDER BY {order}"
                )
                values = (dict(zip(names, row, strict=True)) for row in found)
                for _, several in groupby(values, _find_key):
                    yield self._read_trajectory(list(several))
        except _STORE_ERRORS as error:
            raise unreadable_error(file.name, error) from error

    def finish(self) -> Sequence[str]:
        notes = self._ids.notes()
        if self._num_annotations:
            notes.append(f"{self._num_annotations} annotations of the store are not read")
        return notes

    def _read_trajectory(self, values: Sequence[dict[str, Any]]) -> Record:
        place = values[0]["cursor"]
        try:
            rows = self._make_rows(values)
        except _ROW_ERRORS as error:
            return Record([empty_row(self._ids.next(None))], place, 0, str(error))
        return Record(rows, place, sum(map(measure_row, rows)))

    def _make_rows(self, values: Sequence[dict[str, Any]]) -> list[Row]:
        first = values[0]
        group = None
        if first["group_idx"] is not None:
            group = "/".join(str(first[name]) for name in _GROUP)
        rows: list[Row] = []
        before: tuple[Array, Array] | None = None
        for number, wire in enumerate(values):
            value = {**wire, **{name: _read_json(wire, name) for name in _JSON}}
            prompt = read_ids(value["prompt_tokens"], "prompt_tokens")
            sampled = read_ids(value["sampled_tokens"], "sampled_tokens")
            start = 0 if before is None else find_new_tokens(prompt, *before)
            version, policy = _read_version(value["policy_version"])
            rest = {k: v for k, v in value.items() if k not in _USED and v is not None}
            metadata = value["metadata"]
            rest |= {} if metadata is None else {"metadata": metadata}
            row: Row = {
                **describe_generation([], None),
                **self.paths.find({"": value}),
                "agent_id": "",
                "step": number,
                "env_step": number,
                "terminated": False,
                "truncated": False,
                tokens.OBSERVATION_TOKENS: prompt[start:],
                tokens.ACTION_TOKENS: sampled,
                tokens.IS_CONTINUATION: False if number and not start else None,
                "policy": policy,
                "policy_version": version,
                "timestamp": _read_time(value["created_at"]),
                "group_id": None if group is None else clean_text(group),
                "group_id_source": NONE if group is None else GIVEN,
                "train_step": first["iteration"],
                "split": None if first["split"] is None else clean_text(str(first["split"])),
                "source_framework": "tinker-cookbook",
                "metadata": dump_json(rest),
            }
            if value["logprobs"] is not None:
                row[tokens.ACTION_LOG_PROBS] = read_floats(
                    value["logprobs"], "logprobs", len(sampled)
                )
            rows.append(row)
            before = (prompt, sampled)
        reward = self.paths.get("reward")
        rows[-1]["terminated"] = reward is not None and rows[-1].get(reward) is not None
        name = clean_text("/".join(str(first[name]) for name in _KEY))
        if first["traj_idx"] is None:
            name = clean_text(f"{first['run_id']}/{first['cursor']}")
        episode_id = self._ids.next(name)
        return [{**row, "episode_id": episode_id} for row in rows]


def _open(file: SourceFile) -> sqlite3.Connection:
    """Open a store read-only; nothing in its schema is executed.

    Raises: SourceInvalidError if it has rows that are not in the file yet, sqlite3.Error.
    """
    log = Path(f"{file.path}-wal")
    if not file.stored.is_packed and log.exists() and log.stat().st_size:
        raise SourceInvalidError(
            f"{file.name}: found rows that are in {log.name} and not in the file yet, expected a "
            "store that is closed. Stop the capture daemon, or run PRAGMA wal_checkpoint in it."
        )
    connection = sqlite3.connect(f"{file.path.as_uri()}?mode=ro&immutable=1", uri=True)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_TEXT_BYTES)
    return connection


def _is_table(connection: sqlite3.Connection, name: str) -> bool:
    """Whether there is such a table: not a view, whose query might never end."""
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?"
    (num,) = connection.execute(query, (name,)).fetchone()
    return bool(num == 1)


def _count_rows(connection: sqlite3.Connection, table: str) -> int:
    if not _is_table(connection, table):
        return 0
    (num,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(num)


def _find_columns(connection: sqlite3.Connection) -> set[str]:
    """Return the columns of the table, or none where there is no such table."""
    if not _is_table(connection, _TABLE):
        return set()
    return {str(row[1]) for row in connection.execute(f"PRAGMA table_info({_TABLE})")}


def _find_key(value: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the key of a row's trajectory; a row that names no trajectory is one of its own."""
    lone = value["cursor"] if value["traj_idx"] is None else None
    return (*(repr(value[name]) for name in _KEY), repr(lone))


def _read_json(value: Mapping[str, Any], name: str) -> Any:
    text = value[name]
    if text is None:
        return None
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        raise SourceInvalidError(f"{name}: found {shorten(text)}, expected JSON") from None


def _read_version(text: Any) -> tuple[int | None, str | None]:
    """Return a policy's version if that is a number, else its name."""
    if text is None:
        return None, None
    own = str(text)
    is_number = own.isascii() and own.isdecimal() and len(own) < 19
    return (int(own), None) if is_number else (None, clean_text(own))


def _read_time(seconds: Any) -> datetime | None:
    if seconds is None:
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OSError, OverflowError, TypeError, ValueError):
        raise SourceInvalidError(
            f"created_at: found {shorten(seconds)}, expected seconds since 1970"
        ) from None
