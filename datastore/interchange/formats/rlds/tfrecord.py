"""TFRecord files, and the tf.train.Example in each record; read without TensorFlow or protobuf.

A record is its length (uint64), a masked CRC-32C of the length, the data, and a masked CRC-32C of
the data (tensorflow/core/lib/io/record_writer.h). An Example is a protobuf message of named lists
of bytes, floats or integers (tensorflow/core/example/feature.proto).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ExtraMissingError, SourceInvalidError
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import unreadable_error

Feature = list[bytes] | Array
"""The values of one feature: a list of bytes, float32 [n] or int64 [n]."""

_HEADER_BYTES: Final = 12
_CRC_BYTES: Final = 4
# A declared length is read in pieces: one that is not true meets the file's end, not the memory's.
_PIECE_BYTES: Final = 16 << 20
_MASK_DELTA: Final = 0xA282EAD8
_CRC_MAX: Final = 0xFFFFFFFF

# Wire types: what follows a field's tag.
_VARINT: Final = 0
_FIXED64: Final = 1
_LENGTH: Final = 2
_FIXED32: Final = 5
_MAX_VARINT_BYTES: Final = 10
# What a float of a list that is not packed begins with: field 1, four bytes.
_FLOAT_TAG: Final = 1 << 3 | _FIXED32
# Fields of the messages Feature, and of a map's entry.
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_KEY, _VALUE = 1, 2


class _TornRecordError(Exception):
    """What is wrong with a record; becomes SourceInvalidError where file and number are known."""


def records(file: SourceFile) -> Iterator[bytes]:
    """Read the records' data in order, both checksums compared.

    Memory holds one record. Raises: SourceInvalidError with the record's number (from 0) where a
    file is torn or a checksum differs, ExtraMissingError without google-crc32c.
    """
    crc32c = _crc32c()
    file.check_unchanged()
    number = 0
    try:
        with file.open() as stream:
            while header := stream.read(_HEADER_BYTES):
                yield _record(stream, header, crc32c)
                number += 1
    except _TornRecordError as error:
        raise torn_record_error(file, number, str(error)) from error
    except (OSError, EOFError) as error:
        raise unreadable_error(file.name, error) from error


def parse_example(record: bytes, file: SourceFile, number: int) -> dict[str, Feature]:
    """Return the features of a serialized tf.train.Example.

    Floats that are packed are views of the record. A feature that is set without values is an empty
    list. Raises: SourceInvalidError naming file and record.
    """
    try:
        return _features(memoryview(record))
    except (_TornRecordError, UnicodeDecodeError) as error:
        found = f"data that is not a tf.train.Example ({error})"
        raise torn_record_error(file, number, found) from error


def torn_record_error(file: SourceFile, number: int, found: str) -> SourceInvalidError:
    """Return the error for a record that does not hold what it should."""
    return SourceInvalidError(
        f"{file.name} record {number}: found {found}, expected a whole TFRecord of one episode. "
        "The file may be damaged: copy or write it again, or leave it out."
    )


def _crc32c() -> Callable[[bytes], int]:
    try:
        import google_crc32c
    except ImportError as error:
        raise ExtraMissingError(
            "TFRecord files: google-crc32c is not installed, expected it for their checksums. "
            "pip install 'replaylake[formats]'"
        ) from error
    value: Callable[[bytes], int] = google_crc32c.value
    return value


def _record(stream: BinaryIO, header: bytes, crc32c: Callable[[bytes], int]) -> bytes:
    if len(header) < _HEADER_BYTES:
        raise _TornRecordError(f"{len(header)} bytes of a header of {_HEADER_BYTES}")
    length, length_crc = struct.unpack("<QI", header)
    if mask_crc(crc32c(header[:8])) != length_crc:
        raise _TornRecordError("a length whose checksum differs")
    data = _read(stream, length)
    if len(data) < length:
        raise _TornRecordError(f"{len(data):,} of {length:,} bytes")
    (data_crc,) = struct.unpack("<I", _read(stream, _CRC_BYTES).ljust(_CRC_BYTES, b"\0"))
    if mask_crc(crc32c(data)) != data_crc:
        raise _TornRecordError("data whose checksum differs")
    return data


def _read(stream: BinaryIO, length: int) -> bytes:
    """Read `length` bytes, or fewer where the stream ends before."""
    pieces = []
    while length and (piece := stream.read(min(length, _PIECE_BYTES))):
        pieces.append(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def mask_crc(crc: int) -> int:
    """Return a CRC-32C as TFRecords store it: a checksum of data that holds checksums is poor."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & _CRC_MAX


