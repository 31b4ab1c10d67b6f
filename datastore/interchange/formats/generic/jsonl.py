"""JSON lines, one object a step."""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader, WriteResult
from replaylake.datastore.interchange.formats.generic.standard import TEXT_TABLE_BYTES, write_tables
from replaylake.datastore.interchange.formats.generic.text_rows import json_lines
from replaylake.datastore.interchange.formats.tabular.reader import TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import (
    Chunk,
    TableSource,
    check_columns,
    is_encodable,
)
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import unreadable_error

_BLOCK_BYTES: Final = 16 << 20
_BOM: Final = b"\xef\xbb\xbf"
# A longer line is refused: parsed, short lists take twenty times their text.
_MAX_LINE_BYTES: Final = 64 << 20
# Of JSON that begins so, pyarrow 26.0.1's parser ends the process (segmentation fault).
_NULL_FIRST: Final = re.compile(rb"\s*null")
# What int64 does not hold; Arrow makes a column of floats where such a number is in it.
_TOO_GREAT: Final = 2.0**63
_LONG_INTEGER: Final = re.compile(rb"(?<![\d.eE+-])-?\d{19,}(?![\d.eE])")
# Which kind a column is where two are equally frequent: the first of these.
_KINDS: Final = ("number", "flag", "text", "list", "object")
_WHOLE, _GREAT, _HALF = "whole", "great", "half"
# An integer that no float holds is no number of any column.
_ENDLESS: Final = "endless"

# By a row's index and a column: values of another type than the column has.
Misfits = dict[int, dict[str, Any]]
# Where a part of a value is: the keys that lead to it, None for the elements of a list.
_Path = tuple[str | None, ...]
# Logs have two or three levels, frames of images four, messages with tool calls perhaps ten.
MAX_DEPTH: Final = 64
_SHORT_LINE: Final = 2000
_LEVELS: Final = np.zeros(256, np.int8)


class JsonTables(TableSource):
    """Chunks of JSON lines. Texts stay texts, also those that look like times."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for file in self._files:
            yield from json_chunks(file)


class JsonlFormat:
    """Any JSON lines, by aliases and `--map`."""

    name = "jsonl"
    about = "any table as JSON lines, one object per step"
    is_folder = False
    suffix = ".jsonl"

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        return first_object(files[0]) is not None

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        return TabularReader(JsonTables(files), options, files[0].name)

    def write(self, episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> WriteResult:
        """Write one file: one object a step, floats exact to the last digit, images as lists."""
        with path.open("xb") as stream:
            return write_tables(
                episodes,
                spec,
                lambda table: stream.write(json_lines(table)),
                table_bytes=TEXT_TABLE_BYTES,
            )


def json_chunks(file: SourceFile) -> Iterator[Chunk]:
    """Read one object a row, in blocks of whole lines.

    Raises: SourceInvalidError naming the line.
    """
    file.check_unchanged()
    row, line = 0, 1
    try:
        with file.open() as stream:
            while data := stream.read(_BLOCK_BYTES):
                rest = stream.readline(_MAX_LINE_BYTES)
                data += rest
                if len(rest) == _MAX_LINE_BYTES and not rest.endswith(b"\n"):
                    raise _too_long_error(file, line + data.count(b"\n"))
                table, misfits, lines = _parse(
                    data.removeprefix(_BOM) if line == 1 else data, file, line
                )
                check_columns(file, table.schema.names)
                num_bytes = stream.tell()
                yield Chunk(file, row, table, misfits=misfits, lines=lines, num_bytes=num_bytes)
                row += table.num_rows
                line += data.count(b"\n")
    except OSError as error:
        raise unreadable_error(file.name, error) from error


def first_object(file: SourceFile) -> dict[str, Any] | None:
    """Return the first line's object, or None if the file does not begin with one."""
    with file.open() as stream:
        while raw := stream.readline(_MAX_LINE_BYTES):
            line = raw.removeprefix(_BOM).strip()
            if line:
                break
        else:
            return None
    if not line.startswith(b"{"):
        return None
    if len(raw) == _MAX_LINE_BYTES:
        return {}
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        # Torn inside its first line, or one object over many lines: reading it will say so.
        return {}
    return value if isinstance(value, dict) else None


def parse_json(data: bytes) -> pa.Table:
    """Parse JSON lines as Arrow has them, texts that look like times left as texts.

    Raises: pa.ArrowException where Arrow cannot, UnicodeDecodeError.
    """
    data.decode()
    if _NULL_FIRST.match(data):
        raise pa.ArrowInvalid("found null, expected an object")
    if not is_shallow(data):
        raise pa.ArrowInvalid(f"found values nested deeper than {MAX_DEPTH} levels")
    table = _read(data, None)
    if any(type_depth(kind) > MAX_DEPTH for kind in table.schema.types):
        raise pa.ArrowInvalid(f"found values nested deeper than {MAX_DEPTH} levels")
    as_text = pa.schema([pa.field(f.name, _without_times(f.type)) for f in table.schema])
    # pyarrow reads texts such as "2026-01-31 12:00:00" as naive times and drops their zone.
    return table if as_text.equals(table.schema) else _read(data, as_text)


