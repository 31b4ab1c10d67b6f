"""CSV tables, one row a step: a header, then numbers, flags, texts, or JSON lists of numbers."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.formats.fields import ALIASES
from replaylake.datastore.formats.format import Reading, ReadOptions
from replaylake.datastore.formats.source import SourceFile, unreadable
from replaylake.datastore.formats.tables import Chunk, ChunkSchema, describe
from replaylake.datastore.formats.tabular import TabularReading

_BLOCK_BYTES: Final = 16 << 20
_DELIMITERS: Final = ",;\t|"
# 007 and 0x1 name things; Arrow would read them as the numbers 7 and 1.
_NOT_A_NUMBER: Final = r"^[+-]?0[0-9xX]"


class CsvTables:
    """Chunks of CSV files; a column that is not all numbers or flags is text in every chunk."""

    def __init__(self, files: Sequence[SourceFile], as_text: Sequence[str] = ()) -> None:
        self._files = files
        self._as_text = set(as_text)

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for file in self._files:
            file.check_unchanged()
            names, delimiter = _header(file)
            row = 0
            try:
                for batch in _open(file, names, delimiter):
                    table = pa.Table.from_batches([batch])
                    typed = {name: self._typed(table.column(name), name) for name in names}
                    yield Chunk(file, row, pa.table(typed))
                    row += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                raise unreadable(file.name, error) from error

    def schemas(self) -> Iterator[ChunkSchema]:
        return map(describe, self.chunks())

    def keep_as_text(self, column: str) -> bool:
        self._as_text.add(column)
        return True

    def _typed(self, column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
        if name in self._as_text:
            return column
        if column.null_count == len(column):
            return pa.nulls(len(column))
        first = column.combine_chunks().drop_null()[0].as_py().lstrip()
        if first.startswith("["):
            return _lists(column)
        trimmed = pc.utf8_trim_whitespace(column)
        for kind in (pa.int64(), pa.float64(), pa.bool_()):
            try:
                cast = trimmed.cast(kind)
            except pa.ArrowException:
                continue
            if kind == pa.int64() and pc.any(_named(trimmed)).as_py():
                return column
            return cast
        return column


class CsvFormat:
    """Any CSV with a header, by aliases and `--map`."""

    name = "csv"

    def recognises(self, files: Sequence[SourceFile]) -> bool:
        try:
            names, _ = _header(files[0])
        except SourceInvalid:
            return False
        return len(names) > 1

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> Reading:
        # Ids are texts from the start: "7" and "007" are two episodes.
        ours = ("episode_id", "agent_id", "policy", "timestamp")
        named = [options.mapping.get(field) for field in ours]
        as_text = [name for name in named if name] + [n for f in ours for n in ALIASES[f]]
        return TabularReading(CsvTables(files, as_text), options, files[0].name)


def _open(file: SourceFile, names: Sequence[str], delimiter: str) -> pa_csv.CSVStreamingReader:
    return pa_csv.open_csv(
        file.path,
        read_options=pa_csv.ReadOptions(block_size=_BLOCK_BYTES),
        parse_options=pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=pa_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            null_values=[""],
        ),
    )


def _header(file: SourceFile) -> tuple[list[str], str]:
    try:
        with file.path.open(encoding="utf-8-sig", newline="") as stream:
            sample = stream.readline(1 << 20)
            delimiter = max(_DELIMITERS, key=sample.count)
            stream.seek(0)
            names = next(csv.reader(stream, delimiter=delimiter), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise SourceInvalid(
            f"{file.name}: expected CSV in UTF-8 with a header ({error})."
        ) from error
    except OSError as error:
        raise unreadable(file.name, error) from error
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise SourceInvalid(f"{file.name}: found the columns {twice} twice. Rename one of each.")
    if names and all(_is_number(name) for name in names):
        raise SourceInvalid(
            f"{file.name}: found numbers in the first line, expected the columns' names. "
            "Add a header line."
        )
    return names, delimiter


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _named(column: pa.ChunkedArray) -> Any:
    return pc.match_substring_regex(column, _NOT_A_NUMBER)


def _lists(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Parse cells such as "[0.1, 0.2]"; nested lists are allowed, other texts stay as they are."""
    trimmed = pc.utf8_trim_whitespace(column)
    inner = pc.utf8_trim(trimmed, "[]")
    is_flat = pc.all(pc.match_substring_regex(trimmed, r"^\[[^\[\]]+\]$")).as_py()
    try:
        if is_flat:
            cells = pc.split_pattern(inner, ",").combine_chunks()
            if cells.null_count == 0 and cells.offset == 0:
                has_fraction = pc.any(pc.match_substring_regex(cells.values, r"[.eEnN]")).as_py()
                kind = pa.float64() if has_fraction else pa.int64()
                numbers = pc.utf8_trim_whitespace(cells.values).cast(kind)
                return pa.ListArray.from_arrays(cells.offsets, numbers)
        return pa.array([None if c is None else json.loads(c) for c in column.to_pylist()])
    except (pa.ArrowException, ValueError):
        return column
