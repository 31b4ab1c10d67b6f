"""CSV tables, one row a step: a header, then numbers, flags, texts, or JSON in a cell.

A cell may hold a JSON list of numbers, or an object. Arrow converts columns of floats and of flags
while it parses. Where a later cell turns out to be something else, the file is parsed again from
its start with that column as text, and rows given before are passed over.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from replaylake.datastore.episode import Episode
from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.formats.format import Reading, ReadOptions, Written
from replaylake.datastore.formats.generic.jsonl import parse_json
from replaylake.datastore.formats.generic.standard import (
    TEXT_TABLE_BYTES,
    exported_names,
    write_tables,
)
from replaylake.datastore.formats.generic.text_rows import csv_header, csv_lines
from replaylake.datastore.formats.tabular.fields import ALIASES
from replaylake.datastore.formats.tabular.reading import TabularReading
from replaylake.datastore.formats.tabular.tables import Chunk, Tables
from replaylake.datastore.schema import DatasetSpec
from replaylake.datastore.sources.source import SourceFile, unreadable

_BLOCK_BYTES: Final = 4 << 20
_SAMPLE_BYTES: Final = 1 << 18
_HEADER_BYTES: Final = 1 << 20
_DELIMITERS: Final = ",;\t|"
# 007 and 0x1 name things; Arrow would read them as the numbers 7 and 1.
_NOT_A_NUMBER: Final = r"^[+-]?0[0-9xX]"
_FAILED_COLUMN: Final = re.compile(r"In CSV column #(\d+)")
_UTF_16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class CsvTables(Tables):
    """Chunks of CSV files; a column that is not all numbers or flags is text in every chunk."""

    def __init__(self, files: Sequence[SourceFile], as_text: Sequence[str] = ()) -> None:
        self._files = files
        self._as_text = set(as_text)
        self._converted: dict[str, dict[str, pa.DataType]] = {}

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for file in self._files:
            file.check_unchanged()
            names, delimiter = _header(file)
            num_given = 0
            while (
                failed := (yield from self._from(file, names, delimiter, num_given))
            ) is not None:
                column, num_given = failed
                del self._converted[file.sha256][column]

    def keep_as_text(self, column: str) -> bool:
        self._as_text.add(column)
        return True

    def _from(
        self, file: SourceFile, names: Sequence[str], delimiter: str, num_given: int
    ) -> Generator[Chunk, None, tuple[str, int] | None]:
        """Yield chunks from a row on; return a column that could not be converted, and where."""
        row = 0
        try:
            converted = self._conversions(file, names, delimiter)
            with file.open() as stream:
                for batch in _open(stream, names, delimiter, converted, _BLOCK_BYTES):
                    if row >= num_given and batch.num_rows:
                        columns = {
                            name: batch.column(i)
                            if name in converted
                            else self._typed(batch.column(i), name)
                            for i, name in enumerate(names)
                        }
                        yield Chunk(file, row, pa.table(columns), num_bytes=stream.tell())
                    row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            found = _FAILED_COLUMN.search(str(error))
            name = names[int(found.group(1))] if found else ""
            if name in self._converted.get(file.sha256, {}):
                return name, row
            raise unreadable(file.name, error) from error
        return None

    def _conversions(
        self, file: SourceFile, names: Sequence[str], delimiter: str
    ) -> Mapping[str, pa.DataType]:
        """Return the columns that Arrow converts: those that are floats or flags at first."""
        if file.sha256 not in self._converted:
            with file.open() as stream:
                batches = iter(_open(stream, names, delimiter, {}, _SAMPLE_BYTES))
                sample = next(batches, None)
            found = {}
            for i, name in enumerate(names):
                kind = pa.null() if sample is None else self._typed(sample.column(i), name).type
                if pa.types.is_floating(kind) or pa.types.is_boolean(kind):
                    found[name] = kind
            self._converted[file.sha256] = found
        known = self._converted[file.sha256]
        for name in self._as_text & known.keys():
            del known[name]
        return known

    def _typed(self, column: pa.Array, name: str) -> pa.Array:
        if name in self._as_text:
            return column
        if column.null_count == len(column):
            return pa.nulls(len(column))
        first = column.drop_null()[0].as_py().lstrip()
        if first.startswith(("[", "{")):
            return _nested(column)
        trimmed = pc.utf8_trim_whitespace(column)
        for kind in (pa.int64(), pa.float64(), pa.bool_()):
            try:
                cast = trimmed.cast(kind)
            except pa.ArrowException:
                continue
            return column if kind == pa.int64() and _has_names(trimmed) else cast
        return column


class CsvFormat:
    """Any CSV with a header, by aliases and `--map`."""

    name = "csv"
    about = "any table as CSV with a header, one row a step"
    is_folder = False
    suffix = ".csv"

    def recognises(self, files: Sequence[SourceFile]) -> bool:
        if files[0].head(2) in _UTF_16:
            return True  # reading it says what is wrong with it
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
        as_text += options.episode_by
        return TabularReading(CsvTables(files, as_text), options, files[0].name)

    def write(self, episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> Written:
        """Write one file: vectors and objects as JSON in a cell, floats exact to the last digit."""
        with path.open("xb") as stream:
            stream.write(csv_header(exported_names(spec)))
            return write_tables(
                episodes,
                spec,
                lambda table: stream.write(csv_lines(table)),
                table_bytes=TEXT_TABLE_BYTES,
            )


def _open(
    stream: Any,
    names: Sequence[str],
    delimiter: str,
    converted: Mapping[str, pa.DataType],
    block_bytes: int,
) -> pa_csv.CSVStreamingReader:
    return pa_csv.open_csv(
        stream,
        read_options=pa_csv.ReadOptions(block_size=block_bytes),
        parse_options=pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=pa_csv.ConvertOptions(
            column_types={name: converted.get(name, pa.string()) for name in names},
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            null_values=[""],
        ),
    )


def _header(file: SourceFile) -> tuple[list[str], str]:
    head = file.head(_HEADER_BYTES)
    if head[:2] in _UTF_16:
        raise SourceInvalid(
            f"{file.name}: found UTF-16, expected CSV in UTF-8. Convert it, as with "
            "`iconv -f UTF-16 -t UTF-8`."
        )
    try:
        # The head may end inside of a character.
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head)
        first = text.partition("\n")[0]
        delimiter = max(_DELIMITERS, key=first.count)
        names = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise SourceInvalid(
            f"{file.name}: expected CSV in UTF-8 with a header ({error})."
        ) from error
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


def _has_names(column: pa.Array) -> bool:
    """Whether a column of integers has some that are written as names are."""
    # Nearly no column has any, and looking at the first character costs a tenth of the pattern.
    signed = pc.or_(pc.starts_with(column, "-"), pc.starts_with(column, "+"))
    candidates = column.filter(pc.or_(pc.starts_with(column, "0"), signed))
    if not len(candidates):
        return False
    return bool(pc.any(pc.match_substring_regex(candidates, _NOT_A_NUMBER)).as_py())


def _nested(column: pa.Array) -> pa.Array:
    """Parse cells such as "[0.1, 0.2]", nested lists and objects; other texts stay as they are."""
    trimmed = pc.utf8_trim_whitespace(column)
    is_flat = pc.all(pc.match_substring_regex(trimmed, r"^\[[^\[\]{}\"]+\]$")).as_py()
    try:
        numbers = _numbers(trimmed) if is_flat and not column.null_count else None
        if numbers is not None:
            return numbers
        if pc.any(pc.match_substring_regex(trimmed, r"[\r\n]")).as_py():
            return column
        rows = pc.binary_join_element_wise('{"v": ', pc.fill_null(trimmed, "null"), "}\n", "")
        found = parse_json("".join(rows.to_pylist()).encode()).column("v").combine_chunks()
        return found if len(found) == len(column) else column
    except (pa.ArrowException, ValueError, KeyError):
        return column


def _numbers(cells: pa.Array) -> pa.Array | None:
    """Parse flat lists of numbers, the fast way; None where they hold flags or something else."""
    items = pc.split_pattern(pc.utf8_trim(cells, "[]"), ",")
    has_fraction = pc.any(pc.match_substring_regex(items.values, r"[.eEnN]")).as_py()
    try:
        kind = pa.float64() if has_fraction else pa.int64()
        numbers = pc.utf8_trim_whitespace(items.values).cast(kind)
    except pa.ArrowException:
        return None
    return pa.ListArray.from_arrays(items.offsets, numbers)
