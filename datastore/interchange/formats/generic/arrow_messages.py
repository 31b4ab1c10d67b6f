"""Arrow IPC messages: what they say that they unpack to, known before anything is unpacked."""

from __future__ import annotations

import io
import struct
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.interchange.sources.compression import refuse_bomb
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import unreadable_error

_MAGIC: Final = b"ARROW1\0\0"
# Slots of the flatbuffers in Arrow's Message.fbs: Message.header, RecordBatch.length,
# .buffers and .compression; DictionaryBatch.data.
_HEADER_TYPE, _HEADER = 1, 2
_LENGTH, _BUFFERS, _COMPRESSION = 0, 2, 3
_DICTIONARY_DATA: Final = 1
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3


class BoundedStream(io.RawIOBase):
    """A file's bytes for reading in order; never asked for more than are left of it.

    Python allocates what a reader asks for, which is what the messages of a file declare.
    """

    def __init__(self, file: SourceFile) -> None:
        self._stream = file.open()
        self._left = file.num_bytes

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> Any:
        wanted = self._left if size is None or size < 0 else min(size, self._left)
        data = self._stream.read(wanted)
        self._left -= len(data)
        return data

    def close(self) -> None:
        self._stream.close()
        super().close()


def refuse_packed_bomb(file: SourceFile) -> None:
    """Refuse an Arrow IPC file or stream whose packed buffers, or bare rows, declare too much.

    Reads the messages' headers and the first bytes of each packed buffer, before anything is
    unpacked. Raises: SourceInvalidError.
    """
    file.check_unchanged()
    try:
        declared = _count_unpacked_bytes(file)
    except (pa.ArrowException, OSError, ValueError, IndexError, struct.error) as error:
        raise unreadable_error(file.name, error) from error
    refuse_bomb(file.name, declared, file.num_bytes)


def _count_unpacked_bytes(file: SourceFile) -> int:
    """Add up what packed buffers say that they unpack to."""
    total = 0
    with BoundedStream(file) as stream:
        if file.head(len(_MAGIC)) == _MAGIC:
            stream.read(len(_MAGIC))
        for message in pa.ipc.MessageReader.open_stream(stream):
            if message.body is not None:
                total += _message_bytes(message.metadata.to_pybytes(), message.body)
    return total


def _message_bytes(raw: bytes, body: pa.Buffer) -> int:
    root = struct.unpack_from("<I", raw, 0)[0]
    kind_at, header_at = _field(raw, root, _HEADER_TYPE), _field(raw, root, _HEADER)
    if kind_at is None or header_at is None:
        return 0
    batch = header_at + struct.unpack_from("<I", raw, header_at)[0]
    if raw[kind_at] == _DICTIONARY_BATCH:
        data_at = _field(raw, batch, _DICTIONARY_DATA)
        if data_at is None:
            return 0
        batch = data_at + struct.unpack_from("<I", raw, data_at)[0]
    elif raw[kind_at] != _RECORD_BATCH:
        return 0
    length_at = _field(raw, batch, _LENGTH)
    # A row takes a bit at least; columns of nulls alone are stored as nothing.
    total = 0 if length_at is None else struct.unpack_from("<q", raw, length_at)[0] // 8
    buffers_at = _field(raw, batch, _BUFFERS)
    if buffers_at is None or _field(raw, batch, _COMPRESSION) is None:
        return int(total)
    vector = buffers_at + struct.unpack_from("<I", raw, buffers_at)[0]
    for i in range(struct.unpack_from("<I", raw, vector)[0]):
        offset, length = struct.unpack_from("<qq", raw, vector + 4 + 16 * i)
        if length >= 8:
            # Packed buffers begin with their unpacked length; -1 says that this one is not packed.
            total += max(struct.unpack_from("<q", body, offset)[0], 0)
    return int(total)


def _field(raw: bytes, table: int, slot: int) -> int | None:
    """Return where a flatbuffer table keeps a field, or None where it has the default."""
    vtable = table - struct.unpack_from("<i", raw, table)[0]
    at = 4 + 2 * slot
    if vtable < 0 or at >= struct.unpack_from("<H", raw, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", raw, vtable + at)[0]
    return table + offset if offset else None
