"""CSV tables, one row a step: a header, then numbers, flags, texts, or JSON in a cell.

A cell may hold a JSON list of numbers, or an object. Numbers have a decimal point unless a comma is
stated; columns of numbers with a comma are refused until then, as they would be texts.

Arrow converts columns of floats and of flags while it parses. Where a later cell turns out to be
something else, the file is parsed again from its start with that column as text, and rows given
before are passed over.

A column is numbers, flags or JSON where nine in ten of its cells are (of a field that is a number,
where any cell is): the others are misfits. All cells of the source are counted before that is
settled, so it does not matter where the others stand.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader, WriteResult
from replaylake.datastore.interchange.formats.generic.csv_blocks import (
    RecordTooLongError,
    first_end,
    read_blocks,
)
from replaylake.datastore.interchange.formats.generic.jsonl import parse_json, parse_rows
from replaylake.datastore.interchange.formats.generic.standard import (
    TEXT_TABLE_BYTES,
    standard_names,
    write_tables,
)
from replaylake.datastore.interchange.formats.generic.text_rows import csv_header, csv_lines
from replaylake.datastore.interchange.formats.tabular.fields import ALIASES, DONE_ALIASES
from replaylake.datastore.interchange.formats.tabular.reader import TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import (
    Chunk,
    TableSource,
    check_columns,
)
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import unreadable_error

_BLOCK_BYTES: Final = 4 << 20
_SAMPLE_BYTES: Final = 1 << 18
_HEAD_BYTES: Final = 1 << 20
_MAX_HEADER_BYTES: Final = 16 << 20
_DELIMITERS: Final = ",;\t|"
# 007 and 0x1 name things; Arrow would read them as the numbers 7 and 1.
_NOT_A_NUMBER: Final = r"^[+-]?0[0-9xX]"
_NUMBER: Final = r"^[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|(?i:nan|inf|infinity))$"
_WHOLE: Final = r"^[+-]?[0-9]+$"
_COMMA_CELL: Final = r"^(\s*[+-]?[0-9]*),([0-9]+([eE][+-]?[0-9]+)?\s*)$"
_BIT: Final = r"^[01]$"
_FLAG: Final = r"^(?i:true|false)$"
_JSON: Final = r"^[\[{]"
# At least so many of a column's cells, or it is text.
SHARE: Final = 0.9
_BEYOND_ASCII: Final = 0x80
_TOO_GREAT: Final = 2.0**63
# Kinds of columns, and of cells beside them.
_NUMBERS, _FLAGS, _NESTED, _TEXT = "number", "flag", "nested", "text"
_BITS, _NAMES = "bit", "name"
# Fields that are a number or a flag whatever most of their cells are.
_NUMERIC_FIELDS: Final = (
    "reward",
    "terminated",
    "truncated",
    "step",
    "env_step",
    "policy_version",
    "behavior_prob",
    "behavior_log_prob",
)
_KNOWN_NAMES: Final = {*DONE_ALIASES}.union(*ALIASES.values())
_TEXT_FIELDS: Final = ("episode_id", "agent_id", "policy", "timestamp")
_FAILED_ROW: Final = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")
_FAILED_COLUMN: Final = re.compile(r"In CSV column #(\d+)")
_UTF_16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class CsvTables(TableSource):
    """Chunks of CSV files.

    as_text: columns that are text whatever their cells are. numeric: those that are numbers or
    flags where any of their cells is. share: what part of the cells of any other has to be of one
    kind, or it is text. delimiter, decimal: as `ReadOptions` has them.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        as_text: Collection[str] = (),
        numeric: Collection[str] = (),
        share: float = SHARE,
        *,
        delimiter: str | None = None,
        decimal: str | None = None,
    ) -> None:
        self._files = files
        self._share = share
        self._delimiter, self._decimal = delimiter, decimal
        self._as_text = {*as_text}
        self._numeric = {*numeric}
        self._kinds: dict[str, str] = dict.fromkeys(as_text, _TEXT)
        self._settled: set[str] = {*as_text}
        self._converted: dict[str, dict[str, pa.DataType]] = {}
        self._lines: dict[str, _RecordLines] = {}

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for file in self._files:
            file.check_unchanged()
            names, delimiter = _header(file, self._delimiter)
            check_columns(file, names)
            num_given = 0
            while (
                failed := (yield from self._iter_from(file, names, delimiter, num_given))
            ) is not None:
                column, num_given = failed
                del self._converted[file.sha256][column]

    @property
    def settled(self) -> frozenset[str]:
        return frozenset(self._settled)

    def settle(self, columns: Sequence[str]) -> None:
        """Count the cells of all files; what most are, if nearly all are, is the column's kind."""
        counts: dict[str, Counter[str]] = {n: Counter() for n in columns if n not in self._settled}
        for file in self._files:
            names, delimiter = _header(file, self._delimiter)
            try:
                for _, batch, _ in self._parse(file, names, delimiter, {}, _BLOCK_BYTES):
                    for name in counts.keys() & {*names}:
                        counts[name] += _count_kinds(batch.column(name))
            except (pa.ArrowException, OSError) as error:
                raise unreadable_error(file.name, error) from error
        for name, counter in counts.items():
            self._settled.add(name)
            share = 0.0 if name in self._numeric else self._share
            self._kinds[name] = _kind_of(counter, share)
            for converted in self._converted.values():
                converted.pop(name, None)

    def _iter_from(
        self, file: SourceFile, names: Sequence[str], delimiter: str, num_given: int
    ) -> Generator[Chunk, None, tuple[str, int] | None]:
        """Yield chunks from a row on; return a column that could not be converted, and where."""
        row = 0
        try:
            converted = self._conversions(file, names, delimiter)
            blocks = self._parse(file, names, delimiter, converted, _BLOCK_BYTES)
            for first, batch, num_bytes in blocks:
                if first >= num_given:
                    yield self._chunk(file, first, batch, converted, num_bytes)
                row = first + batch.num_rows
        except (pa.ArrowException, OSError) as error:
            match = _FAILED_COLUMN.search(str(error))
            name = names[int(match.group(1))] if match else ""
            if name in self._converted.get(file.sha256, {}):
                return name, row
            raise unreadable_error(file.name, error) from error
        return None

    def _parse(
        self,
        file: SourceFile,
        names: Sequence[str],
        delimiter: str,
        converted: Mapping[str, pa.DataType],
        block_bytes: int,
    ) -> Iterator[tuple[int, pa.RecordBatch, int]]:
        """Yield blocks, whose texts that are numbers with a decimal comma have a point instead."""
        decimal = self._decimal or "."
        blocks = _parse_blocks(file, names, delimiter, converted, block_bytes, decimal)
        if decimal == ".":
            if self._decimal is None:
                blocks = self._refuse_decimal_commas(file, delimiter, blocks)
            yield from blocks
            return
        for row, batch, num_bytes in blocks:
            for place, name in enumerate(batch.schema.names):
                if name not in converted and name not in self._as_text:
                    cells = pc.replace_substring_regex(batch[place], _COMMA_CELL, r"\1.\2")
                    batch = batch.set_column(place, name, cells)
            yield row, batch, num_bytes

    def _refuse_decimal_commas(
        self, file: SourceFile, delimiter: str, blocks: Iterator[tuple[int, pa.RecordBatch, int]]
    ) -> Iterator[tuple[int, pa.RecordBatch, int]]:
        """Yield blocks unless one has a column of numbers with a decimal comma.

        They would be texts. Where the comma delimits, such cells are quoted, and may be pairs: then
        only fields that are numbers are refused. Raises: SourceInvalidError.
        """
        for row, batch, num_bytes in blocks:
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                is_number = name in self._numeric
                if (delimiter == "," or name in self._as_text) and not is_number:
                    continue
                found = _find_decimal_comma(column, self._share)
                if found is not None:
                    raise SourceInvalidError(
                        f"{file.name}: column {name!r}: found numbers with a decimal comma, such "
                        f"as {found!r}, expected a decimal point. State `decimal` ',' to read them "
                        "as numbers, or '.' to read them as texts.",
                        parameter="decimal",
                    )
            yield row, batch, num_bytes

    def _chunk(
        self,
        file: SourceFile,
        row: int,
        batch: pa.RecordBatch,
        converted: Mapping[str, pa.DataType],
        num_bytes: int,
    ) -> Chunk:
        columns: dict[str, pa.Array] = {}
        misfits: dict[int, dict[str, Any]] = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            columns[name] = column
            if name not in converted:
                columns[name], wrong = self._convert(column, name)
                for i, cell in wrong.items():
                    misfits.setdefault(i, {})[name] = cell
        records = self._lines.setdefault(file.sha256, _RecordLines(file, self._delimiter))
        lines = _ChunkLines(records, range(row, row + batch.num_rows))
        table = pa.table(columns)
        return Chunk(file, row, table, num_bytes=num_bytes, misfits=misfits, lines=lines)

    def _conversions(
        self, file: SourceFile, names: Sequence[str], delimiter: str
    ) -> Mapping[str, pa.DataType]:
        """Return the columns that Arrow converts: those that are floats or flags at first."""
        if file.sha256 not in self._converted:
            blocks = self._parse(file, names, delimiter, {}, _SAMPLE_BYTES)
            sample = next((batch for _, batch, _ in blocks), None)
            kinds = {}
            for i, name in enumerate(names):
                if sample is None or name in self._kinds:
                    continue
                column, misfits = self._convert(sample.column(i), name)
                is_converted = pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)
                if is_converted and not misfits:
                    kinds[name] = column.type
            self._converted[file.sha256] = kinds
        return self._converted[file.sha256]

    def _convert(self, column: pa.Array, name: str) -> tuple[pa.Array, dict[int, Any]]:
        """Return a column of texts as what it is, and its misfits."""
        kind = self._kinds.get(name)
        if kind == _TEXT:
            return column, {}
        if column.null_count == len(column):
            return pa.nulls(len(column)), {}
        trimmed = _trim(column)
        if kind is None:
            share = 0.0 if name in self._numeric else self._share
            values = _all_of_one(column, trimmed)
            if values is not None and (share or values is not column):
                return values, {}
            if share and not _may_be_typed(trimmed, share):
                return column, {}
            kind = _kind_of(_count_kinds(column), share)
        return _of_kind(column, trimmed, kind)


