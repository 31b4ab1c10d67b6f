"""Preview: what an ingest would do, seen from the first rows of a source; nothing is written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.encoding import NO_ENCODING
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.rows import encode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Space, describe
from replaylake.datastore.episodes.validation import validate_all
from replaylake.datastore.interchange.formats.checks import Check
from replaylake.datastore.interchange.formats.detect import AUTO, find_format
from replaylake.datastore.interchange.formats.format import LoggedColumns, ReadOptions, RowReader
from replaylake.datastore.interchange.ingest.inspection import REJECT, Inspection
from replaylake.datastore.interchange.ingest.source_validator import SourceValidator
from replaylake.datastore.interchange.sources.source import peek_source
from replaylake.datastore.lake.lake import Lake

_HEAD_ROWS: Final = 10_000
_SHOWN_ROWS: Final = 5


@dataclass(frozen=True)
class ColumnRange:
    """One column of a log: its type, its least and greatest value, and the share of missing ones.

    stored_as: the fields, or names of further columns, that it becomes; empty if it is left out.
    """

    column: str
    type: str
    least: Any
    greatest: Any
    missing: float
    stored_as: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "stored_as": list(self.stored_as)}


@dataclass(frozen=True)
class IngestPreview:
    """What an ingest would do with the first rows of a source.

    mapping: which columns are which field of ours. spaces: what the observation and the action
    would be; None where no episode is valid. rows: the first ones, as they would be stored. checks:
    what would be refused, corrected and noted of these rows. is_whole: the source has no more.
    """

    dataset: str
    format: str
    num_files: int
    num_rows: int
    num_episodes: int
    is_whole: bool
    mapping: Mapping[str, str]
    spaces: tuple[str, str] | None
    columns: tuple[ColumnRange, ...] = ()
    rows: tuple[Mapping[str, Any], ...] = ()
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "columns": [one.to_json() for one in self.columns],
            "rows": [dict(row) for row in self.rows],
            "checks": [check.to_json() for check in self.checks],
            "spaces": None if self.spaces is None else list(self.spaces),
            "notes": list(self.notes),
        }


def preview(
    lake: Lake,
    sources: Sequence[Path | str],
    dataset: str,
    *,
    format: str = AUTO,
    options: ReadOptions | None = None,
    spaces: tuple[Space, Space] | None = None,
    num_rows: int = _HEAD_ROWS,
) -> IngestPreview:
    """Read the first rows of a source, and return what `ingest` would make of them.

    Files are not hashed, and of a table no more is read than the block with the last of these rows.
    A format that has to see all rows before the first one reads them.

    Args:
        lake: where the dataset is, or would be.
        sources: files, or folders that are walked.
        dataset: its name, which need not exist.
        format: `auto`, or a name from `formats.catalog.FORMATS`.
        options: how to read them.
        spaces: an environment's observation and action space, if one is given.
        num_rows: how many rows are read. The last episode may be cut there.

    Raises: NotFoundError, SourceInvalidError, ConfigInvalidError as `ingest`; so a mapping that
    does not fit is found at once.
    """
    handle = lake.dataset(dataset)
    spec = handle.spec if handle.exists() else None
    source = peek_source(sources)
    known = find_format(format, source.files)
    read_as = replace(options or ReadOptions(), head_rows=num_rows)
    if spec is not None:
        read_as = replace(read_as, encoding=spec.encoding or NO_ENCODING)
    reader = known.read(source.files, read_as)
    validator = SourceValidator(
        spec, spaces, reader.spaces, rewards_optional=reader.rewards_optional
    )
    inspection = Inspection(reader, validator, REJECT, None)
    inspection.run()
    found = [
        episode
        for item in inspection.iter_found()
        if isinstance(item, LoggedColumns)
        for episode in item[:_SHOWN_ROWS]
    ]
    needed = inspection.spec() if found else None
    num_read = reader.num_rows if reader.num_rows is not None else inspection.num_steps
    mapping = inspection.known_columns
    return IngestPreview(
        dataset=dataset,
        format=known.name,
        num_files=len(source.files),
        num_rows=num_read,
        num_episodes=inspection.num_episodes,
        is_whole=num_read < num_rows,
        mapping=mapping,
        spaces=None
        if needed is None
        else (describe(needed.observation_space), describe(needed.action_space)),
        columns=tuple(_measure_columns(reader, mapping, num_read))
        if isinstance(reader, RowReader)
        else (),
        rows=() if needed is None else _store(found, needed),
        checks=inspection.checks(),
        notes=(*source.notes, *reader.notes),
        renames=dict(reader.renames),
    )


def _measure_columns(
    reader: RowReader, mapping: Mapping[str, str], num_rows: int
) -> list[ColumnRange]:
    rows = reader.read_rows(np.arange(num_rows))
    fields: dict[str, list[str]] = {}
    for ours, theirs in mapping.items():
        for name in (theirs,) if theirs in rows.column_names else theirs.split(","):
            fields.setdefault(name, []).append(ours)
    measured = []
    for name in (n for n in rows.column_names if not n.startswith("\0")):
        column = rows.column(name)
        own = fields.get(name, [])
        if not own and name in reader.extras:
            own = [name]
        least, greatest = _find_range(column)
        missing = column.null_count / max(len(column), 1)
        measured.append(ColumnRange(name, str(column.type), least, greatest, missing, tuple(own)))
    return measured


def _find_range(column: pa.ChunkedArray) -> tuple[Any, Any]:
    """Return the least and the greatest value; of lists, of their elements."""
    kind = column.type
    while (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    ):
        column = pc.list_flatten(column)
        kind = column.type
    if not (pa.types.is_primitive(kind) or pa.types.is_string(kind)):
        return None, None
    if pa.types.is_floating(kind):
        column = column.filter(pc.is_finite(column))
    if pa.types.is_temporal(kind):
        column = _format_times(column)
    found = pc.min_max(column).as_py()
    return found["min"], found["max"]


def _format_times(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return times as text, those with a zone in UTC: a file's zone may be one that nobody has."""
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        column = column.cast(pa.timestamp(column.type.unit, "UTC"))
    return column.cast(pa.string())


def _store(episodes: Sequence[Episode], spec: DatasetSpec) -> tuple[Mapping[str, Any], ...]:
    """Return the first rows as the dataset would have them."""
    first: list[Episode] = []
    for episode in islice(episodes, _SHOWN_ROWS):
        first.append(episode)
        if sum(map(len, first)) >= _SHOWN_ROWS:
            break
    ready = validate_all(
        first,
        spec.observation_space,
        spec.action_space,
        rewards_optional=spec.rewards_optional,
    )
    rows = encode(ready, spec).slice(0, _SHOWN_ROWS)
    columns = {
        name: (_format_times(column) if pa.types.is_temporal(column.type) else column)
        for name, column in zip(rows.column_names, rows.columns, strict=True)
    }
    return tuple(
        {name: _plain(v) for name, v in row.items()} for row in pa.table(columns).to_pylist()
    )


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value
