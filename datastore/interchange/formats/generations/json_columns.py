"""JSON columns: lines that are an object of lists, one for each column, read row by row.

A line has all values of one column before those of the next, so that a row is spread over the whole
line. One pass notes where each value is; rows are read from there. Memory holds one row, and 16
bytes for each value.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

import numpy as np

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import unreadable_error

# One row may have this many bytes, as one line may in other logs.
MAX_ROW_BYTES: Final = 64 << 20
_BLOCK_BYTES: Final = 4 << 20
_MAX_KEY_BYTES: Final = 1 << 10
# A value that is no list is read for the message about it alone.
_SHOWN_BYTES: Final = 1 << 10
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_BLANK: Final = re.compile(rb"[ \t\r]*+")
_SCALAR: Final = re.compile(rb"[^\s,\[\]{}\":]*+")
_BETWEEN_BRACKETS: Final = re.compile(rb"[^\"\[\]{}\n]*+")
_HEAD_BYTES: Final = 256
_FIRST_COLUMN: Final = re.compile(rb'\s*\{\s*"([^"\\]*)"\s*:\s*\[\s*("|null|\]|-?\d)')
_BOM: Final = b"\xef\xbb\xbf"


@dataclass
class ColumnLine:
    """A line: where the values of each column are in the file, as pairs of begin and end.

    line: its number, from 1. others: the values that are no lists. fault: what is wrong with the
    line's structure, None for one that was read.
    """

    line: int
    bounds: dict[str, array[int]] = field(default_factory=dict)
    others: dict[str, tuple[int, int]] = field(default_factory=dict)
    fault: str | None = None

    def count(self, name: str) -> int:
        """Return the number of values of a column."""
        return len(self.bounds[name]) // 2


class ColumnFile:
    """A file of such lines, opened. Raises: SourceInvalidError."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        try:
            self._stream: BinaryIO = file.path.open("rb")
        except OSError as error:
            raise unreadable_error(file.name, error) from error

    def __enter__(self) -> ColumnFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def lines(self) -> Iterator[ColumnLine]:
        """Yield the lines that are not empty. Raises: SourceInvalidError."""
        try:
            with self._file.path.open("rb") as stream:
                yield from _Scan(stream, self._stream).lines()
        except OSError as error:
            raise unreadable_error(self._file.name, error) from error

    def read_row(self, line: ColumnLine, number: int) -> dict[str, Any]:
        """Return one value of each column of a line.

        Raises: SourceInvalidError for more than 64 MiB or values that are not JSON.
        """
        places = {
            name: (bounds[2 * number], bounds[2 * number + 1])
            for name, bounds in line.bounds.items()
        }
        num_bytes = sum(end - begin for begin, end in places.values())
        if num_bytes > MAX_ROW_BYTES:
            raise SourceInvalidError(
                f"found {num_bytes:,} bytes, expected at most {MAX_ROW_BYTES >> 20} MiB"
            )
        return {name: self._read(name, *place) for name, place in places.items()}

    def show(self, line: ColumnLine, name: str) -> Any:
        """Return a value that is no list, or the begin of its text."""
        begin, end = line.others[name]
        try:
            return self._read(name, begin, min(end, begin + _SHOWN_BYTES))
        except SourceInvalidError:
            return _read_bytes(self._stream, begin, min(end, begin + _SHOWN_BYTES)).decode(
                errors="replace"
            )

    def _read(self, name: str, begin: int, end: int) -> Any:
        try:
            return json.loads(_read_bytes(self._stream, begin, end).decode())
        except OSError as error:
            raise unreadable_error(self._file.name, error) from error
        except (RecursionError, ValueError) as error:
            raise SourceInvalidError(f"{name}: found {error}, expected JSON") from error


def begins_with_columns(file: SourceFile, names: Sequence[str]) -> bool:
    """Whether a file begins with one of these columns, as a list of plain values."""
    head = file.head(_HEAD_BYTES).removeprefix(_BOM)
    begun = _FIRST_COLUMN.match(head)
    return begun is not None and begun.group(1).decode(errors="replace") in names


def read_first_columns(file: SourceFile) -> Sequence[str]:
    """Return the columns of a file's first line; none if that is no such line.

    Cost: a pass over the line.
    """
    try:
        with ColumnFile(file) as columns:
            line = next(columns.lines(), None)
    except SourceInvalidError:
        return ()
    return () if line is None else tuple(line.bounds)


class _StructureError(Exception):
    """A line is no object of lists."""


def _read_bytes(stream: BinaryIO, begin: int, end: int) -> bytes:
    stream.seek(begin)
    return stream.read(end - begin)


