"""For the tests of formats: TFRecord files, written by the rules of their encodings."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import google_crc32c
import pytest


class TfRecords:
    """Serialises protobuf messages and frames records."""

    def varint(self, value: int) -> bytes:
        value &= (1 << 64) - 1
        out = bytearray()
        while value >= 0x80:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        return bytes([*out, value])

    def field(self, number: int, content: bytes) -> bytes:
        return self.varint(number << 3 | 2) + self.varint(len(content)) + content

    def feature(self, values: Sequence[Any], *, packed: bool = True) -> bytes:
        """Serialise a tf.train.Feature of bytes, floats or integers."""
        if values and isinstance(values[0], bytes):
            return self.field(1, b"".join(self.field(1, one) for one in values))
        if values and isinstance(values[0], float):
            floats = [struct.pack("<f", one) for one in values]
            body = b"".join(b"\x0d" + one for one in floats)
            return self.field(2, self.field(1, b"".join(floats)) if packed else body)
        integers = [self.varint(one) for one in values]
        body = b"".join(b"\x08" + one for one in integers)
        return self.field(3, self.field(1, b"".join(integers)) if packed else body)

    def example(self, features: Mapping[str, bytes]) -> bytes:
        """Serialise a tf.train.Example of features that are serialised already."""
        entries = [self.field(1, k.encode()) + self.field(2, v) for k, v in features.items()]
        return self.field(1, b"".join(self.field(1, one) for one in entries))

    def masked(self, data: bytes) -> bytes:
        crc = google_crc32c.value(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    def frame(self, data: bytes) -> bytes:
        """Return one record of a file."""
        length = struct.pack("<Q", len(data))
        return length + self.masked(length) + data + self.masked(data)


@pytest.fixture(scope="session")
def tf() -> TfRecords:
    return TfRecords()
