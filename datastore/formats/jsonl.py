"""JSON lines, one object a step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.json as pa_json

from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.formats.format import Reading, ReadOptions
from replaylake.datastore.formats.source import SourceFile, unreadable
from replaylake.datastore.formats.tables import Chunk, ChunkSchema, describe
from replaylake.datastore.formats.tabular import TabularReading

_BLOCK_BYTES: Final = 16 << 20
_BOM: Final = b"\xef\xbb\xbf"


class JsonTables:
    """Chunks of JSON lines. Texts stay texts, also those that look like times."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for file in self._files:
            yield from json_chunks(file)

    def schemas(self) -> Iterator[ChunkSchema]:
        return map(describe, self.chunks())

    def keep_as_text(self, column: str) -> bool:
        return False


class JsonlFormat:
    """Any JSON lines, by aliases and `--map`."""

    name = "jsonl"

    def recognises(self, files: Sequence[SourceFile]) -> bool:
        return first_object(files[0]) is not None

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> Reading:
        return TabularReading(JsonTables(files), options, files[0].name)


def json_chunks(file: SourceFile) -> Iterator[Chunk]:
    """Read one object a row, in blocks of whole lines. Raises: SourceInvalid naming the line."""
    file.check_unchanged()
    row, line = 0, 1
    try:
        with file.path.open("rb") as stream:
            while data := stream.read(_BLOCK_BYTES) + stream.readline():
                table = _parse(data.removeprefix(_BOM) if line == 1 else data, file, line)
                yield Chunk(file, row, table)
                row += table.num_rows
                line += data.count(b"\n")
    except OSError as error:
        raise unreadable(file.name, error) from error


def first_object(file: SourceFile) -> dict[str, Any] | None:
    """Return the first line's object, or None if the file does not begin with one."""
    with file.path.open("rb") as stream:
        for raw in stream:
            line = raw.removeprefix(_BOM).strip()
            if line:
                break
        else:
            return None
    if not line.startswith(b"{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        # Torn inside its first line, or one object over many lines: reading it will say so.
        return {}
    return found if isinstance(found, dict) else None


def _parse(data: bytes, file: SourceFile, first_line: int) -> pa.Table:
    try:
        data.decode()
        table = _read(data, None)
        as_text = pa.schema([pa.field(f.name, _without_times(f.type)) for f in table.schema])
        # pyarrow reads texts such as "2026-01-31 12:00:00" as naive times and drops their zone.
        return table if as_text.equals(table.schema) else _read(data, as_text)
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


def _parse_lines(data: bytes, file: SourceFile, first_line: int) -> pa.Table:
    """Parse what pyarrow refused: slower, but it knows the line."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(data.split(b"\n"), first_line):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
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
        except (pa.ArrowException, OverflowError) as error:
            raise SourceInvalid(
                f"{file.name} from line {first_line}: column {name!r} has values of several types "
                f"({error}). Make the column one type."
            ) from error
    return pa.table(columns)
