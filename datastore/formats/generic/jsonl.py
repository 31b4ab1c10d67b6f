"""JSON lines, one object a step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.json as pa_json

from replaylake.datastore.episode import Episode
from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.formats.format import Reading, ReadOptions, Written
from replaylake.datastore.formats.generic.json_depth import MAX_DEPTH, is_shallow, type_depth
from replaylake.datastore.formats.generic.standard import TEXT_TABLE_BYTES, write_tables
from replaylake.datastore.formats.generic.text_rows import json_lines
from replaylake.datastore.formats.tabular.reading import TabularReading
from replaylake.datastore.formats.tabular.tables import Chunk, Tables
from replaylake.datastore.schema import DatasetSpec
from replaylake.datastore.sources.source import SourceFile, unreadable

_BLOCK_BYTES: Final = 16 << 20
_BOM: Final = b"\xef\xbb\xbf"
# A longer line is refused: parsed, short lists take twenty times their text.
_MAX_LINE_BYTES: Final = 64 << 20


class JsonTables(Tables):
    """Chunks of JSON lines. Texts stay texts, also those that look like times."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for file in self._files:
            yield from json_chunks(file)


class JsonlFormat:
    """Any JSON lines, by aliases and `--map`."""

    name = "jsonl"
    about = "any table as JSON lines, one object a step"
    is_folder = False
    suffix = ".jsonl"

    def recognises(self, files: Sequence[SourceFile]) -> bool:
        return first_object(files[0]) is not None

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> Reading:
        return TabularReading(JsonTables(files), options, files[0].name)

    def write(self, episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> Written:
        """Write one file: one object a step, floats exact to the last digit, images as lists."""
        with path.open("xb") as stream:
            return write_tables(
                episodes,
                spec,
                lambda table: stream.write(json_lines(table)),
                table_bytes=TEXT_TABLE_BYTES,
            )


def json_chunks(file: SourceFile) -> Iterator[Chunk]:
    """Read one object a row, in blocks of whole lines. Raises: SourceInvalid naming the line."""
    file.check_unchanged()
    row, line = 0, 1
    try:
        with file.open() as stream:
            while data := stream.read(_BLOCK_BYTES):
                rest = stream.readline(_MAX_LINE_BYTES)
                data += rest
                if len(rest) == _MAX_LINE_BYTES and not rest.endswith(b"\n"):
                    raise _too_long(file, line + data.count(b"\n"))
                table = _parse(data.removeprefix(_BOM) if line == 1 else data, file, line)
                yield Chunk(file, row, table, num_bytes=stream.tell())
                row += table.num_rows
                line += data.count(b"\n")
    except OSError as error:
        raise unreadable(file.name, error) from error


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
        found = json.loads(line)
    except (ValueError, RecursionError):
        # Torn inside its first line, or one object over many lines: reading it will say so.
        return {}
    return found if isinstance(found, dict) else None


def parse_json(data: bytes) -> pa.Table:
    """Parse JSON lines as Arrow has them, texts that look like times left as texts.

    Raises: pa.ArrowException where Arrow cannot, UnicodeDecodeError.
    """
    data.decode()
    if not is_shallow(data):
        raise pa.ArrowInvalid(f"found values nested deeper than {MAX_DEPTH} levels")
    table = _read(data, None)
    if any(type_depth(kind) > MAX_DEPTH for kind in table.schema.types):
        raise pa.ArrowInvalid(f"found values nested deeper than {MAX_DEPTH} levels")
    as_text = pa.schema([pa.field(f.name, _without_times(f.type)) for f in table.schema])
    # pyarrow reads texts such as "2026-01-31 12:00:00" as naive times and drops their zone.
    return table if as_text.equals(table.schema) else _read(data, as_text)


def _parse(data: bytes, file: SourceFile, first_line: int) -> pa.Table:
    try:
        return parse_json(data)
    except (pa.ArrowException, UnicodeDecodeError):
        return _parse_lines(data, file, first_line)


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


def _too_long(file: SourceFile, line: int) -> SourceInvalid:
    return SourceInvalid(
        f"{file.name} line {line}: found a line of more than {_MAX_LINE_BYTES:,} bytes, expected "
        "one step, or one batch of them, in each. Write shorter lines."
    )


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object that has a key twice: which of its values counts, nothing says."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {twice[:60]!r} twice")
    return found


def _parse_lines(data: bytes, file: SourceFile, first_line: int) -> pa.Table:
    """Parse what pyarrow refused: slower, but it knows the line."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(data.split(b"\n"), first_line):
        if not line.strip():
            continue
        try:
            value = json.loads(line, object_pairs_hook=_each_once)
        except (ValueError, RecursionError) as error:
            raise SourceInvalid(
                f"{file.name} line {number}: found {line[:60].decode(errors='replace')!r}, "
                f"expected one JSON object ({error}). Correct the line, or leave the file out."
            ) from error
        if not isinstance(value, dict):
            raise SourceInvalid(
                f"{file.name} line {number}: found a {type(value).__name__}, expected one JSON "
                "object a line. Write one step a line."
            )
        rows.append(value)
    columns = {}
    for name in dict.fromkeys(key for row in rows for key in row):
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
            if type_depth(columns[name].type) > MAX_DEPTH:
                raise pa.ArrowInvalid(f"nested deeper than {MAX_DEPTH} levels")
        except (pa.ArrowException, OverflowError) as error:
            raise SourceInvalid(
                f"{file.name} from line {first_line}: column {name!r} has values of several types, "
                f"or too deep ({error}). Make the column one type."
            ) from error
    return pa.table(columns)