def parse_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[pa.Table, Misfits]:
    """Lay out JSON objects as columns, each of the type that most of its values have.

    Raises: pa.ArrowException, OverflowError for what no table holds.
    """
    misfits = _misfits(rows)
    rest = [
        {n: None if n in misfits[i] else v for n, v in row.items() if is_encodable(n)}
        if i in misfits
        else row
        for i, row in enumerate(rows)
    ]
    try:
        lines = "\n".join(map(json.dumps, rest))
        table = parse_json(lines.encode())
    except pa.ArrowException:
        names = dict.fromkeys(name for row in rest for name in row)
        table = pa.table({name: pa.array([row.get(name) for row in rest]) for name in names})
        if any(type_depth(kind) > MAX_DEPTH for kind in table.schema.types):
            raise
    if table.num_rows != len(rows):
        raise pa.ArrowInvalid("found objects without a name")
    return table, misfits


def _parse(
    data: bytes, file: SourceFile, first_line: int
) -> tuple[pa.Table, Misfits, Sequence[int]]:
    """Return a block's rows, their misfits, and their lines where they are known."""
    try:
        table = parse_json(data)
    except (pa.ArrowException, UnicodeDecodeError):
        return _parse_lines(data, file, first_line)
    has_great = any(_has_great(part) for column in table.columns for part in column.chunks)
    if has_great and _LONG_INTEGER.search(data):
        return _parse_lines(data, file, first_line)
    num_lines = data.count(b"\n") + (not data.endswith(b"\n"))
    if num_lines == table.num_rows:
        return table, {}, range(first_line, first_line + num_lines)
    filled = [n for n, line in enumerate(data.split(b"\n"), first_line) if line.strip()]
    return table, {}, filled if len(filled) == table.num_rows else []


def _has_great(values: pa.Array) -> bool:
    """Whether floats hold a number that may have been an integer beyond int64."""
    kind = values.type
    if pa.types.is_list(kind):
        return _has_great(values.flatten())
    if pa.types.is_struct(kind):
        return any(map(_has_great, values.flatten()))
    if not pa.types.is_floating(kind):
        return False
    return bool((np.abs(values.to_numpy(zero_copy_only=False)) >= _TOO_GREAT).any())


def _read(data: bytes, schema: pa.Schema | None) -> pa.Table:
    return pa_json.read_json(
        pa.BufferReader(data),
        read_options=pa_json.ReadOptions(block_size=len(data) + 1, use_threads=False),
        parse_options=pa_json.ParseOptions(explicit_schema=schema),
    )


def _without_times(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_times(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _without_times(f.type)) for f in kind])
    return kind


