"""Event files: the scalars that TensorBoard draws, written without it.

A file is TFRecords, each a protobuf message Event (tensorflow/core/util/event.proto); both are a
few lines for scalars, and never change. The libraries that write them take a second to import
(tensorboardX 2.6.5, which imports torch), or bring a web server.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

from replaylake.datastore.interchange.formats.rlds.tfrecord import masked

# Fields of the messages, each as its tag: number << 3 | wire type.
_WALL_TIME: Final = bytes([1 << 3 | 1])
_STEP: Final = bytes([2 << 3])
_FILE_VERSION: Final = bytes([3 << 3 | 2])
_SUMMARY: Final = bytes([5 << 3 | 2])
_SESSION_LOG: Final = bytes([7 << 3 | 2])
_VALUE: Final = bytes([1 << 3 | 2])  # of Summary
_TAG: Final = bytes([1 << 3 | 2])  # of Summary.Value
_SIMPLE_VALUE: Final = bytes([2 << 3 | 5])
_STARTED: Final = bytes([1 << 3, 1])  # SessionLog with status START
_POLYNOMIAL: Final = 0x82F63B78  # Castagnoli's, reflected


class EventFile:
    """One process's event file in a folder, which may have others; TensorBoard reads them all."""

    def __init__(self, folder: Path, *, resumed_after: int | None = None) -> None:
        """Begin a file. With `resumed_after`, TensorBoard forgets what others say of later updates.

        Raises: OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        # The name that TensorBoard looks for; it reads a folder's files in order of their names.
        name = f"events.out.tfevents.{time.time_ns() // 10**9}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        self._file = self.path.open("ab")
        self._write(_FILE_VERSION + _sized(b"brain.Event:2"))
        if resumed_after is not None:
            self._write(_STEP + _varint(resumed_after + 1) + _SESSION_LOG + _sized(_STARTED))

    def __enter__(self) -> EventFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Append scalars, float32 in the file; TensorBoard sees them at once. Raises: OSError."""
        summary = b"".join(_VALUE + _sized(_scalar(name, values[name])) for name in values)
        self._write(_STEP + _varint(step) + _SUMMARY + _sized(summary))

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()

    def _write(self, body: bytes) -> None:
        event = _WALL_TIME + struct.pack("<d", time.time()) + body
        length = struct.pack("<Q", len(event))
        self._file.write(length + _crc(length) + event + _crc(event))
        self._file.flush()


def _scalar(name: str, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, value))
    return _TAG + _sized(name.encode()) + _SIMPLE_VALUE + packed


def _sized(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Return an integer of 0 or more: seven bits a byte, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return struct.pack("<I", masked(crc ^ 0xFFFFFFFF))


def _crc_table() -> Iterator[int]:
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        yield value


_CRC_TABLE: Final = tuple(_crc_table())