class _RecordLines:
    """The lines on which the records of a file begin, found by one pass when first asked for.

    Arrow does not tell them. Nearly every file has a record on each line, so only those rows are
    stored behind which the difference of line and row changes: after a cell of several lines, and
    after an empty line.
    """

    def __init__(self, file: SourceFile, delimiter: str | None) -> None:
        self._file, self._delimiter = file, delimiter
        self._rows, self._lines = array("q"), array("q")
        self._is_known: bool | None = None

    def is_known(self) -> bool:
        """Whether the lines are known: a file with cells beyond csv's limit of 128 KiB has none."""
        if self._is_known is None:
            try:
                self._scan()
                self._is_known = True
            except (csv.Error, OSError):
                self._is_known = False
        return self._is_known

    def line(self, row: int) -> int:
        """Return the line, from 1, on which a row's record begins."""
        i = bisect_right(self._rows, row) - 1
        return self._lines[i] + row - self._rows[i]

    def _scan(self) -> None:
        _, delimiter = _header(self._file, self._delimiter)
        with self._file.open() as stream:
            # Each byte as a character: only those of ASCII matter, whatever is between them.
            text = io.TextIOWrapper(stream, "latin-1", newline="")
            reader = csv.reader(text, delimiter=delimiter)
            next(reader, None)
            row, line, expected = 0, reader.line_num + 1, -1
            for record in reader:
                if record:
                    if line != expected:
                        self._rows.append(row)
                        self._lines.append(line)
                    row, expected = row + 1, line + 1
                line = reader.line_num + 1


