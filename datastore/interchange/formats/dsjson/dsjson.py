"""Vowpal Wabbit's dsjson, which Personalizer logs too: one event of a contextual bandit a line.

An event of one decision is an episode of one step. One of several slots (CCB, slates) is an episode
with a step for each slot; see docs/decisions/116.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import ACTION_FEATURES, DatasetSpec
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.dsjson.events import (
    ACTION_SPACE,
    DSJSON,
    EXTRAS,
    ROW_SCHEMA,
    SPACES,
    Row,
    is_event,
    parse_event,
)
from replaylake.datastore.interchange.formats.dsjson.writer import EventWriter
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader, WriteResult
from replaylake.datastore.interchange.formats.generations.rows import (
    iter_lines,
    read_first_line,
)
from replaylake.datastore.interchange.formats.tabular.reader import Declaration, TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, TableSource
from replaylake.datastore.interchange.sources.source import SourceFile

_CHUNK_BYTES: Final = 16 << 20
_DIGEST_BYTES: Final = 16
_FIELDS: Final = {"behavior_prob": "behavior_prob"}
# Columns that are there even if no event of a block has a value.
_ALWAYS: Final = frozenset(ROW_SCHEMA.names) - EXTRAS.keys() | {ACTION_FEATURES, DSJSON}


class DsjsonFormat:
    """Lines with a context c of shared features and candidates, and the action that was taken."""

    name = "dsjson"
    about = "Vowpal Wabbit's and Personalizer's events: candidates with features, slots, slates"
    is_folder = False
    suffix = ".dsjson"

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        return is_event(read_first_line(files[0]))

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        tables = _EventTables(files)
        declared = declare_events(options, tables.notes)
        return TabularReader(tables, options, files[0].name, declared)

    def write(self, episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> WriteResult:
        """Write an event a line, which VW parses.

        Raises: SpaceUnsupportedError for steps that are no decisions among candidates.
        """
        return EventWriter(spec).write(episodes, path)


def declare_events(options: ReadOptions, notes: Sequence[str] = ()) -> Declaration:
    """Return the declaration of rows of events, which is known without reading them.

    notes: notes for the receipt, complete after all files were read.
    """
    is_mapped = bool({"observation", "action"} & options.mapping.keys())
    return Declaration(
        fields=_FIELDS,
        spaces=None if is_mapped else SPACES,
        has_events=True,
        notes=notes,
        rewards_optional=True,
    )


class _EventTables(TableSource):
    """Rows of the events in some files; `notes` are of the last whole reading.

    A log that was delivered again in part has lines twice: each event is read once. Memory: about
    100 bytes for each event with an id, to know it again.
    """

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self.notes: list[str] = []

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        number = num_repeated = 0
        seen: set[bytes] = set()
        for file in self._files:
            file.check_unchanged()
            first_row = num_bytes = 0
            rows: list[Row] = []
            lines: list[int] = []
            damage: dict[int, str] = {}
            for line, text in iter_lines(file):
                try:
                    event_id, own = parse_event(text)
                except (SourceInvalidError, RecursionError) as error:
                    event_id, own = None, [_make_row_of_fault(text)]
                    damage[len(rows)] = f"malformed\0{file.name} line {line}: {error}"
                # Events without an id may be equal and still be two.
                if event_id is not None:
                    digest = hashlib.blake2b(text.strip(), digest_size=_DIGEST_BYTES).digest()
                    if digest in seen:
                        num_repeated += 1
                        continue
                    seen.add(digest)
                # An event without an id is told apart by its number in the source.
                name = str(number) if event_id is None else event_id
                number += 1
                rows += [{**row, "episode_id": name} for row in own]
                lines += [line] * len(own)
                num_bytes += len(text) * len(own)
                if num_bytes > _CHUNK_BYTES:
                    yield Chunk(file, first_row, _to_table(rows), damage, lines=lines)
                    first_row += len(rows)
                    rows, lines, damage, num_bytes = [], [], {}, 0
            yield Chunk(file, first_row, _to_table(rows), damage, lines=lines)
        self.notes[:] = (
            [f"{num_repeated:,} lines equal one before them, and are read once"]
            if num_repeated
            else []
        )


def _make_row_of_fault(text: bytes) -> Row:
    """Return a row that stands for a line that could not be read, with its text.

    Its action is outside the space, so that no repair takes it for a decision as it is.
    """
    return {
        "step": 0,
        "observation": "",
        "action": ACTION_SPACE.n,
        "terminated": True,
        DSJSON: text.decode(errors="replace").strip(),
    }


def _to_table(rows: Sequence[Row]) -> pa.Table:
    columns = {}
    for field in ROW_SCHEMA:
        values = [row.get(field.name) for row in rows]
        if field.name in _ALWAYS or any(value is not None for value in values):
            columns[field.name] = pa.array(values, field.type)
    return pa.table(columns)
