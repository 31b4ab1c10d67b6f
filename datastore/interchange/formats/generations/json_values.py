"""JSON values: those of a file one after the other, be they lines, an array, or just one.

Memory holds one value and a block, however long the array is. What a person could not have meant is
refused, not guessed at: a key that is there twice, NaN, a value that is cut off.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.tabular.tables import is_encodable
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import unreadable_error

# One value may be this long, in characters: a log's records are apart from one another.
MAX_VALUE_CHARS: Final = 64 << 20
_BLOCK_BYTES: Final = 1 << 20
# json.dumps makes an encoder for each value, which takes longer than a short value does.
_dump_text: Final = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False
).encode
_SPACE: Final = " \t\r\n"
# An error this close to the end of what was read may be for want of the rest: `tru`, `\\ud83`.
_CUT_CHARS: Final = 16


@dataclass(frozen=True)
class JsonValue:
    """A value of a file: its number, from 0, and the line it begins in, from 1.

    fault: what is wrong with it, None for a value that was read.
    """

    number: int
    line: int
    value: Any
    fault: str | None = None


class _DuplicateKeyError(ValueError):
    """An object names a key twice: which of the two is meant is not known."""


def json_values(
    file: SourceFile,
    *,
    as_lines: bool = False,
    resumes: bool = False,
    max_chars: int = MAX_VALUE_CHARS,
) -> Iterator[JsonValue]:
    """Read values one by one: the elements of one array, or else values apart by white space.

    `as_lines` takes arrays as values too, as of lines that are arrays each. `resumes` yields a
    value that cannot be read with its fault, and goes on at the next line that begins with an
    object; in an array, and after bytes that are not UTF-8, a fault is the last value. Cost: the
    reading, and for a value longer than a block another attempt each time that what was read has
    doubled.

    Raises: SourceInvalidError naming file and line, for what is no JSON, nested too deeply, or
    longer than `max_chars`; with `resumes`, only for a file that cannot be opened.
    """
    file.check_unchanged()
    with file.open() as stream:
        text = _TextStream(file, stream, max_chars)
        number = 0
        try:
            for one in _iter_values(text, as_lines, resumes):
                number = one.number + 1
                yield one
        except SourceInvalidError as error:
            if not resumes:
                raise
            yield JsonValue(number, text.line, None, str(error))


def _iter_values(text: _TextStream, as_lines: bool, resumes: bool) -> Iterator[JsonValue]:
    is_array = not as_lines and text.skip("") == "["
    if is_array:
        text.position += 1
    number = 0
    while text.skip("," if is_array and number else ""):
        if is_array and text.peek() == "]":
            text.position += 1
            if rest := text.skip(""):
                raise text.error(f"found {rest!r} after the array", "nothing")
            return
        line = text.line
        try:
            value = JsonValue(number, line, text.value())
        except SourceInvalidError as error:
            if is_array or not resumes:
                raise
            value = JsonValue(number, line, None, str(error))
            text.skip_value()
        yield value
        number += 1
    if is_array:
        raise text.error("found the end of the file inside its array", "]")


def load_json(text: bytes) -> Any:
    """Return the one value of a text, as strictly as `json_values` reads a file.

    Raises: ValueError, RecursionError.
    """
    return _make_decoder().decode(text.decode("utf-8-sig"))


def dump_json(value: Any) -> str:
    """Return a value as compact JSON, in text that UTF-8 can hold whatever the value has.

    Raises: RecursionError where it is nested too deeply.
    """
    text = _dump_text(value)
    # Half of a surrogate pair is no character: escaped, it survives.
    return text if is_encodable(text) else json.dumps(value, separators=(",", ":"), allow_nan=False)


def dump_metadata(value: Any) -> str:
    """Return values that have no column as JSON, as `dump_json`; NaN and infinity become text.

    Raises: RecursionError where it is nested too deeply.
    """
    try:
        return dump_json(value)
    except ValueError:
        return dump_json(json.loads(json.dumps(value), parse_constant=str))


class _TextStream:
    """The decoded text of a stream, from `position` on, read as it is needed."""

    def __init__(self, file: SourceFile, stream: BinaryIO, max_chars: int) -> None:
        self._file = file
        self._stream = stream
        self._max_chars = max_chars
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._decoder = _make_decoder()
        self._buffer = ""
        self._num_lines = 0
        self._counted = 0
        self._is_at_end = False
        self.position = 0

    @property
    def line(self) -> int:
        """The line that `position` is in. Cost: the text since it was last read."""
        self._num_lines += self._buffer.count("\n", self._counted, self.position)
        self._counted = self.position
        return 1 + self._num_lines

    def peek(self) -> str:
        """Return the character at `position`, or nothing at the end."""
        return self._buffer[self.position : self.position + 1]

    def skip(self, separator: str) -> str:
        """Move past white space and at most one separator; return the character there."""
        last = ""
        while True:
            character = self.peek()
            if not character:
                if not self._read_more():
                    return ""
            elif character in _SPACE:
                self.position += 1
            elif character == separator and not last:
                self.position, last = self.position + 1, separator
            elif separator and not last and character != "]":
                raise self.error(f"found {character!r} after an element", f"{separator!r} or ]")
            else:
                return character

    def value(self) -> Any:
        """Return the value that begins at `position`, and move past it."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self.position)
            except json.JSONDecodeError as error:
                if not self._is_cut_off(error) or not self._read_more(len(self._buffer)):
                    raise self.error(f"found {error.msg.lower()}", "JSON") from error
            except RecursionError as error:
                raise self.error("found values nested too deeply", "a few levels") from error
            except ValueError as error:
                raise self.error(f"found {error}", "unambiguous JSON") from error
            else:
                # A number may go on in what was not read yet.
                if end < len(self._buffer) or not self._read_more():
                    self.position = end
                    return value

    def skip_value(self) -> None:
        """Move to the next line that begins with an object, or to the end of the stream."""
        while (end := self._buffer.find("\n{", self.position)) < 0:
            # A newline may be the last character that was read.
            self.position = max(self.position, len(self._buffer) - 1)
            if not self._read_more():
                self.position = len(self._buffer)
                return
        self.position = end + 1

    def error(self, found: str, expected: str) -> SourceInvalidError:
        """Return the error of what is at `position`."""
        return SourceInvalidError(
            f"{self._file.name} in the value that begins in line {self.line}: {found}, expected "
            f"{expected}. Correct it, or leave the file out."
        )

    def _is_cut_off(self, error: json.JSONDecodeError) -> bool:
        if error.msg.startswith("Unterminated string"):
            return True
        return error.pos >= len(self._buffer) - _CUT_CHARS

    def _read_more(self, num_bytes: int = 0) -> bool:
        """Read on, and forget what `position` is past; False at the end of the stream."""
        if self._is_at_end:
            return False
        pending = len(self._buffer) - self.position
        if pending > self._max_chars:
            raise self.error(
                f"found one value of more than {self._max_chars:,} characters",
                "at most that many in each record",
            )
        try:
            data = self._stream.read(max(_BLOCK_BYTES, num_bytes))
            text = self._decode.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise self.error(f"found bytes that are not UTF-8 ({error.reason})", "text") from error
        except (OSError, EOFError) as error:
            raise unreadable_error(self._file.name, error) from error
        self._is_at_end = not data
        self._num_lines += self._buffer.count("\n", self._counted, self.position)
        self._buffer = self._buffer[self.position :] + text
        self.position = self._counted = 0
        return bool(data)


def _make_decoder() -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _DuplicateKeyError(f"the key {twice!r} twice in one object")
    return body


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name}, which is not JSON")