class _ChunkLines(Sequence[int]):
    """The lines of some rows; empty where they are not known. Looked up only when asked for."""

    def __init__(self, records: _RecordLines, rows: range) -> None:
        self._records, self._rows = records, rows

    def __len__(self) -> int:
        return len(self._rows) if self._records.is_known() else 0

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if isinstance(at, slice):
            return _ChunkLines(self._records, self._rows[at])
        return self._records.line(self._rows[at])


class CsvFormat:
    """Any CSV with a header, by aliases and `--map`."""

    name = "csv"
    about = "any table as CSV with a header, one row per step"
    is_folder = False
    suffix = ".csv"

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        if files[0].head(2) in _UTF_16:
            return True  # reading it says what is wrong with it
        try:
            names, delimiter = _header(files[0], None)
        except SourceInvalidError:
            return False
        # Text with a comma in its first line, such as a program, is no table.
        return len(names) > 1 and (
            not _KNOWN_NAMES.isdisjoint(names)
            or _first_row_length(files[0], delimiter) in (None, len(names))
        )

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        names, delimiter = _header(files[0], options.delimiter)
        if len(names) == 1:
            raise SourceInvalidError(
                f"{files[0].name}: found one column, {names[0]!r}, expected several with "
                f"{delimiter!r} between them. State the `delimiter`; without, it is a comma, a "
                "semicolon, a tab or |.",
                parameter="delimiter",
            )
        # Ids are texts from the start: "7" and "007" are two episodes.
        as_text, numeric = text_columns(options.mapping), numeric_columns(options.mapping)
        tables = CsvTables(
            files,
            [*as_text, *options.episode_by],
            numeric,
            delimiter=options.delimiter,
            decimal=options.decimal,
        )
        return TabularReader(tables, options, files[0].name)

    def write(self, episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> WriteResult:
        """Write one file: vectors and objects as JSON in a cell, floats exact to the last digit."""
        with path.open("xb") as stream:
            stream.write(csv_header(standard_names(spec)))
            return write_tables(
                episodes,
                spec,
                lambda table: stream.write(csv_lines(table)),
                table_bytes=TEXT_TABLE_BYTES,
            )


def csv_columns(file: SourceFile, delimiter: str | None = None) -> list[str]:
    """Return the names in a file's header. Raises: SourceInvalidError."""
    return _header(file, delimiter)[0]


def text_columns(mapping: Mapping[str, str]) -> set[str]:
    """Return the columns that name something, or are times: those mapped, and the aliases."""
    mapped = {mapping[ours] for ours in _TEXT_FIELDS if ours in mapping}
    return mapped | {name for ours in _TEXT_FIELDS for name in ALIASES[ours]}


def numeric_columns(mapping: Mapping[str, str]) -> set[str]:
    """Return the columns of the fields that are a number or a flag."""
    columns = {mapping[ours] for ours in _NUMERIC_FIELDS if ours in mapping}
    unmapped = [ours for ours in _NUMERIC_FIELDS if ours not in mapping]
    columns |= {name for ours in unmapped for name in ALIASES[ours]}
    columns |= {*DONE_ALIASES} if "terminated" in unmapped else set()
    others = {
        name
        for ours, theirs in mapping.items()
        if ours not in _NUMERIC_FIELDS
        for name in theirs.split(",")
    }
    return columns - others


def _parse_blocks(
    file: SourceFile,
    names: Sequence[str],
    delimiter: str,
    converted: Mapping[str, pa.DataType],
    block_bytes: int,
    decimal: str,
) -> Iterator[tuple[int, pa.RecordBatch, int]]:
    """Yield the number of the first row of each block, its rows, and how many bytes were read.

    Raises: pa.ArrowException, whose rows count from the block's first one.
    """
    parse_options = pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    convert_options = pa_csv.ConvertOptions(
        column_types={name: converted.get(name, pa.string()) for name in names},
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        null_values=[""],
        decimal_point=decimal,
    )

    def parse(block: bytes, *, use_threads: bool) -> pa.Table:
        return pa_csv.read_csv(
            pa.BufferReader(block),
            pa_csv.ReadOptions(
                block_size=len(block) + 1, column_names=names, use_threads=use_threads
            ),
            parse_options,
            convert_options,
        )

    row = 0
    try:
        with file.open() as stream:
            blocks = read_blocks(stream, delimiter, block_bytes)
            next(blocks, None)
            for block in blocks:
                if not block.strip(b"\r\n"):
                    continue
                try:
                    table = parse(block, use_threads=True)
                except pa.ArrowInvalid:
                    # Only without threads does it say in which row.
                    table = parse(block, use_threads=False)
                for batch in table.combine_chunks().to_batches():
                    yield row, batch, stream.tell()
                    row += batch.num_rows
    except RecordTooLongError as error:
        raise SourceInvalidError(
            f"{file.name} from row {row}: found {error}, expected a shorter one. A quote may never "
            "be closed: correct the row, or leave the file out."
        ) from error
    except pa.ArrowInvalid as error:
        if "invalid UTF8" in str(error):
            column = _FAILED_COLUMN.search(str(error))
            where = "" if column is None else f" column {names[int(column[1])]!r}:"
            raise SourceInvalidError(
                f"{file.name}:{where} found bytes that are no UTF-8 from row {row} on, expected "
                "CSV in UTF-8. Convert the file, as with `iconv -f WINDOWS-1252 -t UTF-8`."
            ) from error
        if (match := _FAILED_ROW.search(str(error))) is None:
            raise
        number, expected, found = map(int, match.groups())
        lines = _RecordLines(file, delimiter)
        where = f"{file.name} row {row + number - 1}"
        if lines.is_known():
            where = f"{file.name} line {lines.line(row + number - 1)}"
        raise SourceInvalidError(
            f"{where}: could not be read (found {found} cells, expected {expected} as in the "
            "header). Correct the line, or leave the file out."
        ) from error


def _header(file: SourceFile, delimiter: str | None) -> tuple[list[str], str]:
    """Return the names in a file's first line, and what is between them.

    delimiter: None to find the one that the line has most of. Raises: SourceInvalidError.
    """
    head = file.head(_HEAD_BYTES)
    if head[:2] in _UTF_16:
        raise SourceInvalidError(
            f"{file.name}: found UTF-16, expected CSV in UTF-8. Convert it, as with "
            "`iconv -f UTF-16 -t UTF-8`."
        )
    try:
        first = head.partition(b"\n")[0]
        if delimiter is None:
            delimiter = max(_DELIMITERS, key=lambda mark: first.count(mark.encode()))
        if not (end := first_end(head, delimiter)) and len(head) == _HEAD_BYTES:
            head = file.head(_MAX_HEADER_BYTES)
            end = first_end(head, delimiter)
        if not end and len(head) == _MAX_HEADER_BYTES:
            raise SourceInvalidError(
                f"{file.name}: found a header of more than {_MAX_HEADER_BYTES:,} bytes, expected "
                "the columns' names in the first line. Leave columns out, or shorten their names."
            )
        text = (head[:end] if end else head).decode("utf-8-sig")
        names = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise SourceInvalidError(
            f"{file.name}: expected CSV in UTF-8 with a header ({error})."
        ) from error
    if names and all(_is_number(name) for name in names):
        raise SourceInvalidError(
            f"{file.name}: found numbers in the first line, expected the names of the columns. "
            "Add a header line."
        )
    return names, delimiter


def _find_decimal_comma(column: pa.Array, share: float) -> str | None:
    """Return a number with a decimal comma of a column that has nothing but numbers, else None.

    share: what part of its cells have to be numbers.
    """
    if not pa.types.is_string(column.type) or column.null_count == len(column):
        return None
    ends, data = _cells(column)
    if not (data[ends[0] : ends[-1]] == ord(",")).any():
        return None  # nearly always, at no cost
    cells = pc.utf8_trim_whitespace(column.drop_null())
    if not _may_be_typed(cells, share):
        return None
    has_comma = pc.match_substring_regex(cells, _COMMA_CELL)
    num_commas = int(pc.sum(has_comma).as_py() or 0)
    if not num_commas:
        return None
    is_number = pc.or_(has_comma, pc.match_substring_regex(cells, _NUMBER))
    if int(pc.sum(is_number).as_py()) < share * len(cells):
        return None
    found: str = cells.filter(has_comma)[0].as_py()
    return found


def _first_row_length(file: SourceFile, delimiter: str) -> int | None:
    """Return how many cells the first row has; None where there is none within the head."""
    head = file.head(_HEAD_BYTES)
    rest = head[first_end(head, delimiter) or len(head) :].lstrip(b"\r\n")
    if not (end := first_end(rest, delimiter)) and len(head) == _HEAD_BYTES:
        return None
    text = rest[: end or len(rest)].decode(errors="replace")
    try:
        row = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), None)
    except csv.Error:
        return None
    return None if row is None else len(row)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _all_of_one(column: pa.Array, trimmed: pa.Array) -> pa.Array | None:
    """Return a column all of whose cells are JSON, numbers or flags; None where one is not."""
    first = column.drop_null()[0].as_py().lstrip()
    if first.startswith(("[", "{")):
        values = _parse_nested(column)
        return None if values is column else values
    for kind in (pa.int64(), pa.float64(), pa.bool_()):
        try:
            cast = trimmed.cast(kind)
        except pa.ArrowException:
            continue
        if kind == pa.int64() and _has_names(trimmed):
            return column
        is_great = kind == pa.float64() and (np.abs(cast.to_numpy(False)) >= _TOO_GREAT).any()
        return None if is_great and _are_whole(trimmed) else cast
    return None


