"""Labels: what became known after the fact, as a table with a key, read and put in order.

A key is one of decision_id, request_id, episode_id, source_episode_id; for the last two `step` may
be added, and `agent_id` in data of several agents.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.schema import (
    AGENT_ID,
    EPISODE_ID,
    SOURCE_EPISODE_ID,
    STEP,
    widen,
)
from replaylake.datastore.errors import (
    ConfigInvalidError,
    NotFoundError,
    SchemaMismatchError,
    SourceInvalidError,
)
from replaylake.datastore.feedback.decisions import DECISION_ID, REQUEST_ID
from replaylake.datastore.interchange.formats.generic.csv import CsvTables
from replaylake.datastore.interchange.formats.generic.jsonl import JsonTables
from replaylake.datastore.interchange.formats.generic.parquet import ParquetTables
from replaylake.datastore.interchange.sources.source import find_source
from replaylake.datastore.interchange.sources.source_errors import unreadable_error
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.query.table_files import query_arrow, query_rows, scan_connection

_OF_STEPS: Final = (DECISION_ID, REQUEST_ID)
_OF_EPISODES: Final = (EPISODE_ID, SOURCE_EPISODE_ID)
_SELECT: Final = re.compile(r"\s*(select|with|from)\b[\s(]", re.IGNORECASE)
# Of no column of the user's: names with spaces.
_ROW: Final = "row of labels"
MAX_EXAMPLES: Final = 10


@dataclass(frozen=True)
class LabelKey:
    """Which columns of the dataset name a step or an episode, and the labels' columns for them."""

    columns: Mapping[str, str]

    @property
    def is_step_key(self) -> bool:
        """Whether it names single steps, and not episodes."""
        return STEP in self.columns or any(name in self.columns for name in _OF_STEPS)


@dataclass(frozen=True)
class Labels:
    """Labels with one row a key.

    keys: the key's columns, under the dataset's names and in its types. values: the columns that
    are used, row for row beside them. The counts are of rows that were given: in all, without a
    key, said again, and with a key that has several values.
    """

    keys: pa.Table
    values: pa.Table
    num_given: int
    num_without_key: int
    num_repeated: int
    num_ambiguous: int
    ambiguous_keys: tuple[tuple[Any, ...], ...]
    content_hash: str


