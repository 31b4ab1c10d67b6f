"""Number lists: parse lines of JSON, with long lists of numbers as arrays.

A line of a trainer's log is nearly all ids, flags and log-probs. `json` makes an object of each
number; here, those of many lines are converted at once by numpy and Arrow, mostly without the
interpreter's lock. `json` parses the rest of each line, so the results are the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.storage.arrow_values import numbers

_Block = TypeVar("_Block")
_Result = TypeVar("_Result")

# A shorter list is read no faster this way.
_MIN_BYTES: Final = 48
_CACHED_BYTES: Final = 1 << 18
_THREADS: Final = 2
_OF_NUMBERS: Final = b"0123456789+-.eE, "
_FLAGS: Final = b"01"
# Not valid in JSON numbers, but accepted by Arrow's conversion: hexadecimal numbers, `nan`, `inf`,
# ends of lines.
_FOREIGN: Final = (b"x", b"X", b"n", b"N", b"\r", b"\n")
_COMMA, _POINT, _ZERO, _MINUS, _SPACE, _NEWLINE = b",.0- \n"
_WORD_BYTES: Final = 8
_EXPONENTS: Final = tuple(b"eE")
_AFTER_E: Final = np.frombuffer(b"eE+", np.uint8)
# No quoting and no skipped lines: each line is one value.
_READ: Final = pc.ReadOptions(use_threads=False, column_names=["value"], block_size=1 << 20)
_PARSE: Final = pc.ParseOptions(
    delimiter="\x01", quote_char=False, escape_char=False, ignore_empty_lines=False
)


class _ForeignError(ValueError):
    """A text is not a list of numbers of one type."""


@dataclass
class _Cut:
    """A list in a line: the text between its brackets, and, once converted, its values."""

    text: bytes
    values: Array | None = None


def parse_lines(texts: Sequence[bytes]) -> list[Any]:
    """Return the value of each line as `json.loads` does, with long lists of numbers as arrays.

    A list of whole numbers of 64 bits is an array int64 [N], one of numbers with a point or an
    exponent float64 [N]. A line that cannot be parsed this way is None; `json.loads` parses it or
    raises.
    """
    lines = [_split(text) for text in texts]
    cuts = [cut for parts in lines for cut in parts if isinstance(cut, _Cut)]
    try:
        _convert(cuts)
    except _ForeignError:
        # One of them is malformed: only its line is left out.
        for cut in cuts:
            try:
                _convert([cut])
            except _ForeignError:
                cut.values = None
    return [_load(parts) for parts in lines]


def map_ahead(
    function: Callable[[_Block], _Result], blocks: Iterable[_Block]
) -> Generator[_Result]:
    """Yield a function's result for each block, in order, while threads compute the next ones.

    At most three results are held.
    """
    with ThreadPoolExecutor(_THREADS, "replaylake-parse") as pool:
        pending: list[Future[_Result]] = []
        try:
            for block in blocks:
                pending.append(pool.submit(function, block))
                if len(pending) > _THREADS:
                    yield pending.pop(0).result()
            while pending:
                yield pending.pop(0).result()
        finally:
            for future in pending:
                future.cancel()


def _split(text: bytes) -> list[bytes | _Cut]:
    """Return the parts of a line: lists that may be numbers, and the text between them."""
    parts: list[bytes | _Cut] = []
    begin, place = 0, text.find(b"[")
    while place >= 0:
        end = place
        # Strings contain brackets as well: skip those that are not followed by numbers.
        if not text[place + 1 : place + _MIN_BYTES].translate(None, _OF_NUMBERS):
            end = text.find(b"]", place)
            if end < 0:
                break  # no other list ends either
        if end - place > _MIN_BYTES:
            parts += [text[begin:place], _Cut(text[place + 1 : end])]
            begin = end + 1
        place = text.find(b"[", max(end, place + 1))
    return [*parts, text[begin:]]


def _load(parts: Sequence[bytes | _Cut]) -> Any:
    """Return the value of a line, None if `json.loads` has to parse it.

    Each list is replaced by NaN, for which `json` calls back in order. There are fewer calls than
    lists if one of them was inside a string.
    """
    arrays = [part.values for part in parts if isinstance(part, _Cut)]
    rest = [part for part in parts if isinstance(part, bytes)]
    own = any(b"NaN" in part or b"Infinity" in part for part in rest)
    if own or any(array is None for array in arrays):
        return None
    values = iter(arrays)
    try:
        record = json.loads(b"NaN".join(rest), parse_constant=lambda _: next(values))
    except (RecursionError, StopIteration, ValueError):
        return None
    return record if next(values, None) is None else None


def _convert(cuts: Sequence[_Cut]) -> None:
    """Set the values of lists. Raises: _ForeignError if one contains anything but numbers."""
    integers: list[_Cut] = []
    floats: list[_Cut] = []
    for cut in cuts:
        is_float = b"." in cut.text or any(byte in cut.text for byte in _EXPONENTS)
        cut.values = _read_flags(cut.text, is_float)
        if cut.values is None:
            (floats if is_float else integers).append(cut)
    for alike in (integers, floats):
        for some in _pack(alike):
            _convert_alike(some, is_float=alike is floats)


def _pack(cuts: Sequence[_Cut]) -> Iterator[list[_Cut]]:
    """Yield groups of lists whose text fits into the processor's cache."""
    some: list[_Cut] = []
    num_bytes = 0
    for cut in cuts:
        some.append(cut)
        num_bytes += len(cut.text)
        if num_bytes >= _CACHED_BYTES:
            yield some
            some, num_bytes = [], 0
    if some:
        yield some