def _are_whole(trimmed: pa.Array) -> bool:
    """Whether all cells are whole numbers, of whatever length."""
    return bool(pc.all(pc.match_substring_regex(trimmed, _WHOLE)).as_py())


def _has_names(column: pa.Array) -> bool:
    """Whether a column of integers has some that are written as names are."""
    ends, data = _cells(column)
    if not len(data):
        return False
    lengths = np.diff(ends)
    starts = ends[:-1]
    # In nearly all columns, this leaves no cell.
    rows = np.flatnonzero((lengths > 1) & _BEGINS_NAMES[data[np.minimum(starts, len(data) - 1)]])
    zeros = starts[rows] + (data[starts[rows]] != ord("0"))
    zeros = zeros[zeros + 1 < ends[1:][rows]]
    return bool(((data[zeros] == ord("0")) & _FOLLOWS_ZERO[data[zeros + 1]]).any())


def _may_be_typed(trimmed: pa.Array, share: float = SHARE) -> bool:
    """Whether that share of a column's cells may be something else than text, by a few bytes each.

    Never wrong where it denies: it spares columns of names and times the patterns, which cost a
    hundred times as much.
    """
    cells = trimmed.drop_null()
    ends, data = _cells(cells)
    starts, lengths = ends[:-1], np.diff(ends)
    if not len(data):
        return False
    last = len(data) - 1
    is_likely = (lengths > 0) & _BEGINS[data[np.minimum(starts, last)]]
    is_likely &= _FINISHES[data[np.maximum(ends[1:] - 1, 0)]]
    # A date has a dash where a number has none, unless behind an e.
    is_long = lengths > 4
    dashes = data[np.minimum(starts + 4, last)] == ord("-")
    digits = _DIGITS[data[np.minimum(starts + 3, last)]]
    is_likely &= ~(is_long & dashes & digits)
    return bool(is_likely.sum() >= share * len(cells))