class _Scan:
    """Finds values in a stream, which is read once; `keys` is another stream of the same bytes."""

    def __init__(self, stream: BinaryIO, keys: BinaryIO) -> None:
        self._stream = stream
        self._keys = keys
        self._block = b""
        self._base = 0
        self._place = 0
        self._quotes: list[int] = []
        self._at_quote = 0
        self._is_escaping = False

    def lines(self) -> Iterator[ColumnLine]:
        """Yield the lines that are not empty."""
        self._load()
        if self._block.startswith(_BOM):
            self._place = len(_BOM)
        number = 0
        while found := self._peek():
            number += 1
            if found != b"\n":
                yield self._read_line(number)
                self._skip_line()
            self._place += 1

    def _read_line(self, number: int) -> ColumnLine:
        line = ColumnLine(number)
        try:
            self._read_object(line)
            if (rest := self._peek()) not in (b"\n", b""):
                raise _StructureError(f"{rest.decode(errors='replace')!r} after the object")
        except _StructureError as error:
            return ColumnLine(number, fault=f"found {error}, expected an object of columns")
        return line

    def _skip_line(self) -> None:
        """Move to the end of the line, or of the stream."""
        while (place := self._block.find(b"\n", self._place)) < 0:
            if not self._load():
                return
        self._place = place

    def _read_object(self, line: ColumnLine) -> None:
        self._take(b"{")
        if self._peek() == b"}":
            self._place += 1
            return
        while True:
            name = self._read_key()
            if name in line.bounds or name in line.others:
                raise _StructureError(f"the key {name!r} twice")
            self._take(b":")
            if self._peek() == b"[":
                line.bounds[name] = self._read_list()
            else:
                line.others[name] = self._skip_value()
            if not self._has_next(b"}"):
                return

    def _read_list(self) -> array[int]:
        bounds = array("q")
        self._take(b"[")
        if self._peek() == b"]":
            self._place += 1
            return bounds
        while True:
            bounds.extend(self._skip_value())
            if not self._has_next(b"]"):
                return bounds

    def _read_key(self) -> str:
        begin, end = self._skip_value()
        if end - begin > _MAX_KEY_BYTES:
            raise _StructureError("a key of more than 1 KiB")
        try:
            key = json.loads(_read_bytes(self._keys, begin, end).decode())
        except ValueError as error:
            raise _StructureError("a key that is no text") from error
        if not isinstance(key, str):
            raise _StructureError(f"{key!r} as a key")
        return key

    def _has_next(self, closing: bytes) -> bool:
        """Move past a comma, or past what closes a list or object, and return whether it is one."""
        found = self._peek()
        if found not in (b",", closing):
            raise _StructureError(f"{found.decode(errors='replace')!r} after a value")
        self._place += 1
        return found == b","

    def _take(self, expected: bytes) -> None:
        if (found := self._peek()) != expected:
            raise _StructureError(f"{found.decode(errors='replace')!r} for {expected.decode()!r}")
        self._place += 1

    def _skip_value(self) -> tuple[int, int]:
        """Move past a value, and return where it begins and ends in the file."""
        first = self._peek()
        begin = self._base + self._place
        if first == b'"':
            self._skip_string()
        elif first in (b"{", b"["):
            self._skip_nested()
        else:
            self._skip(_SCALAR)
            if self._base + self._place == begin:
                raise _StructureError(f"{first.decode(errors='replace')!r} for a value")
        return begin, self._base + self._place

    def _skip_nested(self) -> None:
        depth = 0
        while True:
            self._skip(_BETWEEN_BRACKETS)
            found = self._block[self._place : self._place + 1]
            if found == b'"':
                self._skip_string()
                continue
            if found in (b"", b"\n"):
                raise _StructureError("the end of the line in a value")
            self._place += 1
            depth += 1 if found in (b"{", b"[") else -1
            if not depth:
                return

    def _skip_string(self) -> None:
        """Move past a text, which begins here and ends at the next quote that is not escaped."""
        self._place += 1
        while True:
            while self._at_quote < len(self._quotes):
                quote = self._quotes[self._at_quote]
                if quote >= self._place:
                    self._place = quote + 1
                    return
                self._at_quote += 1
            if not self._load():
                raise _StructureError("the end of the file in a text")

    def _skip(self, pattern: re.Pattern[bytes]) -> None:
        while True:
            match = pattern.match(self._block, self._place)
            assert match is not None  # each pattern matches nothing, too
            self._place = match.end()
            if self._place < len(self._block) or not self._load():
                return

    def _peek(self) -> bytes:
        """Return the byte after blanks; nothing at the end of the file."""
        self._skip(_BLANK)
        return self._block[self._place : self._place + 1]

    def _load(self) -> bool:
        """Read the next block, and find its quotes that are not escaped; False at the end."""
        self._base += len(self._block)
        self._block = self._stream.read(_BLOCK_BYTES)
        self._place = self._at_quote = 0
        values = np.frombuffer(self._block, np.uint8)
        backslashes = np.flatnonzero(values == _BACKSLASH)
        quotes = np.flatnonzero(values == _QUOTE)
        # A character is escaped after an odd number of backslashes.
        is_first = np.diff(backslashes, prepend=-2) > 1
        firsts = backslashes[is_first]
        lengths = np.diff(np.flatnonzero(is_first), append=len(backslashes))
        odd = lengths % 2 == 1
        if self._is_escaping:
            if len(firsts) and firsts[0] == 0:
                odd[0] = not odd[0]
            else:
                firsts, lengths = np.append(firsts, 0), np.append(lengths, 0)
                odd = np.append(odd, True)
        ends = (firsts + lengths)[odd]
        is_escaped = np.zeros(len(values) + 1, np.bool_)
        is_escaped[ends] = True
        self._is_escaping = bool(is_escaped[-1])
        self._quotes = quotes[~is_escaped[quotes]].tolist()
        return bool(self._block)