def _features(example: memoryview) -> dict[str, Feature]:
    result: dict[str, Feature] = {}
    for features in _messages(example, 1):
        for entry in _messages(features, 1):
            key, value = "", memoryview(b"")
            for field, wire, content in _fields(entry):
                if wire != _LENGTH:
                    continue
                if field == _KEY:
                    key = bytes(content).decode()
                elif field == _VALUE:
                    value = content
            result[key] = _feature(value)
    return result


def _feature(message: memoryview) -> Feature:
    feature: Feature = []
    for kind, wire, content in _fields(message):
        # The lists are alternatives: of several, protobuf takes the last.
        if wire != _LENGTH:
            continue
        if kind == _BYTES_LIST:
            feature = [bytes(part) for part in _messages(content, 1)]
        elif kind == _FLOAT_LIST:
            feature = _floats(content)
        elif kind == _INT64_LIST:
            feature = _integers(content)
    return feature


def _floats(message: memoryview) -> NDArray[np.float32]:
    tags = np.frombuffer(message, np.uint8)[:: 1 + 4]
    if len(message) % 5 == 0 and len(tags) and (tags == _FLOAT_TAG).all():
        rows = np.frombuffer(message, np.uint8).reshape(-1, 5)
        return np.ascontiguousarray(rows[:, 1:]).view("<f4").reshape(-1)
    parts = []
    for field, wire, content in _fields(message):
        if field == 1 and wire in (_LENGTH, _FIXED32):
            if len(content) % 4:
                raise _TornRecordError(f"{len(content)} bytes of packed floats of 4 each")
            parts.append(np.frombuffer(content, "<f4"))
    return _concatenate(parts, np.float32)


def _integers(message: memoryview) -> NDArray[np.int64]:
    parts = []
    for field, wire, content in _fields(message):
        if field == 1 and wire in (_LENGTH, _VARINT):
            parts.append(_varints(np.frombuffer(content, np.uint8)))
    return _concatenate(parts, np.int64)


def _concatenate(parts: list[Any], dtype: Any) -> Array:
    if len(parts) == 1:
        return np.asarray(parts[0], dtype)
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)


def _varints(content: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Decode packed varints: seven bits a byte, the lowest first, the last byte below 128."""
    is_last = content < 0x80
    if is_last.all():
        return content.astype(np.int64)
    ends = np.flatnonzero(is_last) + 1
    if not is_last[-1]:
        raise _TornRecordError("packed integers that end inside one")
    starts = np.concatenate([[0], ends[:-1]])
    lengths = ends - starts
    if lengths.max() > _MAX_VARINT_BYTES:
        raise _TornRecordError(f"an integer of more than {_MAX_VARINT_BYTES} bytes")
    shifts = 7 * (np.arange(len(content)) - np.repeat(starts, lengths))
    bits = (content & 0x7F).astype(np.uint64) << shifts.astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts).view(np.int64)


def _messages(message: memoryview, number: int) -> Iterator[memoryview]:
    for field, wire, content in _fields(message):
        if field == number and wire == _LENGTH:
            yield content


def _fields(message: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yield (field, wire type, content) of a message; a varint's content is its bytes."""
    at, end = 0, len(message)
    while at < end:
        tag, start = _varint(message, at)
        field, wire = tag >> 3, tag & 7
        if wire == _LENGTH:
            length, start = _varint(message, start)
            at = start + length
        elif wire == _VARINT:
            at = _varint(message, start)[1]
        elif wire in (_FIXED32, _FIXED64):
            at = start + (4 if wire == _FIXED32 else 8)
        else:
            raise _TornRecordError(f"wire type {wire}")
        if at > end:
            raise _TornRecordError(
                f"a field of {at - start:,} bytes where {end - start:,} are left"
            )
        yield field, wire, message[start:at]


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return the integer at `at`, and where the next byte is."""
    value = 0
    for position, byte in enumerate(message[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value, at + position + 1
    raise _TornRecordError("an integer without an end")