def _cells(column: pa.Array) -> tuple[Any, Any]:
    """Return where the cells of a column of texts begin, [n + 1], and the bytes that they are."""
    ends = np.frombuffer(column.buffers()[1], np.int32)
    ends = ends[column.offset : column.offset + len(column) + 1]
    return ends, np.frombuffer(column.buffers()[2] or b"", np.uint8)


def _trim(column: pa.Array) -> pa.Array:
    """Return a column's cells without blanks around them.

    Where no byte is a blank, or of a character beyond ASCII, nothing is copied: that takes a
    twentieth of the time.
    """
    ends, data = _cells(column)
    used = data[ends[0] : ends[-1]]
    if len(used) and used.min() > ord(" ") and used.max() < _BEYOND_ASCII:
        return column
    return pc.utf8_trim_whitespace(column)


def _bytes(characters: str) -> Any:
    mask = np.zeros(256, np.bool_)
    mask[[*characters.encode()]] = True
    return mask


_DIGITS: Final = _bytes("0123456789")
_BEGINS_NAMES: Final = _bytes("0+-")
_FOLLOWS_ZERO: Final = _bytes("0123456789xX")
_BEGINS: Final = _bytes("0123456789+-.nNiItTfF[{")
_FINISHES: Final = _bytes("0123456789.nNfFyYeE]}")