def parse_names(names: str | Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return what the labels call each of our names, which is the same unless it says otherwise."""
    if isinstance(names, str):
        return {names: names}
    return dict(names) if isinstance(names, Mapping) else {name: name for name in names}


def parse_key(on: str | Sequence[str] | Mapping[str, str]) -> LabelKey:
    """Check the columns of a key, such as `episode_id` and `step`. Raises: ConfigInvalidError."""
    columns = parse_names(on)
    first = [name for name in columns if name in (*_OF_STEPS, *_OF_EPISODES)]
    rest = sorted(set(columns) - set(first))
    allowed = [[], [AGENT_ID], [STEP], [AGENT_ID, STEP]]
    is_known = len(first) == 1 and (rest in allowed if first[0] in _OF_EPISODES else not rest)
    if not is_known:
        raise ConfigInvalidError(
            f"on: found {', '.join(columns) or 'nothing'}, expected decision_id or request_id; "
            "or episode_id or source_episode_id, to which step and agent_id may be added.",
            parameter="on",
        )
    return LabelKey(columns)


def check_key(key: LabelKey, schema: pa.Schema) -> None:
    """Refuse a key that the dataset has not. Raises: NotFoundError."""
    if absent := [name for name in key.columns if name not in schema.names]:
        raise NotFoundError(
            f"on: found {absent[0]}, which is not a column of the dataset, expected one. Only "
            "served steps have decision_id and request_id: `replaylake feedback join` writes them.",
            parameter="on",
        )


def read_labels(lake: Lake, source: str | Path, key: LabelKey) -> pa.Table:
    """Read labels from one SELECT over the lake, or a CSV, Parquet, JSONL or JSON file.

    A text that begins with SELECT, WITH or FROM is SQL. Ids stay texts: 007 is not 7.
    Raises: NotFoundError, SourceInvalidError, QueryRefusedError, QueryError.
    """
    if isinstance(source, str) and _SELECT.match(source):
        return lake.sql(source)
    path = Path(source)
    ids = [theirs for ours, theirs in key.columns.items() if ours != STEP]
    suffix = path.suffix.lower()
    if suffix == ".json":
        return _read_json(path)
    files = find_source([path]).files
    readers: dict[str, Any] = {
        # A label that is no number is none less: the column is text.
        ".csv": lambda: CsvTables(files, ids, share=1.0, decimal="."),
        ".tsv": lambda: CsvTables(files, ids, share=1.0, decimal="."),
        ".jsonl": lambda: JsonTables(files),
        ".ndjson": lambda: JsonTables(files),
        ".parquet": lambda: ParquetTables(files),
    }
    if suffix not in readers:
        raise SourceInvalidError(
            f"{path}: found suffix {path.suffix!r}, expected .csv, .parquet, .jsonl or .json, or a "
            "text that begins with SELECT. Rename the file."
        )
    tables = []
    for chunk in readers[suffix]().chunks():
        chunk.refuse_misfits()
        tables.append(chunk.table)
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowException, ValueError) as error:
        raise SourceInvalidError(
            f"{path}: {error}, expected one type per column. Correct the file."
        ) from error


def _read_json(path: Path) -> pa.Table:
    """Read a JSON array of objects."""
    try:
        rows = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: found no such file or folder. Check the path.") from error
    except (OSError, ValueError) as error:
        raise unreadable_error(str(path), error) from error
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
        raise SourceInvalidError(
            f"{path}: expected a JSON array with one object per label. For JSON lines, name the "
            "file *.jsonl."
        )
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise SourceInvalidError(
            f"{path}: {error}, expected one type per column. Correct the file."
        ) from error


def prepare_labels(table: pa.Table, key: LabelKey, used: Sequence[str]) -> Labels:
    """Check labels, leave out what is there twice, and hash what is used of them.

    Raises: NotFoundError for a column that is not there, SchemaMismatchError for a key of a wrong
    type and for types that no dataset keeps.
    """
    for name in (*key.columns.values(), *used):
        if name not in table.column_names:
            raise NotFoundError(
                f"labels: found no column {name!r}, expected one of "
                f"{', '.join(table.column_names)}. `on` KEY=COLUMN and `add` NAME=COLUMN map "
                "columns with other names."
            )
    columns = {name: table.column(name).unify_dictionaries() for name in dict.fromkeys(used)}
    # At the door's types also because DuckDB does not know all of Arrow's, such as float16.
    values = pa.table({name: widen(column, name) for name, column in columns.items()})
    keys = pa.table(
        {ours: _key(table.column(theirs), ours) for ours, theirs in key.columns.items()}
    )
    groups, content_hash = _group_by_key(keys, values)
    one = groups.filter(groups.column("is_one"))
    several = groups.filter(pc.invert(groups.column("is_one")))
    num_one, num_several = (pc.sum(part.column("n")).as_py() or 0 for part in (one, several))
    examples = several.select(keys.column_names).slice(0, MAX_EXAMPLES).to_pylist()
    return Labels(
        keys=keys.take(one.column(_ROW)),
        values=values.take(one.column(_ROW)),
        num_given=table.num_rows,
        num_without_key=table.num_rows - num_one - num_several,
        num_repeated=num_one - one.num_rows,
        num_ambiguous=num_several,
        ambiguous_keys=tuple(tuple(row.values()) for row in examples),
        content_hash=content_hash,
    )


def _group_by_key(keys: pa.Table, values: pa.Table) -> tuple[pa.Table, str]:
    """Return one row a key, with its first row and whether all say the same; and a hash of all.

    The hash is of the rows as JSON, whatever their order: a sum, so that none cancels another.
    """
    indexed = pa.table(
        {
            _ROW: pa.array(np.arange(keys.num_rows)),
            **{f"key {name}": keys.column(name) for name in keys.column_names},
            **{f"value {name}": values.column(name) for name in values.column_names},
        }
    )
    of_keys = [f'"key {name}"' for name in keys.column_names]
    of_values = [f'"value {name}"' for name in values.column_names]
    columns = ", ".join(f'"key {name}" AS {name}' for name in keys.column_names)
    same = f"min(hash({', '.join(of_values)})) = max(hash({', '.join(of_values)}))"
    is_whole = " AND ".join(f"{name} IS NOT NULL" for name in of_keys)
    row = ", ".join(f"'{i}': {name}" for i, name in enumerate([*of_keys, *of_values]))
    with scan_connection({"labels": indexed}) as connection:
        groups = query_arrow(
            connection,
            f'SELECT min("{_ROW}") AS "{_ROW}", count(*) AS n, {columns}, '
            f"{same if of_values else 'true'} AS is_one FROM labels WHERE {is_whole} "
            f'GROUP BY {", ".join(of_keys)} ORDER BY "{_ROW}"',
        )
        (sums,) = query_rows(
            connection,
            "SELECT count(*), sum(md5_number_lower(text)::HUGEINT) "
            f"FROM (SELECT to_json({{{row}}})::VARCHAR AS text FROM labels)",
        )
    return groups, hashlib.sha256(repr(sums).encode()).hexdigest()


def _key(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """Return a key's column as text, or step as whole numbers."""
    kind = pa.int64() if name == STEP else pa.string()
    try:
        if pa.types.is_floating(column.type):
            column = column.cast(pa.int64())  # 3.0, as where a table had gaps
        return column.cast(kind)
    except pa.ArrowException as error:
        raise SchemaMismatchError(
            f"labels: column {name!r}: found {column.type} ({error}), expected {kind}. Cast it, or "
            "name another column with `on`."
        ) from error