def _too_long_error(file: SourceFile, line: int) -> SourceInvalidError:
    return SourceInvalidError(
        f"{file.name} line {line}: found a line of more than {_MAX_LINE_BYTES:,} bytes, expected "
        "one step, or one batch of steps, in each line. Write shorter lines."
    )


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object that has a key twice: which of its values counts, nothing says."""
    body = dict(pairs)
    if len(body) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {twice[:60]!r} twice")
    return body


def _parse_lines(
    data: bytes, file: SourceFile, first_line: int
) -> tuple[pa.Table, Misfits, Sequence[int]]:
    """Parse what pyarrow refused: slower, but it knows the line."""
    rows: list[dict[str, Any]] = []
    lines = array("q")  # kept for each block of the source
    for number, line in enumerate(data.split(b"\n"), first_line):
        if not line.strip():
            continue
        try:
            value = json.loads(line, object_pairs_hook=_refuse_duplicate_keys)
        except (ValueError, RecursionError) as error:
            raise SourceInvalidError(
                f"{file.name} line {number}: found {line[:60].decode(errors='replace')!r}, "
                f"expected one JSON object ({error}). Correct the line, or leave the file out."
            ) from error
        if not isinstance(value, dict):
            raise SourceInvalidError(
                f"{file.name} line {number}: found a {type(value).__name__}, expected one JSON "
                "object per line. Write one step per line."
            )
        rows.append(value)
        lines.append(number)
    try:
        table, misfits = parse_rows(rows)
    except (pa.ArrowException, OverflowError, RecursionError) as error:
        raise SourceInvalidError(
            f"{file.name} from line {first_line}: found values that no column can hold ({error}), "
            f"expected some nested no deeper than {MAX_DEPTH} levels. Correct the lines."
        ) from error
    return table, misfits, lines


def _misfits(rows: Sequence[Mapping[str, Any]]) -> Misfits:
    """Find the values whose kind, or that of a part of them, is not the most frequent one."""
    kinds = [{n: _kinds_in(v) for n, v in row.items() if v is not None} for row in rows]
    counts: dict[tuple[str, _Path], Counter[str]] = {}
    for actual in kinds:
        for name, parts in actual.items():
            for path, kind in parts:
                counts.setdefault((name, path), Counter())[kind] += 1
    wrong = {place: _minor(several) for place, several in counts.items()}
    misfits: Misfits = {}
    for i, actual in enumerate(kinds):
        for name, parts in actual.items():
            if not is_encodable(name):
                text = name.encode(errors="backslashreplace").decode()
                misfits.setdefault(i, {})[text] = rows[i][name]
            elif any(kind in wrong[name, path] for path, kind in parts):
                misfits.setdefault(i, {})[name] = rows[i][name]
    return misfits


def _minor(counts: Mapping[str, int]) -> set[str]:
    """Return the kinds that do not go together with the most frequent one."""
    totals = Counter({kind: counts.get(kind, 0) for kind in _KINDS})
    totals["number"] += counts.get(_WHOLE, 0) + counts.get(_GREAT, 0)
    totals["text"] += counts.get(_HALF, 0)
    majority = max(_KINDS, key=lambda kind: totals[kind])
    fitting = {majority}
    if majority == "number":
        # Among floats it is one, as Arrow reads it; among whole numbers none of int64.
        fitting |= {_WHOLE, *([_GREAT] if counts.get("number") else [])}
    return {*counts} - fitting


def _kinds_in(value: Any, path: _Path = ()) -> set[tuple[_Path, str]]:
    """Return the kinds of a value and of its parts, by their path in it."""
    if isinstance(value, bool):
        return {(path, "flag")}
    if isinstance(value, float):
        return {(path, "number")}
    if isinstance(value, int):
        if -(2**63) <= value < 2**63:
            return {(path, _WHOLE)}
        return {(path, _GREAT if abs(value) <= sys.float_info.max else _ENDLESS)}
    if isinstance(value, str):
        return {(path, "text" if is_encodable(value) else _HALF)}
    kinds: set[tuple[_Path, str]] = set()
    if isinstance(value, list):
        kinds = {(path, "list")}
        if {*map(type, value)} == {float}:
            return {*kinds, ((*path, None), "number")}
        for part in value:
            kinds |= set() if part is None else _kinds_in(part, (*path, None))
    elif isinstance(value, dict):
        kinds = {(path, "object")}
        for key, part in value.items():
            if not is_encodable(key):
                kinds.add((path, _HALF))
            elif part is not None:
                kinds |= _kinds_in(part, (*path, key))
    return kinds


_NEWLINE, _QUOTE, _OPEN, _CLOSE, _RETURN = b'\n"{}\r'
_LEVELS[[*b"[{"]] = 1
_LEVELS[[*b"]}"]] = -1


def is_shallow(data: bytes) -> bool:
    """Whether no value of some JSON lines is too deep for a parser that recurses.

    Exact for JSON; other bytes may be said to be too deep. Cost: little for short lines of an
    object each, else about what parsing takes.
    """
    if _has_short_objects(data):
        return True
    if b"\\" in data:
        data = data.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    codes = np.frombuffer(data, np.uint8)
    in_text = np.bitwise_xor.accumulate((codes == _QUOTE).view(np.uint8)).view(np.bool_)
    levels = _LEVELS[codes]
    levels[in_text] = 0
    return int(np.cumsum(levels, dtype=np.int32).max(initial=0)) <= MAX_DEPTH


def type_depth(kind: pa.DataType) -> int:
    """Return how many lists and structs a type has in one another, without recursing."""
    depth, level = 0, [kind]
    while level := [kind.field(i).type for kind in level for i in range(kind.num_fields)]:
        depth += 1
    return depth


def _has_short_objects(data: bytes) -> bool:
    """Whether each line is short, begins as an object and ends as one.

    Where `}`, a newline and `{` follow one another, JSON is between two objects or none at all.
    """
    codes = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(codes == _NEWLINE)
    if not len(ends) or ends[-1] + 1 < len(codes):
        ends = np.append(ends, len(codes))
    starts = np.append(0, ends[:-1] + 1)
    lengths = ends - starts
    if lengths.min() < 2 or lengths.max() > _SHORT_LINE:
        return False
    lasts = codes[ends - 1]
    lasts = np.where(lasts == _RETURN, codes[ends - 2], lasts)
    return bool((codes[starts] == _OPEN).all() and (lasts == _CLOSE).all())