def _count_kinds(column: pa.Array) -> Counter[str]:
    """Count what the cells of a column of texts are."""
    cells = pc.utf8_trim_whitespace(column.drop_null())
    cells = cells.filter(pc.not_equal(cells, ""))
    patterns = {_NUMBERS: _NUMBER, _BITS: _BIT, _FLAGS: _FLAG, _NESTED: _JSON}
    patterns[_NAMES] = _NOT_A_NUMBER
    matched = {kind: pc.match_substring_regex(cells, text) for kind, text in patterns.items()}
    counts = {kind: int(pc.sum(rows).as_py() or 0) for kind, rows in matched.items()}
    return Counter({**counts, "all": len(cells)})


def _kind_of(counts: Mapping[str, int], share: float) -> str:
    """Return a column's kind by the counts of its cells; a share of 0 is of numbers or flags."""
    totals = {
        _NUMBERS: counts[_NUMBERS],
        _FLAGS: counts[_FLAGS] + counts[_BITS] if counts[_FLAGS] else 0,
        _NESTED: counts[_NESTED] if share else 0,
    }
    majority = max(totals, key=lambda kind: totals[kind])
    # 007 is a name, and so are the others of its column.
    is_text = share and (counts[_NAMES] or totals[majority] < share * counts["all"])
    return _TEXT if is_text or not totals[majority] else majority