# Between two flags of one width; a value that ends in a room is no JSON.
_SEPARATORS: Final = (b",", b", ", b".0,", b".0, ")


def _read_flags(text: bytes, is_float: bool) -> Array | None:
    """Return the values of a list of 0s and 1s of equal width, such as a mask; else None."""
    if text[0] not in _FLAGS or (end := text.find(b",")) < 0:
        return None
    width = end + 1 + (text[end + 1 : end + 2] == b" ")
    separator = text[1:width]
    if separator not in _SEPARATORS or (len(text) + width - end) % width:
        return None
    num = (len(text) + width - end) // width
    # The two digits differ only in the last bit; the separators are equal.
    pattern = np.frombuffer(b"0" + separator, np.uint8)
    is_fixed = np.full(width, 0xFF, np.uint8)
    is_fixed[0] = 0xFE
    found = np.frombuffer(text + separator[end - 1 :], np.uint8).reshape(num, width)
    if ((found ^ pattern) & is_fixed).any():
        return None
    return (found[:, 0] & 1).astype(np.float64 if is_float else np.int64)


def _convert_alike(cuts: Sequence[_Cut], *, is_float: bool) -> None:
    text = b",".join([cut.text for cut in cuts])
    if any(byte in text for byte in _FOREIGN):
        raise _ForeignError
    # A comma before and after each value; padded so that a word fits before the first one.
    words = np.frombuffer(b"0" * (_WORD_BYTES - 1) + b"," + text + b",", np.uint8)
    found = words[_WORD_BYTES - 1 :]
    commas = np.flatnonzero(found == _COMMA)
    _check_numbers(found, commas, is_float=is_float)
    values = None if is_float else _read_digits(words, commas)
    if values is None:
        values = _read_by_arrow(found, pa.float64() if is_float else pa.int64())
    if len(values) != len(commas) - 1:
        raise _ForeignError
    ends = np.searchsorted(commas, np.cumsum([1 + len(cut.text) for cut in cuts]))
    for cut, own in zip(cuts, np.split(values, ends[:-1]), strict=True):
        cut.values = own


def _read_by_arrow(found: Array, kind: pa.DataType) -> Array:
    """Return the values between commas. Raises: _ForeignError."""
    lines = np.subtract(found, (found == _COMMA) * np.uint8(_COMMA - _NEWLINE))[1:]
    options = pc.ConvertOptions(column_types={"value": kind}, null_values=[])
    try:
        return numbers(pc.read_csv(pa.py_buffer(lines), _READ, _PARSE, options).column(0))
    except pa.ArrowException as error:
        raise _ForeignError from error


def _read_digits(words: Array, commas: Array) -> Array | None:
    """Return values int64 if all have 1 to 8 digits, as token ids do; else None.

    The digits of each value are summed within one 8-byte word, for all values at once: 9 ns a
    value, against 34 ns by Arrow (2 cores, 2026-11-28).
    """
    found = words[_WORD_BYTES - 1 :]
    is_spaced = found[commas[:-1] + 1] == _SPACE
    lengths = np.diff(commas) - 1 - is_spaced
    num_digits = np.count_nonzero((found - np.uint8(_ZERO)) < 10)
    is_plain = num_digits + len(commas) + np.count_nonzero(is_spaced) == len(found)
    if not is_plain or lengths.min() < 1 or lengths.max() > _WORD_BYTES:
        return None
    # The word that ends where a value does; its last byte, the units, is the highest.
    each = np.ndarray(len(words) - _WORD_BYTES + 1, "<u8", buffer=words, strides=(1,))
    sums = each[commas[1:] - 1] ^ np.uint64(0x3030303030303030)
    unused = (8 * (_WORD_BYTES - lengths)).astype(np.uint64)
    sums = (sums >> unused) << unused
    # 10 and 1, then 100 and 1, then 10,000 and 1 of what is side by side.
    sums = (sums * np.uint64(10 << 8 | 1)) >> np.uint64(8)
    sums = ((sums & np.uint64(0x00FF00FF00FF00FF)) * np.uint64(100 << 16 | 1)) >> np.uint64(16)
    sums = ((sums & np.uint64(0x0000FFFF0000FFFF)) * np.uint64(10_000 << 32 | 1)) >> np.uint64(32)
    values: Array = sums.astype(np.int64)
    return values


def _check_numbers(found: Array, commas: Array, *, is_float: bool) -> None:
    """Refuse numbers that Arrow accepts for this type and JSON does not.

    These are `007`, `1.`, `.5`, and whole numbers among floats. Raises: _ForeignError.
    """
    is_digit = (found - np.uint8(_ZERO)) < 10
    before, after = is_digit[:-2], is_digit[2:]
    is_zero_first = (found[1:-1] == _ZERO) & after & ~before
    if is_float:
        is_point = found == _POINT
        if (is_point[1:-1] & ~(before & after)).any():
            raise _ForeignError
        is_zero_first &= ~is_point[:-2]
        is_marked = is_point
        if np.count_nonzero(is_point) != len(commas) - 1:
            is_marked = is_point | (found == _EXPONENTS[0]) | (found == _EXPONENTS[1])
        if not np.logical_or.reduceat(is_marked, commas[:-1]).all():
            raise _ForeignError
    # Only an exponent may begin with 0 before other digits: 1e-07.
    places = np.flatnonzero(is_zero_first)
    last = np.where(found[places] == _MINUS, found[places - 1], found[places])
    if not np.isin(last, _AFTER_E).all():
        raise _ForeignError
