"""Seals: checksums inside files that no commit, registry entry or name has the hash of.

    JSON       the last member of the object: "checksum": "<sha256>", taken of what precedes it
    Parquet    in the footer: replaylake.sha256, taken with zeros in the place of the digits
    others     a last line `sha256 <digits>`, taken of what precedes it

A file without a seal was written by an earlier release and is read as it is. A flipped bit of the
seal itself leaves a file that is refused, or one whose content is whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

_DIGITS: Final = 64
_CHECKSUM: Final = "checksum"
_JSON_SEAL: Final = re.compile(rb', "checksum": "([0-9a-f]{64})"}\Z')
_LINE_SEAL: Final = re.compile(rb"\nsha256 ([0-9a-f]{64})\n\Z")
_LINE_BYTES: Final = len("\nsha256 ") + _DIGITS + 1
_SHA256_KEY: Final = "replaylake.sha256"
# Thrift's compact form of the key, then of a text of 64 bytes, of which only the length is here.
_SHA256_HEAD: Final = _SHA256_KEY.encode() + bytes([0x18, _DIGITS])


class BrokenSealError(ValueError):
    """A file is not what was written; the message says how that is known."""


def seal_json(body: Mapping[str, Any]) -> bytes:
    """Return a JSON object of at least one member, with its checksum. Raises: as json.dumps."""
    text = json.dumps(body).encode()[:-1]
    return b'%b, "checksum": "%b"}' % (text, hashlib.sha256(text).hexdigest().encode())


def read_json(data: bytes) -> Any:
    """Return the JSON value of a file, without its checksum. Raises: ValueError, RecursionError."""
    body = json.loads(data)
    if match := _JSON_SEAL.search(data):
        _compare(hashlib.sha256(data[: match.start()]).hexdigest(), match.group(1))
    if isinstance(body, dict):
        body.pop(_CHECKSUM, None)
    return body


def seal_bytes(data: bytes | memoryview) -> bytes:
    """Return bytes with a line that has their checksum."""
    return b"".join([data, b"\nsha256 ", hashlib.sha256(data).hexdigest().encode(), b"\n"])


def read_bytes(data: bytes, *, is_required: bool = False) -> bytes:
    """Return bytes without the line of their checksum.

    is_required: whether bytes without that line are refused. Raises: BrokenSealError.
    """
    match = _LINE_SEAL.search(data, max(0, len(data) - _LINE_BYTES))
    if match is None:
        if is_required:
            raise BrokenSealError("its last line has no sha256")
        return data
    content = data[: match.start()]
    _compare(hashlib.sha256(content).hexdigest(), match.group(1))
    return content


def add_parquet_seal(writer: pq.ParquetWriter, metadata: Mapping[bytes, str]) -> None:
    """Add metadata to the footer, and the place of the checksum. Then close, and `fill` it."""
    writer.add_key_value_metadata(dict(metadata) | {_SHA256_KEY.encode(): "0" * _DIGITS})


def fill_parquet_seal(data: pa.Buffer) -> memoryview:
    """Return a Parquet file to which `add_parquet_seal` was applied, with its checksum."""
    sealed = bytearray(data)
    start = sealed.rindex(_SHA256_HEAD) + len(_SHA256_HEAD)
    sealed[start : start + _DIGITS] = hashlib.sha256(sealed).hexdigest().encode()
    return memoryview(sealed)


def check_parquet_seal(data: bytes, mark: bytes) -> None:
    """Compare a Parquet file with the checksum in it; files of other engines have none.

    mark: another key of the footer, which only files with a checksum have. Raises: BrokenSealError.
    """
    start = data.rfind(_SHA256_HEAD) + len(_SHA256_HEAD)
    if start >= len(_SHA256_HEAD):
        digest = hashlib.sha256(data[:start])
        digest.update(b"0" * _DIGITS)
        digest.update(data[start + _DIGITS :])
        if digest.hexdigest().encode() != data[start : start + _DIGITS]:
            raise BrokenSealError("its sha256 is not the one in its footer")
    elif mark in data:
        raise BrokenSealError("its footer has no sha256 any more")


def _compare(found: str, expected: bytes) -> None:
    if found.encode() != expected:
        raise BrokenSealError(
            f"its sha256 is {found[:16]}, and {expected[:16].decode()} was written with it"
        )