def _of_kind(column: pa.Array, trimmed: pa.Array, kind: str) -> tuple[pa.Array, dict[int, Any]]:
    """Read a column as a kind; return it and the cells that are none of it."""
    if kind == _TEXT:
        return column, {}
    there = np.asarray(column.is_valid()) & np.asarray(pc.not_equal(trimmed, "").fill_null(False))
    pattern = {_NUMBERS: _NUMBER, _FLAGS: f"{_FLAG}|{_BIT}", _NESTED: _JSON}[kind]
    fits = there & np.asarray(pc.match_substring_regex(trimmed, pattern).fill_null(False))
    if kind == _NUMBERS:
        names = pc.match_substring_regex(trimmed, _NOT_A_NUMBER).fill_null(False)
        fits &= ~np.asarray(names)
    # Blanks alone are a text, as they are in columns of texts.
    wrong = np.flatnonzero(np.asarray(column.is_valid()) & ~fits).tolist()
    misfits = {i: column[i].as_py() for i in wrong}
    cells = pc.if_else(pa.array(fits), trimmed, pa.scalar(None, pa.string()))
    if kind == _FLAGS:
        return cells.cast(pa.bool_()), misfits
    if kind == _NESTED:
        values, others = _nested_rows(cells)
    else:
        values, others = _numbers_of(cells)
    return values, {**misfits, **others}


def _numbers_of(cells: pa.Array) -> tuple[pa.Array, dict[int, Any]]:
    """Return numbers as int64 or float64; integers beyond int64 among integers are misfits."""
    try:
        return cells.cast(pa.int64()), {}
    except pa.ArrowException:
        numbers = cells.cast(pa.float64())
    great = np.abs(numbers.to_numpy(zero_copy_only=False)) >= _TOO_GREAT
    if not great.any() or not _are_whole(cells):
        return numbers, {}
    numerals = pc.if_else(pa.array(~great), pc.utf8_ltrim(cells, "+"), pa.scalar(None, pa.string()))
    return numerals.cast(pa.int64()), {
        i: _parse_great(cells[i].as_py()) for i in np.flatnonzero(great).tolist()
    }


def _parse_great(text: str) -> int | str:
    """Return an integer; as text beyond 308 digits, which no number of ours has."""
    return int(text) if len(text) <= 309 else text


def _nested_rows(cells: pa.Array) -> tuple[pa.Array, dict[int, Any]]:
    """Parse JSON in cells one by one; what is none, or not as most are, is a misfit."""
    rows: list[dict[str, Any]] = []
    misfits: dict[int, Any] = {}
    for i, cell in enumerate(cells.to_pylist()):
        try:
            rows.append({"v": None if cell is None else json.loads(cell)})
        except (ValueError, RecursionError):
            rows.append({"v": None})
            misfits[i] = cell
    try:
        table, others = parse_rows(rows)
    except (pa.ArrowException, OverflowError, RecursionError):
        return pa.nulls(len(cells)), {**misfits, **dict(enumerate(cells.to_pylist()))}
    values = pa.nulls(len(cells))
    if "v" in table.schema.names:
        values = table.column("v").combine_chunks()
    return values, {**misfits, **{i: row["v"] for i, row in others.items()}}


def _parse_nested(column: pa.Array) -> pa.Array:
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
        values = parse_json("".join(rows.to_pylist()).encode()).column("v").combine_chunks()
        return values if len(values) == len(column) else column
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
